"""The trainer: it learns, it goes on bit for bit, and what goes wrong is told."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from made_corpus import cut, opened, small_config, tones, trained, write_corpus, write_wav

from stapes.checkpoints.spectrogram_models import open_spectrogram_model
from stapes.data.options import AugmentOptions
from stapes.errors import ModelError, OutputError, StapesError, UsageError
from stapes.evaluation.training_cost import read_cost
from stapes.training.config import TrainConfig
from stapes.training.settings import to_toml
from stapes.training.trainer import Trainer


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("dev"), 6, seed=1)


def log_of(folder: Path, kind: str = "train") -> list[dict[str, object]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def same_state(a: Trainer, b: Trainer) -> None:
    """Weights, optimiser and moving average are equal, bit for bit."""
    first = {"network": a.optimizer.weights(), "optimizer": a.optimizer.state_dict()}
    second = {"network": b.optimizer.weights(), "optimizer": b.optimizer.state_dict()}
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["ctc", "hybrid", "attention"])
def test_it_learns_what_can_be_learnt(kind: str, manifest: Path, dev: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, dev, steps=120 if kind == "ctc" else 45)
    config.objective.kind = kind  # pyright: ignore[reportAttributeAccessIssue]
    config.model.decoder_layers, config.model.decoder_mlp_width = 1, 64
    config.masks.time_masks = config.masks.frequency_masks = 0
    config.optimizer.peak_lr, config.optimizer.warmup_steps = (1e-2 if kind == "ctc" else 5e-3), 20
    config.run.evaluate_every, config.checkpoint.average = config.run.steps // 3, 2  # pyright: ignore[reportOptionalOperand]
    _, result = trained(config)
    losses = [float(str(record["loss"])) for record in log_of(tmp_path / "run")]
    assert losses[-1] < 0.6 * losses[0]
    if kind == "ctc":  # a decoder learns to look at the right place much later
        assert result.cer is not None
        assert result.cer < 0.15
    assert result.model is not None
    checkpoint = open_spectrogram_model(result.model)
    assert checkpoint.kind == ("ctc" if kind == "ctc" else "hybrid")
    assert {"|", "a", "b", "c"} <= set(checkpoint.tokenizer.vocabulary)
    (last,) = log_of(tmp_path / "run", "result")
    assert last["wer"] == pytest.approx(result.wer, rel=1e-4)
    assert len(log_of(tmp_path / "run", "dev")) == 3


def test_stopping_and_going_on_makes_the_same_steps(manifest: Path, dev: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, with dropout, masks, augmentation, accumulation and a moving average."""

    def config(name: str) -> TrainConfig:
        made = small_config(tmp_path / name, manifest, dev, steps=11)
        made.optimizer.accumulate, made.run.evaluate_every = 2, 4
        return made

    whole, _ = trained(config("whole"))
    first = opened(config("parts"))
    assert first.run(lambda: first.step >= 6).interrupted
    second, result = trained(config("parts"), resume=True)
    assert result.steps == 11
    same_state(whole, second)
    # The log is one log: no step twice, none missing.
    for name in ("whole", "parts"):
        assert [record["step"] for record in log_of(tmp_path / name)] == [2, 4, 6, 8, 10]
    a, b = ([record["loss"] for record in log_of(tmp_path / name)] for name in ("whole", "parts"))
    assert a == b


def test_killed_at_any_step_it_goes_on_bit_for_bit(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "killed", manifest, steps=40)
    config.checkpoint.every, config.run.threads = 3, 1
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "stapes", "train", "words", "--config", str(path), "--set", "run.epochs=none"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    log, wanted = tmp_path / "killed" / "metrics.jsonl", int(np.random.default_rng().integers(4, 20))
    for _ in range(600):
        if (log.exists() and len(log.read_text().splitlines()) >= wanted // 2) or running.poll() is not None:
            break
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    _, said = running.communicate()
    assert running.returncode == -signal.SIGKILL, said.decode()
    resumed, result = trained(config, resume=True)
    assert result.steps == 40
    config.output = str(tmp_path / "whole")
    whole, _ = trained(config)
    same_state(whole, resumed)


def test_a_folder_with_a_run_is_not_overwritten(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=2)
    trained(config)
    with pytest.raises(UsageError, match="--resume goes on"):
        opened(config)
    config.model.width = 64
    with pytest.raises(ModelError, match="of another network"):
        opened(config, resume=True)


def test_a_damaged_state_is_told(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=2)
    trained(config)
    state = tmp_path / "run" / "checkpoints" / "step-2" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"step-2 is damaged"):
        opened(config, resume=True)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_told_and_the_last_checkpoint_is_whole(manifest: Path, dev: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, dev, steps=12)
    config.checkpoint.every = 4
    trainer = opened(config)

    def fill() -> bool:
        if trainer.step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return False

    with full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[0]), pytest.raises(OutputError, match="free space"):
        trainer.run(fill)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4"]
    resumed, _ = trained(config, resume=True)
    config.output = str(tmp_path / "whole")
    whole, _ = trained(config)
    same_state(whole, resumed)


