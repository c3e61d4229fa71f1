"""Linear layers on weights of 8 or 4 bits: y = gelu(x W' + b) + r, added up in fp32 and rounded once.

Few rows (decoding) are a matter of reading the weights: a tile of them is widened in registers and multiplied, exactly,
for integers this small are exact in fp16 and bf16; scales come in afterwards, in fp32. Many rows (the encoder) are a
matter of multiplying: the matrix is widened once into scratch memory for PyTorch's BLAS. ``python -m
stapes.benchmarks.quantized_linear`` measures both ways and every tile.

A row's result is the same whatever the other rows hold, and from run to run: sums over parts of the inputs, where a
matrix is too small to keep a GPU busy otherwise, are kept apart and added in order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import can_launch, is_interpreted, kernel, launch_or
from stapes.kernels.quantization import GROUPS, Quantized, dequantize, slices
from stapes.kernels.quantized_tiles import Shape, Tile, tile_for
from stapes.kernels.targets import TARGETS, CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

Method = Literal["auto", "tile", "scratch"]

_MOST_TILE_ROWS = 256
"""Above this many rows the BLAS on widened weights is faster."""

SCRATCH = {"cpu": 1 << 19, "cuda": 1 << 23}
"""Weights that are widened at once: scratch memory of 16 MB in half precision, whatever the matrix. On a CPU they stay
in its cache, which makes the output projection of Whisper base several times as fast."""


@kernel
def _finish(total, bias_ptr, residual_ptr, column, row, rows, outputs, GELU: tl.constexpr):
    """Bias, GELU and residual of sums (columns, rows), in fp32; the residual takes the sum."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
    if GELU:
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    if residual_ptr is not None:
        inside = (column[:, None] < outputs) & (row[None, :] < rows)
        at = row[None, :].to(tl.int64) * outputs + column[:, None]
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=inside)
    return total


