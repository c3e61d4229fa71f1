"""Whisper in Hugging Face's layout: ``config.json``, ``model.safetensors`` (or shards) and ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint, pairs, whisper_config, whisper_names
from stapes.errors import ModelError
from stapes.models.whisper import WhisperConfig

# The mapped pages of a file count as this process's memory until it is closed, so it is closed after each such part.
_PART = 0.01


def open_huggingface(folder: Path, name: str | None = None) -> WhisperCheckpoint:
    """Describe the model in ``folder``. Raises ModelError when a file is missing or it is not a Whisper."""
    settings = read_json(folder / "config.json")
    if settings.get("model_type") != "whisper":
        raise ModelError(
            f"{folder} holds a {settings.get('model_type', 'nameless')!r} model; only Whisper can be loaded"
        )
    files = _weight_files(folder)
    config = whisper_config(
        folder / "config.json",
        mel_bins=settings.get("num_mel_bins"),
        vocab_size=settings.get("vocab_size"),
        width=settings.get("d_model"),
        encoder_layers=settings.get("encoder_layers"),
        encoder_heads=settings.get("encoder_attention_heads"),
        decoder_layers=settings.get("decoder_layers"),
        decoder_heads=settings.get("decoder_attention_heads"),
        audio_context=settings.get("max_source_positions", 1500),
        text_context=settings.get("max_target_positions", 448),
    )
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    heads = generation.get("alignment_heads") or settings.get("alignment_heads")
    suppress = generation.get("suppress_tokens", settings.get("suppress_tokens"))
    begin = generation.get("begin_suppress_tokens", settings.get("begin_suppress_tokens"))
    tokenizer = folder / "tokenizer.json"
    return WhisperCheckpoint(
        name=name or folder.name,
        path=folder,
        config=config,
        read=lambda: _read(folder, files, config),
        tokenizer=tokenizer if tokenizer.exists() else None,
        alignment_heads=pairs(heads),
        suppress_tokens=tuple(suppress) if suppress is not None else None,
        begin_suppress_tokens=tuple(begin) if begin is not None else None,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ModelError when it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: this folder is no model, or it was only partly downloaded") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the model again")
    return value


def has_weights(folder: Path) -> bool:
    """Whether all the weights are in ``folder``."""
    try:
        return bool(_weight_files(folder))
    except ModelError:
        return False


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ModelError(f"{index} has no 'weight_map'; fetch the model again")
        files = [folder / file for file in sorted(set(places.values()))]
        for file in files:
            if file.resolve().parent != folder.resolve() and not file.is_symlink():
                raise ModelError(f"{index} points outside its folder; fetch the model again")
            if not file.exists():
                raise ModelError(f"{file} is missing; fetch the model again")
        return files
    pickles = list(folder.glob("pytorch_model*.bin"))
    if pickles:
        raise ModelError(
            f"{folder} has only pickled weights ({pickles[0].name}), which can run code: convert to safetensors"
        )
    raise ModelError(f"{folder} has no model.safetensors; fetch the model again")


def _read(folder: Path, files: list[Path], config: WhisperConfig) -> Iterator[tuple[str, Tensor]]:
    ours = {huggingface: our for our, huggingface, _ in whisper_names(config)}
    places: dict[str, tuple[Path, str]] = {}
    for file in files:
        with _open(file) as handle:
            for key in handle.keys():  # noqa: SIM118
                # Bare WhisperModel checkpoints lack the "model." prefix; proj_out is the embedding again.
                name = key if key.startswith("model.") else f"model.{key}"
                if name in ours:
                    places[name] = (file, key)
    # The encoder's positions are a fixed table that some checkpoints leave out.
    missing = [name for name in ours if name not in places and ours[name] != "encoder.positions"]
    if missing:
        raise ModelError(f"{folder} lacks the weights {', '.join(missing[:3])}; fetch the model again")
    pending = [name for name in ours if name in places]
    while pending:
        file = places[pending[0]][0]
        budget = _PART * file.stat().st_size
        with _open(file) as handle:
            while pending and places[pending[0]][0] == file and budget > 0:
                name = pending.pop(0)
                tensors = [handle.get_tensor(places[name][1])]
                budget -= tensors[0].nbytes
                yield ours[name], tensors.pop()  # popped: not held here while the caller works


@contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read ({error}); fetch the model again") from None
