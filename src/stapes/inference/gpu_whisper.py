"""Whisper on a GPU, AMD's and NVIDIA's alike: plain PyTorch, Triton kernels, and steps captured as graphs.

The host runs ahead of the device: it enqueues encoding, admissions and steps without waiting, and learns which windows
have ended from a copy that the device made some steps ago. Only a nearly empty engine is waited for, so that a single
short recording is not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.audio.features import WINDOW_SAMPLES, log_mel_spectrogram, pad_windows
from stapes.decoding.align import alignment_cost
from stapes.devices.rocm import graphs_agree
from stapes.inference.encoder_graphs import FEW, EncoderGraphs
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult
from stapes.inference.gpu_decoder import GpuDecoder, Memory
from stapes.inference.gpu_encoder import GpuEncoder
from stapes.inference.gpu_lane import GpuLane, upload
from stapes.inference.lanes import Slot
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.options import TranscribeOptions

log = logging.getLogger(__name__)

_FEW = 8
"""Windows up to which the device is waited for at every look: latency counts then, not throughput."""

_STAGES = 3
"""Batches of samples that may be on their way to the device at once."""


_GROUPS = (1, 2, 4, 8, 16, 32)
_PROMPTS = (3, 20, 50, 100, 200)
"""Windows that enter slots together, and lengths of prompts of a single one, for which kernels are compiled."""


@dataclass(frozen=True)
class Encoding:
    """The encoder's states (1500, width) of a window; ``ready`` once the device has come so far."""

    states: Tensor
    ready: torch.cuda.Event | None


@dataclass(frozen=True)
class _Ahead:
    """Scores and probabilities of an alignment, ``ready`` once the device has come so far."""

    scores: Tensor
    probabilities: Tensor
    ready: torch.cuda.Event | None


