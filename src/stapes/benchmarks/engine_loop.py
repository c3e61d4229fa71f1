"""Drive an engine without a scheduler: windows in the host's memory → text, as fast as it goes.

The loop is what a throughput benchmark measures. It never waits where the engine does not: encoding, admissions and
steps are enqueued, and texts are put together while the device writes the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from stapes.audio.features import log_mel_spectrogram, pad_windows
from stapes.benchmarks.random_weights import text_only
from stapes.benchmarks.roofline import timed
from stapes.inference.engine import DecodeRequest
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.lanes import Slot
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.text.tokenizers import WhisperTokenizer


@dataclass(frozen=True)
class Written:
    """The text of a window, and how many tokens the decoder wrote for it, prompt and end not counted."""

    text: str
    tokens: int


def greedy_request(tokenizer: WhisperTokenizer, language: str, vocab_size: int, *, endless: bool) -> DecodeRequest:
    """MLPerf's recipe: greedy, no timestamps, no fallback. endless: only text may be written, and no end."""
    prompt = tokenizer.start_sequence(language if tokenizer.is_multilingual else None, without_timestamps=True)
    never = text_only(tokenizer, vocab_size) if endless else tuple(tokenizer.non_speech_tokens())
    return DecodeRequest(prompt=tuple(prompt), sot_index=0, timestamps=False, suppressed=never, stop_loops=False)


@contextmanager
def exactly(engine: TorchWhisperEngine, tokens: int) -> Iterator[None]:
    """For a while, end windows after so many tokens."""
    before, engine.exact_tokens = engine.exact_tokens, tokens
    try:
        yield
    finally:
        engine.exact_tokens = before


def transcribe_windows(
    engine: TorchWhisperEngine,
    tokenizer: WhisperTokenizer,
    windows: Sequence[np.ndarray],
    request: DecodeRequest,
    encoder_batch: int,
) -> list[Written]:
    """Transcribe windows of up to 30 s; slots are kept full, ``encoder_batch`` windows are encoded together.

    Returns when the last text is there.
    """
    written: list[Written | None] = [None] * len(windows)
    places: dict[Slot, int] = {}
    position = 0
    waiting: Sequence[Any] = ()
    ended: list[tuple[int, list[int]]] = []

    def encode() -> None:
        nonlocal waiting
        if not waiting and position < len(windows):
            waiting = engine.encode(windows[position : position + encoder_batch])

    def enter() -> None:
        nonlocal position, waiting
        if waiting and engine.free_slots(request) >= len(waiting):
            slots = engine.admit([request] * len(waiting), waiting)
            places.update(zip(slots, range(position, position + len(waiting)), strict=True))
            position += len(waiting)
            waiting = ()

    def put_down() -> None:
        for place, tokens in ended:
            written[place] = Written(tokenizer.decode(tokens).strip(), len(tokens))
        ended.clear()

    while places or position < len(windows):
        # A batch is encoded ahead, and behind the step: while the device is at it the host looks at what the step
        # wrote, and fills the slots that have fallen free.
        if places:
            engine.step(engine.steps_per_look)
        encode()
        put_down()
        # From the last one on: then none of them has to move into the place of another, only to be let go itself.
        for slot, result in reversed(engine.harvest()):
            engine.release(slot)
            ended.append((places.pop(slot), result.tokens))
        enter()
    put_down()
    return [each for each in written if each is not None]


@dataclass(frozen=True)
class EncoderTimes:
    """Seconds a window. ``whole``: from samples on the host; ``network``: from features on."""

    whole: float
    network: float


def time_encoder(engine: TorchWhisperEngine, windows: Sequence[np.ndarray], repeats: int) -> EncoderTimes:
    """Time an encoder batch alone, as the engine encodes it."""
    config = engine.model.config
    count = len(windows)
    whole = median(timed(engine.device, lambda: engine.encode(windows), repeats))
    network = engine.encoder if isinstance(engine, GpuWhisperEngine) else engine.model.encoder
    with torch.inference_mode():
        pcm = pad_windows(windows, engine.device)
        features = log_mel_spectrogram(pcm, config.mel_bins).to(engine.dtype)
        alone = median(timed(engine.device, lambda: network(features), repeats))
    return EncoderTimes(whole / count, alone / count)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decoder step of ``windows`` that hold ``positions`` tokens on average, prompt included."""

    seconds: float
    windows: int
    positions: float


_TIMED_STEPS = 16


def time_step(
    engine: TorchWhisperEngine,
    windows: Sequence[np.ndarray],
    request: DecodeRequest,
    encoder_batch: int,
    written: int,
    repeats: int,
) -> StepTime:
    """Time 16 steps around the moment when every window has ``written`` tokens, with nothing else going on.

    windows: one for each slot to be measured. request: an endless one.
    """
    before = max(1, written - _TIMED_STEPS // 2)  # the first token is written as a window is admitted
    encoded = []
    for start in range(0, len(windows), encoder_batch):
        encoded += engine.encode(windows[start : start + encoder_batch])
    seconds = []
    # A row that has its tokens costs nothing: all must go on to the end, and one step beyond.
    with exactly(engine, before + _TIMED_STEPS + 2):
        for attempt in range(repeats + 1):
            slots = []
            for start in range(0, len(encoded), encoder_batch):
                part = encoded[start : start + encoder_batch]
                slots += engine.admit([request] * len(part), part)
            engine.step(before - 1)
            (time,) = timed(engine.device, lambda: engine.step(_TIMED_STEPS), 1, warm=True)
            for slot in reversed(slots):
                engine.release(slot)
            if attempt:  # the first captures graphs
                seconds.append(time / _TIMED_STEPS)
    # The first of the steps reads the token that was written last: it finds prompt + before of them, its own included.
    positions = len(request.prompt) + before + (_TIMED_STEPS - 1) / 2
    return StepTime(median(seconds), len(windows), positions)
