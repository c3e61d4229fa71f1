"""RESULTS.md's section of adapted models: before and after, what was forgotten, what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stapes.benchmarks.adapted import NAME
from stapes.benchmarks.records import BenchResult, CaseRow
from stapes.benchmarks.results_objectives import mean

HEADER = (
    "made by",
    "before",
    "hardware",
    "run",
    "test set",
    "utterances",
    "learnt from, min an epoch",
    "seeds",
    "WER, %",
    "CER, %",
    "fewer errors, % of words, characters",
    "training, min",
    "memory, GB",
)
DRAFT_HEADER = (
    "model",
    "hardware",
    "run",
    "recordings, batch",
    "texts that differ",
    "seconds without",
    "seconds with",
    "× as fast",
)

WANTED = (
    ("whisper", "base", "stapes train whisper --set model.init=base"),
    ("whisper_lora", "base", "stapes train whisper_lora --set model.init=base"),
    ("distill", "base", "stapes train distill --set distill.teacher=base --set distill.decoder_layers=2"),
    ("distill_ctc", "ctc, trained here", "stapes train distill_ctc --set distill.teacher=runs/hybrid/model"),
)
"""What ought to be measured: the recipe, what was there before, the command."""

_ORDER = tuple(recipe for recipe, _, _ in WANTED)

_INTRO = """\
## Adapted models

What was there before, and what was made of it, on the same utterances (`stapes bench adapted`): the model that was
fine-tuned, the teacher of a student, or the same network without a teacher. *Kept* is what could be done before and
was not to be forgotten. Means over seeds (lowest–highest); where folds are named, as many models were trained on other
parts of one small corpus, and each utterance was heard by one of them. Minutes are of one training on a GPU that it may
have shared.
"""

_DRAFTS = """\
The student as a draft: the same model with and without it (`stapes transcribe --draft`), the same recordings.
"""

Device = Callable[[BenchResult, dict[str, Any]], str]


def adapted_section(
    results: Sequence[tuple[str, BenchResult]],
    device: Device,
    table: Callable[[Sequence[str], list[list[str]], int], str],
    blank: str,
) -> str:
    """The section as it stands in the page. device, table: the page's own."""
    found = [(label, result, row) for label, result in results if result.name == NAME for row in result.rows]
    return "\n".join(
        (
            _INTRO,
            table(HEADER, _rows(found, device, blank), 6),
            _DRAFTS,
            table(DRAFT_HEADER, _draft_rows(found, device, blank), 4),
        )
    )


Found = Sequence[tuple[str, BenchResult, CaseRow]]


def _rows(found: Found, device: Device, blank: str) -> list[list[str]]:
    rows, measured = [], set()
    for label, result, row in sorted(found, key=lambda each: _place(each[2].case)):
        case = row.case
        if case["work"] == "draft":
            continue
        measured.add(case["recipe"])
        figures, cost = row.ours.figures, row.ours.wall_seconds.rounds
        memory, hours = figures.get("peak_device_bytes"), figures.get("corpus_hours")
        rows.append(
            [
                _made_by(case),
                case["before"],
                f"{device(result, case)}, stapes",
                label,
                f"{case['corpus']}{', *kept*' if case['work'] == 'kept' else ''}",
                f"{figures['utterances'] or 0:.0f}{_folds(figures)}",
                f"{case['learnt_from'] or '–'}: {'–' if hours is None else f'{60 * hours:.3g}'}",
                f"{figures['seeds'] or 1:.0f}",
                *(f"{mean(figures, f'before_{name}')} → {mean(figures, f'after_{name}')}" for name in ("wer", "cer")),
                ", ".join(_fewer(figures, name) for name in ("wer", "cer")),
                f"{sum(cost) / len(cost) / 60:.2g}, {case['steps']} steps",
                "–" if memory is None else f"{memory / 1e9:.1f}",
            ]
        )
    for recipe, before, command in WANTED:
        if recipe not in measured:
            rows.append([f"`{command}`", before, *[blank] * (len(HEADER) - 2)])
    return rows


def _place(case: dict[str, Any]) -> tuple[Any, ...]:
    """By recipe, then what was learnt before what was kept."""
    recipe = case.get("recipe")
    rank = _ORDER.index(recipe) if recipe in _ORDER else len(_ORDER)
    return rank, case["work"] != "learnt", case["corpus"]


def _made_by(case: dict[str, Any]) -> str:
    """The recipe; of a student, how large it is beside what was there before."""
    sizes = [case.get(name) for name in ("parameters", "parameters_before")]
    if not all(sizes) or sizes[0] == sizes[1]:
        return case["recipe"]
    ours, before = (f"{size / 1e6:.0f}" for size in sizes if size)
    return f"{case['recipe']} ({ours} of {before} M)"


def _folds(figures: dict[str, float | None]) -> str:
    folds = figures.get("folds") or 1
    return f" in {folds:g} folds" if folds > 1 else ""


def _fewer(figures: dict[str, float | None], name: str) -> str:
    """The fall in per cent of what was there before; a rise has a minus."""
    before, after = figures.get(f"before_{name}"), figures.get(f"after_{name}")
    return f"{100 * (1 - after / before):.1f}".replace("-", "−") if before and after is not None else "–"


def _draft_rows(found: Found, device: Device, blank: str) -> list[list[str]]:
    rows = []
    for label, result, row in found:
        case = row.case
        if case["work"] != "draft":
            continue
        drafted, plain = row.systems
        count, differ = drafted.figures.get("utterances") or 0, drafted.figures.get("differing_texts") or 0
        rows.append(
            [
                case["before"],
                f"{device(result, case)}, stapes",
                label,
                f"{case['corpus']}: {count:.0f}, {case['batch_size'] or 'default'}",
                f"{differ:.0f}" if not differ else f"**{differ:.0f}**",
                f"{plain.wall_seconds.median:.1f}",
                f"{drafted.wall_seconds.median:.1f}",
                f"{row.ratios[0].times_as_fast.median:.2f}",
            ]
        )
    command = "`stapes evaluate base … --batch-size 1 --draft runs/small/model`"
    return rows or [["base", "any", command, *[blank] * (len(DRAFT_HEADER) - 3)]]
