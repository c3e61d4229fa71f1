"""Whisper as the graphs that other runtimes run: the encoder, and three ways through the decoder.

The same network as `stapes.models.whisper`, written down as such runtimes like it: matrices stand as MatMul takes them,
the cache of keys and values is only read (what is new comes out, for the caller to write), and keys of the encoder's
states lie as the product with a query reads them. Softmax and layer norms are computed in float32 whatever the weights.

Shapes: R windows, G candidates of each, N tokens, C cached positions, S states, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.whisper import MLP, Attention, DecoderLayer, EncoderLayer, Whisper


class Product(nn.Module):
    """A linear layer whose matrix is (inputs, outputs). Takes the weights out of the layer that it is made from."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.contiguous(), requires_grad=False)
        self.bias = linear.bias
        del linear.weight  # so that no two copies of a large model are held

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """A layer norm that is computed in float32."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().float(), requires_grad=False)
        self.bias = nn.Parameter(norm.bias.detach().float(), requires_grad=False)
        self.epsilon = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight, self.bias, self.epsilon).to(x.dtype)


class Projections(nn.Module):
    """The four matrices of an attention. The query's scale is part of its weights."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.heads = attention.heads
        self.head_width = attention.query.out_features // attention.heads
        scale = 1 / math.sqrt(self.head_width)
        attention.query.weight.data = attention.query.weight.data * scale
        attention.query.bias.data = attention.query.bias.data * scale
        self.query, self.key = Product(attention.query), Product(attention.key)
        self.value, self.out = Product(attention.value), Product(attention.out)

    def split(self, x: Tensor) -> Tensor:
        """(…, N, width) → (…, heads, N, head width)."""
        return x.unflatten(-1, (self.heads, self.head_width)).transpose(-2, -3)

    def merge(self, x: Tensor) -> Tensor:
        """(…, heads, N, head width) → (…, N, width), and through the last matrix."""
        return self.out(x.transpose(-2, -3).flatten(-2))


class Feed(nn.Module):
    """The MLP."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = Product(mlp.up), Product(mlp.down)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis, in float32."""
    return scores.float().softmax(dim=-1).to(scores.dtype)


class EncoderBlock(nn.Module):
    """A layer of the encoder."""

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(layer.attention_norm), Projections(layer.attention)
        self.mlp_norm, self.mlp = Norm(layer.mlp_norm), Feed(layer.mlp)

    def forward(self, x: Tensor) -> Tensor:
        attention, normed = self.attention, self.attention_norm(x)
        query, key = attention.split(attention.query(normed)), attention.split(attention.key(normed))
        value = attention.split(attention.value(normed))
        x = x + attention.merge(softmax(query @ key.transpose(-1, -2)) @ value)
        return x + self.mlp(self.mlp_norm(x))


class EncoderGraph(nn.Module):
    """Log-mel spectrogram → states."""

    def __init__(self, model: Whisper) -> None:
        super().__init__()
        encoder = model.encoder
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        self.positions = encoder.positions
        self.layers = nn.ModuleList(EncoderBlock(layer) for layer in encoder.layers if isinstance(layer, EncoderLayer))
        self.norm = Norm(encoder.norm)

    def forward(self, mel: Tensor) -> Tensor:
        """mel (R, bins, 2S) in float32 → states (R, S, width), in the dtype of the weights."""
        x = F.gelu(self.conv1(mel.to(self.conv1.weight.dtype)))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class DecoderBlock(nn.Module):
    """A layer of the decoder."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(layer.attention_norm), Projections(layer.attention)
        self.cross_attention_norm = Norm(layer.cross_attention_norm)
        self.cross_attention = Projections(layer.cross_attention)
        self.mlp_norm, self.mlp = Norm(layer.mlp_norm), Feed(layer.mlp)

    def memory(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Of states (R, S, width): keys (R, heads, head width, S) and values (R, heads, S, head width)."""
        cross = self.cross_attention
        return cross.split(cross.key(states)).transpose(-1, -2), cross.split(cross.value(states))

    def after_attention(
        self, x: Tensor, memory: tuple[Tensor, Tensor], heads: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """What follows self-attention, for x (R, N, width); also the scores (R, heads wanted, N, S)."""
        cross = self.cross_attention
        scores = cross.split(cross.query(self.cross_attention_norm(x))) @ memory[0]
        x = x + cross.merge(softmax(scores) @ memory[1])
        return x + self.mlp(self.mlp_norm(x)), scores[:, list(heads)] if heads else None


class Decoder(nn.Module):
    """What the decoder's graphs share: their weights."""

    def __init__(self, model: Whisper) -> None:
        super().__init__()
        decoder = model.decoder
        dtype = decoder.positions.dtype
        # One matrix for both ends: a token's embedding is one of its columns.
        self.embedding = nn.Parameter(decoder.embedding.weight.detach().T.to(dtype).contiguous(), requires_grad=False)
        self.positions = decoder.positions
        self.blocks = nn.ModuleList(DecoderBlock(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer))
        self.norm = Norm(decoder.norm)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(R, N) ids and positions → (R, N, width)."""
        columns = self.embedding.index_select(1, tokens.flatten()).T
        return columns.unflatten(0, (tokens.shape[0], tokens.shape[1])) + self.positions[positions]

    def logits(self, states: Tensor) -> Tensor:
        """(…, width) → (…, V) float32."""
        return (states @ self.embedding).float()

    def read(
        self, tokens: Tensor, memory: Sequence[tuple[Tensor, Tensor]], heads: Mapping[int, Sequence[int]]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Read tokens (R, N) from the first on: states, keys and values of each layer, scores of ``heads``."""
        count = tokens.shape[1]
        x = self.embed(tokens, torch.arange(count, device=tokens.device).expand(tokens.shape[0], -1))
        hidden = torch.ones(count, count, dtype=torch.bool, device=tokens.device).triu(1)
        cache: list[Tensor] = []
        found: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, DecoderBlock)
            attention, normed = block.attention, block.attention_norm(x)
            query, key = attention.split(attention.query(normed)), attention.split(attention.key(normed))
            value = attention.split(attention.value(normed))
            cache += [key, value]
            scores = (query @ key.transpose(-1, -2)).masked_fill(hidden, torch.finfo(query.dtype).min)
            x = x + attention.merge(softmax(scores) @ value)
            x, seen = block.after_attention(x, memory[index], heads.get(index, ()))
            found += [] if seen is None else [seen]
        return self.norm(x), cache, found


