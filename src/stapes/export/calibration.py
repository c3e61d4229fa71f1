"""What goes through a graph while real speech is transcribed: for ranges, and to find the layers that 8 bits hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper

from stapes.audio.features import SAMPLE_RATE
from stapes.export.int8 import Range, matrices, quantize_weight, rows_in_int8, tensor_in_uint8
from stapes.export.weights import read_graphs, to_array
from stapes.inference.onnx_session import CPU, runtime
from stapes.inference.onnx_whisper import OnnxWhisper
from stapes.recognizer import Recognizer

Feeds = dict[str, np.ndarray]

_MOST = 6
"""Calls of a graph that are kept."""

_EVERY = 16
"""Of the steps, which are many and alike, one in so many."""

_ROWS = 512
"""Rows of activations in a call that are looked at."""

_QUIET = 1e-2
"""Of the median of the rows' mean squares: what is much smaller is judged by this."""

_Extremes = tuple[np.ndarray, np.ndarray]

_PROMPT = 4
"""Tokens before the first that a step writes. The very first has numbers that no other comes near."""

_TINY = 1e-5
"""Sizes below this count as this."""

_LEAST_FACTOR = 1 / 8
"""Of the mean factor of the channels."""

_TOGETHER = 24
"""Tensors that are fetched in one run, to bound memory."""


def record(recognizer: Recognizer, clips: Iterable[np.ndarray]) -> dict[str, list[Feeds]]:
    """Transcribe 16 kHz clips with an exported model; what each graph was given."""
    engine: Any = recognizer.engine
    kept: dict[str, list[Feeds]] = {}
    if isinstance(engine.model, OnnxWhisper):
        sessions = {graph: engine.model.session(graph) for graph in engine.model.folder.graphs if "@" not in graph}
    else:
        sessions = {"ctc": engine.model.session}
    for graph, session in sessions.items():
        session.listener = _listener(kept.setdefault(graph, []), _EVERY if graph == "step" else 1)
    try:
        for pcm in clips:
            recognizer.transcribe(pcm, sample_rate=SAMPLE_RATE, word_timestamps=True)
    finally:
        for session in sessions.values():
            session.listener = None
    return kept


def _listener(kept: list[Feeds], every: int) -> Callable[[Mapping[str, Any]], None]:
    calls = 0

    def listen(inputs: Mapping[str, Any]) -> None:
        nonlocal calls
        if calls % every == 0 and len(kept) < _MOST:
            kept.append({name: tensor.contiguous().numpy().copy() for name, tensor in inputs.items()})
        calls += 1

    return listen


