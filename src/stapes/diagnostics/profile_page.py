"""A profile as one self-contained HTML page, in the style of the evaluation's reports."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import stapes
from stapes.diagnostics.memory_curve import MemorySample
from stapes.diagnostics.profile import Achieved, Profile
from stapes.evaluation import report_page
from stapes.evaluation.report_plots import Plot, over_time, stacked_bars

_TEMPLATES = Path(__file__).parent / "templates"
_BARS = 12
_UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


def write_html(profile: Profile, path: Path) -> None:
    """Write the page: whole or not at all. Raises OutputError."""
    report_page.write_whole(path, render(profile))


def render(profile: Profile) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (report_page.TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template("profile.html").render(
        title=f"Profile of stapes {shlex.join(profile.command)}",
        device=profile.device,
        version=stapes.__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(style),  # noqa: S704 - our own file
        notes=_notes(profile),
        facts=_facts(profile),
        plots=_plots(profile),
        tables=[table for table in (_overall(profile), _operators(profile), _kernels(profile)) if table.rows],
    )


def _notes(profile: Profile) -> list[str]:
    notes = []
    recorded, activity = profile.activity.recorded_seconds, profile.activity
    if profile.exit_code:
        notes.append(f"The command ended with exit code {profile.exit_code}.")
    if not activity.windows:
        notes.append("Nothing was recorded: the command ended before recording began.")
    elif recorded < 0.9 * profile.wall_seconds:
        notes.append(
            f"{recorded:.1f} of {profile.wall_seconds:.1f} s were recorded: windows of at most a second, summed up in "
            "between, until --seconds were full. Times below are of what was recorded; memory was watched all the time."
        )
    if activity.unowned_device_seconds > 0.01 * max(activity.device_busy_seconds, 1e-9):
        notes.append(
            f"{activity.unowned_device_seconds:.3f} s of kernels belong to no operator: they come from replayed graphs "
            "and stand among the kernels only."
        )
    return notes


def _facts(profile: Profile) -> list[tuple[str, str]]:
    found, activity = profile.summary(), profile.activity
    peak, allocator = found["peak_bytes"], found["allocator"]
    busy = found["device_busy_fraction"]
    facts = [
        ("Command", "stapes " + shlex.join(profile.command)),
        ("Took", f"{profile.wall_seconds:.2f} s, {activity.recorded_seconds:.2f} s of it recorded"),
        ("Machine", f"{found['machine'].get('cpu') or 'unknown processor'}, {found['machine'].get('cores')} cores"),
        ("Peak memory of the process", _bytes(peak["resident"])),
    ]
    if profile.on_gpu:
        facts += [
            ("GPU busy", _UNKNOWN if busy is None else f"{100 * busy:.1f} % of the recorded time"),
            ("Kernel launches", f"{activity.launches:,}"),
            ("Peak GPU memory", f"{_bytes(peak['allocated'])} in tensors, {_bytes(peak['reserved'])} reserved"),
            (
                "Calls of the driver for memory",
                f"{activity.runtime_allocator_calls:,}, {1e3 * activity.runtime_allocator_seconds:.1f} ms",
            ),
        ]
    facts.append(("Tensors that memory was asked for", f"{allocator['tensors']:,}"))
    for dtype, each in profile.overall().items():
        facts.append((f"Products and convolutions in {dtype}", _reached(each)))
    return facts


def _reached(each: Achieved) -> str:
    if each.tflops is None:
        return _UNKNOWN
    share = "the chip's peak is unknown" if each.fraction is None else f"{100 * each.fraction:.1f} % of the chip's peak"
    return f"{each.tflops:.3g} TFLOP/s while they run, {share}"


def _plots(profile: Profile) -> list[Plot]:
    plots = []
    memory = profile.memory
    if len(memory) > 1:
        names = {"resident": "process", "allocated": "GPU, in tensors", "reserved": "GPU, reserved"}
        lines = []
        for name, label in names.items():
            there = [(each.seconds, getattr(each, name) / 1e9) for each in memory if getattr(each, name) is not None]
            if there:
                lines.append((label, [x for x, _ in there], [y for _, y in there]))
        plots.append(over_time("memory", "Memory over time", "GB", lines))
    calls = _allocator_lines(profile)
    if calls:
        plots.append(over_time("allocator", "Memory asked for over time", "calls a second", calls))
    if profile.on_gpu:
        rows = [(f"{n}. {_short(k.name)}", [1e3 * k.seconds]) for n, k in enumerate(profile.kernels(_BARS), 1)]
        title = "Kernels by time on the GPU"
    else:
        rows = [
            (f"{each.operator.name} {each.operator.shapes}"[:60], [1e3 * each.operator.self_seconds])
            for each in profile.operators(_BARS)
        ]
        title = "Operators by time on the CPU"
    if rows:
        plots.append(stacked_bars("time", title, "ms", rows, ["time"], " ms"))
    return plots


def _short(name: str) -> str:
    """A kernel's name without its return type and the namespaces that all have in common."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::", "", name)


