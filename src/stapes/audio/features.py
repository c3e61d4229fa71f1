"""Log-mel spectrograms as Whisper was trained on.

16 kHz, windows of 25 ms every 10 ms, Slaney's mel scale, log10, the loudest bin of the window as reference.
Source: openai/whisper ``audio.py``; the filters are librosa's ``filters.mel`` (Slaney 1998).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from stapes.kernels.jit import launch_or
from stapes.kernels.log_mel import Filters, launch_log_mel, log_mel_reference, prepare_filters
from stapes.kernels.spectrum import launch_frames, spectrum_reference

SAMPLE_RATE = 16_000
WINDOW_SECONDS = 30
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE
FFT_SIZE = 400
HOP = 160
FRAMES = WINDOW_SAMPLES // HOP


@lru_cache(maxsize=4)
def mel_filters(bins: int) -> Tensor:
    """Triangular filters (bins, 201), each of unit area (Slaney's normalisation), float32."""
    # Slaney's scale: linear below 1 kHz (15 mels), logarithmic above (27 steps of 6.4 to the power 1/27).
    linear_step = 200.0 / 3
    log_step = np.log(6.4) / 27.0
    top_mel = 15.0 + np.log(SAMPLE_RATE / 2 / 1000.0) / log_step
    mels = np.linspace(0.0, top_mel, bins + 2)
    hertz = np.where(mels < 15.0, mels * linear_step, 1000.0 * np.exp(log_step * (mels - 15.0)))
    fft_hertz = np.linspace(0.0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1)
    ramps = hertz[:, None] - fft_hertz[None, :]
    widths = np.diff(hertz)
    rising = -ramps[:-2] / widths[:-1, None]
    falling = ramps[2:] / widths[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    filters *= (2.0 / (hertz[2:] - hertz[:-2]))[:, None]
    return torch.from_numpy(filters.astype(np.float32))


def pad_windows(pcm: Sequence[np.ndarray], device: torch.device | str = "cpu") -> Tensor:
    """Samples of up to 30 s each → (windows, 480 000) float32, silence behind."""
    batch = np.zeros((len(pcm), WINDOW_SAMPLES), dtype=np.float32)
    for row, samples in zip(batch, pcm, strict=True):
        row[: len(samples)] = samples[:WINDOW_SAMPLES]
    return torch.from_numpy(batch).to(device)


def log_mel_spectrogram(pcm: Tensor, bins: int = 80, lengths: Sequence[int] | None = None) -> Tensor:
    """(windows, samples) at 16 kHz → (windows, bins, samples / 160), float32, about -1 … 1.

    Each window is scaled by its own loudest bin, so that a window's features never depend on its neighbours.
    lengths: samples of sound in each window; what follows them is then not the silence that it is, but 0, the middle
    of the scale, as faster-whisper pads.
    """
    features = launch_or(
        "log_mel",
        pcm.device,
        lambda: torch.cat([_log_mel_by_kernels(part, bins) for part in pcm.split(_GPU_WINDOWS)]),
        lambda: log_mel_reference(
            spectrum_reference(pcm, torch.hann_window(FFT_SIZE, device=pcm.device), HOP),
            mel_filters(bins).to(pcm.device),
        ),
    )
    for row, length in zip(features, lengths or (), strict=False):
        row[:, length // HOP + 1 :] = 0.0
    return features


_GPU_WINDOWS = 64
"""Windows at a time: their frames and spectrum are 10 MB each."""


@lru_cache(maxsize=8)
def _prepared(bins: int, device: torch.device) -> tuple[Tensor, Filters]:
    """The Hann window, and the filters laid out for the kernel."""
    return torch.hann_window(FFT_SIZE, device=device), prepare_filters(mel_filters(bins), device)


def _log_mel_by_kernels(pcm: Tensor, bins: int) -> Tensor:
    window, filters = _prepared(bins, pcm.device)
    spectrum = torch.fft.rfft(launch_frames(pcm, window, HOP)).transpose(1, 2)
    return launch_log_mel(spectrum, filters)
