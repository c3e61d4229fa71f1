"""Whisper (Radford et al. 2022, https://arxiv.org/abs/2212.04356): the whole network, in plain PyTorch.

An encoder turns 30 s of log-mel spectrogram into 1500 states; a decoder writes text from them, token by token.
The decoder keeps no state: its caller owns the caches of keys and values, so that windows can share a batch, join
it and leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes of the network. Those of every published checkpoint follow from its weights and its head counts."""

    mel_bins: int
    vocab_size: int
    width: int
    encoder_layers: int
    encoder_heads: int
    decoder_layers: int
    decoder_heads: int
    audio_context: int = 1500
    text_context: int = 448

    @property
    def is_multilingual(self) -> bool:
        """English-only models have one token fewer."""
        return self.vocab_size >= 51865

    @property
    def languages(self) -> int:
        """99 up to large-v2, 100 (with Cantonese) from large-v3 on, 1 for English-only models."""
        return self.vocab_size - 51766 if self.is_multilingual else 1


# Keys and values of one layer, each (rows, heads, positions, head width).
KeyValue = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Multi-head attention; the key projection has no bias, as published."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        """(batch, positions, width) → (batch, heads, positions, head width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> KeyValue:
        """Project states (batch, positions, width) into keys and values."""
        return self.split(self.key(x)), self.split(self.value(x))

    def attend(self, query: Tensor, key_value: KeyValue, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Weigh the values for queries (batch, heads, queries, head width) → (batch, queries, width)."""
        out = F.scaled_dot_product_attention(query, *key_value, attn_mask=mask, is_causal=causal)
        return self.out(out.transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    """Attention over the encoder's states."""

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, heads: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend for x (rows, queries, width); also the scores (rows, heads, queries, 1500) of ``heads``, if any."""
        query = self.split(self.query(x))
        scores = None
        if heads:
            scores = query[:, heads] @ keys[:, heads].transpose(-1, -2) / math.sqrt(query.shape[-1])
        return self.attend(query, (keys, values)), scores


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = 0.0
        """Of what attention and MLP add, in training; OpenAI trained without."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        attention = self.attention
        attended = attention.attend(attention.split(attention.query(normed)), attention.keys_values(normed))
        x = x + _drop(attended, self)
        return x + _drop(self.mlp(self.mlp_norm(x)), self)


class AudioEncoder(nn.Module):
    """Two convolutions, sinusoidal positions, a stack of layers."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        width = config.width
        self.conv1 = nn.Conv1d(config.mel_bins, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.empty(config.audio_context, width))  # sinusoids(…), read from the file
        self.layers = nn.ModuleList(EncoderLayer(width, config.encoder_heads) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, mel: Tensor) -> Tensor:
        """(batch, mel bins, 3000 frames of 10 ms) → (batch, 1500 states of 20 ms, width)."""
        x = self.embed(mel)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def embed(self, mel: Tensor) -> Tensor:
        """What the first layer gets, (batch, 1500, width)."""
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        return x + self.positions


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's states, MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.cross_attention_norm = nn.LayerNorm(width)
        self.cross_attention = CrossAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = 0.0
        """Of what attention and MLP add, in training."""

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        """Whole texts at once, for training: x (batch, tokens, width) over the encoder's states (batch, 1500, width).

        Writing token by token goes through `TextDecoder.forward`, which keeps keys and values.
        """
        attention, cross = self.attention, self.cross_attention
        normed = self.attention_norm(x)
        query = attention.split(attention.query(normed))
        x = x + _drop(attention.attend(query, attention.keys_values(normed), causal=True), self)
        attended, _ = cross(self.cross_attention_norm(x), *cross.keys_values(states))
        x = x + _drop(attended, self)
        return x + _drop(self.mlp(self.mlp_norm(x)), self)


def _drop(x: Tensor, layer: EncoderLayer | DecoderLayer) -> Tensor:
    return F.dropout(x, layer.dropout) if layer.dropout and layer.training else x


class TextDecoder(nn.Module):
    """Token and position embeddings, a stack of layers; the output projection is the embedding itself."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        width = config.width
        # Not nn.Embedding(…): its random start, on the meta device, would import half of PyTorch's compiler.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, width), freeze=False)
        self.positions = nn.Parameter(torch.empty(config.text_context, width))
        self.layers = nn.ModuleList(DecoderLayer(width, config.decoder_heads) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(width)
        self.projection: nn.Module | None = None
        """Stands in for the embedding as output projection where an engine has a faster one."""

    def memory(self, states: Tensor) -> list[Tensor]:
        """What the decoder keeps of the encoder's states (rows, 1500, width).

        Keys and values of the first layer, of the second and so on, each (rows, heads, 1500, head width).
        """
        out = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            out += layer.cross_attention.keys_values(states)
        return out

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        self_cache: Sequence[KeyValue],
        memory: Sequence[Tensor],
        mask: Tensor,
        attention_heads: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Read ``tokens`` and return the states they lead to.

        tokens, positions: (batch, count), int64. Their keys and values are written into ``self_cache`` at
        ``positions``. self_cache: per layer, (batch, heads, text context, head width). memory: see ``memory``, with
        batch = rows × group: the candidates of one window are neighbours in the batch and share a row. mask:
        (batch, 1, count, span) of what each token may look back at, True for yes; ``span`` bounds how far the cache
        is read. attention_heads: layer → heads whose scaled cross-attention scores (before the softmax) are wanted.

        Returns states (batch, count, width), normalised, ready for ``logits``; and the scores
        (batch, heads wanted, count, 1500), or None.
        """
        batch, count = tokens.shape
        span = mask.shape[-1]
        rows = torch.arange(batch, device=tokens.device)[:, None]
        x = self.embedding(tokens).to(self.positions.dtype) + self.positions[positions]
        scores: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            normed = layer.attention_norm(x)
            attention = layer.attention
            keys, values = self_cache[index]
            # (batch, count, heads, head width) at [row, :, position]: an in-place scatter, valid under CUDA graphs.
            keys[rows, :, positions] = attention.key(normed).unflatten(-1, (attention.heads, -1))
            values[rows, :, positions] = attention.value(normed).unflatten(-1, (attention.heads, -1))
            query = attention.split(attention.query(normed))
            x = x + attention.attend(query, (keys[:, :, :span], values[:, :, :span]), mask)

            keys, values = memory[2 * index], memory[2 * index + 1]
            normed = layer.cross_attention_norm(x).reshape(keys.shape[0], -1, x.shape[-1])  # (rows, group × count, …)
            heads = attention_heads.get(index) if attention_heads else None
            attended, score = layer.cross_attention(normed, keys, values, heads)
            if score is not None:
                scores.append(score)
            x = x + attended.reshape(batch, count, -1)
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.norm(x), torch.cat(scores, dim=1) if scores else None

    def teacher_forced(self, tokens: Tensor, states: Tensor) -> Tensor:
        """States (batch, count, width) that whole texts lead to, ready for ``logits``; what training needs.

        tokens: (batch, count), at the positions from 0 on. states: the encoder's, (batch, 1500, width).
        """
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, states)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """(…, width) → (…, vocabulary)."""
        if self.projection is not None:
            return self.projection(states)
        return F.linear(states, self.embedding.weight.to(states.dtype))


class Whisper(nn.Module):
    """The encoder and the decoder."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = AudioEncoder(config)
        self.decoder = TextDecoder(config)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced logits (batch, count, vocabulary) of tokens (batch, count) for mel (batch, bins, 3000)."""
        batch, count = tokens.shape
        config = self.config
        head = config.width // config.decoder_heads
        empty = mel.new_zeros(batch, config.decoder_heads, count, head)
        cache = [(empty.clone(), empty.clone()) for _ in range(config.decoder_layers)]
        positions = torch.arange(count, device=mel.device).expand(batch, -1)
        mask = torch.ones(count, count, dtype=torch.bool, device=mel.device).tril()[None, None]
        memory = self.decoder.memory(self.encoder(mel))
        states, _ = self.decoder(tokens, positions, cache, memory, mask)
        return self.decoder.logits(states)


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position encodings (length, width): sines in the first half, cosines in the second."""
    rates = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
