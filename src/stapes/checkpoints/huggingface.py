"""Whisper in Hugging Face's layout: ``config.json``, ``model.safetensors`` (or shards) and ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from stapes.checkpoints.files import weight_files
from stapes.checkpoints.formats import WhisperCheckpoint, pairs, whisper_config, whisper_names
from stapes.checkpoints.tensors import open_tensors, read_tensors
from stapes.errors import ModelError
from stapes.models.whisper import WhisperConfig
from stapes.text.files import read_json
from stapes.text.tokenizers import LANGUAGES


def open_huggingface(folder: Path, name: str | None = None, *, has_weights: bool = True) -> WhisperCheckpoint:
    """Describe the model in ``folder``. Raises ModelError when a file is missing or it is not a Whisper.

    has_weights: False for a folder whose weights are in graphs, not to be read.
    """
    settings = read_json(folder / "config.json")
    if settings.get("model_type") != "whisper":
        raise ModelError(
            f"{folder} holds a {settings.get('model_type', 'nameless')!r} model; only Whisper can be loaded"
        )
    files = _weight_files(folder) if has_weights else []
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
        language_tokens=reused_languages(folder),
    )


def reused_languages(folder: Path) -> dict[str, str]:
    """Languages that share the token of one that Whisper knows → that one, as ``generation_config.json`` says."""
    file = folder / "generation_config.json"
    ids = read_json(file).get("lang_to_id") if file.exists() else None
    if not isinstance(ids, dict):
        return {}
    codes = {token.removeprefix("<|").removesuffix("|>"): id for token, id in ids.items()}
    own = {id: code for code, id in codes.items() if code in LANGUAGES}
    return {code: own[id] for code, id in codes.items() if code not in LANGUAGES and id in own}


def _weight_files(folder: Path) -> list[Path]:
    files = weight_files(folder)
    if files:
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
        with open_tensors(file) as handle:
            for key in handle.keys():  # noqa: SIM118
                # Bare WhisperModel checkpoints lack the "model." prefix; proj_out is the embedding again.
                name = key if key.startswith("model.") else f"model.{key}"
                if name in ours:
                    places[name] = (file, key)
    # The encoder's positions are a fixed table that some checkpoints leave out.
    missing = [name for name in ours if name not in places and ours[name] != "encoder.positions"]
    if missing:
        raise ModelError(f"{folder} lacks the weights {', '.join(missing[:3])}; fetch the model again")
    return read_tensors((ours[name], *places[name]) for name in ours if name in places)
