"""`stapes bench train`: both systems begin alike, what is counted, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stapes.benchmarks import train_setup
from stapes.benchmarks.records import read_bench
from stapes.benchmarks.results_page import render
from stapes.benchmarks.train_peer import TransformersStep
from stapes.benchmarks.train_setup import TrainSettings, noise_batches, open_step
from stapes.benchmarks.train_work import training_operations
from stapes.cli.main import main
from stapes.devices.backend import resolve
from stapes.models.wav2vec2 import BASE, LARGE, Wav2Vec2

SIZES = {"width": 32, "layers": 2, "heads": 2, "mlp_width": 64, "conv_channels": (16,) * 7, "position_kernel": 16}
SMALL = {
    "wav2vec2-base": replace(BASE, **SIZES, position_groups=4),
    "wav2vec2-large": replace(LARGE, **SIZES, position_groups=4),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_setup, "PUBLISHED", SMALL)


def settings(task: str, model: str, **named: object) -> TrainSettings:
    return TrainSettings(task=task, model=model, device="cpu", batch=2, seconds=1.0, **named)  # pyright: ignore


@pytest.mark.parametrize(("task", "model"), [("ctc", "wav2vec2-large"), ("pretrain", "wav2vec2-base")])
def test_both_systems_begin_with_the_same_loss_and_learn(task: str, model: str) -> None:
    ours = open_step(settings(task, model), resolve("cpu"))
    peer = TransformersStep(ours, 2)
    first, theirs = ours.first_loss(), peer.first_loss()
    assert first == pytest.approx(theirs, rel=1e-4)
    before = [weight.clone() for weight in ours.network.encoder.parameters()]
    losses = [float(ours.step()), float(peer.step())]
    assert all(torch.tensor(losses).isfinite())
    changed = [not torch.equal(a, b) for a, b in zip(before, ours.network.encoder.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2  # at the first steps' learning rate a weight of 1 rounds to what it was
    frozen = next(ours.network.feature_extractor.parameters()).requires_grad
    assert frozen == (task == "pretrain")


def test_batches_of_other_sizes_hold_the_same_recordings() -> None:
    few, many = (noise_batches(settings("ctc", "wav2vec2-base"), rows, pin=False) for rows in (1, 2))
    assert torch.equal(torch.cat([few[0].waveforms, few[1].waveforms]), many[0].waveforms)
    assert torch.equal(torch.cat([few[0].targets, few[1].targets]), many[0].targets)


@pytest.mark.parametrize("frozen", [True, False])
def test_operations_are_those_that_pytorch_counts(frozen: bool) -> None:
    config = replace(SMALL["wav2vec2-large"], vocab_size=32, layer_drop=0.0)
    with torch.device("meta"):
        model, waveform = Wav2Vec2(config).train(), torch.zeros(1, 8_000)
    model.feature_extractor.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(waveform)[0].sum().backward()
    # PyTorch counts the frame that an even kernel of the positions gives too many, and the gradient of a grouped
    # convolution's weights as if it had one group.
    frames, one = config.feature_count(8_000), 2 * 32 * 8 * 16
    too_many = 3 * one + (config.position_groups - 1) * (frames + 1) * one
    assert counter.get_total_flops() - too_many == training_operations(config, 8_000, frozen=frozen)
    assert training_operations(replace(config, layer_drop=0.5), 8_000, frozen=frozen) < counter.get_total_flops()


def test_the_command_writes_a_row_and_the_page_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench train --task ctc --random-weights wav2vec2-base --device cpu --batch 2 --seconds 1 --steps 2"
    command += " --peer transformers --peer-batches 1,2 --rounds 2"
    assert main([*command.split(), "-o", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    result = read_bench(path)
    (row,) = result.rows
    ours, theirs = row.systems
    assert (ours.system, theirs.system) == ("stapes", "transformers")
    rate = row.case["steps"] * row.case["batch"] * row.case["seconds"] / ours.wall_seconds.median
    assert ours.figures["audio_seconds_per_second"] == pytest.approx(rate)
    assert ours.figures["first_loss"] == pytest.approx(ours.figures["peer_first_loss"], rel=1e-4)
    assert not any("differ" in note for note in result.notes)
    assert "audio s/s" in shown
    assert "2 × 1 s" in render([(path.name, result)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--random-weights tiny", "choose from wav2vec2-base"),
        ("--seconds 0.01", "--seconds is 0.01"),
        ("--peer nemo", "only transformers"),
        ("--dropout 1", "--dropout is 1"),
        ("--peer-batches many", "whole numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *options.split()]) == 2
    assert message in capsys.readouterr().err
