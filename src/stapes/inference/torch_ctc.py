"""Runs any CTC model as the scheduler's engine: a window is complete once it is encoded.

The windows of a call are sorted by length and computed in batches. On a GPU those of models that compute their
padding have few fixed shapes, so that nothing is compiled or searched for each length, and the host goes on while the
device works: it waits for the oldest call only when two are on their way. The likeliest path is found on the device;
one small copy brings it to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from stapes.audio.features import SAMPLE_RATE
from stapes.decoding.ctc import CTCToken, best_path, collapse
from stapes.inference.ctc_model import CTCModel
from stapes.inference.ctc_recording import CTCOutput, CTCSound
from stapes.inference.ctc_search import Found, Search, search_together
from stapes.inference.engine import DecodeRequest

Shapes = Literal["tight", "fixed", "packed"]
"""tight: rows are padded to the longest of the batch. fixed: rows are padded to a few lengths, and batches to powers of
two. packed: padding is not computed, so that any lengths go together."""

BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 21, 24, 27, 30)
"""Seconds that rows are padded to where shapes are fixed: at most a quarter more than what is in them from 4 s on."""

_FILL = 2 / 3
"""A row joins a batch that is padded to so much of its own length at most: a little more work, fewer batches."""

_CALLS = 2
"""Calls of `encode` whose windows may be in slots: one that the device works at and one behind it."""

_MOST_SECONDS = 480.0
"""32 recordings of 15 s."""

_VALUES_PER_SECOND = 4 * 3200 * 512
"""Values that a second of sound is at its widest, behind the first convolution (512 channels, every fifth sample), as
many times as they may be in memory at once."""


def batch_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Sound to compute at a time on a device with so much free memory as it has now."""
    if device.type == "cpu":
        return 30.0
    free, _ = torch.cuda.mem_get_info(device)
    return min(_MOST_SECONDS, max(30.0, free / 2 / (_VALUES_PER_SECOND * dtype.itemsize)))


