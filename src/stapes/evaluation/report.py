"""Compare evaluations: which system is better, by how much, how sure that is, and where each one fails.

Accuracy is compared over the recordings that all systems have, paired: errors of two systems on one recording belong
together. Speed is set side by side only for results of one machine.

100,000 recordings take about 100 bytes each and system: ``utterances.jsonl`` is streamed twice, once for the counts
and once for the words of those recordings that are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from stapes.errors import UsageError
from stapes.evaluation.report_audio import Clip, Recordings
from stapes.evaluation.report_changes import Change, find_changes
from stapes.evaluation.report_counts import UNKNOWN, ResultCounts
from stapes.evaluation.report_words import Piece, WordErrors, difference
from stapes.evaluation.results import RESULT, Rate, Result, Utterance, read_result
from stapes.evaluation.scoring import RESAMPLES, PairedDifference, Tally, matched_pairs, paired_bootstrap
from stapes.evaluation.summary import DURATION_EDGES, SNR_EDGES

_BIN_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """One bin of a breakdown for one system."""

    rate: Rate
    words: int
    utterances: int


@dataclass(frozen=True, slots=True)
class Significance:
    """A system against the baseline on the same recordings; negative differences are fewer errors."""

    difference: PairedDifference
    p: float
    """Matched-pairs test (MAPSSWE), adjusted after Holm (1979) for the number of comparisons in the table."""
    utterances: int

    @property
    def significant(self) -> bool:
        """At the 5 % level."""
        return self.p < 0.05


@dataclass(slots=True)
class System:
    """One result as it is compared: its figures over the recordings of its set."""

    label: str
    index: int
    """Its look in plots; the same label looks the same in every set."""
    folder: Path
    result: Result
    machine: str
    """A letter for each machine: speeds are comparable where it is the same."""
    wer: Rate
    cer: Rate
    substitutions: int
    deletions: int
    insertions: int
    words: int
    failed: int
    significance: Significance | None = None
    """Against the baseline; None for the baseline itself."""
    breakdown: dict[str, dict[str, Part]] = field(default_factory=dict)
    """``duration``, ``snr``, ``language`` → bin → its rate."""
    errors: WordErrors = field(default_factory=WordErrors)
    changes: list[Change] = field(default_factory=list)
    """From the baseline to this one; none for the baseline itself."""


@dataclass(frozen=True, slots=True)
class Transcribed:
    """What one system made of one recording."""

    pieces: list[Piece]
    errors: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class Example:
    """A recording to look at and to listen to: ``transcripts`` in the order of the set's systems."""

    id: str
    audio: str
    duration: float
    speaker: str | None
    language: str | None
    snr_db: float | None
    words: int
    clip: Clip
    transcripts: list[Transcribed]


@dataclass(slots=True)
class Set:
    """Systems measured on the same recordings with the same normaliser."""

    corpus: str
    normalizer: str
    utterances: int
    hours: float
    speakers: int
    baseline: System
    systems: list[System]
    bins: dict[str, list[str]]
    """The bins of each breakdown that hold something, in order."""
    worst: list[Example]
    """Most word errors of any system first."""
    divided: list[Example]
    """Where the systems differ most; none of ``worst``."""
    notes: list[str]


@dataclass(slots=True)
class Comparison:
    """All of a report."""

    sets: list[Set]
    machines: dict[str, dict[str, object]]
    """Letter → the facts of that machine."""
    notes: list[str]


