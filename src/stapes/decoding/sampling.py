"""Random numbers by counter: a sample depends on its seed, window and step, never on its neighbours or on the device.

The generator is SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195) over a key and a count.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def random_key(*parts: int) -> int:
    """Hash numbers that name a stream of random numbers into one int64."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
        state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
        state ^= state >> 31
    return _signed(state)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def counter_uniform(keys: Tensor, counts: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float32: number ``counts[i]`` of stream ``keys[i]``; both (rows,), int64."""
    z = keys + (counts + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) * 2.0**-24


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token a row by inverting the cumulated distribution: (rows, vocabulary) → (rows,), int64."""
    scaled = logits / temperature.clamp_min(1e-6)[:, None]
    # In float64: a GPU sums in another order than a CPU, and what differs must stay far below a step of ``uniform``.
    cumulated = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    # The last sum is 1 up to rounding; the draw is scaled to it and so always falls on a token of mass > 0.
    target = uniform[:, None].double() * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return index.clamp_max(logits.shape[-1] - 1)
