"""Live sessions: what is said is told, once, in order, whatever the chunks, the engine and the neighbours do."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import LANGUAGES, FakeEngine, fake_recognizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_speech import RATE, WORD, LevelDetector, SpeechEngine, check_order, pause, said, say, understand

from ctc_models import babble, load, save
from stapes.errors import UsageError
from stapes.inference.live_events import EventLog, event_to_dict
from stapes.inference.live_stream import LiveStream
from stapes.inference.live_voices import Heard
from stapes.inference.streaming import (
    Committed,
    Failed,
    Final,
    Partial,
    SpeechStarted,
    SpeechStopped,
    TurnOptions,
    _Windows,
)
from stapes.recognizer import Recognizer
from stapes.transcript import Word

SPEECH = np.concatenate(
    [pause(0.7), say([11, 12, 13, 14, 15]), pause(0.9), say([21, 22]), pause(0.25), say([23]), pause(1.1), say([31])]
)
WORDS = [11, 12, 13, 14, 15, 21, 22, 23, 31]


@pytest.fixture
def open_recognizer(monkeypatch: pytest.MonkeyPatch):
    opened: list[Recognizer] = []

    def make(engine: FakeEngine | None = None) -> Recognizer:
        recognizer = fake_recognizer(monkeypatch, engine or SpeechEngine())
        monkeypatch.setattr("stapes.recognizer.VoiceActivityDetector", lambda **_: LevelDetector())
        opened.append(recognizer)
        return recognizer

    yield make
    for recognizer in opened:
        recognizer.close()


def listen(recognizer: Recognizer, pcm: np.ndarray, size: int = 1600, wait: float = 0.0, **options: Any) -> list[Any]:
    session = recognizer.stream(language="en", **options)
    events = []
    for first in range(0, len(pcm), size):
        events += session.feed(pcm[first : first + size])
        time.sleep(wait)
    return events + session.finish(timeout=60)


def test_all_that_is_said_is_told_once_and_in_order(open_recognizer):
    events = listen(open_recognizer(), SPEECH, wait=0.01)
    check_order(events)
    assert said(events) == WORDS
    finals = [event for event in events if isinstance(event, Final)]
    assert [event.text for event in finals] == [" 11 12 13 14 15", " 21 22 23", " 31"]
    assert [type(event) for event in events if isinstance(event, SpeechStarted | SpeechStopped)] == [
        SpeechStarted,
        SpeechStopped,
    ] * 3
    for final in finals:
        assert final.segment is not None
        assert final.segment.words is not None
        assert "".join(word.word for word in final.segment.words) == final.text
        starts = [word.start for word in final.segment.words]
        assert starts == sorted(starts)
    # Times are the session's: the first turn begins 0.3 s of padding before its speech, at a frame of 32 ms.
    started = [event.time for event in events if isinstance(event, SpeechStarted)]
    assert started[0] == pytest.approx(0.7 - 0.3, abs=0.04)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=6))
def test_the_size_of_chunks_changes_nothing(open_recognizer, sizes):
    recognizer = open_recognizer()
    expected = [event for event in listen(recognizer, SPEECH, 512) if isinstance(event, Final)]
    session = recognizer.stream(language="en")
    events, first, number = [], 0, 0
    while first < len(SPEECH):
        size = sizes[number % len(sizes)] if number < 60 else 30_000
        events += session.feed(SPEECH[first : first + size])
        first, number = first + size, number + 1
    events += session.finish(timeout=60)
    check_order(events)
    got = [event for event in events if isinstance(event, Final)]
    assert [event_to_dict(event) for event in got] == [event_to_dict(event) for event in expected]
    recognizer.close()


def until_committed(session: Any, count: int) -> tuple[list[Any], list[str]]:
    """Speak, without a pause and no longer than a part may be, until so many words stand: events and words.

    On a machine that is busy hypotheses are fewer, and words stand later.
    """
    events: list[Any] = []
    speech, committed = say(range(101, 160)), []
    for first in range(0, len(speech), 1600):
        events += session.feed(speech[first : first + 1600])
        time.sleep(0.02)
        committed = "".join(event.text for event in events if isinstance(event, Committed)).split()
        if len(committed) >= count:
            break
    assert len(committed) >= count
    return events, committed


def test_words_come_while_somebody_speaks(open_recognizer):
    """WhisperLive #270: captions that are written anew all the time cannot be read. What is committed stays."""
    recognizer = open_recognizer()
    session = recognizer.stream(language="en")
    events, committed = until_committed(session, 6)
    assert committed == [str(n) for n in range(101, 101 + len(committed))]
    assert any(isinstance(event, Partial) for event in events)
    assert not any(isinstance(event, Final) for event in events)
    session.close()


