"""Two more systems to measure against, on the very weights that we run: openai/whisper and whisper.cpp.

    openai-whisper:base                    pip install openai-whisper
    whisper.cpp:base?processors=1          pip install pywhispercpp (built for the GPU, it runs there)

Their own file formats are written once from the model on this machine and kept in the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from stapes.audio.features import mel_filters
from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint, whisper_names
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.devices.backend import choose_dtype, resolve
from stapes.errors import ModelError, StapesError, UsageError
from stapes.evaluation.peers import Peer, PeerSettings, samples
from stapes.evaluation.results import ModelFacts
from stapes.models.whisper import sinusoids


class OpenAIWhisper:
    """The reference implementation: one window after the other, greedy unless beams are asked for."""

    system = "openai-whisper"

    def __init__(self, settings: PeerSettings) -> None:
        try:
            import whisper  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UsageError("openai-whisper is not installed: pip install openai-whisper") from error
        where = resolve(settings.device)
        self.gpu = where.torch.index if where.backend != "cpu" else None
        dtype = choose_dtype(settings.extra.get("dtype", "auto"), where)  # pyright: ignore[reportArgumentType]
        if dtype not in (torch.float32, torch.float16):
            raise UsageError("openai-whisper runs in fp32 and fp16 only")
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        path = _converted(settings, "openai", ".pt", write_openai)
        self._model: Any = whisper.load_model(str(path), device=where.torch)
        given = settings.options
        self._arguments: dict[str, Any] = {
            "task": given.task,
            "fp16": dtype == torch.float16,
            "beam_size": given.beam_size if given.beam_size > 1 else None,
            "temperature": tuple(given.temperatures()),
            "condition_on_previous_text": given.condition_on_previous_text,
            "without_timestamps": given.without_timestamps,
        }
        self.facts = ModelFacts(
            name=settings.model, precision="fp16" if dtype == torch.float16 else "fp32", device=where.name
        )

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """One after the other."""
        for path in paths:
            yield path, self._model.transcribe(samples(path), language=language, **self._arguments)["text"].strip()

    def close(self) -> None:
        """Let go of the model."""
        del self._model


class WhisperCpp:
    """whisper.cpp through pywhispercpp. fp16 always: its convolutions on the CPU refuse fp32."""

    system = "whisper.cpp"

    def __init__(self, settings: PeerSettings) -> None:
        try:
            from pywhispercpp.model import Model  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UsageError("whisper.cpp is not installed: pip install pywhispercpp") from error
        path = _converted(settings, "ggml", ".fp16.bin", write_ggml)
        self._tokenizer = open_tokenizer(_checkpoint(settings), settings.model_dir)
        self.work: dict[str, float] = {}
        where = resolve(settings.device)
        self.gpu = where.torch.index if where.backend != "cpu" else None
        given = settings.options
        self._model: Any = Model(
            str(path),
            n_threads=settings.threads or torch.get_num_threads(),
            print_progress=False,
            print_realtime=False,
            no_context=not given.condition_on_previous_text,
            temperature_inc=given.temperature_increment_on_fallback or 0.0,
            single_segment=False,
            redirect_whispercpp_logs_to=None,
        )
        self._processors = settings.number("processors", 1)
        self.facts = ModelFacts(name=settings.model, precision="fp16", device=where.name)

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """One after the other."""
        for path in paths:
            segments = self._model.transcribe(
                samples(path), n_processors=self._processors, language=language or "auto", translate=False
            )
            texts = [segment.text.strip() for segment in segments]
            # It tells no tokens; those of its text, without timestamps.
            self.work = {"tokens": sum(len(self._tokenizer.encode(f" {text}")) for text in texts)}
            yield path, " ".join(texts)

    def close(self) -> None:
        """Let go of the model."""
        del self._model


OTHER_PEERS: dict[str, tuple[frozenset[str], Callable[[PeerSettings], Peer]]] = {
    "openai-whisper": (frozenset({"dtype"}), OpenAIWhisper),
    "whisper.cpp": (frozenset({"processors"}), WhisperCpp),
}


def _converted(
    settings: PeerSettings, kind: str, suffix: str, write: Callable[[WhisperCheckpoint, Path], None]
) -> Path:
    """The model in another system's format: written into the cache once."""
    label = settings.model.strip("/").replace("/", "--")
    path = catalog.default_folder().parent / "peers" / kind / f"{label}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")
        write(_checkpoint(settings), partial)
        partial.replace(path)
    return path


def _checkpoint(settings: PeerSettings) -> WhisperCheckpoint:
    location = catalog.find(settings.model, settings.model_dir)
    if location is None:
        raise ModelError(f"{settings.model} is not on this machine: `stapes models pull {settings.model}` first")
    return open_checkpoint(location.path, settings.model, location.parts)


def _weights(checkpoint: WhisperCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """By openai/whisper's names; the encoder's positions too, which some files leave out."""
    config = checkpoint.config
    names = {ours: openai for ours, _, openai in whisper_names(config)}
    missing = set(names)
    for ours, tensor in checkpoint.read():
        missing.discard(ours)
        yield names[ours], tensor
    if "encoder.positions" in missing:
        yield names["encoder.positions"], sinusoids(config.audio_context, config.width)


def _sizes(checkpoint: WhisperCheckpoint) -> dict[str, int]:
    config = checkpoint.config
    return {
        "n_vocab": config.vocab_size,
        "n_audio_ctx": config.audio_context,
        "n_audio_state": config.width,
        "n_audio_head": config.encoder_heads,
        "n_audio_layer": config.encoder_layers,
        "n_text_ctx": config.text_context,
        "n_text_state": config.width,
        "n_text_head": config.decoder_heads,
        "n_text_layer": config.decoder_layers,
        "n_mels": config.mel_bins,
    }


def write_openai(checkpoint: WhisperCheckpoint, path: Path) -> None:
    """Write openai/whisper's ``.pt``."""
    state = {name: tensor.clone() for name, tensor in _weights(checkpoint)}
    torch.save({"dims": _sizes(checkpoint), "model_state_dict": state}, path)


def write_ggml(checkpoint: WhisperCheckpoint, path: Path) -> None:
    """Write whisper.cpp's file: matrices in fp16; biases, norms and positions in fp32.

    Source of the layout: whisper.cpp, ``models/convert-pt-to-ggml.py``.
    """
    config = checkpoint.config
    tokenizer = open_tokenizer(checkpoint)
    with path.open("wb") as file:
        file.write(struct.pack("<I10iI", 0x67676D6C, *_sizes(checkpoint).values(), 1))
        filters = mel_filters(config.mel_bins).numpy()
        file.write(struct.pack("<2i", *filters.shape) + filters.astype("<f4").tobytes())
        # Text tokens only: whisper.cpp makes up the markers behind them.
        tokens = tokenizer._bytes[: tokenizer.eot]
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for name, tensor in _weights(checkpoint):
            _write_tensor(file, name, tensor)


def _write_tensor(file: BinaryIO, name: str, tensor: Tensor) -> None:
    value = tensor.float().numpy()
    if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
        value = value.reshape(-1, 1)
    single = value.ndim < 2 or name.endswith((".bias", "positional_embedding"))
    encoded = name.encode()
    file.write(struct.pack(f"<3i{value.ndim}i", value.ndim, len(encoded), 0 if single else 1, *value.shape[::-1]))
    file.write(encoded + np.ascontiguousarray(value.astype("<f4" if single else "<f2")).tobytes())
