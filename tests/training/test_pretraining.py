"""Pre-training: it learns from audio alone, goes on bit for bit, is told when codes collapse, and is built upon."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made_corpus import cut, opened, small_config, trained, write_corpus, write_wav
from test_parallel import figures, start
from test_trainer import log_of, same_state

from small_wav2vec2 import theirs
from stapes.data.crops import Crops
from stapes.errors import ModelError, StapesError, UsageError
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining
from stapes.training.config import ParallelOptions, TrainConfig
from stapes.training.dev import score_dev
from stapes.training.dry_run import plan_run
from stapes.training.optimizer import schedule
from stapes.training.pretraining import ContrastiveObjective, ContrastiveScores
from stapes.training.recipes import recipe

HERE = Path(__file__).parent
STEPS = 2
PITCHES = (150, 300, 600, 1100, 1900, 3000, 4500)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of one to two seconds, without texts: tones that are held, so that what is hidden can be guessed."""
    folder, random, lines = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0), []
    for number in range(24):
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < 16_000 * random.uniform(0.6, 2.0):
            seconds = np.arange(int(16_000 * random.uniform(0.25, 0.5))) / 16_000
            parts.append(0.3 * np.sin(2 * np.pi * random.choice(PITCHES) * seconds))
        samples = np.concatenate(parts)
        samples = samples + 0.003 * random.standard_normal(len(samples))
        write_wav(folder / f"{number}.wav", samples.astype(np.float32))
        line = json.loads(cut(folder / f"{number}.wav", "", len(samples) / 16_000))
        lines.append(json.dumps({**line, "supervisions": []}))
    path = folder / "untranscribed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def config_for(
    folder: Path, manifest: Path, dev: Path | None = None, steps: int = 8, norm: str = "group"
) -> TrainConfig:
    config = recipe("pretrain")
    config.output, config.seed = str(folder), 1
    config.data.train, config.data.dev = [str(manifest)], [str(dev)] if dev is not None else []
    config.data.batch_seconds, config.data.workers, config.data.buckets = 8.0, 0, 2
    model, options = config.model, config.pretraining
    model.width, model.layers, model.heads, model.mlp_width, model.subsampling_channels = 32, 2, 2, 64, 16
    options.crop_seconds, options.least_seconds, options.conv_norm = 1.2, 0.6, norm  # pyright: ignore[reportAttributeAccessIssue]
    options.codes, options.code_width, options.projection_width, options.negatives = 12, 16, 16, 15
    options.least_perplexity = 0.0
    config.objective.hide_time_length = 4
    config.optimizer.warmup_steps, config.optimizer.peak_lr = 4, 5e-3
    config.run.epochs, config.run.steps, config.run.evaluate_every = None, steps, 1000
    config.run.log_every, config.run.tensorboard, config.run.device, config.run.threads = 2, False, "cpu", 1
    return config


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of some steps, and its result."""
    folder = tmp_path_factory.mktemp("run") / "run"
    config = config_for(folder, manifest, manifest, 48)
    config.model.width, config.model.layers, config.model.heads, config.model.subsampling_channels = 48, 1, 2, 48
    config.model.dropout = config.model.layer_drop = 0.0
    config.objective.hide_time, config.pretraining.code_groups = 0.4, 1
    config.pretraining.temperature_decay = 0.9
    config.run.evaluate_every, config.run.log_every = 24, 8
    _, result = trained(config)
    assert result.wer is None
    assert result.loss is not None
    assert result.accuracy is not None
    return folder


def test_it_learns_and_says_how_well(run: Path) -> None:
    lines = log_of(run)
    first, last = ([float(str(line["contrastive_loss"])) for line in some] for some in (lines[:2], lines[-2:]))
    assert sum(last) < 0.85 * sum(first)
    accuracies = [float(str(line["contrastive_accuracy"])) for line in lines]
    assert sum(accuracies[-2:]) > 1.2 * sum(accuracies[:2])
    perplexities = [float(str(line[name])) for line in lines for name in ("code_perplexity", "probability_perplexity")]
    assert all(1 <= perplexity <= 12 for perplexity in perplexities)
    assert lines[0]["temperature"] == pytest.approx(2 * 0.9**7, rel=1e-4)
    assert lines[-1]["temperature"] == 0.5
    devs = log_of(run, "dev")
    assert [line["step"] for line in devs] == [24, 48]
    (result,) = log_of(run, "result")
    assert result["strict_loss"] == min(float(str(line["strict_loss"])) for line in devs)


def test_the_result_is_theirs_and_is_gone_on_with_and_fine_tuned(run: Path, manifest: Path, tmp_path: Path) -> None:
    from transformers import Wav2Vec2ForCTC, Wav2Vec2ForPreTraining

    model = Wav2Vec2ForPreTraining.from_pretrained(run / "model")
    config = config_for(tmp_path / "on", manifest, steps=2)
    config.model.init = str(run / "model")
    weights = opened(config).optimizer.weights()
    expected = model.quantizer.codevectors.reshape(1, 12, 16)
    assert torch.equal(weights["quantizer.codebooks"], expected)
    assert torch.equal(
        weights["encoder.layers.0.mlp.up.weight"],
        model.wav2vec2.encoder.layers[0].feed_forward.intermediate_dense.weight,
    )
    texts = write_corpus(tmp_path / "corpus", 8)
    config = small_config(tmp_path / "tuned", texts, texts, steps=2)
    config.model.init, config.optimizer.freeze = str(run / "model"), ["feature_extractor"]
    config.masks.time_masks = config.masks.frequency_masks = 0
    config.objective.hide_time = 0.3
    _, result = trained(config)
    assert result.model is not None
    tuned = Wav2Vec2ForCTC.from_pretrained(result.model)
    ours, before = (each.wav2vec2.feature_extractor.conv_layers[3].conv.weight for each in (tuned, model))
    assert torch.equal(ours, before)


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_stopping_and_going_on_makes_the_same_steps(norm: str, manifest: Path, tmp_path: Path) -> None:
    def config(name: str) -> TrainConfig:
        made = config_for(tmp_path / name, manifest, manifest, 7, norm)
        made.optimizer.accumulate, made.run.evaluate_every = 2, 3
        made.model.layer_drop = 0.3
        return made

    whole, _ = trained(config("whole"))
    first = opened(config("parts"))
    assert first.run(lambda: first.step >= 4).interrupted
    second, result = trained(config("parts"), resume=True)
    assert result.steps == 7
    same_state(whole, second)
    for kind, names in (
        ("train", ("contrastive_loss", "code_perplexity", "temperature")),
        ("dev", ("loss", "accuracy")),
    ):
        a, b = ([[line[name] for name in names] for line in log_of(tmp_path / run, kind)] for run in ("whole", "parts"))
        assert a == b


def test_collapsed_codes_end_the_run_with_the_diagnosis(manifest: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", manifest, manifest, 50)
    config.pretraining.least_perplexity, config.pretraining.collapse_lines = 1000.0, 3
    config.run.evaluate_every = 4
    trainer = opened(config)
    with pytest.raises(StapesError, match=r"codes have collapsed: their perplexity is [\d.]+ of 24.*3 lines"):
        trainer.run()
    assert trainer.step == 6
    assert [line["step"] for line in log_of(tmp_path / "run")] == [2, 4, 6]


def test_a_model_with_one_code_is_not_the_best(manifest: Path, tmp_path: Path) -> None:
    """Its contrastive loss is nothing, for there is nothing that it could be wrong about."""
    trainer = opened(config_for(tmp_path / "run", manifest, manifest))
    assert trainer.dev is not None
    assert isinstance(trainer.objective, ContrastiveObjective)
    quantizer = trainer.objective.network.quantizer
    with torch.no_grad():
        quantizer.projection.weight.zero_()
        quantizer.projection.bias.view(2, 12)[:, 3] = 10.0
    scores, _ = score_dev(trainer.objective, trainer.dev, trainer.processes, trainer.config.run)
    figures = scores.figures()
    assert figures["code_perplexity"] == pytest.approx(2.0)  # one in each of two groups
    assert figures["loss"] == pytest.approx(0.0, abs=1e-5)
    assert scores.score == pytest.approx(math.log(16), rel=1e-4)  # 15 negatives, all of them as likely
    assert ContrastiveScores().score == math.inf


def parallel_config(folder: str, manifest: str, world_size: int) -> TrainConfig:
    """Steps that hold the same utterances whatever the number of processes, without dropout."""
    config = config_for(Path(folder), Path(manifest), Path(manifest), STEPS)
    config.model.dropout = config.model.layer_drop = 0.0
    config.optimizer.accumulate, config.run.log_every = 2 // world_size, 1
    config.data.batch_seconds, config.optimizer.warmup_steps, config.optimizer.peak_lr = 4.0, 1, 1e-4
    return config


def work(folder: str, manifest: str) -> None:
    """What each of two processes does."""
    from stapes.progress import Silent
    from stapes.training.parallel import processes
    from stapes.training.setup import open_run

    with processes("cpu", ParallelOptions()) as joined:
        for name in ("ddp", "fsdp", "tp"):
            config = parallel_config(f"{folder}/{name}", manifest, 1 if name == "tp" else joined.world_size)
            if name == "tp":
                config.parallel.tp = joined.world_size
            else:
                config.parallel.strategy = name  # pyright: ignore[reportAttributeAccessIssue]
            open_run(config, joined, Silent()).run()


def test_two_processes_make_the_steps_of_one(manifest: Path, tmp_path: Path) -> None:
    trained(parallel_config(str(tmp_path / "alone"), str(manifest), 1))
    code = f"import os, sys; sys.path.insert(0, {str(HERE)!r}); sys.path.insert(0, {str(HERE.parent)!r}); "
    code += "import test_pretraining; test_pretraining.work(*sys.argv[1:]); os._exit(0)"
    for process in start([sys.executable, "-c", code, str(tmp_path), str(manifest)], world_size=2):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
    expected = figures(tmp_path / "alone")
    for name in ("ddp", "fsdp", "tp"):
        found = figures(tmp_path / name)
        assert [(each["step"], each["kind"]) for each in found] == [(each["step"], each["kind"]) for each in expected]
        for line, wanted in zip(found, expected, strict=True):
            # Before the first change all is the same. Later a choice of codes may turn on the last digit of a weight.
            near = 1e-4 if line["step"] == 1 else 0.1
            for key in {"loss", "gradient_norm", "contrastive_loss", "code_perplexity"} & wanted.keys():
                assert line[key] == pytest.approx(wanted[key], rel=near), (name, line["step"], key)


def test_what_a_run_would_take_is_said(manifest: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", manifest, steps=10)
    plan = plan_run(config)
    assert plan.vocabulary == 0
    assert plan.flops_per_audio_second > 1e6
    assert plan.padding_share < 0.1
    assert len(plan.shapes) <= 2
    assert not (tmp_path / "run").exists()
    trainer = opened(config)
    assert isinstance(trainer.objective, ContrastiveObjective)
    assert isinstance(trainer.data.manifest, Crops)


def test_the_learning_rate_falls_in_a_line() -> None:
    options = recipe("pretrain").optimizer
    options.warmup_steps, options.hold_steps, options.final_lr = 100, 0, 0.2
    rates = [schedule(step, 1100, options) for step in (49, 100, 350, 600, 1100)]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.2])


@pytest.mark.parametrize("name", ["pretrain", "pretrain_large"])
def test_recipes_are_those_of_the_paper(name: str, manifest: Path) -> None:
    config = recipe(name)
    config.data.train = [str(manifest)]
    config.check()
    with torch.device("meta"):
        from stapes.training.pretraining import build_pretraining

        network = build_pretraining(config, None)
    assert isinstance(network, Wav2Vec2Pretraining)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert parameters == pytest.approx(95.05e6 if name == "pretrain" else 317.4e6, rel=2e-3)
    assert (network.config.code_groups, network.config.codes) == (2, 320)


def test_what_cannot_be_is_refused(manifest: Path, tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", manifest)
    config.objective.hide_time = 0.0
    with pytest.raises(UsageError, match=r"0\.65 is usual"):
        opened(config)
    config = config_for(tmp_path / "run", manifest)
    config.model.width, config.model.heads = 36, 2
    with pytest.raises(UsageError, match="multiple of 16"):
        opened(config)
    theirs("hubert-base").save_pretrained(tmp_path / "hubert")
    config = config_for(tmp_path / "run", manifest)
    config.model.init = str(tmp_path / "hubert")
    with pytest.raises(ModelError, match=r"no plain wav2vec 2\.0"):
        opened(config)