@pytest.mark.parametrize("behind", [0.0, 0.1, 0.3, 0.6])
def test_no_last_word_is_lost_where_the_sound_ends_in_it(open_recognizer, behind):
    """pipecat #5621: without silence behind it, the last words were lost; transcribe.cpp #71: or others, with some.

    teamclu #1470: or as they were quiet.
    """
    words = [700, 8, 900, 2, 1]
    events = listen(open_recognizer(), np.concatenate([pause(0.3), say(words), pause(behind)]), size=777)
    assert said(events) == words
    assert isinstance(events[-1], Final)


def test_speech_without_a_pause_is_parted_and_stays_short(open_recognizer):
    engine = SpeechEngine()
    numbers = [100 + i % 800 for i in range(250)]  # 80 s
    events = listen(open_recognizer(engine), say(numbers), size=8000)
    check_order(events)
    assert max(engine.windows) <= 25
    finals = [event for event in events if isinstance(event, Final)]
    assert len(finals) >= 3
    assert [event.ends_turn for event in finals] == [False] * (len(finals) - 1) + [True]
    whole = [n for n in said(events) if n < 950]
    assert len(whole) >= 250 - 2 * len(finals)  # a word that is cut where a part ends may be misheard
    assert whole == [n for n in numbers if n in set(whole)][: len(whole)]


def test_the_prompt_is_what_was_said_last(open_recognizer):
    """whisper_streaming #102: what was said before a long pause was said again after it."""
    prompts = []

    def noting(pcm: np.ndarray, request: Any) -> Any:
        from live_speech import script

        prompts.append(request.prompt)
        return script(pcm, request)

    near = np.concatenate([say([5, 6]), pause(3), say([7, 8])])
    listen(open_recognizer(SpeechEngine(script=noting)), near)
    last = prompts[-1]
    assert list(last[1 : last.index(1001)]) == [5, 6]
    far = np.concatenate([say([5, 6]), pause(12), say([7, 8])])
    prompts.clear()
    listen(open_recognizer(SpeechEngine(script=noting)), far)
    assert prompts[-1][0] == 1001  # what was said long before is of no use


def test_a_short_turn_is_heard_with_what_was_said_before_it(open_recognizer):
    """Its words alone are told, each once, though the model writes the others too; a long turn needs none."""
    heard = []

    def noting(pcm: np.ndarray, request: Any) -> Any:
        from live_speech import script

        heard.append((understand(pcm), request.prompt))
        return script(pcm, request)

    long = list(range(101, 131))
    turns = [[11, 12, 13], [21], [21, 22], long, [31, 31]]
    speech = np.concatenate([np.concatenate([say(turn), pause(0.8)]) for turn in turns])
    events = listen(open_recognizer(SpeechEngine(script=noting)), speech, wait=0.005)
    check_order(events)
    assert said(events) == [word for turn in turns for word in turn]
    assert [21] not in [words for words, _ in heard]
    words, prompt = heard[-1]
    before = words.index(31)
    assert words[before:] == [31, 31]
    assert words[:before] == long[-before:]
    assert 4 <= before * WORD <= 8.5
    told = list(prompt[1 : prompt.index(1001)])
    assert told[-1] == long[-before - 1]  # what is heard again is not told too
    segments: list[Any] = [event.segment for event in events if isinstance(event, Final)]
    assert all(segment.start == segment.words[0].start for segment in segments)
    starts = [word.start for segment in segments for word in segment.words]
    assert starts == sorted(starts)


