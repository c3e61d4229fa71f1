"""Packs regions of speech into the windows of at most 30 s that Whisper takes, and maps times back.

A window costs the same however little speech it holds, so windows are filled as far as possible, but they are parted
at pauses. Short gaps between regions stay as they are, because Whisper reads punctuation and times off pauses; long
ones are cut out, and the times of the result are put back on the recording's own clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from stapes.audio.vad import SAMPLE_RATE, Region

WINDOW = 30 * SAMPLE_RATE

KEPT_GAP = SAMPLE_RATE
"""Samples: gaps between regions of a window up to this length stay in it."""

LONG_PAUSE = 0.6
"""Seconds from which on a pause surely parts phrases; longer ones are no better."""

PAUSE_WORTH = 15.0
"""Seconds of a window that may be left empty for a second of pause more at its end."""

JOINT_TOLERANCE = 0.4
"""Seconds around a joint that are taken for the joint: models put times of words into the silence beside them. Less
than the detector's padding, so no speech is there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a recording, in samples."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """Pieces of one recording, in order and apart, that are transcribed as if they were one."""

    pieces: tuple[Piece, ...]

    peak: float = field(default=1.0, compare=False)
    """The highest speech probability that the detector gave in it; 1 where none was asked."""

    @property
    def start(self) -> int:
        """First sample in the recording."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """Sample of the recording after the last."""
        return self.pieces[-1].end

    @property
    def length(self) -> int:
        """Samples, at most 30 s of them."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.length / SAMPLE_RATE

    def gather(self, pcm: np.ndarray, offset: int = 0) -> np.ndarray:
        """Assemble the window's samples.

        Args:
            pcm: ``(samples,)``, a part of the recording that holds all pieces.
            offset: which sample of the recording ``pcm`` begins with.

        Returns:
            ``(length,)`` samples.

        Raises:
            ValueError: a piece is not inside ``pcm``.
        """
        if self.start < offset or self.end > offset + len(pcm):
            raise ValueError(
                f"samples {self.start} to {self.end} are not inside the part {offset} to {offset + len(pcm)} at hand"
            )
        return np.concatenate([pcm[piece.start - offset : piece.end - offset] for piece in self.pieces])

    def to_recording(self, seconds: float) -> float:
        """Time in the recording of a time in the window; a joint is the start of the piece after it.

        Times outside the window count as its first or last moment. Never decreases.
        """
        joints, at = self._joints(), self._clamp(seconds)
        index = bisect_right(joints, at)
        return self._shift(at, index)

    def span_to_recording(self, start: float, end: float) -> tuple[float, float]:
        """Start and end in the recording of a word or segment of the window, in seconds.

        A start at a joint belongs to the piece after it and an end at a joint to the piece before it, also when they
        miss the joint by ``JOINT_TOLERANCE``: else a word beside a joint would seem to last through all that was cut
        out there. The end is never before the start.
        """
        joints, start_at, end_at = self._joints(), self._clamp(start), self._clamp(end)
        # What lies about one joint as a whole must not be torn apart: then the start decides.
        after = bisect_right(joints, start_at)
        if after < len(joints) and joints[after] - start_at <= self._tolerance(after) and end_at > joints[after]:
            start_at, after = joints[after], after + 1
        before = bisect_left(joints, end_at)
        if before > after and end_at - joints[before - 1] <= self._tolerance(before):
            end_at, before = joints[before - 1], before - 1
        begin = self._shift(start_at, after)
        return begin, max(begin, self._shift(end_at, max(before, after)))

    def _joints(self) -> list[int]:
        """Where in the window one piece ends and the next begins, in samples."""
        return list(accumulate(piece.end - piece.start for piece in self.pieces))[:-1]

    def _clamp(self, seconds: float) -> float:
        return min(max(0.0, seconds * SAMPLE_RATE), float(self.length))

    def _shift(self, at: float, index: int) -> float:
        """Recording time in seconds of a sample position in the window that belongs to the piece of this index."""
        cut_out = self.pieces[index].start - ([0, *self._joints()][index])
        return (at + cut_out) / SAMPLE_RATE

    def _tolerance(self, index: int) -> float:
        """``JOINT_TOLERANCE`` in samples, less in a piece so short that its middle would count as its edge."""
        piece = self.pieces[index]
        return min(JOINT_TOLERANCE * SAMPLE_RATE, (piece.end - piece.start) / 2)


