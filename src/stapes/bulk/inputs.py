"""What there is to transcribe, as a stream: manifests, folders and lists, here or behind a URL.

Nothing is opened but manifests, and nothing is held: ten million files pass through in the memory of one folder's
names. URLs (``s3://``, ``gs://``, ``https://`` …) are read by fsspec with the driver that its owner installed for them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from stapes.audio.sources import MEDIA_EXTENSIONS
from stapes.data.manifest import open_text, read_cuts
from stapes.errors import UsageError

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MANIFESTS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz")

# What a field is called: ours first, then NeMo's and Common Voice's names.
_AUDIO = ("audio", "audio_filepath", "path", "audio_path", "file", "wav", "url")
_TEXT = ("text", "sentence", "transcript", "transcription")
_LANGUAGE = ("lang", "language", "locale")
_SPEAKER = ("speaker", "client_id", "speaker_id")

# Bytes of a second in files of unknown length, for sharing work out fairly: typical ones, not promises.
_BYTE_RATES = {"wav": 32_000, "flac": 18_000, "mp3": 12_000, "ogg": 5_000, "opus": 4_000, "mp4": 60_000, "mkv": 150_000}
_USUAL_BYTE_RATE = 16_000
_USUAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Item:
    """A recording, or the part of one from ``start`` to ``end`` (seconds), with what a manifest says of it."""

    id: str
    audio: str
    seconds: float
    """Expected: what the manifest says, else guessed from the size."""
    start: float = 0.0
    end: float | None = None
    channel: int | None = None
    """From 0; None: what the options say."""
    language: str | None = None
    text: str | None = None
    speaker: str | None = None

    def to_list(self) -> list[Any]:
        """JSON form, without the empty values at its end."""
        values = [getattr(self, name) for name in Item.__slots__]
        while values[-1] is None:
            values.pop()
        return values


def list_inputs(inputs: Sequence[str]) -> Iterator[Item]:
    """All recordings of the inputs, in a fixed order, while they are being found. One may come twice.

    An input is a file, a folder, a pattern, a manifest (jsonl, lhotse's cuts, csv, tsv, gzipped or not), ``@list.txt``
    with an input a line, or the URL of any of these. Raises UsageError for what is missing or has nothing in it.
    """
    for name in inputs:
        if name.startswith("@"):
            yield from _listed(name[1:])
        else:
            yield from _input(name)


def _listed(path: str) -> Iterator[Item]:
    with _opened(path) as lines:
        for line in lines:
            name = line.strip()
            if name and not name.startswith("#"):
                yield from _input(name)


def _input(name: str) -> Iterator[Item]:
    if URL.match(name):
        yield from _remote(name)
    elif name.lower().endswith(_MANIFESTS):
        yield from read_manifest(name)
    elif os.path.isdir(name):  # noqa: PTH112 - as given, not as Path spells it
        yield from _some(name, _walk(name))
    elif not os.path.lexists(name) and re.search(r"[*?\[]", name):
        import glob

        found = glob.iglob(name, recursive=True)  # noqa: PTH207 - names as given
        yield from _some(name, (_file(each, _size(each)) for each in sorted(found) if not Path(each).is_dir()))
    elif not os.path.lexists(name):
        raise UsageError(f"{name} is not there: name a folder, a manifest or a recording")
    else:
        yield _file(name, _size(name))


def _some(name: str, items: Iterator[Item]) -> Iterator[Item]:
    """The items, of which there is at least one. Raises UsageError."""
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        raise UsageError(f"{name} has no audio or video files; name the files, or a manifest, to try them anyway")


def _walk(folder: str) -> Iterator[Item]:
    """Audio and video files of a folder and those below, sorted in each; hidden ones and broken links are left out."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}): mend the permissions or leave it out") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)
        elif _extension(entry.name) in MEDIA_EXTENSIONS and entry.is_file():
            yield _file(entry.path, entry.stat().st_size)


def _remote(url: str) -> Iterator[Item]:
    files, path = filesystem(url)
    try:
        if url.lower().endswith(_MANIFESTS):
            yield from read_manifest(url)
        elif re.search(r"[*?\[]", path):
            found = files.glob(path, detail=True)
            yield from _some(url, (_of_url(files, name, facts) for name, facts in sorted(found.items())))
        elif _extension(path) in MEDIA_EXTENSIONS:  # over HTTP, to ask whether it is a folder is to fetch it
            yield _file(url, None)
        elif files.isdir(path):
            yield from _some(url, _walk_remote(files, path))
        else:
            yield _file(url, None)
    except (OSError, ValueError) as error:
        raise UsageError(f"{url} cannot be listed ({error}): check the address and your credentials") from None


def _walk_remote(files: Any, path: str) -> Iterator[Item]:
    for _, folders, names in files.walk(path, detail=True):
        # What is left in it, in its order, is where the walk goes on.
        kept = sorted((pair for pair in folders.items() if not pair[0].startswith(".")), key=lambda pair: pair[0])
        folders.clear()
        folders.update(kept)
        for name in sorted(names):
            if _extension(name) in MEDIA_EXTENSIONS and not name.startswith("."):
                yield _of_url(files, names[name]["name"], names[name])


