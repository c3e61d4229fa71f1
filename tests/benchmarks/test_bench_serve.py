"""`stapes bench serve`: who is sent what and when, how requests are gathered, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import pcm16, wav

from ctc_models import babble, save
from stapes.benchmarks import random_weights
from stapes.benchmarks.records import BenchResult, CaseRow, Spread, SystemRow, Weights
from stapes.benchmarks.results_serve import HEADER, served_rows
from stapes.benchmarks.serve import ServeBench, ServeSettings, rate_of, size_of
from stapes.benchmarks.serve_clients import (
    Answer,
    Recording,
    Server,
    as_figures,
    as_form,
    closed_loop,
    open_loop,
    poisson_arrivals,
)
from stapes.benchmarks.serve_engine import LENGTHS, Lengths, SwitchedGate, load
from stapes.benchmarks.serve_process import ServerProcess
from stapes.checkpoints.sizes import published_config
from stapes.cli.bench_serve import _row_lines
from stapes.errors import UsageError

FORMS = [as_form(f"clip {number}", np.zeros(16_000, np.float32), {"language": "en"}) for number in range(12)]


class Fake:
    """Answers on loopback, by a script; counts who is inside."""

    def __init__(self, answer: Callable[[bytes], tuple[int, bytes]]) -> None:
        self.inside = self.most = 0
        self.answer = answer
        self.came: list[float] = []
        self.url = ""

    async def __aenter__(self) -> Fake:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came.append(time.perf_counter())
        self.inside += 1
        self.most = max(self.most, self.inside)
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = await reader.readexactly(size)
        await asyncio.sleep(0)
        status, text = self.answer(body)
        self.inside -= 1
        if status:
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(text)) + text)
        writer.close()


def said(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


def test_so_many_clients_are_at_work_and_everything_is_sent_once() -> None:
    async def scene() -> tuple[list[Answer], Fake]:
        async with Fake(lambda body: (200, said("yes"))) as fake:
            return await closed_loop(Server(fake.url), FORMS, 3), fake

    answers, fake = asyncio.run(scene())
    assert sorted(answer.recording.name for answer in answers) == sorted(form.name for form in FORMS)
    assert fake.most <= 3
    assert {answer.text for answer in answers} == {"yes"}
    assert all(answer.due <= answer.done for answer in answers)


def test_at_times_of_their_own_requests_do_not_come_early() -> None:
    times = [0.0, 0.02, 0.02, 0.05]

    async def scene() -> tuple[list[Answer], list[float]]:
        async with Fake(lambda body: (200, said("yes"))) as fake:
            began = time.perf_counter()
            answers = await open_loop(Server(fake.url), FORMS[:4], times)
            return answers, [at - began for at in sorted(fake.came)]

    answers, came = asyncio.run(scene())
    assert all(at >= due for at, due in zip(came, times, strict=True))
    # A request that is sent late was due when it was due.
    assert answers[3].due - answers[0].due == pytest.approx(0.05)


def test_what_goes_wrong_is_counted_and_never_raised() -> None:
    script: Iterator[tuple[int, bytes]] = iter(
        [(200, said("a")), (429, b"{}"), (503, b"{}"), (500, b"{}"), (0, b""), (200, b"<html>")]
    )

    async def scene() -> list[Answer]:
        async with Fake(lambda body: next(script)) as fake:
            return await closed_loop(Server(fake.url), FORMS[:6], 1)

    figures = as_figures(asyncio.run(scene()), 1e9)
    assert [figures[name] for name in ("answered", "refused", "failed", "lost")] == [1, 2, 1, 2]
    gone = asyncio.run(Server("http://127.0.0.1:9").transcribe(FORMS[0], 0.0))
    assert gone.status == 0


def answer(latency: float, status: int = 200, due: float = 0.0) -> Answer:
    return Answer(Recording("a", 2.0, b""), due, due + latency, status, "x")


def test_figures_are_of_what_was_answered() -> None:
    figures = as_figures([answer(1.0), answer(2.0, due=1.0), answer(4.0), answer(0.1, 503)], target=2.5)
    assert figures["latency_p50"] == 2.0
    assert figures["requests_per_second"] == pytest.approx(3 / 4)
    assert figures["sound_per_second"] == pytest.approx(6 / 4)
    assert figures["goodput"] == pytest.approx(2 / 4)
    assert as_figures([answer(0.1, 503)], 1.0)["latency_p95"] is None


@given(rate=st.floats(0.1, 100), seed=st.integers(0, 100))
def test_random_times_are_in_order_and_as_many_as_wanted(rate: float, seed: int) -> None:
    times = poisson_arrivals(2000, rate, seed)
    assert times == sorted(times)
    assert times == poisson_arrivals(2000, rate, seed)
    assert times[-1] / 2000 == pytest.approx(1 / rate, rel=0.2)


class Crowd:
    """Requests that pass a gate in threads, and stay until they are let go."""

    def __init__(self, gate: SwitchedGate) -> None:
        self.gate = gate
        self.inside: list[int] = []
        self.changed = threading.Condition()
        self.may_go: set[int] = set()

    def come(self, number: int) -> None:
        def stay() -> None:
            with self.gate.passed("interactive"), self.changed:
                self.inside.append(number)
                self.changed.notify_all()
                self.changed.wait_for(lambda: number in self.may_go, 60)
                self.inside.remove(number)
                self.changed.notify_all()

        threading.Thread(target=stay, daemon=True).start()

    def until_inside(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.inside) == count, 60)
            return sorted(self.inside)

    def go(self, *numbers: int) -> None:
        with self.changed:
            self.may_go.update(numbers)
            self.changed.notify_all()


def test_the_next_batch_begins_when_all_of_the_last_have_ended() -> None:
    gate = SwitchedGate(16, 1e6)  # so long that none is begun for want of others
    gate.switch(3)
    crowd = Crowd(gate)
    for number in range(6):
        crowd.come(number)
    first = crowd.until_inside(3)
    crowd.go(*first[:2])
    crowd.until_inside(1)  # two have gone, and nobody came in their place
    crowd.go(first[2])
    second = crowd.until_inside(3)
    assert not set(first) & set(second)
    crowd.go(*second)
    crowd.until_inside(0)
    for number in range(6, 8):
        crowd.come(number)
    assert not crowd.inside  # they wait for a third
    crowd.come(8)
    assert crowd.until_inside(3) == [6, 7, 8]
    crowd.go(6, 7, 8)
    crowd.until_inside(0)


def test_a_batch_that_does_not_fill_is_begun_all_the_same_and_dynamic_ones_never_wait() -> None:
    gate = SwitchedGate(16, 0.01)
    gate.switch(8)
    with gate.passed("interactive"):
        pass
    gate.switch(None)
    with gate.passed("interactive"), gate.passed("bulk"):
        pass


def test_a_window_is_written_as_long_as_a_recording_of_its_length() -> None:
    lengths = Lengths([(10.0, 30), (2.0, 5), (29.0, 90)])
    assert [lengths.of(seconds) for seconds in (0.5, 2.0, 2.5, 10.0, 28.0, 30.0)] == [5, 5, 30, 30, 90, 90]


def test_random_weights_write_just_so_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "lengths.json"
    table.write_text(json.dumps([[1.5, 3], [29.0, 17]]))
    monkeypatch.setenv(LENGTHS, str(table))
    small = replace(published_config("tiny.en"), width=64, encoder_layers=1, decoder_layers=1, encoder_heads=1)
    monkeypatch.setattr(random_weights, "published_config", lambda name: replace(small, decoder_heads=1))
    settings = {"device": "cpu", "precision": "auto", "threads": None, "max_batch": None}
    with contextlib.closing(load("random:tiny.en", settings)) as recognizer:
        options: dict[str, Any] = {"vad": False, "without_timestamps": True, "temperature_increment_on_fallback": None}
        options |= dict.fromkeys(("logprob_threshold", "no_speech_threshold", "compression_ratio_threshold"))
        for seconds, tokens in ((1.0, 3), (8.0, 17)):
            sound = np.zeros(round(16_000 * seconds), np.float32)
            (segment,) = recognizer.transcribe(sound, sample_rate=16_000, **options).segments
            assert len(segment.tokens) == tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"batching": ("sometimes",)},
        {"batching": ("fixed:0",)},
        {"batching": ("fixed:8",), "max_batch": 4},
        {"batching": ("single",), "url": "http://localhost:1"},
        {"clients": ()},
        {"clients": (0,)},
        {"rates": ("50%",), "clients": ()},
        {"rates": ("often",)},
        {"requests": 0},
    ],
)
def test_what_cannot_be_measured_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--"):
        ServeSettings(model="base", **wrong)


def test_words_for_batches_rates_and_addresses() -> None:
    assert [size_of(each) for each in ("dynamic", "single", "fixed:8")] == [None, 1, 8]
    assert [rate_of(each, 40.0) for each in ("2.5", "50%")] == [2.5, 20.0]
    for url in ("localhost:8000", "ftp://a", ""):
        with pytest.raises(UsageError, match="--url"):
            Server(url)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    lines = []
    for number in range(4):
        (folder / f"{number}.wav").write_bytes(wav(pcm16(babble(1 + number % 2, number))))
        lines.append(json.dumps({"audio": f"{number}.wav", "text": "a b", "duration": 1.0 + number % 2}))
    (folder / "manifest.jsonl").write_text("\n".join(lines))
    return folder / "manifest.jsonl"


def test_a_server_of_its_own_is_measured_in_every_way(spoken: Path, tmp_path: Path) -> None:
    save(tmp_path)
    settings = ServeSettings(
        model=str(tmp_path),
        device="cpu",
        batching=("dynamic", "fixed:2", "single"),
        clients=(3,),
        rates=("50%",),
        beside=2,
        long_seconds=8.0,
        requests=6,
        target=60.0,
        decoders=1,
        corpus=str(spoken),
        language=None,
        threads=1,
    )
    run = ServeBench(settings).run(1, ["stapes", "bench", "serve"])
    rows = list(run.rows())
    assert [row.case["load"] for row in rows] == ["closed", "open", "beside"]
    assert rows[0].case["slots"] == 2
    for row in rows:
        for system in row.systems:
            assert system.figures["answered"] == row.case["requests"]
            assert not any(system.figures[name] for name in ("refused", "failed", "lost", "other_texts"))
            assert (system.figures["latency_p50"] or 0) > 0
    assert [system.options for system in rows[0].systems] == ["dynamic", "fixed:2", "single"]
    assert (rows[2].ours.figures["alone_p50"] or 0) > 0
    tabled = served_rows([("R1", run.result)], lambda result: result.weights.name, lambda result, case: "CPU")
    assert len(tabled) == 7
    assert {len(row) for row in tabled} == {len(HEADER)}
    assert "at random times" in _row_lines(rows[1])


def test_the_server_does_not_outlive_the_benchmark(spoken: Path, tmp_path: Path) -> None:
    save(tmp_path)
    settings = ServeSettings(model=str(tmp_path), device="cpu", decoders=1, corpus=str(spoken), threads=1)
    process = ServerProcess(settings, None, None, lambda line: None)
    with process:
        assert process._process.stdin is not None
        process._process.stdin.close()  # as when we are killed
        process._process.wait(60)


def test_a_result_of_a_server_elsewhere_is_tabled_too() -> None:
    case = {"load": "closed", "clients": 4, "requests": 9, "target": 2.0, "precision": "unknown", "device_name": "?"}
    system = SystemRow(system="server", wall_seconds=Spread.of([1.0]), figures={"requests_per_second": 9.0})
    result = BenchResult(
        name="serve",
        command=[],
        stapes="0",
        date="2026-01-01",
        machine={},
        weights=Weights(name="x", kind="real"),
        audio={},
        rows=[CaseRow(case=case, systems=[system])],
    )
    (row,) = served_rows([("R1", result)], lambda result: "x", lambda result, case: "?")
    assert len(row) == len(HEADER)
    assert row[5] == "9"
    assert "4 clients" in _row_lines(result.rows[0])
