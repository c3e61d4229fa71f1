"""Crops for pre-training: pieces of recordings, in a few lengths only, without padding.

Where no text says what has to be heard, a recording may be cut anywhere. Each utterance is cut to the longest of a few
lengths that fits into it, at a place that is drawn anew in each epoch; one that is much longer gives several pieces.
So there are few shapes, and next to no padding, which spares attention its mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stapes.audio.decode import SAMPLE_RATE
from stapes.data.buckets import QUANTUM_SECONDS, bucket_lengths
from stapes.data.manifest import Manifest, Utterance
from stapes.data.seeds import mix_keys

if TYPE_CHECKING:
    from stapes.data.batching import Augment


class Crops(Manifest):
    """A manifest's utterances in pieces that are cut to one of at most ``count`` lengths.

    Args:
        manifest: whole utterances.
        shortest: seconds of the shortest length; what is shorter stays whole, and is padded to it.
        longest: seconds of the longest length. An utterance of twice that gives two pieces, and so on.
        count: how many lengths at most; they are chosen so that little is cut off.

    Attributes:
        durations: what each piece is cut to, float64 (n,).
        edges: the lengths, ascending, float64.
    """

    def __init__(self, manifest: Manifest, *, shortest: float, longest: float, count: int) -> None:
        self.paths = manifest.paths
        self._manifest = manifest
        parts = np.maximum(1, (manifest.durations / longest + 1e-6).astype(np.int64))
        self._owners = np.repeat(np.arange(len(manifest)), parts)
        self._parts = parts
        self._places = np.arange(len(self._owners)) - np.repeat(np.cumsum(parts) - parts, parts)
        # Resampling may lose a sample or two of what a manifest promises.
        whole = (manifest.durations / parts)[self._owners] - QUANTUM_SECONDS
        self.edges = crop_lengths(whole, shortest, longest, count)
        self.durations = np.where(whole < self.edges[0], whole.clip(min=QUANTUM_SECONDS), cut_to(whole, self.edges))
        keys = manifest.keys[self._owners]
        self.keys = np.where(self._places == 0, keys, mix_keys(keys ^ self._places.astype(np.uint64), 1))

    def __len__(self) -> int:
        return len(self.durations)

    def __getitem__(self, number: int) -> Utterance:
        """A piece before it is cut, which `Cut` does."""
        utterance, place = self._manifest[int(self._owners[number])], int(self._places[number])
        parts = int(self._parts[self._owners[number]])
        if parts == 1:
            return utterance
        duration = utterance.duration / parts
        return replace(
            utterance,
            id=f"{utterance.id}#{place}",
            start=utterance.start + place * duration,
            duration=duration,
            text="",
        )

    def __iter__(self) -> Iterator[Utterance]:
        return (self[number] for number in range(len(self)))

    def cut(self, augment: Augment | None = None) -> Augment:
        """What cuts a piece to its length, after ``augment``, as `TrainingData` takes it."""
        return Cut(self.edges, augment)


class Cut:
    """Cuts recordings to the longest of ``edges`` (seconds) that fits, anywhere: an ``Augment``."""

    speeds: Sequence[float] = (1.0,)

    def __init__(self, edges: np.ndarray, augment: Augment | None = None) -> None:
        self._samples = np.round(edges * SAMPLE_RATE).astype(np.int64)
        self._augment = augment

    def __call__(self, samples: np.ndarray, speed: float, random: np.random.Generator) -> np.ndarray:
        place = random.random()
        if self._augment is not None:
            samples = self._augment(samples, speed, random)
        fitting = int(np.searchsorted(self._samples, len(samples), side="right"))
        if not fitting:
            return samples
        length = int(self._samples[fitting - 1])
        start = int(place * (len(samples) - length + 1))
        return samples[start : start + length]


def crop_lengths(lengths: np.ndarray, shortest: float, longest: float, count: int) -> np.ndarray:
    """At most ``count`` lengths, ascending, to which ``lengths`` (seconds) are cut with the least loss.

    Looked at from the far end, cutting to the longest that fits is padding to the shortest that holds, which
    `bucket_lengths` does.
    """
    end = longest + QUANTUM_SECONDS
    found = end - bucket_lengths(end - np.clip(lengths, shortest, longest), count)
    return np.unique(found.clip(min=shortest))


def cut_to(lengths: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The longest of ``edges`` (ascending) in each of ``lengths``; the shortest where none fits."""
    return edges[(np.searchsorted(edges, lengths + 1e-6, side="right") - 1).clip(min=0)]