def test_a_turn_of_which_nothing_is_written_is_heard_by_itself(open_recognizer):
    """Models at times write the first sentence of a window alone."""

    def lazy(pcm: np.ndarray, request: Any) -> Any:
        from live_speech import script

        words = understand(pcm)
        first = pcm[: pcm.nonzero()[0][0] + round(WORD * RATE) * len(words[:2])] if words else pcm
        return script(first, request)

    events = listen(open_recognizer(SpeechEngine(script=lazy)), np.concatenate([say([1, 2]), pause(0.8), say([3, 4])]))
    check_order(events)
    assert said(events) == [1, 2, 3, 4]


def test_many_sessions_share_batches(open_recognizer):
    """WhisperLive PR #36: four clients were the most."""
    engine = SpeechEngine(rows=32, encoder_batch=8)
    recognizer = open_recognizer(engine)
    sessions = [recognizer.stream(language="en") for _ in range(12)]
    speeches = [np.concatenate([say([100 + i, 200 + i, 300 + i]), pause(0.6)]) for i in range(12)]
    events: list[list[Any]] = [[] for _ in sessions]
    for first in range(0, len(speeches[0]), 1600):
        for i, session in enumerate(sessions):
            events[i] += session.feed(speeches[i][first : first + 1600])
    for i, session in enumerate(sessions):
        events[i] += session.finish(timeout=60)
        check_order(events[i])
        assert said(events[i]) == [100 + i, 200 + i, 300 + i]
    assert max(size for what, size, *_ in engine.log if what == "encode") > 1
    assert max(size for what, size, *_ in engine.log if what == "step") > 1
    assert len(engine.threads) <= 2


def test_live_sound_goes_before_a_long_file(open_recognizer):
    engine = SpeechEngine(rows=2, encoder_batch=1, steps=lambda pcm, request: time.sleep(0.002) or 4)
    recognizer = open_recognizer(engine)
    done = threading.Event()

    def long_file() -> None:
        for _ in recognizer.transcribe_many([say([500] * 3000)] * 2, sample_rate=16_000, language="en"):
            pass
        done.set()

    thread = threading.Thread(target=long_file)
    thread.start()
    events = listen(recognizer, SPEECH)
    assert said(events) == WORDS
    assert not done.is_set()
    thread.join()


def test_the_engine_fails_and_the_session_goes_on(open_recognizer):
    engine = SpeechEngine()
    recognizer = open_recognizer(engine)
    session = recognizer.stream(language="en")
    engine.fail_in = {"encode": 1}
    events = session.feed(SPEECH)
    time.sleep(0.3)
    engine.fail_in = {}
    events += session.finish(timeout=60)
    check_order([event for event in events if not isinstance(event, Failed)])
    assert said(events)[-1] == 31
    told = {event.turn for event in events if isinstance(event, Final | Failed) and event.ends_turn}
    assert told == {0, 1, 2}


def test_a_window_that_the_engine_cannot_stand_is_its_turns_end_alone(open_recognizer):
    class Choosy(SpeechEngine):
        def encode(self, windows: Any, *, again: bool = False) -> Any:
            if any(round(float(window.max()) * 1000) == 666 for window in windows):
                raise RuntimeError("no such sound")
            return super().encode(windows, again=again)

    recognizer = open_recognizer(Choosy())
    sessions = [recognizer.stream(language="en") for _ in range(6)]
    heard = [
        session.feed(np.concatenate([say([600 + number, 666 if number == 3 else 50]), pause(0.8), say([70])]))
        for number, session in enumerate(sessions)
    ]
    for number, (session, first) in enumerate(zip(sessions, heard, strict=True)):
        events = first + session.finish(timeout=60)
        failed = [event.turn for event in events if isinstance(event, Failed)]
        assert failed == ([0] if number == 3 else [])
        assert said(events) == ([70] if number == 3 else [600 + number, 50, 70])


