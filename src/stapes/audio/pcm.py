"""Sound as it comes over a line: bytes of 16-bit samples or of G.711, at any rate, in pieces cut anywhere."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import numpy as np
import soxr

from stapes.audio.decode import SAMPLE_RATE
from stapes.errors import UsageError

PcmFormat = Literal["pcm16", "g711_ulaw", "g711_alaw"]
"""16-bit little-endian samples; µ-law and A-law of ITU-T G.711, one byte a sample."""

_LOWEST, _HIGHEST = 4_000, 384_000


@cache
def _ulaw() -> np.ndarray:
    """What each byte of µ-law says, full scale 1: ITU-T G.711 table 2a, on its 16-bit scale."""
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    magnitude = ((mantissa << 3) + 132 << exponent) - 132
    return (np.where(code & 128, -magnitude, magnitude) / 32768).astype(np.float32)


@cache
def _alaw() -> np.ndarray:
    """What each byte of A-law says, full scale 1: ITU-T G.711 table 1a, on its 16-bit scale."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    low = (mantissa << 4) + 8
    magnitude = np.where(exponent > 0, low + 256 << np.maximum(exponent - 1, 0), low)
    return (np.where(code & 128, magnitude, -magnitude) / 32768).astype(np.float32)


class StreamResampler:
    """Samples of one channel from any rate to 16 kHz, in pieces: what comes out does not depend on how they are cut.

    The filter (soxr, high quality) runs on over the seams; `finish` gives what it still holds. 16 kHz passes as it is.
    """

    def __init__(self, rate: int) -> None:
        if not _LOWEST <= rate <= _HIGHEST:
            raise UsageError(f"the sample rate is {rate} Hz: give {_LOWEST} to {_HIGHEST}")
        self.rate = rate
        self._stream = (
            None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
        )

    def feed(self, pcm: np.ndarray) -> np.ndarray:
        """The samples that have become certain."""
        pcm = np.ascontiguousarray(pcm, dtype=np.float32)
        return pcm if self._stream is None or not len(pcm) else self._stream.resample_chunk(pcm)

    def finish(self) -> np.ndarray:
        """The last samples; nothing may follow."""
        nothing = np.zeros(0, np.float32)
        return nothing if self._stream is None else self._stream.resample_chunk(nothing, last=True)


class PcmDecoder:
    """Bytes of one channel to float32 at 16 kHz; a sample may be cut between two pieces."""

    def __init__(self, format: PcmFormat = "pcm16", rate: int = SAMPLE_RATE) -> None:
        if format not in get_args(PcmFormat):
            raise UsageError(f"the audio format is {format!r}: say one of {', '.join(get_args(PcmFormat))}")
        self.format = format
        self._resampler = StreamResampler(rate)
        self._odd = b""

    def feed(self, data: bytes) -> np.ndarray:
        """The samples of the next bytes."""
        if self.format != "pcm16":
            table = _ulaw() if self.format == "g711_ulaw" else _alaw()
            return self._resampler.feed(table[np.frombuffer(data, dtype=np.uint8)])
        data = self._odd + data
        whole = len(data) & ~1
        self._odd = data[whole:]
        return self._resampler.feed(np.frombuffer(data[:whole], dtype="<i2").astype(np.float32) / 32768)

    def finish(self) -> np.ndarray:
        """The last samples; nothing may follow."""
        return self._resampler.finish()
