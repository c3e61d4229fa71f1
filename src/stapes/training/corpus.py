"""A run's utterances, as its objective hears them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import nn

from stapes.checkpoints.spectrogram_models import KINDS, open_spectrogram_model
from stapes.data.crops import Crops
from stapes.data.manifest import Chosen, Manifest
from stapes.errors import UsageError
from stapes.models.ctc_head import CTC, EncoderConfig, WhisperEncoderConfig
from stapes.models.hybrid import Hybrid
from stapes.progress import Progress
from stapes.training.config import TrainConfig
from stapes.training.networks import find_source

_ROUNDING_SECONDS = 0.1
"""What padding may add to the longest of a batch."""

_MOST_NAMED = 8


def open_manifest(config: TrainConfig, paths: Sequence[str]) -> Manifest:
    """Whole utterances, or pieces of them where nothing is written. Raises UsageError as `Manifest` does."""
    manifest = Manifest(*paths)
    if config.objective.kind != "contrastive":
        return manifest
    options = config.pretraining
    return Crops(manifest, shortest=options.least_seconds, longest=options.crop_seconds, count=config.data.buckets)


def leave_out_long(
    manifest: Manifest, network: nn.Module, slowest: float, progress: Progress, teacher: str | None = None
) -> Manifest:
    """Without the utterances that are longer, played at the ``slowest`` speed, than an encoder has positions for.

    That is the network's, and that of its ``teacher`` (distill.teacher) where it is to be asked about them. They are
    named. Raises UsageError where none is left.
    """
    limits = [
        each.audio_context * each.frame_seconds
        for each in _encoders(network, teacher)
        if isinstance(each, WhisperEncoderConfig)
    ]
    if not limits:
        return manifest
    most = min(limits) - _ROUNDING_SECONDS
    fits = manifest.durations / slowest <= most
    if bool(fits.all()):
        return manifest
    names = ", ".join(manifest[int(number)].id for number in np.flatnonzero(~fits)[:_MOST_NAMED])
    at = f" at a speed of {slowest:g}" if slowest != 1.0 else ""
    why = f"longer{at} than the {most:.1f} s that the encoder has positions for"
    if not fits.any():
        raise UsageError(f"all utterances are {why}: cut them, see `stapes prepare --max-seconds`")
    progress.note(f"{int((~fits).sum())} of {len(manifest)} utterances are {why}, and left out: {names}")
    return Chosen(manifest, np.flatnonzero(fits))


def _encoders(network: nn.Module, teacher: str | None) -> Iterator[EncoderConfig]:
    """Of the CTC models and hybrids that hear a recording whole."""
    if not isinstance(network, CTC | Hybrid):
        return
    yield network.config.encoder
    if teacher is not None and (source := find_source(teacher)).kind in KINDS:
        yield open_spectrogram_model(source.path).config.encoder
