"""Students: what they begin as, what they are taught, what they become, and teachers that cannot teach them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made_corpus import opened, small_config, trained, write_corpus
from small_whispers import CONFIG, write_whisper
from torch import Tensor

import stapes
from made_whisper import save_random_whisper
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.checkpoints.spectrogram_models import load_spectrogram_model, open_spectrogram_model
from stapes.data.batching import Batch
from stapes.errors import UsageError
from stapes.inference.speculative import SpeculativeWhisperEngine
from stapes.training.config import TrainConfig
from stapes.training.distill import DistilledCTCObjective, DistilledWhisperObjective, divergence
from stapes.training.objectives import Losses, prepare
from stapes.training.recipes import recipe
from stapes.training.trainer import Trainer

CPU = torch.device("cpu")
CONTEXT = 120
SMALLER = replace(CONFIG, audio_context=CONTEXT)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 10)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Whisper with three decoder layers that hears 2.4 s."""
    return save_random_whisper(tmp_path_factory.mktemp("teacher") / "whisper", 3, audio_context=CONTEXT)


@pytest.fixture(scope="module")
def hybrid(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a CTC head and a decoder, hardly trained."""
    config = small_config(tmp_path_factory.mktemp("hybrid") / "run", manifest, steps=2)
    config.objective.kind, config.model.decoder_layers, config.model.decoder_mlp_width = "hybrid", 1, 64
    _, result = trained(config)
    assert result.model is not None
    return result.model


def whisper_student(folder: Path, manifest: Path, teacher: Path, steps: int = 3) -> TrainConfig:
    config = recipe("distill")
    config.output, config.data.train, config.distill.teacher = str(folder), [str(manifest)], str(teacher)
    config.labels.language, config.data.batch_seconds, config.data.workers, config.data.buckets = "en", 120.0, 0, 1
    config.optimizer.peak_lr, config.optimizer.warmup_steps, config.run.tensorboard = 3e-3, 2, False
    config.run.epochs, config.run.steps, config.run.evaluate_every, config.run.device = None, steps, 1000, "cpu"
    config.checkpoint.dtype, config.run.log_every = "fp32", 1
    return config


def ctc_student(folder: Path, manifest: Path, teacher: Path | None, steps: int = 3) -> TrainConfig:
    config = small_config(folder, manifest, steps=steps)
    config.model.dropout = config.model.head_dropout = 0.0
    config.masks.time_masks = config.masks.frequency_masks = 0
    config.data.vocabulary, config.distill.teacher = "teacher", None if teacher is None else str(teacher)
    return config


def first_batch(trainer: Trainer) -> Batch:
    return next(iter(trainer.data))


def losses(trainer: Trainer, batch: Batch) -> Losses:
    return trainer.objective(prepare(batch, CPU))


def test_divergence_is_that_of_the_softened_distributions() -> None:
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    for temperature in (1.0, 3.0):
        wanted = F.kl_div(
            (student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="none"
        ).sum(-1)
        torch.testing.assert_close(divergence(student, teacher, temperature), wanted * temperature**2)
    assert float(divergence(student, student + 3.0, 2.0).abs().max()) < 1e-5


class TestWhisper:
    def test_the_student_is_the_teacher_without_some_layers(
        self, manifest: Path, teacher: Path, tmp_path: Path
    ) -> None:
        trainer = opened(whisper_student(tmp_path / "run", manifest, teacher))
        student, whole = trainer.objective.network, load_whisper(open_checkpoint(teacher), torch.float32, CPU)
        ours, theirs = dict(student.named_parameters()), dict(whole.named_parameters())
        for name, parameter in ours.items():
            if name.startswith("decoder.layers.1."):
                name = name.replace("layers.1", "layers.2")
            assert torch.equal(parameter, theirs[name].float()), name
        assert {name.partition(".")[0] for name, parameter in ours.items() if parameter.requires_grad} == {"decoder"}
        assert isinstance(trainer.objective, DistilledWhisperObjective)
        assert trainer.objective.shares_encoder

    def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(
        self, manifest: Path, teacher: Path, tmp_path: Path
    ) -> None:
        config = whisper_student(tmp_path / "run", manifest, teacher)
        config.distill.decoder_layers, config.distill.label_weight = 3, 0.0
        for own_encoder in (False, True):
            config.output = str(tmp_path / f"run-{own_encoder}")
            config.optimizer.freeze = [] if own_encoder else ["encoder"]
            trainer = opened(config)
            assert isinstance(trainer.objective, DistilledWhisperObjective)
            assert trainer.objective.shares_encoder != own_encoder
            batch = first_batch(trainer)
            assert float(losses(trainer, batch).rows.abs().max()) < 1e-3
            with torch.no_grad():
                trainer.objective.network.decoder.norm.weight.mul_(1.5)
            assert float(losses(trainer, batch).rows.min()) > 0.1

    def test_it_can_have_other_layers(self, manifest: Path, teacher: Path, tmp_path: Path) -> None:
        config = whisper_student(tmp_path / "run", manifest, teacher)
        config.distill.layers = [1, 2]
        ours = dict(opened(config).objective.network.named_parameters())
        theirs = dict(load_whisper(open_checkpoint(teacher), torch.float32, CPU).named_parameters())
        for number in (0, 1):
            name = next(each for each in ours if each.startswith(f"decoder.layers.{number}.") and "weight" in each)
            other = name.replace(f"layers.{number}", f"layers.{number + 1}")
            assert torch.equal(ours[name], theirs[other].float())
        for number, (layers, reason) in enumerate([([1], "as many"), ([2, 1], "in their order"), ([1, 3], "0 to 2")]):
            config = whisper_student(tmp_path / str(number), manifest, teacher)
            config.distill.layers = layers
            with pytest.raises(UsageError, match=reason):
                opened(config)

    def test_both_are_shown_the_same_noise_and_only_in_training(
        self, manifest: Path, teacher: Path, tmp_path: Path
    ) -> None:
        config = whisper_student(tmp_path / "run", manifest, teacher)
        config.distill.decoder_layers, config.labels.timestamps = 3, 0.0
        config.distill.label_weight, config.distill.prefix_noise = 0.0, 0.5
        trainer = opened(config)
        assert isinstance(trainer.objective, DistilledWhisperObjective)
        options, batch = trainer.objective.distill, first_batch(trainer)
        assert float(losses(trainer, batch).rows.abs().max()) < 1e-3  # a student that is its teacher
        options.label_weight = 1.0
        noisy, again = losses(trainer, batch).rows, losses(trainer, batch).rows
        torch.testing.assert_close(noisy, again)
        trainer.objective.eval()
        clean = losses(trainer, batch).rows
        assert not torch.allclose(noisy, clean)
        trainer.objective.train()
        options.prefix_noise = 0.0
        torch.testing.assert_close(losses(trainer, batch).rows, clean)

    def test_both_weights_count(self, manifest: Path, teacher: Path, tmp_path: Path) -> None:
        found = []
        for number, (labels, taught) in enumerate([(1.0, 0.0), (0.0, 1.0), (0.8, 0.5)]):
            config = whisper_student(tmp_path / str(number), manifest, teacher)
            config.distill.label_weight, config.distill.teacher_weight = labels, taught
            config.labels.timestamps = 0.0
            trainer = opened(config)
            found.append(losses(trainer, first_batch(trainer)).rows)
        torch.testing.assert_close(found[2], 0.8 * found[0] + 0.5 * found[1])

    def test_the_log_has_both(self, manifest: Path, teacher: Path, tmp_path: Path) -> None:
        trained(whisper_student(tmp_path / "run", manifest, teacher, steps=1))
        lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        (line,) = [line for line in lines if line["kind"] == "train"]
        assert line["loss"] == pytest.approx(0.8 * line["label_loss"] + line["divergence"], rel=1e-3)

    def test_it_comes_nearer_to_its_teacher_and_drafts_for_it(
        self, manifest: Path, teacher: Path, tmp_path: Path
    ) -> None:
        from transformers import WhisperForConditionalGeneration

        trainer = opened(whisper_student(tmp_path / "run", manifest, teacher, steps=12))
        batch = first_batch(trainer)
        encoder = {name: each.clone() for name, each in trainer.objective.network.encoder.named_parameters()}
        before = losses(trainer, batch).total.item()
        result = trainer.run()
        assert losses(trainer, batch).total.item() < 0.8 * before
        after = dict(trainer.objective.network.encoder.named_parameters())
        assert all(torch.equal(after[name], each) for name, each in encoder.items())
        assert result.model is not None
        theirs = WhisperForConditionalGeneration.from_pretrained(result.model)
        assert theirs.config.decoder_layers == 2
        with stapes.load(teacher, device="cpu", draft=result.model, draft_tokens=2) as recognizer:
            assert isinstance(recognizer.engine, SpeculativeWhisperEngine)
            assert recognizer.engine.draft.shares_encoder

    @pytest.mark.parametrize("rank", [0, 4])
    def test_what_it_was_teaches_where_it_rehearses(
        self, rank: int, manifest: Path, teacher: Path, tmp_path: Path
    ) -> None:
        config = whisper_student(tmp_path / "run", manifest, teacher)
        config.distill.decoder_layers, config.optimizer.freeze = None, []
        config.model.init, config.lora.rank, config.lora.dropout = str(teacher), rank, 0.0
        config.data.rehearsal, config.data.rehearsal_share = [str(manifest)], 0.5
        config.distill.where, config.distill.label_weight = "rehearsal", 1.0
        trainer = opened(config)
        objective, options = trainer.objective, config.distill
        assert isinstance(objective, DistilledWhisperObjective)
        batch = first_batch(trainer)
        assert 0 < int(batch.rehearsed.sum()) < len(batch)
        options.label_weight = 0.0
        assert float(losses(trainer, batch).rows.abs().max()) < 1e-3  # it is what it was
        with torch.no_grad():
            objective.network.decoder.norm.weight.mul_(1.5)
        found = losses(trainer, batch)
        assert float(found.rows[batch.rehearsed].min()) > 0.1
        assert not found.rows[~batch.rehearsed].any()
        options.where = "all"
        whole = losses(trainer, batch)
        torch.testing.assert_close(whole.rows[batch.rehearsed], found.rows[batch.rehearsed])
        assert float(whole.rows.min()) > 0.1
        options.where = "rehearsal"
        figures = objective.figures([float(each) for each in found.figures])
        assert figures["divergence"] == pytest.approx(float(found.figures[1] / found.figures[3]))
        dev = replace(batch, rehearsed=torch.zeros_like(batch.rehearsed))
        options.label_weight = 1.0
        assert losses(trainer, dev).total.isfinite()
        objective.eval()
        assert objective.evaluate(prepare(dev, CPU)).losses.total.isfinite()

    def test_going_on_makes_the_same_steps(self, manifest: Path, teacher: Path, tmp_path: Path) -> None:
        config = whisper_student(tmp_path / "whole", manifest, teacher, steps=4)
        config.distill.prefix_noise, config.model.decoder_dropout = 0.3, 0.1
        whole, _ = trained(config)
        config.output, config.checkpoint.every = str(tmp_path / "parts"), 1
        first = opened(config)
        first.run(lambda: first.step >= 2)
        again, _ = trained(config, resume=True)
        for name, tensor in whole.optimizer.weights().items():
            assert torch.equal(tensor, again.optimizer.weights()[name]), name

    def test_teachers_that_cannot_teach_it(self, manifest: Path, teacher: Path, hybrid: Path, tmp_path: Path) -> None:
        other = save_random_whisper(tmp_path / "other", 2, vocab_size=51866, audio_context=CONTEXT)
        shorter = save_random_whisper(tmp_path / "shorter", 2, audio_context=100)
        for number, (init, taught, layers, reason) in enumerate(
            [
                (None, teacher, 4, "1 to 3"),
                (teacher, other, 2, "writes other tokens than the student"),
                (teacher, shorter, 2, "windows of another shape"),
                (None, hybrid, 2, "starts from a Whisper"),
            ]
        ):
            config = whisper_student(tmp_path / str(number), manifest, taught)
            config.model.init, config.distill.decoder_layers = None if init is None else str(init), layers
            with pytest.raises(UsageError, match=reason):
                opened(config)


class TestCTC:
    def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(
        self, manifest: Path, hybrid: Path, tmp_path: Path
    ) -> None:
        config = ctc_student(tmp_path / "run", manifest, hybrid)
        config.distill.label_weight = 0.0
        trainer = opened(config)
        assert isinstance(trainer.objective, DistilledCTCObjective)
        batch = first_batch(trainer)
        apart = losses(trainer, batch).rows
        source = load_spectrogram_model(open_spectrogram_model(hybrid), torch.float32, CPU).state_dict()
        trainer.objective.network.load_state_dict(
            {name: source[name] for name in trainer.objective.network.state_dict()}
        )
        assert float(losses(trainer, batch).rows.abs().max()) < 1e-3
        assert float(apart.min()) > 0.01
        trainer.objective.eval()
        assert float(losses(trainer, batch).rows.min()) > 0.1  # dev is judged by its texts alone

    def test_neighbours_and_padding_change_nothing(self, manifest: Path, hybrid: Path, tmp_path: Path) -> None:
        config = ctc_student(tmp_path / "run", manifest, hybrid)
        config.distill.label_weight = 0.0
        trainer = opened(config)
        batch = first_batch(trainer)
        together = losses(trainer, batch).rows
        assert batch.lengths.unique().numel() > 1

        def alone(row: int) -> Tensor:
            length = int(batch.lengths[row])
            one = replace(
                batch,
                waveforms=batch.waveforms[row : row + 1, :length],
                **{
                    name: getattr(batch, name)[row : row + 1]
                    for name in ("lengths", "targets", "target_lengths", "weights", "keys", "ids")
                },
            )
            return losses(trainer, one).rows[0]

        torch.testing.assert_close(torch.stack([alone(row) for row in range(3)]), together[:3], rtol=1e-3, atol=1e-3)

    def test_a_student_on_a_smaller_whisper(self, manifest: Path, teacher: Path, tmp_path: Path) -> None:
        """Its encoder has the teacher's frames and another width."""
        larger = small_config(tmp_path / "hybrid", manifest, steps=1)
        larger.objective.kind, larger.model.init, larger.model.decoder_layers = "hybrid", str(teacher), 1
        _, result = trained(larger)
        made = SMALLER
        config = ctc_student(tmp_path / "run", manifest, result.model, steps=3)
        config.model.init = str(write_whisper(tmp_path / "smaller", made))
        trainer, result = trained(config)
        assert isinstance(trainer.objective, DistilledCTCObjective)
        assert result.model is not None
        assert open_spectrogram_model(result.model).config.encoder.state_width == made.width

    def test_it_learns_and_goes_on_as_if_nothing_had_happened(
        self, manifest: Path, hybrid: Path, tmp_path: Path
    ) -> None:
        whole, result = trained(ctc_student(tmp_path / "whole", manifest, hybrid, steps=6))
        assert result.model is not None
        assert open_spectrogram_model(result.model).kind == "ctc"
        config = ctc_student(tmp_path / "parts", manifest, hybrid, steps=6)
        config.checkpoint.every = 2
        first = opened(config)
        first.run(lambda: first.step >= 4)
        again, _ = trained(config, resume=True)
        for name, tensor in whole.optimizer.weights().items():
            assert torch.equal(tensor, again.optimizer.weights()[name]), name

    def test_teachers_that_cannot_teach_it(self, manifest: Path, hybrid: Path, teacher: Path, tmp_path: Path) -> None:
        def refused(reason: str, taught: Path | None, **settings: object) -> None:
            config = ctc_student(tmp_path / "refused", manifest, taught)
            for path, value in settings.items():
                section, _, name = path.partition("_")
                setattr(getattr(config, section), name, value)
            with pytest.raises(UsageError, match=reason):
                opened(config)

        refused("data.vocabulary is teacher and there is none", None)
        refused("writes other tokens than the student", hybrid, data_vocabulary="words")
        refused("frames in 30 s", hybrid, model_subsampling=2)
        refused("`stapes label`", teacher, data_vocabulary="char")
        refused("cannot teach attention", hybrid, objective_kind="attention")
        refused("decoder_layers is for a Whisper", hybrid, distill_decoder_layers=2)
        refused("name distill.teacher and data.rehearsal", hybrid, distill_where="rehearsal")


def test_recipes() -> None:
    config = recipe("distill_ctc")
    assert config.objective.kind == "ctc"
    assert np.isclose(config.distill.label_weight + config.distill.teacher_weight, 1.0)
