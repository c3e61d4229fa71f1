"""Folders of Whispers whose weights are in 8 and 4 bits, as `kernels.quantization` and `kernels.fp8_weights` have them.

GPUs multiply with the weights as they lie; anything else gets the numbers that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from safetensors.torch import save_file
from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint, whisper_names
from stapes.checkpoints.huggingface import open_huggingface
from stapes.checkpoints.save import write_settings
from stapes.checkpoints.tensors import open_tensors
from stapes.errors import ModelError
from stapes.kernels.fp8_weights import STORED, Fp8Weight, dequantize_fp8, quantize_fp8
from stapes.kernels.quantization import Quantized, dequantize, quantize_int4, quantize_int8
from stapes.options import Precision
from stapes.text.files import read_json

MANIFEST = "stapes_quantized.json"
WEIGHTS = "quantized.safetensors"
"""By our names; a matrix that is quantised is two tensors, ``NAME.values`` and ``NAME.scales``."""

_FORMAT = 1

Stored = Callable[[str], Quantized | Fp8Weight | None]
"""The path of a module → its weight, where that is quantised."""


def is_quantized(path: Path) -> bool:
    """Whether ``path`` is a folder that `write_quantized` wrote."""
    return (path / MANIFEST).is_file()


def write_quantized(checkpoint: WhisperCheckpoint, folder: Path, scheme: Precision, bits: Mapping[str, int]) -> None:
    """Write a model into an empty folder: the weight of each module in ``bits`` in so many, all else in fp16.

    In the scheme fp8 the 8 bits are those of a float.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.read():
        wanted = bits.get(name.removesuffix(".weight"))
        if wanted is None:
            tensors[name] = tensor.half().contiguous()
        else:
            make = quantize_fp8 if scheme == "fp8" else quantize_int8 if wanted == 8 else quantize_int4
            tensors[f"{name}.values"], tensors[f"{name}.scales"] = make(tensor)
    save_file(tensors, folder / WEIGHTS)
    write_settings(checkpoint, folder, "float16")
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, "scheme": scheme}) + "\n", encoding="utf-8")


def open_quantized(folder: Path, name: str | None = None) -> WhisperCheckpoint:
    """Describe the model in ``folder``. Raises ModelError where something is missing or damaged."""
    facts = read_json(folder / MANIFEST)
    scheme = facts.get("scheme")
    if facts.get("format") != _FORMAT or scheme not in get_args(Precision):
        raise ModelError(f"{folder / MANIFEST} is of another version of stapes, or damaged: quantise the model again")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} lacks {WEIGHTS}: quantise the model again, or copy the whole folder")
    checkpoint = open_huggingface(folder, name, has_weights=False)
    return replace(checkpoint, read=partial(_read, folder, checkpoint), scheme=scheme, stored=partial(_stored, folder))


def _read(folder: Path, checkpoint: WhisperCheckpoint) -> Iterator[tuple[str, Tensor]]:
    with open_tensors(folder / WEIGHTS) as file:
        there = set(file.keys())
        for name, _, _ in whisper_names(checkpoint.config):
            if name in there:
                yield name, file.get_tensor(name)
            elif f"{name}.values" in there:
                found = _weight(file.get_tensor(f"{name}.values"), file.get_tensor(f"{name}.scales"))
                yield name, dequantize_fp8(found) if isinstance(found, Fp8Weight) else dequantize(found)


def _stored(folder: Path, path: str) -> Quantized | Fp8Weight | None:
    with open_tensors(folder / WEIGHTS) as file:
        name = f"{path}.weight"
        if f"{name}.values" not in set(file.keys()):
            return None
        return _weight(file.get_tensor(f"{name}.values"), file.get_tensor(f"{name}.scales"))


def _weight(values: Tensor, scales: Tensor) -> Quantized | Fp8Weight:
    return Fp8Weight(values, scales) if values.dtype == STORED else Quantized(values, scales)
