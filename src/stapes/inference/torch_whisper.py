"""Whisper on PyTorch: any device that PyTorch knows, AMD's and NVIDIA's GPUs alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.audio.features import log_mel_spectrogram, pad_windows
from stapes.decoding.rules import Vocabulary
from stapes.devices.memory import trim_heap
from stapes.inference.cpu import adapt
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult
from stapes.inference.lanes import Lane, Slot, stack, zeros
from stapes.inference.packed import is_worth_packing, pack
from stapes.models.whisper import KeyValue, Whisper


class TorchWhisperEngine:
    """Implements ``engine.Engine``. One lane of slots for each kind of request, made when it is first needed.

    languages: code → token id. blank: ids that may not open a window (a space, the end). alignment_heads:
    (decoder layer, head) pairs that follow the speech. slots: windows decoded together.
    """

    steps_per_look = 1
    """Steps from one look at the slots to the next."""
    enqueues = False
    """Whether ``encode``, ``admit`` and ``step`` return before the device is done."""
    exact_tokens: int | None = None
    """For measuring: write just so many tokens in each window, text only."""

    def __init__(
        self,
        model: Whisper,
        vocabulary: Vocabulary,
        languages: dict[str, int],
        sot: int,
        blank: Sequence[int],
        alignment_heads: Sequence[tuple[int, int]],
        slots: int,
        encoder_batch: int,
    ) -> None:
        self.device = model.decoder.positions.device
        self.dtype = model.decoder.positions.dtype
        self.model, self.vocabulary = model, vocabulary
        self.languages, self.sot = languages, sot
        self.slots = slots
        self._encoder_batch, self._encodings = encoder_batch, 0
        self.heads: dict[int, list[int]] = {}
        for layer, head in sorted(alignment_heads):
            self.heads.setdefault(layer, []).append(head)
        self.blank = torch.zeros(vocabulary.size, device=self.device)
        self.blank[list(blank)] = float("-inf")
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Lay the model's weights out as the device likes them."""
        self._lay_out(self.model)

    def _lay_out(self, model: Whisper) -> None:
        if is_worth_packing(self.device, self.dtype):
            adapt(pack(model))
        elif model.decoder.embedding.weight.dtype != self.dtype:
            model.decoder.embedding.to(self.dtype)

    @property
    def encoder_batch(self) -> int:
        """Windows that are best encoded together."""
        return self._encoder_batch

    @torch.inference_mode()
    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False) -> list[Any]:
        """Samples of up to 30 s each → the encoder's states (1500, width) of each."""
        self._tidy()
        pcm = pad_windows(windows, self.device)
        states = self._encode(pcm, [len(window) for window in windows] if again else None)
        # Copies, where there are several: a view would keep the whole batch in memory as long as any window of it.
        return [row.clone() for row in states] if len(states) > 1 else [states[0]]

    def _tidy(self) -> None:
        """On the CPU, give back what lies idle: else the heap of a long recording grows by 150 MB of holes.

        Pages that are wanted again cost 20 ms a window, a twentieth of what encoding it in bf16 takes, so there, where
        all is half as large, it is not done for every window.
        """
        self._encodings += 1
        if self.device.type == "cpu" and (self.dtype == torch.float32 or self._encodings % 4 == 0):
            trim_heap()

    def _encode(self, pcm: Tensor, lengths: list[int] | None) -> Tensor:
        """Samples (windows, 480000) → what is kept of each window, (windows, 1500, width)."""
        features = log_mel_spectrogram(pcm, self.model.config.mel_bins, lengths)
        return self.model.encoder(features.to(self.dtype))

    @property
    def is_serial(self) -> bool:
        return self.device.type == "cpu" and type(self) is TorchWhisperEngine

    @torch.inference_mode()
    def encode_in_parts(self, window: np.ndarray, *, again: bool = False) -> Iterator[Any]:
        self._tidy()
        lengths = [len(window)] if again else None
        features = log_mel_spectrogram(pad_windows([window], self.device), self.model.config.mel_bins, lengths)
        encoder = self.model.encoder
        states = encoder.embed(features.to(self.dtype))
        for layer in encoder.layers:
            yield None
            states = layer(states)
        yield encoder.norm(states)[0]

    def _states(self, encoded: Sequence[Any]) -> Tensor:
        """What the decoder hears of windows: (windows, 1500, width)."""
        return torch.stack(list(encoded))

    @torch.inference_mode()
    def detect_language(self, encoded: Sequence[Any]) -> list[dict[str, float]]:
        """Probability of each language, from what the model would write after <|startoftranscript|>."""
        memory = self.model.decoder.memory(self._states(encoded))
        states, _, _ = self._read([[self.sot]] * len(encoded), memory)
        logits = self.model.decoder.logits(states[:, 0]).float()
        codes, ids = list(self.languages), list(self.languages.values())
        return [dict(zip(codes, row, strict=True)) for row in logits[:, ids].softmax(dim=-1).tolist()]

    def free_slots(self, request: DecodeRequest) -> int:
        """Windows that could join now. Slots of many candidates are fewer, so that the caches stay as large."""
        return self._lane(request).free

    def _lane(self, request: DecodeRequest) -> Lane:
        candidates, is_beam = request.candidates, request.is_beam
        kind = (candidates, is_beam, True) if request.urgent else (candidates, is_beam)
        if kind not in self.lanes:
            self.lanes[kind] = self._new_lane(max(1, self.slots // candidates), candidates, is_beam)
        return self.lanes[kind]

    def _new_lane(self, rows: int, group: int, beam: bool) -> Lane:
        return Lane(self.model, self.vocabulary, rows, group, beam)

    @torch.inference_mode()
    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Any]) -> list[Slot]:
        """Read the prompts of windows, put them into slots of one lane and write their first tokens."""
        decoder = self.model.decoder
        memory = decoder.memory(self._states(encoded))
        states, prefix, _ = self._read([request.prompt for request in requests], memory)
        index = torch.arange(len(requests), device=self.device)
        ends = torch.tensor([len(request.prompt) - 1 for request in requests], device=self.device)
        starts = torch.tensor([request.sot_index for request in requests], device=self.device)
        logits = decoder.logits(states[index, ends]).float()
        return self._enter(requests, memory, prefix, logits, decoder.logits(states[index, starts]).float())

    def _enter(
        self,
        requests: Sequence[DecodeRequest],
        memory: Sequence[Tensor],
        prefix: list[KeyValue],
        logits: Tensor,
        at_start: Tensor,
    ) -> list[Slot]:
        """Put windows whose prompts were read into slots.

        memory, prefix: what the decoder keeps of states and prompts. logits, at_start (windows, vocabulary): of what
        follows the prompt, and <|startoftranscript|>.
        """
        no_speech = at_start.softmax(dim=-1)[:, self.vocabulary.no_speech]
        lane = self._lane(requests[0])
        occupied = len(lane.slots)
        try:
            slots = lane.admit(requests, memory, prefix, logits, no_speech, self.blank)
        except BaseException:  # out of memory, or interrupted: nobody else knows of these slots yet
            del lane.slots[occupied:]
            raise
        for slot in slots:
            slot.limit = min(slot.limit, slot.request.exact_tokens or self.exact_tokens or slot.limit)
        return slots

    def _read(
        self,
        prompts: Sequence[Sequence[int]],
        memory: Sequence[Tensor],
        heads: dict[int, list[int]] | None = None,
        model: Whisper | None = None,
    ) -> tuple[Tensor, list[KeyValue], Tensor | None]:
        """Run token sequences of different lengths, padded at the end, through the decoder (of another model)."""
        model = model or self.model
        count = max(len(prompt) for prompt in prompts)
        tokens = torch.full((len(prompts), count), self.vocabulary.end, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        config = model.config
        shape = (len(prompts), config.decoder_heads, count, config.width // config.decoder_heads)
        cache = [
            (zeros(shape, self.dtype, self.device), zeros(shape, self.dtype, self.device))
            for _ in range(config.decoder_layers)
        ]
        positions = torch.arange(count, device=self.device).expand(len(prompts), -1)
        mask = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()[None, None]
        states, scores = model.decoder(tokens.to(self.device), positions, cache, memory, mask, heads)
        return states, cache, scores

    @torch.inference_mode()
    def step(self, count: int, *, urgent: bool = False) -> None:
        """Write up to ``count`` more tokens in every slot, or in those of urgent requests."""
        for _ in range(count):
            for kind, lane in self.lanes.items():
                if not urgent or kind[2:]:
                    lane.step(self.blank)

    @torch.inference_mode()
    def harvest(self) -> list[tuple[Slot, DecodeResult]]:
        """The slots that have ended, with their results; each stays occupied until it is released."""
        return [found for lane in self.lanes.values() for found in lane.harvest()]

    @torch.inference_mode()
    def align(
        self, slots: Sequence[Slot], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        """Read texts again behind their prompts, all at once, and keep the scores of the heads that follow speech."""
        found = self._read_again(slots, prompts, texts)
        return [Alignment(scores, chosen.cpu().numpy()) for scores, chosen in found]

    def _read_again(
        self, slots: Sequence[Slot], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[tuple[Tensor, Tensor]]:
        """The scores and the probabilities of alignments, on the device."""
        if not slots:
            return []
        sequences = [[*prompt, *text, self.vocabulary.end] for prompt, text in zip(prompts, texts, strict=True)]
        states, scores = self._align_rows(slots, sequences)
        assert scores is not None
        out = []
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            # The state at the token before predicts a token.
            first, count = len(prompt) - 1, len(prompt) + len(text) + 1
            logits = self._align_logits(states[i, first : count - 2])[:, : self.vocabulary.end]
            chosen = logits.softmax(dim=-1).gather(1, self._upload(np.array(text, dtype=np.int64))[:, None])[:, 0]
            out.append((scores[i, :, :count].float(), chosen))
        return out

    def _upload(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def _align_rows(self, slots: Sequence[Slot], sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Read sequences in the windows of slots: the decoder's states, and the scores of the alignment heads."""
        rows = [(slot.lane, slot.row) for slot in slots]
        first = slots[0].lane.memory
        memory = [stack([lane.memory[kept][row] for lane, row in rows], first[kept]) for kept in range(len(first))]
        states, _, scores = self._read(sequences, memory, self.heads)
        return states, scores

    def _align_logits(self, states: Tensor) -> Tensor:
        return self.model.decoder.logits(states).float()

    def clear(self) -> None:
        """Let go of all caches."""
        self.lanes.clear()

    @torch.inference_mode()
    def release(self, slot: Slot) -> None:
        """Free a slot, ended or not."""
        lane = slot.lane
        lane.release(slot)
        if self.device.type == "cpu" and not lane.slots and lane.group > 1:
            # Caches for fallback are seldom needed, quick to make on the CPU, and a tenth of all memory.
            self.lanes = {kind: kept for kind, kept in self.lanes.items() if kept is not lane}
