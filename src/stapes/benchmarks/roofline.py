"""How fast Whisper could run on a device: its operations and bytes, and what the device does at its best.

Operations count a multiplication and its addition as two, of matrix products only; norms, GELU and softmax are left
out, as is usual. What is reached is set against what was measured on the same device in the same run: a large copy,
and a large matrix product of the same dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from stapes.models.whisper import WhisperConfig

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_PRODUCT = {"cuda": 8192, "cpu": 1024}
"""Sides of the square matrices."""

_REPEATS = {"cuda": 20, "cpu": 3}
_WARM_UP = {"cuda": 3, "cpu": 1}

_SUSTAINED_SECONDS = 1.0
"""How long a GPU multiplies before its rate counts; about as long as an encoder is timed."""


@dataclass(frozen=True)
class Peaks:
    """The best that a device does: bytes read and written per second, and operations per second."""

    copy: float
    product: float


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Time a copy of 1 GiB and a product of 8192³, for a second (on the CPU 64 MiB and 1024³)."""
    return Peaks(copy=_copy_bandwidth(device), product=_product_rate(device, dtype))


def _copy_bandwidth(device: torch.device) -> float:
    count = _COPY_BYTES[device.type]
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    return 2 * count / median(timed(device, lambda: target.copy_(source), _REPEATS[device.type]))


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = _PRODUCT[device.type]
    # Not zeros: a chip draws less power, and keeps a higher clock, where no bit changes.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    work = lambda: torch.mm(a, b, out=out)  # noqa: E731
    seconds = median(timed(device, work, _REPEATS[device.type]))
    if device.type == "cuda":
        # A network runs for longer than a product, and a chip at its power limit slows down within a second.
        seconds = median(timed(device, work, max(1, round(_SUSTAINED_SECONDS / seconds))))
    return 2 * side**3 / seconds


def timed(device: torch.device, work: Callable[[], object], repeats: int, *, warm: bool = False) -> list[float]:
    """Seconds that ``work`` takes on the device, each time; one follows the other without the host between.

    warm: it has run already, and need not run before it is timed.
    """
    for _ in range(0 if warm else _WARM_UP[device.type]):
        work()
    if device.type != "cuda":
        out = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            out.append(time.perf_counter() - start)
        return out
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    events[0].record(stream)
    for event in events[1:]:
        work()
        event.record(stream)
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def encoder_operations(config: WhisperConfig) -> int:
    """Of one window: two convolutions of three frames, and layers.

    A layer has query, key, value and output (4 w²), the two products of attention (T² w each) and the MLP (8 w²).
    With m mel bins, width w, T = 1500 states and L layers: 2·2T·3·m·w + 2·T·3·w² + L (2·T·12·w² + 4·T²·w).
    """
    width, states = config.width, config.audio_context
    convolutions = 2 * (2 * states) * 3 * config.mel_bins * width + 2 * states * 3 * width**2
    return convolutions + config.encoder_layers * (2 * states * 12 * width**2 + 4 * states**2 * width)


def memory_operations(config: WhisperConfig) -> int:
    """Of one window: keys and values of its states for the decoder's cross-attention, D layers: D·2·T·2·w²."""
    return config.decoder_layers * 2 * config.audio_context * 2 * config.width**2


def decoder_operations(config: WhisperConfig, prompt: int, tokens: int) -> int:
    """Of one window whose decoder reads ``prompt`` tokens and writes ``tokens``.

    It reads all but the last written one: n = prompt + tokens - 1. Each costs D layers of 14 w² weights (4 w² for
    self-attention, 2 w² for cross-attention, 8 w² for the MLP), and attention over what came before and over T states;
    each token that is written costs the vocabulary V besides: n·D·(28·w² + 4·T·w) + D·2·n·(n + 1)·w + tokens·2·V·w.
    """
    width, layers = config.width, config.decoder_layers
    read = prompt + tokens - 1
    each = layers * (28 * width**2 + 4 * config.audio_context * width)
    return read * each + layers * 2 * read * (read + 1) * width + tokens * 2 * config.vocab_size * width


@dataclass(frozen=True)
class StepBytes:
    """What a decoder step must read at least.

    ``weights``: once for all windows, the vocabulary's included; ``memory``: keys and values of the windows' states;
    ``cache``: those of the tokens so far.
    """

    weights: float
    memory: float
    cache: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.memory + self.cache


def step_bytes(
    config: WhisperConfig, windows: int, positions: float, *, weight_bytes: float, cache_bytes: int, memory_bytes: int
) -> StepBytes:
    """Of one step of so many windows that have ``positions`` tokens each, prompt and the one being read included.

    The bytes of a weight, of a number in the cache and in the memory; a memory of 8 bits has two scales in float32 for
    each channel of each window and layer. Weights: D·14·w² + V·w; biases, norms and what is written (under a
    hundredth) are not counted. Memory: windows·D·2·T·w. Cache: windows·D·2·positions·w.
    """
    width, layers = config.width, config.decoder_layers
    of_scales = 2 * 4 * width if memory_bytes == 1 else 0
    return StepBytes(
        weights=weight_bytes * (layers * 14 * width**2 + config.vocab_size * width),
        memory=windows * layers * (2 * config.audio_context * width * memory_bytes + of_scales),
        cache=windows * layers * 2 * positions * width * cache_bytes,
    )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """So that streams and events are those of this GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
