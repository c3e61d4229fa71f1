"""Where training starts from: each recipe is a function that returns all settings.

A recipe is a starting point to change with ``--config`` and ``--set``; ``stapes train RECIPE --print-config`` shows
what it says, with the meaning of every setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from stapes.data.options import AugmentOptions
from stapes.errors import UsageError
from stapes.training.config import TrainConfig


def ctc() -> TrainConfig:
    """CTC from log-mel spectrograms: a Conformer from nothing, or on the encoder that model.init names."""
    config = TrainConfig(recipe="ctc")
    config.run.epochs = 50
    config.augment = AugmentOptions()
    config.masks.time_masks, config.masks.frequency_masks = 5, 2
    return config


def attention() -> TrainConfig:
    """A Transformer decoder that writes token by token, over a Conformer or the encoder that model.init names."""
    config = ctc()
    config.recipe = config.objective.kind = "attention"
    return config


def hybrid() -> TrainConfig:
    """CTC and a decoder over one encoder, decoded jointly."""
    config = ctc()
    config.recipe = config.objective.kind = "hybrid"
    return config


def wav2vec2() -> TrainConfig:
    """CTC fine-tuning of wav2vec 2.0 or HuBERT: its authors' masks and dropout, its convolutions stay as they are."""
    config = TrainConfig(recipe="wav2vec2")
    config.model.init = "facebook/wav2vec2-base"
    # fairseq's examples/wav2vec/config/finetuning: nothing is dropped but in the MLPs, and whole layers.
    config.model.dropout, config.model.head_dropout, config.model.activation_dropout = 0.0, 0.0, 0.1
    config.objective.hide_time = 0.5
    config.optimizer.peak_lr = 1e-4
    config.optimizer.freeze = ["feature_extractor"]
    config.optimizer.freeze_steps = {"encoder": 500}
    config.run.epochs = 30
    return config


def pretrain() -> TrainConfig:
    """wav2vec 2.0 base from audio alone, as its paper has it; from model.init on where that is given.

    The paper's batch is 64 times one of these: give it so many GPUs, or raise data.batch_seconds and
    optimizer.accumulate.
    """
    config = TrainConfig(recipe="pretrain")
    config.objective.kind, config.objective.hide_time = "contrastive", 0.65
    model = config.model
    model.width, model.layers, model.heads, model.mlp_width = 768, 12, 12, 3072
    model.subsampling_channels, model.layer_drop = 512, 0.05
    config.data.batch_seconds, config.data.buckets = 87.5, 6
    config.optimizer.peak_lr, config.optimizer.epsilon, config.optimizer.clip_norm = 5e-4, 1e-6, 0.0
    config.optimizer.warmup_steps, config.optimizer.decay = 32_000, "linear"
    config.run.steps, config.run.evaluate_every = 400_000, 5_000
    return config


def pretrain_large() -> TrainConfig:
    """The large network of LV-60k from audio alone, without dropout; the paper's batch is 128 times one of these."""
    config = pretrain()
    config.recipe = "pretrain_large"
    model, pretraining = config.model, config.pretraining
    model.width, model.layers, model.heads, model.mlp_width = 1024, 24, 16, 4096
    model.dropout = model.layer_drop = 0.0
    pretraining.conv_norm, pretraining.code_width, pretraining.projection_width = "layer", 768, 768
    pretraining.feature_penalty, pretraining.feature_gradient = 0.0, 1.0
    pretraining.crop_seconds, pretraining.final_temperature = 20.0, 0.1
    config.data.batch_seconds = 75.0
    config.optimizer.peak_lr, config.optimizer.warmup_steps = 3e-4, 20_000
    config.run.steps = 250_000
    return config


def whisper_ctc() -> TrainConfig:
    """CTC on Whisper's encoder, which is tuned more gently than the new head; a small real CTC model in minutes."""
    config = ctc()
    config.recipe = "whisper_ctc"
    config.model.init = "base"
    config.model.dropout = 0.1
    config.optimizer.lr_scales = {"encoder": 0.3}
    config.optimizer.warmup_steps = 200
    config.optimizer.ema = 0.99
    config.masks.time_masks, config.masks.frequency_masks = 2, 2
    config.run.epochs, config.run.evaluate_every = 40, 200
    config.checkpoint.dtype = "fp16"
    return config


