"""Whisper's encoder as a GPU likes it: few large products. The numbers are the same up to rounding.

Query, key and value are one product; the products before a residual sum add into it, and their biases wait for the next
layer norm, which moves 2.5 TB/s on an H200 (PyTorch's own 1.5, a copy 4.3); the convolutions are products over unfolded
frames, which also keeps MIOpen from compiling a kernel for every new shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.inference.gpu_attention import attend
from stapes.inference.lacking_norm import LackingNorm
from stapes.inference.quantized import Fp8Linear, QuantizedEncoderLayer
from stapes.kernels.fp8_rows import round_rows
from stapes.kernels.fp8_weights import Fp8Weight, concat, of_kind
from stapes.models.whisper import Attention, AudioEncoder, EncoderLayer


@dataclass(frozen=True)
class _Layer:
    attention_norm: LackingNorm
    qkv: tuple[Tensor, Tensor]
    out: Tensor
    mlp_norm: LackingNorm
    up: tuple[Tensor, Tensor]
    down: Tensor
    lack: Tensor

    @classmethod
    def of(cls, layer: EncoderLayer, lack: Tensor) -> _Layer:
        """The same layer, behind layers that left ``lack`` out of the residual stream."""
        between = lack + layer.attention.out.bias.float()
        return cls(
            LackingNorm.of(layer.attention_norm, lack),
            merge(layer.attention),
            layer.attention.out.weight,
            LackingNorm.of(layer.mlp_norm, between),
            (layer.mlp.up.weight, layer.mlp.up.bias),
            layer.mlp.down.weight,
            between + layer.mlp.down.bias.float(),
        )

    def __call__(self, x: Tensor, batch: int, heads: int) -> None:
        """Add to the residual stream x (batch × frames, width), in place."""
        attended = attend(F.linear(self.attention_norm(x), *self.qkv), batch, heads)
        torch.addmm(x, attended, self.out.t(), out=x)
        torch.addmm(x, _up(self.mlp_norm(x), *self.up), self.down.t(), out=x)


_Norm = tuple[Tensor, Tensor, float]
"""Gain, bias and epsilon of a layer norm, in float32."""


@dataclass(frozen=True)
class _Fp8Product:
    """A weight in 8-bit floats, (outputs, inputs), a scale for each output (1, outputs), and the bias."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Fp8Weight, bias: Tensor) -> _Fp8Product:
        return cls(weight.values, weight.scales[None].contiguous(), bias)

    def __call__(
        self, x: Tensor, *, delta: Tensor | None = None, norm: _Norm | None = None, gelu: bool = False
    ) -> Tensor:
        """(rows, inputs) → (rows, outputs), behind what `round_rows` does with ``delta``, ``norm`` and ``gelu``."""
        rows, scale = round_rows(x, self.weight.dtype, delta=delta, norm=norm, gelu=gelu)
        return torch.ops.aten._scaled_mm(
            rows, self.weight.t(), scale, self.scale, bias=self.bias, out_dtype=self.bias.dtype, use_fast_accum=True
        )


@dataclass(frozen=True)
class _PlainProduct:
    """A weight that stays as it is among others in 8-bit floats; called as these."""

    weight: Tensor
    bias: Tensor

    def __call__(
        self, x: Tensor, *, delta: Tensor | None = None, norm: _Norm | None = None, gelu: bool = False
    ) -> Tensor:
        if delta is not None:
            x += delta
        if norm is not None:
            gain, bias, eps = norm
            x = F.layer_norm(x, x.shape[-1:], gain.to(x.dtype), bias.to(x.dtype), eps)
        return F.linear(F.gelu(x) if gelu else x, self.weight, self.bias)


@dataclass(frozen=True)
class Fp8Layer:
    """An encoder layer whose four products are computed in 8-bit floats, row by row and output by output scaled."""

    attention_norm: _Norm
    qkv: _Fp8Product | _PlainProduct
    out: _Fp8Product | _PlainProduct
    mlp_norm: _Norm
    up: _Fp8Product | _PlainProduct
    down: _Fp8Product | _PlainProduct

    @classmethod
    def of(cls, layer: EncoderLayer, kind: torch.dtype, *, stored: bool = False) -> Fp8Layer:
        """Round a layer's weights. stored: those that are to be rounded were so beforehand (`Fp8Linear`)."""
        attention, mlp = layer.attention, layer.mlp
        products = [
            _product(layers, kind, stored=stored)
            for layers in ([attention.query, attention.key, attention.value], [attention.out], [mlp.up], [mlp.down])
        ]
        norms = [(norm.weight.float(), norm.bias.float(), norm.eps) for norm in (layer.attention_norm, layer.mlp_norm)]
        return cls(norms[0], products[0], products[1], norms[1], products[2], products[3])

    def __call__(self, x: Tensor, delta: Tensor | None, batch: int, heads: int) -> Tensor:
        """Add ``delta`` and the attention to the residual stream x, in place; the MLP's part is returned."""
        qkv = self.qkv(x, delta=delta, norm=self.attention_norm)
        delta = self.out(attend(qkv, batch, heads))
        return self.down(self.up(x, delta=delta, norm=self.mlp_norm), gelu=True)


