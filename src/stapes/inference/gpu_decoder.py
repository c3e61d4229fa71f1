"""Whisper's decoder as a GPU likes it: a step of eight kernels a layer, every cache found by index.

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
from stapes.kernels.decoder_linear import NormedLinear, linear
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
class _Layer:
    qkv: NormedLinear
    out: NormedLinear
    cross_query: NormedLinear
    cross_out: NormedLinear
    up: NormedLinear
    down: NormedLinear
    memory_weight: Tensor
    memory_bias: Tensor


class GpuDecoder:
    """Takes over the weights of a `TextDecoder`, whose layers are gone afterwards."""

    def __init__(self, decoder: TextDecoder, config: WhisperConfig) -> None:
        self.config = config
        self.places = decoder.positions.detach()
        self.dtype, self.device = self.places.dtype, self.places.device
        self.embedding = decoder.embedding.weight.detach().to(self.dtype)
        self.vocabulary = NormedLinear.of(self.embedding, None, decoder.norm)
        self.layers: list[_Layer] = []
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            own, cross, mlp = layer.attention, layer.cross_attention, layer.mlp
            no_bias = torch.zeros_like(own.query.bias)
            self.layers.append(
                _Layer(
                    qkv=NormedLinear.of(
                        torch.cat([own.query.weight, own.key.weight, own.value.weight]).detach(),
                        torch.cat([own.query.bias, no_bias, own.value.bias]).detach(),
                        layer.attention_norm,
                    ),
                    out=NormedLinear.of(own.out.weight.detach(), own.out.bias),
                    cross_query=NormedLinear.of(
                        cross.query.weight.detach(), cross.query.bias, layer.cross_attention_norm
                    ),
                    cross_out=NormedLinear.of(cross.out.weight.detach(), cross.out.bias),
                    up=NormedLinear.of(mlp.up.weight.detach(), mlp.up.bias, layer.mlp_norm),
                    down=NormedLinear.of(mlp.down.weight.detach(), mlp.down.bias),
                    memory_weight=torch.cat([cross.key.weight, cross.value.weight]).detach(),
                    memory_bias=torch.cat([no_bias, cross.value.bias]).detach(),
                )
            )
            decoder.layers[index] = torch.nn.Identity()
        most = -(-config.vocab_size // 16) * -(-_FEW_ROWS // 16)
        self._counters = torch.zeros(most, dtype=torch.int32, device=self.device)
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

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[KeyValue],
        memory: Sequence[Memory],
        rows: Rows,
        windows: Windows,
        group: int,
    ) -> Tensor:
        """Read one token in each row: tokens, positions (rows,), int64 → logits (rows, vocabulary), float32.

        group: the most rows that a window has.
        """
        wide, narrow = embed(tokens, positions, self.embedding, self.places)
        splits = self._splits(len(windows.first))
        for layer, (keys, values), place in zip(self.layers, cache, memory, strict=True):
            qkv = self._linear(narrow, layer.qkv)
            attended = self_attention(qkv, keys, values, rows.cells, rows.source, positions, rows.live)
            narrow = self._linear(attended, layer.out, residual=wide)
            query = self._linear(narrow, layer.cross_query)
            attended = cross_attention(
                query,
                place.keys,
                place.values,
                place.scales,
                windows.first,
                windows.count,
                windows.memory,
                rows.live,
                group,
                splits,
            )
            narrow = self._linear(attended, layer.cross_out, residual=wide)
            up = self._linear(narrow, layer.up, gelu=True)
            narrow = self._linear(up, layer.down, residual=wide)
        return self.logits(narrow)

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
        wide, narrow = embed(tokens.reshape(-1), positions.repeat(batch), self.embedding, self.places)
        first = torch.arange(0, batch * count, count, dtype=torch.int32, device=self.device)
        counts = torch.full((batch,), count, dtype=torch.int32, device=self.device)
        live = torch.ones(batch * count, dtype=torch.int32, device=self.device)
        splits = self._splits(batch)
        scores: list[Tensor] = []
        for index, (layer, place) in enumerate(zip(self.layers, memory, strict=True)):
            qkv = self._linear(narrow, layer.qkv).view(batch, count, 3, heads_in_all, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            if cache is not None and cells is not None:
                cache[index][0][cells, :, :count] = key
                cache[index][1][cells, :, :count] = value
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended = attended.transpose(1, 2).reshape(batch * count, -1)
            narrow = self._linear(attended, layer.out, residual=wide)
            query = self._linear(narrow, layer.cross_query)
            if heads and (wanted := heads.get(index)):
                scores.append(self._scores(query.view(batch, count, heads_in_all, -1), place, rows, list(wanted)))
            attended = cross_attention(
                query, place.keys, place.values, place.scales, first, counts, rows, live, count, splits
            )
            narrow = self._linear(attended, layer.cross_out, residual=wide)
            up = self._linear(narrow, layer.up, gelu=True)
            narrow = self._linear(up, layer.down, residual=wide)
        return narrow.view(batch, count, -1), torch.cat(scores, dim=1) if scores else None

    def logits(self, states: Tensor) -> Tensor:
        """(rows, width) as ``step`` and ``read`` leave them → (rows, vocabulary), float32."""
        return self._linear(states, self.vocabulary, dtype=torch.float32)

    def _linear(
        self,
        x: Tensor,
        layer: NormedLinear,
        *,
        gelu: bool = False,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if len(x) <= _FEW_ROWS:
            return linear(x, layer, gelu=gelu, residual=residual, dtype=dtype, counters=self._counters)
        bias = layer.bias
        if layer.gain is not None:
            x = F.layer_norm(x.float(), x.shape[-1:], layer.gain, layer.norm_bias, layer.eps).to(x.dtype)
            bias = layer.plain_bias
        out = F.linear(x, layer.weight, None if bias is None else bias.to(x.dtype))
        if gelu:
            out = F.gelu(out)
        if residual is not None:
            out = residual.add_(out)
        return out.to(dtype or x.dtype)

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


def _programs(device: torch.device) -> int:
    """Programs that keep the memory of a GPU busy: four for each of its processors."""
    if device.type != "cuda":
        return 1
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
