"""Attention of a decoder that writes one token at a time: over the encoder's states, and over what was written.

Both read each key and value once, at the speed of the memory. Windows name their rows in the caches by index, so that
joining, leaving and reordering a batch copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import counting, is_interpreted, kernel, launch_or
from stapes.kernels.overlap import follow, overlap
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

_LOG2E = 1.4426950408889634
_QUERIES = 16
"""Queries of a window that one program answers: the least that a matrix instruction takes."""

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}


@counting("queries")
def _cross_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    partial_ptr,
    first_ptr,
    count_ptr,
    row_ptr,
    queries,
    scale,
    stride_row,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    head, window = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    split, block = tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + window)
    if block * QUERIES >= count:
        return
    row = tl.load(row_ptr + window).to(tl.int64)
    g, d, n = tl.arange(0, QUERIES), tl.arange(0, HEAD), tl.arange(0, BLOCK)
    query = tl.load(first_ptr + window) + block * QUERIES + g
    asked = block * QUERIES + g < count
    q = tl.load(q_ptr + query[:, None] * (HEADS * HEAD) + head * HEAD + d[None, :], mask=asked[:, None], other=0.0)
    q = q.to(tl.float32) * scale
    unit = tl.full((QUERIES,), 1.0, tl.float32)
    kind: tl.constexpr = tl.float32 if WIDEN else out_ptr.dtype.element_ty  # pyright: ignore[reportAssignmentType]
    v_kind: tl.constexpr = (  # pyright: ignore[reportAssignmentType]
        tl.float16 if QUANTIZED and kind != tl.float32 else kind
    )
    high = q.to(kind)
    low = high
    if QUANTIZED:
        # A key is its integers times the scales of its channels: the scales go to the query, once. The query becomes
        # integers of 15 bits, in two digits, so that products with keys are exact and no key has to be converted.
        q *= tl.load(k_scale_ptr + (row * HEADS + head) * HEAD + d)[None, :]
        unit = tl.max(tl.abs(q), 1) / 16256.0 + 1e-30
        whole = tl.floor(q / unit[:, None] + 0.5).to(tl.int32)
        high = ((whole + 64) >> 7).to(tl.int8)
        low = (whole - (((whole + 64) >> 7) << 7)).to(tl.int8)
    base = row * stride_row + head * (KEYS * HEAD)
    highest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, HEAD), tl.float32)
    # Whole blocks for each split, the last one shorter.
    chunk = (KEYS + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    begin = split * chunk
    end = tl.minimum(begin + chunk, KEYS)
    for start in range(begin, end, BLOCK):
        key = start + n
        inside = key < end
        place = base + key[:, None] * HEAD + d[None, :]
        k = tl.load(k_ptr + place, mask=inside[:, None], other=0)
        v = tl.load(v_ptr + place, mask=inside[:, None], other=0)
        if QUANTIZED:
            score = tl.dot(high, tl.trans(k)).to(tl.float32) * 128.0 + tl.dot(low, tl.trans(k)).to(tl.float32)
            score *= unit[:, None]
            if v_kind == tl.float16:
                # The bits of 1024 + 128 + an 8-bit integer, made without the slow unit that converts.
                v = ((v.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        else:
            score = tl.dot(high, tl.trans(k.to(kind)), input_precision="ieee")
        v = v.to(v_kind)
        score = tl.where(inside[None, :], score, -1e30)
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(v_kind), v, input_precision="ieee")
        highest = higher
    if QUANTIZED:
        mixed *= tl.load(v_scale_ptr + (row * HEADS + head) * HEAD + d)[None, :]
    if SPLITS == 1:
        mixed /= total[:, None]
        place = query[:, None] * (HEADS * HEAD) + head * HEAD + d[None, :]
        tl.store(out_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=asked[:, None])
    else:
        # (split, query, head) → HEAD numbers, the highest score and the sum of weights.
        place = ((split * queries + query) * HEADS + head) * (HEAD + 2)
        tl.store(partial_ptr + place[:, None] + d[None, :], mixed, mask=asked[:, None])
        tl.store(partial_ptr + place + HEAD, highest, mask=asked)
        tl.store(partial_ptr + place + HEAD + 1, total, mask=asked)


@counting("queries")
def _combine_splits(
    partial_ptr,
    out_ptr,
    live_ptr,
    queries,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join what the splits of a query found, in their order."""
    follow(OVERLAP)
    query, head = tl.program_id(0), tl.program_id(1)
    if tl.load(live_ptr + query) == 0:
        return
    d = tl.arange(0, HEAD)
    highest = -1e30
    total = 0.0
    mixed = tl.zeros((HEAD,), tl.float32)
    for split in range(SPLITS):
        place = partial_ptr + ((split * queries + query) * HEADS + head) * (HEAD + 2)
        score = tl.load(place + HEAD)
        higher = tl.maximum(highest, score)
        old, new = tl.exp2(highest - higher), tl.exp2(score - higher)
        total = total * old + tl.load(place + HEAD + 1) * new
        mixed = mixed * old + tl.load(place + d) * new
        highest = higher
    tl.store(out_ptr + (query * HEADS + head) * HEAD + d, (mixed / total).to(out_ptr.dtype.element_ty))


