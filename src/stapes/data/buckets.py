"""Which utterances are batched together: buckets of similar length, in an order that can be entered anywhere.

A batch is padded to one of a few lengths and holds as many utterances as fit into a budget of seconds. So there are
few shapes, little padding, and every rank has the same shape at the same step.

For an epoch, utterances are lined up from long to short, those of a bucket in an order drawn by a hash of seed, epoch
and utterance. The line is cut into steps from its front: each takes as many as fit at the length of its first one.
Steps then come in an order that is drawn too. Where a run stands is the epoch and a number of steps. For another number
of ranks, or another budget, what is left of the epoch is lined up and cut anew: each utterance still comes exactly once
in the epoch, and going on takes the same time at any point. (lhotse's DynamicBucketingSampler, the model for the
rest, goes through all that was drawn before and needs the same number of ranks.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from stapes.audio.decode import SAMPLE_RATE
from stapes.data.seeds import mix_keys
from stapes.errors import UsageError

QUANTUM_SECONDS = 0.02
"""Padded lengths are multiples of it, or of a multiple."""

_MAX_CANDIDATES = 512  # lengths that may become a bucket's; the search is quadratic in them
_ENOUGH = 0.03  # share of padding within buckets that more of them need not lower
_FRACTIONS = 8  # an epoch's last batch may be any of so many parts of a full one: shapes stay few
_ORDER, _SPEED, _STEPS = 1, 2, 3  # what a hash is for


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape of batch."""

    seconds: float
    """Padded length."""
    rows: int
    """Utterances of one rank's batch."""

    @property
    def samples(self) -> int:
        """Padded length in samples of 16 kHz."""
        return round(self.seconds * SAMPLE_RATE)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one rank reads for one batch. All ranks have the same ``bucket`` and number of rows."""

    epoch: int
    bucket: int
    samples: int
    """Padded length in samples of 16 kHz."""
    indices: np.ndarray
    """Numbers of the utterances, int64 (rows,)."""
    speeds: np.ndarray
    """How much faster than recorded each is to be played, float64 (rows,)."""
    weights: np.ndarray
    """1 for an utterance, 0 for a row that only fills the shape up, float32 (rows,)."""
    ends_step: bool
    """Whether this is the last of the ``accumulate`` batches of a step."""
    ends_epoch: bool
    """Whether this is the rank's last batch of the epoch."""
    state: Mapping[str, Any]
    """The sampler's state once this batch is done. In the middle of a step it is that of the step's beginning."""


