"""What is minimised: CTC, attention, or both, for a batch of utterances.

An objective wraps the network, so that a parallel wrapper around it sees the whole computation of a loss. Products run
in the run's precision (autocast); spectrograms, log-softmax and losses are float32 always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.audio.features import HOP
from stapes.data.batching import IGNORED, Batch
from stapes.data.masking import SpecAugment
from stapes.decoding.ctc import greedy
from stapes.inference.spectrograms import log_mel_rows
from stapes.models.ctc_head import CTC
from stapes.models.ctc_loss import ctc_losses, frames_needed
from stapes.models.hybrid import Hybrid, state_mask
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining
from stapes.models.waveform import normalize_waveform
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.metrics import DevScores, TextScores

HideFrames = Callable[[Tensor, int, Tensor], Tensor]
"""Which frames wav2vec 2.0 hides: real frames of each row (batch,), frames of the batch, the rows' keys (batch,) →
(batch, frames) bool."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the device, and on the host what the host must know without asking the device."""

    batch: Batch
    samples: tuple[int, ...]
    """Real samples of each row."""
    targets: tuple[list[int], ...]
    """Token ids of each row."""

    @property
    def lengths(self) -> Tensor | None:
        """Real samples (batch,) on the device; None where no row is padded, which spares attention its mask."""
        return None if min(self.samples) == self.batch.waveforms.shape[1] else self.batch.lengths


def prepare(batch: Batch, device: torch.device) -> Prepared:
    """Send a batch from the host to the device."""
    targets = tuple(
        row[:length] for row, length in zip(batch.targets.tolist(), batch.target_lengths.tolist(), strict=True)
    )
    return Prepared(batch.to(device), tuple(batch.lengths.tolist()), targets)


class Losses(NamedTuple):
    """What an objective says to a batch. Fillers (weight 0) count nowhere."""

    total: Tensor
    """Sum over the utterances, to be divided by `Objective.units` of all processes."""
    rows: Tensor
    """Each utterance's loss (batch,), without a gradient."""
    impossible: list[str]
    """Utterances whose text cannot be said in so short a time, in words."""
    figures: tuple[Tensor, ...] = ()
    """Further sums over the batch, scalars, which `Objective.figures` puts into words."""


class Evaluated(NamedTuple):
    """What an objective finds in evaluation."""

    losses: Losses
    tokens: list[list[int]]
    """Token ids that are written for each row."""


class _Outputs(NamedTuple):
    states: Tensor
    counts: Tensor
    frames: list[int]
    logits: Tensor | None
    """Of the CTC head."""
    written: Tensor | None
    """Of the decoder."""


