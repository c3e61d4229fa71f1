"""Complex spectrum → power → mel → log → Whisper's normalisation, in one pass over the spectrum.

A filter of the mel scale covers a short run of frequencies, so the kernel works on blocks of filters and reads for each
only the frequencies that they cover: the spectrum is read once (blocks share at most two frequencies), and of the
products with the filters' zeros most are never computed.

On NVIDIA's GPUs the first pass is one of `stapes.kernels.log_mel_lanes`. Elsewhere that order of work spills registers
(RDNA) or is nothing special (CDNA).

The normalisation needs the loudest bin of a whole window before any value of it is final. The first pass writes values
that are final but for the floor, 8 below the loudest in log10, and the least and greatest power of each tile; the
second pass reads only the tiles that have something under the floor and writes only what is. Where all of a tile is, as
in the silence behind speech, it reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import is_interpreted, kernel
from stapes.kernels.log_mel_lanes import PIECE, by_lanes, log_mel_lanes, log_mel_pairs, normalised, parts_used
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
    """``fp32``: as it is. ``bf16x3``: three products of bf16 halves, 2^-16 relative. ``lanes``, ``pairs``: so too, by
    `log_mel_lanes` (16 frames) or `log_mel_pairs` (32), which take one warp and 16 filters by 16 frequencies."""
    stages: int = 2
    """Of a pipeline; of ``lanes`` and ``pairs``: pieces of 16 frames that are loaded ahead."""


# fp32 is exact where matrix instructions take it (CDNA) and on plain cores (RDNA 2); elsewhere three products of parts.
TILES: Mapping[str, Tile] = {
    "cdna": Tile(64, 32, 32, 4, "fp32"),
    "rdna2": Tile(32, 16, 16, 4, "fp32"),
    "rdna3": Tile(32, 32, 16, 4, "bf16x3"),
    "rdna4": Tile(32, 32, 16, 4, "bf16x3"),
    "cuda": Tile(32, 16, 16, 1, "pairs", 3),
}
CANDIDATES = (
    Tile(32, 16, 16, 1, "pairs", 2),
    Tile(32, 16, 16, 1, "pairs", 6),
    Tile(32, 16, 16, 1, "pairs", 4),
    Tile(16, 16, 16, 1, "lanes", 2),
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
    """(frequencies, bins), zeros behind; float32, or rounded to bf16. For ``lanes`` and ``pairs`` as `by_lanes` lays it
    out; ``pairs`` have that twice: from frequency 0 on, and from 1 on."""
    low: Tensor
    """What rounding took off; empty where nothing is rounded."""
    ranges: Tensor
    """(blocks of filters, 2) int32: the first frequency that they cover, and how many blocks of frequencies."""
    used: int
    """Of ``lanes`` and ``pairs``, as `parts_used` says: which blocks of filters cover any of which piece."""
    ends: int
    """Likewise: the last of those pieces of each block."""
    tile: Tile


def prepare_filters(filters: Tensor, device: torch.device, tile: Tile | None = None) -> Filters:
    """Lay (bins, frequencies) filters out for a device; ``tile`` in place of the one that suits its architecture."""
    tile = tile or tile_for(device)
    filters = filters.cpu()
    if tile.way == "pairs" and not (filters.shape[1] % 2 and filters.shape[1] > 2 * PIECE and _spares_ends(filters)):
        tile = replace(tile, frames=16, way="lanes", stages=min(2, tile.stages))
    padded = _padded(filters, tile)
    ranges = torch.zeros(padded.shape[1] // tile.filters, 2, dtype=torch.int32)
    for block, columns in enumerate(padded.split(tile.filters, dim=1)):
        covered = columns.any(dim=1).nonzero()
        if len(covered):
            ranges[block, 0] = covered[0]
            ranges[block, 1] = -(-(covered[-1] + 1 - covered[0]) // tile.frequencies)
    used = ends = 0
    high, low = padded, torch.empty(0)
    if tile.way != "fp32":
        high, low = _halves(padded)
    if tile.way == "lanes":
        used, ends = parts_used(padded)
        high, low = by_lanes(high, low, pairs=False), torch.empty(0)
    if tile.way == "pairs":
        layouts = [_padded(part, tile)[:-PIECE] for part in (filters[:, :-1], filters[:, 1:])]
        used, ends = parts_used(layouts[0].abs() + layouts[1].abs())
        high, low = torch.cat([by_lanes(*_halves(layout), pairs=True) for layout in layouts]), torch.empty(0)
    return Filters(filters.to(device), high.to(device), low.to(device), ranges.to(device), used, ends, tile)


def _spares_ends(filters: Tensor) -> bool:
    """Whether the first and the last frequency have no weight, as in Whisper's filters."""
    return not filters[:, [0, -1]].any()


