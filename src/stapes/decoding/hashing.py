"""Hashes of texts as int64 tensors: multiplication wraps around, on every device alike."""

from __future__ import annotations

from torch import Tensor

# Odd numbers without a pattern: the constants of SplitMix64 and of PCG (O'Neill 2014).
TOKEN_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
CHARACTER_FACTOR = 6364136223846793005


def mix(x: Tensor) -> Tensor:
    """Let the high bits have a say in the low ones."""
    return x ^ (x >> 32)


def text_hash(text: str) -> tuple[int, int]:
    """Hash of a text, and the factor that a hash before it is multiplied by: ``hash(a + b) = hash(a) f(b) + hash(b)``.

    Both as int64. Each character counts as a number without a pattern, so that texts that differ little do not meet.
    """
    value, factor = 0, 1
    for character in text:
        code = (ord(character) + 1) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        code = (code ^ code >> 29) * 0x94D049BB133111EB
        value = value * CHARACTER_FACTOR + (code ^ code >> 32)
        factor = factor * CHARACTER_FACTOR
    return signed(value), signed(factor)


def signed(value: int) -> int:
    """The low 64 bits as int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
