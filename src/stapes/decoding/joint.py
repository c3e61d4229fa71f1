"""Joint decoding: a beam search that a Transformer decoder and a CTC head score together, token by token.

Watanabe et al. 2017 (https://doi.org/10.1109/JSTSP.2017.2763455), one pass: the decoder says how likely the next token
is, and CTC how likely the sound begins with the tokens so far, whatever follows. CTC's prefix probabilities come from
a recursion over the frames (algorithm 2 there); it is linear, so it is solved here for all frames at once with running
sums of logarithms, in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stapes.models.hybrid import Decoder, KeyValue, state_mask


class PrefixState(NamedTuple):
    """For each frame, the log-probability of all paths up to it that say a prefix, (rows, frames) float64."""

    token: Tensor
    """Paths that end in the prefix's last token."""
    blank: Tensor
    """Paths that end in a blank."""


class CTCPrefixScorer:
    """How likely what a CTC head says begins with certain tokens.

    log_probs: (rows, frames, vocabulary), of which ``counts`` (rows,) frames are real.
    """

    def __init__(self, log_probs: Tensor, counts: Tensor, blank: int) -> None:
        padding = torch.arange(log_probs.shape[1], device=counts.device) >= counts[:, None]
        self._log_probs = log_probs.double().masked_fill(padding[..., None], -math.inf)
        self._log_probs[..., blank] = self._log_probs[..., blank].masked_fill(padding, 0.0)
        self.blank = blank

    def start(self) -> PrefixState:
        """Nothing has been said."""
        blank = self._log_probs[..., self.blank].cumsum(1)
        return PrefixState(torch.full_like(blank, -math.inf), blank)

    def extend(self, state: PrefixState, last: Tensor, candidates: Tensor, rows: Tensor) -> tuple[Tensor, PrefixState]:
        """Log-probability that the prefix goes on with each candidate, and the states it would then have.

        state: of each hypothesis. last: the last token of each, (hypotheses,), -1 for none. candidates: (hypotheses,
        candidates). rows: which row of the log-probabilities each hypothesis belongs to. Returns
        (hypotheses, candidates), and states (hypotheses, candidates, frames).
        """
        x = self._log_probs[rows]
        said = x.gather(2, candidates[:, None].expand(-1, x.shape[1], -1)).transpose(1, 2)  # (…, candidates, frames)
        silent = x[..., self.blank][:, None].expand_as(said)
        # Before a frame the prefix must have been said; one more of the same token needs a blank between.
        ready = torch.logaddexp(state.token, state.blank)
        repeated = (candidates == last[:, None])[..., None]
        ready = torch.where(repeated, state.blank[:, None], ready[:, None])
        first = torch.where((last < 0)[:, None, None], 0.0, -math.inf).expand(-1, candidates.shape[1], 1)
        before = torch.cat([first.to(ready.dtype), ready[..., :-1]], dim=2)
        token = _solve(said, before)
        after_token = torch.cat([torch.full_like(first, -math.inf, dtype=token.dtype), token[..., :-1]], dim=2)
        blank = _solve(silent, after_token)
        return torch.logsumexp(before + said, dim=2), PrefixState(token, blank)

    def finish(self, state: PrefixState) -> Tensor:
        """Log-probability that the prefix is all, (hypotheses,)."""
        return torch.logaddexp(state.token[..., -1], state.blank[..., -1])


def _solve(step: Tensor, entering: Tensor) -> Tensor:
    """r[t] = (r[t − 1] + entering[t]) · step[t], all in logarithms, along the last dimension; r[−1] is nothing."""
    # Steps of probability zero would make differences of infinities: what lies beyond one is as good as nothing.
    total = step.clamp(min=-1e4).cumsum(-1)
    before = torch.nn.functional.pad(total[..., :-1], (1, 0))
    solved = torch.logcumsumexp(entering - before, dim=-1) + total
    return solved.masked_fill(step == -math.inf, -math.inf)


