"""Graphs as ONNX Runtime computes them fastest on the CPU, in its own operators; the plain ones are for all else.

Measured on one core of an EPYC with AVX-512 (the encoder of Whisper base, a window of 30 s): 0.45 instead of 0.48 s in
fp32, 0.29 instead of 0.33 s in int8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

_DOMAIN = "com.microsoft"

SUFFIX = "@cpu"
"""Behind the name of a graph: the same for the CPU."""


def cpu_file(file: str) -> str:
    """Where the CPU's form of a graph is written."""
    return file.replace(".onnx", ".cpu.onnx")


class _Graph:
    """A graph that nodes are taken out of and put into."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.producers = {name: node for node in model.graph.node for name in node.output}
        self.consumers: dict[str, list[NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        self.outputs = {value.name for value in model.graph.output}
        self.scalars = {
            tensor.name: float(numpy_helper.to_array(tensor).reshape(()))
            for tensor in model.graph.initializer
            if not tensor.dims and tensor.data_type == TensorProto.FLOAT
        }

    def only_user(self, node: NodeProto, *kinds: str) -> NodeProto | None:
        """The one node that uses a node's result, if there is but one and it is of such a kind."""
        users = self.consumers.get(node.output[0], [])
        if len(users) != 1 or node.output[0] in self.outputs:
            return None
        return users[0] if users[0].op_type in kinds else None

    def back(self, name: str, *kinds: str) -> str | None:
        """What a tensor was made from by nodes of these kinds, the last one first."""
        for kind in kinds:
            node = self.producers.get(name)
            if node is None or node.op_type != kind:
                return None
            name = node.input[0]
        return name

    def replace(self, made: dict[str, list[NodeProto]]) -> None:
        """Put nodes in the place of those that made these outputs; nodes that nothing needs any more go."""
        nodes: list[NodeProto] = []
        for node in self.graph.node:
            nodes += made.get(node.output[0], [node])
        needed = set(self.outputs)
        kept: list[NodeProto] = []
        for node in reversed(nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
        del self.graph.node[:]
        self.graph.node.extend(reversed(kept))


def tune_for_cpu(model: ModelProto, heads: int | None = None) -> None:
    """Put attention (of so many heads, where it has no mask) and GELUs into single operators."""
    if heads is not None:
        _rewrite(model, "Softmax", lambda graph, node: _attention(graph, node, heads))
    _rewrite(model, "Erf", _gelu)
    _declare(model)


def fuse_int8(model: ModelProto) -> None:
    """Let products of bytes give floats that the weights' scales are applied to."""
    before = len(model.graph.node)
    _rewrite(model, "MatMulInteger", _product)
    if len(model.graph.node) < before:
        model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "int8.one"))
    _declare(model)


def _rewrite(
    model: ModelProto, kind: str, rule: Callable[[_Graph, NodeProto], tuple[str, list[NodeProto]] | None]
) -> None:
    graph = _Graph(model)
    found = [rule(graph, node) for node in model.graph.node if node.op_type == kind]
    graph.replace(dict(each for each in found if each is not None))


def _declare(model: ModelProto) -> None:
    if all(opset.domain != _DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _attention(graph: _Graph, softmax: NodeProto, heads: int) -> tuple[str, list[NodeProto]] | None:
    """softmax(q kᵀ) v, with heads split off before and joined behind, whose scale is in the query's weights."""
    scores = graph.producers.get(softmax.input[0])
    product = graph.only_user(softmax, "MatMul")
    if scores is None or scores.op_type != "MatMul" or product is None or product.input[0] != softmax.output[0]:
        return None
    joined = graph.only_user(product, "Transpose")
    flat = graph.only_user(joined, "Reshape") if joined is not None else None
    split = ("Transpose", "Reshape")
    query, value = graph.back(scores.input[0], *split), graph.back(product.input[1], *split)
    key = graph.back(scores.input[1], "Transpose", *split) or graph.back(scores.input[1], *split)
    if flat is None or query is None or key is None or value is None:
        return None
    y = flat.output[0]
    made = helper.make_node("MultiHeadAttention", [query, key, value], [y], domain=_DOMAIN, num_heads=heads, scale=1.0)
    return y, [made]


def _gelu(graph: _Graph, erf: NodeProto) -> tuple[str, list[NodeProto]] | None:
    """x · (½ · (1 + erf(x / √2))), as PyTorch's exporter writes it."""
    divided = graph.producers.get(erf.input[0])
    plus = graph.only_user(erf, "Add")
    half = graph.only_user(plus, "Mul") if plus is not None else None
    y = graph.only_user(half, "Mul") if half is not None else None
    if divided is None or divided.op_type != "Div" or plus is None or half is None or y is None:
        return None
    x = divided.input[0]
    constants = [graph.scalars.get(name) for node in (divided, plus, half) for name in node.input]
    known = sorted(value for value in constants if value is not None)
    if x not in y.input or len(known) != 3 or not np.allclose(known, [0.5, 1.0, 2**0.5], atol=1e-6):
        return None
    return y.output[0], [helper.make_node("Gelu", [x], [y.output[0]], domain=_DOMAIN)]


def _product(graph: _Graph, node: NodeProto) -> tuple[str, list[NodeProto]] | None:
    """A product of `int8.Rewriter`: cast, then the rows' scales, then the weights' scales."""
    cast = graph.only_user(node, "Cast")
    rows = graph.only_user(cast, "Mul") if cast is not None else None
    columns = graph.only_user(rows, "Mul") if rows is not None else None
    if rows is None or columns is None:
        return None
    x, weight, zero_point = node.input
    y = columns.output[0]
    scaled = f"{y}.scaled_columns"
    fused = helper.make_node(
        "MatMulIntegerToFloat", [x, weight, "int8.one", columns.input[1], zero_point], [scaled], domain=_DOMAIN
    )
    return y, [fused, helper.make_node("Mul", [scaled, rows.input[1]], [y])]
