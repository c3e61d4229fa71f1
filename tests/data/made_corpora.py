"""Small corpora of made-up speech: tones with a word for each, in any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000


def tone(seconds: float, hertz: float = 220.0, level: float = 0.1, rate: int = RATE) -> np.ndarray:
    """float32 (samples,) of a tone that swells and fades, so that no part of it equals another."""
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * hertz * time) * (0.6 + 0.4 * np.sin(2 * np.pi * 0.7 * time))).astype(np.float32)


def write(path: Path, seconds: float, hertz: float = 220.0, rate: int = RATE, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(seconds, hertz, rate=rate), rate, **options)
    return path


def simple(folder: Path, seconds: Sequence[float], **fields) -> Path:
    """A ``manifest.jsonl`` of so many recordings, with different tones and texts."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, length in enumerate(seconds):
        write(folder / f"{number}.wav", length, 200.0 + 10 * number)
        rows.append(
            {"audio": f"{number}.wav", "text": f"word {'abcdefghij'[number % 10]}", "duration": length, **fields}
        )
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def cuts(path: Path, seconds: Sequence[float], *, text: str = "word {letter}", hertz: float = 200.0) -> Path:
    """A lhotse CutSet, as ``stapes prepare`` writes it, and its recordings beside it."""
    from stapes.data.prepare import PrepareOptions, prepare

    source = path.parent / f"{path.name}-source"
    manifest = simple(source, seconds)
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        row["text"] = text.format(letter="abcdefghij"[number % 10])
        row["speaker"] = f"s{number % 3}"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare("jsonl", manifest, path.parent / f"{path.name}-prepared", PrepareOptions(jobs=1))
    (path.parent / f"{path.name}-prepared" / "train.jsonl.gz").replace(path)
    return path