@kernel
def _self_attention(
    qkv_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cell_ptr,
    source_ptr,
    position_ptr,
    live_ptr,
    scale,
    CONTEXT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    if tl.load(live_ptr + row) == 0:
        return
    d, n = tl.arange(0, HEAD), tl.arange(0, BLOCK)
    qkv = qkv_ptr + row * (3 * HEADS * HEAD) + head * HEAD + d
    q = tl.load(qkv).to(tl.float32) * scale
    k = tl.load(qkv + HEADS * HEAD)
    v = tl.load(qkv + 2 * HEADS * HEAD)
    position = tl.load(position_ptr + row)
    cell = tl.load(cell_ptr + row).to(tl.int64)
    place = ((cell * HEADS + head) * CONTEXT + position) * HEAD + d
    tl.store(k_ptr + place, k)
    tl.store(v_ptr + place, v)
    # The token itself first: it is always there to be looked at.
    highest = tl.sum(q * k.to(tl.float32), 0)
    total = 1.0
    mixed = v.to(tl.float32)
    for start in range(0, position, BLOCK):
        back = start + n
        inside = back < position
        source = tl.load(source_ptr + row * CONTEXT + back, mask=inside, other=0).to(tl.int64)
        places = ((source * HEADS + head) * CONTEXT + back)[:, None] * HEAD + d[None, :]
        keys = tl.load(k_ptr + places, mask=inside[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_ptr + places, mask=inside[:, None], other=0.0).to(tl.float32)
        score = tl.where(inside, tl.sum(q[None, :] * keys, 1), -1e30)
        higher = tl.maximum(highest, tl.max(score, 0))
        weight = tl.exp2(score - higher)
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 0)
        mixed = mixed * fade + tl.sum(weight[:, None] * values, 0)
        highest = higher
    tl.store(out_ptr + (row * HEADS + head) * HEAD + d, (mixed / total).to(out_ptr.dtype.element_ty))


def cross_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    first: Tensor,
    count: Tensor,
    rows: Tensor,
    live: Tensor,
    most: int,
    splits: int = 1,
) -> Tensor:
    """Attend over the encoder's states of each window.

    query (queries, width). keys, values: (cache rows, heads, states, head width), int8 with ``scales``, two of (cache
    rows, heads, head width), float32. Window i asks for queries ``first[i]`` … ``first[i] + count[i]`` (0 of them:
    nothing is read) and finds its states in cache row ``rows[i]``; all (windows,), int32. live (queries,): whether a
    query belongs to any window. most: no window has more queries. splits: programs that share the states of one
    window and head. Returns (queries, width); what stands in rows of no window means nothing.
    """
    return launch_or(
        "cross_attention",
        query.device,
        lambda: _launch_cross(query, keys, values, scales, first, count, rows, live, most, splits),
        lambda: cross_attention_reference(query, keys, values, scales, first, count, rows),
    )


