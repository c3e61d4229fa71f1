"""Whisper's token rules, for many windows at once: what may be written next, given what was.

Everything is a tensor operation over the rows of a batch, without a look by the host, so that the same code runs in
a captured graph. Source: openai/whisper ``decoding.py`` (SuppressBlank, SuppressTokens, ApplyTimestampRules).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """The ids that the rules are about. Text is below ``end``; timestamps are the last ``timestamp_begin`` and up."""

    end: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    size: int


@dataclass
class RuleState:
    """What the rules remember of each row; all (rows,), int64 except ``timestamps`` (bool).

    ``timestamps``: the row writes timestamps. ``max_initial``: highest timestamp index allowed first, -1 for any.
    ``count``: tokens written. ``last`` and ``before_last``: -1 when there is none. ``last_timestamp``: the highest
    timestamp id written, -1 when there is none.
    """

    timestamps: Tensor
    max_initial: Tensor
    count: Tensor
    last: Tensor
    before_last: Tensor
    last_timestamp: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> RuleState:
        """Rows that have written nothing."""
        none = torch.full((rows,), -1, dtype=torch.int64, device=device)
        return cls(
            timestamps=torch.zeros(rows, dtype=torch.bool, device=device),
            max_initial=none.clone(),
            count=torch.zeros(rows, dtype=torch.int64, device=device),
            last=none.clone(),
            before_last=none.clone(),
            last_timestamp=none.clone(),
        )

    def fields(self) -> tuple[Tensor, ...]:
        """All tensors, for moving rows."""
        return (self.timestamps, self.max_initial, self.count, self.last, self.before_last, self.last_timestamp)

    def reset(self, row: int | slice, timestamps: bool, max_initial: int) -> None:
        """Forget what the rows wrote."""
        self.timestamps[row] = timestamps
        self.max_initial[row] = max_initial
        self.count[row] = 0
        for field in (self.last, self.before_last, self.last_timestamp):
            field[row] = -1

    def reorder(self, index: Tensor) -> None:
        """Let row i continue what row ``index[i]`` wrote (beam search)."""
        for field in (self.last, self.before_last, self.last_timestamp):
            field.copy_(field[index])

    def append(self, tokens: Tensor, vocabulary: Vocabulary) -> None:
        """Note that each row wrote ``tokens`` (rows,)."""
        self.before_last.copy_(self.last)
        self.last.copy_(tokens)
        self.count += 1
        is_timestamp = tokens >= vocabulary.timestamp_begin
        self.last_timestamp.copy_(torch.where(is_timestamp, tokens, self.last_timestamp))


def apply_rules(
    logits: Tensor,
    state: RuleState,
    suppressed: Tensor,
    blank: Tensor,
    vocabulary: Vocabulary,
    leads: Tensor | None = None,
) -> Tensor:
    """Forbid tokens by setting their logits to minus infinity.

    logits (rows, vocabulary), float32; changed in place and returned. suppressed (rows, vocabulary): 0 where a row
    may write a token, minus infinity where its options or its model never allow it. blank (vocabulary,): the same,
    for the first token of a window only. leads (rows,): filled with how far all timestamps together are from the
    likeliest text, which is what the last rule decides by; infinity where it decides nothing.
    """
    if leads is not None:
        leads.fill_(float("inf"))
    logits += suppressed
    first = state.count == 0
    logits += torch.where(first[:, None], blank, 0.0)
    if state.timestamps.device.type == "cpu" and not bool(state.timestamps.any()):
        return logits  # on a GPU this look would wait for the device; there the rules below find nothing to do

    begin, end = vocabulary.timestamp_begin, vocabulary.end
    text = logits[:, :begin]
    times = logits[:, begin:]
    on = state.timestamps
    forbidden = float("-inf")
    text[:, vocabulary.no_timestamps].masked_fill_(on, forbidden)

    # Timestamps come in pairs, except directly before the end: after one, a second or the end; after two, text.
    after_time = on & (state.last >= begin)
    after_pair = after_time & ((state.before_last >= begin) | (state.before_last < 0))
    # Time never runs backwards; a segment has a length, so only the second of a pair may repeat the first.
    floor = state.last_timestamp + torch.where(after_time & ~after_pair, 0, 1) - begin
    index = torch.arange(times.shape[1], device=logits.device)
    no_time = index < floor[:, None]
    no_time |= after_pair[:, None]
    # The window opens with a timestamp, and not one far into it.
    too_late = first & on & (state.max_initial >= 0)
    no_time |= too_late[:, None] & (index > state.max_initial[:, None])
    times.masked_fill_(no_time & on[:, None], forbidden)
    text[:, :end].masked_fill_((after_time & ~after_pair)[:, None], forbidden)
    text.masked_fill_((first & on)[:, None], forbidden)

    # When all timestamps together are likelier than any single text token, one of them it is.
    time_mass, text_best = times.logsumexp(dim=-1), text.amax(dim=-1)
    time_wins = on & (time_mass > text_best)
    if leads is not None:
        # Nothing left on one side is minus infinity there, and on both is no number at all.
        leads.copy_(torch.where(on, (time_mass - text_best).abs().nan_to_num(nan=float("inf")), float("inf")))
    text.masked_fill_(time_wins[:, None], forbidden)
    return logits
