"""Fit a model into a given amount of GPU memory: which precision, how many windows at once, how exact a cache.

Pure arithmetic on the sizes of the network. What is counted is what PyTorch takes from the driver
(``torch.cuda.max_memory_reserved``); the driver's own share of a process, some hundred megabytes, comes on top of it.
``python -m stapes.benchmarks.memory`` holds the sums against what a model really takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from stapes.errors import UsageError
from stapes.inference.quantized import bits_of, quantizes
from stapes.kernels.quantization import GROUPS
from stapes.kernels.quantized_linear import SCRATCH
from stapes.models.whisper import Whisper, WhisperConfig
from stapes.options import Precision

_MOST_SLOTS = 64
_ENOUGH = 4
"""Windows at once for which a more exact precision is taken rather than one that has room for more."""

_ENCODER_BATCHES = (8, 4, 2, 1)
_SLACK, _SLACK_SHARE = 24 << 20, 0.04
"""What the allocator loses between blocks, and small tensors that are not worth counting."""

_MEL_BYTES = 16 << 20
"""Samples, spectrum and log-mel spectrogram of one window."""


@dataclass(frozen=True)
class Parts:
    """Bytes."""

    weights: int
    cross_cache: int
    """Keys and values of the encoder's states, a row for each window."""
    self_cache: int
    """Keys and values of what was written, a row for each candidate."""
    activations: int
    """Of the encoder, whose peak is the highest, and the decoder's logits."""
    reserve: int
    """Workspaces of the BLAS, widened weights, and what the allocator loses."""

    @property
    def total(self) -> int:
        return self.weights + self.cross_cache + self.self_cache + self.activations + self.reserve


@dataclass(frozen=True)
class Plan:
    """How to run a model within a budget.

    ``precision``: fp32, fp16, bf16, int8 or int4. ``dtype``: of activations, and of weights that are not quantised.
    ``slots``: windows decoded at once. ``encoder_batch``: windows encoded at once. ``has_int8_cache``: whether the keys
    and values of the encoder's states are kept in 8 bits. ``reason``: one line for the user.
    """

    precision: Precision
    dtype: torch.dtype
    has_int8_cache: bool
    slots: int
    encoder_batch: int
    parts: Parts
    reason: str

    @property
    def memory_rows(self) -> int:
        """Windows whose keys and values are kept."""
        return memory_rows(self.slots)


def memory_rows(slots: int) -> int:
    """Rows of the cross-attention cache: one more than slots, to detect a language in, where there are several."""
    return slots + 1 if slots > 1 else slots


def workspace_bytes(backend: str, architecture: str | None) -> int:
    """What PyTorch gives the BLAS on a GPU, on the stream of its own that graphs are captured on too.

    Defaults of PyTorch: 76 MiB for hipBLASLt, 32 MiB for cuBLAS on Hopper and later, 8 MiB before.
    """
    if backend == "rocm":
        return 2 * (76 << 20)
    is_new = architecture is not None and architecture.startswith("sm_") and int(architecture[3:]) >= 90
    return 2 * ((32 << 20) if is_new else (8 << 20))


