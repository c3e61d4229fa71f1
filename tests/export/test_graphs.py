"""What is said of a module that cannot be exported, and how graphs are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stapes.errors import ModelError
from stapes.export.graphs import Graph, relative_error, write_graph
from stapes.export.weights import WeightsFile


class MixedDtypes(nn.Module):
    """Convolves float32 with float16, which PyTorch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 3).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x)


def test_what_pytorch_says_is_quoted_and_nothing_else_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    graph = Graph("encoder", MixedDtypes(), (torch.zeros(2, 4, 9),), ({},), ["x"], ["y"])
    with (
        WeightsFile(tmp_path) as weights,
        pytest.raises(ModelError, match=r"^encoder cannot be exported.*bias type") as e,
    ):
        write_graph(graph, weights)
    assert str(e.value).isprintable()
    assert capfd.readouterr() == ("", "")


def test_all_rows_together_forgive_one_and_not_many() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(3000, 16)
    one, many = wanted.clone(), wanted * 1.05
    one[7] *= 1.2
    assert relative_error(one, wanted) == pytest.approx(0.2, rel=1e-4)
    assert relative_error(one, wanted, of_all=True) < 0.004
    assert relative_error(many, wanted, of_all=True) == pytest.approx(0.05, rel=1e-4)
    one[7, 0] = float("nan")
    assert relative_error(one, wanted, of_all=True) == float("inf")
