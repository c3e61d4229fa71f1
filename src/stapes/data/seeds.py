"""Pseudo-random numbers as a function of what they are for, not of what was drawn before.

What happens to an utterance in an epoch depends on the seed, the epoch and the utterance's id alone: not on the number
of processes, the order of reading, or where a run was interrupted. Values are the same on every machine and version.
"""

from __future__ import annotations

import hashlib

import numpy as np

_MASK = (1 << 64) - 1


def key_of(id: str) -> int:
    """64 bits that stand for an utterance's id."""
    return int.from_bytes(hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def mix(*values: int) -> int:
    """64 well-mixed bits from integers, whose order matters."""
    state = 0
    for value in values:
        state = _splitmix((state ^ (value & _MASK)) & _MASK)
    return state


def mix_keys(keys: np.ndarray, *values: int) -> np.ndarray:
    """``mix(*values, key)`` for each of ``keys``: uint64 ``(n,)`` to uint64 ``(n,)``."""
    return _splitmix_array(np.asarray(keys, np.uint64) ^ np.uint64(mix(*values)))


def uniform(*values: int) -> float:
    """A number in [0, 1) from integers."""
    return (mix(*values) >> 11) / (1 << 53)


def generator(*values: int) -> np.random.Generator:
    """A generator of its own for what the integers stand for."""
    return np.random.Generator(np.random.PCG64(mix(*values)))


def _splitmix(state: int) -> int:
    """One round of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _splitmix_array(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)  # arrays of uint64 wrap around without a warning
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
