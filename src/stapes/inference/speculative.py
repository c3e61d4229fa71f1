"""Speculative decoding (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192): a small Whisper drafts, the large one
decides.

A *round*: the draft model writes a few tokens; the large model reads them all in one pass and says at each place what
it would have written there, under the same rules; what agrees is kept from the front, and behind it the large model's
own next token. So the text is what the large model alone would have written.

Equal it is to the last token, although a product of several rows may be rounded otherwise than that of one: where a
token leads by so little that rounding could decide, the draft is cut there, and the large model reads all that was
written again, token by token, as it does without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stapes.audio.features import log_mel_spectrogram
from stapes.decoding.rules import RuleState, Vocabulary, apply_rules
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.lanes import Lane, Look, Slot, zeros
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.whisper import KeyValue, Whisper

_ROUNDING = 2e-3
"""Leads of a logit that are not trusted: far more than rounding does in fp32. With base, on three utterances, logits of
tokens read one by one and of 3, 6 or 16 read together differ by 1.0e-4 at most, of 63."""

DRAFTED = (0, False)
"""The kind of the lane in which drafts are written; the others are named by their candidates."""


@dataclass(frozen=True)
class DraftModel:
    """What drafts. tokens: in a round, at most. shares_encoder: it hears what the large model's encoder puts out."""

    model: Whisper
    tokens: int
    shares_encoder: bool


class Verdict(NamedTuple):
    """What becomes of drafts."""

    written: Tensor
    """How many of the large model's tokens are kept, (rows,)."""
    agreed: Tensor
    """How many of these were drafted, (rows,)."""


