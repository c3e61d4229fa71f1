"""Graphs with matrices of 8-bit integers.

Weights: one scale for each output, symmetric. With ``reduced`` range they go to ±64: on x86 without VNNI the products
of unsigned and signed bytes are added in pairs in 16 bits, which 255 · 127 · 2 would overflow.

*dynamic*: activations are scaled row by row, by the row's own largest value. So a row never depends on its neighbours
in a batch, and outliers in one frame cost no precision in the others: with ONNX's DynamicQuantizeLinear, which has one
scale for the whole tensor, the encoder of Whisper base is 22 % off, and so 5 to 7 % (mean difference over mean size,
one LibriSpeech clip).

*static*: one range for each tensor, found by calibration, as QuantizeLinear and DequantizeLinear, which compilers for
other hardware (TensorRT, MIGraphX, OpenVINO) read. Loud channels are divided by what their weights are multiplied by.

What stays in float32 is kept in float16 where that is the same, as with all weights that were published so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from stapes.export.weights import to_array

REDUCED, FULL = 64, 127
"""Largest quantised weight."""

_LARGE = 4096
"""Numbers of a tensor for which float16 is worth a node."""

Range = tuple[float, float]


def matrices(model: ModelProto) -> dict[str, list[NodeProto]]:
    """Weights that activations are multiplied with, (inputs, outputs) → the MatMul nodes that do."""
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    out: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            out.setdefault(node.input[1], []).append(node)
    return out


def quantize_weight(weight: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, outputs) → int8 of the same shape, and a scale for each output, float32."""
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12).astype(np.float32) / largest
    return np.clip(np.rint(weight / scale), -largest, largest).astype(np.int8), scale


def rows_in_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(…, inputs) → whole numbers from -127 to 127 (float32), and each row's scale, (…, 1)."""
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / 127, 1e-30)
    return np.rint(x / scale), scale


def tensor_in_uint8(x: np.ndarray, within: Range) -> np.ndarray:
    """``x`` as it comes out of 8 bits that are spread over a range."""
    scale, zero = spread(within)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


def spread(within: Range) -> tuple[float, int]:
    """Scale and zero point of unsigned bytes over a range, which 0 belongs to."""
    low, high = min(within[0], 0.0), max(within[1], 0.0)
    scale = max(high - low, 1e-12) / 255
    return scale, round(-low / scale)


