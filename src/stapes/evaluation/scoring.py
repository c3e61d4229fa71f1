"""Errors of transcripts, their rates with intervals, and tests of whether two systems differ.

A rate is errors over words of the whole set (not a mean of rates), so its uncertainty comes from resampling: whole
speakers where they are known, because the words of one speaker are right or wrong together (Bisani & Ney 2004,
"Bootstrap estimates for confidence intervals in ASR performance evaluation").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from stapes.errors import UsageError
from stapes.evaluation.results import Rate

MIN_SPEAKERS = 20
"""Below this many speakers, resampling them says little: the interval is then by utterance."""
RESAMPLES = 2000
CONFIDENCE = 0.95

NGRAM_WORDS = 4
NGRAM_CHARACTERS = 10

# Units with errors below which a resample's standard error is too unsteady to divide by.
_MIN_ERRING = 15

# Cells of one block of the table of resamples × units: bounds memory at 64 MiB whatever the set's size.
_BLOCK = 1 << 23


class Errors(NamedTuple):
    """Units (words or characters) of one utterance or of a whole set, aligned by minimum edit distance."""

    hits: int
    substitutions: int
    deletions: int
    insertions: int


def word_errors(reference: str, hypothesis: str) -> Errors:
    """jiwer's count for one pair of normalised texts. An empty reference counts insertions only."""
    if reference == hypothesis:
        return Errors(len(reference.split()), 0, 0, 0)
    output = _jiwer().process_words(reference, hypothesis)
    return Errors(output.hits, output.substitutions, output.deletions, output.insertions)


def character_errors(reference: str, hypothesis: str) -> Errors:
    """jiwer's count of characters, spaces included, for one pair of normalised texts."""
    if reference == hypothesis:
        return Errors(len(reference), 0, 0, 0)
    output = _jiwer().process_characters(reference, hypothesis)
    return Errors(output.hits, output.substitutions, output.deletions, output.insertions)


def _jiwer() -> Any:
    try:
        import jiwer
    except ImportError as error:
        raise UsageError("evaluating needs jiwer: pip install 'stapes[evaluate]'") from error
    return jiwer


def repeated_ngrams(reference: str, hypothesis: str) -> int:
    """Loops: how often the hypothesis says an n-gram again that the reference does not say as often.

    N-grams of 4 words; of 10 characters where the text is spelt out character by character. The sum over n-grams of
    their count in the hypothesis above the larger of 1 and their count in the reference.
    """
    words = hypothesis.split()
    spelt = bool(words) and sum(map(len, words)) < 1.5 * len(words)
    size = NGRAM_CHARACTERS if spelt else NGRAM_WORDS
    written = Counter(zip(*(words[i:] for i in range(size)), strict=False))
    if not written or max(written.values()) < 2:
        return 0
    spoken = reference.split()
    said = Counter(zip(*(spoken[i:] for i in range(size)), strict=False))
    return sum(max(0, count - max(1, said[ngram])) for ngram, count in written.items())


