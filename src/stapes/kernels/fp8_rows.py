"""Rows rounded to 8-bit floats, each by its own largest value, on their way into a product of 8-bit matrices.

The step before (a residual sum and its layer norm, or a GELU) is done on the way: rounding costs no pass of its own.
Source of the format: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _round_rows(
    x_ptr,
    delta_ptr,
    gain_ptr,
    bias_ptr,
    y_ptr,
    scale_ptr,
    rows,
    eps,
    largest,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (d < WIDTH)[None, :]
    place = row[:, None] * WIDTH + d[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, stored, mask=inside)
        x = stored.to(tl.float32)
    if NORM:
        mean = tl.sum(x, 1) / WIDTH
        x = tl.where(inside, x - mean[:, None], 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        gain = tl.load(gain_ptr + d, mask=d < WIDTH, other=0.0)
        x = x * gain[None, :] + tl.load(bias_ptr + d, mask=d < WIDTH, other=0.0)[None, :]
    if GELU:
        # The tanh form, by one exponential: 2 √(2/π) log₂e (x + 0.044715 x³).
        x = x / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
    scale = tl.maximum(tl.max(tl.abs(x), 1) / largest, 1e-12)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(y_ptr + place, (x * (1.0 / scale)[:, None]).to(y_ptr.dtype.element_ty), mask=inside)


def round_rows(
    x: Tensor,
    kind: torch.dtype,
    *,
    delta: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rows, width) → the same in ``kind``, and a scale for each row (rows, 1), float32.

    delta: added first, and the sum is kept in x. norm: gain, bias (width,), float32, and epsilon of a layer norm that
    comes next. gelu: applied last, in its tanh form, off by 0.0005 at most, far less than 8-bit floats are. kind:
    torch.float8_e4m3fn, or torch.float8_e4m3fnuz on gfx942.
    """
    return launch_or(
        "round_rows",
        x.device,
        lambda: _launch(x, kind, delta, norm, gelu),
        lambda: round_rows_reference(x, kind, delta=delta, norm=norm, gelu=gelu),
    )


def round_rows_reference(
    x: Tensor,
    kind: torch.dtype,
    *,
    delta: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """`round_rows` in plain PyTorch."""
    if delta is not None:
        x.copy_((x.float() + delta.float()).to(x.dtype))
    y = x.float()
    if norm is not None:
        y = F.layer_norm(y, y.shape[-1:], norm[0], norm[1], norm[2])
    if gelu:
        y = F.gelu(y, approximate="tanh")
    scale = (y.abs().amax(dim=-1, keepdim=True) / torch.finfo(kind).max).clamp_min(1e-12)
    return (y / scale).to(kind), scale


def _launch(
    x: Tensor, kind: torch.dtype, delta: Tensor | None, norm: tuple[Tensor, Tensor, float] | None, gelu: bool
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=kind, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = 1 << (width - 1).bit_length()
    each, warps = _shape(norm is not None)
    _round_rows[(-(-rows // each),)](
        x,
        delta if delta is not None else x,
        norm[0] if norm else scale,
        norm[1] if norm else scale,
        y,
        scale,
        rows,
        norm[2] if norm else 0.0,
        torch.finfo(kind).max,
        WIDTH=width,
        BLOCK=block,
        ADD=delta is not None,
        NORM=norm is not None,
        GELU=gelu,
        ROWS=each,
        num_warps=warps,
    )
    return y, scale


def _shape(norm: bool) -> tuple[int, int]:
    """Rows of one program, and its warps; measured on an H200."""
    return (4, 8) if norm else (1, 4)


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: Whisper large-v3, on the targets that multiply 8-bit floats."""
    fp8 = next((name for name in ("fp8fnuz", "fp8") if name in target.matrix), None)
    for label, width, add, norm, gelu in (
        ("plain", 1280, False, False, False),
        ("norm", 1280, True, True, False),
        ("gelu", 5120, False, False, True),
    ):
        each, warps = _shape(norm)
        yield CompileCase(
            f"round_rows {label}",
            fp8 or "fp8",
            _round_rows,
            signature={
                "x_ptr": "*bf16",
                "delta_ptr": "*bf16",
                "gain_ptr": "*fp32",
                "bias_ptr": "*fp32",
                "y_ptr": "*fp8e4b8" if fp8 == "fp8fnuz" else "*fp8e4nv",
                "scale_ptr": "*fp32",
                "rows": "i32",
                "eps": "fp32",
                "largest": "fp32",
            },
            constants={"WIDTH": width, "BLOCK": 1 << (width - 1).bit_length(), "ROWS": each}
            | {"ADD": add, "NORM": norm, "GELU": gelu},
            warps=warps,
            skip=None if fp8 else "no 8-bit floats",
        )
