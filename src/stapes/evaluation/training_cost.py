"""What a model cost to train: a small file beside its weights, which evaluations of it take over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stapes.evaluation.results import write_json

COST = "training.json"
"""In the model's folder."""


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
