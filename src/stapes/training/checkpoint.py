"""What is kept of a run: states to go on from, and the weights of the best steps.

    checkpoints/step-500/state.pt      everything: weights, optimiser, moving average, where the data stands
    checkpoints/step-500/run.json      step, settings, progress
    checkpoints/best/step-500/         weights.safetensors and what dev says of them

Random numbers need no state: those of a step are drawn from the run's seed and the step's number. Each folder appears
whole or not at all. States are read as plain tensors and values only (``weights_only``).
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stapes.checkpoints.folders import written_whole
from stapes.errors import ModelError, OutputError
from stapes.training.config import CheckpointOptions


class Kept(NamedTuple):
    """Weights of a step that was evaluated."""

    score: float
    """What the best have least of on dev: the word error rate mostly."""
    figures: dict[str, float]
    """What dev says of them."""
    step: int
    path: Path


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, options: CheckpointOptions) -> None:
        self.folder = folder / "checkpoints"
        self.options = options

    def steps(self) -> list[int]:
        """Steps with a state, in order."""
        names = [path.name for path in self.folder.glob("step-*") if (path / "state.pt").exists()]
        return sorted(int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit())

    def save(self, step: int, state: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Keep a state, and forget those that are too old. Raises OutputError where the disk is full."""
        with written_whole(self.folder / f"step-{step}") as folder:
            try:
                torch.save(dict(state), folder / "state.pt")
            except RuntimeError as error:  # PyTorch's own writer reports a full disk so
                raise OutputError(
                    f"{self.folder}: the state of step {step} cannot be written ({str(error).splitlines()[0]}); free "
                    "space, then `--resume` goes on from the last checkpoint"
                ) from error
            (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for old in self.steps()[: -self.options.keep]:
            shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)

    def load(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the record of a step. Raises ModelError where they are damaged."""
        folder = self.folder / f"step-{step}"
        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{folder} is damaged ({reason}): remove it, and the one before is taken") from None
        return state, record

    def best(self) -> list[Kept]:
        """The kept weights, the best first; of equals the latest."""
        found = []
        for path in (self.folder / "best").glob("step-*"):
            try:
                record = json.loads((path / "score.json").read_text(encoding="utf-8"))
                place = path / "weights.safetensors"
                found.append(Kept(float(record["score"]), dict(record["figures"]), int(record["step"]), place))
            except (OSError, ValueError, KeyError, TypeError):  # not whole: another program's, or being removed
                continue
        return sorted(found, key=lambda kept: (kept.score, -kept.step))

    def save_weights(
        self, step: int, score: float, figures: Mapping[str, float], weights: Mapping[str, Tensor]
    ) -> None:
        """Keep weights if they are among the best. Raises OutputError."""
        keep = max(self.options.keep_best, self.options.average, 1)
        if len(self.best()) >= keep and score > self.best()[keep - 1].score:
            return
        with written_whole(self.folder / "best" / f"step-{step}") as folder:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
            record = {"step": step, "score": score, "figures": dict(figures)}
            (folder / "score.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        for kept in self.best()[keep:]:
            shutil.rmtree(kept.path.parent, ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """Drop weights of steps beyond the one that a run goes on from: it makes these steps again."""
        for kept in self.best():
            if kept.step > step:
                shutil.rmtree(kept.path.parent, ignore_errors=True)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Kept weights by name. Raises ModelError where the file is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}): remove its folder") from None


def average_weights(kept: list[Kept]) -> dict[str, Tensor]:
    """The mean of several kept weights, computed in float64."""
    total: dict[str, Tensor] = {}
    for each in kept:
        for name, tensor in load_weights(each.path).items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(kept)).float() for name, tensor in total.items()}