class Calibration:
    """Errors and ranges of the products in the graphs of a folder.

    In one range for a tensor a few loud channels leave nothing of the others. So that they take less of it, the inputs
    of a product are divided by a factor for each channel, and its weights multiplied by that: the geometric mean of
    what both need (SmoothQuant, Xiao et al. 2022, https://arxiv.org/abs/2211.10438). On Whisper base the products'
    errors fall from 0.082 to 0.037 of their size (root mean square over all), near the 0.027 of scales for each row.
    """

    def __init__(self, folder: Path, graphs: Mapping[str, str], recorded: Mapping[str, Sequence[Feeds]]) -> None:
        self.folder = folder
        self.ranges: dict[str, dict[str, Range]] = {}
        """Graph → input of a product → least and greatest value, smoothed."""
        self.smoothing: dict[str, np.ndarray] = {}
        """Weight → what its inputs are divided by, (inputs,)."""
        self._errors: dict[str, list[np.ndarray]] = {}
        self._models = read_graphs(folder, graphs)
        self._recorded = recorded

    def measure(self, largest: int, *, static: bool) -> dict[str, float]:
        """How far each weight's products are from their own float32, relative to their size, with 8-bit integers.

        ``static``: activations in one range for the tensor; otherwise row by row. Weights that nothing went through
        have no entry.
        """
        if static:
            self._smooth()
        for graph, model in self._models.items():
            self._measure_graph(graph, model, largest, static)
        return {name: float(np.sqrt(np.concatenate(parts).mean())) for name, parts in self._errors.items()}

    def _smooth(self) -> None:
        """Find the factors of all channels, and with them the ranges."""
        extremes: dict[tuple[str, str], _Extremes] = {}
        written: dict[tuple[str, str], _Extremes] = {}
        for graph, model in self._models.items():
            for name, values in self._seen(graph, model):
                extremes[graph, name] = _extremes(values)
                if graph == "align":
                    written[graph, name] = _extremes([x[:, _PROMPT:] for x in values if x.shape[1] > _PROMPT] or values)
        for weights, inputs in self._groups(extremes):
            factors = self._factors(weights, np.max([np.abs(extremes[each]).max(axis=0) for each in inputs], axis=0))
            self.smoothing |= dict.fromkeys(weights, factors)
            for graph, name in inputs:
                # Few steps are recorded; whole texts that are read again go through the same layers.
                others = [written[each] for each in inputs if each in written] if graph == "step" else []
                low = np.min([each[0] for each in (extremes[graph, name], *others)], axis=0) / factors
                high = np.max([each[1] for each in (extremes[graph, name], *others)], axis=0) / factors
                self.ranges.setdefault(graph, {})[name] = float(low.min()), float(high.max())

    def _groups(self, inputs: Iterable[tuple[str, str]]) -> list[tuple[set[str], list[tuple[str, str]]]]:
        """Weights that share an input, and inputs that share a weight, in whichever graphs: they share the factors."""
        groups: list[tuple[set[str], list[tuple[str, str]]]] = []
        for graph, name in inputs:
            products = matrices(self._models[graph]).items()
            weights = {weight for weight, nodes in products if any(node.input[0] == name for node in nodes)}
            together = [(weights, [(graph, name)]), *(group for group in groups if group[0] & weights)]
            groups = [group for group in groups if not group[0] & weights]
            groups.append((set().union(*(each for each, _ in together)), [one for _, each in together for one in each]))
        return groups

    def _factors(self, weights: Iterable[str], inputs: np.ndarray) -> np.ndarray:
        """For channels of inputs up to such sizes. Rows that are looked up too have to stay as they are."""
        tensors, looked_up = {}, set()
        for model in self._models.values():
            tensors |= {tensor.name: tensor for tensor in model.graph.initializer}
            looked_up |= {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
        if looked_up.intersection(weights):
            return np.ones_like(inputs)
        sizes = np.max([np.abs(to_array(tensors[name], self.folder)).max(axis=1) for name in weights], axis=0)
        factors = np.log(np.maximum(inputs, _TINY)) / 2 - np.log(np.maximum(sizes, _TINY)) / 2
        # One that was silent so far may be loud in other recordings.
        return np.exp(np.maximum(factors - factors.mean(), np.log(_LEAST_FACTOR))).astype(np.float32)

    def _seen(self, graph: str, model: ModelProto) -> Iterator[tuple[str, list[np.ndarray]]]:
        """The inputs of a graph's products, and what they were in the recorded calls."""
        feeds = self._recorded.get(graph, ())
        inputs = sorted({node.input[0] for nodes in matrices(model).values() for node in nodes})
        for start in range(0, len(inputs) if feeds else 0, _TOGETHER):
            yield from self._run(model, inputs[start : start + _TOGETHER], feeds).items()

    def _measure_graph(self, graph: str, model: ModelProto, largest: int, static: bool) -> None:
        products = matrices(model)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        for name, values in self._seen(graph, model):
            for weight, nodes in products.items():
                if all(node.input[0] != name for node in nodes):
                    continue
                value = to_array(tensors[weight], self.folder)
                factors = self.smoothing.get(weight, np.ones(len(value), np.float32))
                whole, scale = quantize_weight(value * factors[:, None], largest)
                for x in values:
                    within = self.ranges[graph][name] if static else None
                    self._compare(weight, _some_rows(x), value, whole * scale, factors, within)

    def _compare(
        self,
        name: str,
        x: np.ndarray,
        weight: np.ndarray,
        quantized: np.ndarray,
        factors: np.ndarray,
        within: Range | None,
    ) -> None:
        wanted = x @ weight
        x = x / factors
        if within is None:
            whole, scale = rows_in_int8(x)
            got = (whole @ quantized) * scale
        else:
            got = tensor_in_uint8(x, within) @ quantized
        error, size = (np.square(values).mean(axis=-1, dtype=np.float64) for values in (got - wanted, wanted))
        # Row by row: a loud one must not hide what the others lose. Rows of nothing count little.
        self._errors.setdefault(name, []).append(error / (size + _QUIET * np.median(size) + 1e-30))

    def _run(self, model: ModelProto, names: Sequence[str], feeds: Sequence[Feeds]) -> dict[str, list[np.ndarray]]:
        """The values of tensors inside a graph, for each of the recorded calls."""
        probe = ModelProto()
        probe.CopyFrom(model)
        have = {value.name for value in (*probe.graph.output, *probe.graph.input)}
        probe.graph.output.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in have
        )
        options = runtime().SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        session = runtime().InferenceSession(probe.SerializeToString(), options, providers=[CPU])
        inside = [name for name in names if name not in feeds[0]]
        runs = [dict(zip(inside, session.run(inside, feed), strict=True)) if inside else {} for feed in feeds]
        return {name: [{**feed, **run}[name] for feed, run in zip(feeds, runs, strict=True)] for name in names}


def _extremes(values: Sequence[np.ndarray]) -> _Extremes:
    """The least and the greatest that each channel was."""
    rows = [x.reshape(-1, x.shape[-1]) for x in values]
    return np.min([x.min(axis=0) for x in rows], axis=0), np.max([x.max(axis=0) for x in rows], axis=0)


def _some_rows(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(-1, x.shape[-1])
    return rows[:: max(1, len(rows) // _ROWS)]