def _product(layers: Sequence[nn.Module], kind: torch.dtype, *, stored: bool) -> _Fp8Product | _PlainProduct:
    """Layers of one input, their outputs behind each other."""
    first = layers[0]
    assert isinstance(first, nn.Linear | Fp8Linear)
    assert first.bias is not None
    zeros = torch.zeros_like(first.bias)
    bias = torch.cat([zeros if layer.bias is None else layer.bias for layer in layers])  # type: ignore[misc]
    rounded = [layer.rounded for layer in layers if isinstance(layer, Fp8Linear)]
    if len(rounded) == len(layers):
        return _Fp8Product.of(concat([of_kind(weight, kind) for weight in rounded]), bias)
    weight = torch.cat([layer.weight.to(bias.dtype) for layer in layers])  # type: ignore[operator]
    if stored:
        return _PlainProduct(weight, bias)
    values, scales = round_rows(weight, kind)
    return _Fp8Product.of(Fp8Weight(values, scales[:, 0]), bias)


class GpuEncoder(nn.Module):
    """Takes over the weights of an `AudioEncoder`, which is empty afterwards.

    fp8: the 8-bit floats that the layers' products are computed in; None for those of the weights. Weights that are
    quantised already stay so.
    """

    def __init__(self, encoder: AudioEncoder, fp8: torch.dtype | None = None) -> None:
        super().__init__()
        self._fp8 = fp8
        self.width = encoder.positions.shape[1]
        self.positions = encoder.positions
        first = encoder.layers[0]
        assert isinstance(first, EncoderLayer)
        self.heads = first.attention.heads
        # (width, channels, 3) → (width, 3 × channels): one row of weights sees three frames side by side.
        self.conv1 = _flat(encoder.conv1.weight), encoder.conv1.bias
        self.conv2 = _flat(encoder.conv2.weight), encoder.conv2.bias
        self.blocks: list[_Layer | Fp8Layer | QuantizedEncoderLayer] = []
        lack = torch.zeros(self.width, device=encoder.positions.device)
        layers = [layer for layer in encoder.layers if isinstance(layer, EncoderLayer)]
        stored = any(isinstance(module, Fp8Linear) for module in encoder.modules())
        if not stored and not isinstance(first.attention.query, nn.Linear):
            self.blocks += [QuantizedEncoderLayer(layer) for layer in layers]
            encoder.layers = nn.ModuleList()
        elif fp8 is None:
            for index, layer in enumerate(layers):
                block = _Layer.of(layer, lack)
                lack = block.lack
                self.blocks.append(block)
                encoder.layers[index] = nn.Identity()  # else the separate query, key and value would stay too
        else:
            self.blocks += [Fp8Layer.of(layer, fp8, stored=stored) for layer in layers]
            encoder.layers = nn.ModuleList()
        self.norm = LackingNorm.of(encoder.norm, lack)
        encoder.conv1, encoder.conv2 = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def forward(self, mel: Tensor) -> Tensor:
        """As `AudioEncoder.forward`: (batch, mel bins, 3000) → (batch, 1500, width)."""
        x = F.gelu(_convolve(mel.transpose(1, 2), *self.conv1, stride=1))
        x = F.gelu(_convolve(x, *self.conv2, stride=2)) + self.positions
        batch, frames, width = x.shape
        x = x.view(-1, width)
        delta = None
        for block in self.blocks:
            if isinstance(block, Fp8Layer):
                delta = block(x, delta, batch, self.heads)
            else:
                block(x, batch, self.heads)
        if delta is not None:
            x += delta
        return self.norm(x).view(batch, frames, width)


def _up(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer and its GELU.

    In bf16 on a GPU the product computes the GELU too, by its tanh form: that is off by at most 0.0005, far less
    than rounding to bf16 is off around 1, and takes 6 % off a layer's time (H200, 16 windows of large-v3).
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cuda":
        return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, weight, bias))


def merge(attention: Attention) -> tuple[Tensor, Tensor]:
    """Weight and bias of query, key and value in one."""
    query, value = attention.query, attention.value
    bias = torch.cat([query.bias, torch.zeros_like(query.bias), value.bias])
    return torch.cat([query.weight, attention.key.weight, value.weight]), bias


def _flat(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2).reshape(weight.shape[0], -1).contiguous()


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """A convolution of three frames, zeros around: (batch, frames, channels) → (batch, frames / stride, width)."""
    batch, frames, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1)).contiguous()
    steps = (padded.stride(0), stride * channels, 1)
    unfolded = padded.as_strided((batch, frames // stride, 3 * channels), steps)
    return F.linear(unfolded.reshape(-1, 3 * channels), weight, bias).view(batch, frames // stride, -1)
