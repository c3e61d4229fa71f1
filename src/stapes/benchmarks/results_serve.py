"""RESULTS.md's table of the server under load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stapes.benchmarks.records import BenchResult, CaseRow, SystemRow

HEADER = (
    "hardware",
    "model, precision, slots",
    "load",
    "batching",
    "run",
    "requests/s",
    "× real time",
    "latency, s: 50, 95, 99 %",
    "within the target, /s",
    "not answered",
    "dynamic is … × as fast",
)


def served_rows(
    results: Sequence[tuple[str, BenchResult]],
    model: Callable[[BenchResult], str],
    device: Callable[[BenchResult, dict[str, Any]], str],
) -> list[list[str]]:
    """A row for each load and way of batching. ``model`` and ``device`` name those of a result."""
    rows = []
    for label, result in results:
        for row in result.rows if result.name == "serve" else []:
            ratios = {ratio.place: ratio.times_as_fast.median for ratio in row.ratios}
            which = f"{model(result)}, {row.case['precision']}, {row.case.get('slots') or '?'}"
            for place, system in enumerate(row.systems):
                head = [device(result, row.case), which, _load(row), system.options or system.system, label]
                ratio = f"{ratios[place]:.2f}" if place in ratios and row.case["load"] == "closed" else ""
                rows.append([*head, *_figures(row, system), ratio])
    return rows


def _load(row: CaseRow) -> str:
    case = row.case
    if case["load"] == "closed":
        return f"{case['clients']} clients"
    if case["load"] == "open":
        return f"{case['rate']:g} requests/s, Poisson"
    return f"clips of {case['clip_seconds']:g} s beside {case['long_seconds']:g} s"


def _figures(row: CaseRow, system: SystemRow) -> list[str]:
    figures = system.figures

    def number(name: str) -> str:
        value = figures.get(name)
        return "–" if value is None else f"{value:.3g}"

    wrong = sum(figures.get(name) or 0.0 for name in ("refused", "failed", "lost"))
    latency = ", ".join(number(f"latency_p{share}") for share in (50, 95, 99))
    if row.case["load"] == "beside":
        latency += f"; alone {number('alone_p50')}, {number('alone_p95')}, {number('alone_p99')}"
        return ["–", "–", latency, "–", f"{wrong:g}"]
    within = f"{number('goodput')} ({row.case['target']:g} s)"
    return [number("requests_per_second"), number("sound_per_second"), latency, within, f"{wrong:g}"]
