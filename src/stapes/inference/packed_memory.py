"""What a decoder keeps of windows on a CPU with bf16 units: keys and values laid out as the weights of a product.

A step reads the keys and values of every window, 18 MB for each in Whisper base, and that is where its time goes. With
a query a batched product is slow: oneDNN lays the keys out anew before it multiplies (12 GB/s on an EPYC with AVX-512).
Laid out once, when a window is admitted, they are read by a plain linear layer: all heads' queries against all heads'
keys in one product, of which only each head's own part is used. That computes eight times as much as is needed, in the
time that reading takes anyway, and is five times as fast as batched products in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor, nn

from stapes.models.whisper import CrossAttention

_MOST_ROWS = 256
"""Queries (of all heads) in one product: their scores are 6 MB in Whisper base."""

_linear = torch.ops.mkldnn._linear_pointwise.default
_pack = torch.ops.mkldnn._reorder_linear_weight


class PackedRows:
    """Keys or values of windows, in the place of a tensor (windows, …): each is packed, (outputs, inputs)."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = list(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """(windows,)."""
        return (len(self._rows),)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> PackedRows: ...
    def __getitem__(self, index: int | slice) -> Tensor | PackedRows:
        return PackedRows(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __setitem__(self, index: int, row: Tensor) -> None:
        self._rows[index] = row

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._rows)

    def room(self, windows: int) -> PackedRows:
        """As many as that, of which nothing is known yet."""
        return PackedRows([torch.empty(0)] * windows)


class PackedCrossAttention(nn.Module):
    """Cross-attention over `PackedRows`."""

    def __init__(self, cross: CrossAttention) -> None:
        super().__init__()
        self.heads = cross.heads
        self.query, self.key, self.value, self.out = cross.query, cross.key, cross.value, cross.out

    def keys_values(self, states: Tensor) -> tuple[PackedRows, PackedRows]:
        """As `Attention.keys_values`."""
        # (heads × 1500, head width) of each window, and (width, 1500).
        keys = self.key(states).unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(1, 2).contiguous()
        values = self.value(states).transpose(1, 2).contiguous()
        return PackedRows([_pack(row) for row in keys]), PackedRows([_pack(row) for row in values])

    def forward(
        self, x: Tensor, keys: PackedRows, values: PackedRows, heads: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `CrossAttention.forward`."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (rows, heads, queries, head width)
        query = query * query.shape[-1] ** -0.5
        scores = self._each_with_its_own(query, keys)
        attended = self._each_with_its_own(scores.softmax(dim=-1), values)
        return self.out(attended.transpose(1, 2).flatten(2)), scores[:, list(heads)] if heads else None

    def _each_with_its_own(self, x: Tensor, packed: PackedRows) -> Tensor:
        """Products of (rows, heads, queries, inputs) with what is packed of each row and head: its own outputs."""
        rows, heads, queries, _ = x.shape
        if queries == 1:
            # The step of a few windows: as few operations as can be. Of (heads, heads × outputs), the diagonal.
            products = [
                _linear(part, row, None, "none", [], "none") for part, row in zip(x[:, :, 0], packed, strict=True)
            ]
            outputs = products[0].shape[1] // heads
            size, steps = (heads, outputs), ((heads + 1) * outputs, 1)
            return torch.stack([product.as_strided(size, steps) for product in products])[:, :, None]
        most = max(1, _MOST_ROWS // heads)
        out: Tensor | None = None
        for row in range(rows):
            for first in range(0, queries, most):
                part = x[row, :, first : first + most]
                y = _linear(part.flatten(0, 1), packed[row], None, "none", [], "none")
                own = y.view(heads, part.shape[1], heads, -1).diagonal(dim1=0, dim2=2)  # (queries, outputs, heads)
                if out is None:
                    out = x.new_empty(rows, heads, queries, own.shape[1])
                out[row, :, first : first + most] = own.permute(2, 0, 1)
        assert out is not None
        return out