@dataclass(slots=True)
class Tally:
    """Errors and words of a set, kept small: utterances as a count of each (errors, words) pair, speakers as sums.

    Resampling needs nothing else of an utterance, so 100,000 of them take the room of a few hundred pairs.
    """

    utterances: Counter[tuple[int, int]] = field(default_factory=Counter)
    speakers: dict[str, list[int]] = field(default_factory=dict)
    errors: int = 0
    words: int = 0
    anonymous: int = 0
    """Utterances of unknown speakers."""

    def add(self, errors: int, words: int, speaker: str | None = None) -> None:
        """Count one utterance."""
        self.errors += errors
        self.words += words
        self.utterances[errors, words] += 1
        if speaker is None:
            self.anonymous += 1
        else:
            sums = self.speakers.setdefault(speaker, [0, 0])
            sums[0] += errors
            sums[1] += words

    @property
    def rate(self) -> float | None:
        """Errors per word; None without words."""
        return self.errors / self.words if self.words else None

    def method(self) -> tuple[str, str]:
        """How the interval is made, and why."""
        if self.anonymous:
            return "bootstrap by utterance", f"{self.anonymous} utterances are of unknown speakers"
        if len(self.speakers) < MIN_SPEAKERS:
            count = len(self.speakers)
            return "bootstrap by utterance", (
                f"only {count} speaker{'s' * (count != 1)}: fewer than {MIN_SPEAKERS} cannot tell how speakers vary, "
                "so the interval says how far other utterances of these speakers would differ"
            )
        return "bootstrap by speaker", f"{len(self.speakers)} speakers are known"

    def interval(self, *, seed: int = 0, resamples: int = RESAMPLES) -> Rate:
        """The rate with its 95 % interval."""
        method, why = self.method()
        if method == "bootstrap by speaker":
            sums = np.array(list(self.speakers.values()), dtype=np.int64)
            errors, words, times = sums[:, 0], sums[:, 1], None
        else:
            pairs = np.array(list(self.utterances), dtype=np.int64).reshape(-1, 2)
            errors, words = pairs[:, 0], pairs[:, 1]
            times = np.fromiter(self.utterances.values(), np.int64, len(self.utterances))
        low, high = ratio_interval(errors, words, times, seed=seed, resamples=resamples)
        return Rate(value=self.rate, low=low, high=high, method=method, why=why)


