"""What training with CTC, attention and both costs and gives: a result made of finished evaluations.

Nothing is measured here. Evaluations of models that were trained here say what each cost (`training.cost`); those that
differ only in their seed are rounds of one case.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapes.benchmarks.anonymous import anonymous_text
from stapes.benchmarks.gathered import gathered, several, training_commands
from stapes.benchmarks.records import BenchResult, CaseRow, Spread, SystemRow
from stapes.errors import UsageError
from stapes.evaluation.results import Result, read_result

NAME = "objectives"

_OF_A_RUN = frozenset(
    {"seed", "command", "hours", "audio_seconds_per_second", "peak_memory_bytes", "processes", "device"}
)
"""What a training's cost says of one run, not of its settings."""


def gather(folders: Sequence[Path], command: Sequence[str]) -> BenchResult:
    """The result of the evaluations in ``folders``.

    Raises UsageError for models whose training nobody wrote down, for several machines or versions, for seeds that
    come twice or were not judged by the same recordings.
    """
    found = [(folder, read_result(folder)) for folder in folders]
    if not found:
        raise UsageError("name folders that `stapes evaluate` wrote for models that were trained here")
    groups: dict[str, list[Result]] = {}
    for folder, result in found:
        cost = result.model.training_cost
        if not cost or not {"objective", "hours", "seed"} <= cost.keys():
            raise UsageError(f"{folder} does not say what its model cost to train: train it with `stapes train`")
        if len({(other.machine["fingerprint"], other.commit, other.normalizer) for _, other in found}) > 1:
            raise UsageError("these evaluations are of several machines, commits or normalisers: gather them apart")
        groups.setdefault(json.dumps(_case(result), sort_keys=True), []).append(result)
    results = [result for _, result in found]
    last = max(results, key=lambda result: result.date)
    return gathered(
        NAME,
        last,
        command,
        made="trained here",
        audio=several((result.corpus.name, result.corpus.sha256) for result in results),
        rows=[_row(group) for group in groups.values()],
        notes=training_commands(results),
    )


def _case(result: Result) -> dict[str, Any]:
    cost = {name: value for name, value in (result.model.training_cost or {}).items() if name not in _OF_A_RUN}
    if isinstance(cost.get("init"), str):
        cost["init"] = anonymous_text(cost["init"])
    options = {"beam_size": result.options.get("beam_size"), "language_model": bool(result.options.get("lm"))}
    return {
        **cost,
        **options,
        "corpus": result.corpus.name,
        "corpus_sha256": result.corpus.sha256,
        "device": "cpu" if (result.model.device or "").lower().startswith("cpu") else "cuda",
        "device_name": (result.model.training_cost or {}).get("device"),
        "threads": result.machine.get("threads"),
        "parameters": result.model.parameters,
    }


def _row(group: Sequence[Result]) -> CaseRow:
    costs = [result.model.training_cost or {} for result in group]
    seeds = [cost["seed"] for cost in costs]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{group[0].corpus.name}: seed {max(seeds, key=seeds.count)} of one training comes twice")
    figures: dict[str, float | None] = {"seeds": float(len(group))}
    for name, values in (
        ("wer", [result.wer.value for result in group]),
        ("cer", [result.cer.value for result in group]),
        ("audio_seconds_per_second", [cost.get("audio_seconds_per_second") for cost in costs]),
    ):
        known = [value for value in values if value is not None]
        figures[name] = sum(known) / len(known) if known else None
        figures[f"{name}_low"], figures[f"{name}_high"] = (min(known), max(known)) if known else (None, None)
    peaks = [cost["peak_memory_bytes"] for cost in costs if cost.get("peak_memory_bytes")]
    figures["peak_device_bytes"] = max(peaks, default=None)
    seconds = Spread.of([3600 * cost["hours"] for cost in costs])
    ours = SystemRow(
        system="stapes",
        version=group[0].stapes,
        options=f"seeds {', '.join(map(str, seeds))}",
        precision=group[0].model.precision,
        wall_seconds=seconds,
        figures=figures,
    )
    return CaseRow(case=_case(group[0]), systems=[ours])