class WindowPacker:
    """Packs the regions of one recording into windows, as they come."""

    def __init__(self) -> None:
        self._held: list[Region] = []

    @property
    def position(self) -> int | None:
        """First sample of the recording that a window to come needs, None if only regions to come decide that."""
        return self._held[0].start if self._held else None

    def feed(self, regions: Iterable[Region]) -> list[PackedWindow]:
        """Take the next regions, in order and without overlap; return the windows that are full.

        A region longer than a window is cut into equal parts.
        """
        windows: list[PackedWindow] = []
        for region in regions:
            for part in _parts(region):
                while self._held and _packed_length([*self._held, part]) > WINDOW:
                    count = _best_parting(self._held, part)
                    windows.append(_window(self._held[:count]))
                    self._held = self._held[count:]
                self._held.append(part)
        return windows

    def flush(self) -> list[PackedWindow]:
        """Return what is left, at the end of the recording: one window or none."""
        held, self._held = self._held, []
        return [_window(held)] if held else []


def skipped(windows: Iterable[PackedWindow], duration: float) -> list[tuple[float, float]]:
    """Stretches of a recording that are in no window, as (start, end) in seconds.

    Args:
        windows: all windows of the recording, in order.
        duration: of the recording, in seconds.
    """
    length = round(duration * SAMPLE_RATE)
    pieces = [piece for window in windows for piece in window.pieces]
    starts = [0, *(piece.end for piece in pieces)]
    ends = [*(piece.start for piece in pieces), length]
    return [(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in zip(starts, ends, strict=True) if start < end]


def _parts(region: Region) -> list[Region]:
    """The region, cut into equal parts if it is longer than a window."""
    count = max(1, -(-(region.end - region.start) // WINDOW))
    edges = [region.start + (region.end - region.start) * i // count for i in range(count + 1)]
    pauses = [region.pause] + [0] * (count - 1)
    return [Region(*part, region.peak) for part in zip(edges[:-1], edges[1:], pauses, strict=True)]


def _gap(before: Region, after: Region) -> int:
    """Samples between two regions of a window that stay in it."""
    gap = after.start - before.end
    return gap if gap <= KEPT_GAP else 0


def _packed_length(regions: Sequence[Region]) -> int:
    gaps = sum(map(_gap, regions[:-1], regions[1:]))
    return sum(region.end - region.start for region in regions) + gaps


def _best_parting(held: Sequence[Region], coming: Region) -> int:
    """How many of the held regions make the window, when the one that is coming does not fit any more.

    An earlier place is taken if its pause is worth more than the seconds lost, provided that what is left fits into
    one window with the region that is coming: a better place must not cost a window.
    """
    following = [*held[1:], coming]
    best, best_worth = len(held), -math.inf
    for count in range(len(held), 0, -1):
        if _packed_length([*held[count:], coming]) > WINDOW:
            break
        pause = max(following[count - 1].pause, following[count - 1].start - held[count - 1].end) / SAMPLE_RATE
        lost = (WINDOW - _packed_length(held[:count])) / SAMPLE_RATE
        worth = min(pause, LONG_PAUSE) * PAUSE_WORTH - lost
        if worth > best_worth:
            best, best_worth = count, worth
    return best


def _window(regions: Sequence[Region]) -> PackedWindow:
    """Join regions with what lies between them, where that is short."""
    pieces = [Piece(regions[0].start, regions[0].end)]
    for before, after in pairwise(regions):
        if after.start - before.end <= KEPT_GAP:
            pieces[-1] = Piece(pieces[-1].start, after.end)
        else:
            pieces.append(Piece(after.start, after.end))
    return PackedWindow(tuple(pieces), max(region.peak for region in regions))
