"""Networks that training starts from: Whisper's encoder, wav2vec 2.0, one trained here; and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_corpus import cut, opened, small_config, tones, trained, write_corpus, write_wav
from safetensors.torch import load_file, save_file

from small_wav2vec2 import theirs
from stapes import load
from stapes.audio.decode import read_audio
from stapes.checkpoints.formats import whisper_names
from stapes.checkpoints.spectrogram_models import open_spectrogram_model
from stapes.data.options import AugmentOptions
from stapes.errors import ModelError, UsageError
from stapes.evaluation.scoring import character_errors
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids
from stapes.progress import Silent
from stapes.training.config import TrainConfig
from stapes.training.dev import score_dev
from stapes.training.parallel import processes
from stapes.training.plan import Costs
from stapes.training.setup import open_run

WHISPER = WhisperConfig(80, 51865, 32, 2, 4, 1, 4, audio_context=200, text_context=8)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 12)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Whisper as Hugging Face keeps it."""
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    model = Whisper(WHISPER)
    state = {name: torch.randn_like(tensor) * 0.1 for name, tensor in model.named_parameters()}
    state["encoder.positions"] = sinusoids(200, 32)
    names = {ours: theirs for ours, theirs, _ in whisper_names(WHISPER)}
    save_file({names[name]: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    sizes = {
        "model_type": "whisper",
        "num_mel_bins": 80,
        "vocab_size": 51865,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "max_source_positions": 200,
        "max_target_positions": 8,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def config_on(folder: Path, manifest: Path, init: Path, steps: int = 3) -> TrainConfig:
    config = small_config(folder, manifest, manifest, steps)
    config.model.init, config.run.evaluate_every = str(init), steps
    config.masks.time_masks = config.masks.frequency_masks = 0
    return config


def test_ctc_on_whispers_encoder_becomes_a_model_and_part_of_it_may_stay(
    manifest: Path, whisper: Path, tmp_path: Path
) -> None:
    config = config_on(tmp_path / "run", manifest, whisper)
    config.optimizer.freeze = ["encoder.conv1", "encoder.layers.0"]
    config.optimizer.ema, config.checkpoint.dtype = None, "fp16"
    trainer, result = trained(config)
    source = load_file(whisper / "model.safetensors")
    weights = trainer.optimizer.weights()
    assert torch.equal(weights["encoder.layers.0.mlp.up.weight"], source["model.encoder.layers.0.fc1.weight"])
    assert not torch.equal(weights["encoder.layers.1.mlp.up.weight"], source["model.encoder.layers.1.fc1.weight"])
    assert result.model is not None
    written = load_file(result.model / "model.safetensors")
    assert all(torch.equal(written[name], weights[name].half()) for name in weights)
    # And it is something to start from again, with another objective.
    config = config_on(tmp_path / "again", manifest, result.model)
    config.objective.kind, config.model.decoder_layers = "hybrid", 1
    again = opened(config)
    same = again.optimizer.weights()["encoder.layers.1.mlp.up.weight"]
    assert torch.equal(same, written["encoder.layers.1.mlp.up.weight"].float())


def test_what_is_longer_than_whispers_positions_is_left_out_and_named(whisper: Path, tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 6)
    lines = manifest.read_text()
    for name, letters in (("slow", 37), ("long", 42)):  # of 4 s, 3.7 fit unless they are played at a speed of 0.9
        write_wav(tmp_path / f"{name}.wav", tones("ab" * 21)[: letters * 1600])
        lines += cut(tmp_path / f"{name}.wav", "a", letters / 10) + "\n"
    manifest.write_text(lines)
    config = config_on(tmp_path / "run", manifest, whisper)
    progress = Notes()
    with processes("cpu", config.parallel) as joined:
        trainer = open_run(config, joined, progress)
        teacher = trainer.run().model
    assert len(trainer.data.manifest) == 6
    assert trainer.dev is not None
    assert len(trainer.dev.manifest) == 7
    assert [note.partition(": ")[2] for note in progress.notes if "left out" in note] == ["slow, long", "long"]
    assert {trainer.data.manifest[number].id for number in range(6)} == {f"0-{number}" for number in range(6)}
    # A student without such positions is not asked to go without them, but its teacher is.
    student = small_config(tmp_path / "student", manifest, manifest, 2)
    student.model.subsampling, student.augment = 2, AugmentOptions()
    student.data.vocabulary, student.distill.teacher = "teacher", str(teacher)
    taught, _ = trained(student)
    assert taught.dev is not None
    assert (len(taught.data.manifest), len(taught.dev.manifest)) == (6, 8)
    config.output, config.augment = str(tmp_path / "none"), AugmentOptions(speeds=(0.1,))
    with processes("cpu", config.parallel) as joined, pytest.raises(UsageError, match="max-seconds"):
        open_run(config, joined, progress)


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_what_training_hears_is_what_the_recogniser_writes(manifest: Path, whisper: Path, tmp_path: Path) -> None:
    """Greedy transcripts of the trainer's evaluation and of the loaded model are the same."""
    config = small_config(tmp_path / "run", manifest, manifest, steps=100)
    config.optimizer.peak_lr, config.run.evaluate_every = 1e-2, 100
    config.optimizer.ema = None
    trainer, result = trained(config)
    assert result.model is not None
    config.run.sample_texts = 100
    assert trainer.dev is not None
    _, said = score_dev(trainer.objective, trainer.dev, trainer.processes, config.run)
    assert len({sample.partition(" → ")[2] for sample in said}) > 3
    with load(result.model, device="cpu") as recognizer:
        for sample in said:
            name, _, rest = sample.partition(": ")
            samples = read_audio(manifest.parent / f"{name}.wav")[0]
            text = recognizer.transcribe(samples, sample_rate=16_000, vad=False).text
            assert text == rest.partition(" → ")[2]


def test_a_recording_longer_than_a_window_is_written_too(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, manifest, steps=100)
    config.optimizer.peak_lr, config.run.evaluate_every = 1e-2, 100
    _, result = trained(config)
    assert result.model is not None
    text = " ".join(["abc cab bca"] * 32)
    write_wav(tmp_path / "long.wav", tones(text))
    with load(result.model, device="cpu") as recognizer:
        written = recognizer.transcribe(tmp_path / "long.wav", vad=False).text
    errors = character_errors(text, written)
    assert errors.hits > 0.85 * len(text)


@pytest.mark.parametrize("kind", ["base", "large"])
def test_wav2vec2_is_fine_tuned_and_transformers_opens_it(kind: str, manifest: Path, tmp_path: Path) -> None:
    from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor

    theirs(kind).save_pretrained(tmp_path / "start")
    config = config_on(tmp_path / "run", manifest, tmp_path / "start")
    config.optimizer.freeze, config.optimizer.freeze_steps = ["feature_extractor"], {"encoder": 1}
    config.objective.hide_time, config.model.layer_drop = 0.5, 0.2
    trainer, result = trained(config)
    network = trainer.objective.network
    assert isinstance(network, Wav2Vec2)
    assert result.model is not None
    model = Wav2Vec2ForCTC.from_pretrained(result.model).eval()
    processor = Wav2Vec2Processor.from_pretrained(result.model)
    waveform = tones("abc cab")
    inputs = processor(waveform, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad(), trainer.optimizer.averaged():
        expected, _ = network.eval()(inputs.input_values)
        torch.testing.assert_close(model(inputs.input_values).logits, expected, rtol=1e-3, atol=1e-3)
    with load(result.model, device="cpu") as recognizer:
        assert recognizer.transcribe(waveform, sample_rate=16_000, vad=False).error is None


def test_what_cannot_be_is_refused(manifest: Path, whisper: Path, tmp_path: Path) -> None:
    config = config_on(tmp_path / "run", manifest, whisper)
    config.objective.hide_time = 0.5
    with pytest.raises(UsageError, match=r"masks\.time_masks"):
        opened(config)
    config = config_on(tmp_path / "run", manifest, tmp_path / "nothing")
    with pytest.raises(ModelError, match="no such model"):
        opened(config)
    theirs("base").save_pretrained(tmp_path / "start")
    config = config_on(tmp_path / "run", manifest, tmp_path / "start")
    config.objective.kind = "hybrid"
    with pytest.raises(UsageError, match="are trained with ctc"):
        opened(config)
    config = config_on(tmp_path / "run", manifest, whisper)
    config.optimizer.freeze = ["feature_extractor"]
    with pytest.raises(UsageError, match="it has encoder, head"):
        opened(config)


def test_costs_are_those_of_the_network(manifest: Path, tmp_path: Path) -> None:
    """Twice the rows cost twice as much; a linear layer costs two operations a weight and position."""
    trainer = opened(small_config(tmp_path / "run", manifest, steps=1))
    network = trainer.objective.network
    costs = Costs(network)
    one, two = costs.of(1, 32_000, 10), costs.of(2, 32_000, 10)
    assert two.flops == pytest.approx(2 * one.flops, rel=1e-6)
    assert two.saved_bytes == pytest.approx(2 * one.saved_bytes, rel=0.05)
    states = 50
    mlps = 2 * 2 * 2 * 48 * 96 * states  # two MLPs of two products each
    assert one.flops > 3 * mlps
    for parameter in network.encoder.parameters():
        parameter.requires_grad_(False)
    assert Costs(network).of(1, 32_000, 10).flops < 0.5 * one.flops


def test_the_model_says_what_it_is(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=1)
    config.objective.kind, config.model.decoder_layers = "attention", 1
    _, result = trained(config)
    assert result.model is not None
    assert open_spectrogram_model(result.model).kind == "hybrid"
    with load(result.model, device="cpu") as recognizer:
        assert recognizer.transcribe(tones("abc cab"), sample_rate=16_000, vad=False).error is None
