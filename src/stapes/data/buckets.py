"""Which utterances are batched together: buckets of similar length, in an order that can be entered anywhere.

Utterances are sorted into a few buckets by length; a batch holds utterances of one bucket, padded to the bucket's
length, as many as fit into a budget of seconds. So there are few shapes, little padding, and every rank has the same
shape at the same step.

In every epoch each bucket has an order of its own, by a hash of seed, epoch and utterance. A step draws a bucket, with
a probability that follows what is left in it, and takes the next utterances from its order; where the bucket runs out,
the step is filled from the next shorter ones. Where a run stands is thus the number taken from each bucket, a dozen
integers, which say nothing of how many ranks took them: going on from there takes the same time at any point, on any
number of ranks, and each utterance still comes exactly once in the epoch. (lhotse's DynamicBucketingSampler, the
model for the rest, goes through all that was drawn before and needs the same number of ranks.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stapes.audio.decode import SAMPLE_RATE
from stapes.data.seeds import mix_keys, uniform
from stapes.errors import UsageError

QUANTUM_SECONDS = 0.1
"""Padded lengths are multiples of it."""

_MAX_CANDIDATES = 512  # lengths that may become a bucket's; the search is quadratic in them
_FRACTIONS = 8  # an epoch's last batch may be any of so many parts of a full one: shapes stay few
_ORDER, _SPEED, _CHOICE = 1, 2, 3  # what a hash is for


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
            bucket, and which utterances are in it depends on that product alone.
        buckets: how many lengths at most; they are chosen so that padding is least.
        max_rows: most utterances of a rank's batch, for very short ones.
        speeds: an utterance is played at one of these in an epoch, chosen by its hash, and sorted by the length that
            it then has.
        keys: what stands for each utterance in hashes, uint64 (n,); its number where not given.
        shuffle: False gives the longest first, in the same order in every epoch.
        drop_last: leave out the utterances of an epoch that do not fill a whole step.

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
        buckets: int = 12,
        max_rows: int | None = None,
        speeds: Sequence[float] = (1.0,),
        keys: np.ndarray | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._lengths = np.asarray(lengths_seconds, np.float64)
        if not len(self._lengths) or not np.all(np.isfinite(self._lengths) & (self._lengths > 0)):
            raise UsageError("Batching needs at least one utterance, and lengths above 0 s: prepare the corpus again")
        if not 0 <= rank < world_size or accumulate < 1 or buckets < 1 or (max_rows is not None and max_rows < 1):
            raise UsageError(
                f"rank {rank} of {world_size}, {accumulate} batches a step, {buckets} buckets: count from 1"
            )
        if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
            raise UsageError(f"speeds are {tuple(speeds)}: give numbers above 0, such as 0.9, 1 and 1.1")
        self.world_size, self.rank, self.seed, self.accumulate = world_size, rank, seed, accumulate
        self._speeds = np.asarray(speeds, np.float64)
        self._keys = np.arange(len(self._lengths), dtype=np.uint64) if keys is None else np.asarray(keys, np.uint64)
        self._shuffle, self._drop_last = shuffle, drop_last
        # Each length at each speed: the buckets are the same in every epoch, and for any budget and number of ranks.
        self._edges = bucket_lengths((self._lengths[:, None] / self._speeds).reshape(-1), buckets)
        self.buckets = [self._bucket(seconds, budget_seconds, max_rows) for seconds in self._edges]
        self._epoch = 0
        self._taken = np.zeros(len(self.buckets), np.int64)
        self._order = self._order_of(0)
        self._pending: list[BatchPlan] = []

    def _bucket(self, seconds: float, budget: float, max_rows: int | None) -> Bucket:
        rows = int(budget / seconds + 1e-9)
        if rows < 1:
            raise UsageError(
                f"The longest utterance is {self._edges[-1]:.1f} s (slowed down as asked), and a batch holds "
                f"{budget:g} s: raise the budget, or leave such utterances out with `stapes prepare --max-seconds`"
            )
        return Bucket(float(seconds), rows if max_rows is None else min(rows, max_rows))

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

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
        sizes, taken, count = self._order_of(epoch).sizes, np.zeros(len(self.buckets), np.int64), 0
        while (choice := self._choose(epoch, sizes - taken, int(taken.sum()))) is not None:
            bucket, rows = choice
            taken += self._drawn(sizes - taken, bucket, rows * self._shares)
            count += 1
        return count

    def seconds(self, epoch: int = 0) -> float:
        """Seconds of audio in an epoch, as they are played, all ranks together."""
        return float(self._order_of(epoch).lengths(self._lengths).sum())

    def trial_plans(self) -> Iterator[BatchPlan]:
        """One full batch of each shape, the longest first: what fits with these will fit later. Changes no state."""
        order = self._order_of(0)
        for number in reversed(range(len(self.buckets))):
            bucket = self.buckets[number]
            start = order.starts[number]
            rows = np.arange(start, start + min(bucket.rows, order.sizes[number]))
            if len(rows):
                yield self._plan(order, number, np.resize(order.indices[rows], bucket.rows), bucket.rows, ends=True)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from: small, made of numbers, the same on every rank."""
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "taken": self._taken.tolist(),
            "bucket_seconds": [bucket.seconds for bucket in self.buckets],
            "utterances": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler was, of another number of ranks, budget or accumulation perhaps.

        Raises UsageError where utterances, speeds, buckets or seed are others: then the order is another one.
        """
        here = self.state_dict()
        for name, what in (
            ("utterances", "utterances, their lengths or the speeds"),
            ("seed", "seed"),
            ("bucket_seconds", "number of buckets"),
        ):
            if state.get(name) != here[name]:
                raise UsageError(
                    f"The {what} are not those of the checkpoint: give the same manifest and options, or start "
                    "a new run from its weights"
                )
        self._epoch = int(state["epoch"])
        self._taken = np.asarray(state["taken"], np.int64)
        self._order = self._order_of(self._epoch)
        self._pending = []

    def _fingerprint(self) -> int:
        return zlib.crc32(np.concatenate([self._lengths, self._speeds]).tobytes(), zlib.crc32(self._keys.tobytes()))

    @property
    def _shares(self) -> int:
        return self.world_size * self.accumulate

    def _order_of(self, epoch: int) -> _Order:
        cached: _Order | None = getattr(self, "_order", None)
        if cached is not None and cached.epoch == epoch:
            return cached
        count = len(self._lengths)
        if len(self._speeds) > 1:
            chosen = mix_keys(self._keys, self.seed, epoch, _SPEED) % np.uint64(len(self._speeds))
            speeds = self._speeds[chosen.astype(np.int64)]
        else:
            speeds = np.full(count, self._speeds[0])
        played = self._lengths / speeds
        bucket = np.searchsorted(self._edges, played - 1e-6)
        within = mix_keys(self._keys, self.seed, epoch, _ORDER) if self._shuffle else -played
        sizes = np.bincount(bucket, minlength=len(self._edges)).astype(np.int64)
        return _Order(epoch, np.lexsort((within, bucket)), speeds, sizes, np.concatenate([[0], np.cumsum(sizes)]))

    def _choose(self, epoch: int, left: np.ndarray, done: int) -> tuple[int, int] | None:
        """Bucket and rows per batch of the next step, given what is left in each bucket; None: the epoch is over."""
        needed = np.array([bucket.rows for bucket in self.buckets]) * self._shares
        full = (left > 0) & (np.cumsum(left) >= needed)
        if full.any():
            if not self._shuffle:
                bucket = int(np.flatnonzero(full)[-1])
            else:
                shares = np.cumsum(np.where(full, left, 0))
                drawn = uniform(self.seed, epoch, _CHOICE, done) * shares[-1]
                bucket = int(np.searchsorted(shares, drawn, side="right"))
            return bucket, self.buckets[bucket].rows
        total = int(left.sum())
        if not total or (self._drop_last and done):
            return None
        if self._drop_last:
            raise UsageError(
                f"{total} utterances do not fill one step: lower the batch's seconds, or keep the last batch"
            )
        # What is left all fits into one step of its longest bucket.
        bucket = int(np.flatnonzero(left)[-1])
        part = math.ceil(self.buckets[bucket].rows / _FRACTIONS)
        rows = math.ceil(math.ceil(total / self._shares) / part) * part
        return bucket, min(rows, self.buckets[bucket].rows)

    @staticmethod
    def _drawn(left: np.ndarray, bucket: int, rows: int) -> np.ndarray:
        """How many a step of so many rows takes from each bucket: its own first, then the next shorter ones."""
        drawn = np.zeros_like(left)
        for number in range(bucket, -1, -1):
            drawn[number] = min(rows, left[number])
            rows -= drawn[number]
        return drawn

    def _step(self) -> list[BatchPlan]:
        """This rank's batches of the next step."""
        order, shares = self._order, self._shares
        choice = self._choose(self._epoch, order.sizes - self._taken, int(self._taken.sum()))
        if choice is None:  # a state at the very end of an epoch
            self._next_epoch()
            return self._step()
        bucket, rows = choice
        drawn = self._drawn(order.sizes - self._taken, bucket, rows * shares)
        starts = order.starts[:-1] + self._taken
        parts = [order.indices[starts[n] : starts[n] + drawn[n]] for n in range(bucket, -1, -1) if drawn[n]]
        indices = np.concatenate(parts)
        real = len(indices)
        indices = np.resize(indices, rows * shares)  # repeats from the beginning where the shape asks for more
        before = self.state_dict()
        self._taken = self._taken + drawn
        ends_epoch = self._choose(self._epoch, order.sizes - self._taken, int(self._taken.sum())) is None
        if ends_epoch:
            self._next_epoch()
        after = self.state_dict()
        plans = []
        for batch in range(self.accumulate):
            # Every so many-th: each rank gets its share of the longest and of the fillers.
            mine = slice(batch * self.world_size + self.rank, None, shares)
            ends = batch == self.accumulate - 1
            plan = self._plan(order, bucket, indices[mine], len(range(real)[mine]), ends=ends)
            plans.append(replace(plan, ends_epoch=ends and ends_epoch, state=after if ends else before))
        return plans

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._taken = np.zeros_like(self._taken)
        self._order = self._order_of(self._epoch)

    def _plan(self, order: _Order, bucket: int, indices: np.ndarray, real: int, *, ends: bool) -> BatchPlan:
        weights = (np.arange(len(indices)) < real).astype(np.float32)
        samples = self.buckets[bucket].samples
        return BatchPlan(
            order.epoch, bucket, samples, indices, order.speeds[indices], weights, ends, False, self.state_dict()
        )


