"""What goes through a graph while real speech is transcribed: for ranges, and to find the layers that 8 bits hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Errors and ranges of the products in the graphs of a folder."""

    def __init__(self, folder: Path, graphs: Mapping[str, str], recorded: Mapping[str, Sequence[Feeds]]) -> None:
        self.folder = folder
        self.ranges: dict[str, dict[str, Range]] = {}
        """Graph → input of a product → least and greatest value."""
        self._errors: dict[str, list[np.ndarray]] = {}
        self._models = read_graphs(folder, graphs)
        self._recorded = recorded

    def measure(self, largest: int, *, static: bool) -> dict[str, float]:
        """How far each weight's products are from their own float32, relative to their size, with 8-bit integers.

        ``static``: activations in one range for the tensor; otherwise row by row. Weights that nothing went through
        have no entry.
        """
        for graph, model in self._models.items():
            self._measure_graph(graph, model, largest, static)
        return {name: float(np.sqrt(np.concatenate(parts).mean())) for name, parts in self._errors.items()}

    def _measure_graph(self, graph: str, model: ModelProto, largest: int, static: bool) -> None:
        feeds = self._recorded.get(graph, ())
        products = matrices(model)
        if not feeds or not products:
            return
        inputs = sorted({node.input[0] for nodes in products.values() for node in nodes})
        ranges = self.ranges.setdefault(graph, {})
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        for start in range(0, len(inputs), _TOGETHER):
            names = inputs[start : start + _TOGETHER]
            seen = self._run(model, names, feeds)
            for name in names:
                ranges[name] = float(min(x.min() for x in seen[name])), float(max(x.max() for x in seen[name]))
            for weight, nodes in products.items():
                used = [node.input[0] for node in nodes if node.input[0] in names]
                if not used:
                    continue
                value = to_array(tensors[weight], self.folder)
                whole, scale = quantize_weight(value, largest)
                for name in used:
                    for x in seen[name]:
                        self._compare(weight, _some_rows(x), value, whole * scale, ranges[name] if static else None)

    def _compare(
        self, name: str, x: np.ndarray, weight: np.ndarray, quantized: np.ndarray, within: Range | None
    ) -> None:
        wanted = x @ weight
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


def _some_rows(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(-1, x.shape[-1])
    return rows[:: max(1, len(rows) // _ROWS)]
