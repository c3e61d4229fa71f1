"""A finished job in other forms: Parquet tables, or a file of text or subtitles for each recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from stapes.bulk.files import durable, write_error
from stapes.bulk.inputs import URL
from stapes.bulk.rows import to_transcript
from stapes.bulk.store import Store
from stapes.errors import UsageError
from stapes.text.subtitles import write

Format = Literal["parquet", "txt", "srt", "vtt", "tsv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)


def export_job(out: str | Path, folder: str | Path, format: Format) -> tuple[int, int]:
    """Export the finished shards that were not exported to ``folder`` yet; (shards, files written).

    Parquet: ``shard-N.parquet`` with a row a recording, its ``segments`` as a list of structures. Otherwise a file for
    each recording that is ok, in folders as its id has them. Raises UsageError, OutputError.
    """
    store, target = Store(out), Path(folder)
    store.run()
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(target, error) from error
    export = _parquet if format == "parquet" else _texts(format)
    marks = target / f".exported-{format}"
    known: dict[str, str] = json.loads(marks.read_text(encoding="utf-8")) if marks.exists() else {}
    shards = files = 0
    for shard in store.finished():
        sha256 = store.read_done(shard)["sha256"]
        if known.get(str(shard)) == sha256:
            continue
        files += export(target, shard, store.read_rows(shard))
        shards += 1
        known[str(shard)] = sha256
        durable(marks, json.dumps(known).encode())
    return shards, files


def _texts(format: Format) -> Callable[[Path, int, list[dict[str, Any]]], int]:
    def export(target: Path, shard: int, rows: list[dict[str, Any]]) -> int:
        heard = [row for row in rows if row["status"] == "ok"]
        for row in heard:
            write(to_transcript(row), target / f"{_inside(row['id'])}.{format}", format)  # pyright: ignore[reportArgumentType]
        return len(heard)

    return export


def _inside(id: str) -> Path:
    """The path of a recording's files in a folder: its id, which may be an absolute path, a URL, or go upwards."""
    name = URL.sub("", id)
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return Path(*(part[:200] for part in parts)) if parts else Path("recording")


def _parquet(target: Path, shard: int, rows: list[dict[str, Any]]) -> int:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("-f parquet needs pyarrow: pip install 'stapes[parquet]'") from None
    import io

    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_schema(pyarrow)), content, compression="zstd")
    durable(target / f"shard-{shard:06d}.parquet", content.getvalue())
    return 1


def _schema(arrow: Any) -> Any:
    """The same for every shard, whatever is in it, so that they are one table."""
    text, number, whole, yes = arrow.string(), arrow.float64(), arrow.int64(), arrow.bool_()
    word = arrow.struct([("word", text), ("start", number), ("end", number), ("probability", number)])
    segment = arrow.struct(
        [
            ("id", whole),
            ("seek", whole),
            ("start", number),
            ("end", number),
            ("text", text),
            ("tokens", arrow.list_(whole)),
            ("temperature", number),
            ("avg_logprob", number),
            ("compression_ratio", number),
            ("no_speech_prob", number),
            ("words", arrow.list_(word)),
            ("speaker", text),
        ]
    )
    columns = [(name, text) for name in ("id", "audio", "key", "sha256", "status", "kind", "error")]
    columns += [("bytes", whole), ("start", number), ("end", number), ("channel", whole)]
    columns += [(name, text) for name in ("reference", "speaker", "expected_language", "text", "language", "model")]
    columns += [("language_probability", number), ("duration", number), ("damaged", yes)]
    columns += [("segments", arrow.list_(segment)), ("skipped", arrow.list_(arrow.list_(number)))]
    return arrow.schema([*columns, ("warnings", arrow.list_(text))])
