"""An encoder read by two: a Transformer decoder that attends to it, and a CTC head (Watanabe et al. 2017).

The decoder (Vaswani et al. 2017, with its layer norms before what they feed) writes tokens one by one from all that
the encoder says; the CTC head, which may be left out, keeps it to the order in which things are said
(https://doi.org/10.1109/JSTSP.2017.2763455). The decoder keeps no state: its caller owns the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.ctc_head import EncoderConfig, build_encoder
from stapes.models.waveform import is_real

KeyValue = tuple[Tensor, Tensor]
"""Keys and values (batch, heads, positions, head width)."""


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of a model with a decoder. The decoder is as wide as the encoder."""

    encoder: EncoderConfig
    vocab_size: int
    decoder_layers: int = 6
    decoder_heads: int = 4
    decoder_mlp_width: int = 1024
    decoder_dropout: float = 0.1
    has_ctc: bool = True
    """Whether the encoder's states are read by a CTC head as well."""
    head_dropout: float = 0.1
    search_ctc_weight: float = 0.3
    """CTC's share when both heads decode."""
    search_beam: int = 4
    """Texts that are followed side by side when both heads decode."""

    @property
    def width(self) -> int:
        """Width of the decoder."""
        return self.encoder.state_width

    @property
    def frame_seconds(self) -> float:
        """Seconds from one state of the encoder to the next."""
        return self.encoder.frame_seconds


class Attention(nn.Module):
    """Multi-head attention, behind a layer norm of the queries' side."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """(batch, positions, width) → (batch, heads, positions, head width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> KeyValue:
        """Keys and values of states (batch, positions, width)."""
        return self.split(self.key(x)), self.split(self.value(x))

    def attend(self, normed: Tensor, key_value: KeyValue, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """(batch, queries, width) → the same; mask: true where a query may look."""
        out = F.scaled_dot_product_attention(
            self.split(self.query(normed)),
            *key_value,
            attn_mask=mask,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=causal,
        )
        return self.dropout(self.out(out.transpose(1, 2).flatten(2)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's states, MLP."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width, dropout = config.width, config.decoder_dropout
        self.attention = Attention(width, config.decoder_heads, dropout)
        self.cross_attention = Attention(width, config.decoder_heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.decoder_mlp_width)
        self.down = nn.Linear(config.decoder_mlp_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: KeyValue | Tensor, mask: Tensor | None, cache: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """x: (batch, new tokens, width), which follow those in ``cache``; with a cache one at a time.

        memory: the encoder's states (batch, states, width), or `Attention.keys_values` of them; mask
        (batch, 1, 1, states). Returns the states and the cache with the new tokens in it.
        """
        if isinstance(memory, Tensor):
            memory = self.cross_attention.keys_values(memory)
        x, cache = self.attend_back(x, cache)
        x = x + self.cross_attention.attend(self.cross_attention.norm(x), memory, mask)
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.mlp_norm(x)))))), cache

    def attend_back(self, x: Tensor, cache: KeyValue | None) -> tuple[Tensor, KeyValue]:
        """Self-attention over the tokens so far."""
        normed = self.attention.norm(x)
        key, value = self.attention.keys_values(normed)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
        x = x + self.attention.attend(normed, (key, value), None, causal=cache is None)
        return x, (key, value)

    def frame_weights(self, x: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        """How much each token looks at each of the encoder's states, (batch, tokens, states): the mean over heads."""
        cross = self.cross_attention
        query, key = cross.split(cross.query(cross.norm(x))), cross.split(cross.key(states))
        scores = query.float() @ key.float().transpose(-1, -2) / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1).mean(1)


