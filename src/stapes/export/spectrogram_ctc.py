"""Export CTC models over log-mel spectrograms (Conformer, Whisper's encoder): from spectrogram to logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from stapes.checkpoints.onnx_folder import OnnxFolder
from stapes.devices.backend import resolve
from stapes.export.ctc import products, worst_row
from stapes.export.graphs import Graph, write_graph
from stapes.export.weights import WeightsFile
from stapes.inference.onnx_session import CPU, Session
from stapes.models.ctc_head import CTC

_FRAMES = (280, 130)
"""Of the rows of the example: one is padded."""

_MOST = 3000


class SpectrogramGraph(nn.Module):
    """The network with its linear layers as ONNX's MatMul takes them. Takes the weights out of it."""

    def __init__(self, network: CTC) -> None:
        super().__init__()
        products(network)
        self.network = network
        self.dtype = next(network.parameters()).dtype

    def forward(self, mel: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """mel (batch, bins, frames of 10 ms), of which lengths (batch,) are real → logits, and how many are real."""
        logits, counts = self.network(mel.to(self.dtype), lengths)
        return logits.float(), counts


def example(network: CTC) -> tuple[Tensor, Tensor]:
    """Inputs of the graph."""
    generator = torch.Generator().manual_seed(0)
    bins = network.config.encoder.mel_bins
    return torch.randn(2, bins, max(_FRAMES), generator=generator) * 0.5 - 0.2, torch.tensor(_FRAMES)


@torch.inference_mode()
def expect(network: CTC, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and real frames of the example, by PyTorch."""
    return network(*inputs)


def write_spectrogram_ctc(
    network: CTC, dtype: torch.dtype, inputs: tuple[Tensor, Tensor], weights: WeightsFile
) -> dict[str, str]:
    """Write the graph of a network, whose weights are taken out of it: graph → file."""
    batch, frames = Dim("batch", min=1, max=4096), Dim("frames", min=16, max=_MOST)
    graph = Graph(
        "ctc",
        SpectrogramGraph(network.to(dtype)),
        inputs,
        ({0: batch, 2: frames}, {0: batch}),
        ["mel", "lengths"],
        ["logits", "counts"],
    )
    return write_graph(graph, weights)


@torch.inference_mode()
def measure_errors(
    path: Path, folder: OnnxFolder, inputs: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """How far the graph in ``path`` is from ``expected`` where frames are real, run by ONNX Runtime on the CPU."""
    wanted, counts = expected
    errors = []
    for file in folder.graphs.values():
        found = Session(path / file, resolve("cpu"), CPU)(dict(zip(("mel", "lengths"), inputs, strict=True)))
        same = found["counts"].tolist() == counts.tolist()
        errors.append(worst_row(found["logits"], wanted, counts) if same else float("inf"))
    return {"ctc": max(errors)}
