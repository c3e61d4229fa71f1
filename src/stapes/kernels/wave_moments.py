"""Moments of waveforms and of the windows that a convolution sees, in float64, for a whole batch at once.

What normalises a waveform, and what a group norm over the first convolution's outputs needs, follows from them: see
``models.waveform``. The variance of a high-pass kernel's outputs is a small difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl

_PART = 8192
"""Windows whose moments one program sums."""

_NUMBERS = 2048
"""Samples that it looks at together."""


def moments(samples: Tensor, recordings: Tensor, longest: int, kernel_size: int, stride: int) -> Tensor:
    """Sums over the windows of ``kernel_size`` samples, from every ``stride``-th on, that lie within a recording.

    samples: (count,), float32. recordings: (2, recordings), int32: where each begins, and its samples, ``longest`` at
    most. Returns (recordings, kernel + 1, kernel), float64: each sample of a window times each; last, each alone.
    """
    return launch_or(
        "moments",
        samples.device,
        lambda: _launch_moments(samples, recordings, longest, kernel_size, stride),
        lambda: moments_reference(samples, recordings, longest, kernel_size, stride),
    )


def moments_reference(samples: Tensor, recordings: Tensor, longest: int, kernel_size: int, stride: int) -> Tensor:
    """`moments` in plain PyTorch."""
    out = samples.new_zeros(recordings.shape[1], kernel_size + 1, kernel_size, dtype=torch.float64)
    for sums, (begin, length) in zip(out, recordings.T.tolist(), strict=True):
        if length >= kernel_size:
            found = samples[begin : begin + length].double().unfold(0, kernel_size, stride)
            sums[:-1], sums[-1] = found.T @ found, found.sum(0)
    return out


@kernel
def _moments(
    samples_ptr, recordings_ptr, out_ptr, recordings,
    TAPS: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAPS: tl.constexpr,
):  # fmt: skip
    """Of some windows of one recording: one sample of each, or 1, times each."""
    part, recording, factor = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(recordings_ptr + recording)
    length = tl.load(recordings_ptr + recordings + recording)
    count = tl.where(length < TAPS, 0, (length - TAPS) // STEP + 1)
    tap = tl.arange(0, BLOCK_TAPS)
    sums = tl.zeros((BLOCK, BLOCK_TAPS), tl.float64)
    for start in range(part * PART, tl.minimum((part + 1) * PART, count), BLOCK):
        window = start + tl.arange(0, BLOCK)
        inside = window < count
        first = samples_ptr + begin + window * STEP
        each = tl.load(first[:, None] + tap[None, :], mask=inside[:, None] & (tap < TAPS)[None, :], other=0.0)
        one = tl.load(first + factor, mask=inside & (factor < TAPS), other=0.0).to(tl.float64)
        one = tl.where(factor < TAPS, one, 1.0)
        sums += one[:, None] * each.to(tl.float64)
    row = ((part * recordings + recording) * (TAPS + 1) + factor) * TAPS
    tl.store(out_ptr + row + tap, tl.sum(sums, 0), mask=tap < TAPS)


def _launch_moments(samples: Tensor, recordings: Tensor, longest: int, kernel_size: int, stride: int) -> Tensor:
    count = recordings.shape[1]
    parts = max(1, -(-((longest - kernel_size) // stride + 1) // _PART))
    sums = torch.empty(parts, count, kernel_size + 1, kernel_size, dtype=torch.float64, device=samples.device)
    _moments[(parts, count, kernel_size + 1)](
        samples,
        recordings,
        sums,
        count,
        TAPS=kernel_size,
        STEP=stride,
        PART=_PART,
        BLOCK=_NUMBERS // _block(kernel_size),
        BLOCK_TAPS=_block(kernel_size),
        num_warps=4,
    )
    return sums.sum(0)


def _block(count: int) -> int:
    return 1 << (count - 1).bit_length()


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: of samples, and of the windows of all published models."""
    for taps, step in ((1, 1), (10, 5)):
        yield CompileCase(
            f"moments of {taps}",
            "fp64",
            _moments,
            signature={"samples_ptr": "*fp32", "recordings_ptr": "*i32", "out_ptr": "*fp64", "recordings": "i32"},
            constants={
                "TAPS": taps,
                "STEP": step,
                "PART": _PART,
                "BLOCK": _NUMBERS // _block(taps),
                "BLOCK_TAPS": _block(taps),
            },
        )
