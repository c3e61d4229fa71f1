"""A run's utterances, as its objective hears them."""

from __future__ import annotations

from collections.abc import Sequence

from stapes.data.crops import Crops
from stapes.data.manifest import Manifest
from stapes.training.config import TrainConfig


def open_manifest(config: TrainConfig, paths: Sequence[str]) -> Manifest:
    """Whole utterances, or pieces of them where nothing is written. Raises UsageError as `Manifest` does."""
    manifest = Manifest(*paths)
    if config.objective.kind != "contrastive":
        return manifest
    options = config.pretraining
    return Crops(manifest, shortest=options.least_seconds, longest=options.crop_seconds, count=config.data.buckets)
