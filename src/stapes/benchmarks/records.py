"""The file of one benchmark run: every round of every system, and all that one must know to run it again.

``results/<date>-<machine>-<name>.json``. Times are wall-clock seconds; what is not known is null.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from stapes.errors import UsageError
from stapes.evaluation.results import build, write_json

FORMAT = "stapes-bench-1"


@dataclass(slots=True, kw_only=True)
class Spread:
    """A figure of every round, in the order measured; their median, lowest and highest."""

    rounds: list[float]
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: list[float]) -> Spread:
        """Summarise ``rounds``, at least one."""
        return cls(rounds=rounds, median=median(rounds), low=min(rounds), high=max(rounds))


@dataclass(slots=True, kw_only=True)
class SystemRow:
    """One system in one case."""

    system: str
    """stapes, faster-whisper, transformers, whisper.cpp, openai-whisper."""
    version: str | None = None
    options: str = ""
    """What was asked of it beside the case: ``compute_type=int8``."""
    precision: str | None = None
    wall_seconds: Spread
    figures: dict[str, float | None] = field(default_factory=dict)
    """What else was measured: ``words``, ``wer`` (fraction), ``peak_device_bytes``, ``joules``, …"""


@dataclass(slots=True, kw_only=True)
class Ratio:
    """How many times as fast as ``peer`` we were, round by round: above 1 we were faster."""

    peer: str
    """Its place in the row's ``systems`` tells which, where two have one name."""
    place: int
    times_as_fast: Spread


@dataclass(slots=True, kw_only=True)
class CaseRow:
    """One case of the matrix: what was varied, and what each system made of it. The first system is ours."""

    case: dict[str, Any]
    systems: list[SystemRow]
    ratios: list[Ratio] = field(default_factory=list)

    @property
    def ours(self) -> SystemRow:
        """Our row."""
        return self.systems[0]


@dataclass(slots=True, kw_only=True)
class Weights:
    """Whose weights ran. ``random``: a network of the published size that knows nothing, for timing only."""

    name: str
    kind: str
    sha256: str | None = None
    """Of the file that holds the weights (its parts in order); None for random ones."""
    parameters: int | None = None
    tokens: int | None = None
    """Random weights: tokens that every window is made to write."""


@dataclass(slots=True, kw_only=True)
class BenchResult:
    """One run of the suite."""

    format: str = FORMAT
    name: str
    """Which part of the suite: transcribe, …"""
    command: list[str]
    stapes: str
    commit: str | None = None
    date: str
    purpose: str = "measurement"
    """Or ``trial``: to see it work, never tabled."""
    machine: dict[str, Any]
    """``devices.machine.facts()``, with its ``fingerprint``."""
    load_average: float | None = None
    """Processes that wanted a core in the minute before: on a machine that others use, figures are of little worth."""
    weights: Weights
    audio: dict[str, Any]
    rows: list[CaseRow]
    notes: list[str] = field(default_factory=list)

    @property
    def is_trial(self) -> bool:
        """Whether its figures mean nothing."""
        return self.purpose != "measurement"

    @property
    def fingerprint(self) -> str:
        """Of the machine."""
        return str(self.machine["fingerprint"])

    def file_name(self) -> str:
        """``<date>-<machine>-<name>.json``; the machine by its GPU, else its processor, and its fingerprint."""
        gpus = self.machine.get("gpus") or []
        hardware = (gpus[0]["name"] if gpus else self.machine.get("cpu")) or "machine"
        words = re.findall(r"[a-z0-9]+", re.sub(r"\(R\)|\(TM\)|\bCPU\b|@.*", " ", hardware, flags=re.I).lower())
        day = self.date[:10]
        return f"{day}-{'-'.join(words[:4])}-{self.fingerprint[:6]}-{self.name}-{_slug(self.weights)}.json"


def _slug(weights: Weights) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", weights.name.lower()) + ("-random" if weights.kind == "random" else "")


def write_bench(folder: Path, result: BenchResult) -> Path:
    """Write the result into ``folder`` under its own name, numbered where there is one already. Raises OutputError."""
    path = folder / result.file_name()
    number = 1
    while path.exists():
        number += 1
        path = folder / result.file_name().replace(".json", f"-{number}.json")
    write_json(path, asdict(result))
    return path


def read_bench(path: str | Path) -> BenchResult:
    """Read a result, checked field by field. Raises UsageError, naming what is wrong with it."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: run `stapes bench transcribe`") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged or cannot be read ({error}): run the benchmark again") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(f"{path} is no result of `stapes bench` (expected the format {FORMAT!r})")
    result = build(BenchResult, value, str(path))
    if not isinstance(result.machine.get("fingerprint"), str):
        raise UsageError(f"{path} does not say on which machine it was measured: run the benchmark again")
    for row in result.rows:
        if not row.systems:
            raise UsageError(f"{path}: a row without a system: the file is damaged")
        spreads = [system.wall_seconds for system in row.systems] + [ratio.times_as_fast for ratio in row.ratios]
        if any(not spread.rounds or spread != Spread.of(spread.rounds) for spread in spreads):
            raise UsageError(f"{path}: medians do not follow from their rounds: the file was changed; measure again")
    return result


@dataclass(slots=True, kw_only=True)
class Change:
    """A case of two runs on one machine. ``times_as_fast``: above 1 the second run was faster."""

    case: dict[str, Any]
    before: Spread
    after: Spread
    times_as_fast: float


def compare_runs(before: BenchResult, after: BenchResult) -> list[Change]:
    """Our times in the cases that two runs share.

    Raises UsageError for two machines, for other weights or audio, or where no case is shared: their times say
    nothing about each other.
    """
    for what, one, other in (
        ("machines", before.fingerprint, after.fingerprint),
        ("parts of the suite", before.name, after.name),
        ("weights", (before.weights.name, before.weights.kind), (after.weights.name, after.weights.kind)),
        ("numbers of tokens", before.weights.tokens, after.weights.tokens),
        ("audio", before.audio.get("sha256"), after.audio.get("sha256")),
    ):
        if one != other:
            raise UsageError(
                f"these runs cannot be compared, they are of different {what} ({one} and {other}): "
                "measure both on one machine with one command"
            )
    times = {json.dumps(row.case, sort_keys=True): row.ours.wall_seconds for row in before.rows}
    changes = []
    for row in after.rows:
        first = times.get(json.dumps(row.case, sort_keys=True))
        if first is not None:
            second = row.ours.wall_seconds
            changes.append(
                Change(case=row.case, before=first, after=second, times_as_fast=first.median / second.median)
            )
    if not changes:
        raise UsageError("these runs cannot be compared: they share no case (length, device, precision, batch size)")
    return changes