class GpuWhisperEngine(TorchWhisperEngine):
    """Implements ``engine.Engine`` and ``AsyncEngine``. It also runs on the CPU, without graphs and kernels, for tests.

    Made of the same parts as its parent. quantize_memory: keep keys and values of the encoder's states in 8 bits. fp8:
    the 8-bit floats that the encoder's products are computed in, None for those of the weights.
    """

    steps_per_look = 4
    enqueues = finds_words_apart = True

    def __init__(
        self, *parts: Any, quantize_memory: bool = False, fp8: torch.dtype | None = None, **named_parts: Any
    ) -> None:
        self.quantize_memory, self._fp8 = quantize_memory, fp8
        super().__init__(*parts, **named_parts)
        self.memory: list[Memory] = []
        self.free_rows: list[int] = []
        self._graph_pool: Any = None
        if self.device.type == "cuda" and graphs_agree(self.device)[0]:
            self._graph_pool = torch.cuda.graph_pool_handle()
        self._staged: list[tuple[Tensor, torch.cuda.Event]] = []
        # Encoding is bound by arithmetic and steps by the memory: beside each other they fill the device. A single slot
        # has nothing to be written meanwhile, and would pay for memory that streams do not share. A kernel of a higher
        # priority gets the next processor that is free, so that steps, and what is urgent, pass an encoder at work.
        on_gpu = self.device.type == "cuda"
        self._encoder_stream = torch.cuda.Stream(self.device) if on_gpu and self.slots > 1 else None
        self._urgent_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu and self.slots > 1 else None
        self._words_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        self.stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        """Of the thread that drives the engine."""
        self._encoder_graphs: dict[int, EncoderGraphs] = {}

    @property
    def keeps_thread(self) -> bool:
        """PyTorch keeps handles, work spaces and plans of its libraries for each thread, and not all are given back: a
        thread for each call would pay for them each time."""
        return self.device.type == "cuda"

    def _prepare(self) -> None:
        self.encoder = GpuEncoder(self.model.encoder, self._fp8)
        self.decoder = GpuDecoder(self.model.decoder, self.model.config)

    @torch.inference_mode()
    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False, urgent: bool = False) -> list[Encoding]:
        """Samples of up to 30 s each → the encoder's states of each."""
        lengths = [len(window) for window in windows] if again else None
        stream = self._urgent_stream if urgent else self._encoder_stream
        with torch.cuda.stream(stream):  # does nothing for None
            states = self._encode(self._to_device(windows), lengths)
            ready = None
            if stream is not None:
                ready = torch.cuda.Event()
                ready.record()
        return [Encoding(row, ready) for row in states]

    def is_encoded(self, encoded: Encoding) -> bool:
        """Whether the device has come so far."""
        return encoded.ready is None or encoded.ready.query()

    def _encode(self, pcm: Tensor, lengths: list[int] | None) -> Tensor:
        features = log_mel_spectrogram(pcm, self.model.config.mel_bins, lengths).to(self.dtype)
        graphs = self._graphs_of_encoder()
        return self.encoder(features) if graphs is None else graphs(features)

    def _graphs_of_encoder(self) -> EncoderGraphs | None:
        """Those for the current stream: of urgent windows there are few at once."""
        if self._graph_pool is None:
            return None
        priority = torch.cuda.current_stream(self.device).priority
        if priority not in self._encoder_graphs:
            most = min(FEW, self.encoder_batch) if priority else self.encoder_batch
            self._encoder_graphs[priority] = EncoderGraphs(self.encoder, most, priority)
        return self._encoder_graphs[priority]

    def _states(self, encoded: Sequence[Encoding]) -> Tensor:
        """(windows, 1500, width), for the stream of the decoder."""
        if self._encoder_stream is not None:
            stream = torch.cuda.current_stream(self.device)
            for each in encoded:
                assert each.ready is not None
                stream.wait_event(each.ready)
                each.states.record_stream(stream)
        return torch.stack([each.states for each in encoded])

    def _to_device(self, windows: Sequence[np.ndarray]) -> Tensor:
        """Samples, silence behind them, through memory that the device can fetch from by itself."""
        if self.device.type != "cuda":
            return pad_windows(windows, self.device)
        if len(self._staged) < _STAGES:
            stage = torch.empty(self.encoder_batch, WINDOW_SAMPLES, pin_memory=True)
        else:
            stage, fetched = self._staged.pop(0)
            fetched.synchronize()
        if len(stage) < len(windows):
            stage = torch.empty(len(windows), WINDOW_SAMPLES, pin_memory=True)
        _fill(stage, windows)
        batch = stage[: len(windows)].to(self.device, non_blocking=True)
        fetched = torch.cuda.Event()
        fetched.record()
        self._staged.append((stage, fetched))
        return batch

    @torch.inference_mode()
    def detect_language(self, encoded: Sequence[Encoding]) -> list[dict[str, float]]:
        """Probability of each language, from what the model would write after <|startoftranscript|>."""
        out: list[dict[str, float]] = []
        codes, ids = list(self.languages), list(self.languages.values())
        while len(out) < len(encoded):
            part = encoded[len(out) : len(out) + max(1, len(self._rows()))]
            rows, memory = [self.free_rows.pop() for _ in part[: len(self.free_rows)]], self.memory
            kept = list(rows)
            if not rows:  # all slots are taken
                rows, memory = ([self.slots], self.memory) if self.slots > 1 else ([0], self._new_memory(1))
            try:
                place = upload(np.array(rows, dtype=np.int32), self.device)
                self.decoder.remember(self._states(part), memory, place)
                tokens = torch.full((len(part), 1), self.sot, dtype=torch.int64, device=self.device)
                states, _ = self.decoder.read(tokens, memory, place)
                logits = self.decoder.logits(states[:, 0])
                out += [dict(zip(codes, row, strict=True)) for row in logits[:, ids].softmax(dim=-1).tolist()]
            finally:
                self.free_rows += kept
        return out

    def _rows(self) -> list[int]:
        """Free rows of the memory, which is made when it is first asked for.

        Where there are several slots there is one row more, to detect a language in while they are all taken. Where
        the device has no room for them all, there are fewer slots from then on.
        """
        while not self.memory:
            try:
                self.memory = self._new_memory(self.slots + (self.slots > 1))
            except torch.OutOfMemoryError:
                if self.slots == 1:
                    raise
                torch.cuda.empty_cache()
                log.warning(
                    "%d windows at once do not fit into the GPU's memory: trying %d", self.slots, self.slots // 2
                )
                self.slots //= 2
            else:
                self.free_rows = list(range(self.slots))
        return self.free_rows

    def _new_memory(self, rows: int) -> list[Memory]:
        return self.decoder.new_memory(rows, self.quantize_memory)

    def free_slots(self, request: DecodeRequest) -> int:
        """Windows that could join now."""
        return min(self._lane(request).free, len(self._rows()))

    def _lane(self, request: DecodeRequest) -> GpuLane:
        kind = (request.candidates, request.is_beam)
        lane = self.lanes.get(kind)
        if lane is None:
            self._rows()
            rows = max(1, self.slots // request.candidates)
            pool = self._graph_pool
            lane = GpuLane(self.model, self.decoder, self.memory, self.vocabulary, rows, *kind, pool)
            self.lanes[kind] = lane
        assert isinstance(lane, GpuLane)
        return lane

    @torch.inference_mode()
    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Encoding]) -> list[Slot]:
        """Read the prompts of windows, put them into slots of one lane and write their first tokens."""
        lane = self._lane(requests[0])
        free = self._rows()
        rows = [free.pop() for _ in requests]
        occupied = len(lane.slots)
        try:
            place = upload(np.array(rows, dtype=np.int32), self.device)
            self.decoder.remember(self._states(encoded), self.memory, place)
            slots = lane.enter(requests, rows, self.exact_tokens)
            tokens = self._padded([request.prompt for request in requests])
            marks = np.array([[len(request.prompt) - 1, request.sot_index] for request in requests]).T
            cells = lane.cells[occupied * lane.group : len(lane.slots) * lane.group : lane.group].long()
            states, _ = self.decoder.read(tokens, self.memory, place, lane.cache, cells)
            ends, starts = upload(marks, self.device).unbind()
            index = torch.arange(len(requests), device=self.device)
            at_start = self.decoder.logits(states[index, starts])
            no_speech = at_start.softmax(dim=-1)[:, self.vocabulary.no_speech]
            lane.begin(slots, self.decoder.logits(states[index, ends]), no_speech, self.blank)
        except BaseException:  # out of memory, or interrupted: nobody else knows of these slots yet
            lane.forget(occupied)
            free += rows
            raise
        return slots

    @torch.inference_mode()
    def step(self, count: int, *, urgent: bool = False) -> None:
        """Write up to ``count`` more tokens in every slot."""
        super().step(count, urgent=urgent)
        for lane in self._gpu_lanes():
            lane.glance()

    @torch.inference_mode()
    def harvest(self) -> list[tuple[Slot, DecodeResult]]:
        """The slots that have ended, with their results; each stays occupied until it is released."""
        lanes = self._gpu_lanes()
        behind = 0 if sum(len(lane.slots) for lane in lanes) <= _FEW else 1
        out = []
        for lane in lanes:
            look = lane.late_look(behind)
            if look is not None:
                out += lane.harvest(look)
        return out

    @torch.inference_mode()
    def align_ahead(
        self, slots: Sequence[Slot], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[_Ahead]:
        """Read texts again behind their prompts, without waiting for the device."""
        found, ready = self._read_again(slots, prompts, texts), None
        if self._words_stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        return [_Ahead(scores, probabilities, ready) for scores, probabilities in found]

    @contextmanager
    def aligned(self, ahead: _Ahead) -> Iterator[Alignment]:
        """An alignment, in a stream of its own: `align_ahead`."""
        stream = self._words_stream
        with torch.inference_mode(), torch.cuda.stream(stream):  # does nothing for None
            if stream is not None and ahead.ready is not None:
                stream.wait_event(ahead.ready)
                ahead.scores.record_stream(stream)
                ahead.probabilities.record_stream(stream)
            yield Alignment(ahead.scores, ahead.probabilities.cpu().numpy())

    def _upload(self, numbers: np.ndarray) -> Tensor:
        return upload(numbers, self.device)

    def _gpu_lanes(self) -> list[GpuLane]:
        return [lane for lane in self.lanes.values() if isinstance(lane, GpuLane)]

    def _align_rows(self, slots: Sequence[Slot], sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        rows = [slot.lane.host_memory[slot.row] for slot in slots if isinstance(slot.lane, GpuLane)]
        place = upload(np.array(rows, dtype=np.int32), self.device)
        return self.decoder.read(self._padded(sequences), self.memory, place, heads=self.heads)

    def _padded(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Tokens (sequences, longest), int64, on the device; ends behind the shorter ones."""
        tokens = np.full((len(sequences), max(map(len, sequences))), self.vocabulary.end, dtype=np.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        return upload(tokens, self.device)

    def _align_logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states)

    @torch.inference_mode()
    def release(self, slot: Slot) -> None:
        """Free a slot, ended or not."""
        assert isinstance(slot.lane, GpuLane)
        self.free_rows.append(slot.lane.host_memory[slot.row])
        slot.lane.release(slot)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels and record steps for all numbers of windows, with and without drawn tokens.

        How a kernel is compiled depends on the rows that it works on, in powers of two; so do PyTorch's own. No sound
        is needed: silence of any length takes as long.
        """
        silence = np.zeros(WINDOW_SAMPLES, dtype=np.float32)
        for size in range(1, self.encoder_batch + 1):
            self.encode([silence] * size)
        self._record_encoder()
        (encoded,) = self.encode([silence], again=True)
        (encoded,) = self.encode([silence])
        self.detect_language([encoded])
        greedy = DecodeRequest(prompt=(self.sot,), sot_index=0, timestamps=False, exact_tokens=1)
        drawn = replace(greedy, temperature=1.0, best_of=TranscribeOptions().best_of, key=(0,))
        self._warm_up_lane(greedy, encoded)
        try:
            self._warm_up_lane(drawn, encoded)
        except torch.OutOfMemoryError:  # nor is there room for it later, unless few windows are at work
            lane = self._lane(greedy)
            for kind in [kind for kind, each in self.lanes.items() if each is not lane]:
                del self.lanes[kind]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _record_encoder(self) -> None:
        for stream in (self._encoder_stream, self._urgent_stream):
            with torch.cuda.stream(stream):  # does nothing for None
                graphs = self._graphs_of_encoder()
                if graphs is None:
                    return
                for size in range(1, graphs.most + 1):
                    silence = torch.zeros(size, WINDOW_SAMPLES, device=self.device)
                    features = log_mel_spectrogram(silence, self.model.config.mel_bins)
                    graphs.record(features.to(self.dtype))

    def _warm_up_lane(self, request: DecodeRequest, encoded: Encoding) -> None:
        lane, longest = self._lane(request), self.model.config.text_context // 2
        lane.warm_up(self.blank, sampled=request.temperature > 0)
        most = min(lane.rows, len(self._rows()), 2 * self.encoder_batch)
        for windows, length in [*((1, length) for length in _PROMPTS), *((size, 4) for size in _GROUPS)]:
            if windows <= most:
                self._try([replace(request, prompt=(self.sot,) * min(length, longest))] * windows, encoded)

    def _try(self, requests: Sequence[DecodeRequest], encoded: Encoding) -> None:
        """Take windows in, look for the words that they do not have, and let go of them."""
        slots = self.admit(requests, [encoded] * len(requests))
        text = [0] * len(requests[0].prompt)
        try:
            self.step(1)
            for ahead in self.align_ahead(slots, [[self.sot]] * len(slots), [text] * len(slots)):
                with self.aligned(ahead) as alignment:
                    alignment_cost(alignment.scores, WINDOW_SAMPLES // 160).cpu()
        finally:
            for slot in slots:
                self.release(slot)

    def clear(self) -> None:
        """Let go of all caches, and of the graphs that use them."""
        for lane in self._gpu_lanes():
            lane.close()
        self.lanes.clear()
        self.memory, self.free_rows, self._encoder_graphs = [], [], {}


def _fill(batch: Tensor, windows: Sequence[np.ndarray]) -> None:
    out = batch.numpy()
    for row, samples in zip(out, windows, strict=False):
        count = min(len(samples), WINDOW_SAMPLES)
        row[:count] = samples[:count]
        row[count:] = 0.0
