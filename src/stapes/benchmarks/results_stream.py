"""RESULTS.md's table of live sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stapes.benchmarks.records import BenchResult, CaseRow

HEADER = (
    "hardware",
    "model",
    "streams",
    "run",
    "first words, s",
    "word's end to commit, s",
    "final after the turn, s",
    "a partial every, s",
    "committed words changed",
    "WER, % (as files)",
)


def live_rows(
    results: Sequence[tuple[str, BenchResult]],
    model: Callable[[BenchResult], str],
    device: Callable[[BenchResult, dict[str, Any]], str],
) -> list[list[str]]:
    """A row for each number of streams. ``model`` and ``device`` name those of a result."""
    return [
        [device(result, row.case), model(result), f"{row.case['streams']}", label, *_figures(row)]
        for label, result in results
        if result.name == "stream"
        for row in result.rows
    ]


def _figures(row: CaseRow) -> list[str]:
    figures = row.ours.figures

    def both(name: str) -> str:
        middle, high = figures.get(f"{name}_p50"), figures.get(f"{name}_p95")
        return "–" if middle is None or high is None else f"{middle:.2f} / {high:.2f}"

    wer, of_files = figures.get("wer"), figures.get("file_wer")
    words = "–" if wer is None or of_files is None else f"{100 * wer:.2f} ({100 * of_files:.2f})"
    return [
        both("first_words"),
        both("words"),
        both("final_after_stop"),
        f"{figures.get('partial_interval') or 0.0:.2f}",
        f"{figures.get('committed_changed') or 0.0:g} of {figures.get('words') or 0.0:g}",
        words,
    ]
