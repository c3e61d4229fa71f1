"""Linear layers of a decoder that writes one token in each row: little to compute, all weights to read.

Where a product ends in a residual sum its inputs may be shared out among programs; the parts are added by the kernel
that adds the sum to the residual stream and takes the next layer norm, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import counting, is_interpreted, launch_or
from stapes.kernels.overlap import follow, overlap
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Norm:
    """A layer norm: gain and bias (width,), float32."""

    gain: Tensor
    bias: Tensor
    eps: float = 1e-5


@counting("rows")
def _linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here, there = m < rows, n < outputs
    length: tl.constexpr = INPUTS // SPLITS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(split * length, split * length + length, BLOCK_K):
        w = tl.load(w_ptr + n[None, :] * INPUTS + (start + k)[:, None], mask=there[None, :], other=0.0)
        x = tl.load(x_ptr + m[:, None] * INPUTS + (start + k)[None, :], mask=here[:, None], other=0.0)
        if WIDEN:
            acc += tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=there, other=0.0)[None, :]
    if GELU:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    place = (split * rows + m[:, None]) * outputs + n[None, :]
    tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=here[:, None] & there[None, :])


@counting("rows")
def _add_norm(
    residual_ptr,
    parts_ptr,
    bias_ptr,
    gain_ptr,
    shift_ptr,
    y_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    x = tl.load(residual_ptr + row * WIDTH + d, mask=inside, other=0.0)
    if SPLITS > 0:
        total = tl.load(bias_ptr + d, mask=inside, other=0.0)
        for split in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
            total += tl.load(parts_ptr + (split * rows + row) * WIDTH + d, mask=inside, other=0.0)
        x += total
        tl.store(residual_ptr + row * WIDTH + d, x, mask=inside)
    mean = tl.sum(x, 0) / WIDTH
    x = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * scale * tl.load(gain_ptr + d, mask=inside, other=0.0) + tl.load(shift_ptr + d, mask=inside, other=0.0)
    tl.store(y_ptr + row * WIDTH + d, y.to(y_ptr.dtype.element_ty), mask=inside)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """x (rows, inputs), weight (outputs, inputs), bias (outputs,), float32 → (rows, outputs); dtype: x's by default."""
    return launch_or(
        "decoder_linear",
        x.device,
        lambda: _launch_linear(x, weight, bias, gelu, dtype or x.dtype),
        lambda: linear_reference(x, weight, bias, gelu=gelu, dtype=dtype),
    )


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` in plain PyTorch."""
    out = F.linear(x.float(), weight.float(), bias)
    return (F.gelu(out) if gelu else out).to(dtype or x.dtype)


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """The product without bias, as parts to be added: (splits, rows, outputs), float32."""
    return launch_or(
        "decoder_linear", x.device, lambda: _launch_parts(x, weight), lambda: F.linear(x.float(), weight.float())[None]
    )


def add_norm(residual: Tensor, parts: Tensor | None, bias: Tensor | None, norm: Norm, dtype: torch.dtype) -> Tensor:
    """Add parts (splits, rows, width) and their bias (width,) to the residual stream, and take the norm of it.

    residual (rows, width), float32, is changed in place. Returns (rows, width) in ``dtype``.
    """
    return launch_or(
        "add_norm",
        residual.device,
        lambda: _launch_add_norm(residual, parts, bias, norm, dtype),
        lambda: add_norm_reference(residual, parts, bias, norm, dtype),
    )


def add_norm_reference(
    residual: Tensor, parts: Tensor | None, bias: Tensor | None, norm: Norm, dtype: torch.dtype
) -> Tensor:
    """`add_norm` in plain PyTorch."""
    if parts is not None:
        residual += parts.sum(dim=0) if bias is None else parts.sum(dim=0) + bias
    return F.layer_norm(residual, residual.shape[-1:], norm.gain, norm.bias, norm.eps).to(dtype)


@dataclass(frozen=True)
class Tile:
    """What one program computes, and how many share the inputs of a result."""

    rows: int
    outputs: int
    inputs: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


def _launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, dtype: torch.dtype) -> Tensor:
    outputs, inputs = weight.shape
    tile = choose_tile(len(x), outputs, inputs, x.dtype, target_of(x.device), parts=False)
    y = torch.empty(len(x), outputs, dtype=dtype, device=x.device)
    launch_tile(x, weight, bias, gelu, y, tile)
    return y


def _launch_parts(x: Tensor, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    tile = choose_tile(len(x), outputs, inputs, x.dtype, target_of(x.device), parts=True)
    y = torch.empty(tile.splits, len(x), outputs, dtype=torch.float32, device=x.device)
    launch_tile(x, weight, None, False, y, tile)
    return y


def launch_tile(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, y: Tensor, tile: Tile) -> None:
    """Launch with a given tile."""
    rows, (outputs, inputs) = len(x), weight.shape
    grid = (-(-outputs // tile.outputs), -(-rows // tile.rows), tile.splits)
    _linear[grid](
        x,
        weight,
        bias if bias is not None else x,
        y,
        rows,
        outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        GELU=gelu,
        SPLITS=tile.splits,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        WIDEN=is_interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(x.device),
    )


def _launch_add_norm(
    residual: Tensor, parts: Tensor | None, bias: Tensor | None, norm: Norm, dtype: torch.dtype
) -> Tensor:
    rows, width = residual.shape
    y = torch.empty(rows, width, dtype=dtype, device=residual.device)
    if parts is not None and bias is None:
        bias = torch.zeros(width, device=residual.device)
    _add_norm[(rows,)](
        residual,
        parts if parts is not None else residual,
        bias if bias is not None else residual,
        norm.gain,
        norm.bias,
        y,
        rows,
        norm.eps,
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        SPLITS=0 if parts is None else len(parts),
        num_warps=8,
        **overlap(residual.device),
    )
    return y


# For NVIDIA, measured on an H200 with the shapes of large-v3: kind of product, most rows → rows, outputs and inputs
# of a tile, splits, warps, stages.
_MEASURED = {
    ("wide", 64): Tile(64, 128, 64, 1, 8, 4),
    ("wide", 128): Tile(64, 64, 64, 1, 4, 6),
    ("wide", 256): Tile(128, 128, 64, 1, 8, 4),
    ("up", 64): Tile(64, 64, 128, 1, 8, 4),
    ("up", 128): Tile(64, 32, 128, 1, 4, 3),
    ("up", 256): Tile(64, 64, 64, 1, 4, 4),
    ("qkv", 64): Tile(64, 32, 128, 1, 4, 4),
    ("qkv", 128): Tile(64, 64, 64, 1, 8, 6),
    ("qkv", 256): Tile(64, 128, 64, 1, 8, 4),
    ("square", 64): Tile(64, 16, 256, 1, 4, 3),
    ("square", 128): Tile(64, 32, 128, 1, 4, 4),
    ("square", 256): Tile(64, 64, 64, 1, 8, 4),
    ("out", 64): Tile(64, 64, 64, 4, 8, 4),
    ("out", 128): Tile(64, 32, 64, 4, 4, 3),
    ("out", 256): Tile(64, 32, 64, 2, 4, 3),
    ("down", 64): Tile(64, 32, 128, 8, 4, 3),
    ("down", 128): Tile(64, 64, 64, 8, 4, 4),
    ("down", 256): Tile(128, 64, 64, 8, 4, 3),
}


def _amd_tile(rows: int, outputs: int, length: int, splits: int, target: Target) -> Tile:
    """The tile for AMD, where ``length`` inputs are summed by each program. Not measured: no AMD GPU was at hand.

    Few programs have to keep much of the weights on its way: few outputs and as long a run of inputs as the registers
    take. All rows of a step belong into one tile, else weights are read again.
    """
    cdna, wide = target.family == "cdna", outputs >= 16384
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or target.family == "rdna2" else 64
    if wide:
        block_n, longest = 64, 64
    else:
        block_n = 32 if block_m > 16 and outputs >= (4096 if cdna else 2048) else 16
        longest = 64 if target.family == "rdna2" else 128 if cdna or block_m == 16 else 64
        longest = 256 if cdna and block_m == 16 else longest
    block_k = next((size for size in (256, 128, 64, 32) if size <= longest and length % size == 0), 16)
    # Half the lanes of CDNA's in a warp: twice the warps where the tile is large.
    return Tile(block_m, block_n, block_k, splits, 8 if wide and not cdna and block_m > 16 else 4, 2)


def choose_tile(rows: int, outputs: int, inputs: int, dtype: torch.dtype, target: Target | None, parts: bool) -> Tile:
    """The tile that suits a product: enough programs to read the weights at full speed."""
    step = next((size for size in (256, 128, 64, 32) if inputs % size == 0), 16)
    if dtype == torch.float32:
        return Tile(16, 16, min(step, 64), stages=1)
    if parts:
        kind = "down" if inputs >= 2048 else "out"
    else:
        kind = next((k for k, least in (("wide", 16384), ("up", 4096), ("qkv", 2048)) if outputs >= least), "square")
    splits = next((each for each in (8, 4, 2) if parts and inputs % (each * min(step, 64)) == 0), 1)
    if target is not None and target.is_amd:
        return _amd_tile(rows, outputs, inputs // min(splits, 4), min(splits, 4), target)
    tile = _MEASURED[kind, 64 if rows <= 64 else 128 if rows <= 128 else 256]
    if rows <= 32:
        few = 16 if rows <= 16 else 32
        tile = replace(tile, rows=few, outputs=min(tile.outputs, 64), warps=4)
    block_k = min(step, tile.inputs)
    wanted = min(tile.splits, splits)
    while inputs % (wanted * block_k):
        wanted //= 2
    return replace(tile, inputs=block_k, splits=max(1, wanted))


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the products of a block of Whisper large-v3, and its vocabulary."""
    overlaps = target.name == "sm_90"
    products = (
        ("up", 5120, 1280, False, True, False),
        ("qkv", 3840, 1280, False, False, False),
        ("out", 1280, 1280, True, False, True),
        ("down", 1280, 5120, True, False, True),
        ("vocabulary", 51866, 1280, False, False, True),
    )
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        # In fp32 one tile does it all.
        for label, outputs, inputs, parts, gelu, wide in products[:1] if name == "fp32" else products:
            for rows in (64,) if name == "fp32" else (1, 32, 64) if label == "up" else (1, 64):
                tile = choose_tile(rows, outputs, inputs, dtype, target, parts)
                yield CompileCase(
                    f"decoder_linear {label} {rows}",
                    name,
                    _linear,
                    signature={
                        "x_ptr": f"*{name}",
                        "w_ptr": f"*{name}",
                        "bias_ptr": "*fp32",
                        "y_ptr": "*fp32" if wide else f"*{name}",
                        "rows": "i32",
                        "outputs": "i32",
                    },
                    constants={
                        "INPUTS": inputs,
                        "BIAS": not parts and label != "vocabulary",
                        "GELU": gelu,
                        "SPLITS": tile.splits,
                        "BLOCK_M": tile.rows,
                        "BLOCK_N": tile.outputs,
                        "BLOCK_K": tile.inputs,
                        "WIDEN": False,
                        "OVERLAP": overlaps,
                    },
                    dot=name,
                    warps=tile.warps,
                    stages=tile.stages,
                    aligned=("x_ptr", "w_ptr", "bias_ptr", "y_ptr")
                    + (("rows",) if rows % 16 == 0 else ())
                    + (("outputs",) if outputs % 16 == 0 else ()),
                    skip=skip,
                )
        for splits in (0, 4):
            yield CompileCase(
                f"add_norm {splits}",
                name,
                _add_norm,
                signature=dict.fromkeys(("residual_ptr", "parts_ptr", "bias_ptr", "gain_ptr", "shift_ptr"), "*fp32")
                | {"y_ptr": f"*{name}", "rows": "i32", "eps": "fp32"},
                constants={"WIDTH": 1280, "BLOCK": 2048, "SPLITS": splits, "OVERLAP": overlaps},
                warps=8,
                skip=skip,
            )
