"""From the places at the end of a beam search back to its beginning: the tokens of its texts.

Each frame is a look-up that waits for the last one; on the host it would wait for a copy of the whole history first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl


def trace(history: Tensor, at: Tensor) -> Tensor:
    """What the prefixes at places ``at`` (batch, n-best), int32, grew by in each frame: (batch, frames, n-best).

    ``at`` becomes their places before the first frame. history: as `stapes.kernels.ctc_beam.launch_beam` gives it.
    """
    return launch_or(
        "ctc_beam_trace", at.device, lambda: launch_trace(history, at), lambda: trace_reference(history, at)
    )


def launch_trace(history: Tensor, at: Tensor) -> Tensor:
    """`trace` by the kernel."""
    rows, frames, _, beam = history.shape
    best = at.shape[1]
    out = torch.empty((rows, frames, best), dtype=torch.int32, device=at.device)
    _ctc_beam_trace[(rows,)](history, at, out, frames, beam, best, BEST=1 << (best - 1).bit_length(), num_warps=1)
    return out


def trace_reference(history: Tensor, at: Tensor) -> Tensor:
    """`trace` in plain PyTorch."""
    out = torch.empty((*history.shape[:2], at.shape[1]), dtype=torch.int32, device=at.device)
    for frame in range(history.shape[1] - 1, -1, -1):
        places, grown = history[:, frame].unbind(1)
        index = at.long()
        out[:, frame] = grown.gather(1, index)
        at.copy_(places.gather(1, index))
    return out


@kernel
def _ctc_beam_trace(history_ptr, at_ptr, out_ptr, frames, beam, best, BEST: tl.constexpr):
    """From the places at the end back to those before the first frame, and what grew in each frame."""
    row = tl.program_id(0)
    n = tl.arange(0, BEST)
    wanted = n < best
    place = tl.load(at_ptr + row * best + n, mask=wanted, other=0)
    history, out = history_ptr + row.to(tl.int64) * frames * 2 * beam, out_ptr + row.to(tl.int64) * frames * best
    for step in tl.range(0, frames, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        frame = frames - 1 - step
        at = history + frame * 2 * beam + place
        tl.store(out + frame * best + n, tl.load(at + beam), mask=wanted)
        place = tl.load(at)
    tl.store(at_ptr + row * best + n, place, mask=wanted)


def compile_cases(target: Target) -> list[CompileCase]:
    """The best text alone, and several."""
    del target  # the same everywhere
    signature: dict[str, str] = dict.fromkeys(("history_ptr", "at_ptr", "out_ptr"), "*i32")
    signature |= dict.fromkeys(("frames", "beam", "best"), "i32")
    return [
        CompileCase(name, "int32", _ctc_beam_trace, signature, {"BEST": best}, warps=1)
        for name, best in (("ctc_beam_trace", 1), ("ctc_beam_trace 8", 8))
    ]
