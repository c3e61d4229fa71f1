"""Corpora as they come: which recordings there are, what is said in them, by whom, and for which split.

A reader yields a ``Row`` for each utterance and a ``BadRow`` for what is none, always in the same order, without
opening the audio. A line or a file that is wrong never ends the reading; a table that has no texts at all does.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stapes.data.manifest import open_text
from stapes.errors import UsageError

AUDIO_SUFFIXES = (".flac", ".wav", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".sph", ".aiff", ".mp4", ".webm", ".wma")

# What a field is called in the simple form, in NeMo's and in Common Voice's.
_AUDIO = ("audio", "audio_filepath", "path", "audio_path", "file", "wav")
_TEXT = ("text", "sentence", "transcript", "transcription")
_SPEAKER = ("speaker", "client_id", "speaker_id")
_LANGUAGE = ("lang", "language", "locale")
_SPLIT_FOLDERS = frozenset({"train", "dev", "test", "valid", "validation", "val", "eval"})
_NOT_SCORED = "ignore_time_segment_in_scoring"  # TED-LIUM: something is said that nobody wrote down


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A recording, or the part of one from ``start`` to ``end`` (seconds), and what is said in it."""

    id: str
    audio: str
    text: str
    split: str | None = None
    speaker: str | None = None
    language: str | None = None
    gender: str | None = None
    duration: float | None = None
    """What the corpus says it is."""
    start: float = 0.0
    end: float | None = None
    channel: int | None = None
    """From 0, where the recording has several and one is meant."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A place in a corpus that gives no row. ``code`` is one of ``checks.REASONS``."""

    where: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a corpus is read."""

    text_field: str | None = None
    """jsonl and csv: which field the text is in."""
    language: str | None = None
    """Of rows that say none."""
    untranscribed: bool = False
    """folder, jsonl and csv: texts may be missing."""


Reader = Callable[[Path, ReadOptions], Iterator[Row | BadRow]]


def read_corpus(corpus: str, source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """The rows of a corpus: one of ``CORPORA``, or a recipe of lhotse by its name.

    Raises UsageError for a corpus that is unknown, or not in ``source``.
    """
    if not source.exists():
        raise UsageError(f"{source} is not there: name the folder or the file that the corpus is in")
    if corpus in CORPORA:
        return CORPORA[corpus](source, options)
    from stapes.data.recipes import read_recipe, recipe_names

    close = difflib.get_close_matches(corpus, CORPORA, n=1, cutoff=0.8)
    try:
        names = recipe_names()
    except UsageError:
        if not close:  # a slip of the pen does not need lhotse to be told
            raise
        names = []
    if corpus in names:
        return read_recipe(corpus, source)
    close = close or difflib.get_close_matches(corpus, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"say {', '.join(CORPORA)}, or a recipe of lhotse."
    raise UsageError(f"{corpus!r} is no corpus known here: {hint}")


def librispeech(source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """LibriSpeech's layout: ``SPLIT/SPEAKER/CHAPTER/*.trans.txt``, the audio beside it."""
    transcripts = _found(source, sorted(source.rglob("*.trans.txt")), "*.trans.txt, as LibriSpeech has")
    for path in transcripts:
        audio = {each.stem: each for each in _audio_in(path.parent)}
        split = path.parents[2].name if len(path.resolve().parents) > 2 else None
        for where, line in _lines(path):
            if isinstance(line, BadRow):
                yield line
                continue
            id, _, text = line.partition(" ")
            file = audio.pop(id, None)
            if file is None:
                yield BadRow(where, "missing", f"there is no audio of {id} beside it")
                continue
            yield Row(
                id=id,
                audio=str(file),
                text=text.strip(),
                split=split,
                speaker=id.partition("-")[0],
                language=options.language or "en",
            )
        for file in audio.values():
            yield BadRow(str(file), "no text", f"{path.name} has no line for it")


