"""Pre-training of wav2vec 2.0 (Baevski et al. 2020, https://arxiv.org/abs/2006.11477): no texts, only audio.

The network sees features of which spans are hidden; a quantiser sees all of them and turns each into an entry of a
code book, one of a few hundred in each of two groups. What the network says at a hidden frame must be more like that
frame's code than like the codes of other hidden frames of the same recording (the negatives). A penalty asks for all
codes to be used alike, for with a single one the task would be easy and nothing learnt.

Shapes are the same in every step: hidden frames are weighted, not picked out, and nothing waits for the device. The
sums over negatives are products of whole matrices, frames × frames, so that no two threads add to one number and a
step comes out the same, bit for bit, whenever it is made again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.wav2vec2 import Encoder, FeatureExtractor, Wav2Vec2Config, initialize
from stapes.models.waveform import zero_padding

_RAREST = 1e-10
"""Shares of codes below it count as it in logarithms, which else had no gradient."""


@dataclass(frozen=True)
class Wav2Vec2PretrainingConfig:
    """Sizes of the network and its quantiser; the defaults are those of wav2vec 2.0 base."""

    network: Wav2Vec2Config
    code_groups: int = 2
    """Code books: one entry of each is chosen for a frame."""
    codes: int = 320
    """Entries of each."""
    code_width: int = 256
    """Width of the chosen entries together."""
    projection_width: int = 256
    """Width in which states and codes are compared."""
    feature_dropout: float = 0.1
    """Dropout of what the quantiser reads."""
    logit_temperature: float = 0.1
    """Cosine similarities are divided by it."""


class Quantized(NamedTuple):
    """What the quantiser makes of features."""

    vectors: Tensor
    """(batch, frames, code width): the chosen entries, with the gradient of the soft choice."""
    chosen: Tensor
    """(batch, frames, groups) int64: their numbers."""
    choice: Tensor
    """(batch, frames, groups, codes) float32: 1 for these, 0 for the others."""
    probabilities: Tensor
    """(batch, frames, groups, codes) float32, without noise and temperature."""


class Quantizer(nn.Module):
    """Product quantisation with a straight-through Gumbel softmax (Jang et al. 2016, https://arxiv.org/abs/1611.01144)."""

    def __init__(self, width: int, groups: int, codes: int, code_width: int) -> None:
        super().__init__()
        self.groups, self.codes = groups, codes
        self.projection = nn.Linear(width, groups * codes)
        self.codebooks = nn.Parameter(torch.empty(groups, codes, code_width // groups))

    def forward(self, features: Tensor, temperature: float = 1.0, noise: Tensor | None = None) -> Quantized:
        """features: (batch, frames, width).

        In training mode the choice is drawn: ``noise`` (batch, frames, groups, codes) is added to the logits, Gumbel
        noise where None, and the gradient is that of their softmax at ``temperature``. In evaluation the likeliest is
        chosen.
        """
        logits = self.projection(features).float().unflatten(-1, (self.groups, self.codes))
        probabilities = logits.softmax(dim=-1)
        if self.training:
            noisy = logits + (gumbel_noise_like(logits) if noise is None else noise)
            chosen = noisy.argmax(dim=-1)
            soft = (noisy / temperature).softmax(dim=-1)
            choice = F.one_hot(chosen, self.codes).to(soft.dtype) - soft.detach() + soft  # its value is 0 or 1 exactly
        else:
            chosen = logits.argmax(dim=-1)
            choice = F.one_hot(chosen, self.codes).to(logits.dtype)
        vectors = torch.einsum("btgc,gcw->btgw", choice.to(self.codebooks.dtype), self.codebooks).flatten(2)
        return Quantized(vectors, chosen, choice.detach(), probabilities)


def gumbel_noise_like(logits: Tensor) -> Tensor:
    """Gumbel noise of the device's generator: adding it and taking the largest draws from the softmax."""
    return -torch.empty_like(logits, memory_format=torch.contiguous_format).exponential_().log()


def perplexity(shares: Tensor, weights: Tensor) -> Tensor:
    """How many codes are used: the exponential of the entropy of their mean shares, summed over the groups.

    shares: (batch, frames, groups, codes), what each frame gives to each code. weights: (batch, frames).
    """
    mean = torch.einsum("btgc,bt->gc", shares, weights) / weights.sum().clamp(min=1)
    return torch.exp(-(mean * mean.clamp(min=_RAREST).log()).sum(-1)).sum()


class PretrainingOutput(NamedTuple):
    """What a batch says, as scalars of float32 on the device but for ``rows``."""

    contrastive: Tensor
    """Cross entropy of the hidden frames among their negatives, summed over them. Negatives that are the same code are
    left out."""
    strict: Tensor
    """The same with these, in evaluation mode. What it is below the logarithm of 1 + negatives, per frame, is a lower
    bound of what states say of codes (van den Oord et al. 2018, https://arxiv.org/abs/1807.03748): few codes, of which
    there is little to say, do not make it small. No gradient."""
    diversity: Tensor
    """1 - soft perplexity / number of codes: 0 where all codes are used alike."""
    penalty: Tensor
    """Mean square of the features."""
    hidden: Tensor
    """Hidden frames: what ``contrastive`` and ``correct`` are sums over."""
    correct: Tensor
    """Hidden frames at which no negative is as likely as the true code. No gradient."""
    code_perplexity: Tensor
    """Of the chosen codes, from the number of groups to that of all codes. No gradient."""
    rows: Tensor
    """(batch,): ``contrastive`` of each row, without a gradient."""


class Wav2Vec2Pretraining(nn.Module):
    """The network without a head, the quantiser, and the projections in which states and codes are compared."""

    def __init__(self, config: Wav2Vec2PretrainingConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.network.conv_channels[-1]
        self.feature_extractor = FeatureExtractor(config.network)
        self.encoder = Encoder(config.network)
        self.feature_dropout = nn.Dropout(config.feature_dropout)
        self.quantizer = Quantizer(channels, config.code_groups, config.codes, config.code_width)
        self.state_projection = nn.Linear(config.network.width, config.projection_width)
        self.code_projection = nn.Linear(config.code_width, config.projection_width)

    def forward(
        self,
        waveform: Tensor,
        lengths: Tensor | None,
        mask: Tensor,
        negatives: Tensor,
        *,
        temperature: float = 1.0,
        noise: Tensor | None = None,
        feature_gradient: float = 1.0,
    ) -> PretrainingOutput:
        """The losses of a batch; all are float32 whatever the precision of products.

        Args:
            waveform: (batch, samples), normalised where the model is trained so.
            lengths: real samples of each row (batch,); None: all are.
            mask: (batch, frames) bool, the hidden frames: real ones.
            negatives: (batch, frames, count) int64, other hidden frames of the row, for each hidden frame; what it
                says at the others does not matter.
            temperature, noise: see `Quantizer`.
            feature_gradient: what the gradient of the feature extractor is multiplied with.
        """
        features = self.feature_extractor(waveform, lengths)
        if feature_gradient != 1 and features.requires_grad:
            features.register_hook(partial(torch.mul, feature_gradient))
        counts = None if lengths is None else self.config.network.feature_count(lengths)
        normed = self.encoder.projection.normalize(features)
        states = self.encoder.transform(self.encoder.projection.project(normed), counts, mask)
        quantized = self.quantizer(self.feature_dropout(normed), temperature, noise)
        predicted, targets = self.state_projection(states), self.code_projection(quantized.vectors)
        with _without_autocast(waveform.device):
            weights = mask.float()
            hidden = weights.sum()
            compare = partial(
                contrast,
                predicted.float(),
                targets.float(),
                negatives=negatives,
                temperature=self.config.logit_temperature,
            )
            losses, right = compare(self.identities(quantized.chosen))
            strict = losses.detach()
            if not self.training:
                strict, _ = compare(torch.arange(mask.shape[1], device=mask.device).expand_as(mask))
            used = perplexity(quantized.probabilities, weights)
            real = features.numel() if counts is None else counts.sum().clamp(min=1) * features.shape[2]
            rows = (losses * weights).sum(dim=1)
            return PretrainingOutput(
                contrastive=rows.sum(),
                strict=(strict * weights).sum(),
                diversity=1 - used / (self.config.code_groups * self.config.codes),
                penalty=zero_padding(features, counts).float().square().sum() / real,
                hidden=hidden,
                correct=(right & mask).sum().float(),
                code_perplexity=perplexity(quantized.choice, weights),
                rows=rows.detach(),
            )

    def identities(self, chosen: Tensor) -> Tensor:
        """One number for the codes of all groups, (batch, frames, groups) → (batch, frames)."""
        powers = self.config.codes ** torch.arange(self.config.code_groups, device=chosen.device)
        return (chosen * powers).sum(dim=-1)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Tensors without values know no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def contrast(
    predicted: Tensor, targets: Tensor, identities: Tensor, negatives: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Each frame's cross entropy of its own target among its negatives, and whether that is the likeliest.

    predicted, targets: (batch, frames, width). identities: (batch, frames): negatives with the identity of the target
    are left out, for they would be the same answer. negatives: (batch, frames, count). Both results: (batch, frames).
    """
    similarities = F.normalize(predicted, dim=-1, eps=1e-8) @ F.normalize(targets, dim=-1, eps=1e-8).transpose(1, 2)
    logits = similarities / temperature
    own = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
    # How often each frame was drawn: a frame that is drawn twice counts twice.
    drawn = torch.zeros_like(logits).scatter_add_(2, negatives, torch.ones_like(negatives, dtype=logits.dtype))
    drawn = drawn.masked_fill(identities[:, :, None] == identities[:, None], 0.0)
    positive = logits.diagonal(dim1=1, dim2=2)
    losses = (logits + drawn.masked_fill(own, 1.0).log()).logsumexp(dim=-1) - positive
    best = logits.detach().masked_fill(drawn == 0, -torch.inf).amax(dim=-1)
    return losses, positive.detach() > best


@torch.no_grad()
def initialize_pretraining(model: Wav2Vec2Pretraining) -> None:
    """Draw the weights that training from nothing starts with, as fairseq and ``transformers`` do."""
    initialize(model)
    nn.init.normal_(model.quantizer.projection.weight)
    nn.init.uniform_(model.quantizer.codebooks)
    model.state_projection.reset_parameters()
    model.code_projection.reset_parameters()
