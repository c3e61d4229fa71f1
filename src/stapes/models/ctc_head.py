"""A CTC model from an encoder of log-mel spectrograms: Conformer's, or Whisper's at any length.

Whisper's own encoder takes 30 s and no less, silence behind. Here it takes what there is: its positions are cut off
where the recording ends, and padding is masked like in any other encoder, so that two seconds cost two seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.conformer import Conformer, ConformerConfig
from stapes.models.waveform import is_real, zero_padding
from stapes.models.whisper import AudioEncoder, WhisperConfig, sinusoids
from stapes.models.whisper import EncoderLayer as WhisperEncoderLayer

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class WhisperEncoderConfig:
    """Sizes of a Whisper's encoder; the defaults are those of base."""

    mel_bins: int = 80
    width: int = 512
    layers: int = 6
    heads: int = 8
    audio_context: int = 1500
    """States of 20 ms that it has positions for."""
    dropout: float = 0.0
    """Of what attention and MLP add, in training; OpenAI trained without."""

    @property
    def state_width(self) -> int:
        """Width of what a head reads."""
        return self.width

    @property
    def frame_seconds(self) -> float:
        """Seconds from one state to the next."""
        return 0.02

    def state_count(self, frames: Count) -> Count:
        """States of so many frames of 10 ms, exactly; an int, or a tensor of ints for a tensor."""
        return (frames + 1) // 2


EncoderConfig = ConformerConfig | WhisperEncoderConfig


class WhisperEncoder(AudioEncoder):
    """Whisper's encoder for spectrograms of any length up to its positions; the parameters are the original's."""

    def __init__(self, config: WhisperEncoderConfig) -> None:
        # The decoder's sizes do not matter to the encoder.
        super().__init__(
            WhisperConfig(
                mel_bins=config.mel_bins,
                vocab_size=1,
                width=config.width,
                encoder_layers=config.layers,
                encoder_heads=config.heads,
                decoder_layers=1,
                decoder_heads=1,
                audio_context=config.audio_context,
            )
        )
        self.config = config
        self.dropout = nn.Dropout(config.dropout)
        if not self.positions.is_meta:
            self.positions.data.copy_(sinusoids(config.audio_context, config.width))

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """States (batch, states, width) and how many of each row are real, (batch,) int64.

        mel: log-mel spectrogram (batch, mel bins, frames of 10 ms), at most twice as many frames as there are
        positions. ``lengths`` (batch,) are real frames; None: all are, which spares attention its mask.
        """
        x = F.gelu(self.conv1(_masked(mel, lengths)))
        x = F.gelu(self.conv2(_masked(x, lengths))).transpose(1, 2)
        x = x + self.positions[: x.shape[1]]
        counts = torch.full((len(x),), x.shape[1], device=x.device) if lengths is None else (lengths + 1) // 2
        mask = None if lengths is None else is_real(counts.clamp(min=1), x.shape[1])[:, None, None]
        for layer in self.layers:
            assert isinstance(layer, WhisperEncoderLayer)
            x = _layer(layer, self.dropout, x, mask)
        return self.norm(x), counts


def _masked(x: Tensor, lengths: Tensor | None) -> Tensor:
    return zero_padding(x.transpose(1, 2), lengths).transpose(1, 2)


def _layer(layer: WhisperEncoderLayer, dropout: nn.Dropout, x: Tensor, mask: Tensor | None) -> Tensor:
    attention, normed = layer.attention, layer.attention_norm(x)
    x = x + dropout(attention.attend(attention.split(attention.query(normed)), attention.keys_values(normed), mask))
    return x + dropout(layer.mlp(layer.mlp_norm(x)))


def build_encoder(config: EncoderConfig) -> Conformer | WhisperEncoder:
    """The encoder of these sizes."""
    return Conformer(config) if isinstance(config, ConformerConfig) else WhisperEncoder(config)


@dataclass(frozen=True)
class CTCConfig:
    """Sizes of a CTC model."""

    encoder: EncoderConfig
    vocab_size: int
    head_dropout: float = 0.1

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame of logits to the next."""
        return self.encoder.frame_seconds


class CTC(nn.Module):
    """An encoder and a linear layer: log-mel spectrograms in, logits of tokens out."""

    def __init__(self, config: CTCConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config.encoder)
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.encoder.state_width, config.vocab_size)

    def set_head(self, head: nn.Linear) -> None:
        """Give the model another vocabulary."""
        self.head = head
        self.config = replace(self.config, vocab_size=head.out_features)

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (batch, frames, vocabulary) and real frames (batch,), int64.

        mel: log-mel spectrogram (batch, mel bins, frames of 10 ms). ``lengths`` (batch,) are real frames of it; None:
        all are.
        """
        states, counts = self.encoder(mel, lengths)
        return self.head(self.head_dropout(states)), counts
