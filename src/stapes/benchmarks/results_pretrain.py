"""RESULTS.md's part on pre-training: what it cost, what fine-tuning gains by it, and fp8 beside bf16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stapes.benchmarks.pretraining import FORMAT, NAME, NOTHING, PRETRAINED, STAGE, TUNED
from stapes.benchmarks.records import BenchResult, CaseRow

Device = Callable[[BenchResult, dict[str, Any]], str]
Table = Callable[..., str]

_STAGES = (
    "hardware",
    "run",
    "stage",
    "hours of audio",
    "steps",
    "minutes",
    "audio s/s",
    "strict loss on dev",
    "accuracy, %",
    "codes in use",
)
_TUNED = (
    "fine-tuned from",
    "run",
    "hours of text",
    "learning rates: CER on dev, %",
    "steps",
    "minutes",
    "test set",
    "CER, %",
    "WER, %",
    "CER is lower by, %",
)
_FORMATS = (
    "hardware",
    "products",
    "run",
    "steps",
    "audio s/s",
    "× as fast",
    "loss, first",
    "last",
    "apart, %",
    "most, %",
)


def pretraining_part(
    results: Sequence[tuple[str, BenchResult]], names: dict[str, str], device: Device, table: Table, blank: str
) -> str:
    """The tables and curves of every result; a blank where there is none. ``names``: the files of results by label."""
    parts = []
    for label, result in results:
        if result.name != NAME:
            continue
        rows = {part: [row for row in result.rows if row.case["part"] == part] for part in (STAGE, TUNED, FORMAT)}
        stem = f"results/{names[label].removesuffix('.json')}"
        if rows[STAGE]:
            lines = [_stage(label, row, device(result, row.case)) for row in rows[STAGE]]
            parts += [
                table(_STAGES, lines, right=6),
                f"![Strict loss on dev over seconds of training]({stem}-loss.svg)\n",
            ]
        if rows[TUNED]:
            parts += [table(_TUNED, _tuned(label, rows[TUNED]), right=3), f"![CER on dev over steps]({stem}-cer.svg)\n"]
        if rows[FORMAT]:
            parts += [
                "Products in other formats: the same weights, batches and masks. Losses are apart by so much at a line "
                "of the log, in the mean and at most.\n",
                table(_FORMATS, [_format(label, row, device(result, row.case)) for row in rows[FORMAT]], right=6),
            ]
    return "\n".join(parts) or f"{blank}: `stapes bench pretraining`\n"


def _stage(label: str, row: CaseRow, device: str) -> list[str]:
    case, figures = row.case, row.ours.figures
    return [
        device,
        label,
        f"{case['stage']}, spans of {case['mask']} frames",
        _number(case["corpus_hours"], ".1f"),
        f"{case['steps']}",
        _minutes(row),
        _number(figures.get("audio_seconds_per_second"), ".0f"),
        _number(figures.get("strict_loss"), ".3f"),
        _percent(figures.get("accuracy")),
        _number(figures.get("code_perplexity"), ".0f"),
    ]


def _tuned(label: str, rows: Sequence[CaseRow]) -> list[list[str]]:
    errors = {row.case["start"]: row.ours.figures["cer"] for row in rows}
    ours, twin = errors.get(PRETRAINED), errors.get(NOTHING)
    out = []
    for row in rows:
        case, figures = row.case, row.ours.figures
        search = ", ".join(
            f"{'**' if rate == case['rate'] else ''}{rate:g}: {_percent(cer)}{'**' if rate == case['rate'] else ''}"
            for rate, cer in case["search"]
        )
        lower = "–"
        if case["start"] == PRETRAINED and ours is not None and twin:
            lower = f"{100 * (1 - ours / twin):.1f}"
        out.append(
            [
                case["start"],
                label,
                _number(case["corpus_hours"], ".2f"),
                search,
                f"{case['steps']}",
                _minutes(row),
                case["corpus"],
                *(_range(figures, name) for name in ("cer", "wer")),
                lower,
            ]
        )
    return out


def _format(label: str, row: CaseRow, device: str) -> list[str]:
    case, figures = row.case, row.ours.figures
    first = figures.get("most_apart") == 0
    return [
        device,
        f"{'fp8' if case['fp8'] else 'bf16'}{', layers compiled' if case['compile'] else ', fused kernels'}",
        label,
        f"{case['steps']}",
        _number(figures.get("audio_seconds_per_second"), ".0f"),
        _number(figures.get("times_as_fast"), ".2f"),
        _number(figures.get("first_loss"), ".4f"),
        _number(figures.get("loss"), ".4f"),
        "–" if first else _percent(figures.get("apart"), 3),
        "–" if first else _percent(figures.get("most_apart"), 3),
    ]


def _minutes(row: CaseRow) -> str:
    return f"{row.ours.wall_seconds.median / 60:.1f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _range(figures: dict[str, float | None], name: str) -> str:
    """With its 95 % interval."""
    low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
    text = _percent(figures.get(name))
    return text if low is None or high is None else f"{text} ({_percent(low)}–{_percent(high)})"
