"""Whisper fine-tuned: the same loss as transformers', adapters that merge exactly, and results that open everywhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_corpus import opened, trained
from small_whispers import CONFIG, shared_config, whisper_config, write_cuts, write_whisper
from transformers import WhisperForConditionalGeneration

from stapes import load
from stapes.checkpoints.formats import whisper_names
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.low_rank import with_adapter
from stapes.checkpoints.save import save_huggingface
from stapes.errors import ModelError, UsageError
from stapes.models.low_rank import LowRankLinear
from stapes.models.whisper import Whisper
from stapes.training.config import TrainConfig
from stapes.training.dry_run import plan_run
from stapes.training.objectives import prepare
from stapes.training.trainer import Trainer
from stapes.training.whisper import WhisperObjective

CPU = torch.device("cpu")
TEXTS = ["one two", "a longer text than the others", "three", "four five six", "seven", "eight nine"]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("models") / "whisper")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cuts(tmp_path_factory.mktemp("corpus"), "train", TEXTS, speaker="one")


def lora(config: TrainConfig) -> TrainConfig:
    config.lora.rank, config.lora.alpha, config.optimizer.peak_lr = 4, 8.0, 1e-2
    return config


def first_batch(trainer: Trainer) -> Any:
    return prepare(next(iter(trainer.data)), CPU)


def losses_of(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_loss_and_gradients_are_those_of_transformers(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    config = whisper_config(tmp_path / "run", whisper, manifest)
    config.masks.time_masks = config.masks.frequency_masks = 0
    config.labels.untimed, config.labels.prompts = "plain", 1.0
    trainer = opened(config)
    objective, prepared = trainer.objective, first_batch(trainer)
    assert isinstance(objective, WhisperObjective)
    tokens, targets = objective.texts(prepared.batch)
    assert int((tokens == objective.tokenizer.tokenizer.sot_prev).sum()) > 0
    theirs = WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    found = theirs(input_features=objective.features(prepared), decoder_input_ids=tokens, labels=targets)
    ours = objective(prepared).total / objective.units(prepared.batch)
    assert objective.units(prepared.batch) == int((targets >= 0).sum())
    assert float(ours.detach()) == pytest.approx(float(found.loss.detach()), rel=1e-4)
    ours.backward()
    found.loss.backward()
    names = dict(theirs.named_parameters())
    compared = 0
    for name, huggingface, _ in whisper_names(CONFIG):
        gradient = objective.network.get_parameter(name).grad
        if gradient is not None:
            torch.testing.assert_close(gradient, names[huggingface].grad, rtol=1e-3, atol=1e-4)
            compared += 1
    assert compared == len(whisper_names(CONFIG)) - 1  # all but the encoder's fixed positions


def test_a_time_left_open_costs_what_any_time_costs(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    config = whisper_config(tmp_path / "run", whisper, manifest)
    config.labels.timestamps, config.labels.prompts = 1.0, 0.0
    objective = opened(config).objective
    assert isinstance(objective, WhisperObjective)
    labels = objective.tokenizer
    begin = labels.tokenizer.timestamp_begin
    logits = torch.randn(1, 2, labels.size)
    targets = torch.tensor([[labels.size + begin + 7, begin + 7]])
    open_time, exact = objective.token_losses(logits, targets)[0].tolist()
    chances = logits.softmax(-1)[0]
    assert open_time == pytest.approx(-float(chances[0, begin:].sum().log()), rel=1e-4)
    assert exact == pytest.approx(-float(chances[1, begin + 7].log()), rel=1e-4)


def test_training_lowers_the_loss_and_the_result_opens_everywhere(manifest: Path, tmp_path: Path) -> None:
    sizes = replace(CONFIG, width=32, audio_context=1500)  # recognition hears 30 s
    whisper = write_whisper(tmp_path / "whisper", sizes)
    config = whisper_config(tmp_path / "run", whisper, manifest, manifest, steps=12)
    config.run.evaluate_every, config.optimizer.peak_lr, config.optimizer.freeze = 12, 1e-2, ["encoder.conv1"]
    config.masks.time_masks = config.masks.frequency_masks = 0
    config.labels.timestamps = config.labels.prompts = 0.0
    trainer, result = trained(config)
    losses = losses_of(tmp_path / "run")
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert result.model is not None
    weights = trainer.optimizer.weights()
    before = dict(open_checkpoint(whisper).read())
    assert torch.equal(weights["encoder.conv1.weight"], before["encoder.conv1.weight"])
    assert torch.equal(weights["encoder.positions"], before["encoder.positions"])
    assert not torch.equal(weights["decoder.positions"], before["decoder.positions"])
    theirs = dict(WhisperForConditionalGeneration.from_pretrained(result.model).named_parameters())
    for ours, huggingface, _ in whisper_names(sizes):
        assert torch.equal(weights[ours], theirs[huggingface])
    with load(result.model, device="cpu") as recognizer:
        transcript = recognizer.transcribe(
            str(manifest.with_name("train-0.wav")), language="en", vad=False, temperature_increment_on_fallback=None
        )
    assert transcript.language == "en"
    plan = plan_run(config)
    assert plan.shapes == [(4, 30.0)]
    assert 0 < plan.trained_parameters < plan.parameters


def test_an_adapted_network_begins_as_its_base_and_merges_exactly(
    whisper: Path, manifest: Path, tmp_path: Path
) -> None:
    plain = opened(whisper_config(tmp_path / "plain", whisper, manifest))
    trainer = opened(lora(whisper_config(tmp_path / "run", whisper, manifest)))
    prepared = first_batch(plain)
    with torch.no_grad():
        assert trainer.objective.eval()(prepared).total == plain.objective.eval()(prepared).total
    names = {name for name, parameter in trainer.objective.network.named_parameters() if parameter.requires_grad}
    assert names == set(trainer.optimizer.weights())
    assert len(names) == 2 * 2 * (1 + 2 * 2)  # two matrices, twice, in each attention
    result = trainer.run()
    assert result.model is not None
    assert sum(file.stat().st_size for file in result.model.iterdir()) < 200_000
    objective = trainer.objective.eval()
    assert isinstance(objective, WhisperObjective)
    network = objective.network
    merged = Whisper(CONFIG).eval()
    merged.load_state_dict(dict(open_checkpoint(result.model).read()))  # which finds its base
    with torch.no_grad():
        mel, tokens = objective.features(prepared), objective.texts(prepared.batch)[0]
        found, wanted = (each.decoder.teacher_forced(tokens, each.encoder(mel)) for each in [merged, network])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    save_huggingface(with_adapter(open_checkpoint(whisper), result.model), tmp_path / "merged")
    theirs = dict(WhisperForConditionalGeneration.from_pretrained(tmp_path / "merged").named_parameters())
    assert all(torch.equal(theirs[other], merged.get_parameter(ours)) for ours, other, _ in whisper_names(CONFIG))
    kept = torch.load(tmp_path / "run" / "checkpoints" / "step-4" / "state.pt", weights_only=True)
    assert kept["network"].keys() == names


def test_peft_opens_an_adapter(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    _, result = trained(lora(whisper_config(tmp_path / "run", whisper, manifest)))
    assert result.model is not None
    base = WhisperForConditionalGeneration.from_pretrained(whisper)
    theirs = peft.PeftModel.from_pretrained(base, result.model).merge_and_unload()
    ours = dict(open_checkpoint(result.model).read())
    found = dict(theirs.named_parameters())
    for name, huggingface, _ in whisper_names(CONFIG):
        torch.testing.assert_close(found[huggingface], ours[name], rtol=1e-5, atol=1e-6)


def test_an_adapter_of_another_model_is_refused(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    _, result = trained(lora(whisper_config(tmp_path / "run", whisper, manifest, steps=1)))
    assert result.model is not None
    wider = write_whisper(tmp_path / "wider", replace(CONFIG, width=48))
    with pytest.raises(ModelError, match="another size"):
        list(with_adapter(open_checkpoint(wider), result.model).read())
    settings = json.loads((result.model / "adapter_config.json").read_text())
    (result.model / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        with_adapter(open_checkpoint(whisper), result.model)


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_going_on_makes_the_same_steps(
    adapted: bool, taught: bool, whisper: Path, manifest: Path, tmp_path: Path
) -> None:
    """With dropout, masks, prompts, times, rehearsal, and what it was as its teacher there."""

    def config(name: str) -> TrainConfig:
        made = whisper_config(tmp_path / name, whisper, manifest, steps=4)
        made.model.dropout = made.model.decoder_dropout = 0.1
        made.data.rehearsal, made.data.rehearsal_share = [str(manifest)], 0.5
        if taught:
            made.distill.teacher, made.distill.where = str(whisper), "rehearsal"
        return lora(made) if adapted else made

    whole, _ = trained(config("whole"))
    first = opened(config("parts"))
    assert first.run(lambda: first.step >= 2).interrupted
    second, _ = trained(config("parts"), resume=True)
    states = [{"network": each.optimizer.weights(), "rest": each.optimizer.state_dict()} for each in (whole, second)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")


def test_layers_that_are_computed_again_change_nothing(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    found = []
    for again in (False, True):
        config = whisper_config(tmp_path / str(again), whisper, manifest, steps=2)
        config.model.dropout = config.model.decoder_dropout = 0.1
        config.run.checkpoint_layers = again
        trainer, _ = trained(config)
        found.append(trainer.optimizer.weights())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lora.targets", ["queries"], "queries"),
        ("lora.parts", ["decoder.layers.9"], "decoder.layers.9"),
        ("model.init", "nothing-like-this", "no such model"),
        ("model.language_tokens", {"xx": "yy"}, "no token of 'yy'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    name: str, value: Any, said: str, whisper: Path, manifest: Path, tmp_path: Path
) -> None:
    config = lora(whisper_config(tmp_path / "run", whisper, manifest))
    place, _, field = name.partition(".")
    setattr(getattr(config, place), field, value)
    with pytest.raises((UsageError, ModelError), match=said):
        opened(config)


def test_layers_may_be_adapted_in_part(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    config = lora(whisper_config(tmp_path / "run", whisper, manifest, steps=1))
    config.lora.parts, config.lora.targets = ["decoder.layers.1"], ["up", "out"]
    trainer, result = trained(config)
    adapted = [name for name, each in trainer.objective.network.named_modules() if isinstance(each, LowRankLinear)]
    expected = ["decoder.layers.1.attention.out", "decoder.layers.1.cross_attention.out", "decoder.layers.1.mlp.up"]
    assert adapted == expected
    assert result.model is not None
    settings = json.loads((result.model / "adapter_config.json").read_text())
    assert "model.decoder.layers.1.fc1" in settings["target_modules"]  # not every fc1


def test_shared_out_over_two_processes_it_makes_the_same_steps(whisper: Path, manifest: Path, tmp_path: Path) -> None:
    alone, _ = trained(shared_config(tmp_path / "alone", whisper, manifest, 1))
    command = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import small_whispers; "
    command += "small_whispers.several(*sys.argv[1:]); os._exit(0)"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", command, str(tmp_path), str(whisper), str(manifest)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in running:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
    assert losses_of(tmp_path / "fsdp") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-4)
    kept = torch.load(tmp_path / "fsdp" / "checkpoints" / "step-2" / "state.pt", weights_only=True)["network"]
    torch.testing.assert_close(kept, alone.optimizer.weights(), rtol=1e-2, atol=1e-4)
    log = map(json.loads, (tmp_path / "fsdp" / "metrics.jsonl").read_text().splitlines())
    assert any(record["kind"] == "dev" for record in log)
