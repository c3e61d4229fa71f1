"""The scheduler and its worker threads, with a model that writes what a script says: order, fairness, ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from fakes import (
    EOT,
    MODEL,
    POISON,
    FakeDetector,
    FakeEngine,
    at,
    endless,
    fake_recognizer,
    living_workers,
    result,
    tone,
    whole,
)

from stapes.inference import ingest as ingest_module
from stapes.inference.ingest import Ingest, Job
from stapes.inference.longform import open_recording
from stapes.inference.scheduler import Scheduler
from stapes.options import TranscribeOptions
from stapes.progress import Silent
from stapes.recognizer import Recognizer

pytestmark = pytest.mark.timeout(60)


class Run:
    """One pass of a scheduler over inputs."""

    def __init__(self, inputs: Iterable[Any], engine: FakeEngine, **options: Any) -> None:
        self.engine = engine
        workers, ahead = options.pop("workers", 2), options.pop("ahead", 8)
        self.progress = options.pop("progress", Silent())
        options = TranscribeOptions(**({"language": "en"} | options))
        pairs = ((source, 16000 if isinstance(source, np.ndarray) else None) for source in inputs)
        self.ingest = Ingest(
            pairs,
            partial(open_recording, MODEL, options),
            options,
            FakeDetector() if options.vad else None,  # type: ignore[arg-type]
            self.progress,
            workers=workers,
            ahead=ahead,
        )

    def __iter__(self) -> Iterator[Job]:
        try:
            yield from Scheduler(self.engine).run(self.ingest)  # type: ignore[arg-type]
        finally:
            self.ingest.stop()


def run(inputs: Iterable[Any], engine: FakeEngine, **options: Any) -> list[Job]:
    """All jobs, in the order in which they were done; nothing may be left behind."""
    jobs = list(Run(inputs, engine, **options))
    assert not engine.active
    assert not living_workers()
    return jobs


def run_when_read(inputs: list[np.ndarray], engine: FakeEngine, **options: Any) -> list[Job]:
    """As `run`, but all is read before the first step: then the order of events does not depend on threads."""
    pass_ = Run(inputs, engine, ahead=len(inputs) + 1, **options)
    while not (pass_.ingest._exhausted and all(job.read for job in pass_.ingest.jobs)):
        time.sleep(0.01)
    return list(pass_)


def texts(job: Job) -> list[tuple[float, float, str]]:
    return [(round(s.start, 3), round(s.end, 3), s.text) for c in job.channels for s in c.sorted_segments()]


def admitted(engine: FakeEngine) -> list[tuple[float, float]]:
    return [(entry[2], entry[1]) for entry in engine.log if entry[0] == "admit"]


def failing(*levels: float, until: float = 0.2) -> Any:
    """A script in which windows of these levels fail below a temperature."""

    def script(pcm: np.ndarray, request: Any) -> Any:
        bad = round(float(pcm[0]), 3) in levels and request.temperature < until
        found = whole(pcm, request)
        return result(found.tokens, temperature=request.temperature, avg_logprob=-3.0 if bad else -0.3)

    return script


def test_a_failed_attempt_comes_before_new_windows() -> None:
    engine = FakeEngine(failing(0.2, until=0.4), rows=1)
    run_when_read([tone(20, 0.1), tone(20, 0.2), tone(20, 0.3), tone(20, 0.4)], engine, best_of=1, workers=1)
    order = admitted(engine)
    first = order.index((0.2, 0.0))
    assert order[first + 1 : first + 4] == [(0.2, 0.0), (0.2, 0.2), (0.2, 0.4)]
    assert len(order) == 7
    assert sum(entry[0] == "encode again" for entry in engine.log) == 1


def test_only_unsure_windows_with_padding_get_a_second_look() -> None:
    def looks(seconds: float, avg_logprob: float, **options: Any) -> list[Any]:
        def script(pcm: np.ndarray, request: Any) -> Any:
            return result(whole(pcm, request).tokens, temperature=request.temperature, avg_logprob=avg_logprob)

        engine = FakeEngine(script, rows=1)
        run_when_read([tone(seconds, 0.2)], engine, best_of=1, workers=1, **options)
        return [entry for entry in engine.log if entry[0] == "encode again"]

    assert looks(20, -0.7)
    assert not looks(20, -0.5)
    assert not looks(29, -0.7)
    assert not looks(20, -0.7, temperature_increment_on_fallback=None)


def test_retries_that_wait_for_their_slots_keep_nobody_else_from_free_ones() -> None:
    levels = [0.1, 0.15, 0.2]
    engine = FakeEngine(failing(*levels), rows=1, steps=lambda pcm, request: 200 if request.temperature else 2)
    engine.free_slots = lambda request: (  # type: ignore[method-assign]
        (1 if request.temperature else 2) - sum(s.request.candidates == request.candidates for s in engine.active)
    )
    clips = [tone(20, level) for level in (*levels, *np.linspace(0.3, 0.9, 20).round(3))]
    jobs = run_when_read(clips, engine, workers=1)
    slow = [job for job in jobs if round(float(job.source[0]), 3) in levels]
    assert len(jobs) == 23
    assert jobs[-2:] == slow[-2:]
    steps = [entry for entry in engine.log if entry[0] == "step"]
    assert len(steps) < 3 * 200 + 30
    last_new = max(i for i, entry in enumerate(engine.log) if entry[0] == "admit" and entry[1] == 0.0)
    assert sum(entry[0] == "step" for entry in engine.log[:last_new]) < 60


def test_slots_are_never_left_empty_while_windows_wait() -> None:
    engine = FakeEngine(rows=4, encoder_batch=2, steps=lambda pcm, request: 3 + int(pcm[0] * 40) % 5)
    clips = [tone(29, level) for level in np.linspace(0.1, 0.9, 24)]
    run_when_read([np.concatenate(clips[:4]), *clips[4:]], engine)
    encoded = waiting = 0
    for kind, *rest in engine.log:
        if kind == "encode":
            encoded += rest[0]
            waiting += rest[0]
        elif kind == "admit":
            waiting -= 1
        else:
            assert rest[0] == 4 or waiting == 0


@pytest.mark.parametrize("words", [False, True])
def test_results_do_not_depend_on_the_order_of_completion(words: bool) -> None:
    clips = [np.concatenate([tone(seconds, level) for level in (0.2, 0.5, 0.7, 0.3)]) for seconds in (20, 25, 28)]
    runs = []
    for seed in range(4):
        chance = random.Random(seed)
        engine = FakeEngine(rows=chance.randint(1, 6), steps=lambda pcm, request, chance=chance: chance.randint(1, 40))
        jobs = run(clips, engine, workers=1 + seed % 3, word_timestamps=words)
        runs.append({len(job.source): (texts(job), job.channels[0].skipped()) for job in jobs})
        if words:
            assert all(segment.words for job in jobs for segment in job.channels[0].segments)
    assert all(found == runs[0] for found in runs)


def test_closing_the_generator_releases_slots_and_ends_threads() -> None:
    engine = FakeEngine(rows=3, steps=lambda pcm, request: 2 if pcm[0] < 0.2 else 10_000)
    jobs = iter(Run([tone(20, level) for level in (0.1, 0.3, 0.4, 0.5, 0.6, 0.7)] * 5, engine))
    next(jobs)
    # The first may have been read, and done, before the others came.
    deadline = time.monotonic() + 10
    while not engine.active and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.active
    jobs.close()  # type: ignore[attr-defined]
    assert not engine.active
    assert not living_workers()


def test_bad_inputs_stop_no_other() -> None:
    clips = [
        tone(20, 0.1),
        "/nowhere/at/all.mp3",
        tone(20, 0.2),
        b"not audio",
        np.zeros((0,), np.float32),
        tone(20, 0.3),
    ]
    jobs = run(clips, FakeEngine())
    assert len(jobs) == 6
    assert sorted(job.error is None for job in jobs) == [False] * 3 + [True] * 3
    assert all(texts(job) for job in jobs if job.error is None)


def test_an_error_in_handling_one_recording_is_its_own() -> None:
    def script(pcm: np.ndarray, request: Any) -> Any:
        return result([at(0), POISON, at(1)]) if round(float(pcm[0]), 3) == 0.4 else whole(pcm, request)

    poisoned = np.concatenate([tone(100, 0.1), tone(600, 0.4)])
    jobs = run([tone(20, 0.2), poisoned, tone(20, 0.3), tone(300, 0.5)], FakeEngine(script, rows=2))
    assert len(jobs) == 4
    errors = {len(job.source): job.error for job in jobs}
    assert "poison" in errors.pop(len(poisoned))
    assert set(errors.values()) == {None}
    (broken,) = [job for job in jobs if job.error]
    assert texts(broken)  # what came before is kept


def test_a_detector_that_breaks_is_that_recording_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = FakeDetector.probabilities

    def broken(self: Any, states: Any, pcm: Any, *, final: bool = False) -> Any:
        if any(len(state[0]) and state[0][0] > 0.85 for state in states) or any(len(p) and p[0] > 0.85 for p in pcm):
            raise OSError("detector broke")
        return genuine(self, states, pcm, final=final)

    monkeypatch.setattr(FakeDetector, "probabilities", broken)
    for sequential in (False, True):
        jobs = run([tone(20, 0.2), tone(20, 0.9), tone(20, 0.3)], FakeEngine(), condition_on_previous_text=sequential)
        assert sorted(job.error is None for job in jobs) == [False, True, True]


def test_an_iterator_that_fails_is_the_caller_s_error() -> None:
    def inputs() -> Iterator[np.ndarray]:
        yield tone(20)
        raise LookupError("no more")

    engine = FakeEngine(steps=lambda pcm, request: 10_000)
    with pytest.raises(LookupError, match="no more"):
        run(inputs(), engine)
    assert not engine.active
    assert not living_workers()


def test_a_slow_iterator_keeps_no_result_back() -> None:
    got_first = threading.Event()

    def inputs() -> Iterator[np.ndarray]:
        yield tone(20, 0.1)
        assert got_first.wait(20), "the first result waits for the second input"
        yield tone(20, 0.2)

    count = 0
    for _ in Run(inputs(), FakeEngine()):
        got_first.set()
        count += 1
    assert count == 2


@pytest.mark.parametrize("method", ["encode", "admit", "step", "harvest", "detect_language"])
def test_an_engine_s_error_is_the_caller_s_and_the_next_run_works(method: str) -> None:
    engine = FakeEngine(fail_in={method: 1 if method == "detect_language" else 3})
    with pytest.raises(RuntimeError, match=f"{method} broke"):
        run([tone(200, 0.3), tone(20, 0.1)], engine, language=None)
    assert not engine.active
    assert not living_workers()
    engine.fail_in.clear()
    assert len(run([tone(20)], engine)) == 1


def test_jobs_are_read_in_order_and_not_too_far_ahead() -> None:
    given: list[int] = []

    def inputs() -> Iterator[np.ndarray]:
        for number in range(30):
            given.append(number)
            yield tone(5, 0.1 + number / 100)

    done = 0
    most = 0
    for job in Run(inputs(), FakeEngine(rows=1), ahead=4, workers=3):
        done += 1
        most = max(most, len(given) - done)
        assert job.error is None
    assert done == 30
    assert most <= 5
    engine = FakeEngine(rows=1)
    run([tone(5, 0.1 + number / 100) for number in range(10)], engine, workers=1)
    order = [level for level, _ in admitted(engine)]
    assert order == sorted(order)


class FakeStream:
    """Stands in for an opened recording; counts what it has given out."""

    def __init__(self, channels: list[Iterator[np.ndarray]], check: Any = None) -> None:
        self.name, self.channels, self.duration = "stream", len(channels), None
        self.warnings: list[str] = []
        self.damaged, self.speech = False, None
        self.read, self.check, self._channels = 0, check, channels

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[np.ndarray]:
        for chunk in zip(*self._channels, strict=True):
            self.read += len(chunk[0])
            if self.check:
                self.check(self)
            yield np.stack(chunk)


def bursts(seconds: float, every: float, level: float = 0.5) -> Iterator[np.ndarray]:
    """A second of speech every so often."""
    for start in range(0, round(seconds), 10):
        chunk = tone(10, 0.0)
        if start % every < 10:
            chunk[: 1 * 16000] = level
        yield chunk


STREAMS = {
    "speech": lambda hours: [endless(3600 * hours)],
    "a word every ten minutes": lambda hours: [bursts(3600 * hours, 600)],
    "a word every forty seconds": lambda hours: [bursts(3600 * hours, 40)],
    "silence": lambda hours: [endless(3600 * hours, 0.0)],
    "speaker and silence": lambda hours: [endless(3600 * hours), endless(3600 * hours, 0.0)],
    "silence and speaker": lambda hours: [endless(3600 * hours, 0.0), endless(3600 * hours)],
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("options", [{}, {"condition_on_previous_text": True}, {"vad": False}], ids=str)
def test_hours_of_audio_are_never_held(kind: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = 10 if kind == "speech" and not options else 1
    most = 0
    passes: list[Run] = []

    def check(stream: FakeStream) -> None:
        nonlocal most
        for job in [job for pass_ in passes for job in pass_.ingest.jobs]:
            for recording in job.channels:
                with recording.lock:
                    held = sum(map(len, recording._chunks))
                    held += sum(len(window.pcm) for window in getattr(recording, "_ready", ()))
                most = max(most, held)

    stream = FakeStream(STREAMS[kind](hours), check)
    monkeypatch.setattr(ingest_module, "open_audio", lambda *args, **kwargs: stream)
    engine = FakeEngine(steps=lambda pcm, request: 1)
    passes.append(Run(["stream"], engine, channels="separate", **options))
    (job,) = list(passes[0])
    assert job.error is None
    assert stream.read == hours * 3600 * 16000
    assert [recording.length for recording in job.channels] == [stream.read] * stream.channels
    assert most < 400 * 16000


class Counted(Silent):
    def __init__(self) -> None:
        self.total = self.done = 0.0
        self.steps: list[float] = []

    def add_total(self, seconds: float) -> None:
        self.total += seconds

    def advance(self, seconds: float) -> None:
        assert seconds > 0
        self.done += seconds
        self.steps.append(seconds)


@pytest.mark.parametrize("options", [{}, {"condition_on_previous_text": True}, {"vad": False}], ids=str)
def test_progress_advances_with_the_windows(options: dict) -> None:
    progress = Counted()
    audio = np.concatenate([tone(25), tone(40, 0.0), tone(300)])
    (job,) = run([audio], FakeEngine(rows=2), progress=progress, **options)
    assert len(progress.steps) > 6
    assert progress.done == pytest.approx(job.reported)
    assert 300 < job.reported <= job.duration


# Languages.


def sure_of(**sure: float) -> dict[str, float]:
    rest = (1 - sum(sure.values())) / 3
    return {code: sure.get(code, rest) for code in ("en", "de", "fr")}


def language_of(pcm: np.ndarray) -> dict[str, float]:
    level = round(float(pcm[len(pcm) // 2]), 3)
    return {0.1: sure_of(de=0.9), 0.2: sure_of(en=0.35), 0.3: sure_of(fr=0.45)}.get(level, sure_of(en=0.8))


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(
    ("levels", "packed", "walked"),
    [
        ([0.1], "de", "de"),
        ([0.2], "en", "en"),
        ([0.2, 0.3], "fr", "en"),
        ([0.2, 0.2, 0.1], "de", "en"),
        ([0.3, 0.3, 0.3, 0.1], "fr", "fr"),
        ([0.3] * 30, "fr", "fr"),
        ([], None, None),
    ],
)
def test_language_is_agreed_on(sequential: bool, levels: list[float], packed: str | None, walked: str | None) -> None:
    parts = [np.concatenate([tone(20, level), tone(2, 0.0)]) for level in levels]
    audio = np.concatenate([tone(1, 0.0), *parts])
    engine = FakeEngine(languages=language_of)
    (job,) = run([audio], engine, language=None, condition_on_previous_text=sequential)
    assert job.error is None
    assert job.channels[0].language == (walked if sequential else packed)
    assert bool(texts(job)) == bool(levels)
    assert sum(s.end - s.start for s in job.channels[0].segments) >= 20 * len(levels)


def test_each_channel_has_its_language_and_its_silence() -> None:
    audio = np.stack([tone(100, 0.1), tone(100, 0.0), tone(100, 0.2)])
    (job,) = run([audio], FakeEngine(languages=language_of), language=None, channels="separate")
    assert [recording.language for recording in job.channels] == ["de", None, "en"]
    assert [bool(recording.segments) for recording in job.channels] == [True, False, True]


# The recogniser around it.


@pytest.fixture
def recognizer(monkeypatch: pytest.MonkeyPatch) -> Recognizer:
    return fake_recognizer(monkeypatch, FakeEngine())


def test_threads_that_call_at_once_get_their_own_results(recognizer: Recognizer) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(5):
            transcript = recognizer.transcribe(tone(70, number / 10), sample_rate=16000, language="en")
            found[number] = transcript.text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for number, text in found.items():
        assert set(text.split()) == {str(1 + int(np.float32(number / 10) * 900))}
    assert len(found) == 4
    assert not living_workers()


def test_generator_may_be_closed_elsewhere_or_never_started(recognizer: Recognizer) -> None:
    never = recognizer.transcribe_many([tone(20)], sample_rate=16000, language="en")
    del never
    generator = recognizer.transcribe_many([tone(20, i / 100) for i in range(10, 60)], sample_rate=16000, language="en")
    next(generator)
    closer = threading.Thread(target=generator.close)
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    assert not living_workers()
    assert recognizer.transcribe(tone(20), sample_rate=16000, language="en").text
    with closing(recognizer.transcribe_many([], sample_rate=16000)) as nothing:
        assert list(nothing) == []


def test_an_engine_s_error_leaves_the_recogniser_usable(recognizer: Recognizer) -> None:
    engine: Any = recognizer.engine
    engine.fail_in = {"step": 2}
    with pytest.raises(RuntimeError, match="step broke"):
        recognizer.transcribe(tone(100), sample_rate=16000, language="en")
    engine.fail_in.clear()
    assert recognizer.transcribe(tone(20), sample_rate=16000, language="en").text


def test_waiting_for_input_costs_no_more_than_it_must() -> None:
    began = time.perf_counter()
    run([tone(1, 0.1 + i / 1000) for i in range(60)], FakeEngine(), workers=1, ahead=2)
    assert time.perf_counter() - began < 6  # 60 × 0.2 s if a wake-up were missed each time


assert at(0) > EOT


def test_a_call_inside_the_loop_of_another_shares_the_engine(recognizer: Recognizer) -> None:
    running = recognizer.transcribe_many([tone(20, 0.1 + i / 100) for i in range(5)], sample_rate=16000, language="en")
    next(running)
    assert recognizer.transcribe(tone(20), sample_rate=16000, language="en").text
    assert len(list(running)) == 4


def test_a_smaller_batch_size_is_kept_to_and_only_a_larger_one_changes_the_engine(recognizer: Recognizer) -> None:
    engine: Any = recognizer.engine
    engine.steps = lambda pcm, request: 20
    most: list[int] = []
    counts = engine.step

    def step(count: int) -> None:
        most.append(sum(round(float(slot.pcm[0]), 2) == 0.9 for slot in engine.active))
        counts(count)
        time.sleep(0.0005)

    engine.step = step
    inputs = [tone(20, 0.1 + i / 100) for i in range(40)]
    running = recognizer.transcribe_many(inputs, sample_rate=16000, language="en")
    next(running)
    before = engine.slots
    options = {"sample_rate": 16000, "language": "en", "batch_size": 2}
    assert len(list(recognizer.transcribe_many([tone(20, 0.9)] * 6, **options))) == 6
    assert engine.slots == before
    assert max(most) == 2
    assert len(list(running)) == 39
    most.clear()
    assert len(list(recognizer.transcribe_many([tone(20, 0.9)] * 6, **options))) == 6
    assert (engine.slots, max(most)) == (before, 2)
    assert recognizer.transcribe(tone(20), **options | {"batch_size": before + 1}).text
    assert engine.slots == before + 1
    assert recognizer.transcribe(tone(20), sample_rate=16000, language="en").text
    assert engine.slots == before