class BucketSampler:
    """An endless iterator of this rank's ``BatchPlan``s, one epoch after another.

    Not safe for threads. All ranks must be given the same arguments but for ``rank``.

    Args:
        lengths_seconds: of each utterance, (n,).
        budget_seconds: most seconds of a rank's batch, padding included.
        world_size, rank: how many processes share each step, and which this is.
        seed: of the order and the speeds.
        accumulate: batches of one rank that make up a step. A step holds ``world_size × accumulate`` batches of one
            shape, and which utterances are in it depends on that product alone.
        buckets: how many lengths at most; they are chosen so that padding is least, and only so many that it is little.
        max_rows: most utterances of a rank's batch, for very short ones.
        speeds: an utterance is played at one of these in an epoch, chosen by its hash, and sorted by the length that
            it then has.
        keys: what stands for each utterance in hashes, uint64 (n,); its number where not given.
        edges: the lengths of the buckets (seconds, ascending) where these are known; the last holds all.
        shuffle: False gives the longest first, in the same order in every epoch.

    Raises UsageError for arguments that make no sense, and where the longest utterance does not fit into the budget.
    """

    def __init__(
        self,
        lengths_seconds: Sequence[float] | np.ndarray,
        budget_seconds: float,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 0,
        *,
        accumulate: int = 1,
        buckets: int = 32,
        max_rows: int | None = None,
        speeds: Sequence[float] = (1.0,),
        keys: np.ndarray | None = None,
        edges: np.ndarray | None = None,
        shuffle: bool = True,
    ) -> None:
        self._lengths = np.asarray(lengths_seconds, np.float64)
        if not len(self._lengths) or not np.all(np.isfinite(self._lengths) & (self._lengths > 0)):
            raise UsageError("Batching needs at least one utterance, and lengths above 0 s: prepare the corpus again")
        if not 0 <= rank < world_size or accumulate < 1 or buckets < 1 or (max_rows is not None and max_rows < 1):
            raise UsageError(
                f"rank {rank} of {world_size}, {accumulate} batches a step, {buckets} buckets, {max_rows} rows: ranks "
                "count from 0, the others from 1"
            )
        if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
            raise UsageError(f"speeds are {tuple(speeds)}: give numbers above 0, such as 0.9, 1 and 1.1")
        self.world_size, self.rank, self.seed, self.accumulate = world_size, rank, seed, accumulate
        self._speeds = np.asarray(speeds, np.float64)
        self._keys = np.arange(len(self._lengths), dtype=np.uint64) if keys is None else np.asarray(keys, np.uint64)
        self._shuffle = shuffle
        # Each length at each speed: the buckets are the same in every epoch, and for any budget and number of ranks.
        played = (self._lengths[:, None] / self._speeds).reshape(-1)
        self._edges = bucket_lengths(played, buckets) if edges is None else np.asarray(edges, np.float64)
        self._cutting = _Cutting(world_size * accumulate, float(budget_seconds), max_rows)
        if self._edges[-1] > budget_seconds + 1e-9:
            raise UsageError(
                f"The longest utterance is {self._edges[-1]:.1f} s (at the slowest speed), and a batch holds "
                f"{budget_seconds:g} s: raise the budget, or leave such utterances out with `stapes prepare "
                "--max-seconds`"
            )
        self.buckets = [
            Bucket(float(seconds), int(rows))
            for seconds, rows in zip(self._edges, self._cutting.rows(self._edges), strict=True)
        ]
        self._fingerprint = zlib.crc32(
            np.concatenate([self._lengths, self._speeds]).tobytes(), zlib.crc32(self._keys.tobytes())
        )
        self._steps_of = lru_cache(maxsize=4)(self._count_steps)
        self._enter(_Position(0, 0, ()))

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position.epoch

    def __len__(self) -> int:
        """How many utterances an epoch has."""
        return len(self._lengths)

    def __iter__(self) -> Iterator[BatchPlan]:
        return self

    def __next__(self) -> BatchPlan:
        if not self._pending:
            self._pending = self._step()
        return self._pending.pop(0)

    def steps(self, epoch: int = 0) -> int:
        """How many steps an epoch has. Speeds that change from epoch to epoch can make it differ a little."""
        return self._steps_of(epoch)

    def trial_plans(self) -> Iterator[BatchPlan]:
        """One full batch of each shape, the longest first: what fits with these will fit later. Changes no state."""
        line = self._line(0)
        for number in reversed(range(len(self.buckets))):
            places = np.flatnonzero(line.buckets == number)[: self.buckets[number].rows]
            if len(places):
                places = np.resize(places, self.buckets[number].rows)
                yield self._plan(line, number, places, len(places), ends=(True, False), state=self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from: small, made of numbers, the same on every rank."""
        return {
            "seed": self.seed,
            "utterances": self._fingerprint,
            "bucket_seconds": self._edges.tolist(),
            "epoch": self._position.epoch,
            "step": self._position.step,
            "cutting": [*self._cutting],
            "before": [[*cutting, steps] for cutting, steps in self._position.before],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler was, of another number of ranks, budget or accumulation perhaps.

        Raises UsageError where utterances, speeds, buckets or seed are others: then the order is another one.
        """
        here = self.state_dict()
        for name, what in (
            ("utterances", "utterances, their lengths or the speeds"),
            ("seed", "seed"),
            ("bucket_seconds", "buckets"),
        ):
            if state.get(name) != here[name]:
                raise UsageError(
                    f"The {what} are not those of the checkpoint: give the same manifest and options, or start a new "
                    "run from its weights"
                )
        step, before = int(state["step"]), [(_Cutting(*cutting), steps) for *cutting, steps in state["before"]]
        if _Cutting(*state["cutting"]) != self._cutting:
            before += [(_Cutting(*state["cutting"]), step)] if step else []
            step = 0
        self._enter(_Position(int(state["epoch"]), step, tuple(before)))

    def _enter(self, position: _Position) -> None:
        """Stand at a step of an epoch."""
        line = self._line(position.epoch)
        for number, (cutting, steps) in enumerate(position.before):
            line = line.without(self._cut(line, cutting, number)[:steps])
        if not len(line.indices) and position.before:  # nothing was left
            return self._enter(_Position(position.epoch + 1, 0, ()))
        self._position, self._current = position, line
        self._steps = self._cut(line, self._cutting, len(position.before))
        self._pending: list[BatchPlan] = []
        return None

    def _line(self, epoch: int) -> _Line:
        """All utterances of an epoch, from long to short."""
        count = len(self._lengths)
        if len(self._speeds) > 1:
            chosen = mix_keys(self._keys, self.seed, epoch, _SPEED) % np.uint64(len(self._speeds))
            speeds = self._speeds[chosen.astype(np.int64)]
        else:
            speeds = np.full(count, self._speeds[0])
        played = self._lengths / speeds
        bucket = np.searchsorted(self._edges, played - 1e-6)
        within = mix_keys(self._keys, self.seed, epoch, _ORDER) if self._shuffle else -played
        order = np.lexsort((within, -bucket))
        return _Line(epoch, order, bucket[order], speeds[order])

    def _cut(self, line: _Line, cutting: _Cutting, number: int) -> np.ndarray:
        """Steps as (first, last) positions in the line, int64 (steps, 2), in the order that they come in.

        ``number`` counts how often the epoch was cut before, so that the order is a new one.
        """
        wanted = cutting.rows(self._edges) * cutting.shares
        starts, start = [], 0
        while start < len(line.indices):
            starts.append(start)
            start += int(wanted[line.buckets[start]])
        bounds = np.array([*starts, len(line.indices)], np.int64)
        steps = np.stack([bounds[:-1], bounds[1:]], 1)
        if not self._shuffle:
            return steps
        return steps[np.argsort(mix_keys(np.arange(len(steps)), self.seed, line.epoch, _STEPS, number), kind="stable")]

    def _count_steps(self, epoch: int) -> int:
        return len(self._cut(self._line(epoch), self._cutting, 0))

    def _step(self) -> list[BatchPlan]:
        """This rank's batches of the next step."""
        line, shares, position = self._current, self._cutting.shares, self._position
        start, stop = self._steps[position.step]
        before = self.state_dict()
        bucket = int(line.buckets[start])
        full = self.buckets[bucket].rows
        part = math.ceil(full / _FRACTIONS)
        rows = min(full, math.ceil(math.ceil((stop - start) / shares) / part) * part)
        # What is beyond the end repeats the beginning, to fill the shape up.
        places = start + np.arange(rows * shares) % (stop - start)
        ends_epoch = position.step + 1 == len(self._steps)
        if ends_epoch:
            self._enter(_Position(position.epoch + 1, 0, ()))
        else:
            self._position = _Position(position.epoch, position.step + 1, position.before)
        after = self.state_dict()
        plans = []
        for batch in range(self.accumulate):
            # Every so many-th: each rank gets its share of the longest and of the fillers.
            first, last = batch * self.world_size + self.rank, batch == self.accumulate - 1
            real = len(range(first, stop - start, shares))
            ends = (last, last and ends_epoch)
            plans.append(
                self._plan(line, bucket, places[first::shares], real, ends=ends, state=after if last else before)
            )
        return plans

    def _plan(
        self, line: _Line, bucket: int, places: np.ndarray, real: int, *, ends: tuple[bool, bool], state: Any
    ) -> BatchPlan:
        weights = (np.arange(len(places)) < real).astype(np.float32)
        samples = self.buckets[bucket].samples
        return BatchPlan(
            line.epoch, bucket, samples, line.indices[places], line.speeds[places], weights, *ends, state=state
        )


class _Cutting(NamedTuple):
    """What decides how a line is cut into steps."""

    shares: int
    budget_seconds: float
    max_rows: int | None

    def rows(self, edges: np.ndarray) -> np.ndarray:
        """Utterances of one rank's batch, for each bucket."""
        rows = (self.budget_seconds / edges + 1e-9).astype(np.int64)
        return rows if self.max_rows is None else np.minimum(rows, self.max_rows)


class _Position(NamedTuple):
    """So many steps into an epoch, of which others (cut otherwise, so many steps of each) came before."""

    epoch: int
    step: int
    before: tuple[tuple[_Cutting, int], ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """Utterances of an epoch from long to short: their numbers, buckets and speeds."""

    epoch: int
    indices: np.ndarray
    buckets: np.ndarray
    speeds: np.ndarray

    def without(self, steps: np.ndarray) -> _Line:
        """The line without these steps, (first, last) each."""
        change = np.zeros(len(self.indices) + 1, np.int64)
        np.add.at(change, steps[:, 0], 1)
        np.add.at(change, steps[:, 1], -1)
        left = np.cumsum(change[:-1]) == 0
        return _Line(self.epoch, self.indices[left], self.buckets[left], self.speeds[left])


def bucket_lengths(lengths_seconds: np.ndarray, count: int) -> np.ndarray:
    """At most ``count`` padded lengths (seconds, ascending) with which padding is least, by dynamic programming.

    Each utterance is padded to the shortest of them that holds it. There are as few as keep padding within 3 %. They
    are multiples of ``QUANTUM_SECONDS``, or of more where very many lengths occur.
    """
    quantum = QUANTUM_SECONDS
    while True:
        quantized = np.ceil(np.asarray(lengths_seconds) / quantum - 1e-6).astype(np.int64).clip(min=1)
        candidates, occurrences = np.unique(quantized, return_counts=True)
        if len(candidates) <= _MAX_CANDIDATES:
            break
        quantum *= 2
    up_to = np.concatenate([[0], np.cumsum(occurrences)])
    # padded[i, j]: total length when the candidates from i to j (inclusive) are padded to j.
    padded = (candidates * (up_to[None, 1:] - up_to[:-1, None])).astype(np.float64)
    padded[np.tril_indices(len(candidates), -1)] = np.inf
    real = float(np.sum(lengths_seconds)) / quantum
    best, chosen = padded[0], []
    while len(chosen) + 1 < min(count, len(candidates)) and real < (1 - _ENOUGH) * best[-1]:
        totals = np.concatenate([[np.inf], best[:-1]])[:, None] + padded
        chosen.append(totals.argmin(0))
        best = np.minimum.reduce(totals, 0)
    edges, last = [len(candidates) - 1], len(candidates) - 1
    for first in reversed(chosen):
        last = int(first[last]) - 1
        edges.append(last)
    return candidates[sorted(edges)] * quantum
