"""Self-attention within recordings that lie behind each other in one sequence, without padding and without a mask.

Each program answers some neighbouring queries of one recording and reads the keys of that recording only, in the way
of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stapes.kernels.jit import is_interpreted, kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

QUERIES = 128
"""Queries of a recording that lie in one row of the table of `query_blocks`."""

_LOG2E = 1.4426950408889634
_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Tile:
    """``queries`` of a program (a part of `QUERIES`), ``keys`` at once."""

    queries: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"
    """Of products of float32: ``ieee``, or ``tf32x3``, three products of parts that matrix instructions take."""


def query_blocks(starts: NDArray[np.int64], spans: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table of `packed_attention`: (4, blocks).

    Of every recording its first row, its rows, and how many of them, from the first on, are keys; one at least.
    A block's first query, where the recording's queries end, its first key, and how many keys there are. Blocks of
    zeros answer nothing.
    """
    blocks = -(-spans // QUERIES)
    recording = np.repeat(np.arange(len(starts)), blocks)
    number = np.arange(len(recording)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = starts[recording]
    return np.stack([first + number * QUERIES, first + spans[recording], first, keys[recording]])


def packed_attention(qkv: Tensor, blocks: Tensor, heads: int) -> Tensor:
    """qkv: (rows, 3 × width), query, key and value. blocks: see `query_blocks`. Returns (rows, width).

    Rows that are in no block hold nothing.
    """
    tile = _tile(qkv.dtype, qkv.shape[1] // 3 // heads, target_of(qkv.device))
    if tile is None:
        return packed_attention_reference(qkv, blocks, heads)
    return launch_or(
        "packed_attention",
        qkv.device,
        lambda: launch_attention(qkv, blocks, heads, tile),
        lambda: packed_attention_reference(qkv, blocks, heads),
    )


def packed_attention_reference(qkv: Tensor, blocks: Tensor, heads: int) -> Tensor:
    """`packed_attention` in plain PyTorch, recording by recording; rows that are in no block are 0."""
    out = qkv.new_zeros(len(qkv), qkv.shape[1] // 3)
    for end, first, keys in sorted({tuple(block[1:]) for block in blocks.T.tolist() if block[3]}):
        query, key, value = qkv[first:end].unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(query[None], key[None, :, :keys], value[None, :, :keys])
        out[first:end] = attended[0].transpose(0, 1).flatten(1)
    return out


@kernel
def _packed_attention(
    qkv_ptr, out_ptr, blocks_ptr, blocks, scale,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, BLOCK_HEAD: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One head of some queries."""
    head = tl.program_id(0)
    block, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    begin = tl.load(blocks_ptr + block) + part * QUERIES
    end = tl.load(blocks_ptr + blocks + block)
    if begin >= end:
        return
    first = tl.load(blocks_ptr + 2 * blocks + block)
    count = tl.load(blocks_ptr + 3 * blocks + block)
    query, d, n = begin + tl.arange(0, QUERIES), tl.arange(0, BLOCK_HEAD), tl.arange(0, KEYS)
    kind: tl.constexpr = tl.float32 if WIDEN else qkv_ptr.dtype.element_ty  # pyright: ignore[reportAssignmentType]
    asked = (query < end)[:, None] & (d < HEAD)[None, :]
    q = tl.load(qkv_ptr + query.to(tl.int64)[:, None] * (3 * WIDTH) + head * HEAD + d[None, :], mask=asked, other=0.0)
    q = q.to(kind)
    base = qkv_ptr + first.to(tl.int64) * (3 * WIDTH) + WIDTH + head * HEAD
    place = n[:, None] * (3 * WIDTH) + d[None, :]
    known = (d < HEAD)[None, :]
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK_HEAD), tl.float32)
    whole = count // KEYS * KEYS
    for start in range(0, whole, KEYS):
        at = base + start * (3 * WIDTH) + place
        k = tl.load(at, mask=known, other=0.0).to(kind) if BLOCK_HEAD > HEAD else tl.load(at).to(kind)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        higher = tl.maximum(highest, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None]
        v = tl.load(at + WIDTH, mask=known, other=0.0).to(kind) if BLOCK_HEAD > HEAD else tl.load(at + WIDTH).to(kind)
        mixed = tl.dot(weight.to(kind), v, mixed, input_precision=PRECISION)
        highest = higher
    if whole < count:
        inside = whole + n < count
        at = base + whole * (3 * WIDTH) + place
        k = tl.load(at, mask=known & inside[:, None], other=0.0).to(kind)
        score = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision=PRECISION), float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None]
        v = tl.load(at + WIDTH, mask=known & inside[:, None], other=0.0).to(kind)
        mixed = tl.dot(weight.to(kind), v, mixed, input_precision=PRECISION)
    mixed = mixed / total[:, None]
    out = out_ptr + query.to(tl.int64)[:, None] * WIDTH + head * HEAD + d[None, :]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=asked)


def launch_attention(qkv: Tensor, blocks: Tensor, heads: int, tile: Tile) -> Tensor:
    """`packed_attention` with a tile of one's own."""
    rows, width = len(qkv), qkv.shape[1] // 3
    head, count = width // heads, blocks.shape[1]
    out = qkv.new_empty(rows, width)
    parts = QUERIES // tile.queries
    # The heads of a block come one after the other: their keys lie side by side.
    _packed_attention[(heads, count * parts)](
        qkv,
        out,
        blocks,
        count,
        _LOG2E / head**0.5,
        WIDTH=width,
        HEAD=head,
        BLOCK_HEAD=max(16, 1 << (head - 1).bit_length()),
        PARTS=parts,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        PRECISION=tile.precision,
        WIDEN=is_interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _tile(dtype: torch.dtype, head: int, target: Target | None) -> Tile | None:
    """AMD's follow from what the compiler says: the most queries that do not spill. None: whatever is tried spills."""
    family = "cuda" if target is None else target.family
    wide = head > 64
    if family == "cdna":
        return Tile(32, 32, 4, 1) if dtype == torch.float32 else Tile(128, 64, 4, 1)
    if dtype == torch.float32 and wide:
        return None
    if family == "cuda" and dtype == torch.float32:
        return Tile(64, 32, 4, 1, "tf32x3")
    if dtype == torch.float32 or family == "rdna2":  # multiplied without matrix instructions, out of registers
        return Tile(16, 16, 8 if wide else 4, 1)
    if family == "rdna3" and wide:
        return Tile(64, 16, 8, 1)
    if family == "cuda":
        return Tile(128, 64, 8, 3) if wide else Tile(64, 64, 4, 3)
    return Tile(64, 32, 8 if wide else 4, 1)


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: wav2vec 2.0 large, and MMS, whose heads are no power of two."""
    for dtype, name in _TRITON.items():
        for width, head in ((1024, 64), (1280, 80)):
            found = _tile(dtype, head, target)
            tile = found or Tile(16, 16, 4, 1)
            skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
            yield CompileCase(
                f"packed_attention {head}",
                name,
                _packed_attention,
                signature={
                    "qkv_ptr": f"*{name}",
                    "out_ptr": f"*{name}",
                    "blocks_ptr": "*i32",
                    "blocks": "i32",
                    "scale": "fp32",
                },
                constants={
                    "WIDTH": width,
                    "HEAD": head,
                    "BLOCK_HEAD": 64 if head == 64 else 128,
                    "PARTS": QUERIES // tile.queries,
                    "QUERIES": tile.queries,
                    "KEYS": tile.keys,
                    "PRECISION": tile.precision,
                    "WIDEN": False,
                },
                dot="tf32" if tile.precision == "tf32x3" else name,
                warps=tile.warps,
                stages=tile.stages,
                skip=skip if found else "it spills registers",
            )
