"""From a PyTorch module to a graph in a file, and whether the graph computes what PyTorch does."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from stapes.errors import ModelError
from stapes.export.cpu import SUFFIX, cpu_file, tune_for_cpu
from stapes.export.weights import WeightsFile

OPSET = 18

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colours of a terminal."""

_LOGGERS = {"torch.onnx": logging.ERROR, "torch.export": logging.CRITICAL}

TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2}
"""How far a graph may be from PyTorch in float32 (see `relative_error`)."""


@dataclass(frozen=True)
class Graph:
    """A module, and how it is to be exported.

    arguments: an example of each input, as the module takes them; dynamic: for each the axes that may change, as
    ``torch.export`` takes them. inputs, outputs: names, in order, of all tensors.
    """

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    dynamic: tuple[Any, ...]
    inputs: Sequence[str]
    outputs: Sequence[str]
    heads: int | None = None
    """Of its attention, where that is to be one operator on the CPU."""

    @property
    def file(self) -> str:
        """Where it is written."""
        return f"{self.name}.onnx"


def write_graph(graph: Graph, weights: WeightsFile) -> dict[str, str]:
    """Export a graph into the folder of ``weights``, plain and for the CPU; name → file.

    Raises ModelError where PyTorch cannot express it.
    """
    with tempfile.TemporaryDirectory(dir=weights.folder) as place, _quiet():
        path = Path(place) / graph.file
        try:
            program = torch.onnx.export(
                graph.module.eval(),
                graph.arguments,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=graph.dynamic,
                verbose=False,
            )
            assert program is not None
            program.save(str(path), external_data=True)
        except torch.onnx.OnnxExporterError as error:
            said = error.__cause__ or error  # the exporter itself says where its manual is, and what it met last
            reason = " ".join(_ESCAPES.sub("", str(said)).split())[:300]
            raise ModelError(f"{graph.name} cannot be exported to ONNX by this PyTorch ({reason})") from error
        model = onnx.load(str(path), load_external_data=False)
        softmax_in_float32(model)
        del model.graph.value_info[:]  # shapes in between, in the words of the exporter
        tuned = ModelProto()
        tuned.CopyFrom(model)
        tune_for_cpu(tuned, graph.heads)
        weights.write(model, graph.file, Path(place))
        weights.write(tuned, cpu_file(graph.file), Path(place))
    return {graph.name: graph.file, graph.name + SUFFIX: cpu_file(graph.file)}


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's exporter tells of packages that are not there, of its own deprecations, and what it tried in vain."""
    levels = {logging.getLogger(name): level for name, level in _LOGGERS.items()}
    before = {logger: logger.level for logger in levels}
    for logger, level in levels.items():
        logger.setLevel(level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in before.items():
                logger.setLevel(level)


def softmax_in_float32(model: ModelProto) -> None:
    """Where a softmax computes in half precision, let it compute in float32."""
    half = {value.name for value in model.graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT16}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Softmax" and node.output[0] in half:
            wide, result, target = f"{node.output[0]}_in", f"{node.output[0]}_out", node.output[0]
            nodes.append(helper.make_node("Cast", [node.input[0]], [wide], to=TensorProto.FLOAT))
            node.input[0], node.output[0] = wide, result
            nodes += [node, helper.make_node("Cast", [result], [target], to=TensorProto.FLOAT16)]
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def relative_error(got: Tensor, wanted: Tensor, *, of_all: bool = False) -> float:
    """How far numbers are from those wanted: of the rows along the last axis, the worst one's difference over its size.

    ``of_all``: all rows' instead, their root mean square. Sizes are root mean squares, too. Infinite where something is
    no number.
    """
    difference = (got.double() - wanted.double()).square().mean(dim=-1).sqrt()
    size = wanted.double().square().mean(dim=-1).sqrt()
    rows = difference / size.clamp_min(1e-12)
    error = float(rows.square().mean().sqrt() if of_all else rows.max())
    return error if error == error else float("inf")


def judge(errors: Mapping[str, float], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """The record of a check: graph → error and tolerance. Raises ModelError for a graph that is beyond it."""
    tolerance = TOLERANCES[dtype]
    for name, error in errors.items():
        if error > tolerance:
            raise ModelError(
                f"the exported graph {name} differs from PyTorch by {error:.2g} of its numbers' size, more than "
                f"{tolerance:g}: nothing was written; try another version of torch or onnxscript"
            )
    return {name: {"error": error, "tolerance": tolerance} for name, error in errors.items()}