def commonvoice(source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """Common Voice: ``train.tsv``, ``dev.tsv`` and ``test.tsv``, whose speakers differ, or else ``validated.tsv``.

    source: the folder of a language, with ``clips``, or the release's folder with several, or one tsv.
    """
    if source.is_file():
        tables = [source]
    else:
        folders = [source, *sorted(path for path in source.iterdir() if path.is_dir())]
        tables = []
        for folder in folders:
            splits = [folder / f"{split}.tsv" for split in ("train", "dev", "test")]
            present = [path for path in splits if path.is_file()] or [folder / "validated.tsv"]
            tables += [path for path in present if path.is_file()]
    for table in _found(source, tables, "train.tsv or validated.tsv, as Common Voice has"):
        split = table.stem if table.stem in _SPLIT_FOLDERS else None
        yield from _table_rows(table, options, split=split, folder=table.parent / "clips", only_text="sentence")


def tedlium(source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """TED-LIUM 1 to 3: ``SPLIT/stm/*.stm`` beside ``SPLIT/sph/*.sph``; release 3 calls its training part ``data``."""
    transcripts = _found(source, sorted(source.rglob("*.stm")), "*.stm, as TED-LIUM has")
    newer = any(path.parents[1].name == "data" for path in transcripts)
    for path in transcripts:
        part = path.parents[1]
        if newer and part.name == "train":  # legacy/train: talks of the older releases, which data has too
            continue
        audio = _beside(part / "sph" / path.name) or _beside(part / "wav" / path.name) or _beside(path)
        for where, line in _lines(path):
            if isinstance(line, BadRow):
                yield line
                continue
            fields = line.split(maxsplit=6)
            if line.startswith(";;"):
                continue
            try:
                talk, _, speaker, start, end = fields[:5]
                begin, stop = float(start), float(end)
                if not (0 <= begin < stop and math.isfinite(stop)):
                    raise ValueError
            except ValueError:
                yield BadRow(where, "manifest", "it is no line of an stm: talk, channel, speaker, start, end, text")
                continue
            text = fields[6] if len(fields) > 6 else ""
            if text.strip() == _NOT_SCORED:
                yield BadRow(where, "not transcribed", f"the corpus says {_NOT_SCORED}")
            elif audio is None:
                yield BadRow(where, "missing", f"there is no sph/{path.stem}.sph")
            else:
                yield Row(
                    id=f"{talk}-{round(begin * 100):07d}-{round(stop * 100):07d}",
                    audio=str(audio),
                    text=text,
                    split="train" if part.name == "data" else part.name,
                    speaker=speaker,
                    language=options.language or "en",
                    duration=stop - begin,
                    start=begin,
                    end=stop,
                )


def folder(source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """Any folder of recordings, each with a ``.txt`` of the same name; subfolders called train, dev … are splits."""
    if not source.is_dir():
        raise UsageError(f"{source} is no folder: name the folder that the recordings are in")
    found = False
    for name, folders, _ in os.walk(source, followlinks=True):
        folders.sort()
        for audio in _audio_in(Path(name)):
            found = True
            inside = audio.relative_to(source)
            text_file = audio.with_suffix(".txt")
            try:
                text = text_file.read_text(encoding="utf-8-sig")
            except FileNotFoundError:
                if not options.untranscribed:
                    yield BadRow(str(audio), "no text", f"there is no {text_file.name} beside it")
                    continue
                text = ""
            except (OSError, UnicodeDecodeError) as error:
                yield BadRow(str(audio), "no text", f"{text_file.name} cannot be read ({error})")
                continue
            split = inside.parts[0] if inside.parts[0].lower() in _SPLIT_FOLDERS else None
            yield Row(
                id=str(inside.with_suffix("")),
                audio=str(audio),
                text=" ".join(text.split()),
                split=split,
                language=options.language,
            )
    if not found:
        raise UsageError(f"{source} has no recordings: it takes {', '.join(AUDIO_SUFFIXES)}")


def jsonl(source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """An object a line: ``audio`` (from the file's folder), ``text``, and where they are known ``duration``,
    ``speaker``, ``lang``, ``split``. NeMo's names of them will do."""
    path = source / "manifest.jsonl" if source.is_dir() else source
    if not path.is_file():
        raise UsageError(f"{path} is not there: name a .jsonl file, or a folder with a manifest.jsonl")
    fields: dict[str, None] = {}
    for where, line in _lines(path):
        if isinstance(line, BadRow):
            yield line
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            fields |= dict.fromkeys(value)
            yield _plain_row(where, value, options, path.parent)
        else:
            yield BadRow(where, "manifest", "it is no JSON object")
    _check_fields(path, fields, options)


def table(source: Path, options: ReadOptions) -> Iterator[Row | BadRow]:
    """A csv or tsv with a heading: columns as the fields of ``jsonl``."""
    if not source.is_file():
        raise UsageError(f"{source} is no file: name a .csv or .tsv")
    yield from _table_rows(source, options, split=None, folder=source.parent, only_text=None)


CORPORA: Mapping[str, Reader] = {
    "librispeech": librispeech,
    "commonvoice": commonvoice,
    "tedlium": tedlium,
    "folder": folder,
    "jsonl": jsonl,
    "csv": table,
}


def _found(source: Path, paths: list[Path], what: str) -> list[Path]:
    if not paths:
        raise UsageError(f"{source} has no {what}: name the folder that was unpacked")
    return paths


def _lines(path: Path) -> Iterator[tuple[str, str | BadRow]]:
    """(place, line) of a text file; a line that is no UTF-8, or a file that breaks off, is a BadRow."""
    try:
        with open_text(path) as file:
            file.reconfigure(errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if not line.isascii() and any("\udc80" <= character <= "\udcff" for character in line):
                    yield where, BadRow(where, "manifest", "it is no UTF-8")
                elif line.strip():
                    yield where, line.rstrip("\r\n")
    except (OSError, EOFError) as error:
        yield str(path), BadRow(str(path), "manifest", f"it cannot be read to its end ({error})")


def _table_rows(
    path: Path, options: ReadOptions, *, split: str | None, folder: Path, only_text: str | None
) -> Iterator[Row | BadRow]:
    tabs = path.name.lower().removesuffix(".gz").endswith(".tsv")
    # Common Voice does not quote: a quotation mark is a part of the sentence.
    quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
    with open_text(path) as file:
        file.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        reader = csv.DictReader(file, delimiter="\t" if tabs else ",", quoting=quoting)
        while True:
            where = f"{path}, line {reader.line_num + 1}"
            try:
                value = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(where, "manifest", f"it is no row of a table ({error})")
                continue
            if only_text is None:
                _check_fields(path, [key for key in value if key], options)
            row: dict[str, Any] = {key: text for key, text in value.items() if key and text not in (None, "")}
            if _first(row, _TEXT) is None and any(column in value for column in _TEXT):
                row["text"] = ""
            if split is not None:
                row["split"] = split
            if only_text is not None and only_text in row:
                row["text"] = row[only_text]
            if "locale" not in row and only_text is not None:
                row["locale"] = path.parent.name if path.parent.name != "clips" else None
            yield _plain_row(where, row, options, folder)


def _check_fields(path: Path, fields: Collection[str], options: ReadOptions) -> None:
    """Raise UsageError where none of the fields that there are can hold the text."""
    wanted = _TEXT if options.text_field is None else (options.text_field,)
    if not fields or any(name in fields for name in wanted):
        return
    close = difflib.get_close_matches(wanted[0], fields, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"no row of {path} has the field {' or '.join(map(repr, wanted))} for its text: {hint}--text-field takes one "
        f"of {', '.join(fields)}"
    )


def _plain_row(where: str, value: dict[str, Any], options: ReadOptions, folder: Path) -> Row | BadRow:
    audio = _first(value, _AUDIO)
    text = _first(value, _TEXT) if options.text_field is None else value.get(options.text_field)
    if not isinstance(audio, str) or not audio:
        return BadRow(where, "manifest", "it has no 'audio'")
    if not isinstance(text, str):
        if not options.untranscribed:
            return BadRow(where, "no text", f"it has no {options.text_field or 'text'!r}")
        text = ""
    try:
        start = _number(value, "offset") or 0.0
        duration = _number(value, "duration")
    except (TypeError, ValueError):
        return BadRow(where, "manifest", "its 'duration' or 'offset' is no number")
    path = folder / audio
    if not path.exists() and not path.suffix and path.with_suffix(".mp3").exists():  # old releases of Common Voice
        path = path.with_suffix(".mp3")
    return Row(
        id=str(value.get("id") or (f"{audio}@{start:g}" if start else audio)),
        audio=str(path),
        text=text,
        split=_string(value.get("split")),
        speaker=_string(_first(value, _SPEAKER)),
        language=_string(_first(value, _LANGUAGE)) or options.language,
        gender=_string(value.get("gender")),
        duration=duration,
        start=start,
        end=start + duration if start and duration is not None else None,
    )


def _audio_in(folder: Path) -> list[Path]:
    paths = [
        path for path in folder.iterdir() if path.suffix.lower() in AUDIO_SUFFIXES and not path.name.startswith(".")
    ]
    return sorted(paths)


def _beside(path: Path) -> Path | None:
    candidates = (path.with_suffix(suffix) for suffix in (".sph", *AUDIO_SUFFIXES))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _string(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _number(value: Mapping[str, Any], name: str) -> float | None:
    found = value.get(name)
    if found is None or found == "":
        return None
    number = float(found)
    if not math.isfinite(number) or number < 0:
        raise ValueError(name)
    return number
