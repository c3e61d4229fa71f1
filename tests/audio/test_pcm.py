"""Bytes of a line to samples: no piece of any size changes what comes out."""

from __future__ import annotations

import io
from itertools import pairwise

import av
import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.audio.pcm import PcmDecoder, StreamResampler
from stapes.errors import UsageError

CUTS = st.lists(st.integers(0, 4000), max_size=8)


def in_pieces(data, cuts):
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


def speechlike(count: int, rate: int) -> np.ndarray:
    t = np.arange(count) / rate
    return (0.4 * np.sin(2 * np.pi * 220 * t) + 0.2 * np.sin(2 * np.pi * (500 + 400 * t) * t)).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(cuts=CUTS, rate=st.sampled_from([8_000, 24_000, 44_100, 48_000, 16_000]))
def test_seams_are_not_heard(cuts, rate):
    pcm = speechlike(4000, rate)
    whole = StreamResampler(rate)
    expected = np.concatenate([whole.feed(pcm), whole.finish()])
    stream = StreamResampler(rate)
    got = np.concatenate([*(stream.feed(piece) for piece in in_pieces(pcm, cuts)), stream.finish()])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rate", [8_000, 24_000])
def test_resampled_stream_is_the_recording_resampled(rate):
    pcm = speechlike(2 * rate, rate)
    stream = StreamResampler(rate)
    got = np.concatenate([*(stream.feed(piece) for piece in in_pieces(pcm, range(0, 2 * rate, 237))), stream.finish()])
    expected = soxr.resample(pcm, rate, 16_000)
    assert abs(len(got) - 32_000) <= 1
    np.testing.assert_allclose(got[:31_000], expected[:31_000], atol=2e-4)


@settings(max_examples=30, deadline=None)
@given(cuts=CUTS)
def test_a_sample_may_be_cut_in_two(cuts):
    data = (speechlike(1500, 24_000) * 32767).astype("<i2").tobytes()
    whole = PcmDecoder("pcm16", 24_000)
    expected = np.concatenate([whole.feed(data), whole.finish()])
    decoder = PcmDecoder("pcm16", 24_000)
    got = np.concatenate([*(decoder.feed(piece) for piece in in_pieces(data, cuts)), decoder.finish()])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("format", "codec"), [("g711_ulaw", "pcm_mulaw"), ("g711_alaw", "pcm_alaw")])
def test_every_byte_of_g711_is_what_ffmpeg_says(format, codec):
    data = bytes(range(256))
    wave = wave_of(data, codec)
    with av.open(io.BytesIO(wave)) as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    expected = np.concatenate(frames).astype(np.float32) / 32768
    np.testing.assert_array_equal(PcmDecoder(format, 16_000).feed(data), expected)


def wave_of(data: bytes, codec: str) -> bytes:
    tag = {"pcm_mulaw": 7, "pcm_alaw": 6}[codec]
    rate = 16_000
    fmt = b"".join(n.to_bytes(size, "little") for n, size in ((tag, 2), (1, 2), (rate, 4), (rate, 4), (1, 2), (8, 2)))
    body = b"WAVEfmt " + len(fmt).to_bytes(4, "little") + fmt + b"data" + len(data).to_bytes(4, "little") + data
    return b"RIFF" + len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(("format", "rate"), [("opus", 16_000), ("pcm16", 0), ("pcm16", 10**9)])
def test_what_cannot_be_decoded_is_said(format, rate):
    with pytest.raises(UsageError):
        PcmDecoder(format, rate)
