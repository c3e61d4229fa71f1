"""Recordings small enough to live inside a report: MP3, 16 kHz, mono, 24 kbit/s, as data URIs."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.audio.stream import AudioStream as EncodedStream
from av.error import FFmpegError

from stapes.audio.decode import SAMPLE_RATE, open_audio
from stapes.errors import StapesError

MAX_SECONDS = 30.0
"""Most seconds of one recording; the rest is left out."""

_BIT_RATE = 24_000
_BLOCK = 16_000


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording inside a report, or the reason why it is not."""

    uri: str | None
    note: str
    """Why there is no sound, or that it was cut; empty where all of it is there."""


class Recordings:
    """Finds and re-encodes the recordings of a manifest until ``max_bytes`` of encoded sound are used up.

    MP3 because every browser plays it; at 24 kbit/s a second of speech takes 3 kB. Speech stays clear enough to
    judge a transcript by.
    """

    def __init__(self, folders: list[Path], max_bytes: int) -> None:
        self._folders = folders
        self._left = max_bytes

    def clip(self, audio: str) -> Clip:
        """The recording that a manifest names ``audio``: as it is, or relative to one of the folders."""
        if self._left <= 0:
            return Clip(None, "left out to keep the report small")
        path = self._find(audio)
        if path is None:
            return Clip(None, "the recording is not on this machine")
        try:
            content, cut = encode(path)
        except (StapesError, OSError, ValueError, FFmpegError):
            return Clip(None, "the recording cannot be read")
        if not content:
            return Clip(None, "the recording is empty")
        if len(content) > self._left:
            self._left = 0
            return Clip(None, "left out to keep the report small")
        self._left -= len(content)
        uri = "data:audio/mpeg;base64," + base64.b64encode(content).decode("ascii")
        return Clip(uri, f"the first {MAX_SECONDS:.0f} s" if cut else "")

    def _find(self, audio: str) -> Path | None:
        """Only files that exist: never standard input, a device or an address."""
        if not audio or "\0" in audio:
            return None
        for candidate in (Path(audio), *(folder / audio for folder in self._folders)):
            try:
                if candidate.is_file():
                    return candidate
            except OSError:
                continue
        return None


def encode(path: Path) -> tuple[bytes, bool]:
    """The first thirty seconds of a recording as MP3, and whether something came after them.

    Raises:
        AudioError: it cannot be read as audio.
    """
    output = io.BytesIO()
    limit = round(MAX_SECONDS * SAMPLE_RATE)
    written, cut = 0, False
    with open_audio(path) as recording, av.open(output, "w", format="mp3") as container:
        stream = container.add_stream("libmp3lame", rate=SAMPLE_RATE)
        assert isinstance(stream, EncodedStream)
        stream.bit_rate = _BIT_RATE
        stream.layout = "mono"
        stream.format = "fltp"
        for chunk in recording:
            cut = written + chunk.shape[1] > limit
            samples = np.ascontiguousarray(chunk[:1, : limit - written], np.float32)
            for start in range(0, samples.shape[1], _BLOCK):
                frame = av.AudioFrame.from_ndarray(samples[:, start : start + _BLOCK], format="fltp", layout="mono")
                frame.sample_rate = SAMPLE_RATE
                frame.time_base = Fraction(1, SAMPLE_RATE)
                frame.pts = written + start
                for packet in stream.encode(frame):
                    container.mux(packet)
            written += samples.shape[1]
            if cut:
                break
        for packet in stream.encode(None):
            container.mux(packet)
    return (output.getvalue() if written else b""), cut
