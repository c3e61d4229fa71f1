"""Kernels against the memory they move: time, bytes per second, and what part that is of a plain copy's.

Times are those between two events on the GPU. Before each, a buffer larger than any cache is written, so that inputs
come from memory, and so that launches wait for the GPU and not the GPU for them. Kernel and reference take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor

import stapes
from stapes.benchmarks.kernel_cases import KernelCase, kernel_cases
from stapes.benchmarks.records import CaseRow, Ratio, Spread, SystemRow, Weights
from stapes.benchmarks.run import Run
from stapes.devices.backend import Device, resolve
from stapes.errors import DeviceError, UsageError
from stapes.kernels.jit import has_triton

_FLUSH_BYTES = 1 << 30
_COPY_BYTES = 1 << 30
_WARM_UP = 3


def choose_gpu(name: str) -> Device:
    """The GPU to measure on. Raises DeviceError where it is none, or without Triton."""
    device = resolve(name)
    if device.torch.type != "cuda":
        raise DeviceError("kernels are timed on a GPU, and PyTorch sees none here; `stapes kernels compile` needs none")
    if not has_triton():
        raise DeviceError("there are no kernels to time: Triton is not installed; `pip install triton` brings it")
    return device


class KernelRun(Run):
    """The run and its file. A row's case has ``problem`` where a kernel does not run or its result is wrong."""

    def __init__(
        self,
        device: Device,
        *,
        kernels: Sequence[str] = (),
        windows: int = 64,
        sweep: bool = False,
        rounds: int = 30,
        command: Sequence[str],
        quick: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(
            "kernels",
            (),
            rounds=rounds,
            weights=Weights(name="none", kind="none"),
            audio={},
            command=command,
            quick=quick,
            log=log,
        )
        cases = kernel_cases(device.torch, windows, sweep)
        self._chosen = [case for case in cases if not kernels or any(part in case.kernel for part in kernels)]
        if not self._chosen:
            names = dict.fromkeys(case.kernel for case in kernel_cases(device.torch))
            raise UsageError(f"--kernels {','.join(kernels)} names no kernel: there are {'; '.join(names)}")
        self._device = device

    def rows(self) -> Iterator[CaseRow]:
        """Measure; a row for each kernel as soon as it is there."""
        for note in self.result.notes:
            self._log(note)
        with torch.cuda.device(self._device.torch), torch.inference_mode():
            copy = copy_bandwidth(self._device.torch, self._rounds)
            note = f"a copy of 1 GiB moves {copy / 1e9:.0f} GB/s"
            self.result.notes.append(note)
            self._log(note)
            for case in self._chosen:
                row = self._measure(case, copy)
                figures = row.ours.figures
                self._log(
                    f"{case.kernel}, {case.shape} {case.options}".rstrip()
                    + f": {1e6 * row.ours.wall_seconds.median:.1f} us, {figures['gb_s'] or 0:.0f} GB/s"
                    + (f": {row.case['problem']}" if row.case["problem"] else "")
                )
                self.result.rows.append(row)
                yield row

    def _measure(self, case: KernelCase, copy: float) -> CaseRow:
        problem, ours, plain, difference = None, [0.0], [0.0], None
        moved = 0
        try:
            prepared = case.prepare()
            moved = prepared.bytes
            difference = greatest_difference(prepared.run(), prepared.reference())
            if not difference <= prepared.tolerance:
                problem = f"differs by {difference:.2g} from the reference, {prepared.tolerance:g} is right"
            ours, plain = time_in_turn([prepared.run, prepared.reference], self._device.torch, self._rounds)
        except torch.AcceleratorError:  # the GPU answers nothing more in this process
            raise
        except Exception as error:  # Triton's errors have no common class; the next kernel may run
            problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        torch.cuda.empty_cache()
        spread = Spread.of(ours)
        speed = moved / spread.median if spread.median else None
        return CaseRow(
            case={
                "kernel": case.kernel,
                "shape": case.shape,
                "device": "cuda",
                "device_name": self._device.name,
                "bytes": moved,
                "problem": problem,
            },
            systems=[
                SystemRow(
                    system="stapes",
                    version=stapes.__version__,
                    options=case.options,
                    wall_seconds=spread,
                    figures={
                        "gb_s": speed and speed / 1e9,
                        "of_copy": speed and speed / copy,
                        # A number that is none has no place in JSON; the problem tells of it.
                        "greatest_difference": difference if difference is not None and isfinite(difference) else None,
                    },
                ),
                SystemRow(system="torch", version=torch.__version__, wall_seconds=Spread.of(plain)),
            ],
            ratios=[
                Ratio(
                    peer="torch",
                    place=1,
                    times_as_fast=Spread.of([b / a if a else 0.0 for a, b in zip(ours, plain, strict=True)]),
                )
            ],
        )


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes per second, read and written, of PyTorch's copy of 1 GiB."""
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    (seconds,) = time_in_turn([lambda: target.copy_(source)], device, rounds)
    return 2 * _COPY_BYTES / Spread.of(seconds).median


def time_in_turn(works: Sequence[Callable[[], Tensor]], device: torch.device, rounds: int) -> list[list[float]]:
    """Seconds on the GPU of each work in each round."""
    flush = torch.empty(_FLUSH_BYTES // 4, device=device)
    for work in works:
        for _ in range(_WARM_UP):
            work()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
    for _ in range(rounds):
        for work, kept in zip(works, events, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            work()
            end.record()
            kept.append((start, end))
    torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) / 1e3 for start, end in kept] for kept in events]


def greatest_difference(found: Tensor, wanted: Tensor) -> float:
    """Between any two numbers; NaN or infinite where one is."""
    return (found.float() - wanted.float()).abs().max().item()
