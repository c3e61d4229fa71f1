"""Open a model of any format and build the network, holding each weight once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stapes.checkpoints.ctranslate2 import open_ctranslate2
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.huggingface import open_huggingface
from stapes.checkpoints.openai import open_openai
from stapes.errors import ModelError
from stapes.models.whisper import Whisper, sinusoids


def open_checkpoint(path: Path, name: str | None = None, parts: list[Path] | None = None) -> WhisperCheckpoint:
    """Recognise the format of a model's file or folder by what is in it."""
    if path.is_file():
        return open_openai(path, name)
    if not path.is_dir():
        raise ModelError(f"{path} does not exist: give a model's name, its folder, or a .pt file")
    if parts or (path / "model.bin").exists():
        return open_ctranslate2(path, name, parts)
    checkpoints = sorted(path.glob("*.pt"))
    if not (path / "config.json").exists() and len(checkpoints) == 1:
        return open_openai(checkpoints[0], name)
    return open_huggingface(path, name)


def load_whisper(checkpoint: WhisperCheckpoint, dtype: torch.dtype, device: torch.device) -> Whisper:
    """Build the network with its weights in ``dtype`` on ``device``, ready to run.

    Each weight is converted as it is read, so that the peak is the model itself and one weight more. The token
    embedding stays in the file's own precision where that is narrower: looking a row up and widening it is exact.
    """
    with torch.device("meta"):
        model = Whisper(checkpoint.config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, tensor in checkpoint.read():
        if tensor.shape != shapes.get(name):
            raise ModelError(
                f"{checkpoint.path}: {name} has the shape {tuple(tensor.shape)}, expected {tuple(shapes.get(name, ()))}; "
                "fetch the model again"
            )
        keep = name == "decoder.embedding.weight" and tensor.element_size() < dtype.itemsize
        _assign(model, name, tensor.to(device=device, dtype=tensor.dtype if keep else dtype, copy=True))
        shapes.pop(name)
    if "encoder.positions" in shapes:
        config = checkpoint.config
        _assign(model, "encoder.positions", sinusoids(config.audio_context, config.width).to(device, dtype))
        shapes.pop("encoder.positions")
    if shapes:
        raise ModelError(f"{checkpoint.path} lacks the weights {', '.join(sorted(shapes)[:3])}; fetch the model again")
    return model.eval()


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