def ratio_interval(
    errors: np.ndarray, words: np.ndarray, times: np.ndarray | None = None, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float | None, float | None]:
    """95 % bootstrap-t interval of ``errors.sum() / words.sum()``, units resampled with replacement.

    errors, words: ``(units,)``; times: how many such units there are, 1 each when None. (None, None) for fewer than
    two units or without words.

    Bootstrap-t (Efron & Tibshirani 1993, §12.5) on the logarithm of the rate: every resample is studentised by the
    linearised standard error of a ratio. With 30 speakers of uneven rates the percentile method covers the truth in
    about 90 % instead of 95 %; with tails expanded for few units (Hesterberg 2015) this keeps within 93 to 97 %, unless
    a few speakers out of few have most of the errors. Where fewer than 15 units have errors, the percentile method with
    the same tails stands in: studentising would give limits without sense.
    """
    times = np.ones(len(errors), np.int64) if times is None else times
    count = int(times.sum())
    if count < 2 or not int((words * times).sum()):
        return None, None
    generator = np.random.default_rng(seed)
    e, w = errors.astype(np.float64), words.astype(np.float64)
    moments = np.stack([e, w, e * e, e * w, w * w], axis=1)
    totals = np.empty((resamples, 5))
    step = max(1, _BLOCK // len(e))
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        totals[start : start + size] = generator.multinomial(count, times / count, size=size) @ moments
    rate, error = _ratio_and_error(times @ moments, count)
    if error == 0.0:
        return float(rate), float(rate)
    tail = _expanded_tail(count)
    rates, standard_errors = _ratio_and_error(totals[totals[:, 1] > 0], count)
    if not len(rates):
        return None, None
    if int(times[e > 0].sum()) < _MIN_ERRING:
        low, high = np.quantile(rates, [tail, 1 - tail])
        return float(low), float(high)
    usable = standard_errors > 0
    studentised = np.log(rates[usable] / rate) * rates[usable] / standard_errors[usable]
    below, above = np.quantile(studentised, [tail, 1 - tail])
    low, high = rate * np.exp(np.array([-above, -below]) * error / rate)
    return float(low), float(high)


def _ratio_and_error(totals: np.ndarray, count: int) -> tuple[Any, Any]:
    """Σe / Σw and its standard error from (Σe, Σw, Σe², Σew, Σw²) along the last axis."""
    e, w, ee, ew, ww = np.moveaxis(totals, -1, 0)
    ratio = e / w
    residual = np.maximum(ee - 2 * ratio * ew + ratio * ratio * ww, 0.0)
    # Residuals below rounding are none.
    residual = np.where(residual < 1e-9 * (ee + 1e-30), 0.0, residual)
    return ratio, np.sqrt(residual * count / max(1, count - 1)) / w


class MatchedPairs(NamedTuple):
    """``difference``: mean errors per utterance, first system less second; ``z``, and two-sided ``p``."""

    difference: float
    z: float
    p: float


def matched_pairs(errors_a: Sequence[int] | np.ndarray, errors_b: Sequence[int] | np.ndarray) -> MatchedPairs:
    """Matched-pairs sentence-segment word-error test (MAPSSWE; Gillick & Cox 1989, as NIST's ``sc_stats``).

    errors: word errors of each utterance, the same utterances in the same order. Utterances are the segments: errors
    in different ones are taken to be independent. ``p`` is 1 where no utterance differs. Raises UsageError for
    unequal lengths.
    """
    a, b = _paired(errors_a, errors_b)
    differences = a - b
    count = len(differences)
    mean = float(differences.mean()) if count else 0.0
    deviation = float(differences.std(ddof=1)) if count > 1 else 0.0
    if deviation == 0.0:
        # All differ by the same: certain if by anything and there is more than one.
        certain = mean != 0.0 and count > 1
        return MatchedPairs(mean, math.copysign(math.inf, mean) if certain else 0.0, 0.0 if certain else 1.0)
    z = mean / (deviation / math.sqrt(count))
    return MatchedPairs(mean, z, math.erfc(abs(z) / math.sqrt(2)))


class PairedDifference(NamedTuple):
    """Difference of two rates (first less second) with its 95 % interval and two-sided ``p``."""

    difference: float
    low: float
    high: float
    p: float
    method: str


def paired_bootstrap(
    errors_a: Sequence[int] | np.ndarray,
    errors_b: Sequence[int] | np.ndarray,
    words: Sequence[int] | np.ndarray,
    speakers: Sequence[str | None] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PairedDifference:
    """Paired bootstrap of the difference of two word error rates on the same utterances (Bisani & Ney 2004).

    Speakers are resampled whole where at least 20 are known and none is missing, else utterances. ``p`` is twice the
    smaller share of resamples on either side of 0, at least 1 / (resamples + 1). Raises UsageError for unequal lengths
    or without words.
    """
    a, b = _paired(errors_a, errors_b)
    w, _ = _paired(words, errors_a)
    if not w.sum():
        raise UsageError("the two results have no words in common: nothing to compare")
    method = "bootstrap by utterance"
    if speakers is not None and all(speaker is not None for speaker in speakers):
        names, places = np.unique(np.asarray(speakers, dtype=str), return_inverse=True)
        if len(names) >= MIN_SPEAKERS:
            method = "bootstrap by speaker"
            a, b, w = (np.bincount(places, weights=each, minlength=len(names)) for each in (a, b, w))
    rows, times = np.unique(np.stack([a - b, w], axis=1), axis=0, return_counts=True)
    count = int(times.sum())
    generator = np.random.default_rng(seed)
    differences = np.empty(resamples)
    step = max(1, _BLOCK // len(rows))
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        sums = generator.multinomial(count, times / count, size=size) @ rows
        differences[start : start + size] = np.divide(sums[:, 0], sums[:, 1], out=np.zeros(size), where=sums[:, 1] > 0)
    observed = float((a - b).sum() / w.sum())
    tail = _expanded_tail(count)
    low, high = np.quantile(differences, [tail, 1 - tail])
    below, above = int((differences <= 0).sum()), int((differences >= 0).sum())
    p = min(1.0, 2 * (min(below, above) + 1) / (resamples + 1))
    return PairedDifference(observed, float(low), float(high), p, method)


def _expanded_tail(count: int) -> float:
    """Hesterberg's expanded percentile: the tail whose normal quantile is Student's, times √(n/(n−1))."""
    if count < 3:
        return (1 - CONFIDENCE) / 2
    normal = NormalDist()
    z = normal.inv_cdf((1 + CONFIDENCE) / 2)
    freedom = count - 1
    # Cornish–Fisher expansion of Student's quantile; within 0.1 % from 5 degrees of freedom on.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-t * math.sqrt(count / (count - 1)))


def _paired(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise UsageError(f"{len(first)} and {len(second)} utterances cannot be paired: compare the same ones")
    return first, second
