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


class MaskedEncoderLayer(WhisperEncoderLayer):
    """Whisper's layer with a mask for padding, and dropout of what attention and MLP add."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attention, normed = self.attention, self.attention_norm(x)
        attended = attention.attend(attention.split(attention.query(normed)), attention.keys_values(normed), mask)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


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
        self.layers = nn.ModuleList(
            MaskedEncoderLayer(config.width, config.heads, config.dropout) for _ in range(config.layers)
        )
        if not self.positions.is_meta:
            self.positions.data.copy_(sinusoids(config.audio_context, config.width))

    def forward(self, mel: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """States (batch, states, width) and how many of each row are real, (batch,) int64.

        mel: log-mel spectrogram (batch, mel bins, frames of 10 ms), at most twice as many frames as there are
        positions. ``lengths`` (batch,) are real frames; None: all are, which spares attention its mask.
        """
        x, counts = self.enter(mel, lengths)
        return self.leave(self.through(x, *self.beside(x.shape[1], counts, x.device)), counts)

    def enter(self, mel: Tensor, lengths: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """What the first layer reads, and how much of each row is real; None: all. ``first``: the first state's place,
        where the spectrogram is a part."""
        x = F.gelu(self.conv1(_masked(mel, lengths)))
        x = F.gelu(self.conv2(_masked(x, lengths))).transpose(1, 2)
        return x + self.positions[first : first + x.shape[1]], None if lengths is None else (lengths + 1) // 2

    def beside(self, states: int, counts: Tensor | None, device: torch.device) -> tuple[Tensor | None]:
        """What each layer is given beside the states: the mask (batch, 1, 1, states)."""
        return (None if counts is None else is_real(counts.clamp(min=1), states)[:, None, None],)

    def through(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def leave(self, x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is behind the last layer, and a count for each row."""
        return self.norm(x), torch.full((len(x),), x.shape[1], device=x.device) if counts is None else counts


def _masked(x: Tensor, lengths: Tensor | None) -> Tensor:
    return zero_padding(x.transpose(1, 2), lengths).transpose(1, 2)


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
