"""A run's utterances, as its objective hears them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from stapes.data.crops import Crops
from stapes.data.manifest import Chosen, Manifest
from stapes.errors import UsageError
from stapes.models.ctc_head import CTC, WhisperEncoder
from stapes.models.hybrid import Hybrid
from stapes.progress import Progress
from stapes.training.config import TrainConfig

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


def leave_out_long(manifest: Manifest, network: nn.Module, slowest: float, progress: Progress) -> Manifest:
    """Without the utterances that are longer, played at the ``slowest`` speed, than the network has positions for.

    They are named. Raises UsageError where none is left.
    """
    if not isinstance(network, CTC | Hybrid) or not isinstance(network.encoder, WhisperEncoder):
        return manifest
    config = network.encoder.config
    most = config.audio_context * config.frame_seconds - _ROUNDING_SECONDS
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
