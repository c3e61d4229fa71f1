"""Self-supervised training of wav2vec 2.0: the contrastive objective, and the network that it begins with.

Masks, negatives and the quantiser's noise are drawn on the device from each utterance's key: they are the same in any
batch, on any number of processes and after going on from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stapes.checkpoints.wav2vec2_pretraining import load_pretraining, open_pretraining
from stapes.data.batching import Batch
from stapes.data.masking import gumbel_noise, sample_negatives, span_mask
from stapes.errors import StapesError, UsageError
from stapes.models.wav2vec2 import Wav2Vec2Config
from stapes.models.wav2vec2_pretraining import (
    PretrainingOutput,
    Wav2Vec2Pretraining,
    Wav2Vec2PretrainingConfig,
    initialize_pretraining,
)
from stapes.models.waveform import normalize_waveform
from stapes.training.config import ObjectiveOptions, PretrainingOptions, TrainConfig
from stapes.training.metrics import DevScores
from stapes.training.objectives import Evaluated, Losses, Objective, Prepared

_FEWEST_SPANS = 2
"""Hidden in each recording that has room for them, as in fairseq."""


@dataclass(slots=True)
class ContrastiveSums:
    """What batches say, summed; in the order of `ContrastiveObjective`'s figures."""

    hidden: float = 0.0
    """Frames."""
    contrastive: float = 0.0
    strict: float = 0.0
    correct: float = 0.0
    batches: float = 0.0
    code_perplexity: float = 0.0
    """Of each batch, summed."""
    probability_perplexity: float = 0.0
    feature_penalty: float = 0.0

    def figures(self) -> dict[str, float]:
        """For the log: means over hidden frames and over batches."""
        if not self.batches:
            return {}
        return {
            "contrastive_loss": self.contrastive / max(1.0, self.hidden),
            "contrastive_accuracy": self.correct / max(1.0, self.hidden),
            "code_perplexity": self.code_perplexity / self.batches,
            "probability_perplexity": self.probability_perplexity / self.batches,
            "feature_penalty": self.feature_penalty / self.batches,
        }


@dataclass(slots=True)
class ContrastiveScores(ContrastiveSums):
    """The same on dev utterances.

    The best weights are those with the lowest strict loss. The contrastive loss of a model with few codes is low, for
    most negatives are the same code and left out; that of one with a single code is nothing.
    """

    @property
    def score(self) -> float:
        """The strict loss."""
        score = self.figures().get("strict_loss", math.inf)
        return score if math.isfinite(score) else math.inf

    def figures(self) -> dict[str, float]:
        """For the log."""
        found = ContrastiveSums.figures(self)
        if not found:
            return {}
        loss, accuracy = found.pop("contrastive_loss"), found.pop("contrastive_accuracy")
        return {"loss": loss, "strict_loss": self.strict / max(1.0, self.hidden), "accuracy": accuracy, **found}

    def text(self) -> str:
        """For people."""
        found = self.figures()
        if not found:
            return "no utterance to judge by"
        return (
            f"contrastive loss {found['loss']:.4f}, accuracy {100 * found['accuracy']:.2f} %, "
            f"code perplexity {found['code_perplexity']:.1f}"
        )

    def tensor(self) -> Tensor:
        """For summing over the processes."""
        return torch.tensor([getattr(self, each.name) for each in fields(self)], dtype=torch.float64)

    @classmethod
    def of(cls, tensor: Tensor) -> ContrastiveScores:
        """The other way round."""
        return cls(*tensor.tolist())


