"""Linear layers of a decoder that writes one token in each row: little to compute, all weights to read.

With what stands before and behind them in a Whisper block folded in, a block is eight kernels and not fourteen: the
layer norm before (its mean and variance are found while the rows are read anyway), the GELU, and the residual sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import is_interpreted, kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class NormedLinear:
    """A linear layer, with the layer norm that stands before it where there is one.

    weight (outputs, inputs). bias (outputs,), float32, or None. With a norm: gain (inputs,), float32, the norm's
    weights; ``bias`` includes the norm's own bias seen through the weights; shift (outputs,), float32, is the gain seen
    through them, of which each row's mean is taken off. norm_bias and plain_bias are what ``bias`` was made from.
    """

    weight: Tensor
    bias: Tensor | None
    gain: Tensor | None = None
    shift: Tensor | None = None
    eps: float = 1e-5
    norm_bias: Tensor | None = None
    plain_bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, norm: torch.nn.LayerNorm | None = None) -> NormedLinear:
        """From the parameters of a layer and of the norm before it."""
        plain = None if bias is None else bias.float()
        if norm is None:
            return cls(weight, plain)
        wide = weight.float()
        gain, norm_bias = norm.weight.float(), norm.bias.float()
        through = wide @ norm_bias
        whole = through if plain is None else plain + through
        return cls(weight, whole, gain, wide @ gain, norm.eps, norm_bias, plain)


@kernel
def _linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    gain_ptr,
    shift_ptr,
    y_ptr,
    residual_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile, tile_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here, there = m < rows, n < outputs
    length: tl.constexpr = INPUTS // SPLITS
    begin = split * length
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(begin, begin + length, BLOCK_K):
        w = tl.load(w_ptr + n[None, :] * INPUTS + (start + k)[:, None], mask=there[None, :], other=0.0)
        x = tl.load(x_ptr + m[:, None] * INPUTS + (start + k)[None, :], mask=here[:, None], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            total += tl.sum(wide, 1)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(gain_ptr + start + k)[None, :]).to(w.dtype)
        if WIDEN:
            acc += tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee")
    if SPLITS > 1:
        place = (m[:, None] * SPLITS + split) * outputs + n[None, :]
        tl.store(partial_ptr + place, acc, mask=here[:, None] & there[None, :])
        # The last to arrive adds up, always in the same order: which it is changes nothing.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile_m * tl.num_programs(0) + tile, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.store(counter_ptr + tile_m * tl.num_programs(0) + tile, 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in range(SPLITS):
            place = (m[:, None] * SPLITS + part) * outputs + n[None, :]
            # Past the cache of this multiprocessor, which may hold an earlier layer's numbers.
            acc += tl.load(partial_ptr + place, mask=here[:, None] & there[None, :], other=0.0, cache_modifier=".cg")
    if NORM:
        mean = total / INPUTS
        scale = tl.rsqrt(squares / INPUTS - mean * mean + eps)
        shift = tl.load(shift_ptr + n, mask=there, other=0.0)
        acc = (acc - mean[:, None] * shift[None, :]) * scale[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=there, other=0.0)[None, :]
    if GELU:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    place = m[:, None] * outputs + n[None, :]
    inside = here[:, None] & there[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=inside, other=0.0)
        tl.store(residual_ptr + place, acc, mask=inside)
    tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=inside)


def linear(
    x: Tensor,
    layer: NormedLinear,
    *,
    gelu: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """(rows, inputs) → (rows, outputs) in ``dtype``, x's by default.

    The norm comes first, then the product and its bias, then the GELU. residual (rows, outputs), float32: the result
    is added to it in place, and the sum is returned too. counters: int32 zeros, at least as many as tiles of the
    result (outputs / 16 × rows / 16); needed where a product is shared out, and zero again afterwards.
    """
    return launch_or(
        "decoder_linear",
        x.device,
        lambda: _launch(x, layer, gelu, residual, dtype or x.dtype, counters),
        lambda: linear_reference(x, layer, gelu=gelu, residual=residual, dtype=dtype),
    )


def linear_reference(
    x: Tensor,
    layer: NormedLinear,
    *,
    gelu: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` in plain PyTorch."""
    wide, weight = x.float(), layer.weight.float()
    if layer.gain is not None:
        wide = F.layer_norm(wide, wide.shape[-1:], layer.gain, layer.norm_bias, layer.eps)
        out = F.linear(wide, weight, layer.plain_bias)
    else:
        out = F.linear(wide, weight, layer.bias)
    if gelu:
        out = F.gelu(out)
    if residual is not None:
        out = residual.add_(out)
    return out.to(dtype or x.dtype)


