"""RESULTS.md's table of training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stapes.benchmarks.records import BenchResult, CaseRow

HEADER = (
    "hardware",
    "model",
    "task",
    "precision",
    "batch",
    "run",
    "audio s/s",
    "step, ms",
    "MFU, %",
    "% of product",
    "memory, GB",
    "× as fast as",
)

WANTED = tuple(
    (part, model, task)
    for part in ("H200", "Instinct MI300X")
    for model in ("wav2vec2-base", "wav2vec2-large")
    for task in ("ctc", "pretrain")
)
"""What ought to be measured: a part of the device's name, the model, and what it is trained for."""


def train_rows(
    results: Sequence[tuple[str, BenchResult]],
    model: Callable[[BenchResult], str],
    device: Callable[[BenchResult, dict[str, Any]], str],
    faster: Callable[[CaseRow], str],
    blank: str,
) -> list[list[str]]:
    """A row for each run, and a blank for what is wanted and was not run. The functions name parts of a result."""
    rows, measured = [], set()
    for label, result in results:
        for row in result.rows if result.name == "train" else []:
            case, figures, seconds = row.case, row.ours.figures, row.ours.wall_seconds
            if "task" not in case:
                continue
            name = device(result, case)
            measured.add((name, result.weights.name, case["task"]))
            audio = case["steps"] * case["batch"] * case["seconds"]
            memory = figures.get("peak_step_bytes")
            rows.append(
                [
                    f"{name}, stapes",
                    model(result),
                    _task(case),
                    case["precision"],
                    f"{case['batch']} × {case['seconds']:g} s",
                    label,
                    # The longest time is the lowest rate.
                    f"{audio / seconds.median:.0f} ({audio / seconds.high:.0f}–{audio / seconds.low:.0f})",
                    f"{1e3 * seconds.median / case['steps']:.1f}",
                    *(_percent(figures.get(name)) for name in ("mfu", "of_product")),
                    "–" if memory is None else f"{memory / 1e9:.1f}",
                    faster(row),
                ]
            )
    for part, name, task in WANTED:
        if not any(part in where and (name, task) == (one, other) for where, one, other in measured):
            command = f"`stapes bench train --task {task} --random-weights {name} --precision bf16 --peer transformers`"
            rows.append([f"{part}, stapes", name, task, "bf16", command, *[blank] * 7])
    return rows


def _task(case: dict[str, Any]) -> str:
    """With what sets it apart from the usual."""
    parts = [case["task"]]
    if case["task"] == "ctc" and not case["frozen_front_end"]:
        parts.append("nothing frozen")
    if not case["fused"]:
        parts.append("plain")
    if case["compile"]:
        parts.append("layers compiled")
    return ", ".join([*parts, f"dropout {case['dropout']:g}", f"layer drop {case['layer_drop']:g}"])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"
