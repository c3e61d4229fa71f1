"""The recordings and the kept reference transcripts that accuracy is measured on.

The recordings lie in ``../shared/data`` beside the checkout and never travel with it; the reference transcripts lie
in ``references/`` beside this file, one JSON object a line, made by ``make_references.py``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16_000
WINDOW_SECONDS = 30.0
REFERENCES = Path(__file__).parent / "references"
DATA = Path(__file__).parents[3] / "shared" / "data"
ASTERISK_LANGUAGES = ("en", "es", "fr", "it", "ru")
ASTERISK_CLIPS = 60
"""Clips of each language of ``asterisk`` that are used: the first ones of its manifest."""
SPEECHOCEAN_STRIDE = 4
"""Every how many clips of ``speechocean762``'s test split one is used."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording of at most 30 seconds and what is said in it."""

    dataset: str
    audio: str
    """Path relative to the folder of the dataset."""
    text: str
    """What was said, as a person wrote it down."""
    language: str
    duration: float
    """Seconds."""

    def path(self, data: Path = DATA) -> Path:
        """Where the recording lies."""
        return data / self.dataset / self.audio


@dataclass(frozen=True, slots=True)
class Reference:
    """What a reference implementation wrote for one clip."""

    dataset: str
    audio: str
    model: str
    language: str
    text: str
    temperature: float | None = None
    """Temperature of the attempt that was kept; None where the system has no fallback."""
    seed: int | None = None
    """Seed of the samples drawn; None where nothing was drawn, so that the text holds for every seed."""


def select_clips(dataset: str, data: Path = DATA) -> list[Clip]:
    """The clips of ``librispeech``, ``asterisk`` or ``speechocean762`` that are compared, in manifest order."""
    with (data / dataset / "manifest.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if dataset == "librispeech":
        rows = [row for row in rows if row["split"] == "test" and row["duration"] <= WINDOW_SECONDS]
    elif dataset == "speechocean762":
        rows = [row for row in rows if row["split"] == "test"][::SPEECHOCEAN_STRIDE]
    elif dataset == "asterisk":
        by_language = defaultdict(list)
        for row in rows:
            if row["duration"] <= WINDOW_SECONDS:
                by_language[row["lang"]].append(row)
        rows = [row for language in ASTERISK_LANGUAGES for row in by_language[language][:ASTERISK_CLIPS]]
    else:
        raise ValueError(f"no clips are chosen from {dataset!r}: say librispeech, asterisk or speechocean762")
    return [Clip(dataset, row["audio"], row["text"], row["lang"], row["duration"]) for row in rows]


def decode(path: Path) -> np.ndarray:
    """Samples of a recording: float32, shape (samples,), 16 kHz, the mean of its channels.

    Every reference was made from exactly this signal: PyAV's decoder, then soxr's high-quality resampler.
    """
    with av.open(str(path)) as container:
        to_float = av.AudioResampler(format="fltp")
        blocks, rate = [], SAMPLE_RATE
        for frame in container.decode(audio=0):
            rate = frame.sample_rate
            blocks.extend(block.to_ndarray() for block in to_float.resample(frame))
    samples = np.concatenate(blocks, axis=1).mean(axis=0, dtype=np.float32)
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ")
    return np.ascontiguousarray(samples, dtype=np.float32)


def join_clips(clips: Sequence[Clip], path: Path, *, gap_seconds: float, data: Path = DATA) -> float:
    """Write the clips into one WAV file (float32, 16 kHz) with silence between them; returns its seconds."""
    gap = np.zeros(round(gap_seconds * SAMPLE_RATE), dtype=np.float32)
    samples = np.concatenate([part for clip in clips for part in (decode(clip.path(data)), gap)])
    soundfile.write(path, samples, SAMPLE_RATE, subtype="FLOAT")
    return len(samples) / SAMPLE_RATE


def read_references(name: str, folder: Path = REFERENCES) -> list[Reference]:
    """The kept transcripts of the set ``name``; empty where there are none yet."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [Reference(**json.loads(line)) for line in file]


def texts_of_seed(references: Sequence[Reference], seed: int) -> dict[str, str]:
    """Text of each clip under one seed; a text for which nothing was drawn holds for every seed."""
    return {r.audio: r.text for r in references if r.seed is None or r.seed == seed}


def write_references(name: str, references: list[Reference], folder: Path = REFERENCES) -> None:
    """Write the transcripts of the set ``name``, one a line, without the fields that say nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for reference in references:
        values = {field: getattr(reference, field) for field in Reference.__slots__}
        lines.append(json.dumps({k: v for k, v in values.items() if v is not None}, ensure_ascii=False) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
