"""What Whisper is to write: times, prompts, languages; what cannot be written is left out by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from made_corpus import opened, trained
from small_whispers import a_tokenizer, whisper_config, write_cuts, write_whisper

from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.data.augment import WaveformAugment
from stapes.data.batching import TrainingData
from stapes.data.manifest import Manifest
from stapes.data.options import AugmentOptions
from stapes.data.windows import Window
from stapes.errors import UsageError
from stapes.text.tokenizers import WhisperTokenizer
from stapes.training.config import LabelOptions
from stapes.training.language_scores import LanguageScores
from stapes.training.whisper_labels import WhisperLabels


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_file(a_tokenizer(), vocab_size=51865)


def labels(tokenizer: WhisperTokenizer, reused: dict[str, str] | None = None, **options: object) -> WhisperLabels:
    settings = LabelOptions(**{"language": "en", "timestamps": 0.0, "prompts": 0.0, **options})  # type: ignore[arg-type]
    return WhisperLabels(tokenizer, a_tokenizer(), 448, settings, reused)


def written(maker: WhisperLabels, ids: list[int]) -> str:
    """A label as people write it; a time that is left open as <|?|>."""
    return "".join(
        "<|?|>" if id >= maker.size else maker.tokenizer.decode([id], skip_special_tokens=False) for id in ids
    )


def test_a_label_without_times(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    manifest = Manifest(write_cuts(tmp_path, "m", ["hello there"], language="German"))
    maker = labels(tokenizer)
    ids = maker.encode_utterance(manifest, 0, 1)
    start = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    assert written(maker, ids) == f"{start} hello there<|endoftext|>"
    assert maker.decode(ids) == "hello there"
    translated = labels(tokenizer, task="translate").encode_utterance(manifest, 0, 1)
    assert tokenizer.translate in translated


def test_times_are_those_of_segments_or_of_aligned_words(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    path = write_cuts(tmp_path, "m", ["first"], seconds=4.0)
    line = json.loads(path.read_text())
    words = {"word": [["first", 0.32, 0.2, 1.0], ["words", 0.6, 0.4, 1.0]]}
    said = [
        {"id": "b", "start": 2.0, "duration": 1.5, "text": "second"},
        {"id": "a", "start": 0.0, "duration": 1.9, "text": "first words", "alignment": words},
    ]
    path.write_text(json.dumps({**line, "supervisions": said}))
    maker = labels(tokenizer, timestamps=1.0)
    ids = maker.encode_utterance(Manifest(path), 0, 1)
    start = "<|startoftranscript|><|en|><|transcribe|>"
    expected = "<|0.32|> first words<|1.00|><|2.00|> second<|3.50|><|endoftext|>"
    assert written(maker, ids) == start + expected
    slower = "<|0.40|> first words<|1.24|><|2.50|> second<|4.38|><|endoftext|>"
    assert written(maker, maker.encode_utterance(Manifest(path), 0, 1, speed=0.8)) == start + slower
    assert maker.for_dev().encode_utterance(Manifest(path), 0, 1)[3] == tokenizer.no_timestamps
    plain = labels(tokenizer, timestamps=0.0)
    assert tokenizer.no_timestamps in plain.encode_utterance(Manifest(path), 0, 1)


def test_times_that_nobody_knows_are_left_open(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    manifest = Manifest(write_cuts(tmp_path, "m", ["hello"]))
    assert not manifest[0].segments
    maker = labels(tokenizer, timestamps=1.0)
    ids = maker.encode_utterance(manifest, 0, 1)
    assert written(maker, ids) == "<|startoftranscript|><|en|><|transcribe|><|?|> hello<|?|><|endoftext|>"
    plain = labels(tokenizer, timestamps=1.0, untimed="plain").encode_utterance(manifest, 0, 1)
    assert tokenizer.no_timestamps in plain


def test_shares_are_drawn_by_key(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    manifest = Manifest(write_cuts(tmp_path, "m", ["before it", "hello"], speaker="one"))
    maker = labels(tokenizer, timestamps=0.3, prompts=0.2)
    drawn = [maker.encode_utterance(manifest, 1, key) for key in range(2000)]
    assert drawn == [maker.encode_utterance(manifest, 1, key) for key in range(2000)]
    timed = sum(tokenizer.no_timestamps not in ids for ids in drawn)
    prompted = [ids for ids in drawn if ids[0] == tokenizer.sot_prev]
    assert 500 < timed < 700
    assert 320 < len(prompted) < 480
    assert written(maker, prompted[0]).startswith("<|startofprev|> before it<|startoftranscript|>")
    others = Manifest(write_cuts(tmp_path / "others", "m", ["before it", "hello"]))  # nobody knows who says it
    assert all(maker.encode_utterance(others, 1, key)[0] == tokenizer.sot for key in range(100))


def test_a_language_takes_over_anothers_token(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    manifest = Manifest(write_cuts(tmp_path, "m", ["dobry"], language="hsb-DE"))
    with pytest.raises(UsageError, match=r"m-0.*language_tokens\.hsb-DE"):
        labels(tokenizer).encode_utterance(manifest, 0, 1)
    ids = labels(tokenizer, {"hsb": "cs"}).encode_utterance(manifest, 0, 1)
    assert ids[1] == tokenizer.language_ids["cs"]
    with pytest.raises(UsageError, match="leave it out"):
        labels(tokenizer, {"de": "cs"})


def test_the_result_knows_the_language_that_was_taught(tmp_path: Path) -> None:
    whisper = write_whisper(tmp_path / "whisper")
    manifest = write_cuts(tmp_path, "m", ["dobry", "den"], language="hsb")
    for name, rank in (("full", 0), ("lora", 2)):
        config = whisper_config(tmp_path / name, whisper, manifest, steps=1)
        config.model.language_tokens, config.lora.rank = {"hsb": "cs"}, rank
        _, result = trained(config)
        assert result.model is not None
        taught = open_tokenizer(open_checkpoint(result.model))
        assert taught.known_code("hsb") == "cs"
        assert "hsb" not in taught.language_ids  # detection has no second chance for cs
        said = json.loads((result.model / "generation_config.json").read_text())["lang_to_id"]
        assert said["<|hsb|>"] == said["<|cs|>"]


def test_what_is_too_long_is_left_out_by_name(tmp_path: Path) -> None:
    whisper = write_whisper(tmp_path / "whisper")  # whose decoder writes 48 tokens
    texts = ["fine", "word " * 60, "also fine"]
    config = whisper_config(tmp_path / "run", whisper, write_cuts(tmp_path, "m", texts), steps=1)
    config.data.train.append(str(write_cuts(tmp_path, "long", ["half a minute and more"], seconds=30.5)))
    trainer = opened(config)
    (batch,) = list(trainer.data)
    assert batch.weights.tolist().count(0) == 2
    reasons = {each.id: each.reason for each in batch.skipped}
    assert "m-1" in reasons["m-1"]
    assert "at most 48" in reasons["m-1"]
    assert "long-0" in reasons["long-0"]
    assert "30.5 s" in reasons["long-0"]
    trainer.data.close()
    losses = [float(trainer.objective.units(batch)), sum(len(ids) - 1 for ids in map(list, _texts(batch)))]
    assert losses[0] == losses[1]


def _texts(batch) -> list[list[int]]:
    rows = zip(batch.targets.tolist(), batch.target_lengths.tolist(), batch.weights.tolist(), strict=True)
    return [row[:length][row[:length].index(50258) :] for row, length, weight in rows if weight]


def test_rehearsal_takes_its_share_of_each_batch(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    own = Manifest(write_cuts(tmp_path, "own", ["a"] * 24, seconds=0.3))
    others = Manifest(write_cuts(tmp_path, "other", ["b"] * 30, seconds=0.3))

    def batches(rank: int, world_size: int, epoch_of: TrainingData | None = None) -> list[list[str]]:
        data = epoch_of or TrainingData(
            own,
            labels(tokenizer),
            budget_seconds=240.0,
            window_seconds=30.0,
            rehearsal=others,
            rehearsal_share=0.25,
            world_size=world_size,
            rank=rank,
        )
        drawn = list(data)
        for batch in drawn:
            assert batch.rehearsed.tolist() == [id.startswith("other") for id in batch.ids]
        return [list(batch.ids) for batch in drawn]

    found = batches(0, 1)
    assert len(found) == 4
    assert all(len(ids) == 8 and sum(id.startswith("other") for id in ids) == 2 for ids in found)
    assert Counter(id for ids in found for id in ids if id.startswith("own")) == Counter(f"own-{n}" for n in range(24))
    assert len({id for ids in found for id in ids if id.startswith("other")}) > 2
    assert batches(0, 1) == found  # by seed and utterances alone
    two = [batches(rank, 2) for rank in (0, 1)]
    assert all(sum(id.startswith("other") for id in ids) == 2 for rank in two for ids in rank)
    with pytest.raises(UsageError, match="rehearsal"):
        TrainingData(
            own, labels(tokenizer), budget_seconds=30.0, window_seconds=30.0, rehearsal=others, rehearsal_share=0.5
        )


def test_windows_are_as_long_as_their_longest(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    manifest = Manifest(write_cuts(tmp_path, "m", ["a", "b"], seconds=1.2))
    (batch,) = list(TrainingData(manifest, labels(tokenizer), budget_seconds=60.0, window_seconds=30.0))
    assert batch.waveforms.shape == (2, 2 * 16_000)
    assert batch.samples == 30 * 16_000
    assert batch.padded_seconds == 60.0
    assert np.isclose(batch.seconds, 2.4)
    # What processes hand over fits into as little as that: a second of each, where whole windows would be 30.
    window = Window(30.0, manifest, 1 / 3)
    assert window.filled(manifest, 1.0) == pytest.approx((4 / 3) * (2.2 / 30))
    assert Window(1.5, None, 0.0).filled(manifest, 0.5) == 1.0
    both = TrainingData(
        manifest, labels(tokenizer), budget_seconds=120.0, window_seconds=30.0, rehearsal=manifest, rehearsal_share=0.5
    )
    assert both.epoch_seconds == pytest.approx(4.8)


def test_times_are_those_of_the_speed_that_is_played(tokenizer: WhisperTokenizer, tmp_path: Path) -> None:
    path = write_cuts(tmp_path, "m", ["a"], seconds=2.0)
    line = json.loads(path.read_text())
    line["supervisions"][0] |= {"start": 0.4, "duration": 1.2}
    path.write_text(json.dumps(line))
    (batch,) = TrainingData(
        path,
        labels(tokenizer, timestamps=1.0),
        budget_seconds=30.0,
        augment=WaveformAugment(AugmentOptions(speeds=(0.8,), gain_probability=0.0)),
        window_seconds=30.0,
    )
    assert int(batch.lengths[0]) == pytest.approx(2.5 * 16_000, abs=2)
    said = batch.targets[0, : int(batch.target_lengths[0])].tolist()
    assert written(labels(tokenizer), said).endswith("<|0.50|> a<|2.00|><|endoftext|>")


def test_scores_tell_languages_apart_and_add_up() -> None:
    scores = LanguageScores(("en", "de", "?"))
    scores.add("en", "a b c d", "a b c x")
    scores.add("de-DE", "a b", "a b")
    scores.add("xx", "a", "b")
    scores.add_loss(6.0, 3.0)
    both = scores.of(scores.tensor() + scores.tensor())
    figures = both.figures()
    assert figures["wer"] == both.score == 4 / 14
    assert (figures["wer_en"], figures["wer_de"], figures["wer_?"]) == (0.25, 0.0, 1.0)
    assert figures["loss"] == 2.0
    assert isinstance(scores.tensor(), torch.Tensor)
