"""The fused network equals the plain one, loss and gradients; here by the references of its kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from fused_networks import KINDS, farthest, loss_and_gradients, pair, sound
from stapes.kernels.dropout import draw
from stapes.models.fused_functions import AddNorm
from stapes.models.wav2vec2_fused import fuse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradients_are_those_of_the_plain_network(kind: str, padded: bool) -> None:
    plain, fused = pair(kind)
    waveform = sound(3, 4_321)
    lengths = torch.tensor([4_321, 2_777, 3_500]) if padded else None
    loss, gradients = loss_and_gradients(plain, waveform, lengths)
    found, of_fused = loss_and_gradients(fused, waveform, lengths)
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-6)
    far = farthest(of_fused, gradients)
    assert max(far.values()) < 1e-4, {name: each for name, each in far.items() if each >= 1e-4}


@pytest.mark.parametrize("kind", ["base", "large"])
def test_in_half_precision_it_is_no_farther_from_the_truth_than_the_plain_network(kind: str) -> None:
    plain, fused = pair(kind)
    waveform = sound(2, 6_000)
    _, truth = loss_and_gradients(plain, waveform, None)
    loss, half = loss_and_gradients(plain, waveform, None, torch.bfloat16)
    found, of_fused = loss_and_gradients(fused, waveform, None, torch.bfloat16)
    assert found == pytest.approx(loss, rel=2e-2, abs=5e-3)
    far, usual = farthest(of_fused, truth), farthest(half, truth)
    assert sum(far.values()) < 1.5 * sum(usual.values())


def test_a_frozen_front_end_has_no_gradient_and_changes_no_other() -> None:
    plain, fused = pair("base")
    for network in (plain, fused):
        network.feature_extractor.requires_grad_(False)
    waveform = sound(2, 3_000)
    _, gradients = loss_and_gradients(plain, waveform, None)
    _, found = loss_and_gradients(fused, waveform, None)
    assert not any(name.startswith("feature_extractor") for name in found)
    assert max(farthest(found, gradients).values()) < 1e-4


def test_dropout_is_drawn_from_the_seed_and_keeps_the_mean() -> None:
    torch.manual_seed(1)
    x, value = torch.zeros(64, 512), torch.ones(64, 512)
    arguments = (torch.zeros(512), None, None, 0.0)
    sums = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        sums.append(AddNorm.apply(x, value, *arguments, draw(0.25, x.device))[0])
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])
    assert abs(float(sums[0].mean()) - 1) < 0.03
    assert sums[0].unique().tolist() == pytest.approx([0.0, 4 / 3])


def test_evaluation_drops_nothing_and_copies_compute_with_their_own_weights() -> None:
    _, fused = pair("base")
    waveform = sound(1, 2_000)
    fused.eval()
    with torch.inference_mode():
        logits, _ = fused(waveform)
        again, _ = fused(waveform)
    assert torch.equal(logits, again)
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        fused.encoder.layers[0].mlp.up.weight.zero_()
        same, _ = copied(waveform)
    assert torch.equal(same, logits)


def test_layers_may_stay_plain() -> None:
    plain, _ = pair("large")
    half = copy.deepcopy(plain)
    fuse(half.feature_extractor, half.encoder, layers=False)
    waveform = sound(2, 2_500)
    loss, gradients = loss_and_gradients(plain, waveform, None)
    found, of_half = loss_and_gradients(half, waveform, None)
    assert found == pytest.approx(loss, rel=1e-5)
    assert max(farthest(of_half, gradients).values()) < 1e-4
