"""`stapes bench stream`: scripts say every word once, delays are measured from the sound, and a search ends."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, FakeTokenizer, fake_recognizer
from hypothesis import given, settings
from hypothesis import strategies as st
from live_speech import LevelDetector, SpeechEngine, pause
from live_speech import say as sound

from stapes.benchmarks import stream_clients
from stapes.benchmarks.random_weights import without_judgement
from stapes.benchmarks.scripted import ScriptedVoice, say, with_script
from stapes.benchmarks.stream import StreamBench, StreamSettings
from stapes.benchmarks.stream_clients import Client, Clip, Delays, as_figures, play, recording_of
from stapes.errors import UsageError
from stapes.inference.live_events import Committed, Final, Partial, SpeechStopped
from stapes.inference.live_voices import Stretch
from stapes.inference.recording import Model
from stapes.options import TranscribeOptions, TurnOptions
from stapes.transcript import Segment, Word

MODEL = Model(FakeTokenizer(), 448, ())  # type: ignore[arg-type]
OPTIONS = without_judgement(TranscribeOptions(language="en"))
TEXT = "it is a truth universally acknowledged that a single man must be in want of a wife"


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.floats(0.1, 9.9), max_size=6))
def test_stretches_that_abut_say_every_word_once(cuts):
    words = say(TEXT, 0.5, 9.5, 1000)
    voice = ScriptedVoice(MODEL, OPTIONS, lambda window: None, words)
    edges = [0, *sorted({round(cut * 16_000) for cut in cuts}), 160_000]
    written: list[int] = []
    for start, end in pairwise(edges):
        pcm = np.zeros(end - start, np.float32)
        window: Any = voice.window(Stretch(pcm, start, 1.0, True, False, ""), lambda heard: None)
        written += window.recording.request(window).script
    assert written == [token for word in words for token in word.tokens]


def test_a_word_that_the_window_cuts_off_is_misheard():
    words = say(TEXT, 0.0, 9.0, 1000)
    voice = ScriptedVoice(MODEL, OPTIONS, lambda window: None, words)
    end = round((words[4].middle + 0.05) * 16_000)
    window: Any = voice.window(Stretch(np.zeros(end, np.float32), 0, 1.0, False, False, ""), lambda heard: None)
    script = window.recording.request(window).script
    assert script[:4] == tuple(word.tokens[0] for word in words[:4])
    assert script[4:] != words[4].tokens


def word(text: str, end: float) -> Word:
    return Word(f" {text}", end - 0.2, end, 0.9)


def test_delays_count_from_when_the_sound_was_spoken(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(stream_clients.time, "perf_counter", lambda: now[0])
    client = Client(np.zeros(0, np.float32))
    client.began = 100.0

    def at(seconds: float, event: Any) -> None:
        now[0] = 100.0 + seconds
        client.take(event)

    at(1.5, Partial(0, [word("one", 0), word("tow", 0)]))
    at(2.0, Committed(0, [word("one", 0)]))
    at(2.0, Partial(0, [word("two", 0)]))  # taken back: tow
    at(3.0, SpeechStopped(0, 3.0))
    at(3.25, Committed(0, [word("two", 0)]))
    words = [word("one", 1.0), word("two", 2.5)]
    at(3.25, Final(0, " one two", Segment(0, 0, 0.8, 2.5, " one two", words=words), True))
    figures = as_figures(stream_clients.Played(client.delays, client.texts, 0.3, 0.0))
    assert figures["first_words_p50"] == pytest.approx(1.5 - 0.8)
    assert client.delays.words == pytest.approx([1.0, 0.75])
    assert figures["final_after_speech_p95"] == pytest.approx(0.75)
    assert figures["final_after_stop_p95"] == pytest.approx(0.25)
    assert (figures["committed_changed"], figures["revised_per_word"]) == (0, 0.5)
    at(4.0, Committed(1, [word("three", 0)]))
    at(4.0, Final(1, " tree", Segment(0, 0, 3.8, 4.0, " tree", words=[word("tree", 4.0)]), True))
    assert client.delays.changed == 1  # it would be told


@pytest.fixture
def recognizer(monkeypatch: pytest.MonkeyPatch):
    def make(engine: FakeEngine) -> Any:
        made = fake_recognizer(monkeypatch, engine)
        monkeypatch.setattr("stapes.recognizer.VoiceActivityDetector", lambda **_: LevelDetector())
        return made

    return make


def test_clients_play_scripts_on_an_engine_that_knows_nothing(recognizer):
    engine = SpeechEngine(rows=16, encoder_batch=4)
    scripted = with_script(recognizer(engine))
    clip = Clip(sound([7] * 6), "one two three four")
    clients = []
    voices = {}
    for number in range(4):
        pcm, placed = recording_of([clip], number, 4.0)  # two turns, the second of which is heard with the first
        words = [word for each, at in placed for word in say(each.text, at + 0.1, at + 1.8, 1000)]
        client = Client(pcm, [word.end for word in words])
        voices[client] = lambda returned, words=words: ScriptedVoice(MODEL, OPTIONS, returned, words)
        clients.append(client)

    def listen(client: Client) -> Any:
        return scripted.live.open(OPTIONS, TurnOptions(), client.take, make_voice=voices[client])

    played = play(clients, listen, lambda: scripted.live.interval)
    figures = as_figures(played)
    assert figures["committed_changed"] == figures["failed"] == 0
    assert figures["words"] == 4 * 4 * len(placed)
    assert 0 <= figures["final_after_stop_p50"] < 1
    assert figures["words_p50"] > 0
    assert len(set(played.texts)) == 1
    scripted.close()


@pytest.mark.parametrize("holds", [1, 5, 37, 200])
def test_the_search_finds_how_many_streams_keep_to_the_target(holds: int, monkeypatch: pytest.MonkeyPatch):
    bench = StreamBench.__new__(StreamBench)
    bench.settings = StreamSettings(model="base", streams=(4,), search=True)
    bench._last = {}
    measured: list[int] = []

    def case(recognizer: Any, count: int) -> int:
        measured.append(count)
        bench._last = {"final_after_stop_p95": 0.1 if count <= holds else 0.9}
        return count

    monkeypatch.setattr(bench, "_case", case)
    monkeypatch.setattr(bench, "_open", lambda: recognizer_that_closes())
    assert list(bench._cases()) == measured
    best = max((count for count in measured if count <= holds), default=0)
    assert best >= holds / 1.1 - 1
    assert len(measured) < 16


def recognizer_that_closes() -> Any:
    class Closes:
        def close(self) -> None:
            pass

    return Closes()


def test_delays_of_clients_are_put_together():
    one, two = Delays(words=[1.0], said=2), Delays(words=[2.0], said=3, failed=1)
    one.add(two)
    assert (one.words, one.said, one.failed) == ([1.0, 2.0], 5, 1)


def test_recordings_are_whole_clips_with_pauses():
    clips = [Clip(sound([n]), str(n)) for n in (1, 2, 3)]
    pcm, placed = recording_of(clips, 2, 4.0)
    assert [clip.text for clip, _ in placed] == ["3", "1", "2"]
    for clip, at in placed:
        start = round(at * 16_000)
        assert np.array_equal(pcm[start : start + len(clip.pcm)], clip.pcm)
    assert np.array_equal(pcm[-16_000:], pause(1.0))


def test_clients_begin_all_over_the_corpus():
    bench = StreamBench.__new__(StreamBench)
    bench._clips = [Clip(sound([n]), str(n)) for n in range(1, 11)]
    first = [bench._recording(number, 5, 2.0)[1][0][0].text for number in range(5)]
    assert first == ["1", "3", "5", "7", "9"]


@pytest.mark.parametrize("wrong", [{"streams": ()}, {"streams": (0,)}, {"seconds": 0.1}, {"target": 0.0}])
def test_what_cannot_be_measured_is_said(wrong: Mapping[str, Any]):
    with pytest.raises(UsageError):
        StreamSettings(model="base", **wrong)
