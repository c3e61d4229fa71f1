"""Whisper as openai/whisper publishes it: one ``.pt`` file with ``dims`` and ``model_state_dict``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint, whisper_config, whisper_names
from stapes.errors import ModelError
from stapes.models.whisper import WhisperConfig

# The mapped pages of a file count as this process's memory until it is closed, so it is closed after each such part.
_PART = 0.01


def open_openai(path: Path, name: str | None = None) -> WhisperCheckpoint:
    """Describe the model in ``path``. Only tensors and plain values are unpickled (``weights_only``)."""
    dims = _load(path).get("dims")
    if not isinstance(dims, dict):
        raise ModelError(f"{path} has no 'dims': it is not an openai/whisper checkpoint")
    config = whisper_config(
        path,
        mel_bins=dims.get("n_mels"),
        vocab_size=dims.get("n_vocab"),
        width=dims.get("n_audio_state"),
        encoder_layers=dims.get("n_audio_layer"),
        encoder_heads=dims.get("n_audio_head"),
        decoder_layers=dims.get("n_text_layer"),
        decoder_heads=dims.get("n_text_head"),
        audio_context=dims.get("n_audio_ctx"),
        text_context=dims.get("n_text_ctx"),
    )
    tokenizer = path.with_name("tokenizer.json")
    return WhisperCheckpoint(
        name=name or path.stem,
        path=path,
        config=config,
        read=lambda: _read(path, config),
        tokenizer=tokenizer if tokenizer.exists() else None,
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path} cannot be read as an openai/whisper checkpoint ({reason}); fetch it again") from None
    if not isinstance(value, dict) or not isinstance(value.get("model_state_dict"), dict):
        raise ModelError(f"{path} has no 'model_state_dict': it is not an openai/whisper checkpoint")
    return value


def _read(path: Path, config: WhisperConfig) -> Iterator[tuple[str, Tensor]]:
    pending = [(ours, openai) for ours, _, openai in whisper_names(config)]
    while pending:
        state = _load(path)["model_state_dict"]
        budget = _PART * path.stat().st_size
        while pending and budget > 0:
            ours, openai = pending.pop(0)
            if not isinstance(state.get(openai), Tensor):
                raise ModelError(f"{path} lacks the weights {openai}; fetch the model again")
            budget -= state[openai].nbytes
            yield ours, state.pop(openai)
