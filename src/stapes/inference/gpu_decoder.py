"""Whisper's decoder as a GPU likes it: a step of eleven kernels a layer, every cache found by index.

Tried and left: the norm folded into the product behind it (every program finds the same means: 2.5 times as long), and
the two halves of a batch on streams beside each other, one at attention while the other is between (they get in each
other's way: 10 % longer).

The caches are pools: windows and rows name their place in them, so that nothing is copied when one joins, leaves,
moves or continues another beam. The residual stream is kept in float32; it is small, and half of the error of bf16
came from rounding it (measured: the share of LibriSpeech clips with exactly the fp32 text).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.decode_attention import cross_attention, self_attention, store_memory
from stapes.kernels.decoder_linear import Norm, add_norm, linear, linear_parts
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
    """What a step works on: tokens and positions (rows,), int64; group: the most rows that a window has."""

    tokens: Tensor
    positions: Tensor
    rows: Rows
    windows: Windows
    group: int


@dataclass(frozen=True)
class _Linear:
    """weight (outputs, inputs); bias (outputs,), float32."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    qkv: _Linear
    out: _Linear
    cross_norm: Norm
    cross_query: _Linear
    cross_out: _Linear
    mlp_norm: Norm
    up: _Linear
    down: _Linear
    memory_weight: Tensor
    memory_bias: Tensor