@kernel
def _linear(
    x_ptr, values_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, outputs, inputs, stride_x,
    GELU: tl.constexpr, WIDEN: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_N outputs by BLOCK_M rows, STEP groups of inputs at a time.

    The weights are the left factor, for they are the many.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    groups = inputs // GROUP
    part = tl.cdiv(tl.cdiv(groups, STEP), SPLITS) * STEP
    end = tl.minimum((split + 1) * part, groups)
    byte = tl.arange(0, BYTES)
    x_row_ptr = x_ptr + row[None, :].to(tl.int64) * stride_x
    total = tl.zeros((STEP, BLOCK_N, BYTES) if BLOCK_M == 1 else (BLOCK_N, BLOCK_M), tl.float32)
    for first in range(split * part, end, STEP):
        if BLOCK_M == 1:
            group = first + tl.arange(0, STEP)
            inside = (group[:, None] < end) & (column[None, :] < outputs)
            place = group[:, None] * outputs + column[None, :]
            values_at = values_ptr + place[:, :, None] * BYTES + byte[None, None, :]
            values = tl.load(values_at, mask=inside[:, :, None], other=0)
            scale = tl.load(scales_ptr + place, mask=inside, other=0.0).to(tl.float32)
            x_at = x_ptr + group[:, None] * GROUP + byte[None, :]
            x = tl.load(x_at, mask=group[:, None] < end, other=0.0).to(tl.float32)
            if BITS == 8:
                product = values.to(tl.float32) * x[:, None, :]
            else:
                high = tl.load(x_at + BYTES, mask=group[:, None] < end, other=0.0).to(tl.float32)
                product = ((values & 15).to(tl.float32) - 8.0) * x[:, None, :]
                product += ((values >> 4).to(tl.float32) - 8.0) * high[:, None, :]
            total += product * scale[:, :, None]
        else:
            for ahead in tl.static_range(STEP):
                group = first + ahead
                place = group * outputs + column
                inside = (column < outputs) & (group < end)
                values = tl.load(values_ptr + place[:, None] * BYTES + byte[None, :], mask=inside[:, None], other=0)
                scale = tl.load(scales_ptr + place, mask=inside, other=0.0).to(tl.float32)
                x_at = x_row_ptr + group * GROUP + byte[:, None]
                x_inside = (row[None, :] < rows) & (group < end)
                x = tl.load(x_at, mask=x_inside, other=0.0)
                if WIDEN:
                    x = x.to(tl.float32)
                if BITS == 8:
                    product = tl.dot(values.to(x.dtype), x, input_precision="ieee")
                else:
                    high = tl.load(x_at + BYTES, mask=x_inside, other=0.0).to(x.dtype)
                    product = tl.dot((values & 15).to(x.dtype) - 8.0, x, input_precision="ieee")
                    product = tl.dot((values >> 4).to(x.dtype) - 8.0, high, product, input_precision="ieee")
                total += product * scale[:, None]
    if BLOCK_M == 1:
        total = tl.sum(tl.sum(total, axis=2), axis=0)[:, None]
    if SPLITS == 1:
        total = _finish(total, bias_ptr, residual_ptr, column, row, rows, outputs, GELU)
    inside = (column[:, None] < outputs) & (row[None, :] < rows)
    at = (split * rows + row[None, :]).to(tl.int64) * outputs + column[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def _add_splits(
    parts_ptr, bias_ptr, residual_ptr, out_ptr, rows, outputs,
    GELU: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the sums (splits, rows, outputs) over parts of the inputs, the first part first."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) + tl.arange(0, 1)
    total = tl.zeros((BLOCK_N, 1), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * rows + row[None, :]) * outputs + column[:, None]
        total += tl.load(parts_ptr + at, mask=column[:, None] < outputs, other=0.0)
    total = _finish(total, bias_ptr, residual_ptr, column, row, rows, outputs, GELU)
    at = row[None, :].to(tl.int64) * outputs + column[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=column[:, None] < outputs)


@kernel
def _dequantize(
    values_ptr, scales_ptr, out_ptr, outputs, all_outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``outputs`` of the ``all_outputs`` of a matrix: in this format its rows are no run of memory."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    byte = tl.arange(0, BYTES)
    inside = column < outputs
    place = group * all_outputs + column
    values = tl.load(values_ptr + place[:, None] * BYTES + byte[None, :], mask=inside[:, None], other=0)
    scale = tl.load(scales_ptr + place, mask=inside, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + column[:, None] * inputs + group * GROUP + byte[None, :]
    if BITS == 8:
        tl.store(out_at, (values.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        low, high = ((values & 15).to(tl.float32) - 8.0) * scale, ((values >> 4).to(tl.float32) - 8.0) * scale
        tl.store(out_at, low.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(out_at + BYTES, high.to(out_ptr.dtype.element_ty), mask=inside[:, None])


_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def quantized_linear_reference(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What `quantized_linear` computes, in fp32 throughout."""
    out = F.linear(x.float(), dequantize(weight), None if bias is None else bias.float())
    out = F.gelu(out) if gelu else out
    return (out if residual is None else residual.copy_(out + residual)).to(dtype or x.dtype)


def quantized_linear(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    method: Method = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """A linear layer, and what comes behind it.

    x: (…, inputs), fp16, bf16 or fp32. bias: (outputs), any float. gelu: whether GELU follows. residual: (…, outputs),
    any float, contiguous: added last, and the sum is written into it. dtype: of the result, x's by default; with a
    residual of the same dtype the result is the residual itself. method: tile (kernels that widen weights as they go),
    scratch (widened weights and PyTorch's product), or the faster one. tile: in place of the one that is chosen, to
    measure it. Returns (…, outputs).
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    over = None if residual is None else residual.view(rows, -1)
    dtype = dtype or x.dtype
    if can_launch(x.device) and rows and (method == "tile" or (method == "auto" and rows <= _MOST_TILE_ROWS)):
        out = launch_or(
            f"quantized_linear in {weight.bits} bits",
            x.device,
            lambda: _launch(_unit_stride(flat), weight, bias, gelu, over, dtype, tile),
            lambda: _by_scratch(flat, weight, bias, gelu, over, dtype),
        )
    else:
        out = _by_scratch(flat, weight, bias, gelu, over, dtype)
    return out.view(*x.shape[:-1], weight.outputs)


def _by_scratch(
    x: Tensor, weight: Quantized, bias: Tensor | None, gelu: bool, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Widen the weights, a slice of the outputs at a time, for PyTorch's own product.

    The scratch memory is the allocator's: layer after layer gets the same block, on each stream its own.
    """
    parts = []
    for chosen in slices(weight.outputs, weight.inputs, SCRATCH[x.device.type]):
        dense = widen(weight.of(chosen), x.dtype)
        parts.append(F.linear(x, dense, None if bias is None else bias[chosen].to(x.dtype)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    out = F.gelu(out) if gelu else out
    return (out if residual is None else residual.add_(out)).to(dtype)


def widen(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """`dequantize` by a kernel where there is one."""
    device = weight.values.device
    return launch_or(
        f"dequantize {weight.bits} bits",
        device,
        lambda: _launch_dequantize(weight, dtype),
        lambda: dequantize(weight, dtype),
    )


@cache
def _gpu(device: torch.device) -> tuple[Target, int]:
    """Whose tiles suit a device, and how many cores it has. What is not known gets the smallest tiles."""
    if device.type == "cpu":  # the interpreter
        return TARGETS["sm_90"], 4
    return target_of(device) or TARGETS["gfx1030"], torch.cuda.get_device_properties(device).multi_processor_count


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    gelu: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None,
) -> Tensor:
    rows, (outputs, inputs) = x.shape[0], (weight.outputs, weight.inputs)
    if tile is None:
        target, cores = _gpu(x.device)
        shape = Shape(weight.bits, weight.group, outputs, inputs)
        tile = tile_for(shape, _NAMES[x.dtype], rows, target, cores)
    if residual is not None and residual.dtype == dtype:
        out = residual
    else:
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    splits = tile.splits
    parts = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    grid = (-(-outputs // tile.outputs), -(-rows // tile.rows), splits)
    constants = _constants(weight.bits, weight.group, tile, gelu, is_interpreted() and x.dtype == torch.bfloat16)
    _linear[grid](
        x,
        weight.values,
        weight.scales,
        bias,
        residual,
        parts,
        rows,
        outputs,
        inputs,
        x.stride(0),
        **constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _add_splits[(-(-outputs // 256), rows)](
            parts, bias, residual, out, rows, outputs, GELU=gelu, SPLITS=splits, BLOCK_N=256
        )
    return out


def _constants(bits: int, group: int, tile: Tile, gelu: bool, widen: bool) -> dict[str, Any]:
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "STEP": tile.inputs // group}
    return {"GELU": gelu, "WIDEN": widen, "SPLITS": tile.splits, **_format(bits, group), **sizes}


def _format(bits: int, group: int) -> dict[str, int]:
    return {"BITS": bits, "GROUP": group, "BYTES": group * bits // 8}


def _launch_dequantize(weight: Quantized, dtype: torch.dtype) -> Tensor:
    outputs, inputs = weight.outputs, weight.inputs
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.values.device)
    _dequantize[(-(-outputs // _WIDENED), inputs // weight.group)](
        weight.values,
        weight.scales,
        out,
        outputs,
        weight.scales.stride(0),
        inputs,
        **_format(weight.bits, weight.group),
        BLOCK_N=_WIDENED,
    )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """Every tile that `tile_for` can choose for the groups in use in fp16, and the other kernels.

    In bf16 and fp32 whole tiles stand for those in parts, which have no bias, GELU and residual to hold.
    """
    cases = []
    for dtype in _NAMES.values():
        pointer = f"*{dtype}"
        skip = "no bf16 arithmetic" if dtype == "bf16" and target.family == "rdna2" else None
        for bits, group in GROUPS.items():
            weights = {"values_ptr": "*i8" if bits == 8 else "*u8", "scales_ptr": "*fp16"}
            # What the matrix is for: the vocabulary, and a projection.
            chosen = {
                tile_for(Shape(bits, group, outputs, 1280), dtype, rows, target, 132): outputs
                for rows in {"fp16": (1, 16, 32, 64), "bf16": (1, 32, 64), "fp32": (1, 16)}[dtype]
                for outputs in ((1280, 51_865) if dtype == "fp16" else (51_865,))
            }
            for tile, outputs in chosen.items():
                cases.append(
                    CompileCase(
                        f"quantized_linear int{bits} {tile.rows}×{tile.outputs}×{tile.inputs}/{tile.splits}",
                        dtype,
                        _linear,
                        weights
                        | {"x_ptr": pointer, "bias_ptr": pointer, "residual_ptr": "*fp32"}
                        | {"out_ptr": pointer if tile.splits == 1 else "*fp32"}
                        | dict.fromkeys(("rows", "outputs", "inputs", "stride_x"), "i32"),
                        _constants(bits, group, tile, True, False),
                        dot=dtype if tile.rows > 1 else None,
                        warps=tile.warps,
                        stages=tile.stages,
                        aligned=(*_POINTERS, "inputs", "stride_x") + (("outputs",) if outputs % 16 == 0 else ()),
                        skip=skip,
                    )
                )
            cases.append(
                CompileCase(
                    f"dequantize int{bits}",
                    dtype,
                    _dequantize,
                    weights | {"out_ptr": pointer, **dict.fromkeys(("outputs", "all_outputs", "inputs"), "i32")},
                    {**_format(bits, group), "BLOCK_N": _WIDENED},
                    aligned=("values_ptr", "scales_ptr", "out_ptr", "inputs"),
                    skip=skip,
                )
            )
    cases.append(
        CompileCase(
            "add splits",
            "fp16",
            _add_splits,
            {"bias_ptr": "*fp16", "out_ptr": "*fp16", "residual_ptr": "*fp32"}
            | {"parts_ptr": "*fp32", "rows": "i32", "outputs": "i32"},
            {"GELU": True, "SPLITS": 8, "BLOCK_N": 256},
        )
    )
    return cases


_POINTERS = ("x_ptr", "values_ptr", "scales_ptr", "bias_ptr", "residual_ptr", "out_ptr")

_WIDENED = 64
"""Outputs of which one program of the widening kernel does a group."""