def _padded(filters: Tensor, tile: Tile) -> Tensor:
    """(bins, frequencies) → (frequencies, bins), both filled up with zeros; of frequencies a block more."""
    bins, frequencies = filters.shape
    padded = torch.zeros(
        (-(-frequencies // tile.frequencies) + 1) * tile.frequencies, -(-bins // tile.filters) * tile.filters
    )
    padded[:frequencies, :bins] = filters.T
    return padded


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → two of bf16 whose sum it nearly is."""
    high = values.bfloat16()
    return high, (values - high.float()).bfloat16()


def tile_for(device: torch.device) -> Tile:
    """The tile that suits the architecture of a device."""
    target = target_of(device)
    return TILES[target.family if target else "cuda"]


def launch_log_mel(spectrum: Tensor, filters: Filters) -> Tensor:
    """As `log_mel_reference`. The frequencies of a frame should lie side by side, as the FFT leaves them."""
    windows, frequencies, frames = spectrum.shape
    bins = filters.filters.shape[0]
    tile = filters.tile
    is_by_pairs = tile.way == "pairs"
    if is_by_pairs and frames < 2:
        return log_mel_reference(spectrum, filters.filters)
    if spectrum.stride(1) != 1 or (is_by_pairs and spectrum.stride(2) % 2 == 0):
        spectrum = spectrum.transpose(1, 2).contiguous().transpose(1, 2)
    # A complex number is loaded as one number of 64 bits: neighbours of a warp then read neighbouring bytes.
    pairs = torch.view_as_real(spectrum).view(torch.int64)
    tiles = -(-frames // tile.frames)
    out = torch.empty(windows, bins, frames, device=spectrum.device)
    if tile.way in ("lanes", "pairs"):
        extremes = torch.empty(2, windows, tiles, len(filters.ranges), device=spectrum.device)
        (log_mel_pairs if is_by_pairs else log_mel_lanes)[(tiles, windows)](
            pairs,
            filters.high,
            out,
            extremes[0],
            extremes[1],
            frames,
            bins,
            pairs.stride(0),
            pairs.stride(2),
            WIDEN=is_interpreted(),
            **lanes_constants(filters, frequencies, frames),
            num_warps=1,
        )
        launch_floor(out, extremes, tile.frames)
        return out
    extremes = torch.empty(2, windows, tiles, 1, device=spectrum.device)
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


def lanes_constants(filters: Filters, frequencies: int, frames: int) -> dict[str, int | bool]:
    """Of `log_mel_lanes` and `log_mel_pairs`."""
    bins, tile = filters.filters.shape[0], filters.tile
    read = frequencies - (tile.way == "pairs")
    return {
        "FREQUENCIES": read,
        "PIECES": -(-read // PIECE),
        "BLOCKS": len(filters.ranges),
        "USED": filters.used,
        "ENDS": filters.ends,
        "AHEAD": tile.stages,
        "EVEN": frames % 2 == 0,
        "WHOLE": bins % PIECE == 0,
    }


def launch_floor(out: Tensor, extremes: Tensor, tile_frames: int) -> None:
    """Raise what lies more than 8 (log10) under the loudest bin of its window to there, in place.

    Args:
        out: (windows, bins, frames), normalised otherwise.
        extremes: (2, windows, tiles, blocks of 16 bins, or 1): least and greatest power, 1e-10 at least, of the
            ``tile_frames`` frames of each tile.
    """
    windows, bins, frames = out.shape
    _, _, tiles, blocks = extremes.shape
    joined = max(1, 32 // tile_frames)
    _floor[(-(-tiles // joined), windows)](
        out,
        extremes[0],
        extremes[1],
        frames,
        bins,
        tiles,
        **_floor_constants(tile_frames, tiles, blocks, bins),
        num_warps=4,
    )


def _floor_constants(tile_frames: int, tiles: int, blocks: int, bins: int) -> dict[str, int]:
    rows = 32 if blocks == 1 else PIECE
    return {
        "FRAMES": tile_frames,
        "JOINED": max(1, 32 // tile_frames),
        "BLOCKS": blocks,
        "FILTERS": -(-bins // rows) * rows if blocks == 1 else PIECE,
        "ROWS": rows,
        "EVERY": max(16, 1 << (tiles * blocks - 1).bit_length()),
    }


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
    greatest = tl.full((FRAMES, FILTERS), 1e-10, tl.float32)
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
        tl.store(out_rows + m[None, :] * frames, normalised(mel), mask=(t < frames)[:, None] & (m < bins)[None, :])
        least, greatest = tl.minimum(least, tl.maximum(mel, 1e-10)), tl.maximum(greatest, mel)
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
def _floor(
    out_ptr, least_ptr, greatest_ptr, frames, bins, tiles,
    FRAMES: tl.constexpr, JOINED: tl.constexpr, BLOCKS: tl.constexpr, FILTERS: tl.constexpr, ROWS: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    """JOINED tiles: what is under the floor of the window is raised to it. EVERY: at least tiles × BLOCKS."""
    # Backwards: what the first pass wrote last is still in the cache.
    chunk, window = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    mine = chunk * JOINED + tl.arange(0, JOINED)
    extremes = (window * tiles + mine) * BLOCKS
    least, greatest = (), ()
    for block in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        parts = tl.load(least_ptr + extremes + block, mask=mine < tiles, other=float("inf"))
        least = least + (tl.min(parts),)  # noqa: RUF005  (Triton unpacks no stars)
        parts = tl.load(greatest_ptr + extremes + block, mask=mine < tiles, other=0.0)
        greatest = greatest + (tl.max(parts),)  # noqa: RUF005
    every = tl.arange(0, EVERY)
    all = tl.load(greatest_ptr + window * tiles * BLOCKS + every, mask=every < tiles * BLOCKS, other=0.0)
    floor = normalised(tl.max(all)) - 2.0  # 8 in log10
    t = chunk * (JOINED * FRAMES) + tl.arange(0, JOINED * FRAMES)
    rows_ptr = out_ptr + window.to(tl.int64) * bins * frames + t[None, :]
    for block in tl.static_range(BLOCKS):  # pyright: ignore[reportGeneralTypeIssues]
        if normalised(least[block]) < floor:  # pyright: ignore[reportGeneralTypeIssues]
            # Where nothing reaches the floor, nothing need be read.
            read = tl.where(normalised(greatest[block]) < floor, 0, bins)  # pyright: ignore[reportGeneralTypeIssues]
            for first in range(block * FILTERS, block * FILTERS + FILTERS, ROWS):
                m = first + tl.arange(0, ROWS)
                at = rows_ptr + m[:, None] * frames
                value = tl.load(at, mask=(m < read)[:, None] & (t < frames)[None, :], other=float("-inf"))
                inside = (m < bins)[:, None] & (t < frames)[None, :]
                tl.store(at, tl.zeros_like(value) + floor, mask=inside & (value < floor))


def compile_cases(target: Target) -> list[CompileCase]:
    """Both numbers of bins, and their floor."""
    tile = TILES[target.family]
    if tile.way in ("lanes", "pairs"):
        return [
            case for bins in (80, 128) for case in (*_lanes_cases(bins), _floor_case(tile, bins, blocks=bins // 16))
        ]
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
    return [*cases, _floor_case(tile, 80, blocks=1)]


def _floor_case(tile: Tile, bins: int, blocks: int) -> CompileCase:
    return CompileCase(
        "log_mel floor" if blocks == 1 else f"log_mel floor {bins}",
        "fp32",
        _floor,
        {"out_ptr": "*fp32", "least_ptr": "*fp32", "greatest_ptr": "*fp32"}
        | dict.fromkeys(("frames", "bins", "tiles"), "i32"),
        _floor_constants(tile.frames, -(-3000 // tile.frames), blocks, bins),
        warps=4,
    )


def _lanes_cases(bins: int) -> list[CompileCase]:
    """Filters of Whisper's shape: each bin covers its share of the 201 frequencies and some of its neighbours'."""
    pointers = {"spectrum_ptr": "*i64", "filters_ptr": "*bf16"}
    pointers |= {"out_ptr": "*fp32", "least_ptr": "*fp32", "greatest_ptr": "*fp32"}
    numbers = dict.fromkeys(("frames", "bins", "stride_window", "stride_frame"), "i32")
    centre = torch.arange(1, bins + 1)[:, None] * (200 / (bins + 1))
    shape = ((torch.arange(201)[None, :] - centre).abs() < 4).float()
    shape[:, [0, -1]] = 0
    cases = []
    for tile in (TILES["cuda"], Tile(16, 16, 16, 1, "lanes", 2)):
        filters = prepare_filters(shape, torch.device("cpu"), tile)
        cases.append(
            CompileCase(
                f"log_mel {bins} {tile.way}",
                "fp32",
                log_mel_pairs if tile.way == "pairs" else log_mel_lanes,
                {**pointers, **numbers},
                {**lanes_constants(filters, 201, 3000), "WIDEN": False},
                dot="bf16",
                warps=1,
                aligned=tuple(pointers),
            )
        )
    return cases
