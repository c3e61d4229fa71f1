"""Sound → power → mel → log in one kernel: the Fourier transform as products with sines and cosines.

Nothing but the sound is read and nothing but the features is written. A frame is real and its window even about the
middle, so 400 samples fold into 200 sums (for the cosines) and 200 differences (for the sines); the products of even
and of odd samples, added, give frequency f, and subtracted, frequency 200 - f. Four products of 100 × 100 numbers a
frame are left of 400 × 402.

A product is made of three with halves of 11 bits each (fp16, high and low), which comes to 22 of fp32's 24 bits. Sound
is scaled by 2^10 before, so that the low half of a quiet sample is no denormal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import is_interpreted, kernel
from stapes.kernels.log_mel import launch_floor
from stapes.kernels.split_dot import split_dot
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

SIZE = 400
"""Samples of a frame that this kernel is written for."""
_QUARTER = SIZE // 4
_PADDED = 128
"""A quarter, as a power of two; also the most filters there may be."""
_FIRST = 64
"""Filters of the first accumulator; the rest have one of their own."""


@dataclass(frozen=True)
class Tile:
    """Frames of a block, and the frequencies and samples of a quarter frame that are multiplied at a time."""

    frames: int
    frequencies: int
    samples: int
    warps: int
    way: str
    """Of the product with the filters, as `split_dot`'s."""
    stages: int = 2


# By family, and by name where an architecture wants its own; none spills with Triton 3.6 to 3.8.
TILES: Mapping[str, Tile] = {
    "cdna": Tile(64, 32, 16, 8, "bf16x3"),
    "rdna2": Tile(16, 16, 16, 8, "fp32"),
    "gfx950": Tile(32, 32, 16, 8, "bf16x3"),
    "rdna3": Tile(32, 16, 16, 8, "bf16x3"),
    "rdna4": Tile(32, 32, 16, 8, "bf16x3"),
    "cuda": Tile(64, 32, 16, 8, "bf16x3"),
}
CANDIDATES = (
    Tile(64, 32, 16, 8, "bf16x3", 3),
    Tile(64, 32, 32, 8, "bf16x3", 1),
    Tile(64, 16, 32, 8, "bf16x3"),
    Tile(32, 64, 32, 8, "bf16x3"),
    Tile(32, 32, 16, 4, "bf16x3"),
    Tile(64, 32, 16, 8, "tf32x3"),
)
"""Other tiles, for `stapes bench kernels --sweep` to try on the device that it runs on."""


@dataclass(frozen=True)
class Tables:
    """Sines, cosines and mel filters on one device. Make them once with `prepare_tables`."""

    waves: Tensor
    """(4, 2, 128, 128) float16: cosines of even and of odd samples, sines of even and of odd, each high and low half;
    sample after sample, frequency beside frequency."""
    filters: Tensor
    """(2, 128, 128) float32, zeros behind: rows are frequencies 1 … 100, and 199 … 101."""
    bins: int
    covered: tuple[int, int, int, int]
    """Blocks of lower and of upper frequencies, as bits, that the first 64 filters cover, and that the rest cover."""
    hop: int
    tile: Tile


