"""Profiles: what the profiler's events are summed up to, what reaches the page, and that the work is left alone."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stapes.devices.chips import Chip
from stapes.diagnostics import external_profilers, profile_page
from stapes.diagnostics import profile as profiling
from stapes.diagnostics.memory_curve import MemoryCurve, MemorySample
from stapes.diagnostics.operators import Activity, operator_flops
from stapes.diagnostics.profile import Profile, profile
from stapes.errors import OutputError, StapesError, UsageError

MS = 1_000_000


@dataclass
class Event:
    """One of the profiler's events."""

    named: str
    start: int
    length: int
    device: str = "CPU"
    thread: int = 1
    correlation: int = 0
    linked: int = 0
    of: list[list[int]] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    concrete: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        values = {
            "name": self.named,
            "start_ns": self.start,
            "duration_ns": self.length,
            "device_type": SimpleNamespace(name=self.device),
            "start_thread_id": self.thread,
            "correlation_id": self.correlation,
            "linked_correlation_id": self.linked,
            "shapes": self.of,
            "dtypes": self.types,
            "concrete_inputs": self.concrete,
            "is_async": False,
            "is_user_annotation": False,
        }
        if name not in values:
            raise AttributeError(name)
        return lambda: values[name]


def gpu_activity() -> Activity:
    half = ["c10::Half", "c10::Half"]
    activity = Activity()
    activity.add(
        [
            Event("aten::linear", 0, 10 * MS, correlation=1),
            Event("aten::mm", 2 * MS, 6 * MS, correlation=2, of=[[1000, 500], [500, 100]], types=half),
            Event("cudaLaunchKernel", 3 * MS, MS, thread=99),
            Event("cudaMalloc", 5 * MS, 2 * MS, thread=99),
            Event("aten::empty", 20 * MS, MS, thread=2, correlation=3),
            Event("gemm_kernel", 30 * MS, 4 * MS, device="CUDA", linked=2),
            Event("add_kernel", 32 * MS, 4 * MS, device="CUDA", linked=77),  # overlaps; its operator is not here
            Event("aten::mm", 90 * MS, 2**64 - 1, correlation=9, of=[[9, 9], [9, 9]], types=half),  # still open
        ],
        start=0.0,
        seconds=0.1,
    )
    return activity


def test_self_times_kernels_launches_and_allocator_calls() -> None:
    activity = gpu_activity()
    (mm,) = [each for each in activity.operators.values() if each.name == "aten::mm"]
    assert (mm.calls, mm.dtype, mm.shapes, mm.flops) == (1, "fp16", "1000×500 500×100", 2 * 1000 * 500 * 100)
    assert mm.self_seconds == pytest.approx(0.006)
    assert mm.device_seconds == pytest.approx(0.004)
    assert activity.operators["aten::linear", ""].self_seconds == pytest.approx(0.004)
    assert activity.device_busy_seconds == pytest.approx(0.006)  # 30 to 36 ms, not 8
    assert activity.unowned_device_seconds == pytest.approx(0.004)
    assert (activity.launches, activity.runtime_allocator_calls) == (1, 1)
    assert activity.runtime_allocator_seconds == pytest.approx(0.002)
    assert activity.windows[0].allocations == 1


def made_profile(activity: Activity, **changes: Any) -> Profile:
    chip = Chip("sm_90", ("Made Up 1",), 32, None, "tensor core", peak_tflops={"fp16": 0.1}, source="a <data sheet>")
    values: dict[str, Any] = {
        "command": ["transcribe", "a<b>.wav"],
        "exit_code": 0,
        "wall_seconds": 0.1,
        "activity": activity,
        "memory": [
            MemorySample(i / 10, 10**9 + i, 5 * 10**8, 6 * 10**8, allocations=100 * i, segments=i) for i in range(20)
        ],
        "device": "Made Up 1",
        "chip": chip,
        "machine": {"cpu": "EPYC", "cores": 2},
    }
    return Profile(**(values | changes))


