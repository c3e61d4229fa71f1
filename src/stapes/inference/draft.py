"""Open the model that drafts for another one, and see that the two belong together."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import WAV2VEC2, load_whisper, model_type, open_checkpoint
from stapes.checkpoints.onnx_folder import is_onnx
from stapes.checkpoints.spectrogram_models import KINDS
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.errors import UsageError
from stapes.inference.packed import is_worth_packing, pack_module
from stapes.inference.speculative import DraftModel
from stapes.options import Precision
from stapes.text.tokenizers import WhisperTokenizer

MOST_TOKENS = 15
"""With the token before them they are the 16 rows that a tile of our kernels computes at once."""

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
"""Those in which a product does not depend on what it is computed beside."""


def open_draft(
    name: str,
    location: catalog.Location,
    large: WhisperCheckpoint,
    tokenizer: WhisperTokenizer,
    *,
    tokens: int,
    precision: Precision,
    dtype: torch.dtype,
    device: torch.device,
    model_dir: str | Path | None = None,
) -> DraftModel:
    """Load the Whisper at ``location`` as draft model of ``large``, whose tokenizer is given.

    tokens: drafted in a round, at most. Raises UsageError for a model that cannot draft for this one, ModelError.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise UsageError(f"--draft-tokens is {tokens}: it must be between 1 and {MOST_TOKENS}")
    if precision not in PRECISIONS:
        raise UsageError(
            f"--draft does not work in {precision}: say --precision fp32, bf16 or fp16, or leave --draft out"
        )
    if device.type == "cpu" and dtype != torch.float32:
        raise UsageError("--draft runs in fp32 on a CPU, where rounding can be told from a lead: leave --precision out")
    if is_onnx(location.path) or model_type(location.path) in (*WAV2VEC2, *KINDS):
        raise UsageError(f"--draft {name} is no Whisper of PyTorch: name one that shares {large.name}'s tokens")
    small = open_checkpoint(location.path, name, location.parts)
    a, b = large.config, small.config
    if a.vocab_size != b.vocab_size or not tokenizer.writes_as(open_tokenizer(small, model_dir)):
        raise UsageError(
            f"--draft {name} has other tokens than {large.name}, and cannot draft for it: take a Whisper with the same "
            "languages, such as one that `stapes train distill` made of it"
        )
    if (a.text_context, a.audio_context) != (b.text_context, b.audio_context):
        raise UsageError(
            f"--draft {name} hears or writes windows of another length than {large.name}: take another one"
        )
    shares = has_same_encoder(large, small, dtype)
    model = load_whisper(small, dtype, device, pack_module if is_worth_packing(device, dtype) else None)
    if shares:
        model.encoder.layers = nn.ModuleList()  # never run
    return DraftModel(model, tokens, shares)


def has_same_encoder(large: WhisperCheckpoint, small: WhisperCheckpoint, dtype: torch.dtype) -> bool:
    """Whether both hear alike: all weights of the encoders are the same numbers in ``dtype``."""
    a, b = large.config, small.config
    sizes = [(c.mel_bins, c.width, c.encoder_layers, c.encoder_heads) for c in (a, b)]
    return sizes[0] == sizes[1] and _encoder_digests(large, dtype) == _encoder_digests(small, dtype)


def _encoder_digests(checkpoint: WhisperCheckpoint, dtype: torch.dtype) -> dict[str, str]:
    """A digest of each weight. The positions are the same in all models of a size, and not in every file."""
    out: dict[str, str] = {}
    for name, tensor in checkpoint.read():
        if name.startswith("encoder.") and name != "encoder.positions":
            data = tensor.to(dtype).contiguous().view(torch.uint8).numpy().data
            out[name] = hashlib.blake2b(data, digest_size=16).hexdigest()
    return out
