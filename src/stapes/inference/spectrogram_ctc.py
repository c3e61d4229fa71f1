"""CTC models over log-mel spectrograms (Conformer, Whisper's encoder) for the engine that runs CTC models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from stapes.audio.features import HOP
from stapes.checkpoints.spectrogram_models import SpectrogramCheckpoint
from stapes.inference.ctc_model import OneLanguage
from stapes.inference.gpu_attention import WITHOUT_PLANS
from stapes.inference.spectrograms import log_mel_rows
from stapes.models.ctc_head import CTC, WhisperEncoderConfig
from stapes.models.hybrid import Hybrid

WINDOW_SECONDS = 30
CONTEXT_SECONDS = 2
"""Of a window inside a recording, so much at each end is heard but not written."""


class NothingMeasured:
    """A `Meter` of models that normalise nothing over a recording."""

    def feed(self, pcm: np.ndarray) -> None:
        """Nothing to do."""

    def cut(self) -> None:
        """Nothing to do."""

    def result(self) -> None:
        """Nothing."""


class SpectrogramModel(OneLanguage):
    """What all models over log-mel spectrograms are to the engine; subclasses say how logits come from them."""

    def __init__(self, checkpoint: SpectrogramCheckpoint, network: CTC | Hybrid) -> None:
        super().__init__()
        config = network.config
        self.checkpoint, self.network = checkpoint, network
        self.tokenizer = checkpoint.tokenizer
        weight = next(network.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.hop = round(config.frame_seconds * 100) * HOP
        seconds = WINDOW_SECONDS
        if isinstance(config.encoder, WhisperEncoderConfig):
            seconds = min(seconds, int(config.encoder.audio_context * config.encoder.frame_seconds))
        self.window = seconds * 100 * HOP // self.hop * self.hop
        self.context = CONTEXT_SECONDS * 100 * HOP // self.hop * self.hop

    def frame_count(self, samples: int) -> int:
        """One for each hop that has begun."""
        return -(-samples // self.hop)

    def meter(self) -> NothingMeasured:
        """Each window is its own reference, as it was in training."""
        return NothingMeasured()

    def encode(self, waveform: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """States (batch, frames, width) and real frames (batch,). ``lengths`` (batch,), on the CPU: real samples."""
        full = int(lengths.min()) == waveform.shape[1]
        real = None if full else lengths.to(waveform.device, non_blocking=True)
        mel, frames = log_mel_rows(waveform, real, self.network.config.encoder.mel_bins)
        return self.network.encoder(mel.to(self._dtype), frames)


class SpectrogramCTC(SpectrogramModel):
    """A `CTC` as `inference.ctc_model.CTCModel`."""

    def __init__(self, checkpoint: SpectrogramCheckpoint, network: CTC) -> None:
        super().__init__(checkpoint, network)
        self._head = network.head

    @sdpa_kernel(WITHOUT_PLANS)
    def __call__(
        self, waveform: Tensor, lengths: Tensor, measured: Sequence[Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (batch, frames, vocabulary) and real frames (batch,) of waveforms (batch, samples).

        ``lengths`` (batch,), on the CPU, are real samples.
        """
        states, counts = self.encode(waveform, lengths)
        return self._head(states), counts