class Decoder(nn.Module):
    """Token embeddings, sinusoidal positions, a stack of layers; the output projection is the embedding itself."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        self.dropout = nn.Dropout(config.decoder_dropout)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def memory(self, states: Tensor) -> list[KeyValue]:
        """Keys and values of the encoder's states (batch, states, width), for each layer."""
        out = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            out.append(layer.cross_attention.keys_values(states))
        return out

    def forward(
        self, tokens: Tensor, memory: list[KeyValue] | Tensor, mask: Tensor | None, cache: list[KeyValue] | None = None
    ) -> tuple[Tensor, list[KeyValue]]:
        """Logits (batch, tokens, vocabulary) of what follows each token, and the cache with these tokens in it.

        tokens: (batch, tokens), one at a time where there is a ``cache`` of the ones before. memory: the encoder's
        states (batch, states, width), or what `memory` made of them. mask: (batch, 1, 1, states), true for real states;
        None: all are.
        """
        x = self._embed(tokens, 0 if cache is None else cache[0][0].shape[2])
        grown: list[KeyValue] = []
        for index, layer in enumerate(self.layers):
            source = memory if isinstance(memory, Tensor) else memory[index]
            x, entry = layer(x, source, mask, None if cache is None else cache[index])
            grown.append(entry)
        return F.linear(self.norm(x), self.embedding.weight), grown

    def _embed(self, tokens: Tensor, before: int) -> Tensor:
        width = self.config.width
        x = self.embedding(tokens) * math.sqrt(width)
        positions = torch.arange(before, before + tokens.shape[1], device=x.device)
        return self.dropout(x + sinusoids_at(positions, width).to(x.dtype))

    @torch.inference_mode()
    def frame_weights(self, tokens: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        """How much writing what follows each token looks at each state, (batch, tokens, states): mean over layers."""
        x, total = self._embed(tokens, 0), torch.zeros((), device=states.device)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            total = total + layer.frame_weights(layer.attend_back(x, None)[0], states, mask)
            x, _ = layer(x, states, mask)
        return total / len(self.layers)


def sinusoids_at(positions: Tensor, width: int) -> Tensor:
    """Fixed encodings (positions, width) of positions (positions,): sines in the first half, cosines in the second."""
    rates = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2, device=positions.device))
    angles = positions[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Hybrid(nn.Module):
    """The network."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config.encoder)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.width, config.vocab_size) if config.has_ctc else None
        self.decoder = Decoder(config)

    def ctc_logits(self, states: Tensor) -> Tensor:
        """Logits of the CTC head (batch, states, vocabulary)."""
        assert self.head is not None, "this model has no CTC head"
        return self.head(self.head_dropout(states))

    def forward(
        self, mel: Tensor, tokens: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Teacher-forced logits of the decoder (batch, tokens, vocabulary), those of the CTC head, real states.

        mel: log-mel spectrogram (batch, mel bins, frames of 10 ms), ``lengths`` (batch,) of which are real; None: all.
        tokens: (batch, tokens), each row begins with the start token.
        """
        states, counts = self.encoder(mel, lengths)
        mask = None if lengths is None else state_mask(counts, states.shape[1])
        logits, _ = self.decoder(tokens, states, mask)
        return logits, None if self.head is None else self.ctc_logits(states), counts

    @torch.inference_mode()
    def greedy(self, states: Tensor, counts: Tensor, start: int, end: int, limit: int | None = None) -> list[list[int]]:
        """The likeliest next token, again and again, for each row; without the start and the end token.

        states, counts: what the encoder gave. At most ``limit`` tokens, or as many as there are states.
        """
        batch, most = len(states), min(limit or states.shape[1], states.shape[1])
        memory, mask = self.decoder.memory(states), state_mask(counts, states.shape[1])
        tokens = torch.full((batch, 1), start, device=states.device)
        ended = torch.zeros(batch, dtype=torch.bool, device=states.device)
        written: list[Tensor] = []
        cache = None
        for step in range(most):
            logits, cache = self.decoder(tokens, memory, mask, cache)
            tokens = logits[:, -1].argmax(dim=-1, keepdim=True)
            ended = ended | (tokens[:, 0] == end) | (step >= counts)
            tokens = tokens.masked_fill(ended[:, None], end)
            written.append(tokens)
            if bool(ended.all()):
                break
        rows = torch.cat(written, dim=1).tolist() if written else [[] for _ in range(batch)]
        return [row[: row.index(end)] if end in row else row for row in rows]


def state_mask(counts: Tensor, states: int) -> Tensor:
    """(batch, 1, 1, states): true for real states; a row without any looks at its first one."""
    return is_real(counts.clamp(min=1), states)[:, None, None]
