"""CTC models on ONNX Runtime: a graph from waveform to logits where PyTorch's network would be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stapes.checkpoints.load import WAV2VEC2
from stapes.checkpoints.onnx_folder import OnnxFolder
from stapes.checkpoints.spectrogram_models import SpectrogramCheckpoint, build, open_spectrogram_model
from stapes.checkpoints.wav2vec2 import describe_wav2vec2
from stapes.devices.backend import Device
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.ctc_model import Network, Wav2Vec2CTC
from stapes.inference.onnx_session import CPU, Session
from stapes.inference.spectrogram_ctc import SpectrogramCTC
from stapes.inference.torch_ctc import TorchCTCEngine, batch_seconds
from stapes.models.wav2vec2 import GroupNormConvLayer, Statistics, Wav2Vec2, Wav2Vec2Config

FIRST_CONVOLUTION = "first_convolution.safetensors"
"""The kernel whose outputs are normalised over a whole recording: their mean and variance are computed before the graph
sees a window."""


_LEAST_FRAMES = 16
"""What the graph takes; a spectrogram with fewer frames is padded."""


def open_onnx_ctc(name: str, path: Path, folder: OnnxFolder, device: Device, provider: str, slots: int) -> CTCFamily:
    """Load the CTC model in a folder. Raises ModelError and DeviceError."""
    dtype = getattr(torch, folder.dtype)
    session = Session(path / folder.file("ctc", on_cpu=provider == CPU), device, provider)
    model: OnnxCTC | OnnxSpectrogramCTC
    with torch.device("meta"):
        if folder.kind in WAV2VEC2:
            checkpoint = describe_wav2vec2(path, name)
            network: nn.Module = Wav2Vec2(checkpoint.config)
        else:
            checkpoint = open_spectrogram_model(path, name, has_weights=False)
            network = build(checkpoint.config)
    if isinstance(checkpoint, SpectrogramCheckpoint):
        model = OnnxSpectrogramCTC(checkpoint, _SpectrogramRunner(session, checkpoint, device))  # pyright: ignore[reportArgumentType]
    else:
        network_less = stand_in(checkpoint.config, first_convolution_of(path), device)
        model = OnnxCTC(checkpoint, network_less, partial(_network, session))
    model.session = session
    shapes = "tight" if device.backend == "cpu" else "fixed"
    seconds = batch_seconds(device.torch, dtype)
    engine = TorchCTCEngine(model, slots, batch_seconds=seconds, shapes=shapes, dtype=dtype)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return CTCFamily(name, model, engine, checkpoint.config, parameters)


class OnnxSpectrogramCTC(SpectrogramCTC):
    """A `CTCModel` over spectrograms whose logits a graph computes."""

    session: Session


class _SpectrogramRunner(nn.Module):
    """Stands in for a `CTC`, whose encoder already gives logits."""

    def __init__(self, session: Session, checkpoint: SpectrogramCheckpoint, device: Device) -> None:
        super().__init__()
        self.session, self.config = session, checkpoint.config
        self.place = nn.Parameter(torch.empty(0, device=device.torch), requires_grad=False)
        self.head = nn.Identity()

    def encoder(self, mel: Tensor, frames: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and real frames."""
        lengths = torch.full((len(mel),), mel.shape[2], device=mel.device) if frames is None else frames
        padded = torch.nn.functional.pad(mel, (0, max(0, _LEAST_FRAMES - mel.shape[2])))
        found = self.session({"mel": padded, "lengths": lengths})
        return found["logits"][:, : max(1, int(found["counts"].max()))], found["counts"]


class OnnxCTC(Wav2Vec2CTC):
    """A `CTCModel` whose logits a graph computes."""

    session: Session


def first_convolution_of(path: Path) -> dict[str, Tensor]:
    """The first convolution of the model in a folder, where its outputs are normalised; else nothing."""
    file = path / FIRST_CONVOLUTION
    return load_file(file) if file.exists() else {}


def stand_in(config: Wav2Vec2Config, weights: Mapping[str, Tensor], device: Device) -> Any:
    """What `Wav2Vec2CTC` asks of a network beside its numbers: sizes, device, the first convolution."""
    first: nn.Module | None = None
    if config.conv_norm == "group":
        with torch.device("meta"):
            first = GroupNormConvLayer(config.conv_channels[0], config.conv_kernels[0], config.conv_strides[0], False)
            if "conv.bias" in weights:
                first.conv.bias = nn.Parameter(torch.empty(config.conv_channels[0]))
        first.load_state_dict(dict(weights), assign=True)
        first.requires_grad_(False)
    return SimpleNamespace(
        config=config,
        head=SimpleNamespace(weight=torch.empty(0, device=device.torch)),
        feature_extractor=SimpleNamespace(first=first),
    )


def _network(session: Session, network: Any) -> Network:
    return _Runner(session, network.config, network.feature_extractor.first)


class _Runner:
    """Called as a `Wav2Vec2`."""

    def __init__(self, session: Session, config: Wav2Vec2Config, first: GroupNormConvLayer | None) -> None:
        self.session, self.config, self.first = session, config, first
        self.pad: Callable[..., Tensor] = torch.nn.functional.pad

    def __call__(self, waveform: Tensor, lengths: Tensor, statistics: Statistics | None) -> tuple[Tensor, Tensor]:
        real = lengths.to(waveform.device)
        inputs = {"waveform": self.pad(waveform, (0, max(0, self.config.receptive_field - waveform.shape[1])))}
        inputs["lengths"] = real
        if self.first is not None:
            # On the CPU, where the kernel is; a few numbers for each row.
            found = statistics or self.first.statistics(self.first.moments(waveform.cpu(), lengths.cpu()))
            inputs["mean"], inputs["variance"] = (
                part.float().to(waveform.device).expand(len(waveform), -1) for part in found
            )
        logits = self.session(inputs)["logits"]
        return logits, self.config.frame_count(real)
