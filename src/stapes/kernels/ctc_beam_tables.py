"""What speaks for a text besides the recording, as tables that the kernel of `stapes.kernels.ctc_beam` reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

NUMBERS = 16
"""Of a model of words, before the letters."""


def pack(high: Tensor, low: Tensor) -> Tensor:
    """Integers below 2³¹, and below each the bits of a float32: int64."""
    bits = low.float().contiguous().view(torch.int32).to(torch.int64)
    return high.to(torch.int64) << 32 | bits & 0xFFFFFFFF


@dataclass(frozen=True)
class TokenTable:
    """A deterministic automaton over tokens."""

    moves: Tensor
    """(nodes, vocabulary): what the token gains, packed below the node after it."""


@dataclass(frozen=True)
class WordTable:
    """A back-off model of words (`stapes.decoding.ngram`), and how tokens write them."""

    lm: Tensor
    """Sizes and weights, how tokens write words, words, back-off weights: int64, as the kernel reads them."""
    keys: Tensor
    """(n-grams,) int64, sorted."""
    entries: Tensor
    """(n-grams + 1,), by number: its log-probability, packed below the longest shorter context that ends it."""

    @classmethod
    def of(
        cls,
        letters: Tensor,
        words: Tensor,
        keys: Tensor,
        logprob: Tensor,
        backoff: Tensor,
        suffix: Tensor,
        *,
        order: int,
        size: int,
        unknown_id: int,
        unknown_score: float | None,
        weight: float,
        bonus: float,
    ) -> WordTable:
        """``letters``: (vocabulary, 3) int64, of each token 1 where the word before it is complete and 2 where it has
        letters, their hash, and what the hash before it is multiplied by. ``words``: (2, words) int64, their hashes,
        sorted, and their numbers in the model, which has ``size`` of them. The rest is the model's.
        """
        floats = torch.tensor([1.0 if unknown_score is None else unknown_score, weight, bonus])  # 1: as the model says
        count, ngrams = words.shape[1], len(keys)
        numbers = [count, unknown_id, *pack(torch.zeros(3), floats).tolist(), count.bit_length()]
        numbers += [ngrams, ngrams.bit_length(), len(backoff), size, order]
        numbers += [0] * (NUMBERS - len(numbers))
        parts = [letters.flatten(), words.flatten(), pack(torch.zeros_like(backoff), backoff)]
        lm = torch.cat([torch.tensor(numbers, device=keys.device), *parts])
        return cls(lm, keys, pack(suffix, pad(logprob, (1, 0))))


Table = TokenTable | WordTable
