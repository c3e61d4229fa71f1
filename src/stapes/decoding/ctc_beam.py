"""Prefix beam search over what a CTC model says, for a batch at once, with language models and expected words.

A prefix is a text; its probability is the sum over all paths that say it, kept apart by whether their last label is a
blank (Graves 2012, https://doi.org/10.1007/978-3-642-24797-2, §7.5; Hannun et al. 2014, https://arxiv.org/abs/1408.2873).
Each frame, every prefix of the beam stays or grows by a token. Everything is a tensor operation over batch, beam and
tokens, without a look by the host: frames are the only loop, and a captured graph may hold it.

Two ways to the same text must meet: growing prefix i by token c is the beam's prefix j where i's hash is that of j
without its last token and c is that token. Hashes have 64 bits and depend on the text alone, so that they meet also
where j's parent had left the beam and came back.

On a GPU one kernel does all frames (`stapes.kernels.ctc_beam`); what is here does the same everywhere.

What else speaks for a text, `Fusion`, depends on the text alone and is added to its log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.decoding.hashing import TOKEN_FACTOR, mix
from stapes.kernels.ctc_beam import can_search, launch_beam
from stapes.kernels.ctc_beam_tables import Table
from stapes.kernels.ctc_beam_trace import trace
from stapes.kernels.jit import can_launch, launch_or

FusionState = tuple[Tensor, ...]
"""What a fusion remembers of each prefix: tensors of shape (batch, beam)."""


class Fusion(Protocol):
    """Scores texts token by token. Log-probabilities are natural; nothing looks at the device from the host."""

    def start(self, rows: int, device: torch.device) -> FusionState:
        """The state of the empty text: tensors (rows, 1)."""
        ...

    def extend(self, state: FusionState, tokens: Tensor) -> Tensor:
        """What each prefix gains by each token: tokens (batch, candidates) → (batch, beam, candidates)."""
        ...

    def follow(self, state: FusionState, tokens: Tensor) -> FusionState:
        """The state after a token each, (batch, beam); -1: the prefix stays as it is."""
        ...

    def finish(self, state: FusionState) -> Tensor:
        """What each text gains by ending here: (batch, beam)."""
        ...

    def table(self) -> Table | None:
        """The same for the kernel; None: it is too large, or of another kind."""
        ...


class Hypothesis(NamedTuple):
    """A text that the recording may say."""

    tokens: list[int]
    frames: list[int]
    """The frame in which each token most likely began; `stapes.decoding.ctc_align` knows it better."""
    score: float
    """Its log-probability with all that speaks for it."""
    acoustic: float
    """Its log-probability by the recording alone."""


@dataclass
class BeamState:
    """The beam, (batch, beam) each, and how it came about. Goes on with the next window of the same recordings."""

    blank: Tensor
    """Log-probability of all paths so far that end in a blank."""
    label: Tensor
    """The same of those that end in the last token."""
    extra: Tensor
    """What fusions add."""
    last: Tensor
    """The last token, -1 for none. Places of the beam that hold nothing have probability 0 and no last token."""
    hash: Tensor
    parent: Tensor
    """Hash of the text without its last token."""
    fusions: list[FusionState]
    history: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """For each window: the place each prefix had before and the token it grew by or -1, (batch, frames, 2, beam), and
    the real frames, (batch,)."""

    def fields(self) -> tuple[Tensor, ...]:
        """All tensors but the history: a captured graph copies them back to where it began."""
        own = (self.blank, self.label, self.extra, self.last, self.hash, self.parent)
        return (*own, *(tensor for remembered in self.fusions for tensor in remembered))

    @property
    def acoustic(self) -> Tensor:
        """Log-probability of each text by the recording."""
        return torch.logaddexp(self.blank, self.label)


class PrefixBeamSearch:
    """Finds the likeliest texts. Holds no state of its own: one object serves all threads.

    ``beam_size``: texts kept. ``tokens_per_frame``: how many tokens, the likeliest of each frame, may prolong a text;
    None: all. Without either limit in the way the result is exact. ``banned``: tokens that no text holds, as ``<s>``.
    """

    def __init__(
        self,
        blank: int,
        beam_size: int = 32,
        tokens_per_frame: int | None = None,
        fusions: Sequence[Fusion] = (),
        banned: Sequence[int] = (),
    ) -> None:
        self.blank = blank
        self.banned = list(banned)
        self.beam_size = beam_size
        self.tokens_per_frame = tokens_per_frame
        self.fusions = list(fusions)

    def __call__(self, log_probs: Tensor, lengths: Tensor, n_best: int = 1) -> list[list[Hypothesis]]:
        """The likeliest texts of each row, best first; arguments as in `advance` and `finish`."""
        dtype = torch.promote_types(log_probs.dtype, torch.float32)
        state = self.start(len(log_probs), log_probs.device, dtype)
        self.advance(state, log_probs, lengths)
        return self.finish(state, n_best)

    def start(self, rows: int, device: torch.device, dtype: torch.dtype = torch.float32) -> BeamState:
        """The empty text alone, for so many recordings; ``dtype`` of the sums."""
        shape = (rows, self.beam_size)
        never = torch.full(shape, float("-inf"), dtype=dtype, device=device)
        blank = never.clone()
        blank[:, 0] = 0.0
        zero = torch.zeros(shape, dtype=torch.int64, device=device)
        return BeamState(
            blank=blank,
            label=never,
            extra=torch.zeros_like(never),
            last=zero - 1,
            hash=zero,
            parent=zero.clone(),
            fusions=[
                tuple(part.expand(shape).clone() for part in fusion.start(rows, device)) for fusion in self.fusions
            ],
        )

    def advance(self, state: BeamState, log_probs: Tensor, lengths: Tensor) -> None:
        """Hear more: log_probs (batch, frames, vocabulary), of which ``lengths`` (batch,) frames are real."""
        log_probs = log_probs.to(state.blank.dtype)
        allowed = log_probs.clone()
        for id in (self.blank, *self.banned):  # by number: a copy of indices from the host could not be captured
            allowed[:, :, id] = float("-inf")
        count = min(self.tokens_per_frame or log_probs.shape[2], log_probs.shape[2])
        reference = partial(self._advance_reference, state, log_probs, allowed, count, lengths)
        device = log_probs.device
        if can_launch(device) and log_probs.dtype == torch.float32:
            tables = [table for fusion in self.fusions if (table := fusion.table()) is not None]
            columns = min(count + 1, log_probs.shape[2])
            if len(tables) == len(self.fusions) and can_search(device, self.beam_size, columns, tables):
                launch = partial(self._launch, state, log_probs, allowed, count, lengths, tables)
                launch_or("ctc_beam", device, launch, reference)
                return
        reference()

    def _launch(
        self, state: BeamState, log_probs: Tensor, allowed: Tensor, count: int, lengths: Tensor, tables: Sequence[Table]
    ) -> None:
        """`advance` by the kernel."""
        tokens = None
        if count < allowed.shape[2]:
            allowed, found = allowed.topk(count, dim=2)
            tokens = found.to(torch.int32)
        fields = (state.blank, state.label, state.extra, state.last, state.hash, state.parent)
        fields, state.fusions, history = launch_beam(
            fields, state.fusions, tables, log_probs, allowed, tokens, lengths, self.blank
        )
        state.blank, state.label, state.extra, state.last, state.hash, state.parent = fields
        state.history.append((history, lengths))

    def _advance_reference(
        self, state: BeamState, log_probs: Tensor, allowed: Tensor, count: int, lengths: Tensor
    ) -> None:
        """`advance` in plain PyTorch."""
        rows, frames, _ = log_probs.shape
        real = torch.arange(frames, device=log_probs.device) < lengths[:, None]
        likeliest, tokens = allowed.topk(count, dim=2)
        likeliest = likeliest.masked_fill(~real[:, :, None], float("-inf"))
        history = torch.empty((rows, frames, 2, self.beam_size), dtype=torch.int32, device=log_probs.device)
        for frame in range(frames):
            history[:, frame, 0], history[:, frame, 1] = self._step(
                state, log_probs[:, frame], likeliest[:, frame], tokens[:, frame], real[:, frame, None]
            )
        state.history.append((history, lengths))

    def _step(
        self, state: BeamState, log_probs: Tensor, likeliest: Tensor, tokens: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One frame: log_probs (batch, vocabulary), of the likeliest ``tokens`` (batch, candidates); real (batch, 1).

        Returns the place in the old beam that each prefix of the new one came from, and what it grew by.
        """
        beam, candidates = self.beam_size, tokens.shape[1]
        never = float("-inf")
        both = state.acoustic
        again = log_probs.gather(1, state.last.clamp_min(0)).masked_fill(state.last < 0, never)

        # Prefixes that stay: a blank, the last token once more, or a shorter prefix of the beam that grew into this.
        stays_blank = torch.where(real, both + log_probs[:, self.blank, None], state.blank)
        is_parent = state.hash[:, :, None] == state.parent[:, None, :]  # (batch, shorter, longer)
        same = state.last[:, :, None] == state.last[:, None, :]
        grows = torch.where(same, state.blank[:, :, None], both[:, :, None])  # a blank parts two equal tokens
        grows, parent_place = grows.masked_fill(~is_parent, never).max(dim=1)
        grows = grows + again
        longer = state.label + again
        stays_label = torch.where(real, torch.logaddexp(longer, grows), state.label)
        stays = torch.logaddexp(stays_blank, stays_label) + state.extra

        # Prefixes that are new: those which the beam holds already were counted above.
        repeats = state.last[:, :, None] == tokens[:, None, :]
        new = likeliest[:, None, :] + torch.where(repeats, state.blank[:, :, None], both[:, :, None])
        held = torch.bmm(is_parent.to(new.dtype), repeats.to(new.dtype)) > 0
        new = new.masked_fill(held, never)
        extra = state.extra[:, :, None].expand_as(new)
        for fusion, remembered in zip(self.fusions, state.fusions, strict=True):
            extra = extra + fusion.extend(remembered, tokens)

        _, best = torch.cat([stays, (new + extra).flatten(1)], dim=1).topk(beam, dim=1)
        grew = best >= beam
        index = (best - beam).clamp_min(0)
        place = torch.where(grew, index // candidates, best.clamp_max(beam - 1))
        token = torch.where(grew, tokens.gather(1, index % candidates), -1)
        state.blank = stays_blank.gather(1, place).masked_fill(grew, never)
        state.label = torch.where(grew, new.flatten(1).gather(1, index), stays_label.gather(1, place))
        state.extra = torch.where(grew, extra.flatten(1).gather(1, index), state.extra.gather(1, place))
        shorter = state.hash.gather(1, place)
        state.hash = torch.where(grew, mix(shorter * TOKEN_FACTOR + token + 1), shorter)
        state.parent = torch.where(grew, shorter, state.parent.gather(1, place))
        last = torch.where(grew, token, state.last.gather(1, place))
        state.last = last.masked_fill(torch.isneginf(torch.maximum(state.blank, state.label)), -1)
        state.fusions = [
            fusion.follow(tuple(part.gather(1, place) for part in remembered), token)
            for fusion, remembered in zip(self.fusions, state.fusions, strict=True)
        ]
        # What a prefix grew from only now, because that is likelier than that it was there: its last token begins here.
        begins = real & (grows > torch.maximum(stays_blank, longer))
        begins = begins.gather(1, place) & ~grew
        return (torch.where(begins, parent_place.gather(1, place), place), torch.where(begins, state.last, token))

    def finish(self, state: BeamState, n_best: int = 1) -> list[list[Hypothesis]]:
        """The likeliest texts of each row, best first, at most ``n_best``. The state may go on afterwards."""
        acoustic = state.acoustic
        score = acoustic + state.extra
        for fusion, remembered in zip(self.fusions, state.fusions, strict=True):
            score = score + fusion.finish(remembered)
        best, place = score.topk(min(n_best, self.beam_size), dim=1)
        scores = torch.stack([best, acoustic.gather(1, place)]).double().cpu().numpy()
        tokens = _trace(place.to(torch.int32), [history for history, _ in state.history]).cpu().numpy()
        numbers = _numbers([(each.shape[1], lengths.cpu().numpy()) for each, lengths in state.history], tokens)
        out: list[list[Hypothesis]] = []
        for row in range(tokens.shape[0]):
            found: list[Hypothesis] = []
            for rank in range(tokens.shape[2]):
                frames = np.flatnonzero(tokens[row, :, rank] >= 0)
                total, heard = scores[:, row, rank].tolist()
                if heard > float("-inf"):  # places of the beam that hold nothing
                    ids, begun = tokens[row, frames, rank].tolist(), numbers[row, frames].tolist()
                    found.append(Hypothesis(ids, begun, total, heard))
            out.append(found)
        return out


def _numbers(windows: Sequence[tuple[int, NDArray[np.int64]]], tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Which of a recording's real frames each frame of the windows is: (batch, frames)."""
    rows = len(tokens)
    numbers, before = [np.zeros((rows, 0), np.int64)], np.zeros(rows, np.int64)
    for frames, lengths in windows:
        numbers.append(np.arange(frames) + before[:, None])
        before = before + lengths
    return np.concatenate(numbers, axis=1)


def _trace(at: Tensor, windows: Sequence[Tensor]) -> Tensor:
    """What the prefixes at the end grew by in each frame: (batch, frames, n-best), -1 for nothing."""
    found = [torch.empty((len(at), 0, at.shape[1]), dtype=torch.int32, device=at.device)]
    found += [trace(history, at) for history in reversed(windows)]
    return torch.cat(found[::-1], dim=1)
