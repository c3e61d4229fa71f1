"""What adapting a model gives and costs, and what it forgets: a result made of finished evaluations.

Nothing is measured here. An evaluation of what was made is held against one of what was there before on the same
utterances: the model that was fine-tuned, the teacher of a student, or the same network without a teacher.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from stapes.benchmarks.anonymous import anonymous, anonymous_text
from stapes.benchmarks.gathered import OF_A_RUN, gathered, several, training_command, training_commands
from stapes.benchmarks.records import BenchResult, CaseRow, Ratio, Spread, SystemRow
from stapes.errors import UsageError
from stapes.evaluation.results import Result, Utterance, read_result, read_utterances

NAME = "adapted"

_OF_A_RUN = rf"{OF_A_RUN}| --train[ =][^ ]+"
"""Folds of one corpus are one training too."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """An evaluation with its utterances."""

    folder: Path
    result: Result
    utterances: dict[str, Utterance]

    @property
    def corpus(self) -> str:
        """By its manifest and the folder that is in, for many are called test."""
        path = Path(self.result.corpus.manifest)
        return f"{path.parent.name}/{self.result.corpus.name}" if path.parent.name else self.result.corpus.name

    @property
    def seed(self) -> Any:
        """Of the training; None where nobody wrote it down."""
        return (self.result.model.training_cost or {}).get("seed")

    @property
    def model(self) -> str:
        """Its name; of one that was trained here its recipe, for its name is that of a folder."""
        recipe = (self.result.model.training_cost or {}).get("recipe")
        return anonymous_text(self.result.model.name if recipe is None else f"{recipe}, trained here")

    @property
    def options(self) -> dict[str, Any]:
        """Of recognition, without what names the model."""
        return {name: value for name, value in self.result.options.items() if name != "model"}


def gather(
    before: Sequence[Path],
    learnt: Sequence[Path],
    kept: Sequence[Path],
    drafted: Sequence[Path],
    command: Sequence[str],
) -> BenchResult:
    """The result of these evaluations.

    learnt: of what was made, on what it was made for. kept: on what could be done before. drafted: of a model that was
    there before, with a draft. Each is held against the evaluation in ``before`` that has its utterances and options.
    Models that differ in seed or fold alone become one row.

    Raises UsageError for evaluations without one before, of several machines or normalisers, for models whose training
    nobody wrote down, for utterances that come twice.
    """
    if not learnt and not kept and not drafted:
        raise UsageError("name folders that `stapes evaluate` wrote, and --before for what was there before")
    references = [_read(folder) for folder in before]
    groups: dict[str, list[tuple[_Judged, _Judged, str]]] = {}
    found = []
    for role, folders in (("learnt", learnt), ("kept", kept)):
        for folder in folders:
            after = _read(folder)
            if not {"recipe", "hours", "seed"} <= (after.result.model.training_cost or {}).keys():
                raise UsageError(f"{folder} does not say what its model cost to train: train it with `stapes train`")
            reference = _reference(after, references)
            key = json.dumps(
                [role, _settings(after.result), reference.model, reference.result.corpus.sha256], sort_keys=True
            )
            groups.setdefault(key, []).append((after, reference, role))
            found.append(after)
    drafts = [(after, _reference(after, references)) for after in map(_read, drafted)]
    found += [after for after, _ in drafts]
    everything = [each.result for each in (*references, *found)]
    if len({(each.machine["fingerprint"], each.normalizer) for each in everything}) > 1:
        raise UsageError("these evaluations are of several machines or normalisers: gather them apart")
    last = max((each.result for each in found), key=lambda result: result.date)
    return gathered(
        NAME,
        last,
        command,
        made="adapted here",
        audio=several((each.corpus, each.result.corpus.sha256) for each in references),
        rows=[*map(_row, groups.values()), *(_draft_row(*each) for each in drafts)],
        notes=training_commands((each.result for each in found), _OF_A_RUN),
    )


def _read(folder: Path) -> _Judged:
    return _Judged(folder, read_result(folder), {each.id: each for each in read_utterances(folder)})


def _reference(after: _Judged, references: Iterable[_Judged]) -> _Judged:
    """The evaluation that was there before with the same utterances, which may have more of them.

    Of several, that of a model of the same seed.
    """
    found = [
        each
        for each in references
        if after.utterances.keys() <= each.utterances.keys() and after.options == each.options
    ]
    if not found:
        raise UsageError(
            f"{after.folder}: no evaluation of --before has its utterances, heard with the same options: evaluate the "
            "model that was there before on them too"
        )
    return next((each for each in found if each.seed is not None and each.seed == after.seed), found[0])


def _settings(result: Result) -> dict[str, Any]:
    cost = result.model.training_cost or {}
    kept = {name: cost.get(name) for name in ("recipe", "init", "augmentation", "steps")}
    return {**kept, "learnt_from": _learnt_from(result), "training": training_command(result, _OF_A_RUN)}


def _learnt_from(result: Result) -> str:
    """The folders of the manifests that the model was trained on."""
    words = [str(word) for word in (result.model.training_cost or {}).get("command") or ()]
    paths = [value for word, value in pairwise(words) if word == "--train"]
    paths += [word.removeprefix("--train=") for word in words if word.startswith("--train=")]
    return ", ".join(dict.fromkeys(anonymous_text(Path(path).absolute().parent.name) for path in paths))


def _row(group: Sequence[tuple[_Judged, _Judged, str]]) -> CaseRow:
    """Of one model, or of some that differ in seed or fold."""
    reference, role = group[0][1], group[0][2]
    seeds: dict[Any, list[tuple[_Judged, _Judged]]] = {}
    for after, before, _ in group:
        seeds.setdefault(after.seed, []).append((after, before))
    rates: dict[str, list[float]] = {}
    heard: set[str] = set()
    for seed, parts in seeds.items():
        written = [each for part, _ in parts for each in part.utterances.values()]
        ids = {each.id for each in written}
        if len(ids) < len(written):
            raise UsageError(f"{reference.corpus}: seed {seed} is judged twice by some utterances: name one of them")
        if heard and heard != ids:
            raise UsageError(f"{reference.corpus}: seed {seed} is not judged by the utterances of the other seeds")
        heard = ids
        same = [before.utterances[name] for part, before in parts for name in part.utterances]
        for name, rate in (*_rates("before", same), *_rates("after", written)):
            rates.setdefault(name, []).append(rate)
    costs = [each.result.model.training_cost or {} for each, _, _ in group]
    figures: dict[str, float | None] = {"seeds": len(seeds), "folds": len(group) / len(seeds), "utterances": len(heard)}
    for name, values in rates.items():
        figures[name] = sum(values) / len(values)
        figures[f"{name}_low"], figures[f"{name}_high"] = min(values), max(values)
    hours = [cost["corpus_hours"] for cost in costs if cost.get("corpus_hours")]
    figures["corpus_hours"] = sum(hours) / len(hours) if hours else None
    figures["peak_device_bytes"] = max((cost.get("peak_memory_bytes") or 0 for cost in costs), default=0) or None
    first = group[0][0].result
    settings = {name: value for name, value in _settings(first).items() if name != "training"}
    case = {
        **anonymous(settings),
        "work": role,
        "before": reference.model,
        "corpus": reference.corpus,
        "corpus_sha256": reference.result.corpus.sha256,
        **_device(first),
        "parameters": first.model.parameters,
        "parameters_before": reference.result.model.parameters,
    }
    ours = SystemRow(
        system="stapes",
        version=first.stapes,
        options=f"seeds {', '.join(map(str, seeds))}",
        precision=first.model.precision,
        wall_seconds=Spread.of([3600 * cost["hours"] for cost in costs]),
        figures=figures,
    )
    return CaseRow(case=case, systems=[ours])


def _rates(name: str, utterances: Sequence[Utterance]) -> tuple[tuple[str, float], tuple[str, float]]:
    words = sum(each.words for each in utterances)
    characters = sum(each.characters for each in utterances)
    return (
        (f"{name}_wer", sum(each.errors for each in utterances) / max(1, words)),
        (f"{name}_cer", sum(each.char_errors for each in utterances) / max(1, characters)),
    )


def _draft_row(after: _Judged, reference: _Judged) -> CaseRow:
    """With a draft and without: the same texts, and how long each took."""
    differ = sum(each.hypothesis != reference.utterances[each.id].hypothesis for each in after.utterances.values())
    if len(after.utterances) < len(reference.utterances):
        raise UsageError(
            f"{after.folder} and {reference.folder} have not the same utterances: their times tell nothing"
        )
    systems = [
        SystemRow(
            system="stapes",
            version=each.result.stapes,
            options=options,
            precision=each.result.model.precision,
            wall_seconds=Spread.of([each.result.speed.wall_seconds]),
            figures={"latency_p50": each.result.speed.latency_p50},
        )
        for each, options in ((after, "with a draft"), (reference, "without a draft"))
    ]
    systems[0].figures |= {"differing_texts": differ, "utterances": len(after.utterances)}
    times = reference.result.speed.wall_seconds / after.result.speed.wall_seconds
    case = {
        "work": "draft",
        "before": reference.model,
        "corpus": reference.corpus,
        "corpus_sha256": reference.result.corpus.sha256,
        **_device(after.result),
        "batch_size": after.options.get("batch_size"),
    }
    return CaseRow(case=case, systems=systems, ratios=[Ratio(peer="stapes", place=1, times_as_fast=Spread.of([times]))])


def _device(result: Result) -> dict[str, Any]:
    name = result.model.device or ""
    is_cpu = name.lower().startswith("cpu")
    return {"device": "cpu" if is_cpu else "cuda", "device_name": name, "threads": result.machine.get("threads")}
