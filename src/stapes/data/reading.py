"""The samples of one utterance: libsndfile where it reads what is asked for directly, FFmpeg for everything else."""

from __future__ import annotations

import numpy as np

from stapes.audio.decode import SAMPLE_RATE, read_audio
from stapes.errors import AudioError

_DIRECT = (".wav", ".flac", ".sph")  # seekable to the sample, and the same from either library
_SHORT = 0.9  # of what is promised: a file with less is truncated


def read_samples(audio: str, start: float = 0.0, end: float | None = None, channel: int | None = None) -> np.ndarray:
    """float32 (samples,) at 16 kHz, from ``start`` to ``end`` (seconds).

    channel: from 0; None is the mean of all. Raises AudioError where it cannot be read.
    """
    if audio.lower().endswith(_DIRECT) and (samples := _read_direct(audio, start, end, channel)) is not None:
        return samples
    channels = "mix" if channel is None else str(channel + 1)
    return read_audio(audio, start=start, end=end, channels=channels)[0]


def read_promised(audio: str, start: float, duration: float, channel: int | None) -> np.ndarray:
    """``read_samples`` of a manifest's utterance. Raises AudioError also where much of ``duration`` is not there."""
    samples = read_samples(audio, start, start + duration, channel)
    if len(samples) < _SHORT * duration * SAMPLE_RATE:
        raise AudioError(
            f"{audio} has {len(samples) / SAMPLE_RATE:.2f} s of the {duration:.2f} s that the manifest promises: fetch "
            "it again, or prepare the corpus again"
        )
    return samples


def _read_direct(audio: str, start: float, end: float | None, channel: int | None) -> np.ndarray | None:
    """None where this is not for libsndfile: another rate, several channels, no such library, or an error of it (the
    other way finds better words)."""
    try:
        import soundfile

        with soundfile.SoundFile(audio) as file:
            if file.samplerate != SAMPLE_RATE or file.channels != 1 or channel not in (None, 0):
                return None
            first = round(start * SAMPLE_RATE)
            last = file.frames if end is None else min(file.frames, round(end * SAMPLE_RATE))
            if not 0 <= first < last:
                return None
            file.seek(first)
            samples = file.read(last - first, dtype="float32")
    except (ImportError, OSError, RuntimeError):
        return None
    return samples if np.isfinite(samples).all() else None