def test_utterances_that_are_not_numbers_skip_the_step_and_are_named(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run", manifest, steps=6)
    config.run.max_bad_steps = 3
    trainer = opened(config)
    notes: list[str] = []
    monkeypatch.setattr(trainer.progress, "note", notes.append, raising=False)
    batches = trainer._batches
    spoilt: list[str] = []

    def poisoned() -> Iterator[list[object]]:
        for number, group in enumerate(batches()):
            if number in (2, 4):
                group[0].waveforms[1] = float("nan")
                spoilt.append(group[0].ids[1])
            yield list(group)

    monkeypatch.setattr(trainer, "_batches", poisoned)
    assert trainer.run().steps == 6
    assert all(bool(tensor.isfinite().all()) for tensor in trainer.optimizer.weights().values())
    named = [note for note in notes if "is skipped" in note]
    assert [note.endswith(f"utterances: {name}") for note, name in zip(named, spoilt, strict=True)] == [True, True]


def test_it_stops_where_no_step_is_finite(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=50)
    config.run.max_bad_steps = 3
    trainer = opened(config)
    with torch.no_grad():
        next(iter(trainer.objective.parameters())).fill_(float("nan"))
    with pytest.raises(StapesError, match="3 steps in a row were not finite"):
        trainer.run()
    assert trainer.step <= 5


def test_a_missing_file_and_a_text_that_is_too_long_are_named_and_the_rest_is_learnt(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_wav(folder / "long.wav", tones("abcabc"))
    lines = [cut(folder / "gone.wav", "abc", 0.7), cut(folder / "long.wav", "abc" * 40, 0.6)]
    worse = folder / "manifest.jsonl"
    worse.write_text(manifest.read_text() + "\n".join(lines) + "\n")
    config = small_config(tmp_path / "run", worse, steps=8)
    trainer = opened(config)
    notes: list[str] = []
    monkeypatch.setattr(trainer.progress, "note", notes.append, raising=False)
    assert trainer.run().steps == 8
    assert len([note for note in notes if "gone.wav" in note]) == 1
    (too_long,) = [note for note in notes if note.startswith("long:")]
    assert "120 tokens" in too_long
    assert sum(float(str(record["skipped"])) for record in log_of(tmp_path / "run")) >= 2


def test_a_vocabulary_that_cannot_spell_the_texts_ends_the_run_with_the_reason(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=8)
    wrong = tmp_path / "vocabulary"
    wrong.mkdir()
    (wrong / "vocab.json").write_text(json.dumps({"<pad>": 0, "|": 1, "x": 2}))
    config.data.vocabulary = str(wrong)
    with pytest.raises(UsageError, match="cannot spell"):
        trained(config)
    config.data.vocabulary = "letters"
    config.output = str(tmp_path / "other")
    with pytest.raises(UsageError, match="say char, bpe, unigram"):
        opened(config)


def test_out_of_memory_the_step_is_made_in_halves(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits only in parts gives the same weights as what fits whole."""
    config = small_config(tmp_path / "whole", manifest, steps=3)
    config.model.dropout = config.model.head_dropout = 0.0
    whole, _ = trained(config)
    config.output = str(tmp_path / "halves")
    halved = opened(config)
    forward = halved.objective.forward

    def limited(prepared: object) -> object:
        if len(prepared.batch) > 2:  # pyright: ignore[reportAttributeAccessIssue]
            raise torch.OutOfMemoryError
        return forward(prepared)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(halved.objective, "forward", limited)
    halved.run()
    for name, tensor in whole.optimizer.weights().items():
        torch.testing.assert_close(tensor, halved.optimizer.weights()[name], rtol=1e-3, atol=1e-5)


def test_it_stops_early_where_dev_gets_no_better(manifest: Path, dev: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, dev, steps=60)
    config.optimizer.peak_lr, config.run.evaluate_every, config.run.patience = 0.0, 2, 2
    _, result = trained(config)
    assert result.steps == 6


def test_when_its_time_is_over_it_ends_with_a_result(manifest: Path, dev: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, dev, steps=100_000)
    config.run.max_minutes = 0.5 / 60
    _, result = trained(config)
    assert not result.interrupted
    assert 0 < result.steps < 1000
    assert result.wer is not None
    assert result.model is not None
    assert (result.model / "model.safetensors").exists()
    again, same = trained(config, resume=True)  # which has no time left
    assert same.steps <= result.steps + 1
    assert again.step == same.steps


def test_a_model_says_what_it_cost_in_all_sittings(manifest: Path, dev: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, dev, steps=6)
    config.augment, config.masks.time_masks, config.masks.frequency_masks = AugmentOptions(), 0, 0
    first = opened(config)
    assert first.run(lambda: first.step >= 3).interrupted
    assert read_cost(tmp_path / "run" / "model") is None
    second, result = trained(config, resume=True)
    assert result.model is not None
    cost = read_cost(result.model)
    assert cost is not None
    assert (cost["objective"], cost["augmentation"], cost["steps"]) == ("ctc", "speed, gain", 6)
    assert "init" not in cost
    assert cost["hours"] == pytest.approx(result.seconds / 3600, rel=0.05)
    assert second.audio_seconds > 1.5 * first.audio_seconds
    assert cost["audio_seconds_per_second"] == pytest.approx(second.audio_seconds / second.seconds, rel=0.05)


def test_interrupted_by_the_terminal_a_checkpoint_is_kept(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=100_000)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "stapes", "train", "words", "--config", str(path), "--set", "run.epochs=none"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    for _ in range(600):
        if (tmp_path / "run" / "metrics.jsonl").exists() or running.poll() is not None:
            break
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, said = running.communicate(timeout=30)
    assert running.returncode == 130, said.decode()
    assert "--resume goes on" in out.decode()
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/state.pt"))
