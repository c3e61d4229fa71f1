"""Whisper's layers, computed the way a CPU likes it. The numbers are the same up to fp32 rounding.

Three things are done differently from the plain model, each measured on an EPYC with AVX-512:

- The encoder's attention runs head by head and block by block through oneDNN, so that a block of scores stays in the
  cache: 1.7 times as fast as PyTorch's flash attention on the CPU, which multiplies with MKL. With AVX2 and nothing
  wider that is the faster one, 1.4 times on an EPYC, and is taken.
- The decoder is another (`cpu_decoder`).
- Residual sums are added by the product before them.

In bf16, on CPUs that have units for it, the encoder takes 0.6 times as long, and then a quarter of the time is the
softmax: it leaves out what it can (`attend`).

Tried and left: attending over the encoder's states themselves, (qW)·X in place of q·(XW). It needs a twelfth of the
memory and no projection, but reads X twice a layer and so takes half as long again for a step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.inference.cpu_decoder import CpuTextDecoder
from stapes.inference.packed import PackedLinear, PackedMLP, has_only_avx2
from stapes.models.whisper import EncoderLayer, Whisper

_BLOCK_BYTES = 1_536_000
"""Scores that are held at once: of 256 queries over 1500 keys in fp32."""

_LARGEST_SCORE = 80.0
"""Exponentials of scores up to this, and of as many keys as there are, neither overflow nor vanish in bf16. Those of
Whisper's encoders are below 70, with the bound that is used."""

_linear = torch.ops.mkldnn._linear_pointwise.default


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention without a mask, its scale in the queries: (batch, heads, positions, head width) of all three, but
    ``value`` (batch, heads, head width, positions)."""
    attended = torch.empty_like(query)
    block = _BLOCK_BYTES // (query.element_size() * key.shape[2])
    plain = query.dtype != torch.float32 and _is_harmless(query, key)
    if plain:
        # Sums of the weights come out of the product with the values, as one more row.
        value = torch.cat([value, value.new_ones(*value.shape[:2], 1, value.shape[3])], dim=2)
    for window in range(query.shape[0]):
        for head in range(query.shape[1]):
            keys, values, out = key[window, head], value[window, head], attended[window, head]
            for first in range(0, query.shape[2], block):
                scores = _linear(query[window, head, first : first + block], keys, None, "none", [], "none")
                weights = scores.exp_() if plain else scores.softmax(dim=-1)
                sums = _linear(weights, values, None, "none", [], "none")
                out[first : first + block] = sums[:, :-1] / sums[:, -1:] if plain else sums
    return attended


def _is_harmless(query: Tensor, key: Tensor) -> bool:
    """Whether exponentials of scores can be summed up as they are: no score is beyond the product of lengths."""
    longest = [each.square().sum(dim=-1, dtype=torch.float32).max().sqrt() for each in (query, key)]
    return bool(longest[0] * longest[1] < _LARGEST_SCORE)


class CpuEncoderLayer(nn.Module):
    """An encoder layer on packed weights."""

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        self.attention_norm, self.attention = layer.attention_norm, layer.attention
        self.mlp_norm, self.mlp = layer.mlp_norm, layer.mlp
        self.flash = has_only_avx2()
        """Whether PyTorch's own attention is faster."""

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.attention, self.mlp
        assert isinstance(attention.out, PackedLinear)
        assert isinstance(mlp, PackedMLP)
        assert isinstance(mlp.down, PackedLinear)
        normed = self.attention_norm(x)
        scale = 1 / math.sqrt(x.shape[-1] // attention.heads)
        query = attention.split(attention.query(normed) * scale)
        key, value = attention.split(attention.key(normed)), attention.split(attention.value(normed))
        if self.flash:
            attended = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        else:
            attended = attend(query.contiguous(), key.contiguous(), value.transpose(-1, -2).contiguous())
        x = attention.out.add(attended.transpose(1, 2).flatten(2), x)
        return mlp.down.add(mlp.up(self.mlp_norm(x)), x)


def adapt(model: Whisper) -> Whisper:
    """Put the layers of this file into a model whose linear layers are packed."""
    for index, layer in enumerate(model.encoder.layers):
        assert isinstance(layer, EncoderLayer)
        model.encoder.layers[index] = CpuEncoderLayer(layer)
    model.decoder = CpuTextDecoder(model.decoder)  # type: ignore[assignment]
    return model