class Objective(nn.Module):
    """A network and what it is to minimise. Subclasses say how; this class is what they share."""

    network: CTC | Hybrid | Wav2Vec2 | Wav2Vec2Pretraining
    tokenizer: CTCTokenizer | None
    """None: nothing is written."""

    def __init__(self, network: nn.Module, tokenizer: CTCTokenizer | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network  # pyright: ignore[reportAttributeAccessIssue]
        self.tokenizer = tokenizer
        self.dtype = dtype

    def units(self, batch: Batch) -> float:
        """What the loss is a mean over: target tokens here. From the host's batch, fillers left out."""
        return float((batch.target_lengths * batch.weights).sum())

    def autocast(self, device: torch.device) -> torch.autocast:
        """Products in the run's precision."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)

    def forward(self, prepared: Prepared) -> Losses:
        """The loss of a batch."""
        raise NotImplementedError

    def evaluate(self, prepared: Prepared) -> Evaluated:
        """The loss of a batch, and what the network writes for each row, greedily."""
        raise NotImplementedError

    @property
    def drops_layers(self) -> bool:
        """Whether layers may be left out of a step, the same ones by all processes."""
        return False

    def at_step(self, step: int) -> None:
        """Make ready for a step, counted from 0: what changes over a run is set here."""

    def figures(self, sums: Sequence[float]) -> dict[str, float]:
        """What `Losses.figures` say, summed over some batches of all processes; for the log."""
        return {}

    def watch(self, figures: Mapping[str, float]) -> None:
        """Look at each line of the log. Raises StapesError where going on is of no use."""

    def scores(self) -> DevScores:
        """What dev utterances are counted in."""
        return TextScores()

    def judge(self, scores: DevScores, batch: Batch, found: Evaluated) -> list[str]:
        """Count what was found of a batch (on the host) into ``scores``. Returns some of it for people to read."""
        assert isinstance(scores, TextScores)
        assert self.tokenizer is not None
        scores.loss += float(found.losses.total)
        scores.units += self.units(batch)
        samples = []
        for row in batch.weights.nonzero()[:, 0].tolist():
            # Both as the vocabulary writes them, which may be in one case only.
            reference = self.tokenizer.decode(batch.targets[row, : int(batch.target_lengths[row])].tolist())
            hypothesis = self.tokenizer.decode(found.tokens[row])
            scores.add(reference, hypothesis)
            samples.append(f"{batch.ids[row]}: {reference} → {hypothesis}")
        return samples

    def _greedy(self, logits: Tensor, frames: list[int]) -> list[list[int]]:
        assert self.tokenizer is not None
        return [[token.id for token in row] for row in greedy(logits, frames, self.tokenizer.blank_id)]

    def _ctc(self, logits: Tensor, frames: list[int], prepared: Prepared) -> tuple[Tensor, list[str]]:
        """Each row's CTC loss (batch,), and what is impossible."""
        assert self.tokenizer is not None
        found = ctc_losses(
            logits.float().log_softmax(dim=-1),
            frames,
            prepared.targets,
            self.tokenizer.blank_id,
            names=prepared.batch.ids,
            impossible="report",
        )
        return found.losses, [_too_short(prepared, *each) for each in found.impossible]


def _too_short(prepared: Prepared, row: int, tokens: int, needed: int, frames: int) -> str:
    return f"{prepared.batch.ids[row]}: its {tokens} tokens need {needed} frames and there are {frames}: left out"


class StagedObjective(Objective):
    """One whose encoder can be cut between two layers: enter, through, finish is what `forward` does.

    ``through`` may be done in several processes, each with some of the layers.
    """

    def enter(self, prepared: Prepared) -> Tensor:
        """What the encoder's first layer reads, (batch, positions, width)."""
        raise NotImplementedError

    def positions(self, samples: int) -> int:
        """How many positions that has for so many samples, padding included."""
        raise NotImplementedError

    def through(self, x: Tensor, prepared: Prepared) -> Tensor:
        """The encoder's layers."""
        raise NotImplementedError

    def finish(self, x: Tensor, prepared: Prepared) -> Any:
        """What the heads say to what the last layer gives: the argument of the two below."""
        raise NotImplementedError

    def losses_of(self, outputs: Any, prepared: Prepared) -> Losses:
        """The loss of a batch."""
        return self._losses(outputs, prepared)

    def _losses(self, outputs: Any, prepared: Prepared) -> Losses:
        raise NotImplementedError

    def evaluated(self, outputs: Any, prepared: Prepared) -> Evaluated:
        """The loss of a batch, and what is written."""
        raise NotImplementedError

    def frames(self, prepared: Prepared) -> list[int]:
        """Real frames of each row's logits."""
        raise NotImplementedError

    def impossible(self, prepared: Prepared) -> list[str]:
        """`Losses.impossible`, from the lengths alone."""
        said = []
        for row, (ids, frames) in enumerate(zip(prepared.targets, self.frames(prepared), strict=True)):
            needed = frames_needed(ids)
            if needed > frames:
                said.append(_too_short(prepared, row, len(ids), needed, frames))
        return said


class SpectrogramObjective(StagedObjective):
    """CTC, attention or both over an encoder of log-mel spectrograms.

    ``ctc_weight``: 1 for a `CTC`; for a `Hybrid` the share of CTC in the loss, 0 without a CTC head. ``mask`` is
    SpecAugment, in training only.
    """

    network: CTC | Hybrid  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        network: CTC | Hybrid,
        tokenizer: CTCTokenizer,
        dtype: torch.dtype,
        *,
        ctc_weight: float = 1.0,
        label_smoothing: float = 0.0,
        mask: SpecAugment | None = None,
    ) -> None:
        super().__init__(network, tokenizer, dtype)
        self.ctc_weight, self.label_smoothing, self.mask = ctc_weight, label_smoothing, mask
        self.start = self.end = -1
        if isinstance(network, Hybrid):
            assert tokenizer.start is not None
            assert tokenizer.end is not None
            self.start, self.end = tokenizer.vocabulary[tokenizer.start], tokenizer.vocabulary[tokenizer.end]

    def encode(self, prepared: Prepared) -> tuple[Tensor, Tensor, list[int]]:
        """States (batch, states, width), real ones (batch,) on the device, and on the host."""
        states, counts = self.network.encoder(*self._spectrogram(prepared))
        return states, counts, self.frames(prepared)

    def _spectrogram(self, prepared: Prepared) -> tuple[Tensor, Tensor | None]:
        """Log-mel spectrograms (batch, mel bins, frames of 10 ms), and real frames (batch,)."""
        with torch.autocast(prepared.batch.waveforms.device.type, enabled=False):
            bins = self.network.config.encoder.mel_bins
            mel, frames = log_mel_rows(prepared.batch.waveforms, prepared.lengths, bins)
            if self.mask is not None and self.training:
                real = (prepared.batch.lengths + HOP - 1) // HOP
                mel = self.mask(mel.transpose(1, 2), real, prepared.batch.keys).transpose(1, 2)
        return mel, frames

    def frames(self, prepared: Prepared) -> list[int]:
        return [self.positions(samples) for samples in prepared.samples]

    def positions(self, samples: int) -> int:
        return self.network.config.encoder.state_count(-(-samples // HOP))

    def enter(self, prepared: Prepared) -> Tensor:
        with self.autocast(prepared.batch.waveforms.device):
            return self.network.encoder.enter(*self._spectrogram(prepared))[0]

    def _counts(self, prepared: Prepared) -> Tensor | None:
        lengths = prepared.lengths
        return None if lengths is None else self.network.config.encoder.state_count((lengths + HOP - 1) // HOP)

    def through(self, x: Tensor, prepared: Prepared) -> Tensor:
        encoder: Any = self.network.encoder
        with self.autocast(x.device):
            return encoder.through(x, *encoder.beside(x.shape[1], self._counts(prepared), x.device))

    def finish(self, x: Tensor, prepared: Prepared) -> _Outputs:
        with self.autocast(x.device):
            states, counts = self.network.encoder.leave(x, self._counts(prepared))
            return self._read(states, counts, self.frames(prepared), prepared)

    def _outputs(self, prepared: Prepared) -> _Outputs:
        with self.autocast(prepared.batch.waveforms.device):
            return self._read(*self.encode(prepared), prepared)

    def _read(self, states: Tensor, counts: Tensor, frames: list[int], prepared: Prepared) -> _Outputs:
        """What the heads say to the encoder's states."""
        network = self.network
        if isinstance(network, CTC):
            return _Outputs(states, counts, frames, network.head(network.head_dropout(states)), None)
        logits = None if network.head is None or not self.ctc_weight else network.ctc_logits(states)
        written = None
        if self.ctc_weight < 1:
            tokens = F.pad(prepared.batch.targets.clamp(min=0), (1, 0), value=self.start)
            mask = None if prepared.lengths is None else state_mask(counts, states.shape[1])
            written, _ = network.decoder(tokens, states, mask)
        return _Outputs(states, counts, frames, logits, written)

    def _losses(self, outputs: _Outputs, prepared: Prepared) -> Losses:
        weights = prepared.batch.weights
        rows = weights.new_zeros(len(weights))
        impossible: list[str] = []
        if outputs.logits is not None:
            found, impossible = self._ctc(outputs.logits, outputs.frames, prepared)
            rows = rows + self.ctc_weight * found
        if outputs.written is not None:
            rows = rows + (1 - self.ctc_weight) * self._attention(outputs.written, prepared)
        return Losses((rows * weights).sum(), rows.detach(), impossible)

    def impossible(self, prepared: Prepared) -> list[str]:
        has_ctc = self.network.head is not None and self.ctc_weight > 0
        return super().impossible(prepared) if has_ctc else []

    def forward(self, prepared: Prepared) -> Losses:
        return self._losses(self._outputs(prepared), prepared)

    def _attention(self, logits: Tensor, prepared: Prepared) -> Tensor:
        """Each row's cross entropy (batch,): the text, then the end token."""
        targets = F.pad(prepared.batch.targets, (0, 1), value=IGNORED)
        targets = targets.scatter(1, prepared.batch.target_lengths[:, None], self.end)
        losses = F.cross_entropy(
            logits.float().transpose(1, 2),
            targets,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        return losses.sum(dim=1)

    def units(self, batch: Batch) -> float:
        end = isinstance(self.network, Hybrid)
        return float(((batch.target_lengths + end) * batch.weights).sum())

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Evaluated:
        return self.evaluated(self._outputs(prepared), prepared)

    def evaluated(self, outputs: _Outputs, prepared: Prepared) -> Evaluated:
        losses = self._losses(outputs, prepared)
        # With both heads CTC's is asked, which is quick and which joint decoding follows.
        if isinstance(self.network, Hybrid) and not self.ctc_weight:
            with self.autocast(losses.rows.device):
                written = self.network.greedy(outputs.states, outputs.counts, self.start, self.end)
            return Evaluated(losses, written)
        assert outputs.logits is not None
        return Evaluated(losses, self._greedy(outputs.logits, outputs.frames))


class Wav2Vec2Objective(StagedObjective):
    """CTC on wav2vec 2.0 or HuBERT. ``hide``: the masks of fine-tuning, in training only."""

    network: Wav2Vec2  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        network: Wav2Vec2,
        tokenizer: CTCTokenizer,
        dtype: torch.dtype,
        *,
        normalize: bool = True,
        hide: HideFrames | None = None,
    ) -> None:
        super().__init__(network, tokenizer, dtype)
        self.normalize, self.hide = normalize, hide

    @property
    def drops_layers(self) -> bool:
        return self.network.config.layer_drop > 0

    def _inputs(self, prepared: Prepared) -> tuple[Tensor, Tensor | None]:
        """The waveforms as the network reads them, and what is hidden of their frames."""
        config, waveform = self.network.config, prepared.batch.waveforms
        if self.normalize:
            waveform = normalize_waveform(waveform, prepared.lengths)
        hidden = None
        if self.hide is not None and self.training:
            real, frames = config.feature_count(prepared.batch.lengths), config.feature_count(waveform.shape[1])
            hidden = self.hide(real, frames, prepared.batch.keys)
        return waveform, hidden

    def frames(self, prepared: Prepared) -> list[int]:
        return [self.network.config.frame_count(samples) for samples in prepared.samples]

    def positions(self, samples: int) -> int:
        return max(1, self.network.config.feature_count(samples))

    def _counts(self, prepared: Prepared) -> Tensor | None:
        return None if prepared.lengths is None else self.network.config.feature_count(prepared.lengths)

    def enter(self, prepared: Prepared) -> Tensor:
        encoder = self.network.encoder
        waveform, hidden = self._inputs(prepared)
        with self.autocast(waveform.device):
            features = self.network.feature_extractor(waveform, prepared.lengths)
            return encoder.enter(encoder.projection(features), self._counts(prepared), hidden)

    def through(self, x: Tensor, prepared: Prepared) -> Tensor:
        encoder = self.network.encoder
        with self.autocast(x.device):
            return encoder.through(x, *encoder.beside(x.shape[1], self._counts(prepared), x.device))

    def finish(self, x: Tensor, prepared: Prepared) -> Tensor:
        network = self.network
        assert network.head is not None
        with self.autocast(x.device):
            x = network.encoder.leave(x)
            if network.downsampling is not None:
                x = network.downsampling(x, self._counts(prepared))
            return network.head(network.head_dropout(x))

    def _logits(self, prepared: Prepared) -> Tensor:
        waveform, hidden = self._inputs(prepared)
        with self.autocast(waveform.device):
            logits, _ = self.network(waveform, prepared.lengths, hidden=hidden)
        return logits

    def forward(self, prepared: Prepared) -> Losses:
        return self._losses(self._logits(prepared), prepared)

    def _losses(self, outputs: Tensor, prepared: Prepared) -> Losses:
        rows, impossible = self._ctc(outputs, self.frames(prepared), prepared)
        return Losses((rows * prepared.batch.weights).sum(), rows.detach(), impossible)

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Evaluated:
        return self.evaluated(self._logits(prepared), prepared)

    def evaluated(self, outputs: Tensor, prepared: Prepared) -> Evaluated:
        return Evaluated(self._losses(outputs, prepared), self._greedy(outputs, self.frames(prepared)))
