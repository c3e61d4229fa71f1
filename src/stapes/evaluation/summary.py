"""From utterances to the figures of a result, one by one: memory does not grow with their number."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from stapes.evaluation.results import Counts, Group, Hallucination, Rate, Utterance
from stapes.evaluation.scoring import Tally

DURATION_EDGES = (2.0, 5.0, 10.0, 20.0, 30.0)
"""Seconds."""
SNR_EDGES = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)
"""dB."""
_GROUP_RESAMPLES = 1000
_MOST_INTERVALS = 500  # of the speakers in a breakdown: thousands would take minutes and no one reads them


@dataclass(slots=True, kw_only=True)
class Summary:
    """What ``summarize`` found; ``audio_seconds`` are of all utterances."""

    wer: Rate
    cer: Rate
    counts: Counts
    failed: int
    hallucination: Hallucination
    breakdown: dict[str, dict[str, Group]]
    latency_p50: float | None
    latency_p95: float | None
    audio_seconds: float
    utterances: int


@dataclass(slots=True)
class _Sums:
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    hits: int = 0
    failed: int = 0
    loops: int = 0
    looping: int = 0
    silent_insertions: int = 0
    silent_seconds: float = 0.0
    seconds: float = 0.0
    utterances: int = 0
    latencies: array[float] = field(default_factory=lambda: array("d"))


def summarize(utterances: Iterable[Utterance], *, seed: int = 0) -> Summary:
    """Add up utterances. A failed one has all of its words deleted, as its counts say, and no latency."""
    words, characters, sums = Tally(), Tally(), _Sums()
    groups: dict[str, defaultdict[str, Tally]] = {
        kind: defaultdict(Tally) for kind in ("language", "speaker", "duration", "snr")
    }
    for each in utterances:
        words.add(each.errors, each.words, each.speaker)
        characters.add(each.char_errors, each.characters, each.speaker)
        for kind, key in _keys(each):
            groups[kind][key].add(each.errors, each.words, each.speaker)
        _count(sums, each)
    few = len(groups["speaker"]) <= _MOST_INTERVALS
    return Summary(
        wer=words.interval(seed=seed),
        cer=characters.interval(seed=seed),
        counts=Counts(
            words=words.words,
            hits=sums.hits,
            substitutions=sums.substitutions,
            deletions=sums.deletions,
            insertions=sums.insertions,
        ),
        failed=sums.failed,
        hallucination=Hallucination(
            silence_insertions_per_minute=(
                60 * sums.silent_insertions / sums.silent_seconds if sums.silent_seconds else None
            ),
            silence_minutes=sums.silent_seconds / 60,
            repeated_ngram_utterances=sums.looping,
            repeated_ngrams=sums.loops,
            insertion_rate=sums.insertions / words.words if words.words else None,
        ),
        breakdown={
            kind: {key: _group(tally, seed, kind != "speaker" or few) for key, tally in _ordered(kind, found)}
            for kind, found in groups.items()
        },
        latency_p50=_percentile(sums.latencies, 50),
        latency_p95=_percentile(sums.latencies, 95),
        audio_seconds=sums.seconds,
        utterances=sums.utterances,
    )


def _count(sums: _Sums, each: Utterance) -> None:
    sums.hits += each.hits
    sums.substitutions += each.substitutions
    sums.deletions += each.deletions
    sums.insertions += each.insertions
    sums.utterances += 1
    sums.seconds += each.duration
    sums.loops += each.repeated_ngrams
    sums.looping += each.repeated_ngrams > 0
    if each.error is not None:
        sums.failed += 1
        return
    if not each.normalized_reference:
        sums.silent_insertions += each.insertions
        sums.silent_seconds += each.duration
    if each.latency is not None:
        sums.latencies.append(each.latency)


def _keys(each: Utterance) -> list[tuple[str, str]]:
    keys = [("duration", _range(each.duration, DURATION_EDGES, "s"))]
    if each.language is not None:
        keys.append(("language", each.language))
    if each.speaker is not None:
        keys.append(("speaker", each.speaker))
    if each.snr_db is not None:
        keys.append(("snr", _range(each.snr_db, SNR_EDGES, "dB")))
    return keys


def _range(value: float, edges: tuple[float, ...], unit: str) -> str:
    place = bisect_right(edges, value)
    if place == 0:
        return f"< {edges[0]:g} {unit}"
    if place == len(edges):
        return f"≥ {edges[-1]:g} {unit}"
    return f"{edges[place - 1]:g}–{edges[place]:g} {unit}"


def _ordered(kind: str, found: dict[str, Tally]) -> list[tuple[str, Tally]]:
    edges, unit = {"duration": (DURATION_EDGES, "s"), "snr": (SNR_EDGES, "dB")}.get(kind, ((), ""))
    if not edges:
        return sorted(found.items())
    order = [_range(value, edges, unit) for value in (edges[0] - 1, *edges)]
    return [(key, found[key]) for key in order if key in found]


def _group(tally: Tally, seed: int, with_interval: bool) -> Group:
    rate = tally.interval(seed=seed, resamples=_GROUP_RESAMPLES) if with_interval else None
    return Group(
        wer=tally.rate,
        low=rate.low if rate else None,
        high=rate.high if rate else None,
        words=tally.words,
        utterances=sum(tally.utterances.values()),
    )


def _percentile(values: array[float], percent: float) -> float | None:
    return float(np.percentile(np.frombuffer(values), percent)) if values else None