def whisper() -> TrainConfig:
    """Whisper as a whole, fine-tuned: all weights, gently, with times and prompts kept in practice."""
    config = TrainConfig(recipe="whisper")
    config.objective.kind, config.objective.label_smoothing = "whisper", 0.0
    config.model.init, config.model.dropout, config.model.decoder_dropout = "base", 0.0, 0.0
    config.data.batch_seconds = 960.0  # 32 windows of 30 s
    config.masks.time_masks, config.masks.frequency_masks = 2, 2
    config.optimizer.peak_lr, config.optimizer.warmup_steps = 2e-5, 50
    config.run.epochs, config.run.evaluate_every = 3, 100
    config.checkpoint.dtype, config.checkpoint.keep = "fp16", 1
    return config


def whisper_lora() -> TrainConfig:
    """Whisper with low-rank adapters beside its matrices: a result of a few MB, and the model itself stays."""
    config = whisper()
    config.recipe = "whisper_lora"
    config.lora.rank = 32
    config.optimizer.peak_lr, config.optimizer.weight_decay = 1e-3, 0.0
    return config


def adapter() -> TrainConfig:
    """A language for MMS or XLS-R, in minutes: small adapters and a head of a few MB; the model itself stays."""
    config = TrainConfig(recipe="adapter")
    config.model.init, config.model.layer_drop, config.model.dropout = "facebook/mms-1b-all", 0.0, 0.05
    config.optimizer.peak_lr, config.optimizer.warmup_steps, config.optimizer.weight_decay = 1e-3, 100, 0.0
    config.run.epochs, config.run.evaluate_every = 4, 100
    return config


def distill() -> TrainConfig:
    """A Whisper with two decoder layers, of the teacher's own, on texts that the teacher wrote (`stapes label`)."""
    config = whisper()
    config.recipe = "distill"
    config.model.init, config.distill.teacher, config.distill.decoder_layers = None, "base", 2
    config.masks.time_masks = config.masks.frequency_masks = 0  # the teacher is to hear what it labelled
    config.optimizer.freeze = ["encoder"]
    config.optimizer.peak_lr, config.optimizer.warmup_steps = 1e-4, 100
    config.run.epochs = 8
    return config


def distill_ctc() -> TrainConfig:
    """CTC from nothing, taught frame by frame by the CTC head of a hybrid or CTC model with as many frames."""
    config = ctc()
    config.recipe = "distill_ctc"
    config.data.vocabulary = "teacher"
    config.distill.label_weight, config.distill.teacher_weight, config.distill.temperature = 0.5, 0.5, 1.0
    return config


def words() -> TrainConfig:
    """A few words, several in a recording, such as yesno: small enough for a laptop's processor and a minute."""
    config = TrainConfig(recipe="words")
    # Convolutions alone: a model that sees a whole clip learns the few clips by heart, word order and all.
    config.model.width, config.model.layers, config.model.heads, config.model.mlp_width = 48, 2, 0, 96
    config.model.conv_kernel, config.model.subsampling_channels, config.model.dropout = 7, 8, 0.2
    config.model.normalize_recordings = True
    config.data.vocabulary = "words"
    config.data.batch_seconds, config.data.buckets, config.data.workers = 30.0, 4, 0
    config.augment = AugmentOptions(gain_probability=0.0)
    config.masks.frequency_masks, config.masks.frequency_width = 2, 10
    config.optimizer.peak_lr, config.optimizer.warmup_steps = 4e-3, 50
    config.optimizer.ema = 0.98
    config.run.epochs, config.run.evaluate_every = 120, 200
    return config


def commands() -> TrainConfig:
    """One word a recording, of few, such as spoken digits."""
    config = words()
    config.recipe = "commands"
    config.model.width, config.model.mlp_width, config.model.subsampling_channels = 96, 192, 16
    config.model.normalize_recordings = False
    config.data.batch_seconds, config.optimizer.peak_lr = 10.0, 2e-3
    config.optimizer.ema = 0.99
    config.run.epochs, config.run.evaluate_every = 30, 500
    return config


RECIPES: Mapping[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        ctc,
        attention,
        hybrid,
        wav2vec2,
        pretrain,
        pretrain_large,
        whisper_ctc,
        whisper,
        whisper_lora,
        adapter,
        distill,
        distill_ctc,
        words,
        commands,
    )
}


def recipe(name: str) -> TrainConfig:
    """The settings of a recipe. Raises UsageError, with the nearest name, for one that is none."""
    known = RECIPES.get(name.replace("-", "_"))
    if known is None:
        close = difflib.get_close_matches(name.replace("-", "_"), RECIPES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(RECIPES)}"
        raise UsageError(f"there is no recipe {name!r}; {hint}")
    return known()
