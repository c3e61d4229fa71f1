"""A row of the result: one recording, what was heard in it, or why nothing was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stapes.audio.sources import printable
from stapes.bulk.decoders import Outcome
from stapes.bulk.files import compress
from stapes.bulk.inputs import Item
from stapes.bulk.spec import Spec, digest
from stapes.bulk.store import Counts
from stapes.text.subtitles import finite
from stapes.transcript import Segment, Transcript, Word


def make_row(item: Item, spec: Spec, outcome: Outcome, transcript: Transcript | None) -> dict[str, Any]:
    """The row of a recording. What depends on when and where it ran is not in it: it is the same on every machine.

    transcript: None where there was no point in trying.
    """
    error = outcome.error or (transcript.error if transcript is not None else None)
    heard = transcript is not None and transcript.error is None and not outcome.lost
    row: dict[str, Any] = {
        "id": item.id,
        "audio": item.audio,
        "key": None if outcome.sha256 is None else key_of(item, spec, outcome.sha256),
        "sha256": outcome.sha256,
        "bytes": outcome.bytes,
        "status": "ok" if heard else "quarantined" if outcome.lost else "failed",
    }
    for name in ("start", "end", "channel"):
        if (value := getattr(item, name)) not in (None, 0.0):
            row[name] = value
    if item.text is not None:
        row["reference"] = item.text
    if item.speaker is not None:
        row["speaker"] = item.speaker
    if item.language is not None:
        row["expected_language"] = item.language
    if heard:
        assert transcript is not None
        row |= finite(transcript.to_dict())
        row["damaged"] = transcript.damaged
        row["recording"] = outcome.recording
    else:
        row |= {"kind": outcome.kind or "engine", "error": error, "duration": 0.0}
    return row


def quarantined_row(item: Item, spec: Spec, reason: str) -> dict[str, Any]:
    """The row of a recording that no worker is given any more."""
    outcome = Outcome(error=f"{printable(item.audio)} {reason}: look into it by itself", kind="worker died", lost=True)
    return make_row(item, spec, outcome, None)


def key_of(item: Item, spec: Spec, sha256: str) -> str:
    """What stands for the content, the part of it, the model and the options: equal keys mean equal texts."""
    return digest([sha256, item.start, item.end, item.channel, spec.fingerprint()])


def pack_rows(rows: Sequence[dict[str, Any]]) -> tuple[bytes, Counts]:
    """Rows as JSON lines in a zstd frame, and what they count."""
    counts = Counts()
    for row in rows:
        counts.add_row(row)
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    text = "".join(f"{line}\n" for line in lines)
    return compress(text.encode("utf-8", "backslashreplace")), counts


def to_transcript(row: dict[str, Any]) -> Transcript:
    """The transcript of a row that is ok."""
    segments = []
    for value in row["segments"]:
        known = {
            name: value[name] for name in Segment.__slots__ if name in value and name not in ("words", "alternatives")
        }
        words = value.get("words")
        segments.append(Segment(**known, words=None if words is None else [Word(**word) for word in words]))
    return Transcript(
        text=row["text"],
        language=row["language"],
        language_probability=row["language_probability"],
        duration=row["duration"],
        segments=segments,
        path=row["audio"],
        model=row["model"],
        skipped=[(start, end) for start, end in row["skipped"]],
        warnings=row["warnings"],
        damaged=row["damaged"],
    )