def prepare_tables(filters: Tensor, window: Tensor, hop: int, device: torch.device, tile: Tile | None = None) -> Tables:
    """Lay (bins, 201) filters and the window's sines out for a device.

    Raises ValueError for a window of another size or that is not even, and for filters that hear 0 Hz or the highest
    frequency: the kernel leaves both out. For more filters than 128 too.
    """
    window, filters = window.double().cpu(), filters.cpu()
    if len(window) != SIZE or window[0] != 0 or not torch.allclose(window[1:], window[1:].flip(0), atol=1e-6):
        raise ValueError(f"the kernel wants a window of {SIZE} samples, even about its middle and 0 at its start")
    if filters[:, 0].any() or filters[:, -1].any() or len(filters) > _PADDED:
        raise ValueError(f"the kernel wants at most {_PADDED} filters, none of the first and the last frequency")
    if tile is None:
        target = target_of(device)
        tile = _tile_for(target) if target else TILES["cuda"]
    index = torch.arange(_QUARTER)
    frequency = index + 1
    waves = torch.zeros(4, 2, _PADDED, _PADDED, dtype=torch.float16)
    for odd, sample in enumerate((2 * index + 2, 2 * index + 1)):
        # The middle sample is its own mirror image and is added to itself.
        weight = window[sample] * torch.where(sample == SIZE // 2, 0.5, 1.0)
        angle = 2 * math.pi / SIZE * (sample[:, None] * frequency % SIZE).double()
        for first, wave in ((0, angle.cos()), (2, angle.sin())):
            exact = weight[:, None] * wave
            high = exact.half()
            waves[first + odd, 0, :_QUARTER, :_QUARTER] = high
            waves[first + odd, 1, :_QUARTER, :_QUARTER] = (exact - high.double()).half()
    bins = filters.shape[0]
    padded = torch.zeros(2, _PADDED, _PADDED)
    padded[0, :_QUARTER, :bins] = filters.T[1 : _QUARTER + 1]
    padded[1, : _QUARTER - 1, :bins] = filters.T[_QUARTER + 1 : SIZE // 2].flip(0)
    return Tables(waves.to(device), padded.to(device), bins, _covered(padded, tile), hop, tile)


def _tile_for(target: Target) -> Tile:
    return TILES.get(target.name) or TILES[target.family]


def _covered(padded: Tensor, tile: Tile) -> tuple[int, int, int, int]:
    """`Tables.covered` of filters."""
    masks = [
        sum(1 << block for block, rows in enumerate(half.split(tile.frequencies)) if rows[:, columns].any())
        for columns in (slice(0, _FIRST), slice(_FIRST, None))
        for half in padded
    ]
    return masks[0], masks[1], masks[2], masks[3]


def launch_dft_mel(pcm: Tensor, tables: Tables) -> Tensor:
    """(windows, samples) float32 → (windows, bins, samples / hop), as `log_mel_reference` of its spectrum.

    Raises ValueError for a signal too short to reflect.
    """
    windows, samples = pcm.shape
    if samples <= SIZE // 2:
        raise ValueError(f"{samples} samples are too few to reflect {SIZE // 2} of them")
    frames = samples // tables.hop
    tile = tables.tile
    tiles = -(-frames // tile.frames)
    out = torch.empty(windows, tables.bins, frames, device=pcm.device)
    extremes = torch.empty(2, windows, tiles, device=pcm.device)
    _dft_mel[(tiles, windows)](
        pcm.contiguous(),
        tables.waves,
        tables.filters,
        out,
        extremes[0],
        extremes[1],
        samples,
        frames,
        tables.bins,
        WIDEN=is_interpreted(),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_constants(tile, tables.bins, tables.covered, tables.hop),
    )
    launch_floor(out, extremes, tile.frames)
    return out


def _constants(tile: Tile, bins: int, covered: tuple[int, int, int, int], hop: int) -> dict[str, int | str]:
    return {
        "HOP": hop,
        "SIZE": SIZE,
        "QUARTER": _QUARTER,
        "PADDED": _PADDED,
        "FRAMES": tile.frames,
        "FREQUENCIES": tile.frequencies,
        "SAMPLES": tile.samples,
        "FIRST": _FIRST,
        "REST": max(16, 1 << (bins - _FIRST - 1).bit_length()),
        "FIRST_LOWER": covered[0],
        "FIRST_UPPER": covered[1],
        "REST_LOWER": covered[2],
        "REST_UPPER": covered[3],
        "WAY": tile.way,
    }


@kernel
def _wave_dot(high, low, waves_ptr, which: tl.constexpr, at, accumulator, PADDED: tl.constexpr):
    """``accumulator`` + samples @ waves, of which each comes in two halves."""
    wave_high = tl.load(waves_ptr + 2 * which * PADDED * PADDED + at)
    wave_low = tl.load(waves_ptr + (2 * which + 1) * PADDED * PADDED + at)
    accumulator = tl.dot(low, wave_high, accumulator)
    accumulator = tl.dot(high, wave_low, accumulator)
    return tl.dot(high, wave_high, accumulator)


@kernel
def _folded(row_ptr, samples, start, n, inside, SIZE: tl.constexpr):
    """Sample n of each frame plus, and minus, its mirror image; either as high and low half."""
    at, mirrored = tl.abs(start + n), tl.abs(start + (SIZE - n))  # reflected at the signal's start, and at its end:
    at, mirrored = tl.minimum(at, 2 * samples - 2 - at), tl.minimum(mirrored, 2 * samples - 2 - mirrored)
    sample = tl.load(row_ptr + at, mask=inside, other=0.0) * 1024.0
    image = tl.load(row_ptr + mirrored, mask=inside, other=0.0) * 1024.0
    total, difference = sample + image, sample - image
    total_high, difference_high = total.to(tl.float16), difference.to(tl.float16)
    total_low = (total - total_high.to(tl.float32)).to(tl.float16)
    difference_low = (difference - difference_high.to(tl.float32)).to(tl.float16)
    return total_high, total_low, difference_high, difference_low


@kernel
def _powers(
    row_ptr, waves_ptr, samples, start, is_frame, f, HOP: tl.constexpr, SIZE: tl.constexpr,
    QUARTER: tl.constexpr, PADDED: tl.constexpr, FRAMES: tl.constexpr, FREQUENCIES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Power of each frame at frequencies f + 1 and 199 - f, times 2^20."""
    cos_even = tl.zeros((FRAMES, FREQUENCIES), tl.float32)
    cos_odd = tl.zeros((FRAMES, FREQUENCIES), tl.float32)
    sin_even = tl.zeros((FRAMES, FREQUENCIES), tl.float32)
    sin_odd = tl.zeros((FRAMES, FREQUENCIES), tl.float32)
    for first in range(0, QUARTER, SAMPLES):
        j = first + tl.arange(0, SAMPLES)
        inside = is_frame[:, None] & (j < QUARTER)[None, :]
        at = j[:, None] * PADDED + f[None, :]
        total, total_low, difference, difference_low = _folded(
            row_ptr, samples, start, 2 * j[None, :] + 2, inside, SIZE
        )
        cos_even = _wave_dot(total, total_low, waves_ptr, 0, at, cos_even, PADDED)
        sin_even = _wave_dot(difference, difference_low, waves_ptr, 2, at, sin_even, PADDED)
        total, total_low, difference, difference_low = _folded(
            row_ptr, samples, start, 2 * j[None, :] + 1, inside, SIZE
        )
        cos_odd = _wave_dot(total, total_low, waves_ptr, 1, at, cos_odd, PADDED)
        sin_odd = _wave_dot(difference, difference_low, waves_ptr, 3, at, sin_odd, PADDED)
    real, imaginary = cos_even + cos_odd, sin_even + sin_odd
    lower = real * real + imaginary * imaginary
    real, imaginary = cos_even - cos_odd, sin_even - sin_odd
    return lower, real * real + imaginary * imaginary


@kernel
def _finish(mel, first, rows_ptr, t, frames, bins, WIDTH: tl.constexpr):
    """Write the logarithm of some filters, scaled; their least and greatest."""
    m = first + tl.arange(0, WIDTH)
    # The scale of the sound, squared, back out; then log10, and (x + 4) / 4.
    value = tl.log2(tl.maximum(mel * (1.0 / (1024.0 * 1024.0)), 1e-10)) * (0.30102999566398120 / 4) + 1.0
    is_value = (t < frames)[:, None] & (m < bins)[None, :]
    tl.store(rows_ptr + m[None, :] * frames + t[:, None], value, mask=is_value)
    least = tl.min(tl.where(is_value, value, float("inf")))
    return least, tl.max(tl.where(is_value, value, float("-inf")))


@kernel
def _dft_mel(
    pcm_ptr, waves_ptr, filters_ptr, out_ptr, least_ptr, greatest_ptr, samples, frames, bins,
    HOP: tl.constexpr, SIZE: tl.constexpr, QUARTER: tl.constexpr, PADDED: tl.constexpr,
    FRAMES: tl.constexpr, FREQUENCIES: tl.constexpr, SAMPLES: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    FIRST_LOWER: tl.constexpr, FIRST_UPPER: tl.constexpr, REST_LOWER: tl.constexpr, REST_UPPER: tl.constexpr,
    WAY: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of frames of one window: all filters, final but for the floor."""
    tile, window = tl.program_id(0), tl.program_id(1)
    t = tile * FRAMES + tl.arange(0, FRAMES)
    row_ptr = pcm_ptr + window.to(tl.int64) * samples
    start = t[:, None] * HOP - SIZE // 2
    first = tl.zeros((FRAMES, FIRST), tl.float32)
    rest = tl.zeros((FRAMES, REST), tl.float32)
    m_first, m_rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    for block in range(PADDED // FREQUENCIES):
        f = block * FREQUENCIES + tl.arange(0, FREQUENCIES)
        lower, upper = _powers(
            row_ptr, waves_ptr, samples, start, t < frames, f,
            HOP, SIZE, QUARTER, PADDED, FRAMES, FREQUENCIES, SAMPLES,
        )  # fmt: skip
        lower_ptr = filters_ptr + f[:, None] * PADDED
        upper_ptr = lower_ptr + PADDED * PADDED
        if (FIRST_LOWER >> block) & 1:
            first = split_dot(lower, tl.load(lower_ptr + m_first[None, :]), first, WAY, WIDEN)
        if (FIRST_UPPER >> block) & 1:
            first = split_dot(upper, tl.load(upper_ptr + m_first[None, :]), first, WAY, WIDEN)
        if (REST_LOWER >> block) & 1:
            rest = split_dot(lower, tl.load(lower_ptr + m_rest[None, :]), rest, WAY, WIDEN)
        if (REST_UPPER >> block) & 1:
            rest = split_dot(upper, tl.load(upper_ptr + m_rest[None, :]), rest, WAY, WIDEN)
    rows_ptr = out_ptr + window.to(tl.int64) * bins * frames
    least, greatest = _finish(first, 0, rows_ptr, t, frames, bins, FIRST)
    least_rest, greatest_rest = _finish(rest, FIRST, rows_ptr, t, frames, bins, REST)
    tl.store(least_ptr + window * tl.num_programs(0) + tile, tl.minimum(least, least_rest))
    tl.store(greatest_ptr + window * tl.num_programs(0) + tile, tl.maximum(greatest, greatest_rest))


def compile_cases(target: Target) -> list[CompileCase]:
    """Both numbers of bins, as if every filter covered every frequency."""
    tile = _tile_for(target)
    pointers = {"pcm_ptr": "*fp32", "waves_ptr": "*fp16", "filters_ptr": "*fp32", "out_ptr": "*fp32"}
    pointers |= {"least_ptr": "*fp32", "greatest_ptr": "*fp32"}
    every = (1 << _PADDED // tile.frequencies) - 1
    return [
        CompileCase(
            f"dft_mel {bins}",
            "fp16",
            _dft_mel,
            {**pointers, "samples": "i32", "frames": "i32", "bins": "i32"},
            {"WIDEN": False, **_constants(tile, bins, (every, every, every, every), 160)},
            dot="fp16",
            warps=tile.warps,
            stages=tile.stages,
            aligned=(*pointers, "samples"),
        )
        for bins in (80, 128)
    ]
