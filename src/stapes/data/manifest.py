"""A manifest of any size in constant memory: lhotse's cuts, read once, then looked up by number.

Reading goes through the file once and keeps of each cut what training needs, in a temporary file that is mapped into
memory: the system may drop its pages at any time, and processes that are forked share them.
"""

from __future__ import annotations

import gzip
import json
import mmap
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from stapes.data.seeds import key_of
from stapes.errors import UsageError

AUDIO_FOLDER = "audio"
"""Where `stapes prepare --convert` puts its copies, beside the manifests."""

_EDGE = 0.02
"""Seconds at either end of a cut below which a supervision is as long as the cut."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A recording, or a part of one, and what is said in it. Seconds."""

    id: str
    audio: str
    start: float
    duration: float
    text: str
    speaker: str | None = None
    language: str | None = None
    channel: int | None = None
    """From 0; None: the only one, or the mean of all."""
    segments: Sequence[Sequence[Any]] = ()
    """Start, end (seconds from ``start``) and text of what is said, one after another, where the manifest knows more
    than that all of it is said somewhere within."""


class Manifest:
    """The utterances of one or several lhotse CutSets (``.jsonl`` or ``.jsonl.gz``), by number.

    Attributes:
        durations: seconds of each, float64 (n,).
        keys: what stands for each one's id in hashes, uint64 (n,).

    Raises UsageError for a file that is missing, damaged, empty, or holds something else than cuts of single files.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(Path(path) for path in paths)
        durations, keys, ends = array("d"), array("Q"), array("q", [0])
        with tempfile.TemporaryFile(prefix="stapes-manifest-") as file:
            for path in self.paths:
                for utterance in read_cuts(path):
                    durations.append(utterance.duration)
                    keys.append(key_of(utterance.id))
                    ends.append(ends[-1] + file.write(_pack(utterance)))
            if not durations:
                raise UsageError(f"{' '.join(map(str, self.paths))}: no utterances; prepare the corpus again")
            file.flush()
            self._records = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.durations = np.frombuffer(durations, np.float64)
        self.keys = np.frombuffer(keys, np.uint64)
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self.durations)

    def __getitem__(self, number: int) -> Utterance:
        return Utterance(*json.loads(self._records[self._ends[number] : self._ends[number + 1]]))

    def __iter__(self) -> Iterator[Utterance]:
        return (self[number] for number in range(len(self)))


class Chosen(Manifest):
    """Some of a manifest's utterances, by their numbers (at least one)."""

    def __init__(self, manifest: Manifest, numbers: np.ndarray) -> None:
        self.paths = manifest.paths
        self._manifest, self._numbers = manifest, numbers
        self.durations, self.keys = manifest.durations[numbers], manifest.keys[numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Utterance:
        return self._manifest[int(self._numbers[number])]


def read_cuts(path: Path) -> Iterator[Utterance]:
    """The cuts of a lhotse CutSet, one after another. Raises UsageError as ``Manifest`` does.

    Where the folder of a corpus that `stapes prepare --convert` made was moved, its audio is found in the new place.
    """
    here, before = str(path.parent.absolute()), None
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                utterance = _utterance(line, path, number)
                if before is None:  # the first tells for all
                    before = _moved_from(utterance.audio, here)
                if before and utterance.audio.startswith(before):
                    utterance = replace(utterance, audio=here + utterance.audio[len(before) :])
                yield utterance
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error}): name a .jsonl or .jsonl.gz of cuts") from None


def _moved_from(audio: str, here: str) -> str:
    """The folder that the manifest's was when its ``audio`` was written; empty where the audio is where it says."""
    folder, found, name = audio.rpartition(f"/{AUDIO_FOLDER}/")
    inside = f"/{AUDIO_FOLDER}/{name}"
    return folder if found and folder != here and not Path(audio).exists() and Path(here + inside).exists() else ""


def open_text(path: Path) -> TextIO:
    """A text file, gzipped or not, by its name."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")  # pyright: ignore[reportReturnType]
    return path.open(encoding="utf-8-sig", newline="")


def _pack(utterance: Utterance) -> bytes:
    values = [getattr(utterance, name) for name in Utterance.__slots__]
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _utterance(line: str, path: Path, number: int) -> Utterance:
    where = f"{path}, line {number}"
    try:
        cut: dict[str, Any] = json.loads(line)
        recording = cut["recording"]
        (source,) = [each for each in recording["sources"] if _has_channel(each, cut.get("channel", 0))]
        if source["type"] != "file":
            raise ValueError
        said = sorted(cut.get("supervisions") or [], key=lambda each: each.get("start", 0.0))
        audio = source["source"]
        # lhotse means relative paths from where the program runs; manifests that travel, from their own folder. No
        # Path for each: it interns the parts of names, a table that millions of them let grow.
        if not audio.startswith("/") and (path.parent / audio).exists():
            audio = str(path.parent / audio)
        start, duration = float(cut["start"]), float(cut["duration"])
        speakers = {each.get("speaker") for each in said}
        languages = {each.get("language") for each in said}
        channels = source.get("channels") or [0]
        mixed = len(channels) == 1 or (cut.get("custom") or {}).get("channels") == "mix"
        return Utterance(
            id=str(cut["id"]),
            audio=audio,
            start=start,
            duration=duration,
            text=" ".join(each.get("text") or "" for each in said).strip(),
            speaker=speakers.pop() if len(speakers) == 1 else None,
            language=languages.pop() if len(languages) == 1 else None,
            channel=None if mixed else channels.index(cut.get("channel", 0)),
            segments=_segments(said, duration),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UsageError(
            f"{where} is no cut of one channel of a file: make the manifest with `stapes prepare`, or write mixed and "
            "padded cuts to files with lhotse's `save_audios` first"
        ) from None


def _segments(said: Sequence[Mapping[str, Any]], duration: float) -> list[tuple[float, float, str]]:
    """When each supervision is said: by its aligned words where it has any, else by its own bounds.

    Nothing where one supervision without words is as long as the cut: that says only that it was cut there.
    """
    found, is_known = [], len(said) > 1
    for each in said:
        start = float(each.get("start", 0.0))
        end = start + float(each.get("duration", duration))
        words = (each.get("alignment") or {}).get("word") or ()
        if words:  # [symbol, start, duration, …], as lhotse writes them
            start, end = float(words[0][1]), float(words[-1][1]) + float(words[-1][2])
        is_known |= bool(words) or start > _EDGE or end < duration - _EDGE
        found.append((max(0.0, start), min(duration, end), (each.get("text") or "").strip()))
    return [each for each in found if each[2]] if is_known else []


def _has_channel(source: dict[str, Any], channel: int) -> bool:
    return channel in (source.get("channels") or [0])
