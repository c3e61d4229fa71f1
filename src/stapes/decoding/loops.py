"""Whisper sometimes repeats itself until its context is full. Here is how that is seen while it happens."""

from __future__ import annotations

from collections.abc import Sequence

# Repetition of a single token or of a few is natural in speech ("no, no, no", digits); of this much, it is not.
_LONGEST_PERIOD = 32
_REPEATS_OF_ONE = 16
_REPEATS = 5
_REPEATED_TOKENS = 20


def repeated_tail(tokens: Sequence[int]) -> tuple[int, int]:
    """The shortest period that the end of ``tokens`` repeats long enough to be a loop, and how often; (0, 0) if none.

    A loop is five or more copies in a row of up to 32 tokens that make 20 tokens or more (16 of a single token).
    """
    size = len(tokens)
    for period in range(1, min(_LONGEST_PERIOD, size // 2) + 1):
        matched = 0
        while matched < size - period and tokens[size - 1 - matched] == tokens[size - 1 - matched - period]:
            matched += 1
        times = matched // period + 1
        enough = times >= _REPEATS_OF_ONE if period == 1 else times >= _REPEATS and times * period >= _REPEATED_TOKENS
        if enough:
            return period, times
    return 0, 0


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the end of ``tokens`` is a loop."""
    return repeated_tail(tokens)[0] > 0


def without_loop(tokens: Sequence[int]) -> list[int]:
    """``tokens`` with a loop at their end cut down to its first copy, and again while that shows another loop."""
    kept = list(tokens)
    period, times = repeated_tail(kept)
    while period:
        del kept[len(kept) - period * (times - 1) :]
        period, times = repeated_tail(kept)
    return kept
