"""Complex spectrum → power → mel → log → Whisper's normalisation, in one pass over the spectrum.

A filter of the mel scale covers a short run of frequencies, so the kernel works on blocks of filters and reads for each
only the frequencies that they cover: the spectrum is read once (blocks share at most two frequencies), and of the
products with the filters' zeros most are never computed.

On NVIDIA's GPUs one warp computes all filters of 16 frames: what a lane loads is already what it multiplies, so there
is no shared memory, no barrier and no wait but for memory itself. Which filters a piece of the spectrum meets is known
to the compiler. Elsewhere that order of work spills registers (RDNA) or is nothing special (CDNA).

The normalisation needs the loudest bin of a whole window before any value of it is final. The first pass writes values
that are final but for the floor, 8 below the loudest in log10, and the least and greatest of each tile; the second pass
reads only the tiles that have something under the floor and writes only what is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import is_interpreted, kernel
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl


def log_mel_reference(spectrum: Tensor, filters: Tensor) -> Tensor:
    """(windows, frequencies, frames) complex, (bins, frequencies) → (windows, bins, frames) float32, about -1 … 1."""
    power = spectrum.real.square() + spectrum.imag.square()
    log = (filters @ power).clamp_min(1e-10).log10()
    loudest = log.amax(dim=(-2, -1), keepdim=True)
    return (torch.maximum(log, loudest - 8.0) + 4.0) / 4.0


@dataclass(frozen=True)
class Tile:
    """Frames, filters and frequencies of a block, and how the product with the filters is computed."""

    frames: int
    filters: int
    frequencies: int
    warps: int
    way: str
    """``fp32``: as it is. ``bf16x3``: three products of bf16 halves, 2^-16 relative. ``lanes``: so too, by
    `_log_mel_lanes`, which takes one warp and 16 filters by 16 frequencies."""
    stages: int = 2
    """Of a pipeline; of ``lanes``: pieces that are loaded ahead."""


# fp32 is exact where matrix instructions take it (CDNA) and on plain cores (RDNA 2); elsewhere three products of parts.
TILES: Mapping[str, Tile] = {
    "cdna": Tile(64, 32, 32, 4, "fp32"),
    "rdna2": Tile(32, 16, 16, 4, "fp32"),
    "rdna3": Tile(32, 32, 16, 4, "bf16x3"),
    "rdna4": Tile(32, 32, 16, 4, "bf16x3"),
    "cuda": Tile(16, 16, 16, 1, "lanes", 4),
}
CANDIDATES = (
    Tile(16, 16, 16, 1, "lanes", 2),
    Tile(16, 16, 16, 1, "lanes", 8),
    Tile(32, 16, 16, 1, "lanes", 2),
    Tile(64, 32, 16, 4, "bf16x3", 3),
    Tile(64, 32, 32, 4, "bf16x3", 2),
    Tile(128, 32, 32, 8, "bf16x3", 2),
    Tile(32, 16, 32, 2, "bf16x3", 3),
)
"""Other tiles, for `stapes bench kernels --sweep` to try on the device that it runs on."""


@dataclass(frozen=True)
class Filters:
    """Mel filters laid out for the kernel on one device. Make them once with `prepare_filters`."""

    filters: Tensor
    """(bins, frequencies) float32, for the reference."""
    high: Tensor
    """(frequencies, bins), zeros behind; float32, or rounded to bf16. For ``lanes`` as `_by_lanes` lays it out."""
    low: Tensor
    """What rounding took off; empty where nothing is rounded."""
    ranges: Tensor
    """(blocks of filters, 2) int32: the first frequency that they cover, and how many blocks of frequencies."""
    used: int
    """Bit piece × blocks + block: whether that block of filters covers any of that piece of the frequencies."""
    tile: Tile


def prepare_filters(filters: Tensor, device: torch.device, tile: Tile | None = None) -> Filters:
    """Lay (bins, frequencies) filters out for a device; ``tile`` in place of the one that suits its architecture."""
    tile = tile or tile_for(device)
    bins, frequencies = filters.shape
    blocks = -(-bins // tile.filters)
    pieces = -(-frequencies // tile.frequencies)
    padded = torch.zeros((pieces + 1) * tile.frequencies, blocks * tile.filters)
    padded[:frequencies, :bins] = filters.cpu().T
    ranges = torch.zeros(blocks, 2, dtype=torch.int32)
    for block, columns in enumerate(padded.split(tile.filters, dim=1)):
        covered = columns.any(dim=1).nonzero()
        if len(covered):
            ranges[block, 0] = covered[0]
            ranges[block, 1] = -(-(covered[-1] + 1 - covered[0]) // tile.frequencies)
    used = 0
    for piece, rows in enumerate(padded.split(tile.frequencies)):
        for block, part in enumerate(rows.split(tile.filters, dim=1)):
            used |= int(part.any()) << (piece * blocks + block)
    high, low = padded, torch.empty(0)
    if tile.way != "fp32":
        high = padded.bfloat16()
        low = (padded - high.float()).bfloat16()
    if tile.way == "lanes":
        high, low = _by_lanes(high, low), torch.empty(0)
    return Filters(filters.to(device), high.to(device), low.to(device), ranges.to(device), used, tile)


def _by_lanes(high: Tensor, low: Tensor) -> Tensor:
    """(frequencies, filters) halves → (piece, block, half, 32 lanes, 8), as the lanes of a warp multiply them.

    Frequency 8 c1 + 4 c0 + t of a piece and filter 8 n + g of a block lie in lane 4 g + t, at 4 n + 2 c1 + c0.
    """
    laid = torch.stack([high, low]).view(2, -1, 2, 2, 4, high.shape[1] // 16, 2, 8)
    return laid.permute(1, 5, 0, 7, 4, 6, 2, 3).contiguous()


def tile_for(device: torch.device) -> Tile:
    """The tile that suits the architecture of a device."""
    target = target_of(device)
    return TILES[target.family if target else "cuda"]


def launch_log_mel(spectrum: Tensor, filters: Filters) -> Tensor:
    """As `log_mel_reference`. The frequencies of a frame should lie side by side, as the FFT leaves them."""
    windows, frequencies, frames = spectrum.shape
    bins = filters.filters.shape[0]
    tile = filters.tile
    if spectrum.stride(1) != 1:
        spectrum = spectrum.transpose(1, 2).contiguous().transpose(1, 2)
    # A complex number is loaded as one number of 64 bits: neighbours of a warp then read neighbouring bytes.
    pairs = torch.view_as_real(spectrum).view(torch.int64)
    tiles = -(-frames // tile.frames)
    out = torch.empty(windows, bins, frames, device=spectrum.device)
    extremes = torch.empty(2, windows, tiles, device=spectrum.device)
    if tile.way == "lanes":
        _log_mel_lanes[(tiles, windows)](
            pairs,
            filters.high,
            out,
            extremes[0],
            extremes[1],
            frames,
            bins,
            pairs.stride(0),
            pairs.stride(2),
            num_warps=tile.warps,
            WIDEN=is_interpreted(),
            **_lanes_constants(filters, frequencies),
        )
        launch_floor(out, extremes, tile.frames)
        return out
    _log_mel[(tiles, windows)](
        pairs,
        filters.high,
        filters.low,
        filters.ranges,
        out,
        extremes[0],
        extremes[1],
        frames,
        frequencies,
        bins,
        pairs.stride(0),
        pairs.stride(2),
        FRAMES=tile.frames,
        FILTERS=tile.filters,
        FREQUENCIES=tile.frequencies,
        BLOCKS=len(filters.ranges),
        WAY=tile.way,
        WIDEN=is_interpreted(),
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    launch_floor(out, extremes, tile.frames)
    return out


def _lanes_constants(filters: Filters, frequencies: int) -> dict[str, int]:
    return {
        "FREQUENCIES": frequencies,
        "PIECES": -(-frequencies // 16),
        "BLOCKS": len(filters.ranges),
        "USED": filters.used,
        "GROUPS": filters.tile.frames // 16,
        # Of more filters the sums take the registers of half the warps: each then has twice as much on its way.
        "AHEAD": filters.tile.stages * (1 if len(filters.ranges) <= 5 else 2),
    }


def launch_floor(out: Tensor, extremes: Tensor, tile_frames: int) -> None:
    """Raise what lies more than 8 (log10) under the loudest bin of its window to there, in place.

    Args:
        out: (windows, bins, frames), normalised otherwise.
        extremes: (2, windows, tiles): least and greatest value of the ``tile_frames`` frames of each tile.
    """
    windows, bins, frames = out.shape
    tiles = extremes.shape[-1]
    joined = max(1, 32 // tile_frames)
    _floor[(-(-tiles // joined), windows)](
        out,
        extremes[0],
        extremes[1],
        frames,
        bins,
        tiles,
        FRAMES=tile_frames,
        JOINED=joined,
        ROWS=32,
        TILES=max(16, 1 << (tiles - 1).bit_length()),
        num_warps=4,
    )


@kernel
def _log_mel(
    spectrum_ptr, high_ptr, low_ptr, ranges_ptr, out_ptr, least_ptr, greatest_ptr,
    frames, frequencies, bins, stride_window, stride_frame,
    FRAMES: tl.constexpr, FILTERS: tl.constexpr, FREQUENCIES: tl.constexpr, BLOCKS: tl.constexpr,
    WAY: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of frames of one window: all filters, final but for the floor."""
    tile, window = tl.program_id(0), tl.program_id(1)
    t = tile * FRAMES + tl.arange(0, FRAMES)
    # Behind the last frame and the last frequency others are read again: those filters are zero, those frames not kept.
    frame_ptr = spectrum_ptr + window.to(tl.int64) * stride_window + tl.minimum(t, frames - 1)[:, None] * stride_frame
    out_rows = out_ptr + window.to(tl.int64) * bins * frames + t[:, None]
    column = tl.arange(0, FILTERS)
    # Of filters that are none, too: nothing is less than theirs, and then the second pass looks once more than it must.
    least = tl.full((FRAMES, FILTERS), float("inf"), tl.float32)
    greatest = tl.full((FRAMES, FILTERS), float("-inf"), tl.float32)
    for block in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        m = block * FILTERS + column
        first, parts = tl.load(ranges_ptr + 2 * block), tl.load(ranges_ptr + 2 * block + 1)
        mel = tl.zeros((FRAMES, FILTERS), tl.float32)
        for part in tl.range(0, parts, num_stages=STAGES):
            f = first + part * FREQUENCIES + tl.arange(0, FREQUENCIES)
            pair = tl.load(frame_ptr + tl.minimum(f, frequencies - 1)[None, :])
            real = pair.to(tl.int32).to(tl.float32, bitcast=True)
            imaginary = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            row = f[:, None] * (BLOCKS * FILTERS) + m[None, :]
            mel = _add_product(real * real + imaginary * imaginary, high_ptr + row, low_ptr + row, mel, WAY, WIDEN)
        mel = _normalised(mel)
        tl.store(out_rows + m[None, :] * frames, mel, mask=(t < frames)[:, None] & (m < bins)[None, :])
        least, greatest = tl.minimum(least, mel), tl.maximum(greatest, mel)
    tl.store(least_ptr + window * tl.num_programs(0) + tile, tl.min(least))
    tl.store(greatest_ptr + window * tl.num_programs(0) + tile, tl.max(greatest))


