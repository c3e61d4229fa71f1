"""Recordings with known words: manifests of several kinds, and corpora by name.

Kinds: JSON lines with ``audio``, ``text`` and, where known, ``duration``, ``speaker``, ``lang``, ``split`` (audio paths
are meant from the manifest's folder); lhotse's cuts, or its supervisions beside its recordings, plain or gzipped;
Common Voice's tsv, and csv or tsv with columns of those names. Everything is held as rows: 100,000 take some 50 MB.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from stapes.errors import UsageError

# What a field is called: ours first, then lhotse's, NeMo's and Common Voice's names.
_AUDIO = ("audio", "audio_filepath", "path", "audio_path", "file", "wav")
_TEXT = ("text", "sentence", "transcript", "transcription")
_SPEAKER = ("speaker", "client_id", "speaker_id")
_LANGUAGE = ("lang", "language", "locale")
_SNR = ("snr_db", "snr")
_DATA_FOLDERS = ("./data", "../shared/data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recording, or the part of one from ``start`` to ``end`` (seconds), and what is said in it."""

    id: str
    audio: str
    text: str
    duration: float | None = None
    speaker: str | None = None
    language: str | None = None
    split: str | None = None
    snr_db: float | None = None
    start: float = 0.0
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows to evaluate on. ``name`` is short, for tables; ``manifest`` is the file they come from."""

    name: str
    manifest: str
    rows: list[Row]

    def sha256(self) -> str:
        """Of everything about the rows but where the audio lies: the same rows give the same, on any machine."""
        digest = hashlib.sha256()
        for row in self.rows:
            values = [row.id, row.text, row.duration, row.speaker, row.language, row.split, row.start, row.end]
            digest.update(json.dumps(values, ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()


def open_corpus(name: str, *, data: str | Path | None = None, limit: int | None = None, every: int = 1) -> Corpus:
    """Read a manifest, or find a corpus by name.

    name: a file; or ``CORPUS`` or ``CORPUS:PART`` (``librispeech:test``, ``asterisk:ru``), a part being a split or a
    language, several separated by colons, of a folder with a ``manifest.jsonl`` in ``data``, ``$STAPES_DATA``,
    ``./data`` or ``../shared/data``. every, limit: take every such row, then only so many.
    Raises UsageError.
    """
    if every < 1 or (limit is not None and limit < 1):
        raise UsageError("--every and --limit must be at least 1")
    if Path(name).is_file():
        manifest, parts, label = Path(name), [], _label(Path(name))
    else:
        manifest, parts = _find(name, data)
        label = name
    rows = _unique(_read(manifest))
    for part in parts:
        known = sorted({value for row in rows for value in (row.split, row.language) if value})
        rows = [row for row in rows if part in (row.split, row.language)]
        if not rows:
            raise UsageError(f"{name}: there is no split or language {part!r}; there are {', '.join(known) or 'none'}")
    rows = rows[::every][:limit]
    if not rows:
        raise UsageError(f"{manifest} has no rows: nothing to evaluate")
    return Corpus(label, str(manifest), rows)


def _label(manifest: Path) -> str:
    generic = manifest.stem in {"manifest", "cuts", "supervisions", "test", "dev", "validated"}
    return manifest.resolve().parent.name if generic else manifest.name.split(".")[0]


def data_folders(data: str | Path | None = None) -> list[Path]:
    """Where corpora are looked for."""
    if data is not None:
        return [Path(data)]
    chosen = os.environ.get("STAPES_DATA")
    return [Path(folder) for folder in ([chosen] if chosen else []) + list(_DATA_FOLDERS)]


def _find(name: str, data: str | Path | None) -> tuple[Path, list[str]]:
    corpus, *parts = name.split(":")
    folders = data_folders(data)
    for folder in folders:
        for candidate in ("manifest.jsonl", "cuts.jsonl.gz", "cuts.jsonl"):
            if corpus and (folder / corpus / candidate).is_file():
                return folder / corpus / candidate, parts
    here = sorted({path.parent.name for folder in folders for path in folder.glob("*/manifest.jsonl")})
    raise UsageError(
        f"{name}: there is no such manifest and no corpus of that name in {', '.join(map(str, folders))} "
        + (f"(there are {', '.join(here)})" if here else "(give --data FOLDER)")
    )


def _unique(rows: Iterable[Row]) -> list[Row]:
    """The rows with ids that differ: a recording that is listed again gets ``#2``."""
    seen: dict[str, int] = {}
    out: list[Row] = []
    for row in rows:
        seen[row.id] = count = seen.get(row.id, 0) + 1
        if count > 1:
            row = replace(row, id=f"{row.id}#{count}")
        out.append(row)
    return out


def _read(manifest: Path) -> Iterator[Row]:
    suffixes = [suffix.lower() for suffix in manifest.suffixes if suffix.lower() != ".gz"]
    try:
        with _open(manifest) as file:
            if suffixes[-1:] in ([".tsv"], [".csv"]):
                yield from _read_table(manifest, file, "\t" if suffixes[-1] == ".tsv" else ",")
            else:
                yield from _read_json_lines(manifest, file)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{manifest} cannot be read ({error})") from None


def _open(path: Path) -> TextIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")  # pyright: ignore[reportReturnType]
    return path.open(encoding="utf-8-sig", newline="")


