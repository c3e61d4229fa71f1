"""Quantised linear layers on a GPU: each way to compute them, and each tile, beside PyTorch on whole weights.

    python -m stapes.benchmarks.quantized_linear [--sweep] [--rows 1 16 64] [--width 1280]

Weights are read from memory, not from a cache: every call takes others, of more than any cache holds. GB/s are those of
the quantised weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.devices.backend import resolve
from stapes.errors import DeviceError
from stapes.kernels.jit import refusals
from stapes.kernels.quantization import Quantized, quantize_int4, quantize_int8
from stapes.kernels.quantized_linear import quantized_linear, quantized_linear_reference
from stapes.kernels.quantized_tiles import Tile

_COLD_BYTES = 256 << 20
_ROWS = (1, 4, 16, 64, 256, 1500, 12_000)


def main() -> None:
    """Print a table, and with ``--sweep`` the fastest tiles for few rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--rows", type=int, nargs="*", default=_ROWS)
    parser.add_argument("--sweep", action="store_true", help="try other tiles for up to 64 rows")
    arguments = parser.parse_args()
    device = resolve("cuda").torch
    if device.type != "cuda":
        raise DeviceError("kernels are timed on a GPU, and PyTorch sees none here")
    width = arguments.width
    say = print
    say("rows × inputs → outputs, bits: µs by tile (GB/s) | by scratch | fp16 weights | error of the tile")
    shapes = [(width, width), (width, 3 * width), (width, 4 * width), (4 * width, width), (width, 51_866)]
    with torch.inference_mode():
        for (inputs, outputs), bits, rows in product(shapes, (8, 4), arguments.rows):
            if outputs > 50_000 and rows > 64:
                continue
            for line in _measure(rows, inputs, outputs, bits, arguments.sweep and rows <= 64, device):
                say(line)


def _measure(rows: int, inputs: int, outputs: int, bits: int, sweep: bool, device: torch.device) -> Iterator[str]:
    dense = torch.randn(outputs, inputs, device=device, dtype=torch.float16) * 0.02
    one = quantize_int8(dense) if bits == 8 else quantize_int4(dense)
    size = one.values.nbytes + one.scales.nbytes
    x = torch.randn(rows, inputs, device=device, dtype=torch.float16)
    copies = [Quantized(one.values.clone(), one.scales.clone()) for _ in range(_copies(size))]
    whole = [dense.clone() for _ in range(_copies(dense.nbytes))]
    tiled = _time([lambda w=w: quantized_linear(x, w, method="tile") for w in copies])
    scratch = _time([lambda w=w: quantized_linear(x, w, method="scratch") for w in copies])
    plain = _time([lambda w=w: F.linear(x, w) for w in whole])
    wanted = quantized_linear_reference(x, one)
    error = (quantized_linear(x, one, method="tile").float() - wanted.float()).abs().max() / wanted.abs().max()
    yield (
        f"{rows:6} × {inputs:5} → {outputs:5}, {bits}: {tiled:8.1f} ({size / tiled / 1e3:5.0f}) | {scratch:8.1f} | "
        f"{plain:8.1f} | {error:.1e}"
    )
    if sweep:
        found = sorted(
            (_time([lambda w=w, t=t: quantized_linear(x, w, method="tile", tile=t) for w in copies]), str(t))
            for t in _tiles(rows, one.group)
        )
        for time, tile in found[:3]:
            yield f"           {time:8.1f} {tile}"


def _tiles(rows: int, group: int) -> Iterator[Tile]:
    block = 1 if rows == 1 else min(64, max(16, 1 << (rows - 1).bit_length()))
    if block == 1:
        for out, step, warps, splits in product((4, 8, 16), (2, 4, 8), (2, 4), (1, 2)):
            yield Tile(1, out, step * group, warps, 2, splits)
    else:
        for out, step, warps, splits in product((32, 64, 128), (1, 2), (4, 8), (1, 2, 4)):
            yield Tile(block, out, step * group, warps, 4, splits)


def _copies(size: int) -> int:
    return max(2, -(-_COLD_BYTES // size))


def _time(calls: list[Callable[[], Tensor]]) -> float:
    """Microseconds of a call: the least of five runs of a graph of all of them. Infinite where one cannot run."""
    try:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        if refusals:  # else the other way would be timed
            refusals.clear()
            return float("inf")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / len(calls))
    except RuntimeError:
        return float("inf")
    return min(times)


if __name__ == "__main__":
    main()
