"""Which runs compute by fused kernels."""

from __future__ import annotations

import pytest
import torch

from fused_networks import pair
from stapes.training import fused
from stapes.training.config import RunOptions
from stapes.training.fused import fuse_network


def fused_parts(
    monkeypatch: pytest.MonkeyPatch, run: RunOptions, strategy: str = "single", **named: bool
) -> list[bool]:
    """Whether front end, positions and layers of a new network are, on a device that can."""
    monkeypatch.setattr(fused, "can_fuse", lambda device: True)
    network, _ = pair("large")
    done = fuse_network(network, run, torch.device("cpu"), strategy, **named)  # pyright: ignore[reportArgumentType]
    parts = [network.feature_extractor, network.encoder.positions, network.encoder.layers[0]]
    found = ["forward" in part.__dict__ for part in parts]
    assert done == any(found)
    return found


def test_a_gpu_computes_by_fused_kernels_what_is_whole_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in ("single", "ddp", "fsdp"):
        assert fused_parts(monkeypatch, RunOptions(), strategy) == [True] * 3
    assert fused_parts(monkeypatch, RunOptions(), "deepspeed") == [False] * 3
    assert fused_parts(monkeypatch, RunOptions(), divided=True) == [False] * 3
    assert fused_parts(monkeypatch, RunOptions(fused=False)) == [False] * 3


def test_layers_that_are_compiled_or_multiply_in_fp8_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for run in (RunOptions(compile=True), RunOptions(fp8=True)):
        assert fused_parts(monkeypatch, run) == [True, True, False]


def test_the_cpu_stays_plain() -> None:
    network, _ = pair("large")
    assert not fuse_network(network, RunOptions(), torch.device("cpu"), "single")
