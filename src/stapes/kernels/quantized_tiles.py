"""How the kernels of ``quantized_linear`` cut their work, on each family of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stapes.kernels.targets import Target


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts the work: rows, outputs and inputs of a tile, warps, stages, and parts of the inputs."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4
    splits: int = 1


class Shape(NamedTuple):
    """Of a quantised matrix."""

    bits: int
    group: int
    outputs: int
    inputs: int


def tile_for(weight: Shape, dtype: str, rows: int, target: Target, cores: int) -> Tile:
    """The tile for ``rows`` in a dtype ("fp16") on a GPU with so many cores (multiprocessors, compute units).

    It depends on the rows only by their bucket: 1, 16, 32, 64 or more.
    """
    bits, group, outputs, inputs = weight
    small = target.family in ("rdna2", "rdna3", "rdna4")
    bucket = 1 if rows == 1 else min(64, max(16, 1 << (rows - 1).bit_length()))
    if bucket == 1:
        # One row is no matrix product. As many outputs as keep every core busy, without parts of the inputs.
        # A thread reads 16 bytes at a time.
        block = 16 if outputs >= 32 * cores else 8
        return Tile(1, block, 4 * group, 4, 2) if bits == 8 else Tile(1, block, 8 * group, block // 4, 2)
    stages = 2 if target.is_amd else 4
    if dtype not in target.matrix:  # registers hold sums and factors alike, and idle rows are computed for nothing
        tile = Tile(16, 32, group, 4, 2)
    elif bucket == 64:
        # Sums of a group and of all groups fill the registers of four warps.
        tile = Tile(64, 64, group if small else 64, 8, stages)
    else:
        tile = Tile(bucket, 32 if bits == 8 else 64, group if small else 2 * group, 4, stages)
    # Parts of the inputs where the tiles alone are too few, each of a few steps at least.
    tiles, steps = -(-outputs // tile.outputs) * -(-max(rows, bucket) // tile.rows), -(-inputs // tile.inputs)
    splits = 1
    while splits < 8 and 2 * splits * tiles <= 2 * cores and 4 * splits <= steps:
        splits *= 2
    return Tile(tile.rows, tile.outputs, tile.inputs, tile.warps, tile.stages, splits)