def test_the_fraction_of_peak_is_of_the_kernels_own_time() -> None:
    found = made_profile(gpu_activity())
    reached = found.overall()["fp16"]
    assert reached.tflops == pytest.approx(1e8 / 0.004 / 1e12)
    assert reached.fraction == pytest.approx(0.25)
    unknown = made_profile(gpu_activity(), chip=None).overall()["fp16"]
    assert unknown.tflops == reached.tflops
    assert unknown.fraction is None
    summary = found.summary()
    json.dumps(summary, allow_nan=False)
    assert summary["device_busy_fraction"] == pytest.approx(0.06)
    assert summary["peak_bytes"]["reserved"] == 6 * 10**8
    assert [each["name"] for each in summary["kernels"]] == ["gemm_kernel", "add_kernel"]


def test_the_page_is_one_file_that_loads_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.html"
    profile_page.write_html(made_profile(gpu_activity(), exit_code=3), path)
    page = path.read_text()
    assert "a<b>" not in page
    for said in ("a&lt;b&gt;.wav", "gemm_kernel", "25.0 %", "exit code 3", "replayed graphs", "a &lt;data sheet&gt;"):
        assert said in page
    assert page.count("<svg") == 3
    assert not re.search(r"(?:src|href)=\"(?!#)", page)
    assert "script" not in page.replace("description", "")
    assert "GPU, in tensors" in html.unescape(page)


def test_an_empty_profile_has_a_page_too() -> None:
    page = profile_page.render(made_profile(Activity(), memory=[], chip=None))
    assert "Nothing was recorded" in page


@pytest.mark.parametrize(
    ("event", "flops"),
    [
        (Event("aten::addmm", 0, 1, of=[[4], [3, 5], [5, 4]]), 2 * 3 * 5 * 4),
        (Event("aten::bmm", 0, 1, of=[[7, 3, 5], [7, 5, 4]]), 7 * 2 * 3 * 5 * 4),
        (Event("mkldnn::_linear_pointwise", 0, 1, of=[[2, 3, 5], [4, 5], [4]]), 2 * 6 * 5 * 4),
        (Event("mkldnn::_linear_pointwise", 0, 1, of=[[2, 3, 5], [2, 3, 4], [4, 5], [4]]), 2 * 6 * 5 * 4),
        (
            Event("aten::_scaled_dot_product_flash_attention", 0, 1, of=[[1, 2, 30, 8], [1, 2, 50, 8], [1, 2, 50, 8]]),
            2 * 2 * 30 * 50 * 16,
        ),
        (Event("aten::relu", 0, 1, of=[[10]]), 0),
        (Event("aten::mm", 0, 1, of=[]), 0),
    ],
)
def test_operations_are_counted_from_shapes(event: Event, flops: float) -> None:
    assert operator_flops(event.named, event) == flops


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_counts_its_outputs(stride: int) -> None:
    layer = torch.nn.Conv1d(8, 16, 3, stride=stride, padding=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        out = layer(torch.randn(2, 8, 51))
    inner: Any = profiler.profiler
    counted = sum(operator_flops(event.name(), event) for event in inner.kineto_results.events())
    assert counted == 2 * out.numel() * 8 * 3


def test_work_in_other_threads_is_recorded_and_its_end_is_its_own() -> None:
    def work() -> int:
        def multiply() -> None:
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                torch.ones(32, 32) @ torch.ones(32, 32)
                time.sleep(0.001)

        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        return 7

    found = profile(work, ["transcribe"], seconds=0.3)
    assert found.exit_code == 7
    mm = next(each for (name, _), each in found.activity.operators.items() if name == "aten::mm")
    assert mm.calls > 10
    assert mm.flops == mm.calls * 2 * 32**3
    assert 0.05 < found.activity.recorded_seconds < 0.45
    assert found.wall_seconds > 0.35
    assert found.memory[-1].resident
    assert found.overall()["fp32"].fraction is None


def test_long_work_is_recorded_in_windows_that_shrink_when_they_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_MOST_EVENTS", 100)

    def work() -> int:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            torch.ones(8) + torch.ones(8)
            time.sleep(0.001)
        return 0

    windows = profile(work, ["x"], seconds=30).activity.windows
    assert len(windows) > 2
    assert min(window.seconds for window in windows[1:]) < 0.08
    assert len(profile(lambda: time.sleep(0.9) or 0, ["x"]).activity.windows) in (3, 4)  # and grow where it is quiet


def test_work_that_fails_is_not_swallowed_and_recording_ends() -> None:
    def work() -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        profile(work, ["x"], seconds=5)
    assert profile(lambda: 0, ["x"], seconds=5).exit_code == 0


def test_a_capture_and_the_profilers_start_or_stop_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = threading.Event()
    clashes: list[str] = []

    class Capture:
        def __enter__(self) -> None:
            capturing.set()

        def __exit__(self, *error: object) -> None:
            capturing.clear()

    class Recording:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=list))

        def start(self) -> None:
            clashes.extend(["start"] * capturing.is_set())

        def stop(self) -> None:
            clashes.extend(["stop"] * capturing.is_set())

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(profiling, "_profiler", Recording)
    monkeypatch.setattr(profiling, "_LONGEST_WINDOW", 0.01)
    before = Capture.__enter__

    def work() -> int:
        for _ in range(20):
            with torch.cuda.graph():  # type: ignore[call-arg]
                time.sleep(0.02)
            time.sleep(0.002)
        return 0

    found = profile(work, ["x"])
    assert len(found.activity.windows) > 5
    assert not clashes
    assert Capture.__enter__ is before


