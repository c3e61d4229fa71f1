"""The sound by which layers are judged: speech of a manifest, or what is made up where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.evaluation.corpora import Row
from stapes.evaluation.peers import samples


def made_up_sound(seconds: int = 12) -> np.ndarray:
    """Noise whose colour and loudness change: where there is no speech at hand."""
    generator = np.random.default_rng(0)
    pieces = []
    for _ in range(seconds * 5):
        time = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
        pitch, loudness = generator.uniform(90, 2500), generator.uniform(0.01, 0.3)
        pieces.append(loudness * (np.sin(2 * np.pi * pitch * time) + 0.3 * generator.standard_normal(len(time))))
    return np.concatenate(pieces).astype(np.float32)


def speech(rows: Sequence[Row]) -> Iterable[np.ndarray]:
    """The sound of rows of a manifest, read one by one."""
    for row in rows:
        end = None if row.end is None else round(row.end * SAMPLE_RATE)
        yield samples(row.audio)[round(row.start * SAMPLE_RATE) : end]
