"""The log of a run: ``metrics.jsonl`` is the record, TensorBoard's files are written from the same values."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from stapes.devices.backend import Device
from stapes.devices.monitor import as_metrics, read_gpu
from stapes.errors import OutputError
from stapes.evaluation.scoring import character_errors, word_errors
from stapes.progress import Progress


class MetricsLog:
    """Writes what one process says of a run. On going on from a step, what was written after it is dropped."""

    def __init__(self, folder: Path, progress: Progress, *, tensorboard: bool = True, from_step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        self._board: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._keep_until(from_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); choose another output") from error
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                progress.note(
                    "TensorBoard's files are not written: pip install 'stapes[train]', or run.tensorboard=false"
                )
            else:
                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step or None)

    def _keep_until(self, step: int) -> None:
        if not self.path.exists():
            return
        lines = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    lines.append(line + "\n")
            except (ValueError, KeyError):  # cut off when the process was killed
                continue
        temporary = self.path.with_suffix(".new")
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, self.path)  # noqa: PTH105

    def write(self, step: int, kind: str, values: Mapping[str, Any], texts: Sequence[str] = ()) -> None:
        """One line: numbers by name, and sample transcripts. Raises OutputError where the disk is full."""
        record: dict[str, Any] = {"step": step, "kind": kind, "time": round(time.time(), 3), **values}
        if texts:
            record["samples"] = list(texts)
        try:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._board.add_scalar(f"{kind}/{name}", value, step)
                if texts:
                    self._board.add_text(f"{kind}/samples", "\n\n".join(texts), step)
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written ({error.strerror}); free space, then --resume"
            ) from error

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
        if self._board is not None:
            self._board.close()


@dataclass(slots=True)
class Window:
    """What happened since the last line of metrics, in this process."""

    loss: float = 0.0
    units: float = 0.0
    """What the loss is a mean over: target tokens mostly."""
    seconds: float = 0.0
    """Of audio, without padding."""
    padded_seconds: float = 0.0
    rows: float = 0.0
    flops: float = 0.0
    """Of the networks, forwards and backwards."""
    skipped: float = 0.0
    """Utterances that could not be read or said."""
    figures: list[float] = field(default_factory=list)
    """Sums of what the objective says besides (`Losses.figures`)."""

    def add(self, loss: float, figures: Sequence[float]) -> None:
        """Count a step that was made."""
        self.loss += loss
        self.figures = [a + b for a, b in zip(self.figures or [0.0] * len(figures), figures, strict=True)]

    def tensor(self) -> torch.Tensor:
        """For summing over the processes."""
        numbers = [getattr(self, each.name) for each in fields(self) if each.name != "figures"]
        return torch.tensor([*numbers, *self.figures], dtype=torch.float64)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Window:
        """The other way round."""
        values, names = tensor.tolist(), [each.name for each in fields(cls) if each.name != "figures"]
        return cls(**dict(zip(names, values, strict=False)), figures=values[len(names) :])


def rates(
    window: Window, elapsed: float, device: Device, precision: str, world_size: int, *, ask_driver: bool
) -> dict[str, float]:
    """Speed and efficiency of all processes together over ``elapsed`` seconds.

    ``ask_driver`` for the GPU's load and power, which may take a moment.
    """
    values = {
        "loss": window.loss / max(window.units, 1.0),
        "audio_seconds_per_second": window.seconds / elapsed,
        "samples_per_second": window.rows / elapsed,
        "padding_share": 1 - window.seconds / window.padded_seconds if window.padded_seconds else 0.0,
        "skipped": window.skipped,
    }
    peak = device.chip.peak_tflops.get(precision) if device.chip is not None else None
    if peak and window.flops:
        values["mfu"] = window.flops / (elapsed * world_size * peak * 1e12)
    if device.backend != "cpu":
        values["gpu_memory_peak_bytes"] = float(torch.cuda.max_memory_allocated(device.torch))
        reading = read_gpu(device.torch.index or 0) if ask_driver else None
        values |= as_metrics(reading) if reading is not None else {}
    return values


class DevScores(Protocol):
    """What is found on dev utterances, to be summed over batches and processes."""

    @property
    def score(self) -> float:
        """What the best weights have least of."""
        ...

    def figures(self) -> dict[str, float]:
        """For the log."""
        ...

    def text(self) -> str:
        """For people."""
        ...

    def tensor(self) -> torch.Tensor:
        """For summing over the processes, float64."""
        ...

    def of(self, tensor: torch.Tensor) -> Self:
        """The other way round."""
        ...


@dataclass(slots=True)
class TextScores:
    """Errors of transcripts of dev utterances."""

    word_errors: int = 0
    words: int = 0
    character_errors: int = 0
    characters: int = 0
    loss: float = 0.0
    units: float = 0.0

    def add(self, reference: str, hypothesis: str) -> None:
        """Count one utterance."""
        reference, hypothesis = " ".join(reference.split()), " ".join(hypothesis.split())
        by_word, by_character = word_errors(reference, hypothesis), character_errors(reference, hypothesis)
        self.word_errors += by_word.substitutions + by_word.deletions + by_word.insertions
        self.words += by_word.hits + by_word.substitutions + by_word.deletions
        self.character_errors += by_character.substitutions + by_character.deletions + by_character.insertions
        self.characters += by_character.hits + by_character.substitutions + by_character.deletions

    def tensor(self) -> torch.Tensor:
        """For summing over the processes."""
        return torch.tensor([float(getattr(self, name)) for name in self.__slots__], dtype=torch.float64)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TextScores:
        """The other way round."""
        values = tensor.tolist()
        return cls(*(round(value) for value in values[:4]), *values[4:])

    @property
    def score(self) -> float:
        """The word error rate."""
        return self.wer

    def figures(self) -> dict[str, float]:
        """For the log."""
        return {"loss": self.loss / max(1.0, self.units), "wer": self.wer, "cer": self.cer}

    def text(self) -> str:
        """For people."""
        return f"WER {100 * self.wer:.2f} %, CER {100 * self.cer:.2f} %"

    @property
    def wer(self) -> float:
        """Word error rate."""
        return self.word_errors / max(1, self.words)

    @property
    def cer(self) -> float:
        """Character error rate."""
        return self.character_errors / max(1, self.characters)


def rounded(value: float) -> float:
    """Six digits: what a log needs of a figure."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
