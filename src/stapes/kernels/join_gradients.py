"""Gradients of queries, keys and values → that of the one product that they came from, and of its bias.

Kernels of attention put the three out one by one. Side by side they make one product with the weights, not three; the
sum over rows comes from the same pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def join_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Each (rows, width) → (rows, 3 × width), and its sum over rows, (3 × width,) float32."""
    return launch_or(
        "join_gradients",
        query.device,
        lambda: _launch(query, key, value),
        lambda: join_gradients_reference(query, key, value),
    )


def join_gradients_reference(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`join_gradients` in plain PyTorch."""
    joined = torch.cat([query, key, value], 1)
    return joined, joined.sum(0, dtype=torch.float32)


@kernel
def _join_gradients(
    query_ptr, key_ptr, value_ptr, out_ptr, sums_ptr, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """``sums``: (programs, 3 × width)."""
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS  # pyright: ignore[reportAssignmentType]
    part = tl.program_id(1) // blocks
    column = (tl.program_id(1) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < WIDTH
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.minimum(ROUNDS, tl.cdiv(rows - tl.program_id(0) * (ROUNDS * ROWS), ROWS))):
        row = (tl.program_id(0) * ROUNDS + number) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & real[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        x = tl.load(query_ptr + place, mask=inside & (part == 0), other=0.0)
        x += tl.load(key_ptr + place, mask=inside & (part == 1), other=0.0)
        x += tl.load(value_ptr + place, mask=inside & (part == 2), other=0.0)
        own = row.to(tl.int64)[:, None] * (3 * WIDTH) + (part * WIDTH + column)[None, :]
        tl.store(out_ptr + own, x, mask=inside)
        sums += x.to(tl.float32)
    own = tl.program_id(0).to(tl.int64) * (3 * WIDTH) + part * WIDTH + column
    tl.store(sums_ptr + own, tl.sum(sums, 0), mask=real)


def _launch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = query.shape
    out = query.new_empty(rows, 3 * width)
    tile, rounds, warps = _tile(target_of(query.device))
    programs = -(-rows // (tile * rounds))
    sums = torch.empty(programs, 3 * width, dtype=torch.float32, device=query.device)
    _join_gradients[(programs, 3 * -(-width // _COLUMNS))](
        query, key, value, out, sums, rows, WIDTH=width, COLUMNS=_COLUMNS, ROWS=tile, ROUNDS=rounds, num_warps=warps
    )
    return out, sums.sum(0)


_COLUMNS = 256


def _tile(target: Target | None) -> tuple[int, int, int]:
    """Rows of a program at a time, how many times, and warps."""
    return 8, 16, 4 if target is not None and target.wave_size == 64 else 8  # four of 32 spill under Triton 3.8


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: wav2vec 2.0 large."""
    rows, rounds, warps = _tile(target)
    for name in _TRITON.values():
        yield CompileCase(
            "join_gradients",
            name,
            _join_gradients,
            signature=dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "out_ptr"), f"*{name}")
            | {"sums_ptr": "*fp32", "rows": "i32"},
            constants={"WIDTH": 1024, "COLUMNS": _COLUMNS, "ROWS": rows, "ROUNDS": rounds},
            warps=warps,
            skip="no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None,
        )
