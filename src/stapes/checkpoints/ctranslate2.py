"""Whisper as CTranslate2 (faster-whisper) stores it: a folder with ``model.bin``, ``config.json``, ``tokenizer.json``.

The layout of ``model.bin``, little endian: u32 version, string spec, u32 revision, u32 count of variables; each
variable is string name, u8 rank, u32 × rank shape, u8 dtype, u32 bytes, data; then u32 count of aliases, each two
strings. A string is its u16 length (its closing NUL included), its bytes, NUL. int8 matrices carry one scale a row.
Source: OpenNMT/CTranslate2 ``model_spec.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint, pairs, whisper_config
from stapes.errors import ModelError
from stapes.models.whisper import WhisperConfig
from stapes.text.files import read_json

_DTYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16, 5: torch.bfloat16}


@dataclass(frozen=True)
class _Variable:
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Pieces:
    """A file that may come in several parts (pip packages split large ones), read at any offset.

    Plain reads, not a mapping: the pages of a mapped file would count as our memory beside the converted weights.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        try:
            self.sizes = [path.stat().st_size for path in paths]
        except OSError as error:
            raise ModelError(f"{error.filename} is missing; install the model again") from None

    def read(self, offset: int, size: int) -> bytearray:
        if offset + size > sum(self.sizes):
            raise ModelError(f"{self.paths[-1]} is shorter than it says; install or fetch the model again")
        out = bytearray(size)
        view = memoryview(out)
        for path, length in zip(self.paths, self.sizes, strict=True):
            if offset < length and view:
                view, offset = self._read_part(path, offset, view, length - offset)
            offset -= length
        return out

    @staticmethod
    def _read_part(path: Path, offset: int, view: memoryview, most: int) -> tuple[memoryview, int]:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                got = _read_into(file, view[:most])
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror}); install or fetch the model again") from None
        return view[got:], offset + got


def _read_into(file: BinaryIO, view: memoryview) -> int:
    total = 0
    while total < len(view):
        got = file.readinto(view[total:])  # type: ignore[attr-defined]
        if not got:
            break
        total += got
    return total


class _Index:
    """The variables of a ``model.bin``: where each lies and what it is."""

    def __init__(self, pieces: _Pieces) -> None:
        self.pieces = pieces
        self.offset = 0
        self.variables: dict[str, _Variable] = {}
        version = self._number("I")
        spec = self._string()
        self._number("I")  # revision
        if version < 4 or spec != "WhisperSpec":
            raise ModelError(f"{pieces.paths[0]} is no Whisper model of CTranslate2 (version {version}, {spec[:40]!r})")
        for _ in range(self._number("I")):
            name = self._string()
            shape = tuple(self._number("I") for _ in range(self._number("B")))
            dtype, size = self._number("B"), self._number("I")
            if dtype not in _DTYPES:
                raise ModelError(f"{pieces.paths[0]}: {name} has the unknown type {dtype}")
            self.variables[name] = _Variable(self.offset, size, shape, _DTYPES[dtype])
            self.offset += size
        for _ in range(self._number("I")):
            alias, target = self._string(), self._string()
            self.variables[alias] = self.variable(target)

    def _number(self, code: str) -> int:
        size = struct.calcsize("<" + code)
        (value,) = struct.unpack("<" + code, self.pieces.read(self.offset, size))
        self.offset += size
        return value

    def _string(self) -> str:
        length = self._number("H")
        value = self.pieces.read(self.offset, length).rstrip(b"\0").decode("utf-8", "replace")
        self.offset += length
        return value

    def variable(self, name: str) -> _Variable:
        """Where a variable lies. Raises ModelError where there is none."""
        variable = self.variables.get(name)
        if variable is None:
            raise ModelError(f"{self.pieces.paths[0]} lacks the weights {name}; install or fetch the model again")
        return variable

    def tensor(self, name: str) -> Tensor:
        """Read a variable; int8 matrices are scaled back to float32."""
        variable = self.variable(name)
        if math.prod(variable.shape) * variable.dtype.itemsize != variable.size:
            raise ModelError(f"{self.pieces.paths[0]} is damaged at {name}; install or fetch the model again")
        data = self.pieces.read(variable.offset, variable.size)
        value = torch.frombuffer(data, dtype=variable.dtype).reshape(variable.shape)
        if value.dtype == torch.int8 and value.ndim == 2:
            value = value.float() / self.tensor(f"{name}_scale").float()[:, None]
        return value

    def scalar(self, name: str) -> int:
        """Read a variable of one number."""
        value = self.tensor(name)
        return int(value) if value.numel() == 1 else 0

    def size(self, name: str, axis: int) -> int:
        """The length of a variable along an axis; 0 where it has no such axis."""
        shape = self.variable(name).shape
        return shape[axis] if axis < len(shape) else 0