def _allocator_lines(profile: Profile) -> list[tuple[str, list[float], list[float]]]:
    windows = [window for window in profile.activity.windows if window.seconds > 0]
    lines = []
    if windows:
        middles = [window.start + window.seconds / 2 for window in windows]
        lines.append(("tensors, where recorded", middles, [w.allocations / w.seconds for w in windows]))
    for name, label in (("allocations", "blocks on the GPU"), ("segments", "of them from the driver")):
        rates = _rates(profile.memory, name)
        if rates:
            lines.append((label, [x for x, _ in rates], [y for _, y in rates]))
    return lines


def _rates(memory: list[MemorySample], name: str) -> list[tuple[float, float]]:
    """A counter's growth a second, over steps of at least a tenth of a second."""
    out, before = [], None
    for each in memory:
        value = getattr(each, name)
        if value is None:
            continue
        if before is None:
            before = (each.seconds, value)
        elif each.seconds - before[0] >= 0.1:
            out.append((each.seconds, (value - before[1]) / (each.seconds - before[0])))
            before = (each.seconds, value)
    return out


def _overall(profile: Profile) -> _Table:
    rows = [
        [dtype, f"{each.operator.calls:,}", f"{each.operator.flops / 1e12:.4g}", *_reach_cells(each)]
        for dtype, each in profile.overall().items()
    ]
    source = f" Peaks: {profile.chip.source}." if profile.chip and profile.chip.peak_tflops else ""
    note = (
        "Counted from shapes for matrix products, convolutions and attention; two operations for a multiplication "
        "with addition. The fraction is of the dense peak for the dtype." + source
    )
    header = ["dtype", "calls", "TFLOP", "TFLOP/s", "of peak"]
    return _Table("Arithmetic: what was reached while it ran", header, rows, note)


def _operators(profile: Profile) -> _Table:
    on_gpu = profile.on_gpu
    total = (
        sum(each.device_seconds if on_gpu else each.self_seconds for each in profile.activity.operators.values()) or 1.0
    )
    rows = []
    for each in profile.operators():
        operator = each.operator
        seconds = operator.device_seconds if on_gpu else operator.self_seconds
        rows.append(
            [
                f"{operator.name} {operator.shapes}".strip(),
                operator.dtype or _UNKNOWN,
                f"{operator.calls:,}",
                f"{1e3 * seconds:.2f}",
                f"{100 * seconds / total:.1f}",
                *_reach_cells(each),
            ]
        )
    where = "the GPU" if on_gpu else "the CPU, without what they call"
    return _Table(
        f"Operators by time on {where}", ["operator", "dtype", "calls", "ms", "%", "TFLOP/s", "of peak"], rows
    )


def _kernels(profile: Profile) -> _Table:
    total = sum(each.seconds for each in profile.activity.kernels.values()) or 1.0
    rows = [
        [
            each.name,
            f"{each.calls:,}",
            f"{1e3 * each.seconds:.2f}",
            f"{1e6 * each.seconds / each.calls:.1f}",
            f"{100 * each.seconds / total:.1f}",
        ]
        for each in profile.kernels()
    ]
    return _Table("Kernels and copies by time", ["kernel", "calls", "ms", "µs each", "%"], rows)


def _reach_cells(each: Achieved) -> list[str]:
    return [
        _UNKNOWN if each.tflops is None else f"{each.tflops:.3g}",
        _UNKNOWN if each.fraction is None else f"{100 * each.fraction:.1f} %",
    ]


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.2f} GB"
