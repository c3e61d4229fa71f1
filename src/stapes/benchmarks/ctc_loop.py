"""Drive CTC models over batches: recordings in the host's memory → text, as fast as the device goes.

The host runs ahead: while the device computes a batch, the next one is on its way and the one before becomes text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.benchmarks.ctc_setup import CtcSubject
from stapes.decoding.ctc_beam import BeamState, PrefixBeamSearch
from stapes.inference.ctc_packing import Packing, unpack
from stapes.text.ctc_tokenizer import CTCTokenizer

Batch = Sequence[np.ndarray]

_AHEAD = 2
"""Batches on the device or on their way to it."""


class Loop(ABC):
    """Batches → texts. ``device``: where the model is."""

    def __init__(self, tokenizer: CTCTokenizer, device: torch.device) -> None:
        self.tokenizer, self.device = tokenizer, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stages: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def transcribe(self, batches: Sequence[Batch]) -> list[str]:
        """The texts of all recordings; returns when the last one is there."""
        texts: list[str] = []
        waiting: deque[tuple[Any, torch.cuda.Event | None]] = deque()
        with torch.inference_mode():
            for batch in batches:
                work, event = self.enqueue(batch), None
                if self.device.type == "cuda":
                    event = torch.cuda.Event()
                    event.record()
                waiting.append((work, event))
                if len(waiting) > _AHEAD:
                    texts += self._next(waiting)
            while waiting:
                texts += self._next(waiting)
        return texts

    def _next(self, waiting: deque[tuple[Any, torch.cuda.Event | None]]) -> list[str]:
        work, event = waiting.popleft()
        if event is not None:
            event.synchronize()
        return self.finish(work)

    @abstractmethod
    def enqueue(self, batch: Batch) -> Any:
        """Put the device to work, without waiting for it."""

    @abstractmethod
    def finish(self, work: Any) -> list[str]:
        """The texts of a batch, once the device has come so far."""

    def upload(self, batch: Batch, row: int | None = None) -> Tensor:
        """The recordings to the device, one behind the other, or each padded with zeros to ``row`` samples."""
        count = sum(map(len, batch)) if row is None else row * len(batch)
        stage = self._stage(count)
        if row is None:
            np.concatenate(batch, out=stage.numpy())
        else:
            for target, recording in zip(stage.view(len(batch), row).numpy(), batch, strict=True):
                target[: len(recording)], target[len(recording) :] = recording, 0.0
        if self._copies is None:
            return stage
        with torch.cuda.stream(self._copies):
            samples = stage.to(self.device, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        self._stages[-1][1].record(self._copies)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(there)
        samples.record_stream(current)
        return samples

    def _stage(self, count: int) -> Tensor:
        """Memory of the host that the device can fetch from by itself, and that nothing is being fetched from."""
        if self.device.type != "cuda":
            return torch.empty(count)
        memory = None
        if len(self._stages) > _AHEAD:
            memory, fetched = self._stages.popleft()
            fetched.synchronize()
        if memory is None or len(memory) < count:
            memory = torch.empty(count, pin_memory=True)
        self._stages.append((memory, torch.cuda.Event()))
        return memory[:count]

    def to_host(self, tensor: Tensor) -> Tensor:
        """On its way to the host; whole once the device has come so far."""
        if self.device.type != "cuda":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _OurLoop(Loop):
    def __init__(self, subject: CtcSubject) -> None:
        super().__init__(subject.tokenizer, subject.device)
        self._encoder, self._normalize = subject.encoder, subject.checkpoint.normalize

    def logits(self, batch: Batch) -> tuple[Tensor, Packing]:
        """(slots, vocabulary), and where the recordings are in it."""
        samples = self.upload(batch)
        packing = self._encoder.pack([len(recording) for recording in batch])
        shift_and_scale = self._encoder.normalization(samples, packing) if self._normalize else None
        return self._encoder.packed_logits(samples, packing, None, shift_and_scale), packing


class GreedyLoop(_OurLoop):
    """Ours, greedy."""

    def enqueue(self, batch: Batch) -> tuple[Tensor, Packing]:
        logits, packing = self.logits(batch)
        return self.to_host(logits.argmax(-1).to(torch.int32)), packing

    def finish(self, work: tuple[Tensor, Packing]) -> list[str]:
        labels, packing = work
        return greedy_texts(labels.numpy(), packing.starts, packing.counts, self.tokenizer)


class BeamLoop(_OurLoop):
    """Ours, by beam search."""

    def __init__(self, subject: CtcSubject, search: PrefixBeamSearch) -> None:
        super().__init__(subject)
        self._search = search
        # What is left to do on the device when a batch is done must not wait for the batches behind it.
        self._ends = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def enqueue(self, batch: Batch) -> BeamState:
        packed, packing = self.logits(batch)
        log_probs = unpack(packed, packing, int(packing.counts.max(initial=1))).float().log_softmax(-1)
        lengths = torch.from_numpy(packing.counts)
        if self.device.type == "cuda":
            lengths = lengths.pin_memory().to(self.device, non_blocking=True)
        state = self._search.start(len(log_probs), self.device)
        self._search.advance(state, log_probs, lengths)
        return state

    def finish(self, work: BeamState) -> list[str]:
        with torch.cuda.stream(self._ends):  # does nothing for None
            texts = self._search.finish(work)
        return [self.tokenizer.decode(found[0].tokens) if found else "" for found in texts]


def greedy_texts(
    labels: NDArray[np.int32], starts: NDArray[np.int64], counts: NDArray[np.int64], tokenizer: CTCTokenizer
) -> list[str]:
    """The texts of paths that lie in one sequence of labels, each from its start on, so many frames."""
    new = np.ones(len(labels), dtype=bool)
    new[1:] = labels[1:] != labels[:-1]
    new[starts] = True
    new &= labels != tokenizer.blank_id
    return [
        tokenizer.decode(labels[start : start + count][new[start : start + count]].tolist())
        for start, count in zip(starts, counts, strict=True)
    ]