def compare(
    results: Sequence[str | Path],
    *,
    baseline: str | None = None,
    examples: int = 12,
    audio_bytes: int = 3_000_000,
    allow_different: bool = False,
) -> Comparison:
    """Compare evaluations, each a folder with ``result.json`` and ``utterances.jsonl``.

    Args:
        results: the folders (or their ``result.json``).
        baseline: what the others are tested against: a folder as given, its name, or a system's label. Default: the
            first result.
        examples: how many of the worst recordings, and of those where systems differ most, are shown.
        audio_bytes: most encoded sound in the report; 0 leaves recordings out.
        allow_different: accept results of different recordings or normalisers: those of one corpus and normaliser are
            compared over the recordings that all of them have, each other corpus becomes a set of its own.

    Raises:
        UsageError: a result is missing or damaged, or they cannot be compared.
    """
    folders = [path.parent if path.name == RESULT else path for path in map(Path, results)]
    if not folders:
        raise UsageError("nothing to compare: name the folders that `stapes evaluate` wrote")
    for place, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:place]]:
            raise UsageError(f"{folder} is given twice: name each result once")
    read = [read_result(folder) for folder in folders]
    if not allow_different:
        _check_same(folders, read)
    labels = _labels(folders, read)
    chosen = _find_baseline(baseline, folders, labels)
    # A machine that left no fingerprint is like no other.
    prints = [str(each.machine.get("fingerprint") or f"unknown {place}") for place, each in enumerate(read)]
    letters = {fingerprint: _letter(place) for place, fingerprint in enumerate(dict.fromkeys(prints))}
    machines = {letters[fingerprint]: each.machine for fingerprint, each in zip(prints, read, strict=True)}
    looks = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    groups: dict[tuple[str, str], list[int]] = {}
    for place, each in enumerate(read):
        groups.setdefault((each.corpus.name, each.normalizer), []).append(place)
    sets = []
    for members in groups.values():
        # Where the baseline was not measured on a corpus: the same system there, else the set's first.
        base = next((m for m in members if m == chosen), None)
        base = base if base is not None else next((m for m in members if labels[m] == labels[chosen]), members[0])
        counts = [ResultCounts(folders[member], read[member]) for member in members]
        systems = [(labels[m], looks[labels[m]], letters[prints[m]]) for m in members]
        sets.append(_compare_set(counts, systems, members.index(base), examples, audio_bytes // len(groups)))
    return Comparison(sets, machines, _notes(read, len(machines)))


def _check_same(folders: Sequence[Path], read: Sequence[Result]) -> None:
    first = read[0]
    for folder, each in zip(folders, read, strict=True):
        if each.corpus.sha256 != first.corpus.sha256:
            raise UsageError(
                f"{folders[0]} and {folder} were measured on different recordings ({first.corpus.manifest}, "
                f"{first.corpus.utterances} utterances, and {each.corpus.manifest}, {each.corpus.utterances}): "
                "evaluate both on one manifest, or give --allow-different to see what they share, each corpus by itself"
            )
        if each.normalizer != first.normalizer:
            raise UsageError(
                f"{folders[0]} and {folder} were scored with different normalisers ({first.normalizer} and "
                f"{each.normalizer}), which count different words: evaluate again with one --normalizer, or give "
                "--allow-different to see each by itself"
            )


def _labels(folders: Sequence[Path], read: Sequence[Result]) -> list[str]:
    """Short names that tell the results apart: the model, and those of system, precision and device that differ."""
    facts = [(each.system, each.model.name, each.model.precision or "", each.model.device or "") for each in read]
    differ = [len({fact[part] for fact in facts}) > 1 for part in range(4)]
    labels = [" ".join(fact[p] for p in range(4) if fact[p] and (p == 1 or differ[p])) for fact in facts]
    keys = [(label, r.corpus.name, r.normalizer) for label, r in zip(labels, read, strict=True)]
    labels = [
        f"{label} ({folder.resolve().name})" if keys.count(key) > 1 else label
        for label, key, folder in zip(labels, keys, folders, strict=True)
    ]
    keys = [(label, *key[1:]) for label, key in zip(labels, keys, strict=True)]
    return [f"{label} [{place}]" if keys.count(keys[place - 1]) > 1 else label for place, label in enumerate(labels, 1)]


def _find_baseline(name: str | None, folders: Sequence[Path], labels: Sequence[str]) -> int:
    if name is None:
        return 0
    for place, (folder, label) in enumerate(zip(folders, labels, strict=True)):
        if name in (str(folder), folder.name, label) or Path(name).resolve() == folder.resolve():
            return place
    raise UsageError(f"--baseline {name!r} is none of the results: say one of {', '.join(map(repr, labels))}")


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def _notes(read: Sequence[Result], machines: int) -> list[str]:
    notes = []
    if machines > 1:
        notes.append(
            f"Measured on {machines} machines: accuracy is compared, speed and memory are shown for each machine and "
            "never compared between them."
        )
    if len({each.stapes for each in read}) > 1:
        notes.append("Measured with different versions of stapes: " + ", ".join(sorted({r.stapes for r in read})) + ".")
    return notes


def _compare_set(
    counts: list[ResultCounts], named: Sequence[tuple[str, int, str]], baseline: int, examples: int, audio_bytes: int
) -> Set:
    """Compare the results of one corpus over the utterances that all of them have, with the same reference."""
    base = counts[baseline]
    rows, notes = _common(counts, base)
    systems = []
    for each, (label, index, machine), at in zip(counts, named, rows, strict=True):
        part = {name: values[at] for name, values in each.numbers.items()}
        whole = np.sort(at)  # in the order of the file, as the evaluation itself resampled them
        who = each.names(whole)
        systems.append(
            System(
                label=label,
                index=index,
                folder=each.folder,
                result=each.result,
                machine=machine,
                wer=_rate(each.errors[whole], each.numbers["words"][whole], who),
                cer=_rate(each.numbers["c"][whole], each.numbers["characters"][whole], who),
                substitutions=int(part["s"].sum()),
                deletions=int(part["d"].sum()),
                insertions=int(part["i"].sum()),
                words=int(part["words"].sum()),
                failed=int(part["failed"].sum()),
            )
        )
    speakers = base.names(rows[baseline])
    bins, members = _bins(base, rows[baseline])
    for each, at, system in zip(counts, rows, systems, strict=True):
        errors, words = each.errors[at], each.numbers["words"][at]
        for breakdown, of in members.items():
            parts = {}
            for place, name in enumerate(bins[breakdown]):
                inside = np.flatnonzero(of == place)
                rate = _rate(errors[inside], words[inside], [speakers[i] for i in inside], _BIN_RESAMPLES)
                parts[name] = Part(rate, int(words[inside].sum()), len(inside))
            system.breakdown[breakdown] = parts
    errors = np.stack([each.errors[at] for each, at in zip(counts, rows, strict=True)])
    words = base.numbers["words"][rows[baseline]]
    _test(systems, errors, words, speakers, baseline)
    codes = base.numbers["language"][rows[baseline]].tolist()
    languages = [None if code == UNKNOWN else base.languages[code] for code in codes]
    for system, after in zip(systems, errors, strict=True):
        if system is not systems[baseline]:
            system.changes = find_changes(errors[baseline], after, words, languages, speakers)
    worst, divided = _choose(errors, examples)
    texts = [c.read_words(at, s.errors, {*worst, *divided}) for c, at, s in zip(counts, rows, systems, strict=True)]
    recordings = Recordings([Path(base.result.corpus.manifest).parent, base.folder], audio_bytes)
    shown = {place: _example(place, texts, recordings) for place in [*worst, *divided]}
    duration = float(base.duration[rows[baseline]].sum())
    corpus = base.result.corpus
    return Set(
        corpus=corpus.name,
        normalizer=base.result.normalizer,
        utterances=errors.shape[1],
        hours=duration / 3600,
        speakers=len({who for who in speakers if who is not None}),
        baseline=systems[baseline],
        systems=systems,
        bins=bins,
        worst=[shown[p] for p in worst],
        divided=[shown[p] for p in divided],
        notes=notes,
    )


def _common(counts: list[ResultCounts], base: ResultCounts) -> tuple[list[np.ndarray], list[str]]:
    """Rows of the shared utterances in each result's own arrays, in the baseline's order."""
    same = [
        identifier
        for identifier, row in base.rows.items()
        if all((at := c.rows.get(identifier)) is not None and c.text[at] == base.text[row] for c in counts)
    ]
    most = max(len(each.rows) for each in counts)
    if len(same) < most:
        odd = next((c for c in counts if c.rows.keys() != base.rows.keys()), None)
        why = f"{odd.folder} has other utterances than {base.folder}" if odd else "their references differ"
        if len({each.result.corpus.sha256 for each in counts}) == 1:
            raise UsageError(
                f"the results name the same manifest but {why}, though it should be the same words: one of them is "
                "damaged or was cut; evaluate again"
            )
        if not same:
            raise UsageError(
                f"nothing to compare: {why}, and no utterance is in all results of {base.result.corpus.name}"
            )
    notes = []
    if len(same) < most:
        notes.append(
            f"Compared over the {len(same):,} utterances that all results have with the same reference, of up to "
            f"{most:,}. Speed, memory and the hallucination measures are of each whole run."
        )
    return [np.array([each.rows[identifier] for identifier in same], dtype=np.int64) for each in counts], notes


def _rate(errors: np.ndarray, words: np.ndarray, speakers: Iterable[str | None], resamples: int = RESAMPLES) -> Rate:
    tally = Tally()
    for wrong, spoken, speaker in zip(errors.tolist(), words.tolist(), speakers, strict=True):
        tally.add(wrong, spoken, speaker)
    return tally.interval(resamples=resamples)


def _bins(counts: ResultCounts, rows: np.ndarray) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
    """Names of the bins that hold something, and for each utterance the place of its bin (−1: unknown)."""
    bins: dict[str, list[str]] = {}
    members: dict[str, np.ndarray] = {}

    def keep(breakdown: str, names: list[str], codes: np.ndarray) -> None:
        held = [code for code in range(len(names)) if (codes == code).any()]
        places = np.full(len(names) + 1, UNKNOWN)
        places[held] = np.arange(len(held))
        bins[breakdown] = [names[code] for code in held]
        members[breakdown] = places[codes]  # the code −1 takes the last place, which stays −1

    duration, snr = counts.duration[rows], counts.snr[rows]
    keep("duration", _ranges(DURATION_EDGES), np.digitize(duration, DURATION_EDGES))
    keep("snr", _ranges(SNR_EDGES), np.where(np.isnan(snr), UNKNOWN, np.digitize(snr, SNR_EDGES)))
    keep("language", counts.languages, counts.numbers["language"][rows])
    return bins, members


def _ranges(edges: Sequence[float]) -> list[str]:
    between = [f"{low:g}–{high:g}" for low, high in pairwise(edges)]
    return [f"< {edges[0]:g}", *between, f"≥ {edges[-1]:g}"]


def _test(
    systems: list[System], errors: np.ndarray, words: np.ndarray, speakers: Sequence[str | None], baseline: int
) -> None:
    """Matched-pairs tests against the baseline, adjusted after Holm (1979) for how many there are."""
    others = [place for place in range(len(systems)) if place != baseline]
    if not words.sum():
        return
    raw = {place: matched_pairs(errors[place], errors[baseline]).p for place in others}
    adjusted, floor = {}, 0.0
    for rank, place in enumerate(sorted(others, key=lambda each: raw[each])):
        floor = max(floor, min(1.0, raw[place] * (len(others) - rank)))
        adjusted[place] = floor
    for place in others:
        gap = paired_bootstrap(errors[place], errors[baseline], words, speakers)
        systems[place].significance = Significance(gap, adjusted[place], errors.shape[1])


def _choose(errors: np.ndarray, examples: int) -> tuple[list[int], list[int]]:
    """Places of the utterances with most errors by any system, and of those where systems differ most."""
    most = errors.max(axis=0)
    gap = most - errors.min(axis=0)
    worst = [int(place) for place in np.argsort(-most, kind="stable")[:examples] if most[place] > 0]
    order = np.argsort(-gap, kind="stable")[: 2 * examples]
    divided = [int(place) for place in order if gap[place] > 0 and place not in worst]
    return worst, divided[:examples]


def _example(place: int, texts: Sequence[dict[int, Utterance]], recordings: Recordings) -> Example:
    spoken = texts[0][place]
    return Example(
        id=spoken.id,
        audio=spoken.audio,
        duration=spoken.duration,
        speaker=spoken.speaker,
        language=spoken.language,
        snr_db=spoken.snr_db,
        words=spoken.words,
        clip=recordings.clip(spoken.audio),
        transcripts=[
            Transcribed(difference(u.normalized_reference, u.normalized_hypothesis), u.errors, u.error)
            for u in (text[place] for text in texts)
        ],
    )
