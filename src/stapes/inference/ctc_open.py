"""Load a CTC model of any kind from its folder, with its engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from stapes.checkpoints.load import WAV2VEC2
from stapes.checkpoints.spectrogram_models import KINDS, load_spectrogram_model, open_spectrogram_model
from stapes.checkpoints.wav2vec2 import has_languages, load_wav2vec2, open_wav2vec2
from stapes.devices.backend import Device
from stapes.errors import UsageError
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.ctc_model import CTCModel, Wav2Vec2CTC, plain
from stapes.inference.gpu_ctc import GpuCtcEncoder
from stapes.inference.spectrogram_ctc import SpectrogramCTC
from stapes.inference.torch_ctc import Shapes, TorchCTCEngine, batch_seconds
from stapes.inference.torch_hybrid import TorchHybrid
from stapes.models.hybrid import Hybrid
from stapes.options import Precision

CTC_KINDS = (*WAV2VEC2, *KINDS)
"""``model_type`` of the models that this opens."""


def open_ctc(
    name: str,
    path: Path,
    kind: str,
    device: Device,
    precision: Precision,
    dtype: torch.dtype,
    slots: int,
    language: str | None = None,
) -> CTCFamily:
    """Load the model in a folder; ``kind``: what its ``config.json`` calls it.

    slots: windows computed in one call. ``language`` chooses among adapters, where the model has any. Raises
    ModelError, and UsageError for a precision or a language that it does not have.
    """
    if precision in ("fp8", "int8", "int4"):
        raise UsageError(f"--precision {precision}: {name} runs in fp32, bf16 or fp16; say one of them, or auto")
    on_gpu = device.backend != "cpu"
    model: CTCModel
    network: nn.Module
    shapes: Shapes
    if kind in WAV2VEC2:
        checkpoint = open_wav2vec2(path, name, language if has_languages(path) else None)
        network = load_wav2vec2(checkpoint, dtype, device.torch)
        model = Wav2Vec2CTC(checkpoint, network, partial(GpuCtcEncoder, dtype=dtype) if on_gpu else plain)
        shapes = "packed" if on_gpu else "tight"
    else:
        checkpoint = open_spectrogram_model(path, name)
        network = load_spectrogram_model(checkpoint, dtype, device.torch)
        model = TorchHybrid(checkpoint, network) if isinstance(network, Hybrid) else SpectrogramCTC(checkpoint, network)
        shapes = "fixed" if on_gpu else "tight"
    seconds = batch_seconds(device.torch, dtype)
    engine = TorchCTCEngine(model, slots, batch_seconds=seconds, shapes=shapes, dtype=dtype)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return CTCFamily(name, model, engine, checkpoint.config, parameters)
