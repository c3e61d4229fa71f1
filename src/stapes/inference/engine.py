"""The one protocol between the scheduler and whatever runs a model.

An engine encodes windows of at most 30 s and writes text for them in *slots*, which windows join and leave at any
step. The scheduler never asks what is behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """One attempt at one window.

    ``prompt``: every token before the first written one. ``sot_index``: where <|startoftranscript|> stands in it;
    the no-speech probability is read there. ``max_initial_timestamp``: the highest timestamp index the window may
    open with, -1 for any. ``key``: names the random numbers of this attempt, so that samples never depend on
    neighbours. ``stop_loops``: end an attempt that repeats itself, and say so in its result.
    ``exact_tokens``: for measuring, write just so many, text only. ``urgent``: somebody waits for it; only a
    `SerialEngine` is told.
    """

    prompt: tuple[int, ...]
    sot_index: int
    timestamps: bool
    max_initial_timestamp: int = -1
    temperature: float = 0.0
    beam_size: int = 1
    best_of: int = 1
    patience: float = 1.0
    length_penalty: float | None = None
    suppressed: tuple[int, ...] = ()
    key: tuple[int, ...] = ()
    stop_loops: bool = True
    exact_tokens: int | None = None
    urgent: bool = False

    @property
    def candidates(self) -> int:
        """How many texts are written side by side for the window."""
        return self.beam_size if self.temperature == 0 else self.best_of

    @property
    def is_beam(self) -> bool:
        """Beam search rather than independent candidates."""
        return self.temperature == 0 and self.beam_size > 1


@dataclass(frozen=True)
class DecodeResult:
    """What an attempt wrote: tokens without the end token, and how sure the model was of them."""

    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    looped: bool
    drafted: int = 0
    """Tokens that a draft model wrote for it."""
    agreed: int = 0
    """Those of them that stand in the text."""


@dataclass(frozen=True)
class Alignment:
    """Cross-attention scores of a text, before the softmax, for the heads that follow the speech.

    ``scores`` (heads, prompt + text + end tokens, frames of 20 ms), float32. ``probabilities`` (text tokens,).
    """

    scores: Tensor
    probabilities: np.ndarray


class Engine(Protocol):
    """Runs one model on one device. Not thread-safe: one thread drives it."""

    steps_per_look: int
    """Steps that are best written from one look at the slots to the next; at most 4, so that cancelling is quick."""
    enqueues: bool
    """Whether ``encode``, ``admit`` and ``step`` return before the device is done."""

    @property
    def encoder_batch(self) -> int:
        """Windows that are best encoded together."""
        ...

    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False) -> list[Any]:
        """Encode windows of up to 30 s of 16 kHz samples. The handles stay valid until they are dropped.

        again: for windows that came out badly, as differently as the model allows at no loss of sound.
        """
        ...

    def detect_language(self, encoded: Sequence[Any]) -> list[dict[str, float]]:
        """Probability of each language the model knows, for each window."""
        ...

    def free_slots(self, request: DecodeRequest) -> int:
        """How many windows with such a request could be admitted now."""
        ...

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Any]) -> list[Any]:
        """Put windows into slots and write their first tokens. All requests are of one kind (candidates, beam)."""
        ...

    def step(self, count: int) -> None:
        """Write up to ``count`` more tokens in every slot."""
        ...

    def harvest(self) -> list[tuple[Any, DecodeResult]]:
        """The slots that have ended since the last call. They stay occupied until released."""
        ...

    def align(
        self, slots: Sequence[Any], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        """Read ``texts`` (token ids) behind ``prompts`` again in ended slots, for their times."""
        ...

    def release(self, slot: Any) -> None:
        """Free a slot, ended or not."""
        ...

    def clear(self) -> None:
        """Let go of all caches; only while no slot is taken. Encodings stay valid."""
        ...


class SerialEngine(Protocol):
    """What an engine has beside where each window costs time of its own, as on a CPU: a window is encoded in many
    steps' time, and a step takes as many times as long as there are windows in slots.

    So that urgent windows do not wait for others, they are served apart: in slots of their own.
    """

    @property
    def is_serial(self) -> bool:
        """Whether it is one indeed."""
        ...

    def encode_in_parts(self, window: np.ndarray, *, again: bool = False) -> Iterator[Any]:
        """`Engine.encode` of one window bit by bit: None after each part but the last, then the handle.

        Between the parts anything may be done with other windows; the result is the same.
        """
        ...

    def step(self, count: int, *, urgent: bool = False) -> None:
        """`Engine.step`; urgent: in slots of urgent requests alone."""
        ...


class AsyncEngine(Protocol):
    """What an engine has beside where the device works while the host does something else."""

    @property
    def finds_words_apart(self) -> bool:
        """Whether it is one indeed."""
        ...

    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False, urgent: bool = False) -> list[Any]:
        """`Engine.encode`; urgent: before what is being encoded, and
        beside what is being written, which is the slower for it."""
        ...

    def is_encoded(self, encoded: Any) -> bool:
        """Whether the device has come so far: else what is written in slots waits for it when it is admitted."""
        ...

    def align_ahead(
        self, slots: Sequence[Any], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Any]:
        """`Engine.align` that does not wait for the device; the slots may be released at once."""
        ...

    def aligned(self, ahead: Any) -> AbstractContextManager[Alignment]:
        """One of what `align_ahead` gave, once it is there. May be called in another thread: while the block lasts, its
        work waits for nothing that the device was told later."""
        ...

    def warm_up(self) -> None:
        """Do once whatever takes long the first time. Only while no slot is taken; nothing stays in any."""
        ...
