"""Crops: a few lengths, all of a recording in turn, and what pre-training draws of each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.data.buckets import BucketSampler
from stapes.data.crops import Crops, crop_lengths, cut_to
from stapes.data.manifest import Manifest
from stapes.data.masking import gumbel_noise, sample_negatives, span_mask
from stapes.data.seeds import generator


def manifest_of(folder: Path, durations: list[float]) -> Manifest:
    lines = []
    for number, seconds in enumerate(durations):
        recording = {"sources": [{"type": "file", "channels": [0], "source": f"/audio/{number}.wav"}]}
        said = {"start": 0.0, "duration": seconds, "text": "a text"}
        cut = {"id": str(number), "start": 0.0, "duration": seconds, "channel": 0}
        lines.append(json.dumps({**cut, "recording": recording, "supervisions": [said]}))
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return Manifest(path)


def test_there_are_few_lengths_and_little_is_cut_off() -> None:
    lengths = np.random.default_rng(0).gamma(4.0, 2.0, 3000).clip(0.4, 40)
    edges = crop_lengths(lengths, 2.0, 15.6, 6)
    assert len(edges) <= 6
    assert np.all(np.diff(edges) > 0)
    assert edges[0] >= 2.0 - 1e-6
    assert edges[-1] <= 15.6 + 1e-6
    usable = lengths.clip(max=15.6)
    cut = cut_to(lengths, edges)
    long = lengths >= 2.0
    assert np.all(cut[long] <= lengths[long] + 1e-6)
    assert cut[long].sum() > 0.85 * usable[long].sum()
    # A single length can only be the shortest.
    assert crop_lengths(lengths, 2.0, 15.6, 1) == pytest.approx([2.0], abs=0.021)


def test_long_recordings_give_pieces_and_short_ones_are_whole(tmp_path: Path) -> None:
    durations = [1.0, 3.0, 9.9, 10.5, 25.0, 41.0]
    crops = Crops(manifest_of(tmp_path, durations), shortest=2.0, longest=10.0, count=4)
    assert len(crops) == 1 + 1 + 1 + 1 + 2 + 4
    assert len(set(crops.keys.tolist())) == len(crops)
    pieces = list(crops)
    assert [each.id for each in pieces if each.audio == "/audio/4.wav"] == ["4#0", "4#1"]
    for number, seconds in enumerate(durations):
        own = [each for each in pieces if each.audio == f"/audio/{number}.wav"]
        assert sum(each.duration for each in own) == pytest.approx(seconds)
        ends = [each.start + each.duration for each in own]
        assert [each.start for each in own][1:] == pytest.approx(ends[:-1])
    for piece, seconds in zip(pieces, crops.durations, strict=True):
        assert seconds <= piece.duration
        assert seconds < 2.0 or np.isclose(crops.edges, seconds).any()


def test_batches_have_next_to_no_padding_and_crops_move_from_epoch_to_epoch(tmp_path: Path) -> None:
    durations = np.random.default_rng(1).uniform(2.5, 30.0, 200)
    crops = Crops(manifest_of(tmp_path, durations.tolist()), shortest=2.0, longest=10.0, count=4)
    sampler = BucketSampler(crops.durations, 40.0, keys=crops.keys, edges=crops.edges)
    assert len({bucket.samples for bucket in sampler.buckets}) <= 4
    cut, padded = crops.cut(), 0
    for _ in range(sampler.steps()):
        plan = next(sampler)
        lengths = np.round(crops.durations[plan.indices] * 16_000)
        padded += not np.all(lengths == plan.samples)
        for index in plan.indices:
            promised = crops[int(index)].duration
            samples = np.arange(round(promised * 16_000), dtype=np.float32)
            starts = set()
            for epoch in range(3):
                piece = cut(samples, 1.0, generator(0, epoch, int(crops.keys[index])))
                assert len(piece) == round(crops.durations[index] * 16_000) <= plan.samples
                assert np.all(np.diff(piece) == 1)
                starts.add(int(piece[0]))
            assert len(samples) - len(piece) < 1000 or len(starts) > 1
    assert padded < len(crops.edges)  # where one length ends and the next begins


def masks(rows: int = 4, frames: int = 120) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = torch.arange(rows) * 7919 + 3
    lengths = torch.linspace(frames, frames // 3, rows).long()
    return lengths, keys, span_mask(lengths, frames, keys, probability=0.65, length=10, minimum=2)


def test_negatives_are_other_hidden_frames_each_as_likely() -> None:
    lengths, keys, mask = masks()
    negatives = sample_negatives(mask, keys, 2000)
    for row in range(len(mask)):
        hidden = mask[row].nonzero()[:, 0]
        assert int(hidden.max()) < int(lengths[row])
        for position in hidden.tolist():
            drawn = negatives[row, position]
            assert bool(mask[row, drawn].all())
            assert position not in drawn.tolist()
            counts = torch.bincount(drawn, minlength=mask.shape[1])[hidden[hidden != position]].double()
            expected = 2000 / (len(hidden) - 1)
            # Fixed keys, so that this is no matter of luck: six standard deviations.
            assert float((counts - expected).abs().max()) < 6 * expected**0.5


def test_negatives_and_noise_do_not_depend_on_the_batch() -> None:
    lengths, keys, mask = masks()
    negatives = sample_negatives(mask, keys, 10)
    alone = sample_negatives(mask[2:3], keys[2:3], 10)
    assert torch.equal(alone[0][mask[2]], negatives[2][mask[2]])
    shorter = int(lengths[2])
    cut = sample_negatives(mask[2:3, :shorter], keys[2:3], 10)
    assert torch.equal(cut[0][mask[2, :shorter]], negatives[2][mask[2]])
    noise = gumbel_noise(keys, 50_000)
    assert torch.equal(gumbel_noise(keys[1:2], 50_000)[0], noise[1])
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(torch.pi**2 / 6, rel=0.03)


def test_rows_with_nothing_to_tell_apart_are_no_error() -> None:
    keys = torch.tensor([1, 2])
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[1, 3] = True
    negatives = sample_negatives(mask, keys, 5)
    assert negatives.shape == (2, 8, 5)
    assert int(negatives.min()) >= 0
    assert int(negatives.max()) < 8