def test_a_trace_that_cannot_be_written_and_a_profiler_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="--trace"):
        profile(lambda: time.sleep(0.1) or 0, ["x"], seconds=0.1, trace=Path("/proc/nowhere/t.json"))

    def taken() -> Any:
        raise RuntimeError("profiler is already enabled")

    monkeypatch.setattr(profiling, "_profiler", taken)
    with pytest.raises(StapesError, match="cannot profile"):
        profile(lambda: time.sleep(0.1) or 0, ["x"])


def test_a_trace_is_written(tmp_path: Path) -> None:
    def work() -> int:
        torch.ones(4).sum()
        time.sleep(0.05)
        return 0

    found = profile(work, ["x"], seconds=0.2, trace=tmp_path / "t.json")
    assert found.trace == tmp_path / "t.json"
    assert json.loads(found.trace.read_text())["traceEvents"]


def test_the_memory_curve_stays_short_and_spans_all() -> None:
    curve = MemoryCurve(step=0.001, most=16)
    curve.start()
    time.sleep(0.3)
    samples = curve.stop()
    assert 4 <= len(samples) <= 18
    assert samples[-1].seconds > 0.29
    assert all(b.seconds > a.seconds for a, b in pairwise(samples))
    gaps = [b.seconds - a.seconds for a, b in pairwise(samples[:-1])]
    assert max(gaps) < 0.15


def test_command_lines_of_the_vendors_tools(tmp_path: Path) -> None:
    words = ["transcribe", "a b.wav", "--model", "base"]
    rocm = external_profilers.command_line("rocprofv3", words, tmp_path / "p.html", python="python3")
    assert rocm[0] == "rocprofv3"
    assert rocm[rocm.index("--") + 1 :] == ["python3", "-m", "stapes", *words]
    assert rocm[rocm.index("--output-directory") + 1] == str(tmp_path)
    assert {"--kernel-trace", "--stats"} <= set(rocm[: rocm.index("--")])
    nsight = external_profilers.command_line("nsys", words, tmp_path / "p.html", python="python3")
    assert nsight[:2] == ["nsys", "profile"]
    assert nsight[-len(words) - 3 :] == ["python3", "-m", "stapes", *words]
    assert nsight[nsight.index("--output") + 1] == str(tmp_path / "p")


def test_a_tool_that_is_there_runs_and_one_that_is_not_is_named(tmp_path: Path) -> None:
    ran: list[list[str]] = []
    output = tmp_path / "new" / "p.html"
    code = external_profilers.run_tool(
        "nsys", ["models"], output, find=lambda name: f"/bin/{name}", run=lambda line: ran.append(line) or -2
    )
    assert code == 130
    assert ran[0][-1] == "models"
    assert output.parent.is_dir()
    for tool, whence in (("rocprofv3", "ROCm"), ("nsys", "Nsight")):
        with pytest.raises(UsageError, match=whence):
            external_profilers.run_tool(tool, ["models"], output, find=lambda name: None)  # type: ignore[arg-type]