def count(
    config: WhisperConfig,
    precision: Precision,
    dtype: torch.dtype,
    int8_cache: bool,
    slots: int,
    encoder_batch: int,
    *,
    candidates: int = 1,
    workspace: int = 2 * (32 << 20),
    has_fused_attention: bool = True,
) -> Parts:
    """What a model takes.

    candidates: the most texts that are written for one window (beams, or samples of a fallback): beyond one they have
    caches of their own. workspace: see `workspace_bytes`. has_fused_attention: else the encoder's scores are all held
    at once.
    """
    item, width = dtype.itemsize, config.width
    weights, largest = _weights(config, precision, item)

    cell = config.decoder_layers * 2 * width
    cross = memory_rows(slots) * cell * (config.audio_context * (1 if int8_cache else item) + (4 if int8_cache else 0))
    cells = slots + (max(1, slots // candidates) * candidates if candidates > 1 else 0)
    own = cells * cell * config.text_context * item

    # At the MLP's GELU: the residual stream, its norm, and the four times wider layer before and after.
    state = config.audio_context * width * item
    encoder = encoder_batch * max(10 * state, _MEL_BYTES)
    if not has_fused_attention:
        encoder += encoder_batch * 2 * config.encoder_heads * config.audio_context**2 * max(item, 4)
    waiting = 2 * encoder_batch * state
    # Logits, their mask of forbidden tokens, and two more in the rules.
    logits = cells * 4 * config.vocab_size * 4
    scratch = min(largest, SCRATCH["cuda"]) * item if quantizes(precision) else 0
    activations = encoder + waiting + logits
    known = weights + cross + own + activations + scratch + workspace
    reserve = scratch + workspace + _SLACK + round(_SLACK_SHARE * known)
    return Parts(weights, cross, own, activations, reserve)


@lru_cache(maxsize=64)
def _weights(config: WhisperConfig, precision: Precision, item: int) -> tuple[int, int]:
    """Bytes of all weights, and how many weights the largest quantised matrix of a layer has."""
    with torch.device("meta"):
        model = Whisper(config)
    total = largest = 0
    bits = 8 if precision == "int8" else 4
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            size, wanted = parameter.numel(), None
            if quantizes(precision) and name == "weight" and isinstance(module, nn.Linear | nn.Embedding):
                inputs = parameter.shape[1]
                wanted = bits_of(path, config.width, inputs, bits if isinstance(module, nn.Linear) else 8)
            if wanted is None:
                total += size * item
            else:
                total += size * wanted // 8 + 2 * size // GROUPS[wanted]
                largest = max(largest, size)
    return total, largest


class _Choice(NamedTuple):
    precision: Precision
    dtype: torch.dtype
    int8_cache: bool

    @property
    def cache(self) -> str:
        return "8-bit" if self.int8_cache else str(self.dtype).removeprefix("torch.")


_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _choices(precision: Precision, dtypes: Sequence[torch.dtype]) -> list[_Choice]:
    """What may be tried for a precision, the most exact first."""
    usual = dtypes[0]
    name: Precision = next(name for name, dtype in _DTYPES.items() if dtype == usual)
    if precision == "auto":
        narrower: list[Precision] = [name, "int8", "int4"]
        return [_Choice(name, usual, False), *(_Choice(each, usual, True) for each in narrower)]
    dtype = _DTYPES.get(precision, usual)
    if dtype not in dtypes:
        raise UsageError(f"--precision {precision}: this device does not compute in it; use --precision {name}")
    return [_Choice(precision, dtype, False), _Choice(precision, dtype, True)]


def _fill(total: Callable[[int, int], int], budget: int, most: int) -> tuple[int, int]:
    """The most slots, and the encoder batch, whose ``total`` fits; no slots where not even one does.

    A batch is at most half of the slots, so that others are decoded while it is encoded.
    """
    for batch in _ENCODER_BATCHES:
        slots = bisect_right(range(1, most + 1), budget, key=lambda slots: total(slots, batch))
        if slots >= 2 * batch or (slots and batch == 1):
            return slots, batch
    return 0, 1


def plan(
    config: WhisperConfig,
    budget: int,
    precision: Precision = "auto",
    *,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
    slots: int | None = None,
    candidates: int = 1,
    workspace: int = 2 * (32 << 20),
    has_fused_attention: bool = True,
) -> Plan:
    """How to run a model in ``budget`` bytes.

    precision: "auto" takes the most exact that has room for a few windows, else the one with room for the most; 4 bits
    only where nothing else fits. dtypes: what the device computes in, the one to be preferred first. slots: the most
    windows at once that make sense. The rest as for `count`. Raises UsageError where nothing fits, naming the least
    budget that would do, and for a precision that the device lacks.
    """
    most = slots or _MOST_SLOTS
    choices = _choices(precision, dtypes)

    def parts_of(choice: _Choice, slots: int, batch: int) -> Parts:
        return count(
            config,
            choice.precision,
            choice.dtype,
            choice.int8_cache,
            slots,
            batch,
            candidates=candidates,
            workspace=workspace,
            has_fused_attention=has_fused_attention,
        )

    found: list[tuple[_Choice, int, int]] = []
    for choice in choices:
        if found and precision == "auto" and choice.precision == "int4":
            break  # speed alone is not worth what 4 bits cost in accuracy
        windows, batch = _fill(lambda *sizes, choice=choice: parts_of(choice, *sizes).total, budget, most)
        if windows:
            found.append((choice, windows, batch))
        if windows >= min(_ENOUGH, most):
            break
    if not found:
        least, name = min((parts_of(each, 1, 1).total, each.precision) for each in choices)
        raise UsageError(
            f"{_megabytes(budget)} of GPU memory are too little for this model: the least that works is "
            f"{_megabytes(least, up=True)}, with --precision {name}; choose a smaller model, or raise --max-vram"
        )
    choice, windows, batch = max(found, key=lambda each: min(each[1], _ENOUGH))
    parts = parts_of(choice, windows, batch)
    passed_over = choices[choices.index(choice) - 1] if choice != choices[0] else None
    return Plan(*choice, windows, batch, parts, _reason(choice, windows, batch, parts, budget, passed_over))


def _reason(choice: _Choice, slots: int, batch: int, parts: Parts, budget: int, passed_over: _Choice | None) -> str:
    bits = {"int8": "8-bit weights", "int4": "4-bit weights"}.get(choice.precision, f"{choice.precision} weights")
    text = (
        f"{bits}, {choice.cache} cross-attention cache, {slots} window{'s' * (slots > 1)} at once, {batch} encoded "
        f"together: {_megabytes(parts.total, up=True)} of {_megabytes(budget)} (weights "
        f"{_megabytes(parts.weights, up=True)}, caches {_megabytes(parts.cross_cache + parts.self_cache, up=True)})"
    )
    if passed_over is None:
        return text
    kept = "weights" if passed_over.precision != choice.precision else "cache"
    return f"{text}; more exact {kept} would leave room for {'fewer' if slots > 1 else 'no'} windows"


def _megabytes(size: int, *, up: bool = False) -> str:
    return f"{-(-size // 10**6) if up else size // 10**6:,} MB"
