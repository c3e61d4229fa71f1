"""What MLPerf's Whisper benchmark hears: windows of at most 30 s in the host's memory, float32 at 16 kHz.

Source: MLCommons inference, ``speech2text``: utterances are joined back to back as long as they fit into 30 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from stapes.audio.features import SAMPLE_RATE, WINDOW_SAMPLES
from stapes.errors import UsageError
from stapes.evaluation.corpora import Row, open_corpus
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.peers import samples
from stapes.evaluation.scoring import word_errors

_DIFFERENT = 256
"""Windows of noise that are made; half a gigabyte, beyond any processor's cache."""


@dataclass(frozen=True)
class Windows:
    """Windows to transcribe; ``texts``: what is said in each, None for noise. ``facts``: of the record."""

    pcm: Sequence[np.ndarray]
    texts: Sequence[str] | None
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of sound, in all."""
        return sum(map(len, self.pcm)) / SAMPLE_RATE

    def first(self, count: int) -> Windows:
        """So many of them; from the beginning again where there are not enough."""
        texts = None if self.texts is None else list(islice(cycle(self.texts), count))
        return Windows(list(islice(cycle(self.pcm), count)), texts, self.facts, self.notes)


def noise_windows(count: int, seed: int = 0) -> Windows:
    """Windows of 30 s of quiet noise; above 256 they come again."""
    generator = np.random.default_rng(seed)
    made = [
        generator.standard_normal(WINDOW_SAMPLES, dtype=np.float32) * np.float32(0.05)
        for _ in range(min(count, _DIFFERENT))
    ]
    facts = {"corpus": f"noise, seed {seed}", "sha256": None, "language": "en"}
    return Windows(made, None, facts).first(count)


def packed_windows(manifest: str, language: str, data: Path | None = None) -> Windows:
    """Recordings of a manifest, in its order, packed back to back. Raises UsageError, AudioError.

    Those above 30 s do not fit and are left out, with a note.
    """
    corpus = open_corpus(manifest, data=data)
    left_out: list[str] = []

    def heard() -> Iterator[tuple[np.ndarray, str]]:
        for row in corpus.rows:
            pcm = _samples(row)
            if len(pcm) > WINDOW_SAMPLES:
                left_out.append(row.id)
            else:
                yield pcm, row.text

    pcm, texts = [], []
    for window, text in pack(heard()):
        pcm.append(window)
        texts.append(text)
    if not pcm:
        raise UsageError(f"{manifest}: every recording is longer than 30 s: the recipe takes shorter ones")
    notes = ()
    if left_out:
        notes = (f"{len(left_out)} recordings longer than 30 s were left out: {', '.join(left_out[:3])} …",)
    digest = hashlib.sha256(corpus.sha256().encode())
    for window in pcm:
        digest.update(window.tobytes())
    facts = {"corpus": corpus.name, "sha256": digest.hexdigest(), "language": language}
    return Windows(pcm, texts, facts, notes)


def pack(recordings: Iterable[tuple[np.ndarray, str]]) -> Iterator[tuple[np.ndarray, str]]:
    """Join recordings of at most 30 s and their texts, in order, into windows of at most 30 s."""
    parts: list[np.ndarray] = []
    texts: list[str] = []
    for pcm, text in recordings:
        if parts and sum(map(len, parts)) + len(pcm) > WINDOW_SAMPLES:
            yield np.concatenate(parts), " ".join(texts)
            parts, texts = [], []
        parts.append(pcm)
        texts.append(text.strip())
    if parts:
        yield np.concatenate(parts), " ".join(texts)


def corpus_wer(spoken: Sequence[str] | None, written: Sequence[str], language: str) -> float | None:
    """Errors over words of all windows; None for noise, and where the extra that counts errors is not installed."""
    if spoken is None:
        return None
    errors = words = 0
    try:
        name = choose("auto", language)
        for text, found in zip(spoken, written, strict=True):
            reference = normalize(text, name)
            counts = word_errors(reference, normalize(found, name))
            errors += counts.substitutions + counts.deletions + counts.insertions
            words += len(reference.split())
    except UsageError:
        return None
    return errors / words if words else None


def _samples(row: Row) -> np.ndarray:
    pcm = samples(row.audio)
    if row.start or row.end is not None:
        end = None if row.end is None else round(row.end * SAMPLE_RATE)
        pcm = pcm[round(row.start * SAMPLE_RATE) : end]
    return np.ascontiguousarray(pcm, dtype=np.float32)