def _of_url(files: Any, name: str, facts: Mapping[str, Any]) -> Item:
    size = facts.get("size")
    return _file(files.unstrip_protocol(name), size if isinstance(size, int) else None)


def filesystem(url: str) -> tuple[Any, str]:
    """What reads a URL, and the path that it goes by there. Raises UsageError where that is not installed."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except ImportError as error:
        raise UsageError(
            f"{url} needs another package ({error}): pip install 'stapes[bulk]', and s3fs for s3://, gcsfs for gs://, "
            "aiohttp for https://"
        ) from None
    except ValueError as error:
        raise UsageError(f"{url} cannot be opened ({error}): check the address") from None


def _file(name: str, size: int | None) -> Item:
    rate = _BYTE_RATES.get(_extension(name), _USUAL_BYTE_RATE)
    return Item(name, name, _USUAL_SECONDS if size is None else max(0.1, round(size / rate, 2)))


def _size(name: str) -> int | None:
    try:
        return Path(name).stat().st_size
    except OSError:  # reading it will say what is wrong
        return None


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def read_manifest(path: str) -> Iterator[Item]:
    """The rows of a manifest. Paths in it are meant from its own folder. Raises UsageError, naming the line."""
    if not URL.match(path) and not Path(path).is_file():
        raise UsageError(f"{path} is not there: name a manifest, a folder or a recording")
    plain = path.lower().removesuffix(".gz")
    place = _Place(path)
    with _opened(path) as lines:
        if plain.endswith((".csv", ".tsv")):
            yield from _table(path, lines, "\t" if plain.endswith(".tsv") else ",", place)
            return
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise UsageError(f"{path} is empty: nothing to transcribe")
        if not _is_cut(path, first):
            yield from (_row(f"{path}, line {n}", _object(path, n, line), place) for n, line in _all(first, lines))
            return
    if URL.match(path):
        raise UsageError(f"{path} holds lhotse's cuts: copy the manifest here, its audio may stay where it is")
    for cut in read_cuts(Path(path)):
        end = round(cut.start + cut.duration, 6)
        yield Item(
            cut.id, cut.audio, cut.duration, cut.start, end, cut.channel, cut.language, cut.text or None, cut.speaker
        )


def _all(first: str, rest: Iterable[str]) -> Iterator[tuple[int, str]]:
    yield 1, first
    yield from ((number, line) for number, line in enumerate(rest, 2) if line.strip())


def _is_cut(path: str, line: str) -> bool:
    return "recording" in _object(path, 1, line)


def _object(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{path}, line {number} is no JSON object: mend it or take it out")
    return value


def _table(path: str, lines: Iterable[str], delimiter: str, place: _Place) -> Iterator[Item]:
    # Common Voice does not quote: a quotation mark is a part of the sentence.
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.DictReader(lines, delimiter=delimiter, quoting=quoting)
    try:
        for row in reader:
            yield _row(f"{path}, line {reader.line_num}", {key: value for key, value in row.items() if value}, place)
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num} is no row of a table ({error})") from None


class _Place:
    """Makes paths in a manifest whole: URLs and absolute ones stay, others are meant from its folder."""

    def __init__(self, manifest: str) -> None:
        self._folder = manifest.rpartition("/")[0] if URL.match(manifest) else str(Path(manifest).parent)

    def __call__(self, audio: str) -> str:
        if URL.match(audio) or audio.startswith("/") or self._folder in ("", "."):
            return audio
        return f"{self._folder}/{audio}"


def _row(where: str, value: Mapping[str, Any], place: Callable[[str], str]) -> Item:
    audio = _first(value, _AUDIO)
    if not isinstance(audio, str) or not audio:
        raise UsageError(f"{where} has no 'audio' (or {', '.join(_AUDIO[1:4])}): say which recording it is")
    start = _number(where, value, "offset") or 0.0
    duration = _number(where, value, "duration")
    channel = value.get("channel")
    return Item(
        id=str(value.get("id") or (f"{audio}@{start:g}" if start else audio)),
        audio=place(audio),
        seconds=_USUAL_SECONDS if duration is None else duration,
        start=start,
        end=round(start + duration, 6) if start and duration is not None else None,
        channel=channel if isinstance(channel, int) and channel >= 0 else None,
        language=_text(_first(value, _LANGUAGE)),
        text=_text(_first(value, _TEXT)),
        speaker=_text(_first(value, _SPEAKER)),
    )


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _number(where: str, value: Mapping[str, Any], name: str) -> float | None:
    found = value.get(name)
    if found is None or found == "":
        return None
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{where}: {name!r} is {found!r}: give seconds")
    return number


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    """A text file, gzipped or not, here or behind a URL; what goes wrong while reading is a UsageError."""
    try:
        if URL.match(path):
            files, name = filesystem(path)
            with files.open(name, "rb", compression="gzip" if path.lower().endswith(".gz") else None) as raw:
                yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        else:
            with open_text(Path(path)) as file:
                yield file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read to its end ({error}): check it, or make it again") from None
