"""A teacher beside the network that is trained: its distribution is a target too (Hinton et al. 2015).

Whisper: a student with fewer decoder layers (distil-whisper, https://arxiv.org/abs/2311.00430) learns the teacher's
texts and, token by token, what else the teacher would have written there. A Whisper that is fine-tuned, and taught by
what it was wherever it rehearses that, forgets less (Li and Hoiem 2016, Learning without forgetting,
https://arxiv.org/abs/1606.09282). CTC: frame by frame, where both networks have the same frames and the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.checkpoints.spectrogram_models import KINDS, load_spectrogram_model, open_spectrogram_model
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.data.batching import IGNORED
from stapes.data.masking import replace_tokens
from stapes.errors import UsageError
from stapes.inference.draft import has_same_encoder
from stapes.inference.spectrograms import log_mel_rows
from stapes.models.ctc_head import CTC
from stapes.models.hybrid import Hybrid, state_mask
from stapes.models.whisper import Whisper
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.text.tokenizers import WhisperTokenizer
from stapes.training.config import DistillOptions
from stapes.training.objectives import Losses, Prepared, SpectrogramObjective
from stapes.training.objectives import _Outputs as Outputs
from stapes.training.whisper import WhisperObjective
from stapes.training.whisper_labels import WhisperLabels

_LENGTHS = range(1, 3001, 7)
"""Frames of 10 ms for which both networks must have as many states."""


class Teacher:
    """A network that is only asked. It is no part of the one that is trained, nor of what is kept of it."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network.eval().requires_grad_(False)

    def on(self, device: torch.device) -> nn.Module:
        """The network, there."""
        if next(self._network.parameters()).device != device:
            self._network.to(device)
        return self._network


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Kullback–Leibler divergence of the student's distribution from the teacher's, (…), float32.

    student, teacher: logits (…, tokens), both divided by the temperature; the result is multiplied with its square, so
    that gradients keep their size.
    """
    target = (teacher.float() / temperature).log_softmax(dim=-1)
    found = (student.float() / temperature).log_softmax(dim=-1)
    return (target.exp() * (target - found)).sum(dim=-1) * temperature**2


def _weighed(
    labels: Tensor,
    apart: Tensor,
    tokens: tuple[Tensor, Tensor],
    prepared: Prepared,
    options: DistillOptions,
    impossible: list[str],
) -> Losses:
    """The loss of rows (batch,): of their labels, and of what is between student and teacher; tokens: of either."""
    rows = options.label_weight * labels + options.teacher_weight * apart
    weights = prepared.batch.weights
    figures = tuple((each.detach() * weights).sum() for each in (labels, apart, *tokens))
    return Losses((rows * weights).sum(), rows.detach(), impossible, figures)


def _figures(sums: Sequence[float]) -> dict[str, float]:
    """Both parts of the loss, a token that has it, as they are before they are weighed."""
    labels, apart, tokens, taught = sums
    return {"label_loss": labels / max(1.0, tokens), "divergence": apart / max(1.0, taught)}


# -- Whisper


class DistilledWhisperObjective(WhisperObjective):
    """Cross entropy of the labels, and divergence from the teacher at the same places, or only where one rehearses.

    In training some of what both decoders are shown is noise (distill.prefix_noise); the labels stay what they are.
    shares_encoder: the teacher hears what the student's encoder puts out, which is its own and stays as it is.
    """

    def __init__(
        self, *parts: Any, teacher: Teacher, options: DistillOptions, shares_encoder: bool, **named: Any
    ) -> None:
        super().__init__(*parts, **named)
        self._teacher, self.distill, self.shares_encoder = teacher, options, shares_encoder

    def _losses(self, prepared: Prepared) -> tuple[Losses, Tensor]:
        tokens, targets = self.texts(prepared.batch)
        counted = targets != IGNORED
        if self.training and self.distill.prefix_noise:
            end = self.tokenizer.tokenizer.eot  # ids below it are text, all from it on are markers and times
            said = counted & (tokens < end)  # of the labels alone, not of prompts
            tokens = replace_tokens(tokens, said, prepared.batch.keys, self.distill.prefix_noise, end)
        taught = counted
        if self.distill.where == "rehearsal":
            taught = counted & prepared.batch.rehearsed[:, None]
        with self.autocast(tokens.device):
            features = self.features(prepared)
            states = self.network.encoder(features)
            logits = self.logits(states, tokens)
            wanted = self._wanted(features, states, tokens, taught)
        labels = self.token_losses(logits, targets).sum(dim=1)
        apart = divergence(logits[taught], wanted, self.distill.temperature)
        apart = torch.zeros_like(labels).index_add(0, taught.nonzero()[:, 0], apart)
        return _weighed(labels, apart, (counted.sum(dim=1), taught.sum(dim=1)), prepared, self.distill, []), states

    @torch.no_grad()
    def _wanted(self, features: Tensor, states: Tensor, tokens: Tensor, taught: Tensor) -> Tensor:
        """The teacher's logits (places, vocabulary) where ``taught`` (batch, count) says so; it hears those rows alone.

        features, states: what the student's encoder hears, and says.
        """
        teacher = self._teacher.on(tokens.device)
        assert isinstance(teacher, Whisper)
        rows = slice(None) if self.distill.where == "all" else taught.any(dim=1).nonzero()[:, 0]
        tokens, taught = tokens[rows], taught[rows]
        if not len(tokens):  # dev has no rehearsal
            return states.new_zeros(0, teacher.config.vocab_size)
        heard = states[rows] if self.shares_encoder else teacher.encoder(features[rows])
        return teacher.decoder.logits(teacher.decoder.teacher_forced(tokens, heard)[taught])

    def figures(self, sums: Sequence[float]) -> dict[str, float]:
        return _figures(sums)


def distilled_whisper(
    path: Path,
    parts: list[Path] | None,
    student: WhisperCheckpoint,
    options: DistillOptions,
    network: Whisper,
    labels: WhisperLabels,
    dtype: torch.dtype,
    settings: Mapping[str, Any],
) -> DistilledWhisperObjective:
    """The objective of a student, with the teacher at ``path``. settings: of `WhisperObjective`.

    Raises UsageError where the two do not write the same tokens, ModelError.
    """
    checkpoint = open_checkpoint(path, path.name, parts)
    teacher = whisper_teacher(checkpoint, student, labels.tokenizer)
    stays = not any(parameter.requires_grad for parameter in network.encoder.parameters())
    shares = stays and has_same_encoder(checkpoint, student, torch.float32)
    return DistilledWhisperObjective(
        network, labels, dtype, teacher=teacher, options=options, shares_encoder=shares, **settings
    )


def whisper_teacher(checkpoint: WhisperCheckpoint, student: WhisperCheckpoint, tokenizer: WhisperTokenizer) -> Teacher:
    """The teacher of a student, whose tokenizer is given. UsageError where it writes other tokens, ModelError."""
    a, b = checkpoint.config, student.config
    is_another = checkpoint.path != student.path
    if a.vocab_size != b.vocab_size or (is_another and not tokenizer.writes_as(open_tokenizer(checkpoint))):
        raise UsageError(
            f"distill.teacher {checkpoint.name} ({a.vocab_size} tokens) writes other tokens than the student "
            f"{student.name} ({b.vocab_size}): take a teacher with the same languages"
        )
    if (a.mel_bins, a.audio_context, a.text_context) != (b.mel_bins, b.audio_context, b.text_context):
        raise UsageError(f"distill.teacher {checkpoint.name} hears or writes windows of another shape than the student")
    return Teacher(load_whisper(checkpoint, torch.float32, torch.device("cpu")).float())


# -- CTC


class DistilledCTCObjective(SpectrogramObjective):
    """CTC loss of the labels, and divergence from the teacher's CTC head in each frame.

    The teacher hears the recording whole; what SpecAugment hides is hidden from the student alone.
    """

    def __init__(self, *parts: Any, teacher: Teacher, options: DistillOptions, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._teacher, self.distill = teacher, options

    def _losses(self, outputs: Outputs, prepared: Prepared) -> Losses:
        if not self.training:
            return super()._losses(outputs, prepared)  # dev is judged by its texts
        assert outputs.logits is not None
        found, impossible = self._ctc(outputs.logits, outputs.frames, prepared)
        apart = divergence(outputs.logits, self._wanted(prepared), self.distill.temperature)
        real = state_mask(outputs.counts, apart.shape[1])[:, 0, 0] if prepared.lengths is not None else None
        apart = (apart if real is None else apart.masked_fill(~real, 0.0)).sum(dim=1)
        tokens = prepared.batch.target_lengths
        return _weighed(found, apart, (tokens, tokens), prepared, self.distill, impossible)

    def figures(self, sums: Sequence[float]) -> dict[str, float]:
        return _figures(sums)

    @torch.no_grad()
    def _wanted(self, prepared: Prepared) -> Tensor:
        """The teacher's CTC logits (batch, frames, tokens)."""
        waveforms = prepared.batch.waveforms
        teacher = self._teacher.on(waveforms.device)
        assert isinstance(teacher, CTC | Hybrid)
        with torch.autocast(waveforms.device.type, enabled=False):
            mel, frames = log_mel_rows(waveforms, prepared.lengths, teacher.config.encoder.mel_bins)
        with self.autocast(waveforms.device):
            states, _ = teacher.encoder(mel, frames)
            return teacher.head(states) if isinstance(teacher, CTC) else teacher.ctc_logits(states)


