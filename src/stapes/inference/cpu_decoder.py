"""Whisper's decoder on packed layers, with few operations for each token.

A step over a few windows is hundreds of small operations, and calling them takes as long as a third of the reading of
weights. So residual sums are added by the product before them, and what all layers need is made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.inference.packed import PackedLinear, PackedMLP
from stapes.inference.packed_memory import PackedCrossAttention, PackedRows
from stapes.models.whisper import CrossAttention, DecoderLayer, KeyValue, TextDecoder


class CpuCrossAttention(nn.Module):
    """Cross-attention in fp32 by two batched products: flash attention has nothing to tile for a single query.

    Keys and values lie with the states last. A query's products then take half of the time that they take where the
    head's width is last (Whisper base, MKL on an EPYC with AVX2).
    """

    def __init__(self, cross: CrossAttention) -> None:
        super().__init__()
        self.heads = cross.heads
        self.query, self.key, self.value, self.out = cross.query, cross.key, cross.value, cross.out

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """As `Attention.keys_values`, but each (rows, heads, head width, 1500)."""
        return self._split(self.key(states)), self._split(self.value(states))

    def _split(self, x: Tensor) -> Tensor:
        """(rows, positions, width) → (rows, heads, head width, positions)."""
        return x.unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, heads: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `CrossAttention.forward`."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = (query * query.shape[-1] ** -0.5) @ keys
        attended = scores.softmax(dim=-1) @ values.transpose(-1, -2)
        return self.out(attended.transpose(1, 2).flatten(2)), scores[:, list(heads)] if heads else None


class _Layer(nn.Module):
    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        super().__init__()
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, PackedMLP)
        assert isinstance(mlp.down, PackedLinear)
        assert isinstance(attention.out, PackedLinear)
        self.attention_norm, self.cross_attention_norm = layer.attention_norm, layer.cross_attention_norm
        self.mlp_norm = layer.mlp_norm
        self.heads = attention.heads
        self.query, self.key, self.value, self.out = attention.query, attention.key, attention.value, attention.out
        cross = CpuCrossAttention if dtype == torch.float32 else PackedCrossAttention
        self.cross_attention = cross(layer.cross_attention)
        self.up, self.down = mlp.up, mlp.down


class CpuTextDecoder(nn.Module):
    """Does what `TextDecoder` does, with what the layers' cross-attention keeps of the encoder's states."""

    def __init__(self, decoder: TextDecoder) -> None:
        super().__init__()
        self.embedding, self.positions = decoder.embedding, decoder.positions
        self.norm, self.projection = decoder.norm, decoder.projection
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self.layers = nn.ModuleList(_Layer(layer, decoder.positions.dtype) for layer in layers)

    def memory(self, states: Tensor) -> list[Tensor] | list[PackedRows]:
        """As `TextDecoder.memory`."""
        out: list = []
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            cross = layer.cross_attention
            assert isinstance(cross, CpuCrossAttention | PackedCrossAttention)
            out += cross.keys_values(states)
        return out

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        self_cache: Sequence[KeyValue],
        memory: Sequence[Tensor] | Sequence[PackedRows],
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
            x = layer.out.add(attended.transpose(1, 2).flatten(2), x)

            normed = layer.cross_attention_norm(x).view(windows, -1, width)
            heads = attention_heads.get(index) if attention_heads else None
            attended, score = layer.cross_attention(normed, memory[2 * index], memory[2 * index + 1], heads)
            if score is not None:
                scores.append(score)
            x = x + attended.view(batch, count, width)
            x = layer.down.add(layer.up(layer.mlp_norm(x)), x)
        return self.norm(x), torch.cat(scores, dim=1) if scores else None

    def logits(self, states: Tensor) -> Tensor:
        """As `TextDecoder.logits`."""
        assert self.projection is not None
        return self.projection(states)


def _look_back(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attention of (batch, heads, queries, head width) over what was written; ``hidden``: minus infinity where not."""
    if query.shape[2] > 1 or query.dtype == torch.float32:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=hidden)
    # For one query in bf16, products and sums as they stand take 0.4 of the time: nothing is laid out for it first. In
    # fp32 they take twice as long.
    scores = (keys * (query * query.shape[-1] ** -0.5)).sum(dim=-1) + hidden[:, :, 0]
    return (values * scores.softmax(dim=-1)[..., None]).sum(dim=2, keepdim=True)
