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
        wide = outputs >= 32 * cores
        return Tile(1, 16 if wide else 8, 256 if bits == 8 else max(128, 2 * group), 4, 2)
    if dtype not in target.matrix:  # registers hold sums and factors alike, and idle rows are computed for nothing
        tile = Tile(min(bucket, 32), 32, 32 if bits == 8 else group, 4, 2)
    elif bits == 8:
        # What lies in shared memory stays below the 64 KB of an older GPU.
        outputs_of, inputs_of = (64, 64) if bucket == 64 else (32, 64 if small else 128)
        tile = Tile(bucket, outputs_of, inputs_of, 4, 2 if target.is_amd else 4)
    else:
        # Sums of a group and of all groups fill the registers of four warps.
        warps = 8 if bucket == 64 else 4
        tile = Tile(bucket, 64, group if small else max(64, group), warps, 2 if target.is_amd else 4)
    # Parts of the inputs where the tiles alone are too few, each of a few steps at least.
    tiles, steps = -(-outputs // tile.outputs) * -(-rows // tile.rows), -(-inputs // tile.inputs)
    splits = 1
    while splits < 8 and 2 * splits * tiles <= 2 * cores and 4 * splits <= steps:
        splits *= 2
    return Tile(tile.rows, tile.outputs, tile.inputs, tile.warps, tile.stages, splits)
