"""The page's modules by themselves, run in headless Chromium: formats, word times, resampling, waveforms."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
import soundfile
from av.audio.stream import AudioStream
from browser import Browser, Page
from fake_server import FakeServer

from stapes.text.subtitles import render
from stapes.transcript import Segment, Transcript, Word

RATE = 16_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    server = FakeServer()
    page = browser.page(server.url)
    yield page
    problems = page.problems
    page.close()
    browser.close()
    server.close()
    assert not problems


def call(page: Page, module: str, name: str, *arguments: Any) -> Any:
    return page.run(f"import('/{module}').then((m) => m.{name}(...{json.dumps(arguments)}))")


TRANSCRIPTS = [
    Transcript(
        language="en",
        duration=5.0,
        segments=[Segment(0, 0, 0.0, 1.23456, " Hello there."), Segment(1, 0, 1.5, 4.0, " ")],
    ),
    Transcript(
        segments=[
            Segment(0, 0, 3599.9996, 7322.0005, " a & b <i> --> c\n\nd", speaker="Speaker <1>"),
            Segment(
                1, 0, 9.0, 8.0, "東京です。", words=[Word("東京", 8.9985, 9.5, 0.5), Word("です。", 9.5, 9.4, 0.1)]
            ),
        ]
    ),
    Transcript(),
]


@pytest.mark.parametrize("transcript", TRANSCRIPTS)
@pytest.mark.parametrize("format", ["txt", "srt", "vtt"])
def test_downloads_are_what_the_command_line_writes(page: Page, transcript: Transcript, format: Any) -> None:
    content = page.run(
        f"import('/formats.js').then((m) => m.FORMATS.{format}.render({json.dumps(transcript.to_dict())}))"
    )
    assert content == render(Transcript(segments=[_as_json(each) for each in transcript.segments]), format)


def _as_json(segment: Segment) -> Segment:
    """With the times that JSON has: whole milliseconds."""
    values = segment.to_dict()
    words = [Word(**word) for word in values.pop("words", [])]
    return Segment(**values, words=words or None)


def test_json_keeps_everything_and_the_edited_text(page: Page) -> None:
    transcript = TRANSCRIPTS[0].to_dict() | {"text": "before the edit"}
    written = json.loads(
        page.run(f"import('/formats.js').then((m) => m.FORMATS.json.render({json.dumps(transcript)}))")
    )
    assert written == transcript | {"text": " Hello there. "}


WORDS = [
    {"word": f" {word}", "start": 1.0 + 0.5 * i, "end": 1.4 + 0.5 * i, "probability": 0.9}
    for i, word in enumerate(["the", "cat", "sat", "on", "the", "mat"])
]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (" the cat sat on the mat", 6),
        (" the big black cat sat on the mat", 6),
        (" the cat sat", 3),
        (" cat sat on the mat", 5),
        (" the dog lay on the mat", 4),
        (" nothing of it", 0),
        (" the the the the the the the the mat", 3),
        ("", 0),
    ],
)
def test_words_that_an_edit_keeps_keep_their_times(page: Page, text: str, kept: int) -> None:
    words = call(page, "words.js", "retime", WORDS, text, {"start": 1.0, "end": 4.0})
    assert "".join(word["word"] for word in words) == text
    known = [word for word in words if "probability" in word]
    assert len(known) == kept
    assert all(word in WORDS for word in known)
    times = [time for word in words for time in (word["start"], word["end"])]
    assert all(1.0 <= time <= 4.0 for time in times)
    assert [word["start"] for word in words] == sorted(word["start"] for word in words)


def test_word_at_a_time(page: Page) -> None:
    found = page.run(
        f"import('/words.js').then((m) => [0, 1, 1.45, 3.6, 99].map((t) => m.wordAt({json.dumps(WORDS)}, t)))"
    )
    assert found == [-1, 0, 0, 5, 5]


RESAMPLE = """
import('/resampler.js').then(({ Resampler }) => {
  const tone = Float32Array.from({ length: %(n)d }, (_, i) => Math.sin(2 * Math.PI * %(hz)d * i / %(rate)d));
  const whole = new Resampler(%(rate)d, 24000).feed(tone);
  const pieces = new Resampler(%(rate)d, 24000);
  const out = [];
  for (let at = 0, size = 1; at < tone.length; at += size, size = 1 + (size * 7) %% 301) {
    out.push(...pieces.feed(tone.subarray(at, at + size)));
  }
  return { whole, same: whole.length === out.length && whole.every((value, i) => Math.abs(value - out[i]) < 1e-6) };
})
"""


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000, 96_000])
def test_resampling_has_no_seams_and_no_aliases(page: Page, rate: int) -> None:
    heard = page.run(RESAMPLE % {"n": rate // 2, "hz": 3000, "rate": rate})
    assert heard["same"]
    samples = np.array(heard["whole"])
    assert abs(len(samples) - 12_000) <= 30  # less half the filter at the end
    times = np.arange(200, len(samples) - 200)
    assert np.abs(samples[times] - np.sin(2 * np.pi * 3000 * times / 24_000)).max() < 0.01
    if rate > 24_000:
        above = np.array(page.run(RESAMPLE % {"n": rate // 2, "hz": 15_000, "rate": rate})["whole"])
        assert np.abs(above[200:-200]).max() < 0.001


PEAKS = """
import('/peaks.js').then(async ({ readPeaks }) => {
  const file = document.querySelector('#files').files[0];
  const values = [];
  const { signal } = new AbortController();
  const whole = await readPeaks(file, { signal, onPeaks: (peaks) => values.push(...peaks) });
  return { whole, values };
})
"""


def read_peaks(page: Page, file: Path) -> np.ndarray:
    # Without the listener that would transcribe it.
    page.run("document.querySelector('#files').replaceWith(document.querySelector('#files').cloneNode())")
    page.choose_files("#files", file)
    result = page.run(PEAKS)
    assert result["whole"]
    return np.array(result["values"])


def bursts(seconds: int, channels: int = 1) -> np.ndarray:
    """Noise, loud for a fifth of a second at every second."""
    rng = np.random.default_rng(0)
    loud = (np.arange(seconds * RATE) % RATE) < RATE // 5
    return (rng.uniform(-1, 1, (channels, seconds * RATE)) * np.where(loud, 0.8, 0.05)).astype(np.float32)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT"])
def test_peaks_of_wav_are_the_loudest_samples(page: Page, tmp_path: Path, subtype: str) -> None:
    samples = bursts(40, 2)  # more than one piece of the file
    soundfile.write(tmp_path / "a.wav", samples.T, RATE, subtype=subtype)
    expected = np.abs(samples).max(0).reshape(-1, RATE // 100).max(1) * 255
    peaks = read_peaks(page, tmp_path / "a.wav")
    assert len(peaks) == 4000
    assert np.abs(peaks - expected).max() <= 3  # a step of 8 bits


@pytest.mark.parametrize(
    ("name", "codec", "bit_rate", "rate"),
    [
        ("a.mp3", "libmp3lame", 256_000, 44_100),
        ("a.ogg", "libopus", 256_000, 48_000),
        ("a.webm", "libopus", 256_000, 48_000),
        ("a.flac", "flac", 0, 48_000),
        ("a.m4a", "aac", 256_000, 44_100),
    ],
)
def test_peaks_of_long_files_are_read_in_slices(
    page: Page, tmp_path: Path, name: str, codec: str, bit_rate: int, rate: int
) -> None:
    """Bursts stay where they are although the file is decoded slice by slice."""
    seconds = 45
    with av.open(tmp_path / name, "w") as file:
        stream = cast(AudioStream, file.add_stream(codec, rate=rate))
        stream.layout = "mono"
        stream.bit_rate = bit_rate
        resampler = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or 4096)
        frame = av.AudioFrame.from_ndarray((bursts(seconds) * 32767).astype(np.int16), "s16", "mono")
        frame.sample_rate = RATE
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(piece))
        file.mux(stream.encode())
    assert (tmp_path / name).stat().st_size > 1.5 * 512 * 1024
    peaks = read_peaks(page, tmp_path / name)
    assert abs(len(peaks) - 100 * seconds) < 100
    loud = peaks > 64
    onsets = np.flatnonzero(loud[1:] & ~loud[:-1] & (np.arange(1, len(loud)) > 20)) / 100
    onsets = onsets[np.diff(onsets, prepend=-1) > 0.5]
    expected = np.arange(1, seconds)
    assert len(onsets) == len(expected)
    assert np.abs(onsets - expected).max() < 0.2


def test_recordings_are_wav(page: Page) -> None:
    encoded = page.run("""import('/wav.js').then(async ({ wavFile }) => {
      const file = wavFile([new Int16Array([1, -2]), new Blob([new Int16Array([3])])], 24000);
      return btoa(String.fromCharCode(...new Uint8Array(await file.arrayBuffer())));
    })""")
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(encoded)), dtype="int16")
    assert rate == 24_000
    assert samples.tolist() == [1, -2, 3]
