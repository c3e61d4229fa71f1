"""A recording that a CTC model writes down: measured first, then cut into windows, put together again as they return.

Speech with pauses of up to a second is one *stretch*; without the detector every clip is one. A stretch of any length
is cut into windows that overlap (`ctc_windows`). All windows of a recording are normalised as the speech of the whole
of it; where it is one window, that one normalises itself. A recording of up to two minutes is kept until its end is
known; a longer one is read twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.vad import Region
from stapes.audio.windows import KEPT_GAP, PackedWindow, Piece
from stapes.decoding.ctc import CTCToken, Joiner
from stapes.errors import ModelError
from stapes.inference.ctc_model import CTCModel
from stapes.inference.ctc_phrases import Phrase, PhraseCutter, make_segment, marks_words, units_of
from stapes.inference.ctc_search import Found, Search
from stapes.inference.ctc_windows import HELD, Cut, Cutter, cut
from stapes.inference.engine import DecodeRequest
from stapes.inference.feed import AudioFeed, Clips, FeedWindow
from stapes.text.ctc_tokenizer import CTCTokenizer

_REQUEST = DecodeRequest(prompt=(), sot_index=0, timestamps=False)
"""All windows are alike: they are complete once they are encoded."""


@dataclass(frozen=True)
class CTCTask:
    """What a call wants of the model."""

    model: CTCModel
    tokenizer: CTCTokenizer
    adapter: str | None = None
    """The language to set in the model; None: it has one only."""
    language: str | None = None
    """What transcripts say."""
    search: Search | None = None
    """None: the likeliest path."""
    vad: bool = True
    word_timestamps: bool = False


@dataclass(frozen=True)
class CTCSound:
    """What the engine is given of a window."""

    pcm: np.ndarray
    first: int
    last: int
    """The frames that count: from ``first`` up to ``last``."""
    measured: Any
    """What the recording's meter said; None: the window is all that is heard of the recording."""
    language: str | None
    with_emissions: bool


class CTCOutput(NamedTuple):
    """What the model said to a window, frames that count only and numbered from 0."""

    tokens: list[CTCToken]
    emissions: Tensor | None
    """Log-probabilities (frames, vocabulary), float32, on the device; None where nobody asked."""
    is_number: bool
    """False: the network's output was not a number somewhere."""


@dataclass(eq=False)
class CTCWindow:
    """A window on its way through the engine."""

    recording: CTCRecording
    number: int
    start: int
    sound: CTCSound
    encoded: Any = None


@dataclass
class _Draft:
    """The phrases that are complete with a window, and where their stretch begins, in samples."""

    phrases: list[tuple[int, Phrase]] = field(default_factory=list)
    emissions: list[Tensor] = field(default_factory=list)
    found: list[Found] | None = None


