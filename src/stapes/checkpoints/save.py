"""Write a Whisper of any format as a folder that Hugging Face ``transformers`` opens."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from stapes.checkpoints.formats import WhisperCheckpoint, whisper_names
from stapes.errors import ModelError, OutputError
from stapes.text.tokenizers import WhisperTokenizer


def save_huggingface(checkpoint: WhisperCheckpoint, folder: Path) -> None:
    """Write ``checkpoint`` to ``folder`` in Hugging Face's layout, whole or not at all.

    Weights keep their dtype (int8 becomes float32); the model is in memory once. Raises ModelError for a checkpoint
    without a tokenizer, OutputError where the folder cannot be written.
    """
    tokenizer = _tokenizer_of(checkpoint)
    names = {ours: huggingface for ours, huggingface, _ in whisper_names(checkpoint.config)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            weights = {names[ours]: tensor.contiguous() for ours, tensor in checkpoint.read()}
            save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
            dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
            write_settings(checkpoint, temporary, dtype, tokenizer)
            temporary.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(temporary, folder)  # noqa: PTH104
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error


def write_settings(
    checkpoint: WhisperCheckpoint, folder: Path, dtype: str, tokenizer: WhisperTokenizer | None = None
) -> None:
    """All that a model's folder has beside its weights: configuration, tokenizer. Raises ModelError without one.

    tokenizer: the checkpoint's, where it was read already, which takes a moment.
    """
    tokenizer = tokenizer or _tokenizer_of(checkpoint)
    files = {
        "config.json": _config(checkpoint, tokenizer, dtype),
        "preprocessor_config.json": _preprocessor(checkpoint),
        "tokenizer_config.json": _tokenizer(),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    write_generation(checkpoint, folder, tokenizer)
    assert checkpoint.tokenizer is not None
    shutil.copyfile(checkpoint.tokenizer, folder / "tokenizer.json")


def write_generation(checkpoint: WhisperCheckpoint, folder: Path, tokenizer: WhisperTokenizer | None = None) -> None:
    """What decoding needs to know: markers, languages, what is never written. Raises ModelError without a tokenizer."""
    settings = _generation(checkpoint, tokenizer or _tokenizer_of(checkpoint))
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _tokenizer_of(checkpoint: WhisperCheckpoint) -> WhisperTokenizer:
    if checkpoint.tokenizer is None:
        raise ModelError(f"{checkpoint.path} comes without a tokenizer.json: put the one of the same size beside it")
    return WhisperTokenizer.from_file(checkpoint.tokenizer, vocab_size=checkpoint.config.vocab_size)


def _config(checkpoint: WhisperCheckpoint, tokenizer: WhisperTokenizer, dtype: str) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": dtype,
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "num_hidden_layers": config.encoder_layers,
        "encoder_attention_heads": config.encoder_heads,
        "decoder_attention_heads": config.decoder_heads,
        "encoder_ffn_dim": 4 * config.width,
        "decoder_ffn_dim": 4 * config.width,
        "num_mel_bins": config.mel_bins,
        "vocab_size": config.vocab_size,
        "max_source_positions": config.audio_context,
        "max_target_positions": config.text_context,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "decoder_start_token_id": tokenizer.sot,
    }


def _generation(checkpoint: WhisperCheckpoint, tokenizer: WhisperTokenizer) -> dict[str, Any]:
    suppress, begin = checkpoint.suppress_tokens, checkpoint.begin_suppress_tokens
    out: dict[str, Any] = {
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "decoder_start_token_id": tokenizer.sot,
        "prev_sot_token_id": tokenizer.sot_prev,
        "no_timestamps_token_id": tokenizer.no_timestamps,
        "is_multilingual": tokenizer.is_multilingual,
        "max_length": checkpoint.config.text_context,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "suppress_tokens": list(suppress if suppress is not None else tokenizer.non_speech_tokens()),
        "begin_suppress_tokens": list(begin if begin is not None else (*tokenizer.encode(" "), tokenizer.eot)),
    }
    if tokenizer.is_multilingual:
        reused = {code: tokenizer.language_ids[other] for code, other in checkpoint.language_tokens.items()}
        out["lang_to_id"] = {f"<|{code}|>": token for code, token in (tokenizer.language_ids | reused).items()}
        out["task_to_id"] = {"transcribe": tokenizer.transcribe, "translate": tokenizer.translate}
    if checkpoint.alignment_heads is not None:
        out["alignment_heads"] = [list(pair) for pair in checkpoint.alignment_heads]
    return out


def _preprocessor(checkpoint: WhisperCheckpoint) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": checkpoint.config.mel_bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _tokenizer() -> dict[str, Any]:
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "add_prefix_space": False,
        "errors": "replace",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
