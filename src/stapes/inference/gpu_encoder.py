"""Whisper's encoder as a GPU likes it: few large products. The numbers are the same up to rounding.

Differences from the plain model, each measured on large-v3 in bf16 (H200): query, key and value are one product; the
products before a residual sum add into it, and their biases wait for the next layer norm, which is one kernel at the
speed of the memory (PyTorch's own runs at a third of it); the convolutions are products over unfolded frames, which
also keeps MIOpen from compiling a kernel for every new shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.kernels.layer_norm import layer_norm
from stapes.models.whisper import AudioEncoder, EncoderLayer


@dataclass(frozen=True)
class _Norm:
    """A layer norm, and the sum of the biases that the residual stream lacks when it comes."""

    gain: Tensor
    bias: Tensor
    lack: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.lack, self.gain, self.bias, self.eps)


@dataclass(frozen=True)
class _Layer:
    attention_norm: _Norm
    qkv: tuple[Tensor, Tensor]
    out: Tensor
    mlp_norm: _Norm
    up: tuple[Tensor, Tensor]
    down: Tensor


class GpuEncoder(nn.Module):
    """Takes over the weights of an `AudioEncoder`, which is empty afterwards."""

    def __init__(self, encoder: AudioEncoder) -> None:
        super().__init__()
        self.width = encoder.positions.shape[1]
        self.positions = encoder.positions
        first = encoder.layers[0]
        assert isinstance(first, EncoderLayer)
        self.heads = first.attention.heads
        # (width, channels, 3) → (width, 3 × channels): one row of weights sees three frames side by side.
        self.conv1 = _flat(encoder.conv1.weight), encoder.conv1.bias
        self.conv2 = _flat(encoder.conv2.weight), encoder.conv2.bias
        lack = torch.zeros(self.width, device=encoder.positions.device)
        self.blocks: list[_Layer] = []
        for index, layer in enumerate(encoder.layers):
            assert isinstance(layer, EncoderLayer)
            attention, mlp = layer.attention, layer.mlp
            attention_norm = _norm(layer.attention_norm, lack)
            lack = lack + attention.out.bias.float()
            mlp_norm = _norm(layer.mlp_norm, lack)
            lack = lack + mlp.down.bias.float()
            query = attention.query
            no_bias = torch.zeros_like(query.bias)
            self.blocks.append(
                _Layer(
                    attention_norm,
                    (
                        torch.cat([query.weight, attention.key.weight, attention.value.weight]),
                        torch.cat([query.bias, no_bias, attention.value.bias]),
                    ),
                    attention.out.weight,
                    mlp_norm,
                    (mlp.up.weight, mlp.up.bias),
                    mlp.down.weight,
                )
            )
            encoder.layers[index] = nn.Identity()  # else the separate query, key and value would stay too
        self.norm = _norm(encoder.norm, lack)
        encoder.conv1, encoder.conv2 = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def forward(self, mel: Tensor) -> Tensor:
        """As `AudioEncoder.forward`: (batch, mel bins, 3000) → (batch, 1500, width)."""
        x = F.gelu(_convolve(mel.transpose(1, 2), *self.conv1, stride=1))
        x = F.gelu(_convolve(x, *self.conv2, stride=2)) + self.positions
        batch, frames, width = x.shape
        x = x.view(-1, width)
        for block in self.blocks:
            qkv = F.linear(block.attention_norm(x), *block.qkv)
            query, key, value = qkv.view(batch, frames, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(-1, width)
            torch.addmm(x, attended, block.out.t(), out=x)
            up = F.gelu(F.linear(block.mlp_norm(x), *block.up))
            torch.addmm(x, up, block.down.t(), out=x)
        return self.norm(x).view(batch, frames, width)


def _norm(norm: nn.LayerNorm, lack: Tensor) -> _Norm:
    return _Norm(norm.weight.float(), norm.bias.float(), lack, norm.eps)


def _flat(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2).reshape(weight.shape[0], -1).contiguous()


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """A convolution of three frames, zeros around: (batch, frames, channels) → (batch, frames / stride, width)."""
    batch, frames, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1)).contiguous()
    steps = (padded.stride(0), stride * channels, 1)
    unfolded = padded.as_strided((batch, frames // stride, 3 * channels), steps)
    return F.linear(unfolded.reshape(-1, 3 * channels), weight, bias).view(batch, frames // stride, -1)