def test_one_failing_listener_is_no_one_elses(open_recognizer):
    recognizer = open_recognizer()

    def broken(event: Any) -> None:
        raise RuntimeError("nobody home")

    bad = recognizer.stream(language="en", on_event=broken)
    bad.feed(SPEECH, wait=False)
    assert said(listen(recognizer, SPEECH)) == WORDS
    with pytest.raises(RuntimeError, match="nobody home"):
        bad.finish(timeout=5)


def test_manual_turns_end_where_they_are_committed(open_recognizer):
    recognizer = open_recognizer()
    session = recognizer.stream(language="en", turns=TurnOptions(manual=True))
    events = session.feed(np.concatenate([say([1, 2]), pause(1.0), say([3])]))
    session.commit()
    session.commit()  # nothing was said
    events += session.feed(say([4]))
    session.clear()
    events += session.feed(np.concatenate([pause(0.5), say([5, 6])]))
    session.commit()
    events += session.finish(timeout=60)
    check_order(events)
    turns: dict[int, str] = {}
    for event in events:
        if isinstance(event, Final):
            turns[event.turn] = turns.get(event.turn, "") + event.text
    assert turns == {0: " 1 2 3", 1: "", 2: " 5 6"}
    assert [event.turn for event in events if isinstance(event, Final) and event.ends_turn] == [0, 1, 2]
    assert not any(isinstance(event, SpeechStarted | SpeechStopped) for event in events)


def test_the_language_is_found_out(open_recognizer):
    engine = SpeechEngine(languages=lambda pcm: {"de": 0.9, "en": 0.1, "fr": 0.0})
    recognizer = open_recognizer(engine)
    session = recognizer.stream()
    events = session.feed(SPEECH)
    events += session.finish(timeout=60)
    assert said(events) == WORDS
    assert {event.language for event in events if isinstance(event, Final)} == {"de"}


def test_text_without_spaces_is_agreed_on_by_characters(open_recognizer, monkeypatch):
    """meetily #605: agreement did nothing at all for Chinese, Japanese and Thai."""
    monkeypatch.setitem(LANGUAGES, "zh", 1013)
    recognizer = open_recognizer()
    session = recognizer.stream(language="zh")
    assert session.stream.voice.hold == 3  # a character is easily misheard at the edge
    events, committed = until_committed(session, 5)
    assert committed == [str(n) for n in range(101, 101 + len(committed))]
    check_order(events + session.finish(timeout=60))


