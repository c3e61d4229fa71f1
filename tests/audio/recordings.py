"""Recordings made from nothing: a speech-like signal, and the means to write it as any file."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import soxr

RATE = 16_000


def signal(seconds: float = 3.0) -> np.ndarray:
    """Float32 (samples,) at 16 kHz: a gliding voice of harmonics below 3 kHz, four syllables a second."""
    time = np.arange(round(seconds * RATE)) / RATE
    pitch = 130 + 30 * np.sin(2 * np.pi * 0.7 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = sum(np.sin(k * phase) / k for k in range(1, 18))
    syllables = np.clip(np.sin(2 * np.pi * 4 * time) + 0.4, 0, None) * (1 + 0.5 * np.sin(2 * np.pi * 0.31 * time))
    return (0.12 * voice * syllables).astype(np.float32)


def resampled(speech: np.ndarray, rate: int) -> np.ndarray:
    return speech if rate == RATE else soxr.resample(speech, RATE, rate, quality="HQ")


def wav(
    data: bytes, *, rate: int = RATE, channels: int = 1, bits: int = 16, code: int = 1, size: int | None = None,
    before: bytes = b"", after: bytes = b"",
) -> bytes:  # fmt: skip
    """A RIFF WAVE file; ``size`` overrides what the data chunk claims."""
    block = channels * bits // 8
    header = struct.pack("<HHIIHH", code, channels & 0xFFFF, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    size = len(data) if size is None else size
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(header)) + header + before
    body += b"data" + struct.pack("<I", size) + data + after
    return b"RIFF" + struct.pack("<I", min(len(body) + size - len(data), 0xFFFFFFFF)) + body


def pcm16(speech: np.ndarray) -> bytes:
    """Interleaved 16-bit samples of (samples,) or (channels, samples)."""
    return (np.clip(speech.T, -1, 1) * 32767).round().astype("<i2").tobytes()


def encode(
    path: Path | io.BytesIO, speech: np.ndarray, codec: str, container: str, *, rate: int = RATE, bit_rate: int = 64000,
    options: dict[str, str] | None = None, codec_options: dict[str, str] | None = None, tracks: int = 1,
    video: bool = False, pts: Callable[[int], int] = lambda n: n,
) -> None:  # fmt: skip
    """Write ``speech``, (samples,) or (channels, samples) at 16 kHz, with PyAV. Tracks after the first are silent."""
    samples = np.atleast_2d(np.stack([resampled(c, rate) for c in np.atleast_2d(speech)])).astype(np.float32)
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[len(samples)]
    target = str(path) if isinstance(path, Path) else path
    with av.open(target, "w", format=container, options=options or {}) as output:
        picture = output.add_stream("mpeg4", rate=5) if video else None
        streams: list[Any] = []
        for _ in range(tracks):
            stream = output.add_stream(codec, rate=rate, layout=layout, options=codec_options or {})
            stream.bit_rate = bit_rate
            streams.append(stream)
        if picture is not None:
            picture.width, picture.height, picture.pix_fmt = 64, 48, "yuv420p"
            for _ in range(int(samples.shape[1] / rate * 5)):
                output.mux(picture.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
            output.mux(picture.encode())
        for begin in range(0, samples.shape[1], 960):
            for number, stream in enumerate(streams):
                piece = np.ascontiguousarray(samples[:, begin : begin + 960].T).reshape(1, -1) * np.float32(number == 0)
                frame = av.AudioFrame.from_ndarray(piece, format="flt", layout=layout)
                frame.sample_rate, frame.pts, frame.time_base = rate, pts(begin), Fraction(1, rate)
                output.mux(stream.encode(frame))
        for stream in streams:
            output.mux(stream.encode())


def encoded(speech: np.ndarray, codec: str, container: str, **how: Any) -> bytes:
    """The same as bytes. The container is written without going back where it can be."""
    buffer = io.BytesIO()
    encode(buffer, speech, codec, container, **how)
    return buffer.getvalue()


def similarity(read: np.ndarray, original: np.ndarray) -> tuple[float, int]:
    """(Correlation where they overlap best, how many samples late ``read`` is); of (samples,) each, without DC."""
    read, original = read - read.mean(), original - original.mean()
    size = 1 << (len(read) + len(original)).bit_length()
    products = np.fft.irfft(np.fft.rfft(read, size) * np.conj(np.fft.rfft(original, size)), size)
    late = int(np.argmax(products))
    late -= size if late > size // 2 else 0
    here = original[max(0, -late) : max(0, len(read) - late)]
    there = read[max(0, late) : max(0, late) + len(here)]
    here = here[: len(there)]
    return float(there @ here / max(np.linalg.norm(there) * np.linalg.norm(here), 1e-12)), late
