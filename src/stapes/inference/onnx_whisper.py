"""Whisper on ONNX Runtime: the graphs of an exported model, driven by the same slots as PyTorch's engine.

Slots, token rules, search and caches are `lanes`'; a graph is called where the network would be. The cache of a lane
is read by the graph where it lies, and only the new keys and values come back. It grows with the longest text in steps
of 64 positions: those that are not written yet are masked, so that shapes are few and memory is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.audio.features import log_mel_spectrogram, pad_windows
from stapes.checkpoints.onnx_folder import OnnxFolder
from stapes.decoding.rules import Vocabulary
from stapes.devices.backend import Device
from stapes.devices.memory import trim_heap
from stapes.inference.engine import Alignment, DecodeRequest
from stapes.inference.lanes import Lane, Slot, zeros
from stapes.inference.onnx_session import CPU, MIGRAPHX, Session
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.whisper import KeyValue, WhisperConfig

CACHE_STEP = 64
"""Positions that caches grow by."""

_PROMPTS = (4, 8, 16, 32, 64, 128, 256)
"""Tokens that are read at once, where shapes have to be few."""


class OnnxWhisper:
    """The graphs of a Whisper, opened when they are first needed, and what lanes ask of a network."""

    def __init__(
        self,
        path: Path,
        folder: OnnxFolder,
        config: WhisperConfig,
        device: Device,
        provider: str,
        *,
        tuned: bool = True,
    ) -> None:
        """Opens what is always needed, so that what cannot run says so at once; see `Session` for what is raised.

        tuned: take the graphs that are made for the CPU, on the CPU.
        """
        self._tuned = tuned and provider == CPU
        self.path, self.folder, self.config = path, folder, config
        self.device, self.provider = device, provider
        self.dtype = getattr(torch, folder.dtype)
        # Lanes ask a decoder's parameters where and in what to keep things.
        self.decoder = SimpleNamespace(positions=torch.empty(0, dtype=self.dtype, device=device.torch))
        self.names = [f"{part}.{layer}" for layer in range(config.decoder_layers) for part in ("key", "value")]
        self.fixed = provider == MIGRAPHX
        """Whether each new shape costs minutes, so that they have to be few."""
        self._sessions: dict[str, Session] = {}
        for graph in ("encoder", "first", "step"):
            self.session(graph)

    def session(self, graph: str) -> Session:
        """The session of a graph."""
        if graph not in self._sessions:
            self._sessions[graph] = Session(
                self.path / self.folder.file(graph, on_cpu=self._tuned), self.device, self.provider
            )
        return self._sessions[graph]

    def rows(self, count: int, most: int | None = None) -> int:
        """Rows to compute for so many windows."""
        if not self.fixed:
            return count
        padded = 1 << (count - 1).bit_length()
        return padded if most is None else min(padded, most)

    def tokens(self, count: int) -> int:
        """Tokens to compute for sequences of so many."""
        if not self.fixed:
            return count
        return next((size for size in _PROMPTS if count <= size), self.config.text_context)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a result."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device.torch)

    def memory(self, rows: int) -> list[Tensor]:
        """Room for what the decoder keeps of the encoder's states."""
        config = self.config
        head, states = config.width // config.decoder_heads, config.audio_context
        shapes = ((rows, config.decoder_heads, head, states), (rows, config.decoder_heads, states, head))
        return [self.empty(*shape) for _ in range(config.decoder_layers) for shape in shapes]


