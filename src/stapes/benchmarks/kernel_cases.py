"""The kernels that `stapes bench kernels` times, a row each. To add one, yield a `KernelCase` from `kernel_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stapes.audio.features import FFT_SIZE, HOP, SAMPLE_RATE, WINDOW_SAMPLES, log_mel_spectrogram, mel_filters
from stapes.kernels import log_mel
from stapes.kernels.spectrum import launch_frames, spectrum_reference


@dataclass(frozen=True)
class Prepared:
    """A kernel with its inputs on the device."""

    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    """The same by PyTorch's own operations."""
    bytes: int
    """Of inputs and outputs, each counted once however often the kernel touches it."""
    tolerance: float
    """Greatest difference from the reference that is right."""


@dataclass(frozen=True)
class KernelCase:
    """A row: ``prepare`` makes its inputs when its turn comes."""

    kernel: str
    shape: str
    prepare: Callable[[], Prepared]
    options: str = ""
    """Of a sweep: the tile that is tried in place of the device's own."""


def kernel_cases(device: torch.device, windows: int = 64, sweep: bool = False) -> Iterator[KernelCase]:
    """All rows; with ``sweep`` also the tiles that a kernel might use instead."""
    half_minutes = f"{windows} × 30 s"
    for bins in (80, 128):
        shape = f"{half_minutes}, {bins} bins"
        for tile in (None, *(log_mel.CANDIDATES if sweep else ())):
            options = str(tile) if tile else ""
            yield KernelCase("log_mel", shape, partial(_log_mel, device, windows, bins, tile), options)
        yield KernelCase("sound → log_mel", shape, partial(_features, device, windows, bins))
    yield KernelCase("frames", half_minutes, partial(_frames, device, windows))
    yield KernelCase("frames, FFT", half_minutes, partial(_spectrum, device, windows))


def sound(windows: int, device: torch.device) -> Tensor:
    """Noise that comes and goes over 60 dB; every other window ends in digital silence, as speech is padded."""
    generator = torch.Generator(device).manual_seed(0)
    pcm = torch.randn(windows, WINDOW_SAMPLES, generator=generator, device=device)
    seconds = torch.arange(WINDOW_SAMPLES, device=device) / SAMPLE_RATE
    pcm *= 0.2 * 10 ** (1.5 * torch.sin(2.5 * seconds) - 1.5)
    pcm[::2, WINDOW_SAMPLES * 3 // 5 :] = 0.0
    return pcm


def _window(device: torch.device) -> Tensor:
    return torch.hann_window(FFT_SIZE, device=device)


def _features_of(pcm: Tensor, bins: int) -> Tensor:
    spectrum = spectrum_reference(pcm, _window(pcm.device), HOP)
    return log_mel.log_mel_reference(spectrum, mel_filters(bins).to(pcm.device))


def _feature_bytes(windows: int, bins: int) -> int:
    return 4 * windows * bins * (WINDOW_SAMPLES // HOP)


def _log_mel(device: torch.device, windows: int, bins: int, tile: log_mel.Tile | None) -> Prepared:
    spectrum = spectrum_reference(sound(windows, device), _window(device), HOP)
    filters = log_mel.prepare_filters(mel_filters(bins), device, tile)
    return Prepared(
        lambda: log_mel.launch_log_mel(spectrum, filters),
        lambda: log_mel.log_mel_reference(spectrum, filters.filters),
        8 * spectrum.numel() + _feature_bytes(windows, bins),
        1e-4,
    )


def _features(device: torch.device, windows: int, bins: int) -> Prepared:
    pcm = sound(windows, device)
    moved = 4 * pcm.numel() + _feature_bytes(windows, bins)
    return Prepared(lambda: log_mel_spectrogram(pcm, bins), lambda: _features_of(pcm, bins), moved, 1e-4)


def _frames(device: torch.device, windows: int) -> Prepared:
    pcm, window = sound(windows, device), _window(device)

    def reference() -> Tensor:
        padded = torch.nn.functional.pad(pcm, (FFT_SIZE // 2, FFT_SIZE // 2), mode="reflect")
        return padded.unfold(1, FFT_SIZE, HOP)[:, :-1] * window

    moved = 4 * pcm.numel() + 4 * windows * (WINDOW_SAMPLES // HOP) * FFT_SIZE
    return Prepared(lambda: launch_frames(pcm, window, HOP), reference, moved, 0.0)


def _spectrum(device: torch.device, windows: int) -> Prepared:
    pcm, window = sound(windows, device), _window(device)
    moved = 4 * pcm.numel() + 8 * windows * (WINDOW_SAMPLES // HOP) * (FFT_SIZE // 2 + 1)
    return Prepared(
        lambda: torch.view_as_real(torch.fft.rfft(launch_frames(pcm, window, HOP))),
        lambda: torch.view_as_real(spectrum_reference(pcm, window, HOP).transpose(1, 2)),
        moved,
        1e-4,
    )
