"""The settings that the cost of a training is to be read with (`evaluation.training_cost`)."""

from __future__ import annotations

import sys
from typing import Any

from stapes.training.config import TrainConfig


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What a training's cost is to be read with. ``init`` is None for a network from nothing."""
    return {
        "objective": config.objective.kind,
        "recipe": config.recipe,
        "init": config.model.init,
        "augmentation": _augmentation(config),
        "seed": config.seed,
        "command": ["stapes", *sys.argv[1:]],
    }


def _augmentation(config: TrainConfig) -> str:
    augment, masks = config.augment, config.masks
    parts = {
        "speed": list(augment.speeds) != [1.0],
        "pitch": augment.pitch_probability > 0,
        "rooms": bool(augment.rooms) and augment.room_probability > 0,
        "noise": bool(augment.noises) and augment.noise_probability > 0,
        "gain": augment.gain_probability > 0,
        "SpecAugment": masks.time_masks > 0 or masks.frequency_masks > 0,
    }
    return ", ".join(name for name, used in parts.items() if used) or "none"