def open_ctranslate2(folder: Path, name: str | None = None, weights: list[Path] | None = None) -> WhisperCheckpoint:
    """Describe the model in ``folder``; ``weights`` names the parts when ``model.bin`` is split."""
    settings = read_json(folder / "config.json")
    index = _Index(_Pieces(weights or [folder / "model.bin"]))
    layers = {
        side: sum(key.startswith(f"{side}/layer_") and key.endswith("/ffn/linear_0/weight") for key in index.variables)
        for side in ("encoder", "decoder")
    }
    config = whisper_config(
        index.pieces.paths[0],
        mel_bins=index.size("encoder/conv1/weight", 1),
        vocab_size=index.size("decoder/embeddings/weight", 0),
        width=index.size("decoder/embeddings/weight", 1),
        encoder_layers=layers["encoder"],
        encoder_heads=index.scalar("encoder/num_heads"),
        decoder_layers=layers["decoder"],
        decoder_heads=index.scalar("decoder/num_heads"),
        audio_context=index.size("encoder/position_encodings/encodings", 0),
        text_context=index.size("decoder/position_encodings/encodings", 0),
    )
    suppress, begin = settings.get("suppress_ids"), settings.get("suppress_ids_begin")
    tokenizer = folder / "tokenizer.json"
    return WhisperCheckpoint(
        name=name or folder.name,
        path=folder,
        config=config,
        read=lambda: _read(index, config),
        tokenizer=tokenizer if tokenizer.exists() else None,
        alignment_heads=pairs(settings.get("alignment_heads")),
        suppress_tokens=tuple(suppress) if suppress is not None else None,
        begin_suppress_tokens=tuple(begin) if begin is not None else None,
    )


def _read(index: _Index, config: WhisperConfig) -> Iterator[tuple[str, Tensor]]:
    yield EMBEDDING, index.tensor("decoder/embeddings/weight")
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        yield f"{side}.positions", index.tensor(f"{side}/position_encodings/encodings")
        yield from _norm(index, f"{side}.norm", f"{side}/layer_norm")
        for i in range(layers):
            ours, theirs = f"{side}.layers.{i}", f"{side}/layer_{i}"
            yield from _norm(index, f"{ours}.attention_norm", f"{theirs}/self_attention/layer_norm")
            yield from _fused(index, f"{ours}.attention", f"{theirs}/self_attention/linear_0", "query", "key", "value")
            yield from _fused(index, f"{ours}.attention", f"{theirs}/self_attention/linear_1", "out")
            if side == "decoder":
                yield from _norm(index, f"{ours}.cross_attention_norm", f"{theirs}/attention/layer_norm")
                yield from _fused(index, f"{ours}.cross_attention", f"{theirs}/attention/linear_0", "query")
                yield from _fused(index, f"{ours}.cross_attention", f"{theirs}/attention/linear_1", "key", "value")
                yield from _fused(index, f"{ours}.cross_attention", f"{theirs}/attention/linear_2", "out")
            yield from _norm(index, f"{ours}.mlp_norm", f"{theirs}/ffn/layer_norm")
            yield from _fused(index, f"{ours}.mlp", f"{theirs}/ffn/linear_0", "up")
            yield from _fused(index, f"{ours}.mlp", f"{theirs}/ffn/linear_1", "down")
    for conv in ("conv1", "conv2"):
        yield f"encoder.{conv}.weight", index.tensor(f"encoder/{conv}/weight")
        yield f"encoder.{conv}.bias", index.tensor(f"encoder/{conv}/bias")


def _norm(index: _Index, ours: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{ours}.weight", index.tensor(f"{theirs}/gamma")
    yield f"{ours}.bias", index.tensor(f"{theirs}/beta")


def _fused(index: _Index, ours: str, theirs: str, *parts: str) -> Iterator[tuple[str, Tensor]]:
    """CTranslate2 stacks query, key and value into one matrix; its key bias is all zeros, as Whisper has none."""
    weights = index.tensor(f"{theirs}/weight").chunk(len(parts))
    biases = index.tensor(f"{theirs}/bias").chunk(len(parts))
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        yield f"{ours}.{part}.weight", weight
        if part != "key":
            yield f"{ours}.{part}.bias", bias
