"""The files of one evaluation: a folder with ``utterances.jsonl`` and ``result.json``.

``utterances.jsonl`` grows while the evaluation runs, one finished recording a line; ``result.json`` is written at the
end. Rates are fractions (0.054 is 5.4 %); what is not known is null.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from stapes.errors import OutputError, UsageError

FORMAT = "stapes-evaluation-1"
UTTERANCES = "utterances.jsonl"
RESULT = "result.json"

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Utterance:
    """One recording: what was said, what was written, and how they differ after normalisation."""

    id: str
    audio: str
    duration: float
    """Seconds."""
    speaker: str | None = None
    language: str | None = None
    split: str | None = None
    snr_db: float | None = None
    reference: str
    hypothesis: str
    normalized_reference: str
    normalized_hypothesis: str
    hits: int
    substitutions: int
    deletions: int
    insertions: int
    char_hits: int
    char_substitutions: int
    char_deletions: int
    char_insertions: int
    repeated_ngrams: int = 0
    latency: float | None = None
    """Seconds from submission to text, under the load of the run: a system that takes many recordings at once answers
    each of them later."""
    error: str | None = None
    """Why there is no text: all of its words then count as deleted."""

    @property
    def words(self) -> int:
        """Words spoken."""
        return self.hits + self.substitutions + self.deletions

    @property
    def errors(self) -> int:
        """Words substituted, deleted and inserted."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def characters(self) -> int:
        """Characters of the normalised reference."""
        return self.char_hits + self.char_substitutions + self.char_deletions

    @property
    def char_errors(self) -> int:
        """Characters substituted, deleted and inserted."""
        return self.char_substitutions + self.char_deletions + self.char_insertions


@dataclass(slots=True, kw_only=True)
class Rate:
    """An error rate and its 95 % interval; ``value`` is None where no words were spoken."""

    value: float | None
    low: float | None
    high: float | None
    method: str
    """``bootstrap by speaker`` or ``bootstrap by utterance``."""
    why: str
    """Why this method."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Words of the whole set."""

    words: int
    hits: int
    substitutions: int
    deletions: int
    insertions: int


@dataclass(slots=True, kw_only=True)
class ModelFacts:
    """What was measured, and how it ran."""

    name: str
    path: str | None = None
    precision: str | None = None
    device: str | None = None
    parameters: int | None = None
    training_cost: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class CorpusFacts:
    """What it was measured on. ``sha256`` is of the rows used: two results with the same one can be paired."""

    name: str
    manifest: str
    sha256: str
    utterances: int
    hours: float
    speakers: int


@dataclass(slots=True, kw_only=True)
class Hallucination:
    """Words written that nobody said."""

    silence_insertions_per_minute: float | None = None
    """Words written per minute of those recordings in which nothing is said; None where there are none."""
    silence_minutes: float = 0.0
    repeated_ngram_utterances: int = 0
    """Utterances with a loop: an n-gram said over and over in the hypothesis and not in the reference."""
    repeated_ngrams: int = 0
    insertion_rate: float | None = None
    """Inserted words per word spoken."""


@dataclass(slots=True, kw_only=True)
class Group:
    """A part of the set in a breakdown."""

    wer: float | None
    low: float | None
    high: float | None
    words: int
    utterances: int


@dataclass(slots=True, kw_only=True)
class Speed:
    """Wall-clock time after the model was loaded. ``real_time_factor``: wall seconds per second of audio."""

    audio_seconds: float
    wall_seconds: float
    real_time_factor: float | None
    throughput: float | None
    """Seconds of audio per wall second (RTFx)."""
    latency_p50: float | None = None
    latency_p95: float | None = None