@torch.inference_mode()
def joint_search(
    decoder: Decoder,
    states: Tensor,
    counts: Tensor,
    start: int,
    end: int,
    *,
    log_probs: Tensor | None = None,
    blank: int = 0,
    ctc_weight: float = 0.3,
    beam: int = 4,
    limit: int | None = None,
) -> list[list[int]]:
    """The likeliest tokens of each row, without the start and the end token.

    states, counts: what the encoder gave, (batch, frames, width) and (batch,). log_probs: what the CTC head says to
    these, (batch, frames, vocabulary); None: the decoder decides alone. A row's result is that of the row alone.
    """
    batch, frames, _ = states.shape
    weight = 0.0 if log_probs is None else ctc_weight
    scorer = None if log_probs is None else CTCPrefixScorer(log_probs, counts, blank)
    rows = torch.arange(batch, device=states.device).repeat_interleave(beam)
    memory = decoder.memory(states.repeat_interleave(beam, 0))
    mask = state_mask(counts, frames).repeat_interleave(beam, 0)
    prefix = None if scorer is None else PrefixState(*(part[rows] for part in scorer.start()))
    tokens = torch.full((batch * beam, 1), start, device=states.device)
    attention = torch.full((batch, beam), -math.inf, dtype=torch.float64, device=states.device)
    attention[:, 0] = 0.0  # all beams are the same at first: one of them counts
    best: list[tuple[float, list[int]]] = [(-math.inf, [])] * batch
    cache: list[KeyValue] | None = None
    longest = counts.clamp(max=limit) if limit is not None else counts
    for step in range(int(longest.max()) + 1 if batch else 0):
        logits, cache = decoder(tokens[:, -1:], memory, mask, cache)
        said = logits[:, -1].double().log_softmax(-1)
        last = tokens[:, -1] if step else torch.full_like(tokens[:, -1], -1)
        # Ending now.
        ended = attention.flatten() + said[:, end]
        joint = (1 - weight) * ended
        if scorer is not None and prefix is not None:
            joint = joint + weight * scorer.finish(prefix)
        joint = joint.masked_fill(attention.flatten() == -math.inf, -math.inf)
        said[:, [start, end, blank]] = -math.inf
        # Going on: the decoder's likeliest, scored by both.
        likely, candidates = said.topk(min(2 * beam, said.shape[1] - 3), dim=1)
        scores = attention.flatten()[:, None] + likely
        total, grown = (1 - weight) * scores, None
        if scorer is not None and prefix is not None:
            heard, grown = scorer.extend(prefix, last, candidates, rows)
            total = total + weight * heard
        total = total.masked_fill(scores == -math.inf, -math.inf)
        value, place = total.view(batch, -1).topk(beam, dim=1)
        for row, (ending, going) in enumerate(
            zip(joint.view(batch, beam).max(1).values.tolist(), value[:, 0].tolist(), strict=True)
        ):
            if ending > best[row][0]:
                which = row * beam + int(joint.view(batch, beam)[row].argmax())
                best[row] = (ending, tokens[which, 1:].tolist())
            # Scores only fall: nothing that goes on can win any more.
            if going <= best[row][0] or step >= int(longest[row]):
                attention[row] = -math.inf
        hypothesis = rows.view(batch, beam)[:, :1] * beam + place // candidates.shape[1]
        chosen, flat = place % candidates.shape[1], hypothesis.flatten()
        picked = chosen.flatten()
        alive = attention > -math.inf
        attention = torch.where(alive.any(1, keepdim=True), scores[flat, picked].view(batch, beam), -math.inf)
        if not bool((attention > -math.inf).any()):
            break
        tokens = torch.cat([tokens[flat], candidates[flat, picked][:, None]], dim=1)
        assert cache is not None
        cache = [(keys[flat], values[flat]) for keys, values in cache]
        if grown is not None:
            prefix = PrefixState(*(part[flat, picked] for part in grown))
    return [ids for _, ids in best]
