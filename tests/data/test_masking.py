"""Masks: widths and counts as published, exact under padding, the same in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stapes.data.masking import SpecAugment, replace_tokens, span_mask, uniforms
from stapes.data.seeds import _splitmix_array


def keys_of(count: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(-(2**63), 2**63 - 1, count))


def test_uniform_numbers_are_uniform_and_independent():
    values = uniforms(keys_of(400), 1, 50)
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values, 20, 0, 1)
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    columns = torch.corrcoef(values.T) - torch.eye(50)
    assert columns.abs().max() < 6 / 400**0.5
    assert not torch.equal(values, uniforms(keys_of(400), 2, 50))
    assert torch.equal(values[7:8], uniforms(keys_of(400)[7:8], 1, 50))
    # They are SplitMix64's, as on the CPU without torch, on any device.
    keys = keys_of(50, seed=1)
    numbers = _splitmix_array(np.arange(3, dtype=np.uint64) + np.uint64(5 << 32))
    expected = _splitmix_array(keys.numpy().view(np.uint64)[:, None] + numbers[None])
    np.testing.assert_array_equal(uniforms(keys, 5, 3).numpy(), (expected & np.uint64(0xFFFFFF)) / (1 << 24))
    # The hash of consecutive keys too.
    values = uniforms(torch.arange(20_000), 1, 1)[:, 0]
    assert ((torch.histc(values, 20, 0, 1) - 1000).abs() < 5 * 1000**0.5).all()


def test_specaugment_masks_within_limits_and_only_real_frames():
    augment = SpecAugment(
        frequency_masks=2, frequency_width=20, time_masks=4, time_width=30, time_fraction=0.4, value=9.0
    )
    lengths = torch.tensor([200, 150, 40, 1, 0] * 40)
    features = torch.ones(len(lengths), 200, 80)
    masked = augment(features, lengths, keys_of(len(lengths))) == 9.0
    for row, length in enumerate(lengths.tolist()):
        assert not masked[row, length:].any()
        if not length:
            continue
        bands = masked[row, :length].all(0)
        assert bands.sum() <= 40
        times = masked[row, :length, ~bands].all(1)
        assert times.sum() <= 0.4 * length
        expected = times[:, None] | bands[None]
        assert torch.equal(masked[row, :length], expected)  # whole frames and whole bands, nothing else
    full = masked[lengths == 200]
    bands = full.all(1).float()
    times = torch.stack([row[:, ~band].all(1) for row, band in zip(full, full.all(1), strict=True)]).float()
    # Two masks of 10 bins on average of 80, four of 10 (0.4 × 200 / 4 / 2) frames of 200, less what overlaps.
    assert bands.mean() == pytest.approx(1 - (1 - 10 / 80) ** 2, abs=0.03)
    assert times.mean() == pytest.approx(1 - (1 - 10 / 200) ** 4, abs=0.03)
    assert times[:, :100].mean() == pytest.approx(float(times[:, 100:].mean()), abs=0.06)


def test_masks_are_no_wider_than_asked_and_reach_both_ends():
    augment = SpecAugment(
        frequency_masks=1, frequency_width=3, time_masks=1, time_width=2, time_fraction=1.0, value=9.0
    )
    masked = augment(torch.ones(4000, 6, 8), torch.full((4000,), 6), keys_of(4000)) == 9.0
    times, bands = masked.all(2), masked.all(1)
    assert times.sum(1).max() == 2
    assert bands.sum(1).max() == 3
    for found in (times.float().mean(0), bands.float().mean(0)):
        torch.testing.assert_close(found, found.flip(0), rtol=0, atol=0.04)
        assert found[0] > 0.05
    # A width of 0, 1 or 2 is as likely as another.
    assert torch.bincount(times.sum(1)).tolist() == [pytest.approx(4000 / 3, rel=0.1)] * 3


@pytest.mark.parametrize("value", [0.0, None])
def test_specaugment_is_the_same_at_any_padding_and_in_any_batch(value):
    augment = SpecAugment(value=value)
    lengths, keys = torch.tensor([120, 77, 30]), keys_of(3)
    features = torch.randn(3, 150, 80)
    together = augment(features, lengths, keys)
    for row in range(3):
        length = int(lengths[row])
        alone = augment(features[row : row + 1, :length], lengths[row : row + 1], keys[row : row + 1])
        torch.testing.assert_close(together[row, :length], alone[0], rtol=0, atol=1e-6)
        assert torch.equal(together[row, length:], features[row, length:])
    assert not torch.equal(augment(features, lengths, keys_of(3, seed=1)), together)
    assert torch.equal(augment.eval()(features, lengths, keys), features)


@pytest.mark.parametrize(
    ("probability", "length", "minimum"), [(0.65, 10, 0), (0.05, 10, 2), (0.3, 1, 0), (1.5, 10, 0)]
)
def test_spans_are_counted_as_in_hugging_face(probability, length, minimum):
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

    frames, rows = 149, 400
    found = span_mask(
        torch.full((rows,), frames), frames, keys_of(rows), probability=probability, length=length, minimum=minimum
    )
    np.random.seed(0)
    # Theirs draws the rounding once a call: many calls, to compare the means.
    theirs = np.concatenate(
        [_compute_mask_indices((8, frames), probability, length, min_masks=minimum) for _ in range(rows // 8)]
    )
    share, expected = found.float().mean(1).numpy(), theirs.mean(1)
    slack = 4 * (float(share.std()) + 0.01) / rows**0.5
    assert float(share.mean()) == pytest.approx(float(expected.mean()), abs=slack)
    assert float(share.std()) == pytest.approx(float(expected.std()), rel=0.35, abs=0.005)
    # Every run of masked frames is at least as long as a span.
    edges = torch.nn.functional.pad(found.int(), (1, 1)).diff(dim=1)
    assert bool(((edges == -1).nonzero()[:, 1] - (edges == 1).nonzero()[:, 1] >= length).all())
    # Places are uniform: the first third is masked as often as the last (both but for the ends).
    thirds = found[:, 15:-15].float().mean(0)
    assert float(thirds[:40].mean()) == pytest.approx(float(thirds[-40:].mean()), abs=0.06)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_masks_the_same():
    keys, lengths = keys_of(32), torch.arange(10, 330, 10)
    spans = {"probability": 0.65, "length": 10, "minimum": 2}
    here, there = (span_mask(lengths.to(d), 320, keys.to(d), **spans) for d in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())
    features = torch.ones(32, 320, 80)
    augment = SpecAugment(value=9.0)
    there = augment(features.cuda(), lengths.cuda(), keys.cuda())
    assert torch.equal(augment(features, lengths, keys), there.cpu())


def test_spans_are_the_same_at_any_padding_and_stay_within_the_row():
    lengths, keys = torch.tensor([149, 80, 33, 9, 0]), keys_of(5)
    mask = span_mask(lengths, 200, keys, probability=0.5, length=10)
    for row, length in enumerate(lengths.tolist()):
        assert not mask[row, length:].any()
        if length:
            alone = span_mask(lengths[row : row + 1], length, keys[row : row + 1], probability=0.5, length=10)
            assert torch.equal(mask[row, :length], alone[0])
    assert mask[0].any()
    assert not mask[3].any()  # no span fits
    assert span_mask(lengths, 200, keys, probability=0.0, length=10).sum() == 0


def test_some_tokens_become_others_half_of_them_of_the_same_row():
    keys, count = keys_of(200), 50_000
    tokens = torch.arange(40).repeat(200, 1) + 100 * torch.arange(200)[:, None] + 50_000
    may = torch.zeros_like(tokens, dtype=torch.bool)
    may[:, 5:35] = True
    found = replace_tokens(tokens, may, keys, 0.25, count)
    other = found != tokens
    assert not other[~may].any()
    assert other[may].float().mean().item() == pytest.approx(0.25, abs=0.02)
    own = found[other] >= count
    assert own.float().mean().item() == pytest.approx(0.5, abs=0.05)
    first, last = tokens[:, 5:6], tokens[:, 34:35]
    assert ((found >= first) & (found <= last))[other & (found >= count)].all()
    assert torch.equal(found[7:9], replace_tokens(tokens[7:9], may[7:9], keys[7:9], 0.25, count))
    assert torch.equal(replace_tokens(tokens, may, keys, 0.0, count), tokens)
    none = torch.zeros_like(may)
    assert torch.equal(replace_tokens(tokens, none, keys, 1.0, count), tokens)
