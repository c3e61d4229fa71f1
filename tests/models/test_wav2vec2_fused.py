"""The fused network equals the plain one, loss and gradients; here by the references of its kernels."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fused_networks import KINDS, farthest, loss_and_gradients, pair, sound
from stapes.data.masking import sample_negatives, span_mask
from stapes.kernels.dropout import draw
from stapes.models.fused_functions import AddNorm
from stapes.models.wav2vec2_fused import fuse
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining, Wav2Vec2PretrainingConfig, initialize_pretraining


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


@pytest.mark.parametrize("kind", ["base", "large"])
def test_pre_training_has_the_same_losses_and_gradients(kind: str) -> None:
    """The quantiser reads the features too, and their gradient is scaled."""
    torch.manual_seed(0)
    sizes = Wav2Vec2PretrainingConfig(
        replace(KINDS[kind], vocab_size=None), codes=6, code_width=8, projection_width=8, feature_dropout=0.0
    )
    plain = Wav2Vec2Pretraining(sizes)
    initialize_pretraining(plain)
    fused = copy.deepcopy(plain)
    fuse(fused.feature_extractor, fused.encoder)
    waveform = sound(2, 5_000)
    frames = sizes.network.feature_count(5_000)
    keys = torch.tensor([3, 4])
    mask = span_mask(torch.full((2,), frames), frames, keys, probability=0.6, length=3, minimum=2)
    negatives = sample_negatives(mask, keys, 5)
    noise = torch.randn(2, frames, sizes.code_groups, sizes.codes)
    found = []
    for network in (plain.train(), fused.train()):
        out = network(waveform, None, mask, negatives, noise=noise, feature_gradient=0.1)
        (out.contrastive / out.hidden + 0.1 * out.diversity + 10 * out.penalty).backward()
        gradients = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
        found.append((out, gradients))
    (wanted, of_plain), (out, of_fused) = found
    for one, two in zip(out, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert max(farthest(of_fused, of_plain).values()) < 1e-3


def test_layers_may_stay_plain() -> None:
    plain, _ = pair("large")
    half = copy.deepcopy(plain)
    fuse(half.feature_extractor, half.encoder, layers=False)
    waveform = sound(2, 2_500)
    loss, gradients = loss_and_gradients(plain, waveform, None)
    found, of_half = loss_and_gradients(half, waveform, None)
    assert found == pytest.approx(loss, rel=1e-5)
    assert max(farthest(of_half, gradients).values()) < 1e-4