class _Batch:
    """Windows computed together."""

    def __init__(self, sounds: Sequence[CTCSound], path: Tensor, emissions: Tensor | None, blank: int) -> None:
        self.emissions, self.event = emissions, None
        self._sounds, self._blank = sounds, blank
        self._tokens: list[list[CTCToken]] | None = None
        if path.device.type == "cpu":
            self._path = path
        else:
            self._path = torch.empty(path.shape, dtype=path.dtype, pin_memory=True)
            self._path.copy_(path, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    @property
    def is_done(self) -> bool:
        """Whether the device has finished with it."""
        return self.event is None or self.event.query()

    def output(self, row: int) -> CTCOutput:
        """What was said in a row."""
        sound = self._sounds[row]
        frames = slice(sound.first, sound.last)
        if self._tokens is None:
            sounds = self._sounds
            ends, starts = [each.last for each in sounds], [each.first for each in sounds]
            self._tokens = collapse(self._path[:, : len(sounds)], ends, self._blank, starts)
        probability = self._path[1, row, frames].view(torch.float32)
        emissions = None
        if sound.with_emissions and self.emissions is not None:
            emissions = self.emissions[row, frames]
        return CTCOutput(self._tokens[row], emissions, not bool(probability.isnan().any()))


class _Encoded:
    """A window that is computed, or will be."""

    def __init__(self, call: int, batch: _Batch, row: int) -> None:
        self.call, self.batch, self.row = call, batch, row


class TorchCTCEngine:
    """An `Engine` around a `CTCModel`.

    slots: windows that are encoded in one call. batch_seconds: sound in a batch, with what is computed of padding.
    shapes: None is fixed on a GPU, and tight on the CPU. dtype: that the model runs in, for reports.
    """

    steps_per_look: ClassVar[int] = 1

    def __init__(
        self,
        model: CTCModel,
        slots: int,
        *,
        batch_seconds: float = 30.0,
        shapes: Shapes | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        on_gpu = model.device.type != "cpu"
        self.model, self.slots, self.dtype = model, slots, dtype
        self.enqueues = on_gpu
        self._batch_samples = round(batch_seconds * SAMPLE_RATE)
        self._shapes = shapes or ("fixed" if on_gpu else "tight")
        self._calls = 0
        self._taken: dict[int, _Encoded] = {}  # slot → what is in it, the oldest first
        self._next_slot = 0

    @property
    def encoder_batch(self) -> int:
        return self.slots

    # Encoding.

    def encode(self, windows: Sequence[CTCSound], *, again: bool = False) -> list[_Encoded]:
        self._calls += 1
        out: list[_Encoded | None] = [None] * len(windows)
        with self.model.lock:
            for rows in self._batches(windows):
                batch = self._compute([windows[i] for i in rows])
                for row, index in enumerate(rows):
                    out[index] = _Encoded(self._calls, batch, row)
        return [encoded for encoded in out if encoded is not None]

    def _batches(self, windows: Sequence[CTCSound]) -> Iterator[list[int]]:
        """Which windows are computed together: of one language, normalised in one way, of similar lengths."""

        def kind(index: int) -> tuple[str, bool]:
            return windows[index].language or "", windows[index].measured is None

        order = sorted(range(len(windows)), key=lambda i: (*kind(i), -len(windows[i].pcm)))
        for _, group in groupby(order, key=kind):
            batch: list[int] = []
            size = 0
            for index in group:
                length = len(windows[index].pcm)
                if batch and not self._fits(length, len(batch), size):
                    yield batch
                    batch = []
                size = self._padded(length) if not batch else size + length if self._shapes == "packed" else size
                batch.append(index)
            yield batch

    def _fits(self, length: int, rows: int, size: int) -> bool:
        """Whether one more goes into a batch of so many rows of this size or, where they are packed, of it together."""
        if self._shapes == "packed":
            return size + length <= self._batch_samples
        most = max(1, self._batch_samples // size)
        if self._shapes == "fixed":
            most = 1 << most.bit_length() - 1
        return rows < most and length >= _FILL * size

    def _padded(self, length: int) -> int:
        if self._shapes != "fixed":
            return length
        seconds = next((seconds for seconds in BUCKETS if length <= seconds * SAMPLE_RATE), None)
        return min(seconds * SAMPLE_RATE, self.model.window) if seconds is not None else self.model.window

    @torch.inference_mode()
    def _compute(self, sounds: Sequence[CTCSound]) -> _Batch:
        model = self.model
        model.set_language(sounds[0].language)
        blank = model.tokenizer.blank_id
        size = self._padded(max(len(sound.pcm) for sound in sounds))
        rows = list(sounds)
        if self._shapes == "fixed":
            rows += [rows[-1]] * ((1 << (len(rows) - 1).bit_length()) - len(rows))
        waveform = torch.empty(len(rows), size, pin_memory=self.enqueues)
        for row, sound in zip(waveform.numpy(), rows, strict=True):
            row[: len(sound.pcm)], row[len(sound.pcm) :] = sound.pcm, 0.0
        lengths = torch.tensor([len(sound.pcm) for sound in rows], pin_memory=self.enqueues)
        measured = None if sounds[0].measured is None else [sound.measured for sound in rows]
        logits, _ = model(waveform.to(model.device, non_blocking=True), lengths, measured)
        emissions = None
        if any(sound.with_emissions for sound in sounds):
            emissions = logits[: len(sounds)].float().log_softmax(dim=-1)
        return _Batch(sounds, best_path(logits), emissions, blank)

    def detect_language(self, encoded: Sequence[Any]) -> list[dict[str, float]]:
        """Not asked: the language of a CTC model is known or does not matter."""
        raise NotImplementedError

    # Slots, which windows only pass through.

    def free_slots(self, request: DecodeRequest) -> int:
        calls = {encoded.call for encoded in self._taken.values()}
        return self.slots if len(calls) < _CALLS else 0

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[_Encoded]) -> list[int]:
        slots = list(range(self._next_slot, self._next_slot + len(encoded)))
        self._next_slot += len(encoded)
        self._taken.update(zip(slots, encoded, strict=True))
        return slots

    def step(self, count: int) -> None:
        """Wait for the oldest window."""
        oldest = next(iter(self._taken.values()), None)
        if oldest is not None and oldest.batch.event is not None:
            oldest.batch.event.synchronize()

    def harvest(self) -> list[tuple[int, CTCOutput]]:
        done = [(slot, encoded) for slot, encoded in self._taken.items() if encoded.batch.is_done]
        return [(slot, encoded.batch.output(encoded.row)) for slot, encoded in done]

    def align(
        self, slots: Sequence[int], prompts: Sequence[Search], texts: Sequence[Sequence[Tensor]]
    ) -> list[list[Found]]:
        """Search phrases (frames, vocabulary) of log-probabilities for their likeliest texts, together."""
        return search_together(prompts, texts)

    def release(self, slot: int) -> None:
        self._taken.pop(slot, None)

    def clear(self) -> None:
        """There are no caches."""