class OnnxLane(Lane):
    """A lane whose steps are computed by a graph."""

    model: Any

    def __init__(self, model: OnnxWhisper, vocabulary: Vocabulary, rows: int, group: int, beam: bool) -> None:
        super().__init__(model, vocabulary, rows, group, beam)  # pyright: ignore[reportArgumentType]

    def _allocate(self, batch: int) -> None:
        self._make_cache(batch, CACHE_STEP)

    def _make_cache(self, batch: int, capacity: int) -> None:
        config = self.model.config
        heads, layers = config.decoder_heads, config.decoder_layers
        shape = (2 * layers, batch, heads, min(capacity, config.text_context), config.width // heads)
        self.cache = zeros(shape, self.dtype, self.device)
        self.self_cache = [(self.cache[2 * layer], self.cache[2 * layer + 1]) for layer in range(layers)]

    def _grow(self, length: int) -> None:
        """Have room for so many positions."""
        old = self.cache
        if length > old.shape[3]:
            self._make_cache(old.shape[1], -(-length // CACHE_STEP) * CACHE_STEP)
            self.cache[:, :, :, : old.shape[3]] = old

    def admit(self, requests: Sequence[DecodeRequest], *args: Any, **kwargs: Any) -> list[Slot]:
        """As `Lane.admit`."""
        self._grow(max(len(request.prompt) for request in requests) + 1)
        return super().admit(requests, *args, **kwargs)

    def step(self, blank: Tensor) -> None:
        """Write one more token in every occupied slot."""
        windows, group = len(self.slots), self.group
        count, last = windows * group, self.tokens.shape[1] - 1
        if not count:
            return
        self._grow(min(max(self.lengths[:count]) + 1, last + 1))
        model, rows = self.model, self.model.rows(windows, self.rows)
        heads, width = self.cache.shape[2], self.cache.shape[4]
        logits = model.empty(rows, group, self.vocabulary.size, dtype=torch.float32)
        new = model.empty(len(self.cache), rows, group, heads, width)
        inputs = {
            "tokens": self.state.last[: rows * group].view(rows, group),
            "positions": self.positions[: rows * group].view(rows, group),
            **{
                f"cache.{name}": part[: rows * group].unflatten(0, (rows, group))
                for name, part in zip(model.names, self.cache, strict=True)
            },
            **{f"memory.{name}": part[:rows] for name, part in zip(model.names, self.memory, strict=True)},
        }
        outputs = {f"new.{name}": part for name, part in zip(model.names, new, strict=True)}
        model.session("step")(inputs, {"logits": logits, **outputs})
        index = torch.arange(count, device=self.device)
        self.cache[:, index, :, self.positions[:count]] = new.flatten(1, 2)[:, :count].transpose(0, 1)
        # A slot that ended but is not released yet stays where it is.
        self.positions[:count] = (self.positions[:count] + 1).clamp_max(last)
        self.lengths[:count] = [min(length + 1, last) for length in self.lengths[:count]]
        self._choose(logits.flatten(0, 1)[:count], 0, blank)


class OnnxWhisperEngine(TorchWhisperEngine):
    """Implements ``engine.Engine``."""

    model: Any

    def _prepare(self) -> None:
        """Nothing: the runtime lays weights out itself."""

    @torch.inference_mode()
    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False) -> list[Any]:
        if self.device.type == "cpu":
            trim_heap()
        model, rows = self.model, self.model.rows(len(windows))
        lengths = [len(window) for window in windows] if again else None
        config = model.config
        features = log_mel_spectrogram(pad_windows(windows, self.device), config.mel_bins, lengths)
        if rows > len(windows):
            features = torch.cat([features, features[:1].expand(rows - len(windows), -1, -1)])
        features = features[..., : 2 * config.audio_context]
        states = model.empty(rows, config.audio_context, config.width)
        model.session("encoder")({"mel": features}, {"states": states})
        return [row.clone() for row in states[: len(windows)]] if len(states) > 1 else [states[0]]

    def _first(
        self, encoded: Sequence[Any], prompts: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[KeyValue], list[Tensor]]:
        """Read prompts: logits of the picked tokens, keys and values of the prompts, what is kept of the states."""
        model = self.model
        config, count = model.config, len(prompts)
        rows, longest = model.rows(count), model.tokens(max(map(len, prompts)))
        order = [*range(count), *[0] * (rows - count)]
        tokens = self._padded([prompts[i] for i in order], longest)
        chosen = torch.tensor([list(picked[i]) for i in order], device=self.device)
        heads, width = config.decoder_heads, config.width // config.decoder_heads
        logits = model.empty(rows, chosen.shape[1], self.vocabulary.size, dtype=torch.float32)
        cache = model.empty(len(model.names), rows, heads, longest, width)
        memory = model.memory(rows)
        model.session("first")(
            {"states": torch.stack([encoded[i] for i in order]), "tokens": tokens, "picked": chosen},
            {
                "logits": logits,
                **{f"new.{name}": part for name, part in zip(model.names, cache, strict=True)},
                **{f"memory.{name}": part for name, part in zip(model.names, memory, strict=True)},
            },
        )
        return logits[:count], list(zip(cache[0::2], cache[1::2], strict=True)), memory

    def _padded(self, rows: Sequence[Sequence[int]], count: int) -> Tensor:
        tokens = torch.full((len(rows), count), self.vocabulary.end, dtype=torch.int64)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = torch.tensor(list(row))
        return tokens.to(self.device)

    @torch.inference_mode()
    def detect_language(self, encoded: Sequence[Any]) -> list[dict[str, float]]:
        logits, _, _ = self._first(encoded, [[self.sot]] * len(encoded), [[0, 0]] * len(encoded))
        codes, ids = list(self.languages), list(self.languages.values())
        return [dict(zip(codes, row, strict=True)) for row in logits[:, 0, ids].softmax(dim=-1).tolist()]

    def _new_lane(self, rows: int, group: int, beam: bool) -> Lane:
        return OnnxLane(self.model, self.vocabulary, rows, group, beam)

    @torch.inference_mode()
    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Any]) -> list[Slot]:
        prompts = [request.prompt for request in requests]
        picked = [(len(request.prompt) - 1, request.sot_index) for request in requests]
        logits, prefix, memory = self._first(encoded, prompts, picked)
        return self._enter(requests, memory, prefix, logits[:, 0], logits[:, 1])

    @torch.inference_mode()
    def align(
        self, slots: Sequence[Slot], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        if not slots:
            return []
        model, config = self.model, self.model.config
        rows = model.rows(len(slots))
        sequences = [[*prompt, *text, self.vocabulary.end] for prompt, text in zip(prompts, texts, strict=True)]
        count = model.tokens(max(map(len, sequences)))
        order = [*range(len(slots)), *[0] * (rows - len(slots))]
        tokens = self._padded([sequences[i] for i in order], count)
        # Of each token, the one behind it; those that are no text (at the prompt and at the end) mean nothing.
        following = torch.where(tokens < self.vocabulary.end, tokens, 0).roll(-1, dims=1)
        memory = {
            f"memory.{name}": torch.stack([slots[i].lane.memory[kept][slots[i].row] for i in order])
            for kept, name in enumerate(model.names)
        }
        heads = sum(map(len, self.heads.values()))
        scores = model.empty(rows, heads, count, config.audio_context, dtype=torch.float32)
        probabilities = model.empty(rows, count, dtype=torch.float32)
        model.session("align")(
            {"tokens": tokens, "following": following, **memory}, {"scores": scores, "probabilities": probabilities}
        )
        out = []
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            first = len(prompt) - 1
            chosen = probabilities[i, first : first + len(text)]
            out.append(Alignment(scores[i, :, : len(sequences[i])], chosen.cpu().numpy()))
        return out