def cross_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    first: Tensor,
    count: Tensor,
    rows: Tensor,
) -> Tensor:
    """`cross_attention` in plain PyTorch."""
    heads = keys.shape[1]
    out = torch.zeros_like(query)
    # Which window each query belongs to.
    window = torch.searchsorted(first.long(), torch.arange(len(query), device=query.device), right=True) - 1
    ends = (first + count)[window]
    row = rows[window].long()
    k, v = keys[row], values[row]
    if scales is not None:
        k = (k.float() * scales[0][row][:, :, None]).to(query.dtype)
        v = (v.float() * scales[1][row][:, :, None]).to(query.dtype)
    found = F.scaled_dot_product_attention(query.unflatten(-1, (heads, 1, -1)), k, v).flatten(1)
    return torch.where((torch.arange(len(query), device=query.device) < ends)[:, None], found, out)


def _launch_cross(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    first: Tensor,
    count: Tensor,
    rows: Tensor,
    live: Tensor,
    most: int,
    splits: int,
) -> Tensor:
    _, heads, states, head = keys.shape
    out = torch.empty_like(query)
    blocks = -(-most // _QUERIES)
    partial = query.new_empty((splits, len(query), heads, head + 2) if splits > 1 else (1,), dtype=torch.float32)
    block, warps, stages = _cross_tile(query.dtype, scales is not None, target_of(query.device))
    _cross_attention[(len(first) * heads, splits, blocks)](
        query,
        keys,
        values,
        scales[0] if scales else query,
        scales[1] if scales else query,
        out,
        partial,
        first,
        count,
        rows,
        len(query),
        _LOG2E / head**0.5,
        keys.stride(0),
        KEYS=states,
        HEADS=heads,
        HEAD=head,
        QUERIES=_QUERIES,
        BLOCK=block,
        SPLITS=splits,
        QUANTIZED=scales is not None,
        WIDEN=is_interpreted(),
        num_warps=warps,
        num_stages=stages,
        **overlap(query.device),
    )
    if splits > 1:
        _combine_splits[(len(query), heads)](
            partial, out, live, len(query), HEADS=heads, HEAD=head, SPLITS=splits, num_warps=2, **overlap(query.device)
        )
    return out


def self_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, cells: Tensor, source: Tensor, positions: Tensor, live: Tensor
) -> Tensor:
    """Write each row's new key and value into the cache, and attend over all that the row has written.

    qkv (rows, 3 × width): query, key and value of the new token. keys, values: (cells, heads, context, head width).
    cells (rows,), int32: the cell each row writes to. source (rows, context), int32: the cell in which the row finds
    each earlier position: its own, or that of the beam it continues. positions (rows,), int64: where the new token
    stands. live (rows,): of rows that are 0 nothing is kept or read. Returns (rows, width).
    """
    return launch_or(
        "self_attention",
        qkv.device,
        lambda: _launch_self(qkv, keys, values, cells, source, positions, live),
        lambda: self_attention_reference(qkv, keys, values, cells, source, positions, live),
    )


