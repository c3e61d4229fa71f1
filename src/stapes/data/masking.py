"""Masks on the device: SpecAugment on spectrograms, wav2vec 2.0's spans on features, and what else is drawn there.

Where masks fall is a function of each utterance's ``keys`` alone (``Batch.keys``: seed, epoch and id), computed on the
device with integers. So a mask is the same in any batch, at any padding, on any number of ranks and on every kind of
GPU, and nothing needs to be kept for going on after an interruption. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stapes.models.waveform import is_real

_TIME_START, _TIME_WIDTH, _FREQUENCY_START, _FREQUENCY_WIDTH = range(1, 5)  # what a hash is for
_SPANS, _ROUNDING, _NEGATIVES, _NOISE, _REPLACED, _REPLACEMENT, _OWN = range(5, 12)


def uniforms(keys: Tensor, purpose: int, count: int) -> Tensor:
    """Pseudo-random float32 numbers in [0, 1), (batch, count), from ``keys`` int64 (batch,)."""
    numbers = torch.arange(count, device=keys.device) + (purpose << 32)
    state = _mix(keys[:, None] + _mix(numbers)[None])
    return (state & 0xFFFFFF).to(torch.float32) / (1 << 24)  # float32 holds 24 bits exactly


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finalizer; int64 wraps around, and shifts must not copy the sign."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class SpecAugment(nn.Module):
    """Masks stretches of time and of frequency (Park et al. 2019), each row within its own length.

    Each mask's width is uniform from 0 to its maximum, and its place uniform among those where it fits. Does nothing in
    evaluation mode.

    Args:
        frequency_masks, frequency_width: how many, and how many mel bins each covers at most.
        time_masks, time_width: how many, and how many frames each covers at most.
        time_fraction: what all time masks together cover at most of an utterance (Park et al. 2020 keep each mask
            below a share of the utterance).
        value: written into masked places; None: the mean of the utterance's real frames.
    """

    def __init__(
        self,
        frequency_masks: int = 2,
        frequency_width: int = 27,
        time_masks: int = 10,
        time_width: int = 100,
        time_fraction: float = 0.5,
        value: float | None = 0.0,
    ) -> None:
        super().__init__()
        self.frequency_masks, self.frequency_width = frequency_masks, frequency_width
        self.time_masks, self.time_width, self.time_fraction = time_masks, time_width, time_fraction
        self.value = value

    def forward(self, features: Tensor, lengths: Tensor, keys: Tensor) -> Tensor:
        """features: (batch, frames, bins). lengths: (batch,) real frames. keys: int64 (batch,). What lies beyond
        lengths comes back as it is."""
        if not self.training:
            return features
        _, frames, bins = features.shape
        real = is_real(lengths, frames)
        limit = (lengths * (self.time_fraction / max(1, self.time_masks))).floor().clamp(max=self.time_width)
        times = _stretches(keys, _TIME_START, _TIME_WIDTH, self.time_masks, limit, lengths, frames) & real
        whole = torch.full_like(lengths, bins)
        widest = whole.clamp(max=self.frequency_width)
        bands = _stretches(keys, _FREQUENCY_START, _FREQUENCY_WIDTH, self.frequency_masks, widest, whole, bins)
        masked = times[:, :, None] | (bands[:, None, :] & real[:, :, None])
        if self.value is not None:
            return features.masked_fill(masked, self.value)
        total = (features * real[:, :, None]).sum((1, 2), dtype=torch.float32)
        mean = (total / (lengths.clamp(min=1) * bins)).to(features.dtype)
        return torch.where(masked, mean[:, None, None], features)


def _stretches(
    keys: Tensor, start_purpose: int, width_purpose: int, count: int, widest: Tensor, lengths: Tensor, positions: int
) -> Tensor:
    """Which of ``positions`` lie in one of ``count`` stretches of at most ``widest`` (batch,): (batch, positions)."""
    width = (uniforms(keys, width_purpose, count) * (widest[:, None] + 1)).floor()
    start = (uniforms(keys, start_purpose, count) * (lengths[:, None] - width + 1)).floor()
    position = torch.arange(positions, device=keys.device)
    inside = (position >= start[:, :, None]) & (position < (start + width)[:, :, None])
    return inside.any(1)


def span_mask(
    lengths: Tensor, positions: int, keys: Tensor, *, probability: float, length: int, minimum: int = 0
) -> Tensor:
    """Which of ``positions`` are masked, as wav2vec 2.0 does it (Baevski et al. 2020, 3.1): bool (batch, positions).

    Starts are drawn without replacement among those from which a span of ``length`` fits into the row, as many as
    ``probability`` × row's length / ``length`` (rounded up or down by chance), but at least ``minimum``; spans may
    overlap, so that fewer positions than ``probability`` says are masked. These are the counts of Hugging Face's
    ``_compute_mask_indices`` for a row without padding (its chance of rounding is one for all rows).

    lengths: (batch,) real positions of each row. keys: int64 (batch,).
    """
    chance = uniforms(keys, _ROUNDING, 1)[:, 0]
    wanted = (probability * lengths / length + chance).floor().clamp(min=minimum)
    fitting = (lengths - (length - 1)).clamp(min=0)
    spans = torch.where(wanted * length > lengths, lengths // length, wanted)
    spans = spans.minimum(fitting.to(spans.dtype))
    scores = uniforms(keys, _SPANS, positions).masked_fill(~is_real(fitting, positions), -1.0)
    ranks = scores.argsort(dim=1, descending=True, stable=True).argsort(1)
    starts = (ranks < spans[:, None]) & (scores >= 0)
    # A position is masked where a span began at it or up to length - 1 before it.
    begun = starts.to(torch.int32).cumsum(1)
    before = nn.functional.pad(begun, (length, 0))[:, :positions]
    return begun > before


def sample_negatives(mask: Tensor, keys: Tensor, count: int) -> Tensor:
    """For each masked position ``count`` others of the row that are masked too: int64 (batch, positions, count).

    Each of them is as likely as any other, and may come twice. What is said for positions that are not masked, and in
    rows with one masked position, means nothing. mask: bool (batch, positions). keys: int64 (batch,).
    """
    positions = mask.shape[1]
    masked = mask.sum(1)
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # the masked positions first
    ranks = mask.to(torch.int64).cumsum(1) - 1
    chance = uniforms(keys, _NEGATIVES, positions * count).unflatten(1, (positions, count))
    drawn = (chance * (masked - 1).clamp(min=1)[:, None, None]).long()
    drawn = (drawn + (drawn >= ranks[..., None])).clamp(max=positions - 1)
    return order.gather(1, drawn.flatten(1)).unflatten(1, (positions, count))


def gumbel_noise(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise, float32 (batch, count), from ``keys`` int64 (batch,)."""
    return -(-uniforms(keys, _NOISE, count).clamp(min=2.0**-25).log()).log()


def replace_tokens(tokens: Tensor, may: Tensor, keys: Tensor, share: float, count: int) -> Tensor:
    """``tokens`` (batch, positions) with that share of those that ``may`` be replaced by others, at random.

    Half of these come from the same row, whose words are likely ones, and half from all ids below ``count``. may: bool
    (batch, positions). keys: int64 (batch,).
    """
    positions = tokens.shape[1]
    replaced = may & (uniforms(keys, _REPLACED, positions) < share)
    chance = uniforms(keys, _REPLACEMENT, positions)
    order = may.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # those of the text first
    own = tokens.gather(1, order.gather(1, (chance * may.sum(1)[:, None]).long()))
    others = torch.where(uniforms(keys, _OWN, positions) < 0.5, own, (chance * count).long())
    return torch.where(replaced, others, tokens)
