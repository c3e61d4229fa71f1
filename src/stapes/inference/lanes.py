"""Decoder slots: rows of a batch that windows join and leave at every step.

A *lane* holds slots of one kind: so many candidates each, searched by beam or written independently. A slot is a row
of the memory of the encoder's states and, beside each other, its candidates' rows of the self-attention cache.
Occupied rows are kept at the front, so that a step computes nothing for empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stapes.decoding.consensus import disagreement
from stapes.decoding.loops import repeats
from stapes.decoding.rules import RuleState, Vocabulary, apply_rules
from stapes.decoding.sampling import counter_uniform, random_key, sample
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.packed_memory import PackedRows
from stapes.models.whisper import KeyValue, Whisper

# How often the written tokens are looked at for repetition, in tokens.
_LOOP_CHECK_EVERY = 8


@dataclass(eq=False)
class Slot:
    """A window that is being written."""

    lane: Lane
    row: int
    request: DecodeRequest
    limit: int
    ended: bool = False
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    loop_ends: dict[int, int] = field(default_factory=dict)  # candidate → tokens up to where it was found looping
    checked: int = 0


@dataclass(frozen=True)
class Look:
    """What a lane's rows had written when it was looked at, on the host.

    ``rows``: where each slot stood then. The arrays are as the lane's tensors of the same names: ``ended`` and
    ``counts`` (rows,), ``tokens`` and ``logprobs`` (rows, written), ``sums`` and ``no_speech`` (rows,).
    """

    rows: dict[Slot, int]
    ended: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    sums: np.ndarray
    no_speech: np.ndarray


class Lane:
    """Slots of one kind, their caches, and the search over their candidates."""

    def __init__(self, model: Whisper, vocabulary: Vocabulary, rows: int, group: int, beam: bool) -> None:
        config = model.config
        self.model, self.vocabulary = model, vocabulary
        self.rows, self.group, self.beam = rows, group, beam
        self.slots: list[Slot] = []
        self.device, self.dtype = model.decoder.positions.device, model.decoder.positions.dtype
        batch = rows * group
        self.self_cache: list[KeyValue] = []
        self.memory: list[Tensor] = []  # of the encoder's states, (rows, …) each; made when the first windows join
        self.state = RuleState.empty(batch, self.device)
        self.tokens = torch.zeros(batch, config.text_context, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(batch, config.text_context, dtype=torch.float32, device=self.device)
        self.sums = torch.zeros(batch, dtype=torch.float32, device=self.device)  # of the beams' log-probabilities
        self.ended = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.temperature = torch.zeros(batch, dtype=torch.float32, device=self.device)
        self.keys = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.suppressed = zeros((batch, vocabulary.size), torch.float32, self.device)
        self.no_speech = torch.zeros(batch, dtype=torch.float32, device=self.device)
        self.lengths = [0] * batch  # host copy of ``positions``: bounds what a step reads
        self._allocate(batch)

    def _allocate(self, batch: int) -> None:
        """Make the self-attention cache, (batch, heads, text context, head width) for keys and values of each layer."""
        config = self.model.config
        shape = (batch, config.decoder_heads, config.text_context, config.width // config.decoder_heads)
        self.self_cache = [
            (zeros(shape, self.dtype, self.device), zeros(shape, self.dtype, self.device))
            for _ in range(config.decoder_layers)
        ]

    @property
    def free(self) -> int:
        """Empty slots."""
        return self.rows - len(self.slots)

    def _range(self, slot: Slot) -> slice:
        return slice(slot.row * self.group, (slot.row + 1) * self.group)

    def admit(
        self,
        requests: Sequence[DecodeRequest],
        memory: Sequence[Tensor],
        prefix: Sequence[KeyValue],
        logits: Tensor,
        no_speech: Tensor,
        blank: Tensor,
    ) -> list[Slot]:
        """Occupy slots with windows whose prompts have been read, and choose their first tokens.

        memory: see ``TextDecoder.memory``, (windows, …). prefix: per layer, keys and values of the prompts,
        padded at the end. logits: (windows, vocabulary), float32, of what follows each prompt. no_speech (windows,).
        """
        if not self.memory:
            self.memory = [room_for(kept, self.rows) for kept in memory]
        slots = []
        # One less than there is room for: word times read the text again with <|notimestamps|> and the end.
        room = self.tokens.shape[1] - 1
        for i, request in enumerate(requests):
            slot = Slot(self, len(self.slots), request, room - len(request.prompt))
            self.slots.append(slot)
            slots.append(slot)
            span, length = self._range(slot), len(request.prompt)
            for kept, new in zip(self.memory, memory, strict=True):
                kept[slot.row] = new[i]
            for layer, (keys, values) in enumerate(prefix):
                self.self_cache[layer][0][span, :, :length] = keys[i, :, :length]
                self.self_cache[layer][1][span, :, :length] = values[i, :, :length]
            self.state.reset(span, request.timestamps, request.max_initial_timestamp)
            self.positions[span] = length
            self.lengths[span] = [length] * self.group
            self.sums[span] = 0.0
            self.ended[span] = False
            self.no_speech[span] = no_speech[i]
            self.temperature[span] = request.temperature
            self.keys[span] = torch.tensor([random_key(*request.key, i) for i in range(self.group)], device=self.device)
            self.suppressed[span] = 0.0
            self.suppressed[span, list(request.suppressed)] = float("-inf")
        first = slots[0].row * self.group
        self._choose(logits.repeat_interleave(self.group, dim=0), first, blank)
        return slots

    def step(self, blank: Tensor) -> None:
        """Write one more token in every occupied slot."""
        count = len(self.slots) * self.group
        if not count:
            return
        decoder = self.model.decoder
        positions = self.positions[:count, None]
        span = min(max(self.lengths[:count]) + 1, self.tokens.shape[1])
        mask = (torch.arange(span, device=self.device) <= positions)[:, None, None]
        states, _ = decoder(
            self.state.last[:count, None],
            positions,
            [(keys[:count], values[:count]) for keys, values in self.self_cache],
            [kept[: len(self.slots)] for kept in self.memory],
            mask,
        )
        # A slot that ended but is not released yet stays where it is.
        self.positions[:count] = (self.positions[:count] + 1).clamp_max(self.tokens.shape[1] - 1)
        self.lengths[:count] = [min(length + 1, self.tokens.shape[1] - 1) for length in self.lengths[:count]]
        self._choose(decoder.logits(states[:, 0]).float(), 0, blank)

    def _choose(self, logits: Tensor, first: int, blank: Tensor) -> None:
        """Choose the next token of the candidates from ``first`` on, given their logits."""
        span = slice(first, first + logits.shape[0])
        state = RuleState(*(tensor[span] for tensor in self.state.fields()))
        logits = apply_rules(logits, state, self.suppressed[span], blank, self.vocabulary)
        if self.beam:
            self._choose_beams(logits, state, span)
        else:
            self._choose_tokens(logits, state, span)

    def _choose_tokens(self, logits: Tensor, state: RuleState, span: slice) -> None:
        tokens, chosen = self._pick(logits, self.temperature[span], self.keys[span], state.count)
        tokens = torch.where(self.ended[span], self.vocabulary.end, tokens)
        self.logprobs[span].scatter_(1, self._place(state), chosen[:, None])
        self._write(tokens, state, span)
        self.ended[span] |= tokens == self.vocabulary.end

    def _pick(self, logits: Tensor, temperature: Tensor, keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row, the likeliest or a drawn one, and its log-probability; all (rows,)."""
        tokens = logits.argmax(dim=-1)
        if self._draws():
            drawn = sample(logits, temperature, counter_uniform(keys, counts))
            tokens = torch.where(temperature > 0, drawn, tokens)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)

    def _draws(self) -> bool:
        """Whether any row draws its tokens, rather than taking the likeliest."""
        return any(slot.request.temperature > 0 for slot in self.slots)

    def _place(self, state: RuleState) -> Tensor:
        return state.count.clamp_max(self.tokens.shape[1] - 1)[:, None]

    def _write(self, tokens: Tensor, state: RuleState, span: slice) -> None:
        self.tokens[span].scatter_(1, self._place(state), tokens[:, None])
        state.append(tokens, self.vocabulary)

    def _choose_beams(self, logits: Tensor, state: RuleState, span: slice) -> None:
        """openai/whisper's beam search: the best continuations that go on, and a list of those that ended."""
        group = self.group
        scores, tokens = logits.log_softmax(dim=-1).topk(group + 1)
        totals = (self.sums[span, None] + scores).cpu().numpy()
        choices = tokens.cpu().numpy()
        counts = state.count.cpu().numpy()
        written = self.tokens[span].cpu().numpy()
        source = np.arange(logits.shape[0])
        next_tokens = np.full(logits.shape[0], self.vocabulary.end)
        next_sums = self.sums[span].cpu().numpy().copy()
        for slot in self.slots[span.start // group : span.stop // group]:
            base = slot.row * group - span.start
            if slot.ended:
                continue
            # All beams of a window that has written nothing are the same: look at one.
            beams = group if counts[base] else 1
            block = totals[base : base + beams]
            kept, newly_ended = 0, []
            for index in np.argsort(-block, axis=None, kind="stable"):
                beam, choice = divmod(int(index), group + 1)
                token, total = int(choices[base + beam, choice]), float(block[beam, choice])
                if token == self.vocabulary.end:
                    if total > float("-inf"):  # not what continues a forbidden token, taken for want of others
                        newly_ended.append((total, written[base + beam, : counts[base]].tolist()))
                    continue
                source[base + kept], next_tokens[base + kept], next_sums[base + kept] = base + beam, token, total
                kept += 1
                if kept == group:
                    break
            wanted = max(1, round(group * slot.request.patience))
            slot.finished += newly_ended[: max(0, wanted - len(slot.finished))]
            size = int(counts[base]) + 1
            if slot.request.stop_loops and size % _LOOP_CHECK_EVERY == 0:
                # The other beams are variations of the best: one look is enough.
                best = [*written[source[base], : size - 1].tolist(), int(next_tokens[base])]
                if repeats(best):
                    slot.loop_ends = dict.fromkeys(range(group), size)
            # A search that has ended stands still from here on, whenever it is harvested.
            slot.ended = len(slot.finished) >= wanted or bool(slot.loop_ends) or size >= slot.limit
        self._reorder(torch.from_numpy(source).to(self.device), span, state)
        self.sums[span] = torch.from_numpy(next_sums).to(self.device)
        self._write(torch.from_numpy(next_tokens).to(self.device), state, span)

    def _reorder(self, source: Tensor, span: slice, state: RuleState) -> None:
        if torch.equal(source, torch.arange(len(source), device=source.device)):
            return
        state.reorder(source)
        self.tokens[span] = self.tokens[span][source]
        self._reorder_cache(source, span)

    def _reorder_cache(self, source: Tensor, span: slice) -> None:
        length = max(self.lengths[span])
        for keys, values in self.self_cache:
            keys[span, :, :length] = keys[span, :, :length][source]
            values[span, :, :length] = values[span, :, :length][source]

    def look(self) -> Look:
        """What has been written, now."""
        count = len(self.slots) * self.group
        written = max(self.lengths[:count], default=0)
        tensors = (self.ended, self.state.count, self.tokens, self.logprobs, self.sums, self.no_speech)
        parts = [each[:count, :written] if each.dim() > 1 else each[:count] for each in tensors]
        return Look({slot: slot.row for slot in self.slots}, *(part.cpu().numpy() for part in parts))

    def harvest(self, look: Look | None = None) -> list[tuple[Slot, DecodeResult]]:
        """Results of the slots that had ended when we looked, now unless told otherwise."""
        look = look or self.look()
        out = []
        for slot in self.slots:
            if slot not in look.rows:
                continue
            first = look.rows[slot] * self.group
            written = min(int(look.counts[first]), slot.limit)
            if not self.beam:
                if slot.request.stop_loops:
                    self._stop_loops(slot, look, written)
                slot.ended = written >= slot.limit or all(
                    look.ended[first + i] or i in slot.loop_ends for i in range(self.group)
                )
            if slot.ended:
                out.append((slot, self._result(slot, look, written)))
        return out

    def _stop_loops(self, slot: Slot, look: Look, written: int) -> None:
        """Look at the texts as they stood every few tokens, so that the verdict does not depend on when we look."""
        due = range(slot.checked + _LOOP_CHECK_EVERY, written + 1, _LOOP_CHECK_EVERY)
        if not due:
            return
        slot.checked = due[-1]
        first = look.rows[slot] * self.group
        for i, text in enumerate(look.tokens[first : first + self.group, :written].tolist()):
            if i in slot.loop_ends:
                continue
            length = text.index(self.vocabulary.end) if self.vocabulary.end in text else written
            for size in due:
                if size <= length and repeats(text[:size]):
                    slot.loop_ends[i] = size
                    self._end(self._range(slot).start + i)
                    break

    def _end(self, row: int) -> None:
        """Let a row stand still."""
        self.ended[row] = True

    def _result(self, slot: Slot, look: Look, written: int) -> DecodeResult:
        first = look.rows[slot] * self.group
        candidates = [(total, tokens, False) for total, tokens in slot.finished]
        if len(candidates) < self.group:
            rows = slice(first, first + self.group)
            texts, logprobs = look.tokens[rows, :written].tolist(), look.logprobs[rows, :written].tolist()
            sums = look.sums[rows].tolist()
            unfinished = []
            for i, (text, gains) in enumerate(zip(texts, logprobs, strict=True)):
                size = slot.loop_ends.get(i, written)
                total = sum(gains[:size])
                if self.vocabulary.end in text[:size]:
                    size = text.index(self.vocabulary.end)
                    total = sum(gains[: size + 1])  # ending is part of the text
                unfinished.append((sums[i] if self.beam else total, text[:size], i in slot.loop_ends))
            unfinished.sort(key=lambda candidate: -candidate[0])
            candidates += unfinished[: self.group - len(candidates)]

        def rank(candidate: tuple[float, list[int], bool]) -> float:
            total, tokens, _ = candidate
            alpha = slot.request.length_penalty
            norm = max(1, len(tokens)) if alpha is None else ((5 + len(tokens)) / 6) ** alpha
            return total / norm

        # A loop is likely, token by token; a candidate that is none is worth more all the same.
        sound = [candidate for candidate in candidates if not candidate[2]] or candidates
        if not self.beam and self.group > 2 and slot.request.length_penalty is None:
            texts = [[token for token in text if token < self.vocabulary.end] for _, text, _ in sound]
            strangeness = dict(zip(map(id, sound), disagreement(texts), strict=True))
            total, tokens, looped = min(sound, key=lambda candidate: (strangeness[id(candidate)], -rank(candidate)))
        else:
            total, tokens, looped = max(sound, key=rank)
        return DecodeResult(
            tokens=tokens,
            avg_logprob=total / (len(tokens) + 1),
            no_speech_prob=float(look.no_speech[first]),
            temperature=slot.request.temperature,
            looped=looped,
        )

    def release(self, slot: Slot) -> None:
        """Free a slot; the last one moves into its place."""
        last = self.slots.pop()
        if last is slot:
            return
        source, target = self._range(last), self._range(slot)
        self._move_cache(last, slot)
        for tensor in self._row_tensors():
            tensor[target] = tensor[source]
        self.lengths[target] = self.lengths[source]
        last.row = slot.row
        self.slots[last.row] = last

    def _row_tensors(self) -> tuple[Tensor, ...]:
        """All that is kept of each row beside the caches."""
        kept = (self.tokens, self.logprobs, self.positions, self.sums, self.ended, self.no_speech)
        return (*self.state.fields(), *kept, self.temperature, self.keys, self.suppressed)

    def _move_cache(self, source: Slot, target: Slot) -> None:
        """Put what one slot has in the caches into another's place."""
        old, new = self._range(source), self._range(target)
        length = max(self.lengths[old])
        for keys, values in self.self_cache:
            keys[new, :, :length] = keys[old, :, :length]
            values[new, :, :length] = values[old, :, :length]
        for kept in self.memory:
            kept[target.row] = kept[source.row]


def room_for(kept: Tensor, rows: int) -> Tensor:
    """Room for so many windows, of what the decoder keeps of each; ``kept`` is that of others."""
    if isinstance(kept, PackedRows):
        return kept.room(rows)  # type: ignore[return-value]  # which does all that is done with such tensors
    return zeros((rows, *kept.shape[1:]), kept.dtype, kept.device)


def stack(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """What is kept of windows, one behind the other."""
    return PackedRows(rows) if isinstance(like, PackedRows) else torch.stack(list(rows))  # type: ignore[return-value]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory is taken as it is first written.

    On the CPU NumPy asks the system for pages that are zero already; the far ends of caches are seldom touched.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)
