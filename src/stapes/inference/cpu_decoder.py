"""Whisper's decoder on packed layers, with few operations for each token.

A step over a few windows is hundreds of small operations, and calling them takes as long as a third of the reading of
weights. So query, key and value are one product, residual sums are added by the product before them, and what all
layers need is made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.inference.packed import PackedLinear, PackedMLP
from stapes.inference.packed_memory import PackedCrossAttention, PackedRows
from stapes.models.whisper import DecoderLayer, KeyValue, TextDecoder

_add_product = torch.ops.mkldnn._linear_pointwise.binary


class _Layer(nn.Module):
    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, PackedMLP)
        assert isinstance(attention.out, PackedLinear)
        self.attention_norm, self.cross_attention_norm = layer.attention_norm, layer.cross_attention_norm
        self.mlp_norm = layer.mlp_norm
        self.heads = attention.heads
        self.query, self.key, self.value, self.out = attention.query, attention.key, attention.value, attention.out
        self.cross_attention = PackedCrossAttention(layer.cross_attention)
        self.up, self.down = mlp.up, mlp.down


class CpuTextDecoder(nn.Module):
    """Does what `TextDecoder` does, with what `PackedCrossAttention` keeps of the encoder's states."""

    def __init__(self, decoder: TextDecoder) -> None:
        super().__init__()
        self.embedding, self.positions = decoder.embedding, decoder.positions
        self.norm, self.projection = decoder.norm, decoder.projection
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self.layers = nn.ModuleList(_Layer(layer) for layer in layers)

    def memory(self, states: Tensor) -> list[PackedRows]:
        """As `TextDecoder.memory`."""
        out: list[PackedRows] = []
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            out += layer.cross_attention.keys_values(states)
        return out

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        self_cache: Sequence[KeyValue],
        memory: Sequence[PackedRows],
        mask: Tensor,
        attention_heads: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `TextDecoder.forward`."""
        batch, count = tokens.shape
        span = mask.shape[-1]
        rows = torch.arange(batch)[:, None]
        x = self.embedding(tokens).to(self.positions.dtype) + self.positions[positions]
        windows, width = memory[0].shape[0], x.shape[-1]
        hidden = torch.zeros(mask.shape, dtype=x.dtype).masked_fill_(~mask, float("-inf"))
        scores: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            shape = (batch, count, layer.heads, width // layer.heads)
            normed = layer.attention_norm(x)
            keys, values = self_cache[index]
            keys[rows, :, positions] = layer.key(normed).view(shape)
            values[rows, :, positions] = layer.value(normed).view(shape)
            query = layer.query(normed).view(shape).transpose(1, 2)
            attended = _look_back(query, keys[:, :, :span], values[:, :, :span], hidden)
            x = _add_product(attended.transpose(1, 2).flatten(2), x, layer.out.weight, layer.out.bias, "add")

            normed = layer.cross_attention_norm(x).view(windows, -1, width)
            heads = attention_heads.get(index) if attention_heads else None
            attended, score = layer.cross_attention(normed, memory[2 * index], memory[2 * index + 1], heads)
            if score is not None:
                scores.append(score)
            x = x + attended.view(batch, count, width)
            x = _add_product(layer.up(layer.mlp_norm(x)), x, layer.down.weight, layer.down.bias, "add")
        return self.norm(x), torch.cat(scores, dim=1) if scores else None

    def logits(self, states: Tensor) -> Tensor:
        """As `TextDecoder.logits`."""
        assert self.projection is not None
        return self.projection(states)


def _look_back(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attention of (batch, heads, queries, head width) over what was written; ``hidden``: minus infinity where not."""
    if query.shape[2] > 1:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=hidden)
    # For one query, products and sums as they stand take 0.4 of the time: nothing is laid out for it first.
    scores = (keys * (query * query.shape[-1] ** -0.5)).sum(dim=-1) + hidden[:, :, 0]
    return (values * scores.softmax(dim=-1)[..., None]).sum(dim=2, keepdim=True)
