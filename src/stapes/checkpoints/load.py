"""Open a model of any format and build the network, holding each weight once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from stapes.checkpoints import catalog
from stapes.checkpoints.alignment import published_heads
from stapes.checkpoints.ctranslate2 import open_ctranslate2
from stapes.checkpoints.files import is_adapter
from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint
from stapes.checkpoints.huggingface import open_huggingface
from stapes.checkpoints.low_rank import base_of, with_adapter
from stapes.checkpoints.openai import open_openai
from stapes.checkpoints.quantized_folder import is_quantized, open_quantized
from stapes.devices.memory import trim_heap
from stapes.errors import ModelError
from stapes.models.whisper import Whisper, sinusoids
from stapes.text.files import read_json

# Memory is given back each time this part of the model has been read: what lies idle stays within it.
_IDLE_PART = 0.004


WAV2VEC2 = ("wav2vec2", "hubert")
"""``model_type`` of the models that `stapes.checkpoints.wav2vec2` opens."""


def model_type(path: Path) -> str | None:
    """What ``config.json`` calls the model in a folder, or that of a file of weights; None where it is not there.

    Raises ModelError where it is damaged.
    """
    settings = (path if path.is_dir() else path.parent) / "config.json"
    if path.suffix == ".pt" or not settings.exists():
        return None
    kind = read_json(settings).get("model_type")
    return kind if isinstance(kind, str) else None


def open_checkpoint(path: Path, name: str | None = None, parts: list[Path] | None = None) -> WhisperCheckpoint:
    """Recognise the format of a model's file or folder by what is in it. Raises ModelError."""
    checkpoint = _open(path, name, parts)
    config = checkpoint.config
    # Distilled models come with the list of their teacher, which has more decoder layers.
    heads = checkpoint.alignment_heads or ()
    heads = tuple((a, b) for a, b in heads if a < config.decoder_layers and b < config.decoder_heads)
    return replace(checkpoint, alignment_heads=heads or published_heads(config, checkpoint.path))


def _open(path: Path, name: str | None, parts: list[Path] | None) -> WhisperCheckpoint:
    if path.is_file():
        return open_openai(path, name)
    if not path.is_dir():
        raise ModelError(f"{path} does not exist: give a model's name, its folder, or a .pt file")
    if is_adapter(path):
        base = base_of(path)
        found = catalog.find(base)
        if found is None:
            raise ModelError(f"{path} adapts {base}, which is not on this machine: `stapes models pull {base}`")
        return with_adapter(_open(found.path, name or path.name, found.parts), path)
    if parts or (path / "model.bin").exists():
        return open_ctranslate2(path, name, parts)
    if is_quantized(path):
        return open_quantized(path, name)
    checkpoints = sorted(path.glob("*.pt"))
    if not (path / "config.json").exists() and len(checkpoints) == 1:
        return open_openai(checkpoints[0], name)
    return open_huggingface(path, name)


def load_whisper(
    checkpoint: WhisperCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    adapt: Callable[[Whisper, str], None] | None = None,
) -> Whisper:
    """Build the network with its weights in ``dtype`` on ``device``, ready to run. Raises ModelError.

    Each weight is converted as it is read, so that the peak is the model itself and one weight more. The token
    embedding stays in the file's own precision where that is narrower: looking a row up and widening it is exact.
    ``adapt(model, path)`` is called as soon as a module has all its weights and may replace it, so that an engine
    that lays weights out anew never holds two models.
    """
    with torch.device("meta"):
        model = Whisper(checkpoint.config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    owners = Counter(_owner(name) for name in shapes)
    idle, most_idle = 0.0, _IDLE_PART * dtype.itemsize * sum(shape.numel() for shape in shapes.values())
    for name, tensor in checkpoint.read():
        expected = tuple(shapes.get(name, ()))
        if tuple(tensor.shape) != expected:
            raise ModelError(
                f"{checkpoint.path}: {name} has the shape {tuple(tensor.shape)}, expected {expected}; fetch it again"
            )
        keep = name == EMBEDDING and tensor.element_size() < dtype.itemsize
        _assign(model, name, tensor.to(device=device, dtype=tensor.dtype if keep else dtype, copy=True))
        idle += tensor.nbytes
        del tensor, shapes[name]
        owners[_owner(name)] -= 1
        if adapt is not None and not owners[_owner(name)]:
            adapt(model, _owner(name))
        if idle > most_idle:
            trim_heap()
            idle = 0.0
    if "encoder.positions" in shapes:
        config = checkpoint.config
        _assign(model, "encoder.positions", sinusoids(config.audio_context, config.width).to(device, dtype))
        del shapes["encoder.positions"]
    if shapes:
        raise ModelError(f"{checkpoint.path} lacks the weights {', '.join(sorted(shapes)[:3])}; fetch the model again")
    trim_heap()
    return model.eval()


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    leaf = name.rpartition(".")[2]
    setattr(model.get_submodule(_owner(name)), leaf, nn.Parameter(tensor, requires_grad=False))