@dataclass(slots=True, kw_only=True)
class Memory:
    """The process's most resident memory, and the most that was allocated on the GPU."""

    peak_rss_bytes: int | None = None
    peak_device_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Result:
    """One evaluation, as ``result.json`` holds it."""

    format: str = FORMAT
    command: list[str] = field(default_factory=list)
    stapes: str
    commit: str | None = None
    date: str
    machine: dict[str, Any]
    """``devices.machine.facts()``, with its ``fingerprint``."""
    system: str
    """stapes, faster-whisper, transformers, openai."""
    model: ModelFacts
    options: dict[str, Any]
    corpus: CorpusFacts
    normalizer: str
    normalizer_by_language: dict[str, str] = field(default_factory=dict)
    wer: Rate
    cer: Rate
    counts: Counts
    failed: int
    hallucination: Hallucination
    breakdown: dict[str, dict[str, Group]]
    """``language``, ``speaker``, ``duration``, ``snr`` → part → its rate. Parts of unknown key are left out."""
    speed: Speed
    memory: Memory
    energy_joules: float | None = None


def write_result(folder: Path, result: Result) -> Path:
    """Write ``result.json``, whole or not at all. Raises OutputError."""
    path = folder / RESULT
    write_json(path, asdict(result))
    return path


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON under a temporary name, then rename. Raises OutputError."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error


def read_result(path: str | Path) -> Result:
    """Read the ``result.json`` of a folder (or the file itself), checked field by field. Raises UsageError."""
    file = Path(path)
    if file.is_dir():
        file = file / RESULT
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        unfinished = (file.parent / UTTERANCES).exists()
        raise UsageError(
            f"{path} has no {RESULT}: "
            + ("the evaluation has not finished; the same command goes on" if unfinished else "run `stapes evaluate`")
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is damaged or cannot be read ({error}): run `stapes evaluate` again") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise UsageError(f"{file} is no result of `stapes evaluate` (format {found!r}, expected {FORMAT!r})")
    return build(Result, value, str(file))


def read_utterances(folder: str | Path) -> Iterator[Utterance]:
    """The utterances of an evaluation one by one, in the order they finished. Raises UsageError, naming the line."""
    file = Path(folder)
    file = file / UTTERANCES if file.is_dir() else file
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}, line {number}"
                try:
                    value = json.loads(line)
                except ValueError:
                    raise UsageError(f"{where} is no JSON: the file is damaged; run `stapes evaluate` again") from None
                yield build(Utterance, value, where)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {UTTERANCES}: run `stapes evaluate` again") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error}): run `stapes evaluate` again") from None


def build(kind: type[T], value: Any, where: str) -> T:
    """A dataclass from its JSON, types checked. Unknown fields are ignored, for they come from a later version.

    Raises UsageError: ``where`` and the field that is missing or of the wrong type.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{where} should be an object and is {type(value).__name__}: the file is damaged")
    arguments: dict[str, Any] = {}
    for name, hint, needed in _fields(kind):
        if name in value:
            arguments[name] = _checked(hint, value[name], name, where)
        elif needed:
            raise UsageError(f"{where} lacks {name!r}: the file is damaged or of another version; evaluate again")
    return kind(**arguments)


@cache
def _fields(kind: type) -> list[tuple[str, Any, bool]]:
    hints = get_type_hints(kind)
    return [
        (each.name, hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)  # pyright: ignore[reportArgumentType]
    ]


def _checked(hint: Any, value: Any, name: str, where: str) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        origin = get_origin(kind) or kind
        if origin is Any or (origin is type(None) and value is None):
            return value
        if is_dataclass(origin) and isinstance(value, dict):
            return build(origin, value, f"{where}: {name}")  # pyright: ignore[reportArgumentType]
        if origin is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if origin is str and isinstance(value, str):
            return value
        if origin is list and isinstance(value, list):
            return [_checked(get_args(kind)[0], item, name, where) for item in value]
        if origin is dict and isinstance(value, dict):
            return {key: _checked(get_args(kind)[1], item, f"{name}.{key}", where) for key, item in value.items()}
    raise UsageError(f"{where}: {name!r} is {str(value)[:40]!r}, which it cannot be: the file is damaged")