def open_ctc_teacher(path: Path, kind: str, student: CTC, tokenizer: CTCTokenizer) -> Teacher:
    """The teacher of a CTC student. Raises UsageError where its frames or its tokens are not the student's."""
    if kind not in KINDS:
        raise UsageError(
            f"distill.teacher {path.name} has no CTC head over a spectrogram, to be followed frame by frame: have it "
            "write the training texts instead, `stapes label`, and leave distill.teacher out"
        )
    checkpoint = open_spectrogram_model(path)
    network = load_spectrogram_model(checkpoint, torch.float32, torch.device("cpu"))
    if isinstance(network, Hybrid) and network.head is None:
        raise UsageError(f"distill.teacher {path.name} has a decoder alone and no CTC head: train it as hybrid")
    if dict(checkpoint.tokenizer.vocabulary) != dict(tokenizer.vocabulary):
        raise UsageError(
            f"distill.teacher {path.name} writes other tokens than the student: give the student its vocabulary, "
            f"--set data.vocabulary={path}"
        )
    ours, theirs = student.config.encoder, checkpoint.config.encoder
    if any(ours.state_count(frames) != theirs.state_count(frames) for frames in _LENGTHS):
        raise UsageError(
            f"distill.teacher {path.name} has {theirs.state_count(3000)} frames in 30 s and the student "
            f"{ours.state_count(3000)}: give both the same (model.subsampling), or have it write the training texts "
            "with `stapes label` and leave distill.teacher out"
        )
    return Teacher(network)