def _json_lines(manifest: Path, file: TextIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{manifest}, line {number}"
        try:
            value = json.loads(line)
        except ValueError:
            raise UsageError(f"{where} is no JSON: a manifest has one object a line") from None
        if not isinstance(value, dict):
            raise UsageError(f"{where} is no JSON object: a manifest has one object a line")
        yield where, value


def _read_json_lines(manifest: Path, file: TextIO) -> Iterator[Row]:
    recordings: dict[str, dict[str, Any]] | None = None
    for where, value in _json_lines(manifest, file):
        if "supervisions" in value or "tracks" in value:
            yield _cut_row(manifest, where, value)
        elif "recording_id" in value:
            if recordings is None:
                recordings = _recordings(manifest)
            yield _supervision_row(manifest, where, value, recordings)
        else:
            yield _plain_row(manifest, where, value, manifest.parent)


def _read_table(manifest: Path, file: TextIO, delimiter: str) -> Iterator[Row]:
    # Common Voice does not quote: a quotation mark is a part of the sentence.
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    folder = manifest.parent
    clips = folder / "clips"
    for number, value in enumerate(csv.DictReader(file, delimiter=delimiter, quoting=quoting), 2):
        row: dict[str, Any] = {key: text for key, text in value.items() if key and text not in (None, "")}
        name = _first(row, _AUDIO)
        where = f"{manifest}, line {number}"
        inside = isinstance(name, str) and not (folder / name).exists() and (clips / name).exists()
        if _first(row, _TEXT) is None and any(column in value for column in _TEXT):
            row["text"] = ""  # an empty cell: nothing is said
        yield _plain_row(manifest, where, row, clips if inside else folder)


def _plain_row(manifest: Path, where: str, value: dict[str, Any], folder: Path) -> Row:
    audio, text = _first(value, _AUDIO), _first(value, _TEXT)
    if not isinstance(audio, str) or not audio:
        raise UsageError(f"{where} has no 'audio': a row needs 'audio' and 'text'")
    if not isinstance(text, str):
        raise UsageError(f"{where} has no 'text': a row needs 'audio' and 'text' (empty where nothing is said)")
    start = _number(value, ("offset",), where) or 0.0
    duration = _number(value, ("duration",), where)
    is_part = start > 0.0
    return Row(
        id=str(value.get("id") or (f"{audio}@{start:g}" if is_part else audio)),
        audio=str(folder / audio),
        text=text,
        duration=duration,
        speaker=_string(_first(value, _SPEAKER)),
        language=_language(_first(value, _LANGUAGE)),
        split=_string(value.get("split")),
        snr_db=_number(value, _SNR, where),
        start=start,
        end=start + duration if is_part and duration is not None else None,
    )


def _cut_row(manifest: Path, where: str, cut: dict[str, Any]) -> Row:
    if not isinstance(cut.get("recording"), dict):
        raise UsageError(
            f"{where}: only cuts of one recording can be read, not {cut.get('type', 'this kind')}: "
            "write the mixed ones with lhotse's `save_audios` first"
        )
    said = sorted(cut.get("supervisions") or [], key=lambda each: each.get("start", 0.0))
    text = " ".join(each.get("text") or "" for each in said).strip()
    return _lhotse_row(manifest, where, cut, cut["recording"], said, text)


def _supervision_row(manifest: Path, where: str, value: dict[str, Any], recordings: dict[str, dict[str, Any]]) -> Row:
    recording = recordings.get(str(value["recording_id"]))
    if recording is None:
        raise UsageError(f"{where}: the recording {value['recording_id']!r} is not in the recordings' manifest")
    return _lhotse_row(manifest, where, value, recording, [value], value.get("text") or "")


def _lhotse_row(
    manifest: Path, where: str, part: dict[str, Any], recording: dict[str, Any], said: list[dict[str, Any]], text: str
) -> Row:
    sources = recording.get("sources") or []
    if len(sources) != 1 or sources[0].get("type") != "file":
        raise UsageError(f"{where}: the recording is not one plain file: write it with lhotse's `save_audios` first")
    start, duration = _number(part, ("start",), where) or 0.0, _number(part, ("duration",), where)
    whole = _number(recording, ("duration",), where)
    is_part = start > 0.0 or (duration is not None and whole is not None and duration < whole - 0.02)
    speakers = {each.get("speaker") for each in said}
    languages = {each.get("language") for each in said}
    custom = {**(part.get("custom") or {}), **(said[0].get("custom") or {} if len(said) == 1 else {})}
    # lhotse means relative paths from where the program runs; manifests that travel, from their own folder.
    audio = Path(sources[0]["source"])
    if not audio.is_absolute() and not audio.exists():
        audio = manifest.parent / audio
    return Row(
        id=str(part.get("id") or audio),
        audio=str(audio),
        text=text,
        duration=duration,
        speaker=_string(speakers.pop()) if len(speakers) == 1 else None,
        language=_language(languages.pop()) if len(languages) == 1 else None,
        split=_string(custom.get("split")),
        snr_db=_number(custom, _SNR, where),
        start=start,
        end=start + duration if is_part and duration is not None else None,
    )


def _recordings(supervisions: Path) -> dict[str, dict[str, Any]]:
    beside = supervisions.with_name(supervisions.name.replace("supervisions", "recordings"))
    if beside == supervisions or not beside.is_file():
        raise UsageError(f"{supervisions} holds supervisions: put the recordings' manifest beside it as {beside.name}")
    with _open(beside) as file:
        return {str(value.get("id")): value for _, value in _json_lines(beside, file)}


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _string(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)


def _language(value: Any) -> str | None:
    """A code in lower case; lhotse's recipes write names (English), Common Voice regions (zh-CN)."""
    from stapes.text.tokenizers import language_code

    if value is None or value == "":
        return None
    text = str(value).strip().lower()
    try:
        return language_code(text)
    except UsageError:
        return text.partition("-")[0]


def _number(value: Mapping[str, Any], names: tuple[str, ...], where: str) -> float | None:
    found = _first(value, names)
    if found is None or found == "":
        return None
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{where}: {names[0]!r} is {found!r}: give a number")
    return number