class Rewriter:
    """Rewrites one graph. ``keep``: weights that stay as they are; ``folder``: where they are."""

    def __init__(self, model: ModelProto, folder: Path, keep: Set[str], largest: int) -> None:
        self.model, self.folder, self.largest = model, folder, largest
        self.weights = {name: nodes for name, nodes in matrices(model).items() if name not in keep}
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._prepared: dict[str, str] = {}
        self._factors: Mapping[str, np.ndarray] = {}

    def dynamic(self) -> None:
        """Products with weights in 8 bits, activations scaled row by row."""
        self._rewrite(self._dynamic_product)

    def static(self, ranges: Mapping[str, Range], factors: Mapping[str, np.ndarray] | None = None) -> None:
        """The same with activations in fixed ranges: the input of a product → its least and greatest value.

        factors: weight → what each channel of its inputs is divided by; the ranges are of what comes out. Weights of
        one input have the same.
        """
        self._factors = factors or {}
        self._rewrite(lambda node: self._static_product(node, ranges[node.input[0]]))

    def _rewrite(self, product: Callable[[NodeProto], None]) -> None:
        graph = self.model.graph
        replaced = {id(node) for nodes in self.weights.values() for node in nodes}
        for name in self.weights:
            value = to_array(self._tensors[name], self.folder)
            if name in self._factors:
                value = value * self._factors[name][:, None]
            weight, scale = quantize_weight(value, self.largest)
            self._constant(f"{name}.int8", weight)
            self._constant(f"{name}.scale", scale)
        for node in list(graph.node):
            if id(node) in replaced:
                product(node)
            elif node.op_type == "Gather" and node.input[0] in self.weights:
                self._embedding(node)
            else:
                self._nodes.append(node)
        used = {name for node in self._nodes for name in node.input}
        kept = [self._narrowed(tensor) for tensor in graph.initializer if tensor.name in used]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(self._nodes)
        graph.initializer.extend(kept + [made for name, made in self._constants.items() if name in used])

    def _narrowed(self, tensor: TensorProto) -> TensorProto:
        """A large tensor in float16, and a node that widens it, if nothing is lost; else itself."""
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < _LARGE:
            return tensor
        value = to_array(tensor, self.folder)
        with np.errstate(over="ignore"):
            half = value.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), value):
            return tensor
        name = f"{tensor.name}.half"
        self._nodes.insert(0, helper.make_node("Cast", [name], [tensor.name], to=TensorProto.FLOAT))
        return numpy_helper.from_array(half, name)

    def _constant(self, name: str, value: np.ndarray) -> str:
        self._constants.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _rows(self, x: str) -> str:
        """Bytes of each row of ``x``, around 128; the scale of each is called ``….row_scale``."""
        if x not in self._prepared:
            axis = self._constant("int8.last_axis", np.array([-1], np.int64))
            size = self._add("Abs", [x], f"{x}.size")
            largest = self._add("ReduceMax", [size, axis], f"{x}.largest", keepdims=1)
            scale = self._add(
                "Mul", [largest, self._constant("int8.unit", np.array(1 / 127, np.float32))], f"{x}.raw_scale"
            )
            tiny = self._constant("int8.tiny", np.array(1e-30, np.float32))
            scale = self._add("Max", [scale, tiny], f"{x}.row_scale")
            whole = self._add("Round", [self._add("Div", [x, scale], f"{x}.scaled")], f"{x}.whole")
            moved = self._add("Add", [whole, self._constant("int8.middle", np.array(128, np.float32))], f"{x}.moved")
            self._prepared[x] = self._add("Cast", [moved], f"{x}.uint8", to=TensorProto.UINT8)
        return self._prepared[x]

    def _dynamic_product(self, node: NodeProto) -> None:
        x, name, y = node.input[0], node.input[1], node.output[0]
        middle = self._constant("int8.zero_point", np.array(128, np.uint8))
        whole = self._add("MatMulInteger", [self._rows(x), f"{name}.int8", middle], f"{y}.int32")
        wide = self._add("Cast", [whole], f"{y}.float", to=TensorProto.FLOAT)
        self._add("Mul", [self._add("Mul", [wide, f"{x}.row_scale"], f"{y}.rows"), f"{name}.scale"], y)

    def _static_product(self, node: NodeProto, within: Range) -> None:
        x, name, y = node.input[0], node.input[1], node.output[0]
        if x not in self._prepared:
            heard = x
            if name in self._factors:
                inverse = self._constant(f"{x}.inverse", (1 / self._factors[name]).astype(np.float32))
                heard = self._add("Mul", [x, inverse], f"{x}.smooth")
            scale, zero = spread(within)
            terms = [
                self._constant(f"{x}.scale", np.array(scale, np.float32)),
                self._constant(f"{x}.zero_point", np.array(zero, np.uint8)),
            ]
            quantized = self._add("QuantizeLinear", [heard, *terms], f"{x}.uint8")
            self._prepared[x] = self._add("DequantizeLinear", [quantized, *terms], f"{x}.dequantized")
        zeros = self._constant(f"{name}.zeros", np.zeros(self._constants[f"{name}.scale"].dims[0], np.int8))
        weight = self._add("DequantizeLinear", [f"{name}.int8", f"{name}.scale", zeros], f"{y}.weight", axis=1)
        self._add("MatMul", [self._prepared[x], weight], y)

    def _embedding(self, node: NodeProto) -> None:
        """Look up columns of a matrix that is multiplied with elsewhere: it is there once, in 8 bits."""
        name, ids, y = node.input[0], node.input[1], node.output[0]
        columns = self._add("Gather", [f"{name}.int8", ids], f"{y}.int8", axis=1)
        scale = self._add("Gather", [f"{name}.scale", ids], f"{y}.scale", axis=0)
        wide = self._add("Cast", [columns], f"{y}.float", to=TensorProto.FLOAT)
        self._add("Mul", [wide, scale], y)
