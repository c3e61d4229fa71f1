"""Speculative decoding on a GPU: a whole round, drafts and verdict, is one captured graph.

What the large model reads of a draft are rows of a step like any other. Its kernels compute each row for itself, and as
long as all rows together are no more than 16 with the same tiles as a single one: nothing is rounded otherwise than
without drafts, and nothing has to be settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.decoding.rules import RuleState, Vocabulary, apply_rules
from stapes.inference.engine import DecodeRequest
from stapes.inference.gpu_decoder import Batch, GpuDecoder, Memory, Rows, Windows
from stapes.inference.gpu_encoder import GpuEncoder
from stapes.inference.gpu_lane import GpuLane, upload
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.lanes import Lane, Slot
from stapes.inference.speculative import DraftedLane, SpeculativeWhisperEngine, copy_of, states_along
from stapes.kernels.jit import can_launch
from stapes.kernels.write_token import launch_likeliest
from stapes.models.whisper import KeyValue, Whisper


@dataclass(frozen=True)
class GpuDraft:
    """A draft model's decoder, and its memory of windows, whose rows are those of the large model's."""

    decoder: GpuDecoder
    memory: list[Memory]
    tokens: int


class GpuSpeculativeLane(DraftedLane, GpuLane):
    """A `GpuLane` whose steps are rounds."""

    def __init__(
        self,
        model: Whisper,
        decoder: GpuDecoder,
        memory: Sequence[Memory],
        vocabulary: Vocabulary,
        rows: int,
        graph_pool: Any,
        draft: GpuDraft,
    ) -> None:
        self.draft = draft
        self.most_per_step = draft.tokens + 1
        GpuLane.__init__(self, model, decoder, memory, vocabulary, rows, 1, False, graph_pool)

    def _allocate(self, batch: int) -> None:
        super()._allocate(batch)
        most = batch * self.most_per_step
        self._unread_live = torch.ones(most, dtype=torch.int32, device=self.device)
        self._unread_limits = torch.zeros(most, dtype=torch.int64, device=self.device)
        self.draft_cache = self.draft.decoder.new_cache(batch)

    def _advance(self, rows: int, blank: Tensor) -> None:
        """A round of the first ``rows`` rows, without a look by the host."""
        draft = self.draft
        state = copy_of(RuleState(*(field[:rows] for field in self.state.fields())))
        states, drafts = [copy_of(state)], []
        # When all it drafted was kept, the draft model has not read its own last token: it begins with two.
        tokens = torch.stack([self.previous[:rows], state.last], dim=1)
        places = self.positions[:rows, None] + torch.arange(-1, 1, device=self.device)
        for _ in range(draft.tokens):
            logits = self._read(draft.decoder, tokens, places, self.draft_cache, draft.memory)
            last = logits.view(rows, -1, logits.shape[1])[:, -1].contiguous()
            chosen, _ = self._likeliest(last, state, self.suppressed[:rows], blank, rows)
            drafts.append(chosen)
            states.append(copy_of(state))
            tokens, places = chosen[:, None], places[:, -1:] + 1
        tokens = torch.stack([self.state.last[:rows], *drafts], dim=1)
        places = self.positions[:rows, None] + torch.arange(tokens.shape[1], device=self.device)
        logits = self._read(self.decoder, tokens, places, self.cache, self.places)
        forbidden = _repeated(self.suppressed[:rows], tokens.shape[1])
        chosen, gains = self._likeliest(logits, states_along(states), forbidden, blank, rows)
        sure = torch.full_like(self.previous[:rows], tokens.shape[1])
        self._keep(tokens, chosen.view_as(tokens), gains.view_as(tokens), sure)
        self.live[:rows] *= (~self.ended[:rows] & (self.state.count[:rows] < self.limits[:rows])).int()

    def _read(
        self, decoder: GpuDecoder, tokens: Tensor, places: Tensor, cache: Sequence[KeyValue], memory: Sequence[Memory]
    ) -> Tensor:
        """Read tokens (rows, count), one behind the other → logits (rows × count, vocabulary), float32."""
        rows, count = tokens.shape

        def each(numbers: Tensor) -> Tensor:
            return _repeated(numbers[:rows], count)

        windows = Windows(self.first[:rows] * count, self.live[:rows] * count, self.memory_rows[:rows])
        batch = Batch(
            tokens.flatten(),
            self._places(places).flatten(),
            Rows(each(self.cells), each(self.source), each(self.live)),
            windows,
            count,
            successive=count > 1,
        )
        return decoder.step(batch, cache, memory)

    def _likeliest(
        self, logits: Tensor, state: RuleState, forbidden: Tensor, blank: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens that the rules allow and their log-probabilities, as many as logits; noted in ``state``.

        logits (rows × count, vocabulary): of the first ``rows`` rows, for so many places in each.
        Rows of no window, whose logits mean nothing, end: whatever else they said might be no token at all.
        """
        vocabulary = self.vocabulary
        dead = _repeated(self.live[:rows] == 0, len(logits) // rows)
        if not can_launch(self.device):
            logits = apply_rules(logits, state, forbidden, blank, vocabulary)
            tokens = torch.where(dead, vocabulary.end, logits.argmax(dim=-1))
            state.append(tokens, vocabulary)
            return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
        # Texts of one token, whose end ends nothing.
        tokens, gains = state.last.new_empty(len(logits), 1), logits.new_empty(len(logits), 1)
        live, limits = self._unread_live[: len(logits)], self._unread_limits[: len(logits)]
        ids = (vocabulary.end, vocabulary.no_timestamps, vocabulary.timestamp_begin)
        launch_likeliest(logits, forbidden, blank, state.fields(), dead, live, limits, tokens, gains, ids)
        return tokens[:, 0], gains[:, 0]


def _repeated(rows: Tensor, count: int) -> Tensor:
    """Each row so often, one behind the other, in memory of its own: kernels find them by their number."""
    if count == 1:
        return rows
    spread = rows[:, None].expand(len(rows), count, *rows.shape[1:])
    return spread.clone(memory_format=torch.contiguous_format).flatten(0, 1)


class GpuSpeculativeEngine(SpeculativeWhisperEngine, GpuWhisperEngine):
    """`GpuWhisperEngine` with a draft model, for greedy texts. It also runs on the CPU, for tests."""

    steps_per_look = 1

    def _prepare(self) -> None:
        GpuWhisperEngine._prepare(self)
        model = self.draft.model
        self._draft_decoder = GpuDecoder(model.decoder, model.config)
        self._own_encoder = None if self.draft.shares_encoder else GpuEncoder(model.encoder, self._fp8)
        self._draft_memory: list[Memory] = []

    def _draft_encoder(self, features: Tensor) -> Tensor:
        assert self._own_encoder is not None
        return self._own_encoder(features)

    def _lane(self, request: DecodeRequest) -> GpuLane:
        lane = super()._lane(request)
        assert isinstance(lane, GpuLane)
        return lane

    def _drafted_lane(self) -> Lane:
        self._rows()
        self._draft_memory = self._draft_decoder.new_memory(self.slots + (self.slots > 1), self.quantize_memory)
        draft = GpuDraft(self._draft_decoder, self._draft_memory, self.draft.tokens)
        return GpuSpeculativeLane(
            self.model, self.decoder, self.memory, self.vocabulary, self.slots, self._graph_pool, draft
        )

    def _prepare_drafts(self, slots: Sequence[Slot], encoded: Sequence[Any]) -> None:
        lane = slots[0].lane
        if isinstance(lane, GpuSpeculativeLane):
            place = upload(np.array([lane.host_memory[slot.row] for slot in slots], dtype=np.int32), self.device)
            cells = upload(np.array([lane.host_cells[slot.row] for slot in slots], dtype=np.int64), self.device)
            decoder = self._draft_decoder
            decoder.remember(self._draft_states(encoded), self._draft_memory, place)
            decoder.read(
                self._padded([slot.request.prompt for slot in slots]),
                self._draft_memory,
                place,
                lane.draft_cache,
                cells,
            )
            lane.greet(slots)

    def warm_up(self) -> None:
        """Nothing: a draft model is for few windows at once, whose kernels are few."""

    def clear(self) -> None:
        """Let go of all caches, and of the graphs that use them."""
        super().clear()
        self._draft_memory = []
