"""Conformer (Gulati et al. 2020, https://arxiv.org/abs/2005.08100): the encoder, in plain PyTorch.

Strided convolutions turn a log-mel spectrogram into a state every 40 ms; each layer puts a convolution between
self-attention and its two half-step MLPs. Three choices differ from the paper. Positions are rotary (Su et al. 2021,
https://arxiv.org/abs/2104.09864), so attention runs in the fused kernels. The convolution is followed by a layer norm
and not by a batch norm, whose statistics would make a recording depend on its neighbours. Subsampling is depthwise
from its second convolution on (Rekesh et al. 2023, https://arxiv.org/abs/2305.05084).

Padding never changes a result: before whatever looks across frames, those beyond a row's length are zero or masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.waveform import is_real, zero_padding

Count = TypeVar("Count", int, Tensor)

_FLOOR = 0.05
"""Of the deviation of a recording, that of the corpus being 1: what does not change is not made loud."""


@dataclass(frozen=True)
class ConformerConfig:
    """Sizes of the encoder; the defaults are the paper's small model with wider layers."""

    mel_bins: int = 80
    width: int = 256
    layers: int = 12
    heads: int = 4
    """0: no attention. A state then hears what the convolutions reach and not where a recording begins or ends, so that
    nothing but the sound can be learnt."""
    mlp_width: int = 1024
    conv_kernel: int = 31
    """Frames that a layer's convolution sees; odd."""
    subsampling: int = 4
    """Frames of 10 ms in one state: 2, 4 or 8."""
    subsampling_channels: int = 256
    normalize_recordings: bool = False
    """Whether each mel bin has mean 0 and deviation 1 over each recording. Microphones and rooms then matter less; but
    of a recording of one word this takes away much of the word."""
    dropout: float = 0.1

    @property
    def state_width(self) -> int:
        """Width of what a head reads."""
        return self.width

    @property
    def frame_seconds(self) -> float:
        """Seconds from one state to the next."""
        return self.subsampling / 100

    @property
    def reach(self) -> int:
        """States that the convolutions hear to each side of one, at least."""
        return self.layers * (self.conv_kernel // 2) + 2

    def state_count(self, frames: Count) -> Count:
        """States of so many frames of 10 ms, exactly; an int, or a tensor of ints for a tensor."""
        return (frames + self.subsampling - 1) // self.subsampling


class Subsampling(nn.Module):
    """Convolutions of stride 2 over time and frequency, then one linear layer."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        channels, stages = config.subsampling_channels, config.subsampling.bit_length() - 1
        self.first = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        self.depthwise = nn.ModuleList(
            nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1, groups=channels)
            for _ in range(stages - 1)
        )
        self.pointwise = nn.ModuleList(nn.Conv2d(channels, channels, kernel_size=1) for _ in range(stages - 1))
        bins = config.mel_bins
        for _ in range(stages):
            bins = (bins + 1) // 2
        self.linear = nn.Linear(channels * bins, config.width)

    def forward(self, mel: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(batch, mel bins, frames), frames (batch,) → (batch, states, width), states (batch,)."""
        x = zero_padding(mel.transpose(1, 2), lengths)[:, None]
        x, lengths = F.silu(self.first(x)), _halve(lengths)
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = zero_padding(x.transpose(1, 2), lengths).transpose(1, 2)
            x, lengths = F.silu(pointwise(depthwise(x))), _halve(lengths)
        return self.linear(x.transpose(1, 2).flatten(2)), lengths


def _halve(lengths: Tensor | None) -> Tensor | None:
    return None if lengths is None else (lengths + 1) // 2


class MLP(nn.Module):
    """Two linear layers around a SiLU, behind a layer norm."""

    def __init__(self, width: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, mlp_width)
        self.down = nn.Linear(mlp_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(F.silu(self.up(self.norm(x))))))


