"""An engine that a process of its own can open: it writes what it heard, and needs no weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from fakes import FakeEngine

from stapes.errors import ModelError


@dataclass
class PooledEngine(FakeEngine):
    dtype: ClassVar[torch.dtype] = torch.float32

    def detect_language(self, encoded: Sequence[np.ndarray]) -> list[dict[str, float]]:
        return [{"en": float(pcm[0]), "de": 1 - float(pcm[0])} for pcm in encoded]


@dataclass
class BrokenEngine(PooledEngine):
    def step(self, count: int) -> None:
        raise ValueError("the engine is broken")


def open_one() -> Any:
    return PooledEngine(rows=64)  # those of a test stay until it releases them


def open_broken() -> Any:
    return BrokenEngine()


def open_none() -> Any:
    raise ModelError("there is no such model")


def die() -> Any:
    os._exit(3)
