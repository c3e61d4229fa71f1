"""Whisper's decoder as a GPU likes it: a step of eleven kernels a layer, every cache found by index.

Tried and left: the norm folded into the product behind it (every program finds the same means: 2.5 times as long), and
the two halves of a batch on streams beside each other, one at attention while the other is between (they get in each
other's way: 10 % longer).

The caches are pools: windows and rows name their place in them, so that nothing is copied when one joins, leaves,
moves or continues another beam. The residual stream is kept in float32: it is small here, and rounded nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.inference.gpu_attention import attend_causally
from stapes.inference.quantized import NormedQuantized
from stapes.kernels.decode_attention import cross_attention, self_attention
from stapes.kernels.decoder_linear import Norm, add_norm, linear, linear_parts
from stapes.kernels.store_memory import store_memory
from stapes.kernels.write_token import embed
from stapes.models.whisper import DecoderLayer, KeyValue, TextDecoder, WhisperConfig

_FEW_ROWS = 256
"""Up to so many rows a product is bound by reading its weights, and our kernel is the faster one."""

_SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Memory:
    """Keys and values of the encoder's states, of one layer for every window: (rows, heads, 1500, head width).

    ``scales``: of 8-bit ones, two of (rows, heads, head width), float32.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Windows:
    """Which rows of a batch belong to which window, and where in the memory a window is; all (windows,), int32."""

    first: Tensor
    count: Tensor
    memory: Tensor


@dataclass(frozen=True)
class Rows:
    """Where each row of a batch writes and finds its keys and values; see ``kernels.decode_attention``."""

    cells: Tensor
    source: Tensor
    live: Tensor


@dataclass(frozen=True)
class Batch:
    """What a step works on: tokens and positions (rows,), int64; group: the most rows that a window has.

    successive: the rows of a window are one text, token behind token, and share its cell.
    """

    tokens: Tensor
    positions: Tensor
    rows: Rows
    windows: Windows
    group: int
    successive: bool = False


class _Product(Protocol):
    """A linear layer of the decoder, or several of one input, their outputs behind each other."""

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """(rows, inputs) → (rows, outputs)."""
        ...

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is to be added up and to the residual stream: (splits, rows, outputs), and a bias that it lacks."""
        ...


class _Linear:
    """On plain weights."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.weight = (
            torch.cat([layer.weight for layer in layers]).detach() if layers[1:] else layers[0].weight.detach()
        )
        biases = [torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias for layer in layers]
        self.bias = torch.cat(biases).detach().float()

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        if len(x) <= _FEW_ROWS:
            return linear(x, self.weight, self.bias, gelu=gelu)
        out = F.linear(x, self.weight, self.bias.to(x.dtype))
        return F.gelu(out) if gelu else out

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if len(x) <= _FEW_ROWS:
            return linear_parts(x, self.weight), self.bias
        return F.linear(x, self.weight).float()[None], self.bias


class _Quantized:
    """On quantised weights."""

    def __init__(self, *layers: nn.Module) -> None:
        self.product = NormedQuantized(layers)

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        return self.product(x, gelu=gelu)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.product(x, dtype=torch.float32)[None], None


def _product(*layers: nn.Module) -> _Product:
    plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return _Linear(*plain) if len(plain) == len(layers) else _Quantized(*layers)


class _Layer:
    def __init__(self, layer: DecoderLayer) -> None:
        own, cross, mlp = layer.attention, layer.cross_attention, layer.mlp
        self.attention_norm = _norm(layer.attention_norm)
        self.qkv = _product(own.query, own.key, own.value)
        self.out = _product(own.out)
        self.cross_norm = _norm(layer.cross_attention_norm)
        self.cross_query = _product(cross.query)
        self.cross_out = _product(cross.out)
        self.mlp_norm = _norm(layer.mlp_norm)
        self.up, self.down = _product(mlp.up), _product(mlp.down)
        self.memory = _product(cross.key, cross.value)


