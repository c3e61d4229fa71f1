"""Layer norm over the rows of a large batch.

The sum of residual biases that the rows still lack is added on the way, so that products can add into the residual
stream directly, without a pass for their biases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

_ROWS = 4
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@kernel
def _layer_norm(
    x_ptr, lack_ptr, gain_ptr, bias_ptr, y_ptr, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    d = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (d < WIDTH)[None, :]
    place = row[:, None] * WIDTH + d[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(lack_ptr + d, mask=d < WIDTH, other=0.0)[None, :]
    mean = tl.sum(x, 1) / WIDTH
    x = tl.where((d < WIDTH)[None, :], x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    gain = tl.load(gain_ptr + d, mask=d < WIDTH, other=0.0)
    bias = tl.load(bias_ptr + d, mask=d < WIDTH, other=0.0)
    y = x * scale[:, None] * gain[None, :] + bias[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, lack: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """The norm of ``x + lack``. x (rows, width); lack, gain, bias (width,), float32 → (rows, width) in x's dtype."""
    return launch_or(
        "layer_norm",
        x.device,
        lambda: _launch(x, lack, gain, bias, eps),
        lambda: layer_norm_reference(x, lack, gain, bias, eps),
    )


def layer_norm_reference(x: Tensor, lack: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """`layer_norm` in plain PyTorch."""
    return F.layer_norm(x.float() + lack, x.shape[-1:], gain, bias, eps).to(x.dtype)


def _launch(x: Tensor, lack: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    y = torch.empty_like(x)
    block = 1 << (width - 1).bit_length()
    _layer_norm[(-(-rows // _ROWS),)](
        x, lack, gain, bias, y, rows, eps, WIDTH=width, BLOCK=block, ROWS=_ROWS, num_warps=_warps(target_of(x.device))
    )
    return y


def _warps(target: Target | None) -> int:
    """Measured on an H200. Of AMD's GPUs those whose warps have 32 lanes get as many lanes as those with 64."""
    return 8 if target is not None and target.is_amd and target.wave_size == 32 else 4


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the width of Whisper large-v3."""
    for name in _DTYPES.values():
        yield CompileCase(
            "layer_norm",
            name,
            _layer_norm,
            signature={
                "x_ptr": f"*{name}",
                "lack_ptr": "*fp32",
                "gain_ptr": "*fp32",
                "bias_ptr": "*fp32",
                "y_ptr": f"*{name}",
                "rows": "i32",
                "eps": "fp32",
            },
            constants={"WIDTH": 1280, "BLOCK": 2048, "ROWS": _ROWS},
            warps=_warps(target),
            skip="no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None,
        )