class CTCRecording(AudioFeed):
    """One channel."""

    def __init__(self, task: CTCTask, clips: Clips) -> None:
        super().__init__(clips, vad=task.vad)
        self.task = task
        self.language = task.language
        self._frame_seconds = task.model.hop / SAMPLE_RATE
        self._space = " " if marks_words(task.tokenizer) else ""
        self._stretches: list[list[int]] = []  # start, end, clip
        self._meter = task.model.meter()
        self._unmeasured: deque[tuple[int, int, bool]] = deque()  # start, end, goes on from the one before
        self._taken = 0
        self._measured: Any = None
        self._cuts: list[tuple[int, Cut]] | None = None  # with the number of the stretch; None until the end is known
        self._cutter = Cutter([])
        self._cut_number = 0
        self._ready: deque[CTCWindow] = deque()
        # What follows belongs to the scheduling thread.
        self._arrived: dict[int, CTCOutput] = {}
        self._next = 0
        self._joiner = Joiner()
        self._phrases = PhraseCutter(task.tokenizer, self._frame_seconds)
        self._emissions: deque[tuple[int, Tensor]] = deque()  # of the stretch, with the number of the first frame

    # The feeding thread.

    def _take_regions(self, regions: Sequence[Region]) -> None:
        for clip, region in self._clip(regions):
            last = self._stretches[-1] if self._stretches else None
            goes_on = last is not None and last[2] == clip and region.start - last[1] <= KEPT_GAP
            if last is not None and goes_on:
                self._unmeasured.append((last[1], region.end, True))
                last[1] = region.end
            else:
                self._unmeasured.append((region.start, region.end, False))
                self._stretches.append([region.start, region.end, clip])

    def _advance(self) -> None:
        if self._cuts is not None:
            return
        if self._segmenter is None and self._taken < self.length:
            self._take_regions([Region(self._taken, self.length)])
            self._taken = self.length
        if self.length > HELD:
            self._measure()
            self._forget(self._oldest_needed())
        if self.ended:
            self._plan()

    def _oldest_needed(self) -> int:
        """First sample that is still to be measured, or may become so."""
        if self._segmenter is None:
            return self.length
        position = self._segmenter.position
        end = self._stretches[-1][1] if self._stretches else position
        return min(end, position) if position - end <= KEPT_GAP else position

    def _measure(self) -> None:
        while self._unmeasured:
            start, end, goes_on = self._unmeasured.popleft()
            if not goes_on:
                self._meter.cut()
            self._meter.feed(self._gather(PackedWindow((Piece(start, end),))))

    def _plan(self) -> None:
        """The end is known, and so are all windows."""
        model = self.task.model
        self._cuts = [
            (number, window)
            for number, (start, end, _) in enumerate(self._stretches)
            for window in cut(start, end, model)
        ]
        self.heard = [Piece(*self._stretches[number][:2]) for number in sorted({number for number, _ in self._cuts})]
        self._cutter = Cutter([window for _, window in self._cuts])
        if len(self._cuts) > 1:
            self._measure()
            self._measured = self._meter.result()
        if self.length > HELD:
            self.again = bool(self._cuts)
        else:
            for chunk in self._chunks:
                self.feed_again(chunk)
        self._unmeasured.clear()
        self._forget(self.length)

    def feed_again(self, pcm: np.ndarray) -> None:
        with self.lock:
            if self.error is not None:
                return
            for window, samples in self._cutter.feed(pcm):
                sound = CTCSound(
                    samples, window.first, window.last, self._measured, self.task.adapter, self.task.search is not None
                )
                self._ready.append(CTCWindow(self, self._cut_number, window.start, sound))
                self._cut_number += 1

    def finish_again(self) -> bool:
        with self.lock:
            whole = not self._cutter.left or self.error is not None
            self._cutter = Cutter([])
            return whole

    def fail(self, error: Exception, window: FeedWindow | None = None) -> None:
        with self.lock:
            super().fail(error, window)
            self._ready.clear()

    def _waiting(self) -> int:
        return sum(len(window.sound.pcm) for window in self._ready)

    def _needed(self) -> int:
        if self._cuts is None:
            return 0
        if self._ready:
            return self._ready[0].start
        return self._cuts[self._cut_number][1].start if self._cutter.left else self.length

    # The scheduling thread.

    def take(self) -> CTCWindow | None:
        if not self._ready:  # most often, and asked of every recording for every window
            return None
        with self.lock:
            if self.error is not None or not self._ready:
                return None
            window = self._ready.popleft()
            self._outstanding.add(window)
            return window

    def _has_more(self) -> bool:
        return bool(self._ready or self._cutter.left)

    def request(self, window: CTCWindow) -> DecodeRequest:
        return _REQUEST

    def judge(self, window: CTCWindow, result: CTCOutput) -> _Draft:
        """Take what the model said; the phrases that are complete, once all that comes before has been said."""
        if not result.is_number:
            raise ModelError("the model's output is not a number: use another --precision, or another model")
        self._arrived[window.number] = result
        draft = _Draft()
        while (output := self._arrived.pop(self._next, None)) is not None:
            self._join(output, draft)
            self._next += 1
        return draft

    def _join(self, output: CTCOutput, draft: _Draft) -> None:
        """Put the next window behind those before it."""
        assert self._cuts is not None
        number, window = self._cuts[self._next]
        is_last = self._next + 1 == len(self._cuts) or self._cuts[self._next + 1][0] != number
        if output.emissions is not None:
            self._emissions.append((window.frame, output.emissions))
        frames = window.last - window.first
        if not is_last:
            phrases = self._phrases.add(self._joiner.add(output.tokens, frames))
        elif window.frame:
            tokens = self._joiner.add(output.tokens, frames) + self._joiner.finish()
            phrases = self._phrases.finish(tokens, self._joiner.frames)
        else:
            phrases = self._phrases.finish(output.tokens, frames)
        draft.phrases += [(self._stretches[number][0], phrase) for phrase in phrases]
        if self.task.search is not None:
            draft.emissions += [self._slice(phrase) for phrase in phrases]
        while self._emissions and self._emissions[0][0] + len(self._emissions[0][1]) <= self._phrases.position:
            self._emissions.popleft()
        if is_last:
            self._joiner = Joiner()
            self._phrases = PhraseCutter(self.task.tokenizer, self._frame_seconds)
            self._emissions.clear()

    def _slice(self, phrase: Phrase) -> Tensor:
        parts = [rows[max(0, phrase.begin - first) : max(0, phrase.end - first)] for first, rows in self._emissions]
        return torch.cat(parts)

    def words_wanted(self, window: CTCWindow, draft: _Draft) -> tuple[Search, list[Tensor]] | None:
        return None if self.task.search is None or not draft.phrases else (self.task.search, draft.emissions)

    def add_words(self, window: CTCWindow, draft: _Draft, prompt: Search, alignment: list[Found]) -> None:
        draft.found = alignment

    def _keep(self, window: CTCWindow, draft: _Draft) -> None:
        for index, (start, phrase) in enumerate(draft.phrases):
            tokens, units, alternatives = phrase.tokens, phrase.units, []
            if draft.found is not None:
                found = draft.found[index]
                tokens = [
                    token._replace(start=token.start + phrase.begin, end=token.end + phrase.begin)
                    for token in found.tokens
                ]
                units, alternatives = units_of(tokens, self.task.tokenizer), found.alternatives
            if not units:
                continue
            segment = make_segment(
                tokens,
                units,
                self._space,
                self._frame_seconds,
                start / SAMPLE_RATE,
                with_words=self.task.word_timestamps,
            )
            segment.alternatives = alternatives or None
            self.segments.append(segment)
