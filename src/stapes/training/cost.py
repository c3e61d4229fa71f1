"""What a model cost to train: a small file beside its weights, which evaluations of it take over."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stapes.evaluation.results import write_json
from stapes.training.config import TrainConfig

COST = "training.json"
"""In the model's folder."""


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


def write_cost(folder: Path, cost: dict[str, Any]) -> None:
    """Keep with the model in ``folder`` what it cost. What is None is not known. Raises OutputError."""
    write_json(folder / COST, {name: value for name, value in cost.items() if value is not None})


def read_cost(folder: Path) -> dict[str, Any] | None:
    """What the model in ``folder`` cost to train; None where nobody wrote it down."""
    try:
        value = json.loads((folder / COST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value else None


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
