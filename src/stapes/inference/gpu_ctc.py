"""wav2vec 2.0 as a GPU likes it: a batch is one long sequence, and all that counts is a few large products.

The recordings of a batch lie behind each other, in the waveform as in every layer: there is no padding to compute, and
no shape that depends on the length of one recording, for which MIOpen would compile its kernels. Convolutions are
products with windows of frames, which the kernel before leaves side by side; attention stays within a recording. The
numbers are those of `models.wav2vec2` up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.inference.ctc_graphs import Graphs, Norms
from stapes.inference.ctc_packing import POSITIONS, Packing, Tables, overhang, pack, unpack
from stapes.inference.gpu_lane import upload
from stapes.inference.lacking_norm import LackingNorm
from stapes.kernels.packed_attention import packed_attention
from stapes.kernels.positions import add_positions, position_windows, toeplitz
from stapes.kernels.wave_convolution import (
    ChannelNorm,
    FirstConvolution,
    LayerNorm,
    Windows,
    activate,
    first_convolution,
)
from stapes.kernels.wave_moments import moments
from stapes.models.wav2vec2 import ConvLayer, EncoderLayer, GroupNormConvLayer, LanguageAdapter, Statistics, Wav2Vec2
from stapes.models.waveform import Moments, normalization

_CHUNK = 16_384
"""Slots whose convolutions are computed at once: 5 minutes of sound, whose windows are 1.6 GB in half precision."""


@dataclass(frozen=True)
class _Convolution:
    """A convolution behind the first, and the windows that are made of what it puts out."""

    weight: Tensor
    bias: Tensor
    norm: LayerNorm | None
    windows: Windows


@dataclass(frozen=True)
class _Linear:
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Adapter:
    norm: LackingNorm
    down: _Linear
    up: _Linear

    def add(self, x: Tensor) -> None:
        x += self.up(F.relu(self.down(self.norm(x))))


@dataclass(frozen=True)
class _Layer:
    """``first`` and ``second`` are the norms before attention and MLP, or after them where the model has them there."""

    pre_norm: bool
    first: LackingNorm
    qkv: _Linear
    out: Tensor
    second: LackingNorm
    up: _Linear
    down: Tensor
    adapter: _Adapter | None

    def __call__(self, x: Tensor, queries: Tensor, heads: int) -> Tensor:
        """x: the residual stream (slots, width), which may be overwritten."""
        attended = packed_attention(self.qkv(self.first(x) if self.pre_norm else x), queries, heads)
        torch.addmm(x, attended, self.out.t(), out=x)
        if self.pre_norm:
            torch.addmm(x, _linear_gelu(self.second(x), self.up), self.down.t(), out=x)
        else:
            x = self.first(x)
            torch.addmm(x, _linear_gelu(x, self.up), self.down.t(), out=x)
            x = self.second(x)
        if self.adapter is not None:
            self.adapter.add(x)
        return x


class GpuCtcEncoder:
    """Computes what a `Wav2Vec2` does, for inference, on the device that the model is on.

    ``dtype``: of weights and activations; sums, norms and what the waveform meets are float32. The model itself is
    left as it is and not kept. It runs on the CPU too, through the kernels' references.
    """

    def __init__(self, model: Wav2Vec2, dtype: torch.dtype) -> None:
        config, encoder = model.config, model.encoder
        self.config, self.dtype = config, dtype
        self.device = encoder.projection.linear.weight.device
        self._hop = config.hop
        self._overhang = overhang(config)
        convolutions = [model.feature_extractor.first, *model.feature_extractor.layers]
        seen = [Windows(*shape) for shape in zip(config.conv_kernels, config.conv_strides, strict=True)][1:]
        first = convolutions[0]
        assert isinstance(first, ConvLayer | GroupNormConvLayer)
        assert seen, "a single convolution is no feature extractor"
        self._group = copy.deepcopy(first).float() if isinstance(first, GroupNormConvLayer) else None
        self._first = FirstConvolution(
            weight=first.conv.weight.detach()[:, 0].float().t().contiguous(),
            bias=_bias(first.conv),
            stride=config.conv_strides[0],
            norm=_layer_norm(first.norm) if isinstance(first.norm, nn.LayerNorm) else None,
        )
        self._first_windows = seen[0]
        self._convolutions = [
            _Convolution(_flat(layer.conv.weight).to(dtype), _bias(layer.conv), _layer_norm(layer.norm), windows)
            for layer, windows in zip(model.feature_extractor.layers, [*seen[1:], Windows()], strict=True)
            if isinstance(layer, ConvLayer)
        ]
        self._feature_norm = _layer_norm(encoder.projection.norm)
        self._projection = _linear(encoder.projection.linear, dtype)
        positions = encoder.positions.conv
        self._position_weight = toeplitz(positions.weight.detach().to(dtype), config.position_groups, POSITIONS)
        self._position_bias = _bias(positions)
        lack = torch.zeros(config.width, device=self.device)
        self._norm = LackingNorm.of(encoder.norm, lack)
        self._layers: list[_Layer] = []
        for layer in encoder.layers:
            assert isinstance(layer, EncoderLayer)
            block, lack = _take(layer, lack, dtype)
            self._layers.append(block)
        self._last_norm = LackingNorm.of(encoder.norm, lack)
        self._downsampling = copy.deepcopy(model.downsampling).to(dtype) if model.downsampling is not None else None
        self._head = None if model.head is None else _linear(model.head, dtype)
        self._unchanged = torch.tensor([0.0, 1.0], device=self.device)
        self._graphs = Graphs(self._network, self.device, dtype)

    def pack(self, lengths: Sequence[int], begins: Sequence[int] | None = None) -> Packing:
        """Lay recordings of so many samples out. ``begins``: their first samples; by default one follows the other."""
        return pack(self.config, lengths, begins, self.device)

    @torch.inference_mode()
    def normalization(self, samples: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """(shift, scale) that `stapes.models.waveform.normalize_waveform` gives each recording, (recordings,)."""
        return normalization(self._moments(samples, packing, 1, 1))

    @torch.inference_mode()
    def packed_states(
        self,
        samples: Tensor,
        packing: Packing,
        statistics: Statistics | None = None,
        normalization: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """States behind the last layer, (slots, width): the rows of a recording begin at its start.

        samples: (count,), float32, on the device. ``statistics``: as the model's. ``normalization``: shift and scale
        for each recording, (recordings,): its sample x is heard as (x + shift) × scale.
        """
        norms = self._norms(samples, packing, statistics, normalization)
        return self._graphs(samples, packing, norms).clone()

    @torch.inference_mode()
    def packed_logits(
        self,
        samples: Tensor,
        packing: Packing,
        statistics: Statistics | None = None,
        normalization: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Logits (slots, vocabulary), arguments as in `packed_states`. Not for models that downsample."""
        assert self._head is not None, "this model has no CTC head"
        assert self._downsampling is None, "a model that downsamples has frames of its own: call it"
        norms = self._norms(samples, packing, statistics, normalization)
        return self._head(self._graphs(samples, packing, norms))

    @torch.inference_mode()
    def packed_features(
        self,
        samples: Tensor,
        packing: Packing,
        statistics: Statistics | None = None,
        normalization: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What the convolutions make of the samples, (slots, channels), arguments as in `packed_states`."""
        return self._features(samples, packing.tables, self._norms(samples, packing, statistics, normalization))

    @torch.inference_mode()
    def states(
        self, waveform: Tensor, lengths: Tensor | Sequence[int] | None = None, statistics: Statistics | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Wav2Vec2.states`; beyond the real frames there are zeros.

        Lengths that are on the device are waited for; those of the host are not.
        """
        rows, samples = waveform.shape
        if lengths is None:
            lengths = [samples] * rows
        real = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        packing = self.pack(real, range(0, rows * samples, samples) if samples else [0] * rows)
        flat = waveform.reshape(-1) if waveform.numel() else waveform.new_zeros(1)
        x = self.packed_states(flat, packing, statistics)
        frames = self.config.feature_count(max(samples, self.config.receptive_field))
        x = unpack(x, packing, frames)
        if self._downsampling is not None:
            x = self._downsampling(x, upload(packing.counts, self.device))
        counts = self.config.frame_count(torch.tensor(real))
        return x, counts.to(self.device, non_blocking=True)

    @torch.inference_mode()
    def __call__(
        self, waveform: Tensor, lengths: Tensor | Sequence[int] | None = None, statistics: Statistics | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Wav2Vec2.forward`, but for what training hides; beyond the real frames the logits mean nothing."""
        assert self._head is not None, "this model has no CTC head"
        x, counts = self.states(waveform, lengths, statistics)
        return self._head(x), counts

    def _norms(
        self,
        samples: Tensor,
        packing: Packing,
        statistics: Statistics | None,
        normalization: tuple[Tensor, Tensor] | None,
    ) -> Norms:
        if normalization is None:
            affine = self._unchanged.expand(len(packing.lengths), 2).contiguous()
        else:
            affine = torch.stack(normalization, 1).float()
        if self._group is None:
            return Norms(affine, None)
        return Norms(affine, self._channel_norm(samples, packing, statistics, normalization))

    def _network(self, samples: Tensor, tables: Tables, norms: Norms) -> Tensor:
        """States, (slots, width); nothing is looked at by the host."""
        x = self._projection(self._features(samples, tables, norms))
        add_positions(x, self._position_product(x, tables.blocks), tables.places, self._position_bias)
        if not self.config.pre_norm:
            x = self._norm(x)
        for layer in self._layers:
            x = layer(x, tables.queries, self.config.heads)
        return self._last_norm(x) if self.config.pre_norm else x

    def _features(self, samples: Tensor, tables: Tables, norms: Norms) -> Tensor:
        """(slots, channels), normalised as the projection wants it."""
        frames = self._hop // self._first.stride
        out = []
        for start in range(0, tables.slots.shape[1], _CHUNK):
            chunk = tables.slots[:, start : start + _CHUNK + self._overhang].contiguous()
            x = first_convolution(
                samples, chunk, norms.affine, self._first, norms.channels, frames, self._first_windows, self.dtype
            )
            for layer in self._convolutions:
                x = F.linear(x, layer.weight)
                after = self._feature_norm if layer is self._convolutions[-1] else None
                x = activate(x, layer.bias, layer.norm, layer.windows, after=after)
            out.append(x[:_CHUNK])
        return torch.cat(out) if len(out) > 1 else out[0]

    def _channel_norm(
        self,
        samples: Tensor,
        packing: Packing,
        statistics: Statistics | None,
        normalization: tuple[Tensor, Tensor] | None,
    ) -> ChannelNorm:
        """The group norm as a scale and a shift."""
        assert self._group is not None
        conv, norm = self._group.conv, self._group.norm
        if statistics is None:
            of_windows = self._moments(samples, packing, conv.kernel_size[0], conv.stride[0])
            if normalization is not None:
                of_windows = of_windows.scaled(*normalization)
            statistics = self._group.statistics(of_windows)
        scale = norm.weight.double() * (statistics.variance.double() + norm.eps).rsqrt()
        shift = norm.bias.double() - statistics.mean.double() * scale
        return ChannelNorm(scale.float(), shift.float())

    def _moments(self, samples: Tensor, packing: Packing, kernel: int, stride: int) -> Moments:
        recordings = packing.tables.recordings
        longest = max(int(packing.lengths.max(initial=0)), kernel)
        sums = moments(samples, recordings, longest, kernel, stride)
        count = ((recordings[1] - kernel).div(stride, rounding_mode="floor") + 1).clamp(min=0)
        return Moments(count.double(), sums[:, -1], sums[:, :-1])

    def _position_product(self, x: Tensor, blocks: Tensor) -> Tensor:
        out = []
        for part in blocks.split(2 * _CHUNK // POSITIONS, dim=1):
            groups, kernel = self.config.position_groups, self.config.position_kernel
            windows = position_windows(x, part.contiguous(), groups, kernel, POSITIONS)
            out.append(torch.bmm(windows, self._position_weight))
        return torch.cat(out, 1) if len(out) > 1 else out[0]


def _take(layer: EncoderLayer, lack: Tensor, dtype: torch.dtype) -> tuple[_Layer, Tensor]:
    """The same layer, behind layers that left ``lack`` out of the residual stream; and what is left out behind it."""
    attention, mlp = layer.attention, layer.mlp
    parts = [attention.query, attention.key, attention.value]
    qkv = _Linear(
        torch.cat([part.weight.detach() for part in parts]).to(dtype),
        torch.cat([part.bias.detach() for part in parts]).to(dtype),
    )
    out, down = attention.out.bias.detach().float(), mlp.down.bias.detach().float()
    if layer.pre_norm:
        first, second = LackingNorm.of(layer.attention_norm, lack), LackingNorm.of(layer.mlp_norm, lack + out)
        lack = lack + out + down
    else:
        first, second = LackingNorm.of(layer.attention_norm, out), LackingNorm.of(layer.mlp_norm, down)
    adapter = None
    if layer.adapter is not None:
        adapter = _adapter(layer.adapter, lack, dtype)
    block = _Layer(
        layer.pre_norm,
        first,
        qkv,
        attention.out.weight.detach().to(dtype),
        second,
        _linear(mlp.up, dtype),
        mlp.down.weight.detach().to(dtype),
        adapter,
    )
    return block, lack


def _adapter(adapter: LanguageAdapter, lack: Tensor, dtype: torch.dtype) -> _Adapter:
    return _Adapter(LackingNorm.of(adapter.norm, lack), _linear(adapter.down, dtype), _linear(adapter.up, dtype))


def _linear_gelu(x: Tensor, layer: _Linear) -> Tensor:
    """A linear layer and its GELU; in half precision on a GPU the product computes the GELU too, by its tanh form."""
    if x.dtype != torch.float32 and x.device.type == "cuda":
        return torch.ops.aten._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    return F.gelu(layer(x))


def _linear(layer: nn.Linear, dtype: torch.dtype) -> _Linear:
    return _Linear(layer.weight.detach().to(dtype), layer.bias.detach().to(dtype))


def _layer_norm(norm: nn.Module | None) -> LayerNorm | None:
    if not isinstance(norm, nn.LayerNorm):
        return None
    return LayerNorm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps)


def _bias(conv: nn.Conv1d) -> Tensor:
    if conv.bias is None:
        return torch.zeros(conv.out_channels, device=conv.weight.device)
    return conv.bias.detach().float()


def _flat(weight: Tensor) -> Tensor:
    """(outputs, inputs, kernel) → (outputs, kernel × inputs): the frames of a window side by side."""
    return weight.detach().transpose(1, 2).reshape(weight.shape[0], -1).contiguous()