@pytest.mark.parametrize("size", [511, 1600, 40_000])
def test_a_ctc_model_listens_too(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stapes.recognizer.VoiceActivityDetector", lambda **_: LevelDetector())
    save(tmp_path, attends=False)
    recognizer = load(tmp_path)
    sound = np.concatenate([babble(3), pause(1.0), babble(2)])
    session = recognizer.stream()
    events: list[Any] = []
    for first in range(0, len(sound), size):
        events += session.feed(sound[first : first + size])
    events += session.finish(timeout=60)
    check_order(events)
    finals = [event for event in events if isinstance(event, Final)]
    assert [event.turn for event in finals] == [0, 1]
    for final, (start, end) in zip(finals, [(0.0, 3.0), (4.0, 6.0)], strict=True):
        assert final.segment is not None
        assert final.segment.words is not None
        assert all(start - 0.4 <= word.start <= word.end <= end + 0.7 for word in final.segment.words)
        assert "".join(word.word for word in final.segment.words) == final.text != ""
    whole = recognizer.transcribe(np.concatenate([babble(3), pause(0.65)]), sample_rate=16_000, vad=False)
    assert finals[0].text.split() == whole.text.split()  # with the silence that is heard behind a turn, and the padding
    recognizer.close()


def test_ends_of_sessions(open_recognizer):
    recognizer = open_recognizer()
    session = recognizer.stream(language="en")
    assert session.finish(timeout=5) == []
    with pytest.raises(UsageError):
        session.feed(SPEECH)
    left = recognizer.stream(language="en")
    left.feed(SPEECH)
    recognizer.close()
    with pytest.raises(UsageError, match="closed"):
        left.finish(timeout=5)
    deadline = time.monotonic() + 3
    while recognizer.live.count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recognizer.live.count == 0


def test_what_a_session_cannot_do_is_said(open_recognizer):
    recognizer = open_recognizer()
    for options in ({"clip_timestamps": "0,5"}, {"channels": "separate"}, {"vad": False}):
        with pytest.raises(UsageError):
            recognizer.stream(language="en", **options)
    with pytest.raises(UsageError):
        TurnOptions(threshold=0.0)
    session = recognizer.stream(language="en")
    with pytest.raises(UsageError, match="one channel"):
        session.feed(np.zeros((2, 100), np.float32))
    session.close()


class Nobody:
    """A voice that nobody hears: windows are kept, and answered by the test."""

    hold, language, needs_language, wants_context = 1, "en", False, True

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def window(self, stretch: Any, deliver: Any) -> Any:
        self.asked.append((stretch, deliver))
        return len(self.asked)


def frames(pcm: np.ndarray) -> np.ndarray:
    return (np.abs(pcm[: len(pcm) // 512 * 512].reshape(-1, 512)).max(axis=1) > 0).astype(np.float32)


@pytest.mark.parametrize("silence", [40.0, 0.0])
def test_ten_hours_take_no_more_memory_than_one(silence):
    """Sound, words and all: what a session holds after ten hours is what it held before, if nobody pauses too.

    WhisperLive #267, WhisperLiveKit #372, #195 and PR #196: sessions ended after ten minutes, lines vanished after
    five, and times exploded, as an offset was added again and again.
    """
    voice = Nobody()
    told: Counter[str] = Counter()
    ends: list[float] = []

    def tell(event: Any) -> None:
        told[type(event).__name__] += 1
        if isinstance(event, Final) and event.segment is not None:
            ends.append(event.segment.end)

    stream = LiveStream(voice, TurnOptions(), tell)  # type: ignore[arg-type]
    stream.interval = 2.0
    minute = np.concatenate([say([5] * 60), pause(0.4 if silence else 0), say([6] * 60), pause(silence)])
    chunks = [chunk for chunk in np.array_split(minute, 40) if len(chunk)]
    count = (len(chunks[0]) - 1) // 512 * 512
    chunks = [(chunk[:count].copy(), frames(chunk[:count])) for chunk in chunks]
    size = []
    minutes = round(36_000 * 16_000 / (count * len(chunks)))
    for number in range(minutes):
        for pcm, probabilities in chunks:
            stream.feed(pcm, probabilities)
            while stream.take() is not None:
                stretch, deliver = voice.asked.pop()
                start = stretch.start / 16_000
                words = [Word(f" w{i}", start + i, start + i + 1, 0.9) for i in range(len(stretch.pcm) // 16_000)]
                deliver(Heard(words, None))
        if number > 10 and number % 50 == 0:
            size.append(len(pickle.dumps([stream._sound, stream._part, stream._parts, stream._before])))
    assert told["SpeechStopped"] == (minutes if silence else 0)
    assert told["Final"] > minutes
    assert max(size) < 4_000_000
    assert ends == sorted(ends)
    assert 35_900 < ends[-1] < 36_100


def test_ends_of_turns_come_before_what_is_still_said(open_recognizer):
    live = open_recognizer().live
    windows = _Windows(live)
    order = []
    sessions: Any = []
    for number, urgency in enumerate(["partial", "partial", "final", "partial", "final"]):
        stream = SimpleNamespace(take=lambda number=number: order.append(number) or SimpleNamespace(deliver=None))
        session = SimpleNamespace(
            lock=threading.RLock(), queued=urgency, closed=False, error=None, stream=stream, asked_at=0.0
        )
        sessions.append(session)
        windows.wait_for(session, urgency)  # type: ignore[arg-type]
    while windows.take() is not None:
        pass
    assert order == [2, 4, 0, 1, 3]


def test_partials_that_nobody_takes_do_not_pile_up():
    log = EventLog()
    for _ in range(1000):
        log.add(Partial(0, []))
    assert len(log.take()) == 1
