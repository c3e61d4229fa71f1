"""A CTC model whose networks are in other processes (`pool`): all that is asked of it here but the logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stapes.checkpoints.load import WAV2VEC2
from stapes.checkpoints.onnx_folder import OnnxFolder
from stapes.checkpoints.spectrogram_models import SpectrogramCheckpoint, build, open_spectrogram_model
from stapes.checkpoints.tensors import read_tensors
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, describe_wav2vec2, has_languages, open_wav2vec2
from stapes.devices.backend import resolve
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.ctc_model import CTCModel, Network, Wav2Vec2CTC
from stapes.inference.onnx_ctc import first_convolution_of, stand_in
from stapes.inference.pool import PoolCTCEngine
from stapes.inference.spectrogram_ctc import SpectrogramModel
from stapes.models.wav2vec2 import Statistics, Wav2Vec2

_FIRST = "feature_extractor.first."


def open_far_ctc(
    name: str, path: Path, kind: str, folder: OnnxFolder | None, engine: PoolCTCEngine, language: str | None
) -> CTCFamily:
    """The family of a model that ``engine`` has on its devices.

    folder: what an exported model says of itself. language: which of its adapters was loaded. Raises ModelError, and
    UsageError for a language that it does not have.
    """
    exported = folder is not None
    model: CTCModel
    if kind in WAV2VEC2:
        if exported:
            checkpoint = describe_wav2vec2(path, name)
            first = first_convolution_of(path)
        else:
            checkpoint = open_wav2vec2(path, name, language if has_languages(path) else None)
            first = _first_convolution(checkpoint, engine.dtype)
        model = Wav2Vec2CTC(checkpoint, stand_in(checkpoint.config, first, resolve("cpu")), _elsewhere)
        with torch.device("meta"):
            network: nn.Module = Wav2Vec2(checkpoint.config)
    else:
        checkpoint = open_spectrogram_model(path, name, has_weights=not exported)
        with torch.device("meta"):
            network = build(checkpoint.config)
        model = _FarSpectrogramModel(checkpoint)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return CTCFamily(name, model, engine, checkpoint.config, parameters)  # type: ignore[arg-type]


def _first_convolution(checkpoint: Wav2Vec2Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the first convolution computes by, which recordings are measured with, in the dtype of the networks."""
    places = [place for place in checkpoint.places if place[0].startswith(_FIRST)]
    return {name.removeprefix(_FIRST): tensor.to(dtype) for name, tensor in read_tensors(places)}


def _elsewhere(_: Wav2Vec2) -> Network:
    def run(waveform: Tensor, lengths: Tensor, statistics: Statistics | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the network is in another process")

    return run


class _FarSpectrogramModel(SpectrogramModel):
    """A model over spectrograms without its network."""

    def __init__(self, checkpoint: SpectrogramCheckpoint) -> None:
        super().__init__(checkpoint, _Nothing(checkpoint.config))  # type: ignore[arg-type]

    def __call__(
        self, waveform: Tensor, lengths: Tensor, measured: Sequence[Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the network is in another process")


class _Nothing(nn.Module):
    """Stands in for a network that is elsewhere."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)
