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
    """All that follows in one, int64: sizes and weights; how tokens write words; hashes of words and their numbers;
    of contexts, back-off weights packed below where their n-grams begin; where the hashes of a bucket begin; of n-grams
    by number, log-probabilities packed below the longest shorter contexts that end them."""
    keys: Tensor
    """(n-grams,) int64, sorted."""

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
        device, count, contexts = keys.device, words.shape[1], len(backoff)
        # Where each context's n-grams begin, and where hashes with the same first bits do.
        begins = torch.searchsorted(keys, torch.arange(contexts + 1, device=device) * size)
        bits = max(1, count.bit_length() - 1)
        edges = torch.arange(-(1 << bits - 1), 1 << bits - 1, device=device) << 64 - bits
        buckets = pad(torch.searchsorted(words[0].contiguous(), edges), (0, 1), value=count)
        floats = torch.tensor([1.0 if unknown_score is None else unknown_score, weight, bonus])  # 1: as the model says
        numbers = [count, unknown_id, *pack(torch.zeros(3), floats).tolist(), _steps(buckets), 64 - bits]
        numbers += [_steps(begins[1:]), contexts, size, 1 << bits - 1]
        entries = pack(suffix, pad(logprob, (1, 0)))
        parts = [letters.flatten(), words.flatten(), pack(begins, pad(backoff, (0, 1))), buckets, entries]
        numbers += [NUMBERS + sum(map(len, parts[:-1]))]
        numbers += [0] * (NUMBERS - len(numbers))
        return cls(torch.cat([torch.tensor(numbers, device=device), *parts]), keys)


Table = TokenTable | WordTable


def _steps(places: Tensor) -> int:
    """Halvings that find a place between any two neighbours."""
    return int(places.diff().max()).bit_length() if len(places) > 1 else 0