class RotaryAttention(nn.Module):
    """Multi-head self-attention with rotary positions, behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x: (batch, states, width). mask: (batch, 1, 1, states), true where a state may be looked at."""
        normed = self.norm(x)
        split = (self.heads, -1)
        query, key, value = (
            project(normed).unflatten(-1, split).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        out = self.attend(rotate(query, *rotation), rotate(key, *rotation), value, mask)
        return self.dropout(self.out(out.transpose(1, 2).flatten(2)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Weigh the values, each (batch, heads, states, head width)."""
        dropout = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def rotary_angles(positions: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (positions, width / 2) of rotary positions for heads of that width, float32."""
    rates = 10_000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of the heads' features by its position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


class ConvolutionModule(nn.Module):
    """Gated pointwise convolution, depthwise convolution over time, pointwise convolution, behind a layer norm."""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.inner_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = zero_padding(F.glu(self.gate(self.norm(x)), dim=-1), lengths)
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.out(F.silu(self.inner_norm(x))))


Beside = tuple[tuple[Tensor, Tensor] | None, Tensor | None, Tensor | None]
"""Rotation (see `rotary_angles`), mask (batch, 1, 1, states), real states (batch,)."""


class ConformerLayer(nn.Module):
    """Half an MLP, self-attention, convolution, half an MLP."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, dropout = config.width, config.dropout
        self.first_mlp = MLP(width, config.mlp_width, dropout)
        self.attention = RotaryAttention(width, config.heads, dropout) if config.heads else None
        self.convolution = ConvolutionModule(width, config.conv_kernel, dropout)
        self.second_mlp = MLP(width, config.mlp_width, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        x = x + 0.5 * self.first_mlp(x)
        if self.attention is not None:
            assert rotation is not None
            x = x + self.attention(x, rotation, mask)
        x = x + self.convolution(x, lengths)
        x = x + 0.5 * self.second_mlp(x)
        return self.norm(x)


class Conformer(nn.Module):
    """The encoder."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        # Of the training corpus: not learnt, but part of the model.
        self.mel_mean = nn.Parameter(torch.full((config.mel_bins,), -0.15), requires_grad=False)
        self.mel_deviation = nn.Parameter(torch.full((config.mel_bins,), 0.5), requires_grad=False)
        self.subsampling = Subsampling(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(ConformerLayer(config) for _ in range(config.layers))

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States (batch, states, width) and how many of each row are real, (batch,) int64.

        mel: log-mel spectrogram (batch, mel bins, frames of 10 ms). ``lengths`` (batch,) are real frames; None: all
        are, which spares attention its mask.
        """
        x, counts = self.enter(mel, lengths)
        return self.leave(self.through(x, *self.beside(x.shape[1], counts, x.device)), counts)

    def enter(self, mel: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the first layer reads, and how much of each row is real; None: all. Margins are included."""
        mel = (mel - self.mel_mean[:, None]) / self.mel_deviation[:, None]
        if self.config.normalize_recordings:
            mel = _normalize_recordings(mel, lengths)
        if not self.config.heads:
            mel, lengths = _with_margins(mel, lengths, self.config.reach * self.config.subsampling)
        x, counts = self.subsampling(mel, lengths)
        return self.dropout(x), counts

    def beside(self, states: int, counts: Tensor | None, device: torch.device) -> Beside:
        """What each layer is given beside the states."""
        width, heads = self.config.width, self.config.heads
        rotation = rotary_angles(states, width // heads, device) if heads else None
        # A row without a real state looks at its first one: attention to nothing is not a number in some kernels.
        mask = None if counts is None else is_real(counts.clamp(min=1), states)[:, None, None]
        return rotation, mask, counts

    def through(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None, counts: Tensor | None
    ) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x, rotation, mask, counts)
        return x

    def leave(self, x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is behind the last layer: no margins, and a count for each row."""
        margin = 0 if self.config.heads else self.config.reach
        if margin:
            x = x[:, margin:-margin]
            counts = None if counts is None else (counts - 2 * margin).clamp(min=0)
        if counts is None:
            counts = torch.full((len(x),), x.shape[1], device=x.device)
        return x, counts


def _normalize_recordings(mel: Tensor, lengths: Tensor | None) -> Tensor:
    """Each mel bin with mean 0 and deviation 1 over the row's real frames."""
    real = None if lengths is None else is_real(lengths, mel.shape[2])[:, None]
    count = mel.shape[2] if lengths is None else lengths.clamp(min=1)[:, None, None]
    mean = (mel if real is None else torch.where(real, mel, 0)).sum(2, keepdim=True) / count
    centred = mel - mean if real is None else torch.where(real, mel - mean, 0)
    return centred / ((centred.square().sum(2, keepdim=True) / count).sqrt() + _FLOOR)


def _with_margins(mel: Tensor, lengths: Tensor | None, frames: int) -> tuple[Tensor, Tensor | None]:
    """Go on with the first and the last real frame of each row for so many frames.

    Zeros there would tell where a recording begins and ends, and a small corpus is learnt by heart from that.
    """
    at = torch.arange(-frames, mel.shape[2] + frames, device=mel.device)
    if lengths is None:
        return mel[:, :, at.clamp(min=0, max=mel.shape[2] - 1)], None
    at = at.minimum(lengths[:, None] - 1).clamp(min=0)
    return mel.gather(2, at[:, None].expand(-1, mel.shape[1], -1)), lengths + 2 * frames
