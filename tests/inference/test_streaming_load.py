"""Many who speak at once, by a clock of the engine's own: ends of turns stay quick, partials take what is left."""

from __future__ import annotations

import heapq
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import FakeTokenizer, Nobody, TimedEngine, result
from live_speech import LevelDetector

from stapes.benchmarks import stream_clients
from stapes.benchmarks.random_weights import without_judgement
from stapes.benchmarks.scripted import ScriptedVoice, say
from stapes.benchmarks.stream_clients import Client, Delays, Played, as_figures
from stapes.inference import streaming
from stapes.inference.mixer import Mixer
from stapes.inference.recording import Model
from stapes.inference.requests import Request
from stapes.inference.streaming import Live, Session, TurnOptions, _Windows
from stapes.options import TranscribeOptions

MODEL = Model(FakeTokenizer(), 448, ())  # type: ignore[arg-type]
OPTIONS = without_judgement(TranscribeOptions(language="en"))
CHUNK = 0.1


def speech(rng: np.random.Generator, seconds: float) -> tuple[np.ndarray, list[Any]]:
    """Turns of 2 to 8 s with short pauses in them, and the words that are said."""
    begin = rng.uniform(0.3, 2)
    parts, words, at = [np.zeros(int(begin * 16_000), np.float32)], [], begin
    while at < seconds:
        length, gap = rng.uniform(2, 8), rng.uniform(0.7, 1.5)
        sound = np.full(int(length * 16_000), 0.1, np.float32)
        for _ in range(int(length / 4)):
            pause = int(rng.integers(0, len(sound) - 6000))
            sound[pause : pause + int(rng.uniform(0.1, 0.35) * 16_000)] = 0
        words += say(
            " ".join("abcdefgh"[n] * 4 for n in rng.integers(8, size=int(length * 2.7))), at, at + length, 1000
        )
        parts += [sound, np.zeros(int(gap * 16_000), np.float32)]
        at += length + gap
    return np.concatenate(parts), words


def simulate(count: int, monkeypatch: pytest.MonkeyPatch, window_seconds: float) -> dict[str, Any]:
    """So many clients for 10 s on an engine that takes so long to encode a window; nobody waits for a real clock."""
    engine = TimedEngine(
        script=lambda pcm, request: result(list(request.script)),  # type: ignore[attr-defined]
        rows=64,
        encoder_batch=8,
        steps=lambda pcm, request: max(1, len(request.script)),  # type: ignore[attr-defined]
        encode_seconds=(0.001, window_seconds),
        step_seconds=(0.0015, 0.00001),
    )
    clock = SimpleNamespace(monotonic=lambda: engine.now, perf_counter=lambda: engine.now)
    monkeypatch.setattr(streaming, "time", clock)
    monkeypatch.setattr(stream_clients, "time", clock)
    live = Live(None, None, LevelDetector(), lambda: None)  # type: ignore[arg-type]
    mixer = Mixer(engine, 4, engine.rows, None)  # type: ignore[arg-type]
    live._windows = _Windows(live)
    mixer.add(Request(Nobody(mixer), live._windows, "interactive", None))
    rng = np.random.default_rng(0)
    clients = []
    for number in range(count):
        pcm, words = speech(rng, 10)
        client = Client(pcm, [word.end for word in words])
        client.began = CHUNK * number / count
        client.session = Session(
            live,
            lambda returned, words=words: ScriptedVoice(MODEL, OPTIONS, returned, words),
            TurnOptions(),
            client.take,
            16_000,
        )
        live._sessions[client.session] = None
        clients.append(client)
    due = [(client.began + CHUNK, number) for number, client in enumerate(clients)]
    heapq.heapify(due)
    intervals = []
    while due or not all(client.session.stream.done for client in clients if client.session):
        while due and due[0][0] <= engine.now:
            at, number = heapq.heappop(due)
            stream_clients._speak(clients[number])
            if clients[number].sent < len(clients[number].pcm):
                heapq.heappush(due, (at + CHUNK, number))
        awake = list(live._awake)
        live._awake.clear()
        live._look(awake)
        intervals.append(live.interval)
        if not mixer.point() and due:
            engine.now = max(engine.now, due[0][0])
        assert engine.now < 60
    delays = Delays()
    for client in clients:
        delays.add(client.delays)
    return as_figures(Played(delays, [], float(np.mean(intervals)), 0.0)) | {"log": engine.log}


def test_a_few_streams_are_heard_as_often_as_may_be(monkeypatch: pytest.MonkeyPatch):
    """whisper_streaming #157: words came unevenly."""
    figures = simulate(4, monkeypatch, 0.004)
    assert figures["committed_changed"] == figures["failed"] == 0
    assert figures["partial_interval"] == pytest.approx(0.3, abs=0.01)
    assert figures["words_p50"] < 2.1  # words have to stand for 1.5 s
    assert figures["final_after_stop_p95"] == 0  # heard before the turn was over


def test_where_the_engine_is_full_ends_of_turns_come_first_and_partials_are_fewer(monkeypatch: pytest.MonkeyPatch):
    figures = simulate(60, monkeypatch, 0.015)  # 60 windows a second: one for each stream
    assert figures["committed_changed"] == figures["failed"] == 0
    assert figures["partial_interval"] > 0.4
    assert figures["final_after_stop_p95"] < 0.5
    assert figures["words_p50"] < 4
    sizes = [size for what, size, *_ in figures["log"] if what == "encode"]
    assert np.mean(sizes) > 2  # windows of many are encoded together
