"""Dropout whose mask is never kept: it follows from a seed, a row and a column, forwards and backwards alike.

PyTorch's own writes a byte for every number, which the backward pass reads. Philox, by which Triton draws, takes some
60 operations a number, several times as long as the memory that a fused kernel waits for; two rounds of an integer
hash (lowbias32 of Ellis 2018, https://github.com/skeeto/hash-prospector) take eight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stapes.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl


class Dropout(NamedTuple):
    """A number is zero with ``probability``, and else divided by what is left of 1."""

    probability: float
    seed: Tensor
    """int64 (1,), on the device: see `draw`."""

    @property
    def threshold(self) -> int:
        """Hashes below it drop, of 2³²."""
        return round(self.probability * 2**32)

    @property
    def scale(self) -> float:
        """Of what is kept."""
        return 1 / (1 - self.probability)


def draw(probability: float, device: torch.device) -> Dropout | None:
    """A dropout with a seed from the device's generator, which nothing waits for. None where nothing is dropped."""
    if not probability:
        return None
    return Dropout(probability, torch.randint(-(2**62), 2**62, (1,), device=device))


def keep_reference(dropout: Dropout, rows: int, columns: int) -> Tensor:
    """What a matrix is multiplied by, (rows, columns) float32, by PyTorch's own operations."""
    seed = dropout.seed
    row = torch.arange(rows, device=seed.device)
    of_row = _mix(_mix(row ^ (seed & _MASK)) + ((seed >> 32) & _MASK))
    of_column = (torch.arange(columns, device=seed.device) * 0x9E3779B1) & _MASK
    kept = _mix(of_row[:, None] ^ of_column[None, :]) >= dropout.threshold
    return kept.float() * dropout.scale


_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


@kernel
def mix(x):
    """lowbias32 of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@kernel
def keep(seed_ptr, row, column, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """What to multiply numbers by: row (rows,), column (columns,), int32 → (rows, columns) float32."""
    seed = tl.load(seed_ptr)
    of_row = mix(row.to(tl.uint32) ^ seed.to(tl.uint32))
    of_row = mix(of_row + (seed >> 32).to(tl.uint32))
    of_column = column.to(tl.uint32) * 0x9E3779B1
    number = mix(of_row[:, None] ^ of_column[None, :])
    return tl.where(number >= THRESHOLD, SCALE, 0.0)