class GpuDecoder:
    """Takes over the weights of a `TextDecoder`, whose layers are gone afterwards."""

    def __init__(self, decoder: TextDecoder, config: WhisperConfig) -> None:
        self.config = config
        self.places = decoder.positions.detach()
        self.dtype, self.device = self.places.dtype, self.places.device
        self.embedding = decoder.embedding.weight.detach().to(self.dtype)
        self.norm = _norm(decoder.norm)
        self.layers: list[_Layer] = []
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            own, cross, mlp = layer.attention, layer.cross_attention, layer.mlp
            no_bias = torch.zeros_like(own.query.bias)
            self.layers.append(
                _Layer(
                    attention_norm=_norm(layer.attention_norm),
                    qkv=_Linear(
                        torch.cat([own.query.weight, own.key.weight, own.value.weight]).detach(),
                        torch.cat([own.query.bias, no_bias, own.value.bias]).detach().float(),
                    ),
                    out=_linear(own.out),
                    cross_norm=_norm(layer.cross_attention_norm),
                    cross_query=_linear(cross.query),
                    cross_out=_linear(cross.out),
                    mlp_norm=_norm(layer.mlp_norm),
                    up=_linear(mlp.up),
                    down=_linear(mlp.down),
                    memory_weight=torch.cat([cross.key.weight, cross.value.weight]).detach(),
                    memory_bias=torch.cat([no_bias, cross.value.bias]).detach(),
                )
            )
            decoder.layers[index] = torch.nn.Identity()
        self._programs = _programs(self.device)

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
            projected = F.linear(states, layer.memory_weight, layer.memory_bias)
            store_memory(projected, place.keys, place.values, place.scales, rows)

    def step(self, batch: Batch, cache: Sequence[KeyValue], memory: Sequence[Memory]) -> Tensor:
        """Read one token in each row → logits (rows, vocabulary), float32."""
        positions, rows, windows = batch.positions, batch.rows, batch.windows
        stream = embed(batch.tokens, positions, self.embedding, self.places)
        parts, bias = None, None
        splits = self._splits(len(windows.first))
        for layer, (keys, values), place in zip(self.layers, cache, memory, strict=True):
            qkv = self._linear(self._add(stream, parts, bias, layer.attention_norm), layer.qkv)
            attended = self_attention(qkv, keys, values, rows.cells, rows.source, positions, rows.live)
            normed = self._add(stream, self._parts(attended, layer.out), layer.out.bias, layer.cross_norm)
            attended = cross_attention(
                self._linear(normed, layer.cross_query),
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
            normed = self._add(stream, self._parts(attended, layer.cross_out), layer.cross_out.bias, layer.mlp_norm)
            parts, bias = self._parts(self._linear(normed, layer.up, gelu=True), layer.down), layer.down.bias
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
        stream = embed(tokens.reshape(-1), positions.repeat(batch), self.embedding, self.places)
        parts, bias = None, None
        first = torch.arange(0, batch * count, count, dtype=torch.int32, device=self.device)
        counts = torch.full((batch,), count, dtype=torch.int32, device=self.device)
        live = torch.ones(batch * count, dtype=torch.int32, device=self.device)
        splits = self._splits(batch)
        scores: list[Tensor] = []
        for index, (layer, place) in enumerate(zip(self.layers, memory, strict=True)):
            qkv = self._linear(self._add(stream, parts, bias, layer.attention_norm), layer.qkv)
            query, key, value = qkv.view(batch, count, 3, heads_in_all, -1).permute(2, 0, 3, 1, 4)
            if cache is not None and cells is not None:
                cache[index][0][cells, :, :count] = key
                cache[index][1][cells, :, :count] = value
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended = attended.transpose(1, 2).reshape(batch * count, -1)
            normed = self._add(stream, self._parts(attended, layer.out), layer.out.bias, layer.cross_norm)
            query = self._linear(normed, layer.cross_query)
            if heads and (wanted := heads.get(index)):
                scores.append(self._scores(query.view(batch, count, heads_in_all, -1), place, rows, list(wanted)))
            attended = cross_attention(
                query, place.keys, place.values, place.scales, first, counts, rows, live, count, splits
            )
            normed = self._add(stream, self._parts(attended, layer.cross_out), layer.cross_out.bias, layer.mlp_norm)
            parts, bias = self._parts(self._linear(normed, layer.up, gelu=True), layer.down), layer.down.bias
        states = self._add(stream, parts, bias, self.norm)
        return states.view(batch, count, -1), torch.cat(scores, dim=1) if scores else None

    def logits(self, states: Tensor) -> Tensor:
        """(rows, width) as ``read`` gives them → (rows, vocabulary), float32."""
        return linear(states, self.embedding, None, dtype=torch.float32)

    def _linear(self, x: Tensor, layer: _Linear, *, gelu: bool = False) -> Tensor:
        if len(x) <= _FEW_ROWS:
            return linear(x, layer.weight, layer.bias, gelu=gelu)
        out = F.linear(x, layer.weight, None if layer.bias is None else layer.bias.to(x.dtype))
        return F.gelu(out) if gelu else out

    def _parts(self, x: Tensor, layer: _Linear) -> Tensor:
        """The product without its bias, as parts to be added to the residual stream."""
        if len(x) <= _FEW_ROWS:
            return linear_parts(x, layer.weight)
        return F.linear(x, layer.weight).float()[None]

    def _add(self, stream: Tensor, parts: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
        return add_norm(stream, parts, bias, norm, self.dtype)

    def _scores(self, query: Tensor, place: Memory, rows: Tensor, heads: list[int]) -> Tensor:
        at = rows.long()[:, None], torch.tensor(heads, device=self.device)
        keys = place.keys[at].float()
        if place.scales is not None:
            keys *= place.scales[0][at][:, :, None]
        queries = query[:, :, heads].transpose(1, 2).float()
        return queries @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])

    def _splits(self, windows: int) -> int:
        """Programs to share one window's states among, so that all of the GPU reads."""
        wanted = self._programs / (windows * self.config.decoder_heads)
        return next((splits for splits in _SPLITS if splits >= wanted), _SPLITS[-1])


def _linear(layer: torch.nn.Linear) -> _Linear:
    return _Linear(layer.weight.detach(), layer.bias.detach().float())


def _norm(norm: torch.nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps)


def _programs(device: torch.device) -> int:
    """Programs that keep the memory of a GPU busy: four for each of its processors."""
    if device.type != "cuda":
        return 1
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
