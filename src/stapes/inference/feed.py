"""A recording as a state machine: audio goes in, windows come out, results come back, segments are kept.

This is what every kind of model shares: the audio at hand, regions of speech, windows on their way, their ends. One
thread feeds a recording, another takes its windows and brings results; each machine locks itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.vad import Region, SpeechSegmenter
from stapes.audio.windows import PackedWindow, Piece, skipped
from stapes.inference.engine import DecodeRequest
from stapes.transcript import Segment

Clips = Sequence[tuple[int, int | None]]
"""The parts of a recording to transcribe, in samples; None as an end is the recording's end."""


class FeedWindow(Protocol):
    """A part of a recording on its way through the engine."""

    encoded: Any
    """What the engine gave for it, until its recording has the result."""

    @property
    def recording(self) -> AudioFeed:
        """Where it comes from."""
        ...

    @property
    def start(self) -> int:
        """First sample in the recording."""
        ...

    @property
    def sound(self) -> Any:
        """What the engine encodes."""
        ...


class AudioFeed(ABC):
    """One channel of a recording on its way."""

    again = False
    """After `finish`: the recording is to be fed once more, by `feed_again`."""

    def __init__(self, clips: Clips, *, vad: bool) -> None:
        self.clips = list(clips)
        self.lock = threading.RLock()
        self.language: str | None = None
        self.language_probability: float | None = None
        self.segments: list[Segment] = []
        self.length = 0
        self.ended = False
        self.error: Exception | None = None
        self.heard: list[Piece] = []
        self.drafted = self.agreed = 0
        """Tokens of a draft model, and those of them that the model itself would have written."""
        self._chunks: deque[np.ndarray] = deque()
        self._offset = 0  # sample of the recording that _chunks begin with
        self._outstanding: set[Any] = set()  # windows that were taken and not completed
        self._segmenter = SpeechSegmenter() if vad else None

    # The feeding thread.

    def feed(self, pcm: np.ndarray, probabilities: np.ndarray | None) -> None:
        """Take the next samples, and the speech probabilities of the frames that they completed."""
        with self.lock:
            self.length += len(pcm)
            if self.error is not None:
                return
            self._chunks.append(pcm)
            if self._segmenter is not None and probabilities is not None:
                self._take_regions(self._segmenter.feed(probabilities))
            self._advance()

    def finish(self, probabilities: np.ndarray | None) -> None:
        """The recording has ended."""
        with self.lock:
            self.ended = True
            if self.error is not None:
                return
            if self._segmenter is not None:
                last = np.zeros(0, np.float32) if probabilities is None else probabilities
                self._take_regions(self._segmenter.feed(last, final=True, samples=self.length))
            self._advance()

    def feed_again(self, pcm: np.ndarray) -> None:
        """Take the same samples as before, where that was asked for (`again`)."""
        raise NotImplementedError

    def finish_again(self) -> bool:
        """The samples have come to their end once more. False: there were fewer than before."""
        raise NotImplementedError

    def fail(self, error: Exception, window: FeedWindow | None = None) -> None:
        """Give up on what is left, because of an error in handling it or a window of it; keep what there is."""
        with self.lock:
            self.error = self.error or error
            if window is not None:
                self._outstanding.discard(window)
            self._chunks.clear()
            self._offset = self.length

    @abstractmethod
    def _take_regions(self, regions: Sequence[Region]) -> None:
        """Take settled regions of speech."""

    @abstractmethod
    def _advance(self) -> None:
        """Make the windows that have become possible and let go of audio that is not needed any more."""

    @property
    def backlog(self) -> int:
        """Samples that wait for the engine: how far the feeding thread is ahead."""
        with self.lock:
            return 0 if self.error is not None else self._waiting()

    @abstractmethod
    def _waiting(self) -> int:
        """Samples that wait for the engine."""

    @property
    def settled(self) -> int:
        """Samples from the start on that are transcribed, or known to hold no speech."""
        with self.lock:
            return min(self.length, self._needed(), *(window.start for window in self._outstanding))

    @abstractmethod
    def _needed(self) -> int:
        """First sample that a window to come may hold."""

    def _clip(self, regions: Sequence[Region]) -> list[tuple[int, Region]]:
        """The parts of regions that lie in clips, each with its clip's index."""
        out = []
        for region in regions:
            for index, (start, end) in enumerate(self.clips):
                low, high = max(region.start, start), region.end if end is None else min(region.end, end)
                if low < high:
                    out.append((index, Region(low, high, region.pause if low == region.start else 0, region.peak)))
        return out

    def _gather(self, packed: PackedWindow) -> np.ndarray:
        if len(self._chunks) > 1:
            joined = np.concatenate(self._chunks)
            self._chunks = deque([joined])
        return packed.gather(self._chunks[0], self._offset)

    def _forget(self, sample: int) -> None:
        """Drop audio before ``sample``."""
        while self._chunks and self._offset + len(self._chunks[0]) <= sample:
            self._offset += len(self._chunks.popleft())
        if self._chunks and sample > self._offset:
            self._chunks[0] = self._chunks[0][sample - self._offset :].copy()
            self._offset = sample

    # The scheduling thread.

    @abstractmethod
    def take(self) -> FeedWindow | None:
        """The next window, when there is one that may go on its way now."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        with self.lock:
            return self.ended and not self._outstanding and (self.error is not None or not self._has_more())

    @abstractmethod
    def _has_more(self) -> bool:
        """Whether windows are still to come from what has been fed."""

    @property
    def needs_language(self) -> bool:
        """Whether its language has to be detected first."""
        return False

    def vote(self, window: Any, probabilities: dict[str, float]) -> bool:
        """Note which language a window is in. False: not sure yet, the window is kept until others were heard."""
        raise NotImplementedError

    @abstractmethod
    def request(self, window: Any) -> DecodeRequest:
        """The next attempt at a window."""

    @abstractmethod
    def judge(self, window: Any, result: Any) -> Any | None:
        """Take the result of an attempt. None: it failed, and the window is to be tried again."""

    @abstractmethod
    def words_wanted(self, window: Any, draft: Any) -> tuple[Any, Any] | None:
        """The prompt and the text that the engine is to look at again, where more is wanted than it gave."""

    @abstractmethod
    def add_words(self, window: Any, draft: Any, prompt: Any, alignment: Any) -> None:
        """Take what the engine found."""

    def complete(self, window: Any, draft: Any) -> None:
        """A window is done: keep its segments, in recording time."""
        with self.lock:
            self._outstanding.discard(window)
            window.encoded = None
            self._keep(window, draft)
            if self.error is None:
                self._advance()

    @abstractmethod
    def _keep(self, window: Any, draft: Any) -> None:
        """Keep the segments of a window, and go on."""

    def sorted_segments(self) -> list[Segment]:
        """Segments by time; windows may have come back in any order."""
        return sorted(self.segments, key=lambda segment: (segment.start, segment.end))

    def skipped(self) -> list[tuple[float, float]]:
        """Where no speech was found, in seconds."""
        heard: list[Piece] = []  # without overlaps: a window may have been heard again from somewhere on
        for piece in sorted(self.heard, key=lambda piece: (piece.start, piece.end)):
            if heard and piece.start <= heard[-1].end:
                heard[-1] = Piece(heard[-1].start, max(heard[-1].end, piece.end))
            else:
                heard.append(piece)
        return skipped([PackedWindow(tuple(heard))], self.length / SAMPLE_RATE)


FeedMaker = Callable[[Clips], AudioFeed]
"""Makes the state machine of one channel."""
