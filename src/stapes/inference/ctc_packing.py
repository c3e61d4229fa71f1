"""How the recordings of a batch lie behind each other in one sequence, for the host and for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.inference.gpu_lane import upload
from stapes.kernels.packed_attention import QUERIES, query_blocks
from stapes.models.wav2vec2 import Wav2Vec2Config
from stapes.models.waveform import is_real

POSITIONS = 8
"""Neighbouring positions that are one row of the positional convolution's product."""

_ROUND = 128
"""Slots of a batch are a multiple of this, so that products come in few sizes."""


class Tables(NamedTuple):
    """Where everything lies, on the device, int32. Their sizes follow from the numbers of recordings and slots."""

    slots: Tensor
    """(3, slots): see `first_convolution`."""
    recordings: Tensor
    """(2, recordings): first sample, samples."""
    places: Tensor
    """(slots,): see `add_positions`."""
    blocks: Tensor
    """(3, blocks): see `position_windows`."""
    queries: Tensor
    """(4, blocks): see `packed_attention`."""


@dataclass(frozen=True)
class Packing:
    """Where the recordings of a batch lie in one sequence of slots; of each, (recordings,), int64.

    A slot is as long as a frame of features. A recording has a few more slots than frames, so that no window of a
    frame of it reaches into the next one.
    """

    begins: NDArray[np.int64]
    """Its first sample."""
    lengths: NDArray[np.int64]
    """Its samples."""
    starts: NDArray[np.int64]
    """Its first slot: the rows of its frames begin there."""
    spans: NDArray[np.int64]
    """Its slots."""
    counts: NDArray[np.int64]
    """Its frames of features, 0 for what is too short."""
    slots: int
    """In all."""
    flat: Tensor
    """The tables, one behind the other."""

    @cached_property
    def tables(self) -> Tables:
        """The same for the kernels."""
        return self.tables_in(self.flat)

    def tables_in(self, flat: Tensor) -> Tables:
        """Tables of these sizes, in other memory."""
        shapes = _shapes(len(self.lengths), self.slots)
        parts = flat.split([prod(shape) for shape in shapes])
        return Tables(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def pack(config: Wav2Vec2Config, lengths: Sequence[int], begins: Sequence[int] | None, device: torch.device) -> Packing:
    """Lay recordings of so many samples out. ``begins``: their first samples; by default one follows the other."""
    sizes = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(sizes) - sizes if begins is None else np.asarray(begins, dtype=np.int64)
    counts = config.feature_count(torch.from_numpy(sizes)).numpy()
    spans = np.maximum(counts, 1) + overhang(config)
    starts, slots = np.cumsum(spans) - spans, -(-int(spans.sum()) // _ROUND) * _ROUND

    used = int(spans.sum())
    recording = np.repeat(np.arange(len(spans)), spans)
    place = np.arange(used) - starts[recording]
    begun = place * config.hop
    blocks = -(-spans // POSITIONS)
    first_block = np.cumsum(blocks) - blocks
    of_block = np.repeat(np.arange(len(spans)), blocks)
    block_place = (np.arange(len(of_block)) - first_block[of_block]) * POSITIONS
    parts = (
        np.stack([first[recording] + begun, sizes[recording] - begun, recording]),
        np.stack([first, sizes]),
        first_block[recording] * POSITIONS + place,
        np.stack([starts[of_block] + block_place, block_place, counts[of_block]]),
        query_blocks(starts, spans, np.maximum(counts, 1)),
    )
    assert max(int(part.max(initial=0)) for part in parts) < 2**31, "a batch is limited to 37 hours"
    tables = []
    for part, shape in zip(parts, _shapes(len(spans), slots), strict=True):
        table = np.zeros(shape, dtype=np.int32)  # slots and blocks of zeros hear, see and answer nothing
        table[..., : part.shape[-1]] = part
        tables.append(table.reshape(-1))
    return Packing(first, sizes, starts, spans, counts, slots, upload(np.concatenate(tables), device))


def overhang(config: Wav2Vec2Config) -> int:
    """Slots behind a recording's last frame that its samples reach into."""
    return -(-config.receptive_field // config.hop) - 1


def unpack(packed: Tensor, packing: Packing, frames: int) -> Tensor:
    """(slots, …) → (recordings, frames, …), zeros where a recording has no frame."""
    rows = packing.starts[:, None] + np.arange(frames)
    rows = upload(np.minimum(rows, packing.slots - 1), packed.device)
    real = is_real(upload(packing.counts, packed.device), frames)
    return packed[rows].masked_fill(~real[(..., *[None] * (packed.ndim - 1))], 0.0)


def _shapes(recordings: int, slots: int) -> tuple[tuple[int, ...], ...]:
    """Of the tables: as many blocks as there can be."""
    blocks, queries = slots // POSITIONS + recordings, slots // QUERIES + recordings
    return (3, slots), (2, recordings), (slots,), (3, blocks), (4, queries)
