"""One file of weights for all graphs of a model: what two of them have in common is there once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

from stapes.checkpoints.onnx_folder import WEIGHTS

_INLINE = 1024
"""Bytes below which a tensor stays in its graph."""

_ALIGNMENT = 64
"""Where tensors start in the file, so that they can be used from it as they are."""


class WeightsFile:
    """Writes the weights of graphs, and the graphs. External data have no limit of size, as graphs have (2 GB)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[bytes, tuple[int, int]] = {}
        self._file: BinaryIO = (folder / WEIGHTS).open("wb")

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, model: ModelProto, file: str, source: Path | None = None) -> None:
        """Write a graph; ``source``: the folder where its weights are, for those that it does not hold itself."""
        for tensor in model.graph.initializer:
            data = raw_bytes(tensor, source)
            for values in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(values)
            tensor.ClearField("data_location")
            del tensor.external_data[:]
            if len(data) < _INLINE:
                tensor.raw_data = bytes(data)
                continue
            place = self._place(data)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", WEIGHTS), ("offset", str(place[0])), ("length", str(place[1]))):
                tensor.external_data.add(key=key, value=value)
        (self.folder / file).write_bytes(model.SerializeToString())

    def _place(self, data: bytes | memoryview) -> tuple[int, int]:
        digest = hashlib.sha256(data).digest()
        if digest not in self._places:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            self._places[digest] = (self._file.tell(), len(data))
            self._file.write(data)
        return self._places[digest]


def raw_bytes(tensor: TensorProto, folder: Path | None) -> bytes | memoryview:
    """The bytes of a tensor, wherever they are: in it, or in a file of ``folder``."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    assert folder is not None
    place = external_place(tensor)
    if not place[2]:
        return b""
    return np.memmap(folder / place[0], np.uint8, "r", place[1], (place[2],)).data


def external_place(tensor: TensorProto) -> tuple[str, int, int]:
    """File, offset and length of a tensor that is not in its graph."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries.get("offset", 0)), int(entries["length"])


def to_array(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """A tensor's values, wherever they are."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(raw_bytes(tensor, folder), dtype=dtype).reshape(tuple(tensor.dims))


def read_graphs(folder: Path, files: Mapping[str, str]) -> dict[str, ModelProto]:
    """The graphs of a folder, without their weights."""
    return {name: onnx.load(str(folder / file), load_external_data=False) for name, file in files.items()}
