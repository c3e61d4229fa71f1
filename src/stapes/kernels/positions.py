"""Around the wide grouped convolution that tells a transformer where its frames stand.

As a product it is plain and fast (750 TFLOP/s in bf16 on an H200), and nothing has to be compiled for a new length.
Several neighbouring positions have nearly all of their window in common: one row of a matrix, a window that serves
``positions`` of them, is multiplied by weights that are shifted by a frame for each. For 8 positions that is 5 % more
arithmetic than there need be. `position_windows` lays the windows out, `add_positions` does what follows the product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of
from stapes.kernels.wave_convolution import gelu

if TYPE_CHECKING:
    import triton.language as tl

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def toeplitz(weight: Tensor, groups: int, positions: int) -> Tensor:
    """A convolution's weight as the factor of `position_windows`.

    weight: (width, width / groups, kernel). Returns (groups, (kernel + positions - 1) × width / groups,
    positions × width / groups): a row for each frame and channel of a window, a column for each position and channel.
    """
    outputs, inputs, kernel_size = weight.shape
    taps = weight.unflatten(0, (groups, outputs // groups)).permute(0, 3, 2, 1)  # (groups, kernel, inputs, outputs)
    out = weight.new_zeros(groups, kernel_size + positions - 1, inputs, positions, outputs // groups)
    for position in range(positions):
        out[:, position : position + kernel_size, :, position] = taps
    return out.flatten(3).flatten(1, 2)


def position_windows(x: Tensor, blocks: Tensor, groups: int, kernel_size: int, positions: int) -> Tensor:
    """The windows of blocks of ``positions`` rows, for a convolution of ``kernel_size`` with padding at both ends.

    x: (rows, width). blocks: (3, blocks), int32: the first row of each, which row of its recording that is, and how
    many rows the recording has; around them are zeros. Returns (groups, blocks, (kernel + positions - 1) × width /
    groups).
    """
    return launch_or(
        "position_windows",
        x.device,
        lambda: _launch_windows(x, blocks, groups, kernel_size, positions),
        lambda: position_windows_reference(x, blocks, groups, kernel_size, positions),
    )


def position_windows_reference(x: Tensor, blocks: Tensor, groups: int, kernel_size: int, positions: int) -> Tensor:
    """`position_windows` in plain PyTorch."""
    first, place, count = blocks.long()[:, :, None]
    steps = torch.arange(kernel_size + positions - 1, device=x.device) - kernel_size // 2
    real = (place + steps >= 0) & (place + steps < count)
    windows = x[(first + steps).clamp(0, len(x) - 1)].masked_fill(~real[:, :, None], 0.0)  # (blocks, frames, width)
    return windows.unflatten(2, (groups, -1)).permute(2, 0, 1, 3).flatten(2)


def add_positions(x: Tensor, product: Tensor, places: Tensor, bias: Tensor) -> None:
    """Add to x (rows, width), in place, the GELU of what the convolution makes of it.

    product: (groups, blocks, positions × width / groups). places: (rows,), int32: where a row's position is: block ×
    positions + position. bias: (width,), float32.
    """
    launch_or(
        "add_positions",
        x.device,
        lambda: _launch_add(x, product, places, bias),
        lambda: add_positions_reference(x, product, places, bias),
    )


def add_positions_reference(x: Tensor, product: Tensor, places: Tensor, bias: Tensor) -> None:
    """`add_positions` in plain PyTorch."""
    groups, width = len(product), x.shape[1]
    by_place = product.reshape(groups, -1, width // groups)[:, places.long()]  # (groups, rows, width / groups)
    x += F.gelu(by_place.transpose(0, 1).flatten(1).float() + bias).to(x.dtype)


@kernel
def _position_windows(
    x_ptr, blocks_ptr, out_ptr, blocks,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    KERNEL: tl.constexpr, FRAMES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Some frames of the window of one block, one group."""
    block, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(blocks_ptr + block) - KERNEL // 2
    place = tl.load(blocks_ptr + blocks + block) - KERNEL // 2
    count = tl.load(blocks_ptr + 2 * blocks + block)
    frame, channel = part * PART + tl.arange(0, PART), tl.arange(0, BLOCK_GROUP)
    real = (place + frame >= 0) & (place + frame < count)
    inside = (frame < FRAMES)[:, None] & (channel < GROUP)[None, :]
    row = (first + frame).to(tl.int64)
    x = tl.load(x_ptr + row[:, None] * WIDTH + group * GROUP + channel[None, :], mask=inside & real[:, None], other=0.0)
    out = out_ptr + (group * blocks + block).to(tl.int64) * (FRAMES * GROUP)
    tl.store(out + frame[:, None] * GROUP + channel[None, :], x, mask=inside)


