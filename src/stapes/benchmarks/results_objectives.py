"""RESULTS.md's table of what training with CTC, attention and both costs, and how well it hears then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stapes.benchmarks import published
from stapes.benchmarks.objectives import NAME
from stapes.benchmarks.records import BenchResult, CaseRow

HEADER = (
    "objective",
    "starts from",
    "augmentation",
    "hardware",
    "run",
    "test set",
    "seeds",
    "WER, %",
    "CER, %",
    "hours of training",
    "memory, GB",
    "audio s/s",
)

WANTED = tuple((objective, init) for init in ("base", None) for objective in ("ctc", "attention", "hybrid"))
"""What ought to be measured: the objective, and the model whose encoder training starts from."""

_ORDER = ("ctc", "attention", "hybrid")


def objective_rows(
    results: Sequence[tuple[str, BenchResult]],
    note: Callable[[str], str],
    device: Callable[[BenchResult, dict[str, Any]], str],
    blank: str,
) -> list[list[str]]:
    """The published rows, one for each case that was trained and test set, and a blank for what was not."""
    rows = [
        [
            f"*{each.objective}*{note(each.source)}",
            *["*not told*"] * 3,
            "*published*",
            *["*not told*"] * 2,
            f"*{100 * each.wer:.3g}*",
            "–",
            f"*{each.hours:.3g}*",
            f"*{each.gigabytes:.3g}*",
            "–",
        ]
        for each in published.OBJECTIVES
    ]
    found = [(label, result, row) for label, result in results if result.name == NAME for row in result.rows]
    found.sort(key=lambda each: _place(each[2].case))
    rows += [_line(label, row, device(result, row.case)) for label, result, row in found]
    measured = {(row.case["objective"], row.case.get("init")) for _, _, row in found}
    for objective, init in WANTED:
        if (objective, init) not in measured:
            command = f"`stapes train {objective}{f' --set model.init={init}' if init else ''}`"
            rows.append([f"{objective}, stapes", _start(init), command, *[blank] * (len(HEADER) - 3)])
    return rows


def _place(case: dict[str, Any]) -> tuple[Any, ...]:
    """Where a case stands: by what it starts from, objective, with augmentation first, test set."""
    objective = case["objective"]
    rank = _ORDER.index(objective) if objective in _ORDER else len(_ORDER)
    return case.get("init") is None, str(case.get("init")), rank, case["augmentation"] == "none", case["corpus"]


def _line(label: str, row: CaseRow, device: str) -> list[str]:
    case, figures = row.case, row.ours.figures
    memory, rate = figures.get("peak_device_bytes"), figures.get("audio_seconds_per_second")
    hours = row.ours.wall_seconds
    return [
        f"{case['objective']}, stapes",
        _start(case.get("init")),
        case["augmentation"],
        device,
        label,
        case["corpus"],
        f"{figures.get('seeds') or 1:.0f}",
        mean(figures, "wer"),
        mean(figures, "cer"),
        f"{sum(hours.rounds) / len(hours.rounds) / 3600:.3f}, {case['steps']} steps",
        "–" if memory is None else f"{memory / 1e9:.1f}",
        "–" if rate is None else f"{rate:.0f}",
    ]


def _start(init: str | None) -> str:
    return "nothing" if init is None else f"encoder of {init}"


def mean(figures: dict[str, float | None], name: str) -> str:
    """The mean over the seeds, and what these lie between."""
    value, low, high = (figures.get(f"{name}{part}") for part in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return "–"
    text = f"{100 * value:.2f}"
    return text if low == high else f"{text} ({100 * low:.2f}–{100 * high:.2f})"