def self_attention_reference(
    qkv: Tensor, keys: Tensor, values: Tensor, cells: Tensor, source: Tensor, positions: Tensor, live: Tensor
) -> Tensor:
    """`self_attention` in plain PyTorch."""
    heads, context = keys.shape[1:3]
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    on = live.bool()
    # Rows that are not live may name a cell that others use: they put back what is there.
    at = cells.long(), slice(None), positions
    keys[at] = torch.where(on[:, None, None], key, keys[at])
    values[at] = torch.where(on[:, None, None], value, values[at])
    span = int(positions.max()) + 1
    place = torch.arange(span, device=qkv.device)
    found = source[:, :span].long().scatter(1, positions[:, None], cells.long()[:, None])
    k = keys[found, :, place[None, :]].transpose(1, 2)
    v = values[found, :, place[None, :]].transpose(1, 2)
    mask = (place <= positions[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(query[:, :, None], k, v, attn_mask=mask).flatten(1)
    assert span <= context
    return torch.where(on[:, None], out, 0.0)


def _launch_self(
    qkv: Tensor, keys: Tensor, values: Tensor, cells: Tensor, source: Tensor, positions: Tensor, live: Tensor
) -> Tensor:
    _, heads, context, head = keys.shape
    out = qkv.new_empty(len(qkv), heads * head)
    _self_attention[(heads, len(qkv))](
        qkv,
        keys,
        values,
        out,
        cells,
        source,
        positions,
        live,
        _LOG2E / head**0.5,
        CONTEXT=context,
        HEADS=heads,
        HEAD=head,
        BLOCK=64,
        num_warps=4,
        num_stages=2,
        **overlap(qkv.device),
    )
    return out


def _cross_tile(dtype: torch.dtype, quantized: bool, target: Target | None) -> tuple[int, int, int]:
    """Keys at once, warps, stages. NVIDIA's are measured on an H200; AMD's follow from what the compiler says."""
    if dtype == torch.float32:
        # RDNA multiplies fp32 without matrix instructions, out of registers.
        return (16, 8, 1) if target is not None and target.family.startswith("rdna") else (32, 4, 1)
    if target is None or not target.is_amd:
        return (128, 2, 3) if quantized else (128, 2, 2)
    if target.family == "cdna":
        # Each lane fetches 32 bytes of the next keys while it works on these, and 16 waves share a compute unit. Twice
        # the keys cost twice the registers and LDS: a quarter of the waves.
        return (64, 2, 2) if quantized else (64, 4, 2)
    if target.family == "rdna4":
        return 64, 4, 2
    # 64 keys spill: RDNA 3 holds each factor of a product twice, RDNA 2 multiplies without matrix instructions.
    return 32, 4, 2 if target.family == "rdna3" else 1


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the types and sizes that Whisper large-v3 launches."""
    sizes = {"KEYS": 1500, "HEADS": 20, "HEAD": 64}
    overlaps = {"OVERLAP": target.name == "sm_90"}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        name = _TRITON[dtype]
        skip = "no bf16 arithmetic" if target.family == "rdna2" and dtype == torch.bfloat16 else None
        for quantized in (False, True):
            block, warps, stages = _cross_tile(dtype, quantized, target)
            for splits in (1, 8):
                yield CompileCase(
                    f"cross_attention{' int8 cache' if quantized else ''}{' split' if splits > 1 else ''}",
                    name,
                    _cross_attention,
                    signature={
                        "q_ptr": f"*{name}",
                        "k_ptr": "*i8" if quantized else f"*{name}",
                        "v_ptr": "*i8" if quantized else f"*{name}",
                        "k_scale_ptr": "*fp32",
                        "v_scale_ptr": "*fp32",
                        "out_ptr": f"*{name}",
                        "partial_ptr": "*fp32",
                        "first_ptr": "*i32",
                        "count_ptr": "*i32",
                        "row_ptr": "*i32",
                        "queries": "i32",
                        "scale": "fp32",
                        "stride_row": "i32",
                    },
                    constants=sizes
                    | {"QUERIES": _QUERIES, "BLOCK": block, "SPLITS": splits, "QUANTIZED": quantized, "WIDEN": False}
                    | overlaps,
                    dot="int8" if quantized else name,
                    warps=warps,
                    stages=stages,
                    skip=skip,
                )
        yield CompileCase(
            "combine_splits",
            name,
            _combine_splits,
            signature={"partial_ptr": "*fp32", "out_ptr": f"*{name}", "live_ptr": "*i32", "queries": "i32"},
            constants={"HEADS": 20, "HEAD": 64, "SPLITS": 8} | overlaps,
            warps=2,
            skip=skip,
        )
        yield CompileCase(
            "self_attention",
            name,
            _self_attention,
            signature={
                "qkv_ptr": f"*{name}",
                "k_ptr": f"*{name}",
                "v_ptr": f"*{name}",
                "out_ptr": f"*{name}",
                "cell_ptr": "*i32",
                "source_ptr": "*i32",
                "position_ptr": "*i64",
                "live_ptr": "*i32",
                "scale": "fp32",
            },
            constants={"CONTEXT": 448, "HEADS": 20, "HEAD": 64, "BLOCK": 64} | overlaps,
            warps=4,
            skip=skip,
        )
