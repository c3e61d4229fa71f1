"""A call that is watched: its segments as they settle, and its end when somebody gives it up."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, fake_recognizer, living_workers, tone

from stapes.errors import CancelledError, StapesError
from stapes.progress import Cancellation
from stapes.recognizer import Recognizer
from stapes.transcript import Segment


def talk(windows: int) -> np.ndarray:
    """So many windows, each of one level, with silence between them."""
    parts = [np.concatenate([tone(25, 0.1 * (number + 1)), np.zeros(32_000, np.float32)]) for number in range(windows)]
    return np.concatenate(parts)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(rows=1)


@pytest.fixture
def recognizer(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> Recognizer:
    return fake_recognizer(monkeypatch, engine)


def ask(recognizer: Recognizer, audio: np.ndarray, **changes: Any) -> Any:
    return recognizer.transcribe(audio, sample_rate=16_000, **{"language": "en"} | changes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"word_timestamps": True},
        {"channels": "separate"},
        {"clip_timestamps": "20,80"},
        {"vad": False},
        {"condition_on_previous_text": True},
    ],
)
def test_segments_are_those_of_the_transcript_each_once(recognizer: Recognizer, options: dict[str, Any]) -> None:
    told: list[Segment] = []
    audio = talk(4)
    if "channels" in options:
        audio = np.stack([audio, np.roll(audio, 27 * 16_000)])
    transcript = ask(recognizer, audio, on_segments=told.extend, **options)
    assert len(told) > 2
    assert [each.to_dict() for each in told] == [each.to_dict() for each in transcript.segments]


def test_segments_come_while_the_rest_is_at_work(recognizer: Recognizer, engine: FakeEngine) -> None:
    steps: list[int] = []
    ask(recognizer, talk(4), on_segments=lambda segments: steps.append(len(engine.log)))
    assert len(steps) == 4
    assert steps[0] < len(engine.log) / 2


def test_nothing_is_told_of_silence(recognizer: Recognizer) -> None:
    told: list[Segment] = []
    assert ask(recognizer, np.zeros(160_000, np.float32), on_segments=told.extend).segments == told == []


def test_a_call_that_is_cancelled_ends_at_the_next_point(recognizer: Recognizer, engine: FakeEngine) -> None:
    cancellation = Cancellation()
    with pytest.raises(CancelledError, match="cancelled"):
        ask(recognizer, talk(8), on_segments=lambda segments: cancellation.cancel(), cancellation=cancellation)
    assert not engine.active
    assert sum(entry[0] == "admit" for entry in engine.log) <= 2
    assert not living_workers()
    with pytest.raises(CancelledError):  # it stays so
        ask(recognizer, talk(1), cancellation=cancellation)
    assert ask(recognizer, talk(1)).text


def test_many_recordings_are_given_up_together(recognizer: Recognizer, engine: FakeEngine) -> None:
    cancellation = Cancellation()
    transcripts = recognizer.transcribe_many(
        repeat(tone(5)), sample_rate=16_000, language="en", cancellation=cancellation
    )
    next(transcripts)
    cancellation.cancel()
    with pytest.raises(CancelledError):
        list(transcripts)
    assert not engine.active


def test_a_listener_that_fails_ends_its_own_call_alone(recognizer: Recognizer) -> None:
    def broken(segments: list[Segment]) -> None:
        raise RuntimeError("the listener broke")

    with pytest.raises(RuntimeError, match="the listener broke"):
        ask(recognizer, talk(3), on_segments=broken)
    assert ask(recognizer, talk(3)).text


def test_acts_are_called_inside_their_block_alone() -> None:
    cancellation = Cancellation()
    called: list[str] = []
    with cancellation.calling(lambda: called.append("over")):
        pass
    with cancellation.calling(lambda: called.append("during")):
        cancellation.cancel()
    with cancellation.calling(lambda: called.append("late")):
        assert called == ["during", "late"]
    assert cancellation.is_cancelled
    assert issubclass(CancelledError, StapesError)