class GpuDecoder:
    """Takes over the weights of a `TextDecoder`, whose layers are gone afterwards."""

    def __init__(self, decoder: TextDecoder, config: WhisperConfig) -> None:
        self.config = config
        self.places = decoder.positions.detach()
        self.dtype, self.device = self.places.dtype, self.places.device
        self.embedding = decoder.embedding
        if isinstance(self.embedding, nn.Embedding):
            self.embedding.to(self.dtype)
        self.projection = decoder.projection
        self.norm = _norm(decoder.norm)
        self.layers: list[_Layer] = []
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            self.layers.append(_Layer(layer))
            decoder.layers[index] = nn.Identity()
        self._programs = _programs(self.device)
        self._heads: dict[tuple[int, ...], Tensor] = {}

    def new_memory(self, rows: int, quantized: bool) -> list[Memory]:
        """Room for the encoder's states of ``rows`` windows."""
        config = self.config
        head = config.width // config.decoder_heads
        shape = (rows, config.decoder_heads, config.audio_context, head)
        kind = torch.int8 if quantized else self.dtype
        out = []
        for _ in range(config.decoder_layers):
            keys, values = (torch.zeros(shape, dtype=kind, device=self.device) for _ in range(2))
            scales = None
            if quantized:
                small = (rows, config.decoder_heads, head)
                scales = (torch.zeros(small, device=self.device), torch.zeros(small, device=self.device))
            out.append(Memory(keys, values, scales))
        return out

    def new_cache(self, cells: int) -> list[KeyValue]:
        """Room for the keys and values of ``cells`` texts: (cells, heads, text context, head width) each."""
        config = self.config
        shape = (cells, config.decoder_heads, config.text_context, config.width // config.decoder_heads)
        make = lambda: torch.zeros(shape, dtype=self.dtype, device=self.device)  # noqa: E731
        return [(make(), make()) for _ in range(config.decoder_layers)]

    def remember(self, states: Tensor, memory: Sequence[Memory], rows: Tensor) -> None:
        """Project the encoder's states (windows, 1500, width) into the memory's ``rows`` (windows,), int32."""
        for layer, place in zip(self.layers, memory, strict=True):
            projected = layer.memory(states.flatten(0, 1)).unflatten(0, states.shape[:2])
            store_memory(projected, place.keys, place.values, place.scales, rows)

    def step(self, batch: Batch, cache: Sequence[KeyValue], memory: Sequence[Memory]) -> Tensor:
        """Read one token in each row → logits (rows, vocabulary), float32."""
        positions, rows, windows = batch.positions, batch.rows, batch.windows
        stream = self._embed(batch.tokens, positions)
        parts, bias = None, None
        splits = self._splits(len(windows.first))
        for layer, (keys, values), place in zip(self.layers, cache, memory, strict=True):
            qkv = layer.qkv(self._add(stream, parts, bias, layer.attention_norm))
            if batch.successive:  # before any row looks back at its neighbours'
                _, key, value = qkv.view(len(qkv), 3, self.config.decoder_heads, -1).unbind(1)
                at = rows.cells.long()
                keys[at, :, positions], values[at, :, positions] = key, value
            attended = self_attention(qkv, keys, values, rows.cells, rows.source, positions, rows.live)
            normed = self._add(stream, *layer.out.parts(attended), layer.cross_norm)
            attended = cross_attention(
                layer.cross_query(normed),
                place.keys,
                place.values,
                place.scales,
                windows.first,
                windows.count,
                windows.memory,
                rows.live,
                batch.group,
                splits,
            )
            normed = self._add(stream, *layer.cross_out.parts(attended), layer.mlp_norm)
            parts, bias = layer.down.parts(layer.up(normed, gelu=True))
        return self.logits(self._add(stream, parts, bias, self.norm))

    def read(
        self,
        tokens: Tensor,
        memory: Sequence[Memory],
        rows: Tensor,
        cache: Sequence[KeyValue] | None = None,
        cells: Tensor | None = None,
        heads: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Read whole sequences (windows, count) of tokens, padded at the end.

        rows (windows,), int32: where in the memory each window is. cache, cells (windows,), int64: where keys and
        values are to be kept, if they are. heads: layer → heads whose scaled scores over the encoder's states, before
        the softmax, are wanted. Returns states (windows, count, width), ready for ``logits``, and the scores (windows,
        heads wanted, count, 1500), or None.
        """
        batch, count = tokens.shape
        positions = torch.arange(count, device=self.device)
        heads_in_all = self.config.decoder_heads
        stream = self._embed(tokens.reshape(-1), positions.repeat(batch))
        parts, bias = None, None
        first = torch.arange(0, batch * count, count, dtype=torch.int32, device=self.device)
        counts = torch.full((batch,), count, dtype=torch.int32, device=self.device)
        live = torch.ones(batch * count, dtype=torch.int32, device=self.device)
        splits = self._splits(batch)
        scores: list[Tensor] = []
        for index, (layer, place) in enumerate(zip(self.layers, memory, strict=True)):
            qkv = layer.qkv(self._add(stream, parts, bias, layer.attention_norm))
            query, key, value = qkv.view(batch, count, 3, heads_in_all, -1).permute(2, 0, 3, 1, 4)
            if cache is not None and cells is not None:
                cache[index][0][cells, :, :count] = key
                cache[index][1][cells, :, :count] = value
            attended = attend_causally(query, key, value).transpose(1, 2).reshape(batch * count, -1)
            normed = self._add(stream, *layer.out.parts(attended), layer.cross_norm)
            query = layer.cross_query(normed)
            if heads and (wanted := heads.get(index)):
                scores.append(self._scores(query.view(batch, count, heads_in_all, -1), place, rows, list(wanted)))
            attended = cross_attention(
                query, place.keys, place.values, place.scales, first, counts, rows, live, count, splits
            )
            normed = self._add(stream, *layer.cross_out.parts(attended), layer.mlp_norm)
            parts, bias = layer.down.parts(layer.up(normed, gelu=True))
        states = self._add(stream, parts, bias, self.norm)
        return states.view(batch, count, -1), torch.cat(scores, dim=1) if scores else None

    def logits(self, states: Tensor) -> Tensor:
        """(rows, width) as ``read`` gives them → (rows, vocabulary), float32."""
        if self.projection is not None:
            return self.projection(states, dtype=torch.float32)
        assert isinstance(self.embedding, nn.Embedding)
        return linear(states, self.embedding.weight, None, dtype=torch.float32)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if isinstance(self.embedding, nn.Embedding):
            return embed(tokens, positions, self.embedding.weight, self.places)
        return self.embedding(tokens.clamp_min(0)) + self.places[positions].float()

    def _add(self, stream: Tensor, parts: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
        return add_norm(stream, parts, bias, norm, self.dtype)

    def _scores(self, query: Tensor, place: Memory, rows: Tensor, heads: list[int]) -> Tensor:
        at = rows.long()[:, None], self._indices(heads)
        keys = place.keys[at].float()
        if place.scales is not None:
            keys *= place.scales[0][at][:, :, None]
        queries = query[:, :, at[1]].transpose(1, 2).float()
        return queries @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])

    def _indices(self, heads: list[int]) -> Tensor:
        """Kept on the device: it would be waited for when they are sent."""
        key = tuple(heads)
        if key not in self._heads:
            self._heads[key] = torch.tensor(heads, device=self.device)
        return self._heads[key]

    def _splits(self, windows: int) -> int:
        """Programs to share one window's states among, so that all of the GPU reads."""
        wanted = self._programs / (windows * self.config.decoder_heads)
        return next((splits for splits in _SPLITS if splits >= wanted), _SPLITS[-1])


def _norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps)


def _programs(device: torch.device) -> int:
    """Programs that keep the memory of a GPU busy: four for each of its processors."""
    if device.type != "cuda":
        return 1
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