@dataclass(frozen=True, slots=True)
class _Order:
    """The utterances of an epoch: their numbers bucket by bucket, the speed of each, where each bucket begins."""

    epoch: int
    indices: np.ndarray
    speeds: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray

    def lengths(self, recorded: np.ndarray) -> np.ndarray:
        return recorded / self.speeds


def bucket_lengths(lengths_seconds: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` padded lengths (seconds, ascending) with which padding is least, by dynamic programming.

    Each utterance is padded to the shortest of them that holds it. Fewer where fewer lengths occur; multiples of
    ``QUANTUM_SECONDS``, or of more where there are very many.
    """
    quantum = QUANTUM_SECONDS
    while True:
        quantized = np.ceil(np.asarray(lengths_seconds) / quantum - 1e-6).astype(np.int64).clip(min=1)
        candidates, occurrences = np.unique(quantized, return_counts=True)
        if len(candidates) <= _MAX_CANDIDATES:
            break
        quantum *= 2
    if len(candidates) <= count:
        return candidates * quantum
    up_to = np.concatenate([[0], np.cumsum(occurrences)])
    # padded[i, j]: total length when the candidates from i to j (inclusive) are padded to j.
    padded = (candidates * (up_to[None, 1:] - up_to[:-1, None])).astype(np.float64)
    padded[np.tril_indices(len(candidates), -1)] = np.inf
    best, chosen = padded[0], []
    for _ in range(count - 1):
        totals = np.concatenate([[np.inf], best[:-1]])[:, None] + padded
        chosen.append(totals.argmin(0))
        best = np.minimum.reduce(totals, 0)
    edges, last = [len(candidates) - 1], len(candidates) - 1
    for first in reversed(chosen):
        last = int(first[last]) - 1
        edges.append(last)
    return candidates[sorted(edges)] * quantum
