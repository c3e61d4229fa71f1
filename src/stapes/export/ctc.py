"""Export CTC models over waveforms: wav2vec 2.0 and its kin, from normalised waveform to logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

from stapes.checkpoints.onnx_folder import OnnxFolder
from stapes.devices.backend import resolve
from stapes.export.graphs import Graph, relative_error, write_graph
from stapes.export.weights import WeightsFile
from stapes.export.whisper_graphs import Product
from stapes.inference.onnx_ctc import FIRST_CONVOLUTION
from stapes.inference.onnx_session import CPU, Session
from stapes.models.wav2vec2 import SAMPLE_RATE, GroupNormConvLayer, Statistics, Wav2Vec2

_LENGTHS = (2 * SAMPLE_RATE + 77, SAMPLE_RATE)
"""Samples of the rows of the example: one is padded."""

_LONGEST = 120 * SAMPLE_RATE


class CTCGraph(nn.Module):
    """The network with its linear layers as ONNX's MatMul takes them. Takes the weights out of it."""

    def __init__(self, network: Wav2Vec2) -> None:
        super().__init__()
        products(network)
        self.network = network
        self.dtype = next(network.parameters()).dtype

    def forward(self, waveform: Tensor, lengths: Tensor, *statistics: Tensor) -> Tensor:
        """waveform (batch, samples), normalised, of which lengths (batch,) are real → logits (batch, frames, tokens).

        statistics: mean and variance (batch, channels) of the first convolution's outputs over the recording, for
        models that normalise these.
        """
        given = Statistics(*statistics) if statistics else None
        logits, _ = self.network(waveform, lengths, given)
        return logits.float()


def products(module: nn.Module) -> None:
    """Put a `Product` in the place of every linear layer below."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Product(child))
        else:
            products(child)


def example(network: Wav2Vec2) -> tuple[Tensor, ...]:
    """Inputs of the graph: two rows of noise, one of them padded."""
    generator = torch.Generator().manual_seed(0)
    waveform = torch.randn(2, max(_LENGTHS), generator=generator)
    lengths = torch.tensor(_LENGTHS)
    first = network.feature_extractor.first
    if not isinstance(first, GroupNormConvLayer):
        return waveform, lengths
    found = first.statistics(first.moments(waveform, lengths))
    return waveform, lengths, found.mean.float(), found.variance.float()


@torch.inference_mode()
def expect(network: Wav2Vec2, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Logits and real frames of the example, by PyTorch."""
    return network(inputs[0], inputs[1])


def write_ctc(
    network: Wav2Vec2, dtype: torch.dtype, inputs: tuple[Tensor, ...], weights: WeightsFile
) -> dict[str, str]:
    """Write the graph of a network, whose weights are taken out of it: graph → file."""
    first = network.feature_extractor.first
    if isinstance(first, GroupNormConvLayer):
        state = {name: value.float().contiguous() for name, value in first.state_dict().items()}
        save_file(state, weights.folder / FIRST_CONVOLUTION)
    batch, samples = Dim("batch", min=1, max=4096), Dim("samples", min=network.config.receptive_field, max=_LONGEST)
    dynamic: list[Any] = [{0: batch, 1: samples}, {0: batch}, *[{0: batch}] * (len(inputs) - 2)]
    graph = Graph(
        "ctc",
        CTCGraph(network.to(dtype)),
        inputs,
        # Of the parameters of ``forward`` those behind * are one.
        (*dynamic[:2], tuple(dynamic[2:])) if dynamic[2:] else tuple(dynamic),
        ["waveform", "lengths", "mean", "variance"][: len(inputs)],
        ["logits"],
    )
    return write_graph(graph, weights)


@torch.inference_mode()
def measure_errors(
    path: Path, folder: OnnxFolder, inputs: tuple[Tensor, ...], expected: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """How far the graph in ``path`` is from ``expected`` where frames are real, run by ONNX Runtime on the CPU."""
    errors = []
    for file in folder.graphs.values():
        session = Session(path / file, resolve("cpu"), CPU)
        errors.append(worst_row(session(dict(zip(session.inputs, inputs, strict=True)))["logits"], *expected))
    return {"ctc": max(errors)}


def worst_row(logits: Tensor, wanted: Tensor, counts: Tensor) -> float:
    """How far logits (batch, frames, vocabulary) are from those wanted where frames are real: see `relative_error`."""
    rows = [(logits[i, :count], wanted[i, :count]) for i, count in enumerate(counts.tolist())]
    return relative_error(torch.cat([got for got, _ in rows]), torch.cat([row for _, row in rows]))
