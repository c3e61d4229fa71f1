"""Short-time Fourier transform: frames by a kernel, their transform by the FFT library.

`torch.stft` copies the signal to pad it, multiplies the frames by the window in a second pass, and leaves the rest to
the same library. Here one kernel reads the signal, reflects it at its ends and writes windowed frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 2048


def spectrum_reference(pcm: Tensor, window: Tensor, hop: int) -> Tensor:
    """(windows, samples), a window of n samples → (windows, n / 2 + 1, samples / hop) complex, centred frames."""
    return torch.stft(pcm, len(window), hop, window=window, return_complex=True)[..., :-1]


def launch_frames(pcm: Tensor, window: Tensor, hop: int) -> Tensor:
    """(windows, samples) float32 → windowed frames (windows, samples / hop, n), centred, reflected at the ends.

    Raises ValueError for a signal too short to reflect, as `torch.stft` does.
    """
    rows, samples = pcm.shape
    size = len(window)
    if samples <= size // 2:
        raise ValueError(f"{samples} samples are too few to reflect {size // 2} of them")
    frames = samples // hop
    out = torch.empty(rows, frames, size, device=pcm.device)
    _frames[(-(-frames * size // _BLOCK), rows)](
        pcm.contiguous(), window, out, samples, frames * size, SIZE=size, HOP=hop, BLOCK=_BLOCK, num_warps=8
    )
    return out


@kernel
def _frames(
    pcm_ptr, window_ptr, out_ptr, samples, count, SIZE: tl.constexpr, HOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    frame, n = index // SIZE, index % SIZE
    at = frame * HOP + n - SIZE // 2
    at = tl.where(at < 0, -at, at)
    at = tl.where(at < samples, at, 2 * samples - 2 - at)
    value = tl.load(pcm_ptr + row * samples + at, mask=inside, other=0.0)
    weight = tl.load(window_ptr + n, mask=inside, other=0.0)
    tl.store(out_ptr + row * count + index, value * weight, mask=inside)


def compile_cases(target: Target) -> list[CompileCase]:
    """Whisper's frames: 25 ms every 10 ms."""
    return [
        CompileCase(
            "frames",
            "fp32",
            _frames,
            {"pcm_ptr": "*fp32", "window_ptr": "*fp32", "out_ptr": "*fp32", "samples": "i32", "count": "i32"},
            {"SIZE": 400, "HOP": 160, "BLOCK": _BLOCK},
            warps=8,
            aligned=("pcm_ptr", "window_ptr", "out_ptr", "samples", "count"),
        )
    ]