def judge_drafts(drafts: Tensor, chosen: Tensor, end: int) -> Verdict:
    """Hold drafts (rows, count) against what the large model writes at each place and behind them (rows, count + 1).

    Nothing is kept behind an end.
    """
    agreed = (drafts == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    ends = (chosen == end).long()
    up_to_end = (ends.cumsum(dim=1) - ends == 0).sum(dim=1)
    written = torch.minimum(agreed + 1, up_to_end)
    return Verdict(written, torch.minimum(agreed, written))


def states_along(states: Sequence[RuleState]) -> RuleState:
    """The rules' memories before each token of a draft, of so many rows each, as one: place by place in each row."""
    fields = zip(*(state.fields() for state in states), strict=True)
    return RuleState(*(torch.stack(each, dim=1).flatten() for each in fields))


def copy_of(state: RuleState) -> RuleState:
    """The same, not to be changed with it by what is written."""
    changing = (state.count, state.last, state.before_last, state.last_timestamp)
    return RuleState(state.timestamps, state.max_initial, *(field.clone() for field in changing))


class DraftedLane(Lane):
    """A lane of one greedy text a window, whose steps are rounds: what does not depend on how the models are run."""

    def _allocate(self, batch: int) -> None:
        super()._allocate(batch)
        self.previous = torch.zeros(batch, dtype=torch.int64, device=self.device)
        """What was read last: the draft model may not have seen it yet."""
        self.drafted, self.agreed = torch.zeros_like(self.previous), torch.zeros_like(self.previous)

    def greet(self, slots: Sequence[Slot]) -> None:
        """Count anew for windows that have just been admitted."""
        for slot in slots:
            self.previous[slot.row] = slot.request.prompt[-1]
            self.drafted[slot.row] = self.agreed[slot.row] = 0

    def _places(self, positions: Tensor) -> Tensor:
        """Where tokens stand. Those behind the end of the context are never kept: all are put into its last place."""
        return positions.clamp_max(self.tokens.shape[1] - 1)

    def _keep(self, read: Tensor, chosen: Tensor, gains: Tensor, sure: Tensor) -> Tensor:
        """Write down what the large model chose, as far as the drafts agree and in ``sure`` (rows,) places at most.

        read, chosen, gains (rows, count): tokens that were read, of which all but the first are drafts, those that the
        large model writes behind each, and their log-probabilities. Returns the rows (rows,), bool, that would have
        written more.
        """
        count, longest = chosen.shape
        going = ~self.ended[:count]
        verdict = judge_drafts(read[:, 1:], chosen, self.vocabulary.end)
        written = torch.minimum(verdict.written, sure) * going
        self.drafted[:count] += (longest - 1) * going
        self.agreed[:count] += torch.minimum(verdict.agreed, written)
        unsettled = (sure < verdict.written) & going
        state = RuleState(*(field[:count] for field in self.state.fields()))
        ahead = torch.arange(longest, device=self.device)
        kept = ahead < written[:, None]
        at = (state.count[:, None] + ahead).clamp_max(self.tokens.shape[1] - 1)
        for target, values in ((self.tokens, chosen), (self.logprobs, gains)):
            target[:count].scatter_(1, at, torch.where(kept, values, target[:count].gather(1, at)))
        history = torch.cat([state.before_last[:, None], state.last[:, None], chosen], dim=1)
        state.before_last.copy_(history.gather(1, written[:, None])[:, 0])
        state.last.copy_(history.gather(1, written[:, None] + 1)[:, 0])
        state.count += written
        times = torch.where(kept & (chosen >= self.vocabulary.timestamp_begin), chosen, -1)
        state.last_timestamp.copy_(torch.maximum(state.last_timestamp, times.amax(dim=1)))  # time never runs backwards
        seen = torch.cat([self.previous[:count, None], read], dim=1)
        self.previous[:count] = seen.gather(1, written[:, None])[:, 0]
        self.positions[:count] = self._places(self.positions[:count] + written)
        self.ended[:count] |= (kept & (chosen == self.vocabulary.end)).any(dim=1)
        return unsettled

    def _result(self, slot: Slot, look: Look, written: int) -> DecodeResult:
        drafted, agreed = int(self.drafted[slot.row]), int(self.agreed[slot.row])
        return replace(super()._result(slot, look, written), drafted=drafted, agreed=agreed)

    def _row_tensors(self) -> tuple[Tensor, ...]:
        return (*super()._row_tensors(), self.previous, self.drafted, self.agreed)


class SpeculativeLane(DraftedLane):
    """With both models in plain PyTorch, in fp32."""

    def __init__(self, model: Whisper, vocabulary: Vocabulary, rows: int, draft: DraftModel) -> None:
        self.draft = draft
        super().__init__(model, vocabulary, rows, 1, beam=False)

    def _allocate(self, batch: int) -> None:
        super()._allocate(batch)
        config = self.draft.model.config
        shape = (batch, config.decoder_heads, config.text_context, config.width // config.decoder_heads)
        self.draft_cache: list[KeyValue] = [
            (zeros(shape, self.dtype, self.device), zeros(shape, self.dtype, self.device))
            for _ in range(config.decoder_layers)
        ]
        self.draft_memory: list[Tensor] = []

    def prepare(self, slots: Sequence[Slot], memory: Sequence[Tensor], prefix: Sequence[KeyValue]) -> None:
        """What the draft model keeps of the encoder's states and prompts of windows that have just been admitted."""
        if not self.draft_memory:
            self.draft_memory = [zeros((self.rows, *kept.shape[1:]), kept.dtype, self.device) for kept in memory]
        for i, slot in enumerate(slots):
            row, length = slot.row, len(slot.request.prompt)
            for kept, new in zip(self.draft_memory, memory, strict=True):
                kept[row] = new[i]
            for (keys, values), (new_keys, new_values) in zip(self.draft_cache, prefix, strict=True):
                keys[row, :, :length], values[row, :, :length] = new_keys[i, :, :length], new_values[i, :, :length]
        self.greet(slots)

    def step(self, blank: Tensor) -> None:
        """One round in every occupied slot."""
        count = len(self.slots)
        if not count:
            return
        drafts, states = self._write_drafts(count, blank)
        tokens = torch.cat([self.state.last[:count, None], drafts], dim=1)
        places = self._places(self.positions[:count, None] + torch.arange(tokens.shape[1], device=self.device))
        logits = self._logits(self.model, tokens, places, self.self_cache, self.memory).flatten(0, 1)
        leads = logits.new_empty(len(logits))
        forbidden = self.suppressed[:count].repeat_interleave(tokens.shape[1], dim=0)
        logits = apply_rules(logits, states_along(states), forbidden, blank, self.vocabulary, leads)
        chosen = logits.argmax(dim=-1).view_as(tokens)
        gains = logits.gather(1, chosen.flatten()[:, None])[:, 0] - logits.logsumexp(dim=-1)
        best = logits.topk(2).values
        doubtful = (torch.minimum(best[:, 0] - best[:, 1], leads) < _ROUNDING).view_as(tokens)
        sure = (doubtful.long().cumsum(dim=1) == 0).sum(dim=1)
        unsettled = self._keep(tokens, chosen, gains.view_as(tokens), sure)
        self.lengths[:count] = self.positions[:count].tolist()
        for row in unsettled.nonzero()[:, 0].tolist():
            self._settle(row, blank)

    def _logits(
        self, model: Whisper, tokens: Tensor, places: Tensor, cache: Sequence[KeyValue], memory: Sequence[Tensor]
    ) -> Tensor:
        """Read tokens (rows, count) of the first rows → logits of what follows each, float32."""
        rows = len(tokens)
        span = int(places.max()) + 1
        mask = (torch.arange(span, device=self.device) <= places[..., None])[:, None]
        kept = [(keys[:rows], values[:rows]) for keys, values in cache]
        states, _ = model.decoder(tokens, places, kept, [each[:rows] for each in memory], mask)
        return model.decoder.logits(states).float()

    def _write_drafts(self, count: int, blank: Tensor) -> tuple[Tensor, list[RuleState]]:
        """What the draft model writes (rows, tokens), and the rules' memories before each token and behind the last.

        It first reads two tokens: when all it drafted was kept, it has not read its own last one.
        """
        model, state = self.draft.model, copy_of(RuleState(*(field[:count] for field in self.state.fields())))
        tokens = torch.stack([self.previous[:count], state.last], dim=1)
        places = self.positions[:count, None] + torch.tensor([-1, 0], device=self.device)
        states, drafts = [copy_of(state)], []
        ended = self.ended[:count].clone()
        for _ in range(self.draft.tokens):
            logits = self._logits(model, tokens, self._places(places), self.draft_cache, self.draft_memory)[:, -1]
            logits = apply_rules(logits, state, self.suppressed[:count], blank, self.vocabulary)
            chosen = logits.argmax(dim=-1)
            state.append(chosen, self.vocabulary)
            states.append(copy_of(state))
            drafts.append(chosen)
            ended |= chosen == self.vocabulary.end
            if bool(ended.all()):
                break
            tokens, places = chosen[:, None], places[:, -1:] + 1
        return torch.stack(drafts, dim=1), states

    def _settle(self, row: int, blank: Tensor) -> None:
        """Write a row's next token exactly as without drafts: read all that it wrote again, a token at a time."""
        slot, span = self.slots[row], slice(row, row + 1)
        start, count = len(slot.request.prompt), int(self.state.count[row])
        cache = [(keys[span], values[span]) for keys, values in self.self_cache]
        memory = [kept[span] for kept in self.memory]
        logits = None
        for i in range(count):
            place = self._places(torch.tensor([[start + i]], device=self.device))
            logits = self._logits(self.model, self.tokens[span, i : i + 1], place, cache, memory)
        assert logits is not None  # the first token was written on admission
        self.previous[row] = self.state.last[row]
        self._choose(logits[:, 0], row, blank)
        self.positions[span] = self._places(self.positions[span] + 1)
        self.lengths[row] = int(self.positions[row])

    def _move_cache(self, source: Slot, target: Slot) -> None:
        super()._move_cache(source, target)
        length = self.lengths[source.row]
        for keys, values in self.draft_cache:
            keys[target.row, :, :length] = keys[source.row, :, :length]
            values[target.row, :, :length] = values[source.row, :, :length]
        for kept in self.draft_memory:
            kept[target.row] = kept[source.row]


class SpeculativeWhisperEngine(TorchWhisperEngine):
    """`TorchWhisperEngine` with a draft model, for greedy texts; samples and beams are written without one."""

    def __init__(self, *parts: Any, draft: DraftModel, **named_parts: Any) -> None:
        self.draft = draft
        super().__init__(*parts, **named_parts)

    def _prepare(self) -> None:
        super()._prepare()
        self._lay_out(self.draft.model)

    def _encode(self, pcm: Tensor, lengths: list[int] | None) -> Tensor:
        """Both models' states side by side, (windows, 1500, width + width), where each has its own."""
        states = super()._encode(pcm, lengths)
        if self.draft.shares_encoder:
            return states
        features = log_mel_spectrogram(pcm, self.draft.model.config.mel_bins, lengths)
        return torch.cat([states, self._draft_encoder(features.to(self.dtype))], dim=-1)

    def _draft_encoder(self, features: Tensor) -> Tensor:
        return self.draft.model.encoder(features)

    def _states(self, encoded: Sequence[Any]) -> Tensor:
        return super()._states(encoded)[..., : self.model.config.width]

    def _draft_states(self, encoded: Sequence[Any]) -> Tensor:
        """What the draft model hears of windows."""
        both = super()._states(encoded)
        return both if self.draft.shares_encoder else both[..., self.model.config.width :]

    def _lane(self, request: DecodeRequest) -> Lane:
        if request.is_beam or request.temperature > 0:
            return super()._lane(request)
        if DRAFTED not in self.lanes:
            self.lanes[DRAFTED] = self._drafted_lane()
        return self.lanes[DRAFTED]

    def _drafted_lane(self) -> Lane:
        return SpeculativeLane(self.model, self.vocabulary, self.slots, self.draft)

    def free_slots(self, request: DecodeRequest) -> int:
        """Windows that could join now. Greedy texts and single samples come as one kind and have a lane each."""
        free = super().free_slots(request)
        if request.candidates == 1:
            free = min([free, *(self.lanes[kind].free for kind in (DRAFTED, (1, False)) if kind in self.lanes)])
        return free

    @torch.inference_mode()
    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Any]) -> list[Slot]:
        """Read the prompts of windows, put them into slots and write their first tokens."""
        slots: dict[int, Slot] = {}
        try:
            for greedy in (True, False):
                part = [i for i, each in enumerate(requests) if (each.temperature == 0) == greedy]
                if part:
                    asked, heard = [requests[i] for i in part], [encoded[i] for i in part]
                    slots |= zip(part, super().admit(asked, heard), strict=True)
                    self._prepare_drafts([slots[i] for i in part], heard)
        except BaseException:
            for slot in slots.values():
                self.release(slot)
            raise
        return [slots[i] for i in range(len(requests))]

    def _prepare_drafts(self, slots: Sequence[Slot], encoded: Sequence[Any]) -> None:
        lane = slots[0].lane
        if isinstance(lane, SpeculativeLane):
            model = self.draft.model
            memory = model.decoder.memory(self._draft_states(encoded))
            _, prefix, _ = self._read([slot.request.prompt for slot in slots], memory, model=model)
            lane.prepare(slots, memory, prefix)
