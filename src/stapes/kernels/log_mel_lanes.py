"""The kernels of `log_mel` for NVIDIA's GPUs: one warp computes all filters of 16 or 32 frames.

What a lane loads is already what it multiplies, so there is no shared memory, no barrier and no wait but for memory
itself. Which filters a piece of the spectrum meets is known to the compiler, and so is where a block of filters ends:
its sums are written there, and few registers hold sums at a time.

The instruction that multiplies 16 × 16 by 16 × 8 wants from lane 4 g + t the rows g and g + 8 and of the columns 2 t,
2 t + 1, 2 t + 8 and 2 t + 9. Which frequency is which column is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl

PIECE = 16
"""Frequencies, filters and frames of one product of matrices."""


def by_lanes(high: Tensor, low: Tensor, *, pairs: bool) -> Tensor:
    """(frequencies, filters) halves → (piece, block, half, 32 lanes, 8), as the lanes of a warp multiply them.

    Frequency 8 c + 2 t + p of a piece, or without ``pairs`` 8 c + 4 p + t, and filter 8 n + g of a block lie in lane
    4 g + t, at 4 n + 2 c + p.
    """
    laid = torch.stack([high, low]).view(2, -1, 2, *((4, 2) if pairs else (2, 4)), high.shape[1] // PIECE, 2, 8)
    t, p = (3, 4) if pairs else (4, 3)
    return laid.permute(1, 5, 0, 7, t, 6, 2, p).contiguous()


def parts_used(filters: Tensor) -> tuple[int, int]:
    """(frequencies, filters), padded to pieces → which blocks of filters meet which pieces, and where each ends.

    Of both numbers, bit piece × blocks + block.
    """
    blocks = filters.shape[1] // PIECE
    used, ends = 0, dict.fromkeys(range(blocks), 0)
    for piece, rows in enumerate(filters.split(PIECE)):
        for block, part in enumerate(rows.split(PIECE, dim=1)):
            if part.any():
                used |= 1 << (piece * blocks + block)
                ends[block] = piece
    return used, sum(1 << (piece * blocks + block) for block, piece in ends.items())


@kernel
def normalised(mel):
    """(log10 + 4) / 4 of at least 1e-10.

    The logarithm is a polynomial on √½ … √2, off by 2.4e-6 at most before it is scaled by 0.075: the libraries' is
    exact to the last bit and takes twice as many instructions, more than all the rest of this kernel.
    """
    bits = tl.maximum(mel, 1e-10).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # of two; the bits of √½ are taken off
    y = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    log = y * -0.20557973 + 0.32204625
    log = log * y - 0.36765245
    log = log * y + 0.47934067
    log = log * y - 0.721125
    log = log * y + 1.4427147
    return (log * y + exponent.to(tl.float32)) * (0.30102999566398120 / 4) + 1.0


@kernel
def log_mel_lanes(
    spectrum_ptr, filters_ptr, out_ptr, least_ptr, greatest_ptr, frames, bins, stride_window, stride_frame,
    FREQUENCIES: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, USED: tl.constexpr, ENDS: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """All filters of 16 frames by one warp, final but for the floor; rows may begin anywhere.

    Columns 2 t, 2 t + 1, … are the frequencies t, t + 4, t + 8 and t + 12: each load of a warp is of 8 rows by 4
    neighbours.

    Args:
        AHEAD: pieces that are loaded ahead.
        EVEN: of no meaning here.
        WHOLE: the bins fill their blocks.
    """
    tile, window = tl.program_id(0), tl.program_id(1)
    q = tl.arange(0, 64)[:, None]  # (h, c, p, g)
    row = tl.minimum(tile * 16 + q // 32 * 8 + q % 8, frames - 1)
    rows = spectrum_ptr + window.to(tl.int64) * stride_window + row * stride_frame
    offset = q // 8 % 4 * 4 + tl.arange(0, 4)[None, :]
    t = tile * 16 + tl.arange(0, 16)
    out_rows = out_ptr + window.to(tl.int64) * bins * frames + t[:, None]
    extremes = (window * tl.num_programs(0) + tile) * BLOCKS
    sums = ()
    for _ in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        sums = sums + (tl.zeros((16, 16), tl.float32),)  # noqa: RUF005  (Triton unpacks no stars)
    loaded = ()
    for piece in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        loaded = loaded + (_piece(rows, offset, 16 * piece, FREQUENCIES),)  # noqa: RUF005
    for piece in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        pair = loaded[0].reshape(2, 2, 2, 8, 4)  # pyright: ignore[reportGeneralTypeIssues]
        high, low = _power(pair.permute(0, 3, 1, 4, 2).reshape(16, 16))
        loaded = loaded[1:]
        if piece + AHEAD < PIECES:
            loaded = loaded + (_piece(rows, offset, 16 * (piece + AHEAD), FREQUENCIES),)  # noqa: RUF005
        next_sums = ()
        for block in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
            sum = sums[block]
            if (USED >> (piece * BLOCKS + block)) & 1:
                sum = _add_part(high, low, filters_ptr + (piece * BLOCKS + block) * 512, sum, WIDEN)
            if (ENDS >> (piece * BLOCKS + block)) & 1:
                _write(sum, out_rows, t, frames, bins, block, WHOLE, least_ptr + extremes, greatest_ptr + extremes)
            next_sums = next_sums + (sum,)  # noqa: RUF005
        sums = next_sums


@kernel
def log_mel_pairs(
    spectrum_ptr, filters_ptr, out_ptr, least_ptr, greatest_ptr, frames, bins, stride_window, stride_frame,
    FREQUENCIES: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, USED: tl.constexpr, ENDS: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `log_mel_lanes`, of 32 frames in two groups: those whose rows begin at an even number, and the others.

    Rows of 201 complex numbers begin at a multiple of 16 bytes or half way between two, in turn. Frames of the second
    group are read from their frequency 1 on, an even number too, and have filters of their own, laid out from there. So
    a lane loads two complex numbers at once, columns 2 t and 2 t + 1: half as many loads, of 8 rows by 8 neighbours.
    Of a window's frames the first, third, … are of
    one group; which, depends on where the window begins. A lane holds the same bins of both frames of a pair: it
    writes neighbours.

    Args:
        frames: at least 2.
        stride_frame: odd.
        filters_ptr: the layout from frequency 0 on, behind it that from 1 on; frequency 0 has no weight.
        FREQUENCIES: that are read of a frame: one less than it has, an even number.
        AHEAD: pieces of either group that are loaded ahead.
        EVEN: frames are.
    """
    tile, window = tl.program_id(0), tl.program_id(1)
    if EVEN:
        frames = frames // 2 * 2  # this the compiler understands
    start = window.to(tl.int64) * stride_window
    odd = (start & 1).to(tl.int32)
    window_ptr = spectrum_ptr + (start >> 1) * 2
    q = tl.arange(0, 32)[:, None]  # (h, c, g)
    first = tile * 32 + 2 * (q // 16 * 8 + q % 8)
    rows = (
        window_ptr + _even(first + odd, odd, frames, stride_frame),
        window_ptr + _even(first + 1 - odd, odd, frames, stride_frame),
    )
    offset = q // 8 % 2 * 8 + tl.arange(0, 8)[None, :]
    t = tile * 32 + tl.arange(0, 32)
    out_rows = out_ptr + window.to(tl.int64) * bins * frames + t[:, None]
    extremes = (window * tl.num_programs(0) + tile) * BLOCKS
    sums = ()
    for _ in tl.static_range(2 * BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        sums = sums + (tl.zeros((16, 16), tl.float32),)  # noqa: RUF005
    loaded = ()
    for step in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        loaded = loaded + (_piece(rows[step % 2], offset, 16 * (step // 2), FREQUENCIES),)  # noqa: RUF005
    for step in tl.static_range(2 * PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        pair = loaded[0].reshape(2, 2, 8, 4, 2)  # pyright: ignore[reportGeneralTypeIssues]
        high, low = _power(pair.permute(0, 2, 1, 3, 4).reshape(16, 16))
        loaded = loaded[1:]
        if step + AHEAD < 2 * PIECES:
            later = _piece(rows[(step + AHEAD) % 2], offset, 16 * ((step + AHEAD) // 2), FREQUENCIES)
            loaded = loaded + (later,)  # noqa: RUF005
        next_sums = ()
        for place in tl.static_range(2 * BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
            sum = sums[place]
            if place // BLOCKS == step % 2:
                # These are not given a name, which would make them numbers of the kernel's, of 32 or 64 bits.
                if (USED >> (step // 2 * BLOCKS + place % BLOCKS)) & 1:
                    at = filters_ptr + ((step % 2 * PIECES + step // 2) * BLOCKS + place % BLOCKS) * 512
                    sum = _add_part(high, low, at, sum, WIDEN)
                if step % 2 == 1 and (ENDS >> (step // 2 * BLOCKS + place % BLOCKS)) & 1:
                    other = sums[place % BLOCKS]
                    both = tl.join(tl.where(odd != 0, sum, other), tl.where(odd != 0, other, sum))
                    both = both.permute(0, 2, 1).reshape(32, 16)
                    _write(
                        both, out_rows, t, frames, bins, place % BLOCKS, WHOLE,
                        least_ptr + extremes, greatest_ptr + extremes,
                    )  # fmt: skip
            next_sums = next_sums + (sum,)  # noqa: RUF005
        sums = next_sums


@kernel
def _even(frame, odd, frames, stride_frame):
    """Where the rows of frames begin, rounded up to even numbers. Behind the last frame others of its kind are read."""
    frame = tl.where(frame < frames, frame, frames - 2 + ((frame - frames) & 1))
    return ((odd + frame * stride_frame + 1) >> 1) * 2


@kernel
def _piece(rows, offset, FIRST: tl.constexpr, FREQUENCIES: tl.constexpr):
    """Complex numbers of the 16 frequencies from FIRST on; none behind the last."""
    if FIRST + 16 <= FREQUENCIES:
        return tl.load(rows + (offset + FIRST))
    else:  # noqa: RET505  (Triton compiles only the branch that is taken)
        return tl.load(rows + (offset + FIRST), mask=offset + FIRST < FREQUENCIES, other=0)


@kernel
def _power(pair):
    """(16 frames, 16 columns) complex numbers → their power, as two halves. No number changes lanes."""
    real = pair.to(tl.int32).to(tl.float32, bitcast=True)
    imaginary = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    power = real * real + imaginary * imaginary
    # Cut, not rounded: a conversion that rounds is slow, and the lower half takes whatever is left.
    bits = power.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    low = (power - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)
    return high, low


@kernel
def _add_part(high, low, filters_ptr, sums, WIDEN: tl.constexpr):
    """``sums`` + power @ 16 filters of 16 frequencies, whose halves lie one behind the other."""
    filters_high, filters_low = _lanes_of(filters_ptr), _lanes_of(filters_ptr + 256)
    if WIDEN:
        filters_high, filters_low = filters_high.to(tl.float32), filters_low.to(tl.float32)
        high, low = high.to(tl.float32), low.to(tl.float32)
    sums = tl.dot(low, filters_high, sums)
    sums = tl.dot(high, filters_low, sums)
    return tl.dot(high, filters_high, sums)


@kernel
def _lanes_of(filters_ptr):
    """What `by_lanes` laid out → (c, t, p) by (n, g), of which no lane gives anything away."""
    # Not as 32 × 8, which the spectrum's loads are: for the same shape Triton chooses the same places of the numbers.
    value = tl.load(filters_ptr + tl.arange(0, 256))
    return value.reshape(8, 4, 2, 2, 2).permute(3, 1, 4, 2, 0).reshape(16, 16)


@kernel
def _write(
    sums, out_rows, t, frames, bins, BLOCK: tl.constexpr, WHOLE: tl.constexpr, least_ptr, greatest_ptr
):  # fmt: skip
    """A block of filters: values, and the least and greatest power. Positive numbers are in order as their bits are,
    and of integers a warp finds the extreme with one instruction."""
    m = BLOCK * 16 + tl.arange(0, 16)
    mask = (t < frames)[:, None]
    if not WHOLE:
        mask = mask & (m < bins)[None, :]
    tl.store(out_rows + m[None, :] * frames, normalised(sums), mask=mask)
    bits = tl.maximum(sums, 1e-10).to(tl.int32, bitcast=True)
    tl.store(least_ptr + BLOCK, tl.min(bits).to(tl.float32, bitcast=True))
    tl.store(greatest_ptr + BLOCK, tl.max(bits).to(tl.float32, bitcast=True))
