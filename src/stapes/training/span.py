"""Layers whose processes each hold a part of the time: what is told to whom, and where a part begins.

Attention and convolutions are all of a layer that looks at other positions. Attention is told everyone's keys and
values, a convolution its neighbours' edges; whatever else a layer does, it does for its own positions. Positions that
fill the last parts up are zero for convolutions and unseen by attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models import whisper
from stapes.models.conformer import Conformer, ConformerLayer
from stapes.training.exchange import with_halo


class Span:
    """The part of the positions of a batch that this process holds. Set by `begin`, for a batch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.parts = dist.get_rank(group), dist.get_world_size(group)
        self.total = self.each = 0
        self.real: Tensor | None = None
        """Real positions of each row of the whole (batch,); None: all."""

    def begin(self, total: int) -> None:
        """A batch of ``total`` positions."""
        self.total, self.each = total, -(-total // self.parts)

    @property
    def padded(self) -> int:
        """Positions with those that fill up."""
        return self.each * self.parts

    @property
    def first(self) -> int:
        """Where the part begins."""
        return self.rank * self.each

    @property
    def count(self) -> int:
        """Positions of the part that are there; the rest of `each` fills up."""
        return max(0, min(self.total - self.first, self.each))

    def counts(self, counts: Tensor | None, rows: int, device: torch.device) -> Tensor | None:
        """Real positions of each row in this part. None where all are, in every part."""
        if counts is None:
            if self.padded == self.total:
                return None
            counts = torch.full((rows,), self.total, device=device)
        return (counts - self.first).clamp(min=0, max=self.each)

    def of(self, x: Tensor) -> Tensor:
        """This part of (batch, positions)."""
        return F.pad(x, (0, self.padded - x.shape[1]))[:, self.first : self.first + self.each]


def look_at(attention: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Have attention look at changed keys and values, each (batch, heads, positions, head width)."""
    plain: Any = attention.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return plain(query, change(key), change(value), mask)

    def attend_whisper(query: Tensor, key_value: whisper.KeyValue, mask: Tensor | None = None, **options: bool) -> Any:
        return plain(query, (change(key_value[0]), change(key_value[1])), mask, **options)

    replaced: Any = attend_whisper if isinstance(attention, whisper.Attention) else attend
    attention.attend = replaced


def with_neighbours(conv: nn.Conv1d, group: dist.ProcessGroup) -> None:
    """Have a padded convolution over time see its neighbours' edges in the place of zeros."""

    def forward(input: Tensor) -> Tensor:
        padding = int(conv.padding[0])
        return F.conv1d(with_halo(input, padding, padding, group), conv.weight, conv.bias, groups=conv.groups)

    conv.forward = forward


def convolutions(layer: nn.Module) -> list[nn.Conv1d]:
    """Those of a layer that look at other positions."""
    return [layer.convolution.depthwise] if isinstance(layer, ConformerLayer) else []


def beside_of_part(
    encoder: nn.Module, span: Span, beside: tuple[Any, ...], rows: int, device: torch.device, *, cut_places: bool
) -> tuple[Any, ...]:
    """What layers are given beside the states of a part, from what they are given beside the whole.

    cut_places: whether rotary positions are turned where only those of the part are there.
    """
    if not isinstance(encoder, Conformer):
        return beside
    _, mask, counts = beside
    cosine, sine = encoder.beside(span.padded, None, device)[0] or (None, None)
    assert cosine is not None
    assert sine is not None
    places = slice(span.first, span.first + span.each) if cut_places else slice(None)
    return (cosine[places], sine[places]), mask, span.counts(counts, rows, device)
