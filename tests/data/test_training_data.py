"""Batches: what is in them, damage, chance that does not depend on processes or order, going on in the middle."""

from __future__ import annotations

import gc
import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_corpora import cuts

from stapes.data.augment import WaveformAugment
from stapes.data.batching import IGNORED, Batch, TrainingData
from stapes.data.manifest import Manifest
from stapes.data.options import AugmentOptions
from stapes.data.reading import read_samples
from stapes.data.vocabulary import build_vocabulary
from stapes.errors import UsageError

LENGTHS = [0.5 + 0.1 * number for number in range(24)]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuts(tmp_path_factory.mktemp("corpus") / "train.jsonl.gz", LENGTHS)


def data(manifest: Path | Manifest, **options) -> TrainingData:
    settings = {"budget_seconds": 8.0, "seed": 1, **options}
    return TrainingData(manifest, build_vocabulary(manifest), **settings)


def same(a: Batch, b: Batch) -> bool:
    tensors = zip(a._tensors().values(), b._tensors().values(), strict=True)
    return all(torch.equal(x, y) for x, y in tensors) and a.ids == b.ids and a.state == b.state


def test_a_batch_holds_the_samples_the_tokens_and_the_names(manifest):
    whole = Manifest(manifest)
    by_id = {utterance.id: utterance for utterance in whole}
    tokenizer = build_vocabulary(manifest)
    seen = set()
    batches = list(data(manifest))
    for batch in batches:
        for row, id in enumerate(batch.ids):
            utterance = by_id[id]
            length = int(batch.lengths[row])
            expected = read_samples(utterance.audio)
            assert length == len(expected)
            np.testing.assert_array_equal(batch.waveforms[row, :length].numpy(), expected)
            assert not batch.waveforms[row, length:].any()
            count = int(batch.target_lengths[row])
            assert tokenizer.decode(batch.targets[row, :count].tolist()) == batch.texts[row] == utterance.text
            assert (batch.targets[row, count:] == IGNORED).all()
            assert batch.speakers[row] == utterance.speaker
            seen.add(id)
    assert seen == set(by_id)
    assert [batch.ends_epoch for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert sum(batch.seconds for batch in batches) == pytest.approx(sum(LENGTHS), abs=0.01)


def test_a_loop_is_an_epoch_and_leaving_it_loses_nothing(manifest):
    straight, broken = data(manifest), data(manifest)
    expected = [list(straight), list(straight)]
    assert [batch.epoch for batch in expected[0]] == [0] * len(expected[0])
    assert straight.epoch == 2
    found = []
    while broken.epoch < 1:
        for batch in broken:
            found.append(batch)
            break
    assert all(map(same, found, expected[0]))
    assert len(found) == len(expected[0])
    assert all(map(same, list(broken), expected[1]))


def test_closing_loses_nothing_that_was_read_ahead(manifest):
    straight, closed = data(manifest), data(manifest, workers=2)
    expected, found = list(straight), []
    while closed.epoch < 1:
        found.append(next(iter(closed)))
        closed.close()
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_in_the_middle_is_bit_for_bit_the_same(manifest, workers):
    augment = WaveformAugment(AugmentOptions(speeds=(0.9, 1.1), gain_probability=1.0))
    straight = data(manifest, augment=augment)
    expected = list(straight) + list(straight)
    first = data(manifest, augment=augment, workers=workers)
    found = []
    for batch in first:  # what was read ahead is not counted as done
        found.append(batch)
        if len(found) == 3:
            break
    state = first.state_dict()
    first.close()
    second = data(manifest, augment=augment, workers=workers)
    second.load_state_dict(state)
    found += list(second) + list(second)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


def test_an_utterance_sounds_the_same_whoever_reads_it(manifest, tmp_path):
    """On two ranks, in another order, from a manifest in another order: the same change in the same epoch."""
    lines = gzip.decompress(manifest.read_bytes()).splitlines(keepends=True)
    turned = tmp_path / "turned.jsonl"
    turned.write_bytes(b"".join(reversed(lines)))

    def sounds(world: int, manifest: Path = manifest, **options) -> dict[str, tuple[np.ndarray, int]]:
        augment = WaveformAugment(AugmentOptions(speeds=(1.0,), gain_probability=1.0, pitch_probability=0.3))
        out = {}
        for rank in range(world):
            for batch in data(manifest, augment=augment, world_size=world, rank=rank, **options):
                for row in np.flatnonzero(batch.weights.numpy()):
                    samples = batch.waveforms[row, : batch.lengths[row]].numpy()
                    out[batch.ids[row]] = samples, int(batch.keys[row])
        return out

    one, two, unshuffled, other = sounds(1), sounds(2), sounds(1, shuffle=False), sounds(1, seed=2)
    upside_down = sounds(1, turned)
    assert one.keys() == two.keys() == unshuffled.keys() == upside_down.keys()
    for id, (samples, key) in one.items():
        for samples_there, key_there in (two[id], unshuffled[id], upside_down[id]):
            np.testing.assert_array_equal(samples, samples_there)
            assert key == key_there
        assert key != other[id][1]
    assert any(not np.array_equal(one[id][0], other[id][0]) for id in one)


def test_the_models_own_chance_is_not_touched(manifest):
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    for _ in data(manifest, workers=1):
        pass
    assert torch.equal(torch.rand(4), expected)


def test_fillers_have_no_weight_and_every_shape_is_one_of_the_buckets(manifest):
    ranks = [data(manifest, world_size=5, rank=rank, budget_seconds=30.0) for rank in range(5)]
    for batches in zip(*ranks, strict=True):
        assert len({batch.waveforms.shape for batch in batches}) == 1
    weights = sum(float(batch.weights.sum()) for rank in ranks for batch in rank)
    assert weights == len(LENGTHS)
    bucket_samples = {bucket.samples for bucket in ranks[0].sampler.buckets}
    assert {batch.waveforms.shape[1] for batch in ranks[0]} <= bucket_samples


def test_damaged_files_are_skipped_counted_and_named(tmp_path):
    manifest = cuts(tmp_path / "train.jsonl.gz", LENGTHS)
    utterances = list(Manifest(manifest))
    Path(utterances[3].audio).write_bytes(b"no audio")
    Path(utterances[5].audio).unlink()
    whole = Path(utterances[20].audio).read_bytes()
    Path(utterances[20].audio).write_bytes(whole[: len(whole) // 2])
    broken = {utterances[n].id for n in (3, 5, 20)}
    there = data(manifest)
    for epoch in range(2):
        heard = set()
        shapes = {(bucket.samples, bucket.rows) for bucket in there.sampler.buckets}
        for batch in there:
            assert (batch.waveforms.shape[1], len(batch)) in shapes or batch.ends_epoch or len(batch) <= 16
            heard |= {id for id, weight in zip(batch.ids, batch.weights, strict=True) if weight}
            for row in np.flatnonzero(batch.weights.numpy() == 0):
                assert batch.ids[row] not in broken  # another row takes its place
                assert batch.waveforms[row].any()
        assert heard == {utterance.id for utterance in utterances} - broken
        assert there.skipped_count == 3 * (epoch + 1)
    assert there.skipped.keys() == broken
    assert all(Path(each.audio).name in each.reason for each in there.skipped.values())


def test_a_text_that_cannot_be_spelt_is_skipped(manifest):
    tokenizer = build_vocabulary(["word b"])
    tokenizer = type(tokenizer)({k: v for k, v in tokenizer.vocabulary.items() if k != "<unk>"}, unknown=None)
    there = TrainingData(manifest, tokenizer, budget_seconds=8.0)
    texts = [text for batch in there for text, weight in zip(batch.texts, batch.weights, strict=True) if weight]
    assert set(texts) == {"word b", "word d"}
    assert any("cannot spell" in each.reason for each in there.skipped.values())


def test_where_nothing_can_be_read_it_ends_with_the_reason(tmp_path):
    manifest = cuts(tmp_path / "train.jsonl.gz", [1.0] * 20)
    for utterance in Manifest(manifest):
        Path(utterance.audio).unlink()
    with pytest.raises(UsageError, match=r"without one usable utterance.*\.wav"):
        for _ in data(manifest, budget_seconds=4.0):
            pass


def test_little_shared_memory_means_fewer_processes(manifest, monkeypatch):
    there = data(manifest, workers=4)
    batch = max(bucket.rows * bucket.samples * 4 for bucket in there.sampler.buckets)
    for free, expected in ((1e12, (4, 2)), (10.5 * batch, (4, 1)), (5.5 * batch, (2, 1)), (0.0, (0, 1))):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if expected == (4, 2):
            assert there._ahead() == expected
        else:
            with pytest.warns(RuntimeWarning, match="--shm-size"):
                assert there._ahead() == expected
    with pytest.warns(RuntimeWarning):
        assert len(list(there)) == there.steps()


def test_memory_does_not_grow(tmp_path):
    """A manifest takes some 60 bytes an utterance, and batches take none."""
    line = Path(cuts(tmp_path / "one.jsonl.gz", [0.3])).read_bytes()
    cut = gzip.decompress(line).decode()
    with gzip.open(tmp_path / "many.jsonl.gz", "wt", compresslevel=1) as file:
        for number in range(4_000):
            file.write(cut.replace('"id": "0.wav"', f'"id": "{number}"', 1))
    tracemalloc.start()
    there = data(tmp_path / "many.jsonl.gz", budget_seconds=1.0)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 4_000 * 150
    blocks = []
    for _ in range(3):
        batches = iter(there)  # an epoch has some 1,300
        for _ in range(400):
            next(batches)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    assert blocks[2] - blocks[1] < 300


def test_rows_of_a_batch_and_trial_batches(manifest):
    there = data(manifest)
    batch = next(iter(there))
    half = batch.rows(0, 2)
    assert half.ids == batch.ids[:2]
    assert torch.equal(half.waveforms, batch.waveforms[:2])
    state = there.state_dict()
    trial = list(there.trial_batches())
    assert trial[0].waveforms.shape[1] == max(each.waveforms.shape[1] for each in trial)
    assert there.state_dict() == state


def test_a_manifest_reads_parts_channels_and_relative_paths(tmp_path):
    recording = {
        "id": "r",
        "sources": [{"type": "file", "channels": [0, 1], "source": "r.wav"}],
        "sampling_rate": 16000,
        "num_samples": 48000,
        "duration": 3.0,
        "channel_ids": [0, 1],
    }
    (tmp_path / "r.wav").write_bytes(b"")
    said = [{"id": "b", "recording_id": "r", "start": 1.0, "duration": 1.0, "channel": 1, "text": "there"}]
    said.append({**said[0], "id": "a", "start": 0.0, "text": "hello"})
    cut = {"id": "c", "start": 0.5, "duration": 2.0, "channel": 1, "supervisions": said, "recording": recording}
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write(json.dumps(cut) + "\n\n")
        file.write(json.dumps({**cut, "id": "d", "custom": {"channels": "mix"}}) + "\n")
    first, second = Manifest(tmp_path / "x.jsonl.gz")
    assert (first.id, first.text, first.start, first.duration, first.channel) == ("c", "hello there", 0.5, 2.0, 1)
    assert first.audio == str(tmp_path / "r.wav")
    assert second.channel is None


@pytest.mark.parametrize("content", ["", "{}\n", "nonsense\n", '{"id": 1, "tracks": []}\n'])
def test_what_is_no_manifest_is_refused(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"x\.jsonl"):
        Manifest(path)
