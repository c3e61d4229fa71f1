"""Put keys and values of the encoder's states where the decoder reads them, in 8 bits if wanted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _store_memory(
    kv_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    row_ptr,
    stride_row,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    head, window, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + window).to(tl.int64)
    d, n = tl.arange(0, HEAD), tl.arange(0, BLOCK)
    source = kv_ptr + window.to(tl.int64) * (KEYS * 2 * HEADS * HEAD) + (part * HEADS + head) * HEAD
    target = row * stride_row + head * (KEYS * HEAD)
    factor = tl.full((HEAD,), 1.0, tl.float32)
    if QUANTIZED:
        largest = tl.zeros((BLOCK, HEAD), tl.float32)
        for start in range(0, KEYS, BLOCK):
            key = (start + n)[:, None]
            x = tl.load(source + key * (2 * HEADS * HEAD) + d[None, :], mask=key < KEYS, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        unit = tl.maximum(tl.max(largest, 0), 1e-6) / 127.0
        scale = (row * HEADS + head) * HEAD + d
        if part == 0:
            tl.store(k_scale_ptr + scale, unit)
        else:
            tl.store(v_scale_ptr + scale, unit)
        factor = 1.0 / unit
    for start in range(0, KEYS, BLOCK):
        key = (start + n)[:, None]
        x = tl.load(source + key * (2 * HEADS * HEAD) + d[None, :], mask=key < KEYS, other=0.0)
        if QUANTIZED:
            # Rounded half up: Triton has no portable rounding to even, and halves are rare.
            x = tl.floor(x.to(tl.float32) * factor[None, :] + 0.5).to(tl.int8)
        place = target + key * HEAD + d[None, :]
        if part == 0:
            tl.store(k_ptr + place, x, mask=key < KEYS)
        else:
            tl.store(v_ptr + place, x, mask=key < KEYS)


def store_memory(
    projected: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, rows: Tensor
) -> None:
    """Put projected keys and values (windows, states, 2 × width) of one layer into the cache's ``rows`` (windows,).

    With ``scales`` each channel of each head is rounded to 8 bits of its own largest value.
    """
    launch_or(
        "store_memory",
        projected.device,
        lambda: _launch_store(projected, keys, values, scales, rows),
        lambda: store_memory_reference(projected, keys, values, scales, rows),
    )


def store_memory_reference(
    projected: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, rows: Tensor
) -> None:
    """`store_memory` in plain PyTorch."""
    at = rows.long()
    parts = projected.unflatten(-1, (2, keys.shape[1], -1)).permute(2, 0, 3, 1, 4)
    for i, cache in enumerate((keys, values)):
        if scales is None:
            cache[at] = parts[i]
        else:
            unit = parts[i].float().abs().amax(dim=2).clamp_min(1e-6) / 127.0
            scales[i][at] = unit
            cache[at] = (parts[i].float() * (1.0 / unit)[:, :, None] + 0.5).floor().to(torch.int8)


def _launch_store(
    projected: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, rows: Tensor
) -> None:
    _, heads, states, head = keys.shape
    _store_memory[(heads, len(projected), 2)](
        projected,
        keys,
        values,
        scales[0] if scales else projected,
        scales[1] if scales else projected,
        rows,
        keys.stride(0),
        KEYS=states,
        HEADS=heads,
        HEAD=head,
        BLOCK=64,
        QUANTIZED=scales is not None,
        num_warps=4,
        num_stages=2,
    )


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the types and sizes of Whisper large-v3."""
    sizes = {"KEYS": 1500, "HEADS": 20, "HEAD": 64}
    for name in ("fp16", "bf16"):
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        for quantized in (False, True):
            yield CompileCase(
                f"store_memory{' int8' if quantized else ''}",
                name,
                _store_memory,
                signature={
                    "kv_ptr": f"*{name}",
                    "k_ptr": "*i8" if quantized else f"*{name}",
                    "v_ptr": "*i8" if quantized else f"*{name}",
                    "k_scale_ptr": "*fp32",
                    "v_scale_ptr": "*fp32",
                    "row_ptr": "*i32",
                    "stride_row": "i32",
                },
                constants=sizes | {"BLOCK": 64, "QUANTIZED": quantized},
                skip=skip,
            )
