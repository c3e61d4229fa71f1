"""Tensors of Hugging Face's weight files, one at a time: safetensors, and pickles read as plain tensors only."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stapes.errors import ModelError

# The mapped pages of a file count as this process's memory until it is closed, so it is closed after each such part.
_PART = 0.01


class TensorFile(Protocol):
    """An open file of weights."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


@contextmanager
def open_tensors(file: Path) -> Iterator[TensorFile]:
    """Open a file of weights, by its suffix. Raises ModelError where it cannot be read, also while it is open."""
    if file.suffix != ".safetensors":
        yield _Pickle(_unpickle(file))
        return
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read ({error}); fetch the model again") from None


def read_tensors(places: Iterable[tuple[str, Path, str]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each (name, file, name in that file), in order, keeping none of them."""
    pending = list(places)
    while pending:
        file = pending[0][1]
        budget = _PART * file.stat().st_size if _is_mapped(file) else math.inf
        with open_tensors(file) as handle:
            while pending and pending[0][1] == file and budget > 0:
                name, _, key = pending.pop(0)
                tensors = [handle.get_tensor(key)]
                budget -= tensors[0].nbytes
                yield name, tensors.pop()  # popped: not held here while the caller works


def _is_mapped(file: Path) -> bool:
    """Whether opening the file reads no weight. Pickles from before PyTorch 1.6 are no zip files and are read whole."""
    if file.suffix == ".safetensors":
        return True
    try:
        with file.open("rb") as stream:
            return stream.read(2) == b"PK"
    except OSError:  # told by who opens it
        return False


class _Pickle:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors.pop(name)


def _unpickle(file: Path) -> dict[str, Tensor]:
    """Only tensors and plain values are unpickled (``weights_only``)."""
    try:
        value = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_mapped(file))
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{file} cannot be read as weights ({reason}); fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no weights by name; fetch it again")
    return {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