class ContrastiveObjective(Objective):
    """Which of the codes of a recording's hidden frames is the one at this frame (Baevski et al. 2020, 3.2).

    Per hidden frame the loss is the contrastive one, plus the penalties for few codes and for large features with
    their weights; batches are weighted by their real frames.
    """

    network: Wav2Vec2Pretraining  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        network: Wav2Vec2Pretraining,
        dtype: torch.dtype,
        options: PretrainingOptions,
        masks: ObjectiveOptions,
        *,
        normalize: bool = True,
    ) -> None:
        super().__init__(network, None, dtype)
        self.options, self.masks, self.normalize = options, masks, normalize
        self.temperature = options.temperature
        """Of the Gumbel softmax in this step."""
        self.collapsed = 0
        """Lines of the log in a row with collapsed codes."""

    @property
    def drops_layers(self) -> bool:
        return self.network.config.network.layer_drop > 0

    def at_step(self, step: int) -> None:
        options = self.options
        self.temperature = max(options.final_temperature, options.temperature * options.temperature_decay**step)

    def units(self, batch: Batch) -> float:
        """Real frames, hidden or not: known without asking the device, and next to proportional to the hidden ones."""
        return float((self.network.config.network.feature_count(batch.lengths) * batch.weights).sum())

    def hide(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """The hidden frames (batch, frames), and for each of them its negatives (batch, frames, count).

        Fillers have none, and rows with a single hidden frame, which has nothing to be told from.
        """
        config, batch = self.network.config.network, prepared.batch
        frames = max(1, config.feature_count(batch.waveforms.shape[1]))
        mask = span_mask(
            config.feature_count(batch.lengths),
            frames,
            batch.keys,
            probability=self.masks.hide_time,
            length=self.masks.hide_time_length,
            minimum=_FEWEST_SPANS,
        )
        mask = mask & (batch.weights > 0)[:, None]
        mask = mask & (mask.sum(1, keepdim=True) > 1)
        return mask, sample_negatives(mask, batch.keys, self.options.negatives)

    def _losses(self, prepared: Prepared) -> Losses:
        batch, options, config = prepared.batch, self.options, self.network.config
        waveform = batch.waveforms
        if self.normalize:
            waveform = normalize_waveform(waveform, prepared.lengths)
        mask, negatives = self.hide(prepared)
        noise = None
        if self.training:
            shape = (mask.shape[1], config.code_groups, config.codes)
            noise = gumbel_noise(batch.keys, math.prod(shape)).unflatten(1, shape)
        with self.autocast(waveform.device):
            out: PretrainingOutput = self.network(
                waveform,
                prepared.lengths,
                mask,
                negatives,
                temperature=self.temperature,
                noise=noise,
                feature_gradient=options.feature_gradient,
            )
        loss = out.contrastive / out.hidden.clamp(min=1)
        loss = loss + options.diversity_weight * out.diversity + options.feature_penalty * out.penalty
        units = (config.network.feature_count(batch.lengths) * batch.weights).sum()
        there = (out.hidden > 0).float()
        used = (1 - out.diversity) * (config.code_groups * config.codes)
        figures = (
            out.hidden,
            out.contrastive,
            out.strict,
            out.correct,
            there,
            out.code_perplexity * there,
            used * there,
        )
        return Losses(loss * units, out.rows, [], tuple(each.detach() for each in (*figures, out.penalty * there)))

    def forward(self, prepared: Prepared) -> Losses:
        return self._losses(prepared)

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Evaluated:
        return Evaluated(self._losses(prepared), [])

    def figures(self, sums: Sequence[float]) -> dict[str, float]:
        found = ContrastiveSums(*sums).figures()
        return {**found, "temperature": self.temperature} if found else {}

    def watch(self, figures: Mapping[str, float]) -> None:
        options = self.options
        perplexity = figures.get("code_perplexity")
        if perplexity is None:
            return
        self.collapsed = self.collapsed + 1 if perplexity < options.least_perplexity else 0
        if self.collapsed >= options.collapse_lines:
            most = self.network.config.code_groups * self.network.config.codes
            raise StapesError(
                f"the codes have collapsed: their perplexity is {perplexity:.1f} of {most}, below "
                f"pretraining.least_perplexity in {self.collapsed} lines of the log in a row, so that there is next to "
                "nothing to be told apart. Lower optimizer.peak_lr or raise optimizer.warmup_steps, "
                "pretraining.diversity_weight or the batch, and start anew; the best weights so far are kept"
            )

    def scores(self) -> DevScores:
        return ContrastiveScores()

    def judge(self, scores: DevScores, batch: Batch, found: Evaluated) -> list[str]:
        assert isinstance(scores, ContrastiveScores)
        for each, figure in zip(fields(ContrastiveSums), found.losses.figures, strict=True):
            setattr(scores, each.name, getattr(scores, each.name) + float(figure))
        return []


def build_pretraining(config: TrainConfig, source: Path | None) -> Wav2Vec2Pretraining:
    """The network on the CPU in float32, drawn by PyTorch's generator, or from the model at ``source``.

    Raises ModelError, UsageError.
    """
    options, sizes = config.pretraining, config.model
    dropouts: dict[str, Any] = {
        "hidden_dropout": sizes.dropout,
        "activation_dropout": 0.0,
        "attention_dropout": sizes.dropout,
        "projection_dropout": sizes.dropout,
        "layer_drop": sizes.layer_drop,
    }
    own: dict[str, Any] = {
        "code_groups": options.code_groups,
        "codes": options.codes,
        "code_width": options.code_width,
        "projection_width": options.projection_width,
    }
    logits: dict[str, Any] = {"feature_dropout": sizes.dropout, "logit_temperature": options.logit_temperature}
    if source is not None:
        checkpoint = open_pretraining(source)
        network = replace(checkpoint.network.config, vocab_size=None, **dropouts)
        kept = {name: checkpoint.sizes.get(name, value) if checkpoint.weights else value for name, value in own.items()}
        return load_pretraining(checkpoint, Wav2Vec2PretrainingConfig(network, **kept, **logits))
    is_large = options.conv_norm == "layer"
    network = Wav2Vec2Config(
        width=sizes.width,
        layers=sizes.layers,
        heads=sizes.heads,
        mlp_width=sizes.mlp_width,
        conv_channels=(sizes.subsampling_channels,) * len(Wav2Vec2Config().conv_channels),
        conv_bias=is_large,
        conv_norm=options.conv_norm,
        pre_norm=is_large,
        **dropouts,
    )
    if not sizes.heads or sizes.width % network.position_groups:
        raise UsageError(
            f"model.width is {sizes.width} and model.heads {sizes.heads}: wav2vec 2.0 needs a multiple of "
            f"{network.position_groups}, and at least one head"
        )
    made = Wav2Vec2Pretraining(Wav2Vec2PretrainingConfig(network, **own, **logits))
    initialize_pretraining(made)
    return made.train()
