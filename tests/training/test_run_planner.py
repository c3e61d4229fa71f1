"""A plan fits where anything does, is the fastest that does, and says why not something simpler."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from stapes.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from stapes.training.dry_run import chip_with
from stapes.training.mesh import MeshSizes, parse_mesh
from stapes.training.plan import Costs
from stapes.training.planner import Choice, Sizes, choose

GIB = float(2**30)
WIDE = Wav2Vec2Config(width=1024, layers=3, heads=16, mlp_width=4096, vocab_size=32, pre_norm=True, conv_norm="layer")


@cache
def sizes() -> Sizes:
    """Of few layers, so that counting is quick, and of 24 of them."""
    with torch.device("meta"):
        network = Wav2Vec2(WIDE)
    cost = Costs(network).of(16, 240_000, 200)
    whole = replace(cost, layer_bytes=8 * cost.layer_bytes, saved_bytes=cost.saved_bytes + 7 * cost.layer_bytes)
    out = Sizes(network, whole, half=True, average=False)
    out.inside, out.layer_weights, out.layers = 8 * out.inside, 8 * out.layer_weights, 24
    return out


def chosen(gpus: int, gib: float, wanted: str | None = None, *, again: bool = False, divides: bool = True) -> Choice:
    mesh = None if wanted is None else parse_mesh(wanted)
    return choose(sizes(), gpus, gib * GIB, wanted=mesh, checkpoint_layers=again, divides=divides, rows=16)


def test_with_much_memory_the_simplest_is_taken() -> None:
    choice = chosen(8, 192)
    assert choice.fits
    assert choice.need.sizes == MeshSizes(dp=8)
    assert not choice.need.checkpoint_layers
    assert choice.need.parts == 1
    assert any("can be used" in reason for reason in choice.reasons)


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 64])
def test_less_memory_is_never_faster_and_what_is_chosen_fits(gpus: int) -> None:
    slowdowns = []
    for gib in (192, 96, 48, 24, 20, 16, 12, 10, 8, 6, 4):
        choice = chosen(gpus, gib)
        assert choice.need.sizes.processes == gpus
        assert choice.fits == (choice.need.bytes <= 0.9 * (gib * GIB - 1.5 * GIB))
        if choice.fits:
            slowdowns.append(choice.need.slowdown)
        else:
            assert "nothing fits" in choice.reasons[0]
    assert slowdowns == sorted(slowdowns)
    assert len(set(slowdowns)) > 1


def test_what_is_asked_for_is_taken() -> None:
    assert chosen(8, 192, "dp=2,fsdp=4").need.sizes == parse_mesh("dp=2,fsdp=4")
    assert chosen(8, 192, again=True).need.checkpoint_layers
    tight = chosen(8, 10, "pp=8")
    assert tight.need.sizes == parse_mesh("pp=8")
    assert not any(choice.need.sizes.divides for choice in (chosen(8, gib, divides=False) for gib in (24, 10, 4)))


@pytest.mark.parametrize("mesh", ["fsdp=8", "tp=8,sp", "pp=8", "cp=8"])
def test_each_way_of_sharing_takes_less_than_whole_copies(mesh: str) -> None:
    alone, shared = sizes().need(MeshSizes(dp=8)), sizes().need(parse_mesh(mesh))
    assert shared.bytes < alone.bytes
    assert sizes().need(parse_mesh(mesh), checkpoint_layers=True).kept < shared.kept


def test_unknown_memory_says_so_and_sizes_are_known_of_chips() -> None:
    choice = choose(sizes(), 2, None, wanted=None, checkpoint_layers=False, divides=True, rows=16)
    assert choice.need.sizes == MeshSizes(dp=2)
    assert "--gpu-memory" in choice.reasons[0]
    chip = chip_with(192 * GIB)
    assert chip is not None
    assert "MI300X" in chip.names[0]
    assert chip_with(17 * GIB) is None
