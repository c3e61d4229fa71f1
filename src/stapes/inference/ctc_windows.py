"""A recording of any length for a CTC model: overlapping windows whose outer frames are dropped.

A window begins at a multiple of the hop, so that its frames are frames of the recording, and holds the model's context
on each side of those that count, where the recording has as much. What normalises all windows was measured before, in
a pass of its own; a recording that is one window needs none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.audio.decode import SAMPLE_RATE, AudioSource, AudioStream
from stapes.audio.replay import Replay
from stapes.errors import StapesError, UsageError
from stapes.inference.ctc_model import CTCModel

HELD = 120 * SAMPLE_RATE
"""Samples of a recording that are held in memory; a longer one is read twice."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A window of a recording: samples from ``start`` up to ``end``."""

    start: int
    end: int
    first: int
    """Number in the window of the first frame that counts."""
    last: int
    """Number after that of the last one."""
    frame: int
    """Number in the stretch of the first one."""


def cut(start: int, end: int, model: CTCModel) -> list[Cut]:
    """Windows of equal parts whose frames, those that count, are all frames of the samples from ``start`` to ``end``.

    None where there is no frame, one where that is no longer than a window.
    """
    frames = model.frame_count(end - start)
    if end - start <= model.window:
        return [Cut(start, end, 0, frames, 0)] if frames else []
    hop, context = model.hop, model.context
    count = -(-frames // ((model.window - 2 * context) // hop))
    edges = [frames * i // count for i in range(count + 1)]
    cuts = []
    for first, last in pairwise(edges):
        begin = max(0, first * hop - context)
        stop = end if last == frames else min(end, start + last * hop + context)
        cuts.append(Cut(start + begin, stop, first - begin // hop, last - begin // hop, first))
    return cuts


class Cutter:
    """Takes the samples of a recording as they come; gives out its windows, in order."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._cuts = deque(cuts)
        self._chunks: deque[np.ndarray] = deque()
        self._offset = self._length = 0

    def feed(self, pcm: np.ndarray) -> list[tuple[Cut, np.ndarray]]:
        """Take the next samples; the windows that they complete."""
        self._chunks.append(pcm)
        self._length += len(pcm)
        windows = []
        while self._cuts and self._cuts[0].end <= self._length:
            window = self._cuts.popleft()
            self._forget(window.start)
            whole = np.concatenate(self._chunks)
            self._chunks = deque([whole])
            windows.append((window, whole[: window.end - window.start].copy()))
        self._forget(self._cuts[0].start if self._cuts else self._length)
        return windows

    @property
    def left(self) -> int:
        """Windows that are still to come."""
        return len(self._cuts)

    def _forget(self, sample: int) -> None:
        while self._chunks and self._offset + len(self._chunks[0]) <= sample:
            self._offset += len(self._chunks.popleft())
        if self._chunks and sample > self._offset:
            self._chunks[0] = self._chunks[0][sample - self._offset :].copy()
            self._offset = sample


class Emissions:
    """What a CTC model says to a whole recording, in constant memory: iterate over it, once.

    Yields (number of the first frame, log-probabilities (frames, vocabulary) float32 on the model's device), window
    after window, without a gap or an overlap. A recording that breaks off raises AudioError after what could be read.
    """

    def __init__(
        self,
        model: CTCModel,
        source: AudioSource,
        *,
        batch: int = 1,
        language: str | None = None,
        channels: str = "mix",
        **settings: Any,
    ) -> None:
        """Measure the recording. ``batch``: windows computed together; ``settings``: those of `open_audio`.

        Raises AudioError: nothing of it can be read.
        """
        if channels == "separate":
            raise UsageError("--channels separate: one channel can be heard at a time; say mix or its number")
        self.model, self.batch, self.language = model, batch, language
        self._replay = Replay(source, channels=channels, **settings)
        self._error: StapesError | None = None
        self._held: list[np.ndarray] | None = []
        self.samples = 0
        meter = model.meter()
        try:
            with self._replay.open() as stream:
                for pcm in self._read(stream):
                    meter.feed(pcm)
                    self.samples += len(pcm)
                    if self._held is not None:
                        self._held = [*self._held, pcm] if self.samples <= HELD else None
        except BaseException:
            self._replay.close()
            raise
        self.warnings, self.damaged, self.name = stream.warnings, stream.damaged, stream.name
        if self._error is not None and not self.samples:
            self._replay.close()
            raise self._error
        self._cuts = cut(0, self.samples, model)
        self._measured = meter.result() if len(self._cuts) > 1 else None
        self.frames = model.frame_count(self.samples)

    @property
    def duration(self) -> float:
        """Seconds of the recording."""
        return self.samples / SAMPLE_RATE

    @property
    def frame_seconds(self) -> float:
        """Length of a frame."""
        return self.model.hop / SAMPLE_RATE

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        waiting: list[tuple[Cut, np.ndarray]] = []
        cutter = Cutter(self._cuts)
        with self._replay:
            for pcm in self._again():
                for window in cutter.feed(pcm[: self.samples]):
                    waiting.append(window)
                    if len(waiting) == self.batch:
                        yield from self._compute(waiting)
                        waiting = []
        if waiting:
            yield from self._compute(waiting)
        if self._error is not None:
            raise self._error

    def _again(self) -> Iterator[np.ndarray]:
        if self._held is not None:
            yield from self._held
        else:
            with self._replay.open() as stream:
                yield from self._read(stream)

    def _read(self, stream: AudioStream) -> Iterator[np.ndarray]:
        """The channel's samples; an error ends them and is kept."""
        try:
            for chunk in stream:
                yield chunk[0]
        except StapesError as error:
            self._error = error

    @torch.no_grad()
    def _compute(self, windows: Sequence[tuple[Cut, np.ndarray]]) -> list[tuple[int, Tensor]]:
        waveform = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(pcm) for _, pcm in windows], batch_first=True)
        lengths = torch.tensor([len(pcm) for _, pcm in windows])
        measured = None if self._measured is None else [self._measured] * len(windows)
        device = self.model.device
        with self.model.lock, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.model.set_language(self.language)
            logits, _ = self.model(waveform.to(device), lengths, measured)
        return [
            (window.frame, row[window.first : window.last].float().log_softmax(dim=-1))
            for (window, _), row in zip(windows, logits, strict=True)
        ]
