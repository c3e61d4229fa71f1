"""Padded batches of waveforms: which positions are real, normalisation over the real samples, moments of windows.

Moments add up. A recording of any length can be read piece by piece in constant memory, and what normalises the whole
of it is known before a network sees its first window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_VARIANCE_FLOOR = 1e-7
"""Keeps silence finite; the value of Hugging Face's Wav2Vec2FeatureExtractor, with which checkpoints were trained."""


def is_real(lengths: Tensor, positions: int) -> Tensor:
    """Which of ``positions`` lie within ``lengths`` (batch,): a mask (batch, positions)."""
    return torch.arange(positions, device=lengths.device) < lengths[:, None]


def zero_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """``x`` (batch, positions, …) with zeros from each row's length on. None: no row is padded."""
    if lengths is None:
        return x
    mask = is_real(lengths, x.shape[1])
    return x.masked_fill(~mask[(..., *[None] * (x.ndim - 2))], 0)


@dataclass(frozen=True)
class Moments:
    """Sums over the windows that a convolution sees, in float64: ``+`` joins those of two pieces of a recording.

    count: (batch,) windows. total: (batch, kernel). products: (batch, kernel, kernel), each window times itself.
    """

    count: Tensor
    total: Tensor
    products: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.products + other.products)

    @property
    def mean(self) -> Tensor:
        """(batch, kernel); zeros where there is no window."""
        return self.total / self.count.clamp(min=1)[:, None]

    @property
    def covariance(self) -> Tensor:
        """(batch, kernel, kernel), with the count as divisor."""
        mean = self.mean
        return self.products / self.count.clamp(min=1)[:, None, None] - mean[:, :, None] * mean[:, None, :]

    def scaled(self, shift: Tensor, scale: Tensor) -> Moments:
        """The moments that the same windows have after ``(x + shift) * scale``, each (batch,)."""
        shift, scale = shift[:, None].double(), scale[:, None].double()
        shifted = self.total + self.count[:, None] * shift
        products = self.products + shift[:, :, None] * (self.total[:, :, None] + shifted[:, None, :])
        return Moments(self.count, shifted * scale, products * scale[:, :, None].square())


def window_moments(waveform: Tensor, lengths: Tensor | None = None, kernel: int = 1, stride: int = 1) -> Moments:
    """Moments of the windows of ``kernel`` samples that start every ``stride`` samples and end within the waveform.

    waveform: (batch, samples); what lies beyond ``lengths`` (batch,) is not looked at. The next piece of a recording
    has to begin where the first window would that this one does not hold.
    """
    batch, samples = waveform.shape
    limit = torch.full((batch,), samples, device=waveform.device) if lengths is None else lengths
    if kernel == stride == 1:  # single samples: as products of matrices their sums are one long row for a GPU
        real = zero_padding(waveform.double(), lengths)
        return Moments(limit.double(), real.sum(1, keepdim=True), real.square().sum(1)[:, None, None])
    if samples < kernel:
        waveform = torch.nn.functional.pad(waveform, (0, kernel - samples))
    windows = waveform.double().unfold(1, kernel, stride)
    count = ((limit - kernel) // stride + 1).clamp(min=0)
    windows = zero_padding(windows, count)
    return Moments(count.double(), windows.sum(1), windows.transpose(1, 2) @ windows)


def normalize_waveform(waveform: Tensor, lengths: Tensor | None = None, moments: Moments | None = None) -> Tensor:
    """Shift and scale each row to zero mean and unit variance over its real samples; padding becomes zero.

    waveform: (batch, samples). ``moments`` (of single samples) are those of a whole recording of which the rows are
    parts; None: each row is one. Equals Hugging Face's Wav2Vec2FeatureExtractor with ``do_normalize``.
    """
    shift, scale = normalization(window_moments(waveform, lengths) if moments is None else moments)
    normalized = (waveform + shift[:, None].to(waveform.dtype)) * scale[:, None].to(waveform.dtype)
    return zero_padding(normalized, lengths)


def normalization(moments: Moments) -> tuple[Tensor, Tensor]:
    """(shift, scale), each (batch,) float64: ``(x + shift) * scale`` has zero mean and unit variance.

    ``moments`` are of single samples.
    """
    variance = moments.covariance[:, 0, 0].clamp(min=0)
    return -moments.mean[:, 0], (variance + _VARIANCE_FLOOR).rsqrt()