@dataclass(frozen=True)
class _Tile:
    rows: int
    outputs: int
    inputs: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


def _launch(
    x: Tensor, layer: NormedLinear, gelu: bool, residual: Tensor | None, dtype: torch.dtype, counters: Tensor | None
) -> Tensor:
    rows, (outputs, inputs) = len(x), layer.weight.shape
    tile = choose_tile(
        rows, outputs, inputs, x.dtype, target_of(x.device), layer.gain is not None, counters is not None
    )
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    launch_tile(x, layer, gelu, residual, y, counters, tile)
    return y


def launch_tile(
    x: Tensor, layer: NormedLinear, gelu: bool, residual: Tensor | None, y: Tensor, counters: Tensor | None, tile: _Tile
) -> None:
    """Launch with a given tile."""
    rows, (outputs, inputs) = len(x), layer.weight.shape
    partial = x.new_empty((rows, tile.splits, outputs) if tile.splits > 1 else (1,), dtype=torch.float32)
    grid = (-(-outputs // tile.outputs), -(-rows // tile.rows), tile.splits)
    _linear[grid](
        x,
        layer.weight,
        layer.bias if layer.bias is not None else x,
        layer.gain if layer.gain is not None else x,
        layer.shift if layer.shift is not None else x,
        y,
        residual if residual is not None else x,
        partial,
        counters if counters is not None else x,
        rows,
        outputs,
        layer.eps,
        INPUTS=inputs,
        BIAS=layer.bias is not None,
        NORM=layer.gain is not None,
        GELU=gelu,
        RESIDUAL=residual is not None,
        SPLITS=tile.splits,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        WIDEN=is_interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def choose_tile(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, target: Target | None, norm: bool, can_split: bool
) -> _Tile:
    """The tile that suits a product: enough programs to read the weights at full speed."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if dtype == torch.float32:
        return _Tile(16, 16, 64 if inputs % 64 == 0 else 32, stages=1)
    block_k = 128 if inputs % 128 == 0 else 64 if inputs % 64 == 0 else 32
    block_n = 16 if outputs < 2048 else 32 if outputs < 16384 else 64
    splits = 1
    if can_split and not norm and inputs >= 2048 and inputs % (4 * block_k) == 0:
        splits, block_n = 4, 32
    if target is not None and target.is_amd:
        small = target.family != "cdna"
        return _Tile(min(block_m, 32 if small else 64), block_n, 64 if inputs % 64 == 0 else 32, splits, 4, 2)
    return _Tile(block_m, block_n, block_k, splits, 4, 3)


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the products of a block of Whisper large-v3, and its vocabulary."""
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        for label, outputs, inputs, norm, gelu, residual, wide in (
            ("qkv", 3840, 1280, True, False, False, False),
            ("out", 1280, 1280, False, False, True, False),
            ("up", 5120, 1280, True, True, False, False),
            ("down", 1280, 5120, False, False, True, False),
            ("vocabulary", 51866, 1280, True, False, False, True),
        ):
            for rows in (1, 64):
                tile = choose_tile(rows, outputs, inputs, dtype, target, norm, True)
                yield CompileCase(
                    f"decoder_linear {label} {rows}",
                    name,
                    _linear,
                    signature={
                        "x_ptr": f"*{name}",
                        "w_ptr": f"*{name}",
                        "bias_ptr": "*fp32",
                        "gain_ptr": "*fp32",
                        "shift_ptr": "*fp32",
                        "y_ptr": "*fp32" if wide else f"*{name}",
                        "residual_ptr": "*fp32",
                        "partial_ptr": "*fp32",
                        "counter_ptr": "*i32",
                        "rows": "i32",
                        "outputs": "i32",
                        "eps": "fp32",
                    },
                    constants={
                        "INPUTS": inputs,
                        "BIAS": True,
                        "NORM": norm,
                        "GELU": gelu,
                        "RESIDUAL": residual,
                        "SPLITS": tile.splits,
                        "BLOCK_M": tile.rows,
                        "BLOCK_N": tile.outputs,
                        "BLOCK_K": tile.inputs,
                        "WIDEN": False,
                    },
                    dot=name,
                    warps=tile.warps,
                    stages=tile.stages,
                    skip="no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None,
                )