class FirstStepGraph(nn.Module):
    """Reads prompts: what the decoder keeps of the encoder's states, and what follows the prompts."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, states: Tensor, tokens: Tensor, picked: Tensor) -> tuple[Tensor, ...]:
        """states (R, S, width), tokens (R, N) padded at the end, picked (R, P): the tokens whose logits are wanted.

        Returns logits (R, P, V); for each layer the prompt's keys and values (R, heads, N, head width); for each layer
        the memory, as `DecoderBlock.memory`.
        """
        decoder = self.decoder
        memory = [block.memory(states) for block in decoder.blocks if isinstance(block, DecoderBlock)]
        read, cache, _ = decoder.read(tokens, memory, {})
        chosen = read.gather(1, picked[..., None].expand(-1, -1, read.shape[2]))
        return (decoder.logits(chosen), *cache, *(part for pair in memory for part in pair))


class StepGraph(nn.Module):
    """One more token for each candidate."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, positions: Tensor, cache: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
        """tokens and positions (R, G); cache: keys and values of each layer, (R, G, heads, C, head width), of which
        those before a candidate's position are real; memory: as `FirstStepGraph` gave it.

        Returns logits (R, G, V), and the new keys and values of each layer, (R, G, heads, head width).
        """
        decoder = self.decoder
        x = decoder.embed(tokens, positions)
        unwritten = torch.arange(cache[0].shape[3], device=tokens.device) >= positions[..., None, None, None]
        out: list[Tensor] = []
        for index, block in enumerate(decoder.blocks):
            assert isinstance(block, DecoderBlock)
            attention, normed = block.attention, block.attention_norm(x)
            shape = (attention.heads, attention.head_width)
            query = attention.query(normed).unflatten(-1, shape)[..., None, :]  # (R, G, heads, 1, head width)
            key, value = (each(normed).unflatten(-1, shape) for each in (attention.key, attention.value))
            out += [key, value]
            past = query @ cache[2 * index].transpose(-1, -2)
            past = past.masked_fill(unwritten, torch.finfo(past.dtype).min)
            weights = softmax(torch.cat([(query * key[..., None, :]).sum(-1, keepdim=True), past], dim=-1))
            attended = weights[..., :1] * value[..., None, :] + weights[..., 1:] @ cache[2 * index + 1]
            x = x + attention.out(attended.flatten(2))
            x, _ = block.after_attention(x, (memory[2 * index], memory[2 * index + 1]))
        return [decoder.logits(decoder.norm(x)), *out]


class AlignGraph(nn.Module):
    """Reads whole texts again, for the times of their words."""

    def __init__(self, decoder: Decoder, heads: Mapping[int, Sequence[int]], end: int) -> None:
        """``heads``: layer → heads that follow the speech. ``end``: the end token, behind which there is no text."""
        super().__init__()
        self.decoder, self.heads, self.end = decoder, dict(heads), end

    def forward(self, tokens: Tensor, following: Tensor, memory: list[Tensor]) -> tuple[Tensor, Tensor]:
        """tokens (R, N); following (R, N): the text token that is asked about behind each.

        Returns scores (R, heads wanted, N, S) and the probabilities (R, N) of ``following`` among text tokens, float32.
        """
        decoder = self.decoder
        pairs = [(memory[2 * index], memory[2 * index + 1]) for index in range(len(decoder.blocks))]
        states, _, scores = decoder.read(tokens, pairs, self.heads)
        logits = decoder.logits(states)[..., : self.end]
        chosen = logits.gather(2, following[..., None])[..., 0]
        return torch.cat(scores, dim=1).float(), (chosen - logits.logsumexp(dim=-1)).exp()
