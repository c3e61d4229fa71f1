"""Decoder slots on a GPU: steps are captured graphs, and the host looks at them a little later.

The device itself notes which rows go on (``live``); a row that has ended costs nothing until the host has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.decoding.rules import Vocabulary
from stapes.decoding.sampling import random_key
from stapes.inference.engine import DecodeRequest
from stapes.inference.gpu_decoder import Batch, GpuDecoder, Memory, Rows, Windows
from stapes.inference.lanes import Lane, Look, Slot
from stapes.kernels.jit import can_launch
from stapes.kernels.write_token import launch_likeliest
from stapes.models.whisper import Whisper

_BUCKETS = (1, 4, 16, 64, 128, 256)
"""Windows that a captured step has room for. Few: each is captured once, and empty rows cost next to nothing."""


@dataclass(frozen=True)
class _PendingLook:
    rows: dict[Slot, int]
    parts: list[Tensor]
    ready: torch.cuda.Event | None

    def read(self) -> Look:
        """Wait for the device, and take what it had written."""
        if self.ready is not None:
            self.ready.synchronize()
        return Look(self.rows, *(part.numpy() for part in self.parts))


class GpuLane(Lane):
    """A `Lane` whose caches are pools."""

    most_per_step = 1
    """Tokens that a step writes in a row."""

    def __init__(
        self,
        model: Whisper,
        decoder: GpuDecoder,
        memory: Sequence[Memory],
        vocabulary: Vocabulary,
        rows: int,
        group: int,
        beam: bool,
        graph_pool: Any,
    ) -> None:
        self.decoder, self.places = decoder, memory
        self._graph_pool = graph_pool
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._sampled = False
        self._looks: list[_PendingLook] = []
        super().__init__(model, vocabulary, rows, group, beam)

    def _allocate(self, batch: int) -> None:
        def integers(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=self.device)

        self.cache = self.decoder.new_cache(batch)
        self.host_cells = list(range(batch))
        self.host_memory = [0] * self.rows
        self.cells = torch.arange(batch, dtype=torch.int32, device=self.device)
        self.source = self.cells[:, None].repeat(1, self.tokens.shape[1])
        self.live = integers(batch)
        self.limits = integers(batch, kind=torch.int64)
        self.memory_rows = integers(self.rows)
        self.first = torch.arange(0, batch, self.group, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(batch if self.beam else 0, self.vocabulary.size, device=self.device)
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def _row_tensors(self) -> tuple[Tensor, ...]:
        return (*super()._row_tensors(), self.source, self.live, self.limits)

    def enter(self, requests: Sequence[DecodeRequest], memory_rows: Sequence[int], limit: int | None) -> list[Slot]:
        """Occupy slots with windows whose states are in the memory; their prompts are read next, then `begin`."""
        first = len(self.slots)
        room = self.tokens.shape[1] - 1
        slots = []
        for i, request in enumerate(requests):
            most = room - len(request.prompt)
            slots.append(Slot(self, first + i, request, min(most, request.exact_tokens or limit or most)))
        self.slots += slots
        group, rows = self.group, slice(first * self.group, (first + len(slots)) * self.group)
        lengths = [len(request.prompt) for request in requests for _ in range(group)]
        self.lengths[rows] = lengths
        self.host_memory[first : first + len(slots)] = memory_rows
        # All numbers of all rows in one transfer that the host does not wait for.
        numbers = np.array(
            [
                [
                    slot.limit,
                    len(request.prompt),
                    request.timestamps,
                    request.max_initial_timestamp,
                    random_key(*request.key, i),
                    self.host_cells[first * group + n * group],
                    memory_rows[n],
                ]
                for n, (request, slot) in enumerate(zip(requests, slots, strict=True))
                for i in range(group)
            ],
            dtype=np.int64,
        )
        limits, positions, timestamps, initial, keys, shared, places = upload(numbers.T, self.device).unbind()
        heat = np.array([request.temperature for request in requests for _ in range(group)], dtype=np.float32)
        self.temperature[rows] = upload(heat, self.device)
        self.limits[rows], self.positions[rows], self.keys[rows] = limits, positions, keys
        self.memory_rows[first : first + len(slots)] = places[::group].int()
        # All candidates of a window find the prompt with the first of them, and the rest each with itself.
        at = torch.arange(self.tokens.shape[1], device=self.device)
        own = self.cells[rows, None]
        self.source[rows] = torch.where(at < positions[:, None], shared.int()[:, None], own)
        self.live[rows] = (limits > 0).int()
        state = self.state
        state.timestamps[rows], state.max_initial[rows] = timestamps.bool(), initial
        state.count[rows] = 0
        for field in (state.last, state.before_last, state.last_timestamp):
            field[rows] = -1
        self.sums[rows] = 0.0
        self.ended[rows] = False
        for n, request in enumerate(requests):
            span = slice((first + n) * group, (first + n + 1) * group)
            self.suppressed[span] = self._mask(request.suppressed)
        return slots

    def forget(self, first: int) -> None:
        """Undo an admission that failed: the slots from ``first`` on."""
        del self.slots[first:]
        self.live[first * self.group :] = 0

    def begin(self, slots: Sequence[Slot], logits: Tensor, no_speech: Tensor, blank: Tensor) -> None:
        """Choose the first tokens of windows that have just entered.

        logits (windows, vocabulary), float32, of what follows each prompt; no_speech (windows,).
        """
        first = slots[0].row * self.group
        self.no_speech[first : first + len(slots) * self.group] = no_speech.repeat_interleave(self.group)
        self._sampled |= any(slot.request.temperature > 0 for slot in slots)
        self._choose(logits.repeat_interleave(self.group, dim=0), first, blank)

    def _mask(self, suppressed: tuple[int, ...]) -> Tensor:
        if suppressed not in self._masks:
            if len(self._masks) > 64:
                self._masks.clear()
            mask = np.zeros(self.vocabulary.size, dtype=np.float32)
            mask[list(suppressed)] = -np.inf
            self._masks[suppressed] = upload(mask, self.device)
        return self._masks[suppressed]

    def step(self, blank: Tensor) -> None:
        """Write one more token in every occupied slot."""
        if not self.slots:
            return
        windows = next((size for size in _BUCKETS if size >= len(self.slots)), self.rows)
        windows = min(windows, self.rows)
        rows = windows * self.group
        graph = self._graph(rows, blank)
        if graph is None:
            self._advance(rows, blank)
        else:
            graph.replay()
        most, last = self.most_per_step, self.tokens.shape[1] - 1
        self.lengths[:rows] = [min(length + most, last) for length in self.lengths[:rows]]
        if self.beam:
            count = len(self.slots) * self.group
            self._choose(self.logits[:count], 0, blank)

    def warm_up(self, blank: Tensor, *, sampled: bool) -> None:
        """Record the steps of all buckets, of windows whose tokens are drawn or not; nothing may be in any slot."""
        self._sampled = sampled
        for windows in sorted({min(size, self.rows) for size in _BUCKETS}):
            graph = self._graph(windows * self.group, blank)
            if graph is None:
                self._try(windows * self.group, blank)
            else:
                graph.replay()  # its first run fetches what it needs
        self._sampled = False

    def _try(self, rows: int, blank: Tensor) -> None:
        """A step that is undone: it would write a token."""
        kept = [(each, each[:rows].clone()) for each in self._row_tensors()]
        self._advance(rows, blank)
        for each, before in kept:
            each[:rows] = before

    def _advance(self, rows: int, blank: Tensor) -> None:
        """A step of the first ``rows`` rows, without a look by the host."""
        live = self.live[:rows]
        windows = rows // self.group
        count = live if self.group == 1 else live.view(windows, self.group).amax(dim=1) * self.group
        batch = Batch(
            self.state.last[:rows],
            self.positions[:rows],
            Rows(self.cells[:rows], self.source[:rows], live),
            Windows(self.first[:windows], count, self.memory_rows[:windows]),
            self.group,
        )
        logits = self.decoder.step(batch, self.cache, self.places)
        # A row that has ended stays where it is.
        self.positions[:rows] = (self.positions[:rows] + 1).clamp_max(self.tokens.shape[1] - 1)
        if self.beam:
            self.logits[:rows] = logits
        else:
            self._choose(logits, 0, blank)

    def _choose(self, logits: Tensor, first: int, blank: Tensor) -> None:
        span = slice(first, first + logits.shape[0])
        if self.beam or self._sampled or not can_launch(self.device):
            super()._choose(logits, first, blank)
            if not self.beam:
                going = ~self.ended[span] & (self.state.count[span] < self.limits[span])
                self.live[span] *= going.int()
            return
        vocabulary = self.vocabulary
        launch_likeliest(
            logits,
            self.suppressed[span],
            blank,
            tuple(field[span] for field in self.state.fields()),
            self.ended[span],
            self.live[span],
            self.limits[span],
            self.tokens[span],
            self.logprobs[span],
            (vocabulary.end, vocabulary.no_timestamps, vocabulary.timestamp_begin),
        )

    def _graph(self, rows: int, blank: Tensor) -> torch.cuda.CUDAGraph | None:
        if self._graph_pool is None:
            return None
        key = rows, self._sampled
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows, blank)
        return self._graphs[key]

    def _capture(self, rows: int, blank: Tensor) -> torch.cuda.CUDAGraph:
        """Record a step, after a first run, which compiles kernels."""
        stream = torch.cuda.Stream(self.device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._try(rows, blank)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"):
            self._advance(rows, blank)
        return graph

    def _end(self, row: int) -> None:
        self.ended[row] = True
        self.live[row] = 0

    def _reorder_cache(self, source: Tensor, span: slice) -> None:
        # What is written from here on goes to each row's own cell again.
        later = torch.arange(self.tokens.shape[1], device=self.device) >= self.positions[span, None]
        self.source[span] = torch.where(later, self.cells[span, None], self.source[span][source])

    def glance(self) -> None:
        """Begin to fetch what has been written; `late_look` gives it out."""
        count = len(self.slots) * self.group
        if not count:
            return
        written = min(max(self.lengths[:count]), self.tokens.shape[1])
        parts = []
        for each in (self.ended, self.state.count, self.tokens, self.logprobs, self.sums, self.no_speech):
            part = each[:count, :written] if each.dim() > 1 else each[:count]
            if self.device.type == "cuda":
                parts.append(torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True))
            else:
                parts.append(part.clone())
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self._looks.append(_PendingLook({slot: slot.row for slot in self.slots}, parts, ready))

    def late_look(self, behind: int) -> Look | None:
        """What the last look saw, or the one ``behind`` it, for which the device need not be waited for."""
        due = self._looks[: max(0, len(self._looks) - behind)]
        self._looks = self._looks[len(due) :]
        return due[-1].read() if due else None

    def _draws(self) -> bool:
        return self._sampled

    def release(self, slot: Slot) -> None:
        """Free a slot; the last one moves into its place."""
        last = self.slots[-1]
        super().release(slot)
        self.live[len(self.slots) * self.group :] = 0
        if last is not slot:
            self.memory_rows[slot.row] = self.host_memory[slot.row]
        if not self.slots:
            self._sampled = False
            self._looks.clear()

    def close(self) -> None:
        """Drop what refers to this lane, so that its caches go with it and not when Python next looks for cycles."""
        self.slots.clear()
        self._looks.clear()
        self._graphs.clear()

    def _move_cache(self, source: Slot, target: Slot) -> None:
        # Nothing moves: the two exchange their cells, and the memory's row goes along.
        old, new = self._range(source), self._range(target)
        cells = self.cells[old].clone()
        self.cells[old], self.cells[new] = self.cells[new].clone(), cells
        self.host_cells[old], self.host_cells[new] = self.host_cells[new], self.host_cells[old]
        self.host_memory[target.row] = self.host_memory[source.row]


def upload(numbers: np.ndarray, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
