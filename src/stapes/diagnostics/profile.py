"""Profile a piece of work in this process: operators and kernels by time, fraction of peak, memory, allocator.

``torch.profiler`` records all threads, in windows of a second or less: events are summed up between windows, so that
memory stays bounded however long the work runs; what happens meanwhile is not recorded, and the report says how much
was. Memory is sampled all the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from stapes.devices import machine
from stapes.devices.backend import resolve
from stapes.devices.chips import Chip
from stapes.diagnostics.memory_curve import MemoryCurve, MemorySample
from stapes.diagnostics.operators import Activity, Kernel, Operator
from stapes.errors import OutputError, StapesError

_FIRST_WINDOW, _SHORTEST_WINDOW, _LONGEST_WINDOW = 0.1, 0.02, 1.0
_MOST_EVENTS = 50_000
"""What a window should hold: about 50 MB, and a fraction of a second to sum up."""
_LISTED = 40


@dataclass(frozen=True, slots=True)
class Achieved:
    """What one operator reached. ``fraction`` of the chip's dense peak for its dtype; None where that is unknown."""

    operator: Operator
    tflops: float | None
    fraction: float | None


@dataclass(slots=True)
class Profile:
    """The result of one profiled command."""

    command: list[str]
    exit_code: int
    wall_seconds: float
    activity: Activity
    memory: list[MemorySample]
    device: str
    chip: Chip | None
    machine: dict[str, Any]
    trace: Path | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether any kernel ran on a GPU."""
        return bool(self.activity.kernels)

    def operators(self, count: int = _LISTED) -> list[Achieved]:
        """Those that took most time: of the GPU where kernels ran, else of the CPU."""
        ordered = sorted(self.activity.operators.values(), key=lambda each: -self._seconds(each))
        return [self._achieved(each) for each in ordered[:count] if self._seconds(each) > 0]

    def kernels(self, count: int = _LISTED) -> list[Kernel]:
        """Those that took most time."""
        return sorted(self.activity.kernels.values(), key=lambda each: -each.seconds)[:count]

    def overall(self) -> dict[str, Achieved]:
        """By dtype, all products and convolutions together."""
        sums: dict[str, Operator] = {}
        for each in self.activity.operators.values():
            if each.flops and each.dtype:
                found = sums.setdefault(each.dtype, Operator(f"all in {each.dtype}", dtype=each.dtype))
                found.calls += each.calls
                found.flops += each.flops
                found.self_seconds += each.self_seconds
                found.device_seconds += each.device_seconds
        return {dtype: self._achieved(each) for dtype, each in sorted(sums.items())}

    def summary(self) -> dict[str, Any]:
        """The figures as JSON: seconds, bytes, fractions; null is unknown."""
        activity, on_gpu = self.activity, self.on_gpu
        recorded = activity.recorded_seconds
        peak = {
            name: max((value for each in self.memory if (value := getattr(each, name)) is not None), default=None)
            for name in ("resident", "allocated", "reserved")
        }
        last = self.memory[-1] if self.memory else MemorySample(0.0, None)
        return {
            "command": self.command,
            "exit_code": self.exit_code,
            "wall_seconds": self.wall_seconds,
            "recorded_seconds": recorded,
            "device": self.device,
            "machine": self.machine,
            "peak_tflops": dict(self.chip.peak_tflops) if self.chip else {},
            "device_busy_fraction": activity.device_busy_seconds / recorded if on_gpu and recorded else None,
            "kernel_launches": activity.launches,
            "graph_device_seconds": activity.unowned_device_seconds,
            "allocator": {
                "tensors": sum(window.allocations for window in activity.windows),
                "blocks": last.allocations,
                "driver_segments": last.segments,
                "driver_calls": activity.runtime_allocator_calls,
                "driver_seconds": activity.runtime_allocator_seconds,
            },
            "peak_bytes": peak,
            "overall": {dtype: _figures(each) for dtype, each in self.overall().items()},
            "operators": [_figures(each) for each in self.operators()],
            "kernels": [asdict(each) for each in self.kernels()],
            "trace": str(self.trace) if self.trace else None,
        }

    def _seconds(self, operator: Operator) -> float:
        return operator.device_seconds if self.on_gpu else operator.self_seconds

    def _achieved(self, operator: Operator) -> Achieved:
        seconds = self._seconds(operator)
        if not operator.flops or not seconds:
            return Achieved(operator, None, None)
        tflops = operator.flops / seconds / 1e12
        peak = self.chip.peak_tflops.get(operator.dtype or "") if self.chip and self.on_gpu else None
        return Achieved(operator, tflops, tflops / peak if peak else None)


def _figures(achieved: Achieved) -> dict[str, Any]:
    return {**asdict(achieved.operator), "tflops": achieved.tflops, "fraction_of_peak": achieved.fraction}


def profile(
    run: Callable[[], int],
    command: Sequence[str],
    *,
    seconds: float = 30.0,
    after: float = 0.0,
    trace: Path | None = None,
) -> Profile:
    """Call ``run`` in this thread and record what it does. Never lets the recording decide how ``run`` ends.

    seconds: how much is recorded in all. after: seconds of the work that pass first. trace: a file for the first
    window as a Chrome trace. Raises OutputError where that cannot be written, StapesError where this PyTorch cannot
    record.
    """
    device = resolve("auto")  # first of all: it sets what AMD's libraries read once, when a GPU is first used
    recorder = _Recorder(seconds, after, trace)
    curve = MemoryCurve()
    with recorder.captures_excluded():
        curve.start()
        recorder.start()
        begun = time.monotonic()
        try:
            code = run()
        finally:
            wall = time.monotonic() - begun
            memory = curve.stop()
            recorder.stop()
    if recorder.error is not None:
        raise recorder.error
    if not recorder.activity.kernels:
        device = resolve("cpu")
    return Profile(
        command=list(command),
        exit_code=code,
        wall_seconds=wall,
        activity=recorder.activity,
        memory=memory,
        device=device.name,
        chip=device.chip,
        machine=machine.facts(),
        trace=trace if trace is not None and recorder.activity.windows else None,
    )


class _Recorder:
    """Windows of ``torch.profiler``, opened and closed from a thread of its own while the work runs in others."""

    def __init__(self, seconds: float, after: float, trace: Path | None) -> None:
        self.activity = Activity()
        self.error: StapesError | None = None
        self._seconds, self._after, self._trace = seconds, after, trace
        self._window = _FIRST_WINDOW
        self._over = threading.Event()
        self._quiet = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="stapes-profiler", daemon=True)

    def start(self) -> None:
        """Begin. The library of the profiler wants to be started by the main thread once."""
        with suppress(RuntimeError), self._quiet:
            first = _profiler()
            first.start()
            first.stop()
        self._thread.start()

    def stop(self) -> None:
        """End the window that is open and wait for its sums."""
        self._over.set()
        self._thread.join()

    @contextmanager
    def captures_excluded(self) -> Iterator[None]:
        """Let captures of graphs, and starts and stops of the profiler, exclude each other while the block runs.

        A stop waits for the whole device, which is forbidden while any of its streams is captured, and would spoil the
        capture.
        """
        graph: Any = torch.cuda.graph
        enter, leave = graph.__enter__, graph.__exit__

        def locked_enter(capture: Any) -> Any:
            self._quiet.acquire()
            try:
                return enter(capture)
            except BaseException:
                self._quiet.release()
                raise

        def locked_leave(capture: Any, *error: Any) -> Any:
            try:
                return leave(capture, *error)
            finally:
                self._quiet.release()

        graph.__enter__, graph.__exit__ = locked_enter, locked_leave
        try:
            yield
        finally:
            graph.__enter__, graph.__exit__ = enter, leave

    def _run(self) -> None:
        begun = time.monotonic()
        if self._over.wait(self._after):
            return
        try:
            while not self._over.is_set() and (left := self._seconds - self.activity.recorded_seconds) > 0.001:
                self._record(begun, min(self._window, left))
        except StapesError as error:
            self.error = error
        except RuntimeError as error:
            self.error = StapesError(
                f"this PyTorch cannot profile ({' '.join(str(error).split())}): close other profilers, or use --tool"
            )

    def _record(self, begun: float, length: float) -> None:
        profiler = _profiler()
        with self._quiet:
            profiler.start()
        start = time.monotonic()
        self._over.wait(length)
        with self._quiet:
            took = time.monotonic() - start
            profiler.stop()
        if self._trace is not None and not self.activity.windows:
            _export(profiler, self._trace)
        inner: Any = profiler.profiler
        events = inner.kineto_results.events()
        fitting = took * _MOST_EVENTS / max(1, len(events))
        # A quiet stretch tells little about the next one.
        self._window = min(max(fitting, _SHORTEST_WINDOW), 2 * self._window, _LONGEST_WINDOW)
        self.activity.add(events, start - begun, took)


def _profiler() -> torch.profiler.profile:
    from torch._C._profiler import _ExperimentalConfig

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        record_shapes=True,
        # Work runs in threads that are there before the window opens.
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb"):
            pass
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place for --trace") from error