@kernel
def _add_product(power, high_ptr, low_ptr, sums, WAY: tl.constexpr, WIDEN: tl.constexpr):
    """``sums`` + ``power`` @ filters. WIDEN: in the interpreter, whose product of bf16 is one of bit patterns."""
    high = tl.load(high_ptr)
    if WAY == "fp32":
        sums = tl.dot(power, high, sums, input_precision="ieee")
    else:
        low = tl.load(low_ptr)
        power_high = power.to(tl.bfloat16)
        power_low = (power - power_high.to(tl.float32)).to(tl.bfloat16)
        if WIDEN:
            high, low = high.to(tl.float32), low.to(tl.float32)
            power_high, power_low = power_high.to(tl.float32), power_low.to(tl.float32)
        sums = tl.dot(power_low, high, sums)
        sums = tl.dot(power_high, low, sums)
        sums = tl.dot(power_high, high, sums)
    return sums


@kernel
def _normalised(mel):
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
def _floor(
    out_ptr, least_ptr, greatest_ptr, frames, bins, tiles,
    FRAMES: tl.constexpr, JOINED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """JOINED tiles: what is under the floor of the window is raised to it."""
    # Backwards: what the first pass wrote last is still in the cache.
    chunk, window = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    every = tl.arange(0, TILES)
    greatest = tl.load(greatest_ptr + window * tiles + every, mask=every < tiles, other=float("-inf"))
    mine = chunk * JOINED + tl.arange(0, JOINED)
    least = tl.load(least_ptr + window * tiles + mine, mask=mine < tiles, other=float("inf"))
    floor = tl.max(greatest) - 2.0  # 8 in log10
    if tl.min(least) < floor:
        t = chunk * (JOINED * FRAMES) + tl.arange(0, JOINED * FRAMES)
        rows_ptr = out_ptr + window.to(tl.int64) * bins * frames + t[None, :]
        for first in range(0, bins, ROWS):
            m = first + tl.arange(0, ROWS)
            at = rows_ptr + m[:, None] * frames
            value = tl.load(at, mask=(m < bins)[:, None] & (t < frames)[None, :], other=float("inf"))
            tl.store(at, tl.zeros_like(value) + floor, mask=value < floor)


@kernel
def _log_mel_lanes(
    spectrum_ptr, filters_ptr, out_ptr, least_ptr, greatest_ptr, frames, bins, stride_window, stride_frame,
    FREQUENCIES: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, USED: tl.constexpr,
    GROUPS: tl.constexpr, AHEAD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """All filters of 16 GROUPS frames by one warp, final but for the floor.

    The instruction that multiplies 16 × 16 by 16 × 8 wants from lane 4 g + t the rows g and g + 8 and of the columns
    2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Which frequency is which column is free, so those are t, t + 4, t + 8 and t + 12,
    and each load of a warp is of 8 rows by 4 neighbours: no number changes lanes. Triton sees that by itself.
    """
    tile, window = tl.program_id(0), tl.program_id(1)
    q = tl.arange(0, 64 * GROUPS)[:, None]  # (group, h, c1, c0, g)
    row = tile * (16 * GROUPS) + q // 32 * 8 + q % 8
    rows = spectrum_ptr + window.to(tl.int64) * stride_window + tl.minimum(row, frames - 1) * stride_frame
    offset = q // 8 % 4 * 4 + tl.arange(0, 4)[None, :]
    sums = ()
    for _ in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        sums = sums + (tl.zeros((16 * GROUPS, 16), tl.float32),)  # noqa: RUF005  (Triton unpacks no stars)
    loaded = ()
    for piece in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        loaded = loaded + (_piece(rows, offset, 16 * piece, FREQUENCIES),)  # noqa: RUF005
    for piece in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        first = loaded[0]  # pyright: ignore[reportGeneralTypeIssues]
        pair = first.reshape(GROUPS, 2, 2, 2, 8, 4).permute(0, 1, 4, 2, 5, 3).reshape(16 * GROUPS, 16)
        loaded = loaded[1:]
        if piece + AHEAD < PIECES:
            loaded = loaded + (_piece(rows, offset, 16 * (piece + AHEAD), FREQUENCIES),)  # noqa: RUF005
        real = pair.to(tl.int32).to(tl.float32, bitcast=True)
        imaginary = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        power = real * real + imaginary * imaginary
        # Cut, not rounded: a conversion that rounds is slow, and the lower half takes whatever is left.
        bits = power.to(tl.int32, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low = (power - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)
        next_sums = ()
        for block in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
            sum = sums[block]
            if (USED >> (piece * BLOCKS + block)) & 1:
                sum = _add_part(high, low, filters_ptr + (piece * BLOCKS + block) * 512, sum, WIDEN)
            next_sums = next_sums + (sum,)  # noqa: RUF005
        sums = next_sums
    t = tile * (16 * GROUPS) + tl.arange(0, 16 * GROUPS)
    out_rows = out_ptr + window.to(tl.int64) * bins * frames + t[:, None]
    least = tl.full((16 * GROUPS, 16), float("inf"), tl.float32)
    greatest = tl.full((16 * GROUPS, 16), float("-inf"), tl.float32)
    for block in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        m = block * 16 + tl.arange(0, 16)
        mel = _normalised(sums[block])
        tl.store(out_rows + m[None, :] * frames, mel, mask=(t < frames)[:, None] & (m < bins)[None, :])
        least, greatest = tl.minimum(least, mel), tl.maximum(greatest, mel)
    tl.store(least_ptr + window * tl.num_programs(0) + tile, tl.min(least))
    tl.store(greatest_ptr + window * tl.num_programs(0) + tile, tl.max(greatest))


@kernel
def _piece(rows, offset, FIRST: tl.constexpr, FREQUENCIES: tl.constexpr):
    """((group, h, c1, c0, g), t) complex numbers of the 16 frequencies from FIRST on; none behind the last."""
    if FIRST + 16 <= FREQUENCIES:
        return tl.load(rows + (offset + FIRST))
    else:  # noqa: RET505  (Triton compiles only the branch that is taken)
        return tl.load(rows + (offset + FIRST), mask=offset + FIRST < FREQUENCIES, other=0)


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
    """What `_by_lanes` laid out → (c1, t, c0), (n, g), of which no lane gives anything away."""
    value = tl.load(filters_ptr + tl.arange(0, 32)[:, None] * 8 + tl.arange(0, 8)[None, :])
    return value.reshape(8, 4, 2, 2, 2).permute(3, 1, 4, 2, 0).reshape(16, 16)


def compile_cases(target: Target) -> list[CompileCase]:
    """Both numbers of bins, and the floor."""
    tile = TILES[target.family]
    floor = CompileCase(
        "log_mel floor",
        "fp32",
        _floor,
        {"out_ptr": "*fp32", "least_ptr": "*fp32", "greatest_ptr": "*fp32"}
        | dict.fromkeys(("frames", "bins", "tiles"), "i32"),
        {"FRAMES": tile.frames, "JOINED": max(1, 32 // tile.frames), "ROWS": 32, "TILES": 256},
        warps=4,
    )
    if tile.way == "lanes":
        return [*_lanes_cases(tile), floor]
    filters = "*fp32" if tile.way == "fp32" else "*bf16"
    pointers = {"spectrum_ptr": "*i64", "high_ptr": filters, "low_ptr": filters, "ranges_ptr": "*i32"}
    pointers |= {"out_ptr": "*fp32", "least_ptr": "*fp32", "greatest_ptr": "*fp32"}
    numbers = dict.fromkeys(("frames", "frequencies", "bins", "stride_window", "stride_frame"), "i32")
    cases = [
        CompileCase(
            f"log_mel {bins}",
            "fp32",
            _log_mel,
            {**pointers, **numbers},
            {
                "FRAMES": tile.frames,
                "FILTERS": tile.filters,
                "FREQUENCIES": tile.frequencies,
                "BLOCKS": -(-bins // tile.filters),
                "WAY": tile.way,
                "WIDEN": False,
                "STAGES": tile.stages,
            },
            dot={"fp32": "fp32", "bf16x3": "bf16"}[tile.way],
            warps=tile.warps,
            aligned=tuple(pointers),
        )
        for bins in (80, 128)
    ]
    return [*cases, floor]


def _lanes_cases(tile: Tile) -> list[CompileCase]:
    """Filters of Whisper's shape: each bin covers its share of the 201 frequencies and some of its neighbours'."""
    pointers = {"spectrum_ptr": "*i64", "filters_ptr": "*bf16"}
    pointers |= {"out_ptr": "*fp32", "least_ptr": "*fp32", "greatest_ptr": "*fp32"}
    numbers = dict.fromkeys(("frames", "bins", "stride_window", "stride_frame"), "i32")
    cases = []
    for bins in (80, 128):
        centre = torch.arange(bins)[:, None] * (200 / bins)
        shape = ((torch.arange(201)[None, :] - centre).abs() < 4).float()
        filters = prepare_filters(shape, torch.device("cpu"), tile)
        constants = {**_lanes_constants(filters, 201), "WIDEN": False}
        cases.append(
            CompileCase(
                f"log_mel {bins}",
                "fp32",
                _log_mel_lanes,
                {**pointers, **numbers},
                constants,
                dot="bf16",
                warps=tile.warps,
                aligned=tuple(pointers),
            )
        )
    return cases