@kernel
def _add_positions(
    x_ptr, product_ptr, places_ptr, bias_ptr, rows, stride_group,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = channel < WIDTH
    inside = (row < rows)[:, None] & real[None, :]
    place = tl.load(places_ptr + row, mask=row < rows, other=0).to(tl.int64)
    group = (channel // GROUP).to(tl.int64)
    at = place[:, None] * GROUP + (group * stride_group + channel % GROUP)[None, :]
    y = tl.load(product_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = gelu(y + tl.load(bias_ptr + channel, mask=real, other=0.0)[None, :], EXACT)
    own = x_ptr + row.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    x = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    tl.store(own, (x + y).to(x_ptr.dtype.element_ty), mask=inside)


def _launch_windows(x: Tensor, blocks: Tensor, groups: int, kernel_size: int, positions: int) -> Tensor:
    width, count = x.shape[1], blocks.shape[1]
    frames, group = kernel_size + positions - 1, width // groups
    out = x.new_empty(groups, count, frames * group)
    part, warps = _tile(target_of(x.device))
    _position_windows[(count, groups, -(-frames // part))](
        x,
        blocks,
        out,
        count,
        WIDTH=width,
        GROUP=group,
        BLOCK_GROUP=1 << (group - 1).bit_length(),
        KERNEL=kernel_size,
        FRAMES=frames,
        PART=part,
        num_warps=warps,
    )
    return out


def _launch_add(x: Tensor, product: Tensor, places: Tensor, bias: Tensor) -> None:
    rows, width = x.shape
    _add_positions[(-(-rows // _ROWS),)](
        x,
        product,
        places,
        bias,
        rows,
        product.stride(0),
        WIDTH=width,
        GROUP=width // len(product),
        BLOCK=1 << (width - 1).bit_length(),
        ROWS=_ROWS,
        EXACT=x.dtype == torch.float32,
        num_warps=4,
    )


_ROWS = 4


def _tile(target: Target | None) -> tuple[int, int]:
    """Frames of a program, and warps."""
    return 64, 8 if target is not None and target.is_amd and target.wave_size == 32 else 4


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: wav2vec 2.0 base, whose groups have 48 channels, and large."""
    part, warps = _tile(target)
    for name in _TRITON.values():
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        for size, width, group in (("base", 768, 48), ("large", 1024, 64)):
            yield CompileCase(
                f"position_windows {size}",
                name,
                _position_windows,
                signature={"x_ptr": f"*{name}", "blocks_ptr": "*i32", "out_ptr": f"*{name}", "blocks": "i32"},
                constants={
                    "WIDTH": width,
                    "GROUP": group,
                    "BLOCK_GROUP": 64,
                    "KERNEL": 128,
                    "FRAMES": 135,
                    "PART": part,
                },
                warps=warps,
                skip=skip,
            )
            yield CompileCase(
                f"add_positions {size}",
                name,
                _add_positions,
                signature={
                    "x_ptr": f"*{name}",
                    "product_ptr": f"*{name}",
                    "places_ptr": "*i32",
                    "bias_ptr": "*fp32",
                    "rows": "i32",
                    "stride_group": "i32",
                },
                constants={"WIDTH": width, "GROUP": group, "BLOCK": 1024, "ROWS": _ROWS, "EXACT": name == "fp32"},
                skip=skip,
            )
