"""Log-mel spectrograms of batches of recordings of any length, in which neighbours and padding change nothing."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from stapes.audio.features import FFT_SIZE, HOP, log_mel_spectrogram
from stapes.models.waveform import zero_padding

_SILENCE = 3 * HOP
"""Samples of silence behind the longest row: more than a frame sees beyond its middle, so that every row, the longest
too, ends in silence and none is reflected at its end."""


def log_mel_rows(waveform: Tensor, lengths: Tensor | None, bins: int) -> tuple[Tensor, Tensor | None]:
    """Log-mel spectrograms of rows of different lengths: (batch, bins, frames of 10 ms) and real frames (batch,).

    waveform: (batch, samples) at 16 kHz, of which ``lengths`` (batch,) are real; None: all, and no frames are counted.
    A row's frames are the same alone and in any batch: silence follows each, and its own loudest bin is its reference.
    """
    assert FFT_SIZE // 2 + HOP <= _SILENCE
    frames = -(-waveform.shape[1] // HOP)
    waveform = pad(zero_padding(waveform, lengths), (0, frames * HOP + _SILENCE - waveform.shape[1]))
    mel = log_mel_spectrogram(waveform, bins)[..., :frames]
    return mel, None if lengths is None else (lengths + HOP - 1) // HOP
