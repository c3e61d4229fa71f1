"""Many requests on one engine, by the engine's own clock: who waits for whom, and what cancelling and errors do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from fakes import (
    POISON,
    Answer,
    Clockwork,
    FakeEngine,
    LaggingEngine,
    PoolEngine,
    TimedEngine,
    at,
    read_now,
    result,
    tone,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.inference.mixer import Mixer
from stapes.inference.queues import TURNS
from stapes.progress import Silent

pytestmark = pytest.mark.timeout(120)

BULK, CLIP = 0.25, 0.75
"""Levels that say whose a window is."""


def seconds(count: int, level: float = BULK) -> list[np.ndarray]:
    """So many recordings of one window."""
    return [tone(1, level) for _ in range(count)]


def engine(rows: int = 16, batch: int = 8, kind: type[TimedEngine] = TimedEngine, **changes: Any) -> TimedEngine:
    """Bulk windows take 80 steps, clips 12."""
    return kind(
        rows=rows,
        encoder_batch=batch,
        steps=lambda pcm, request: 80 if round(float(pcm[0]), 2) == BULK else 12,
        **changes,
    )


def alone(inputs: list[np.ndarray], rows: int = 16) -> float:
    """Seconds that a request takes with nothing beside it."""
    clockwork = Clockwork(engine(rows))
    clockwork.submit(inputs, "interactive")
    clockwork.run()
    return clockwork.engine.now


def texts(answer: Answer) -> list[str]:
    return [segment.text for job in answer.jobs for channel in job.channels for segment in channel.sorted_segments()]


@pytest.mark.parametrize("rows", [3, 16, 64])
def test_a_clip_does_not_wait_behind_a_long_recording(rows: int) -> None:
    clockwork = Clockwork(engine(rows))
    clockwork.submit(seconds(400), "bulk")
    clips: list[tuple[float, Answer]] = []

    def come() -> None:
        clips.append((clockwork.engine.now, clockwork.submit(seconds(1, CLIP), "interactive")))

    for number in range(20):
        clockwork.at(0.3 + 0.097 * number, come)
    clockwork.run()
    waits = sorted(clockwork.finished[clip] - came for came, clip in clips)
    batch, half, point = 0.001 + 8 * 0.004, 0.001 + 4 * 0.004, 4 * (0.002 + 0.00001 * rows)
    assert len(waits) == 20
    # It comes while a batch is encoded; at two points it finds no slot; then it is written in three.
    assert waits[-1] < alone(seconds(1, CLIP), rows) + batch + 4 * half + 2 * point
    assert waits[10] < 0.1  # bulk has a slot for 80 steps: 0.2 s


def test_a_clip_of_another_kind_gets_a_slot_of_the_memory_that_all_share() -> None:
    clockwork = Clockwork(engine(rows=16, kind=PoolEngine))
    clockwork.submit(seconds(100), "bulk")
    came: list[tuple[float, Answer]] = []
    clockwork.at(
        0.3, lambda: came.append((clockwork.engine.now, clockwork.submit(seconds(1, CLIP), "interactive", beam_size=3)))
    )
    clockwork.run()
    assert clockwork.finished[came[0][1]] - came[0][0] < 0.12


def test_clips_cost_bulk_hardly_more_than_their_own_work() -> None:
    lonely = Clockwork(engine())
    lonely.submit(seconds(400), "bulk")
    lonely.run()
    shared = Clockwork(engine())
    bulk = shared.submit(seconds(400), "bulk")
    for number in range(20):
        shared.at(0.1 * number, lambda: shared.submit(seconds(1, CLIP), "interactive"))
    shared.run()
    assert lonely.engine.now < shared.engine.now < 1.15 * lonely.engine.now
    assert len(bulk.jobs) == 400


@pytest.mark.parametrize("kind", [TimedEngine, PoolEngine])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_bulk_keeps_a_share_whatever_comes(rows: int, kind: Any) -> None:
    clockwork = Clockwork(engine(rows, kind=kind), steps=1)
    clockwork.engine.steps = lambda pcm, request: 12
    bulk = clockwork.submit(seconds(20), "bulk", beam_size=2 if kind is PoolEngine else 1)
    flood = [clockwork.submit(seconds(80, CLIP), "interactive") for _ in range(8)]
    clockwork.run(until=lambda: len(bulk.jobs) == 20)
    share = 20 / (20 + sum(len(answer.jobs) for answer in flood))
    assert share > 1 / (2 * TURNS + 2)
    assert share < 0.5  # and the others do go first
    clockwork.run()
    assert all(answer.ends == 1 for answer in clockwork.answers)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_within_a_class_a_short_request_does_not_wait_behind_a_long_one(priority: Any) -> None:
    clockwork = Clockwork(engine())
    long = clockwork.submit(seconds(300), priority)
    clockwork.run(until=lambda: len(long.jobs) > 50)
    came, before = clockwork.engine.now, len(long.jobs)
    short = clockwork.submit(seconds(2), priority)
    clockwork.run(until=lambda: short.request.ended)
    assert len(short.jobs) == 2
    assert len(long.jobs) - before < 40
    assert clockwork.finished[short] - came < 3 * alone(seconds(2))
    clockwork.run()
    assert len(long.jobs) == 300


def test_nothing_waits_while_a_slot_is_free() -> None:
    clockwork = Clockwork(engine(rows=6, batch=4))
    clockwork.engine.script = lambda pcm, request: result(
        whole(pcm, request).tokens,
        temperature=request.temperature,
        avg_logprob=-3.0 if request.temperature < 0.4 and abs(pcm[0]) > 0.5 else -0.3,
    )
    step, queues, wrong = clockwork.engine.step, clockwork.mixer.queues, []

    def checked(count: int) -> None:
        ready = queues.ready()
        wrong.extend(task for task in ready if task.attempt and clockwork.engine.free_slots(task.attempt) > 0)
        if not ready and not queues.interactive.is_active:  # else bulk windows are encoded batch by batch
            wrong.extend(queues.bulk.staged)
            wrong.extend(request for request in queues.requests if request._has_windows)
        step(count)

    clockwork.engine.step = checked  # type: ignore[method-assign]
    for number in range(6):
        clips = seconds(10, 0.3 + 0.05 * number)
        clockwork.at(
            0.02 * number,
            lambda clips=clips, number=number: clockwork.submit(clips, "bulk", beam_size=1 + number % 2 * 2),
        )
        clockwork.at(0.03 * number, lambda clips=clips: clockwork.submit(clips[:2], "interactive"))
    clockwork.run()
    assert not wrong
    assert sum(len(answer.jobs) for answer in clockwork.answers) == 72


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
@pytest.mark.parametrize("kind", [FakeEngine, LaggingEngine])
def test_cancelling_frees_slots_at_the_next_scheduling_point(priority: Any, kind: Any) -> None:
    slow = kind(rows=4, steps=lambda pcm, request: 10_000)
    mixer = Mixer(slow, 4, 4, None)
    answer = Answer(mixer, read_now([*seconds(20), tone(100)]), priority)
    other = Answer(mixer, read_now(seconds(3, CLIP)), priority)
    mixer.add(answer.request)
    mixer.add(other.request)
    for _ in range(5):
        mixer.point()
    held = {id(task.window.pcm) for task in answer.request.tasks}
    assert any(id(slot.pcm) in held for slot in slow.active)
    answer.request.cancel()
    slow.log.clear()
    mixer.point()
    assert answer.ends == 1
    assert answer.error is None
    assert not any(id(slot.pcm) in held for slot in slow.active)
    assert slow.active  # the other one has moved up
    assert sum(entry[0] == "step" for entry in slow.log) == 1
    assert all(task.owner is other.request for task in mixer.queues.ready())


def test_a_window_gives_way_once_at_most_and_loses_nothing_by_it() -> None:
    clockwork = Clockwork(engine(rows=4))
    bulk = clockwork.submit([tone(1, 0.1 + 0.001 * number) for number in range(40)], "bulk")
    clockwork.engine.steps = lambda pcm, request: 80 if pcm[0] < 0.5 else 12
    for number in range(60):
        clockwork.at(0.05 * number, lambda: clockwork.submit(seconds(1, CLIP), "interactive"))
    clockwork.run()
    admitted = Counter(entry[2] for entry in clockwork.engine.log if entry[0] == "admit")
    of_bulk = [count for level, count in admitted.items() if level < 0.5]
    assert max(of_bulk) == 2
    lonely = Clockwork(engine(rows=4))
    expected = lonely.submit([tone(1, 0.1 + 0.001 * number) for number in range(40)], "bulk")
    lonely.run()
    assert sorted(texts(bulk)) == sorted(texts(expected))


def test_bulk_alone_has_every_slot_and_full_batches() -> None:
    clockwork = Clockwork(engine(rows=16, batch=8))
    clockwork.submit(seconds(200), "bulk")
    clockwork.run()
    encodes = [entry[1] for entry in clockwork.engine.log if entry[0] == "encode"]
    assert set(encodes) == {8}
    steps = [entry[1] for entry in clockwork.engine.log if entry[0] == "step"]
    assert steps[0] == 16
    assert sum(steps) / len(steps) > 15


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_few_windows_wait_with_their_encodings(batch: int) -> None:
    def script(pcm: np.ndarray, request: Any) -> Any:
        bad = request.temperature < 0.6
        return result(whole(pcm, request).tokens, temperature=request.temperature, avg_logprob=-3.0 if bad else -0.3)

    clockwork = Clockwork(engine(rows=8, batch=batch))
    clockwork.engine.script = script
    clockwork.engine.languages = lambda pcm: {"en": 0.4, "de": 0.3, "fr": 0.3}
    mixer, most = clockwork.mixer, 0

    def check() -> None:
        nonlocal most
        ready = mixer.queues.ready()
        parked = [window for window in mixer._parked if window.encoded is not None]
        most = max(most, len(ready) + len(parked))

    for number in range(40):
        priority: Any = "bulk" if number % 2 else "interactive"
        clockwork.submit(seconds(6, 0.1 + number / 50), priority, language=None, best_of=1 + number % 3)
    clockwork.run(check=check)
    assert all(len(answer.jobs) == 6 for answer in clockwork.answers)
    assert most <= 2 * (2 * batch - 1) + 2 * (32 + 3 * 8) + 32


# Errors.


def breaking(method: str, level: float, kind: type[TimedEngine] = TimedEngine) -> TimedEngine:
    """An engine that cannot do this with windows of a level."""
    broken = engine(rows=4, batch=4, kind=kind)
    genuine = getattr(broken, method)

    def guarded(first: Any, *rest: Any, **named: Any) -> Any:
        windows = rest[0] if method == "admit" else [slot.pcm for slot in first] if method == "align" else first
        if any(round(float(window[0]), 2) == level for window in windows):
            raise RuntimeError(f"{method} broke")
        return genuine(first, *rest, **named)

    setattr(broken, method, guarded)
    return broken


@pytest.mark.parametrize("method", ["encode", "detect_language", "admit", "align"])
def test_a_window_that_the_engine_cannot_stand_is_its_own_request_s_error(method: str) -> None:
    clockwork = Clockwork(breaking(method, 0.66))
    options: dict[str, Any] = {"language": None, "word_timestamps": True}
    good = [clockwork.submit(seconds(9, level), "bulk", **options) for level in (0.3, 0.4)]
    bad = clockwork.submit([*seconds(2, 0.5), *seconds(3, 0.66)], "bulk", **options)
    clockwork.run()
    assert [len(answer.jobs) for answer in good] == [9, 9]
    assert [answer.error for answer in good] == [None, None]
    assert isinstance(bad.error, RuntimeError)
    assert all(answer.ends == 1 for answer in clockwork.answers)
    assert not clockwork.engine.active
    assert not clockwork.mixer._parked


@pytest.mark.parametrize("method", ["step", "harvest"])
def test_a_step_that_fails_is_the_error_of_all_that_were_in_it_and_of_no_other(method: str) -> None:
    clockwork = Clockwork(engine(rows=4, batch=4))
    requests = [clockwork.submit(seconds(9), "bulk"), clockwork.submit(seconds(1, CLIP), "interactive")]
    clockwork.engine.fail_in = {method: 3}
    later: list[Answer] = []
    clockwork.run(until=lambda: requests[0].ends > 0)
    clockwork.engine.fail_in.clear()
    later.append(clockwork.submit(seconds(2), "bulk"))
    clockwork.run()
    assert all(isinstance(answer.error, RuntimeError) and answer.ends == 1 for answer in requests)
    assert len(later[0].jobs) == 2
    assert later[0].error is None


def test_a_listener_that_fails_ends_its_own_request() -> None:
    class Failing(Silent):
        def advance(self, seconds: float) -> None:
            raise OSError("nobody listens")

    clockwork = Clockwork(engine())
    good = clockwork.submit(seconds(5), "bulk")
    bad = clockwork.submit([tone(100)], "bulk", progress=Failing())
    clockwork.run()
    assert len(good.jobs) == 5
    assert isinstance(bad.error, OSError)
    assert not clockwork.engine.active


def test_an_engine_that_has_no_room_for_ever_is_an_error_and_no_hang() -> None:
    full = engine()
    full.free_slots = lambda request: 0  # type: ignore[method-assign]
    mixer = Mixer(full, 1, 4, None)
    answer = Answer(mixer, read_now(seconds(2)), "bulk")
    mixer.add(answer.request)
    for _ in range(200):
        mixer.point()
    assert isinstance(answer.error, RuntimeError)
    assert answer.ends == 1


# Anything at any time.

LEVELS = {"good": 0.3, "unsure": 0.45, "poisoned": 0.6, "unencodable": 0.75}


def anything_script(pcm: np.ndarray, request: Any) -> Any:
    level = round(float(pcm[0]), 2)
    if level == LEVELS["poisoned"]:
        return result([at(0), POISON, at(0.5)])
    low = level == LEVELS["unsure"] and request.temperature < 0.6
    return result(whole(pcm, request).tokens, temperature=request.temperature, avg_logprob=-3.0 if low else -0.3)


call = st.fixed_dictionaries(
    {
        "at": st.floats(0, 1),
        "inputs": st.lists(st.sampled_from(list(LEVELS)), max_size=6),
        "priority": st.sampled_from(["interactive", "bulk"]),
        "cancelled": st.none() | st.floats(0, 1),
        "batch_size": st.none() | st.integers(1, 6),
        "options": st.fixed_dictionaries(
            {
                "language": st.sampled_from(["en", None]),
                "word_timestamps": st.booleans(),
                "beam_size": st.sampled_from([1, 3]),
                "best_of": st.sampled_from([1, 2]),
                "condition_on_previous_text": st.booleans(),
            }
        ),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(call, max_size=12),
    rows=st.integers(1, 6),
    batch=st.sampled_from([1, 2, 8]),
    step_fails=st.none() | st.integers(1, 60),
    lengths=st.integers(1, 30),
    kind=st.sampled_from([TimedEngine, PoolEngine]),
)
def test_every_request_is_answered_once_and_no_slot_is_lost(
    calls: list[dict[str, Any]], rows: int, batch: int, step_fails: int | None, lengths: int, kind: Any
) -> None:
    random_engine = breaking("encode", LEVELS["unencodable"], kind)
    random_engine.rows, random_engine.encoder_batch = rows, batch
    random_engine.steps = lambda pcm, request: 1 + (len(pcm) + 7 * request.candidates) % lengths
    random_engine.script = anything_script
    random_engine.encode_seconds, random_engine.step_seconds = (0.004, 0.004), (0.004, 0.001)
    clockwork = Clockwork(random_engine, steps=1 + lengths % 4)
    if step_fails is not None:
        random_engine.fail_in = {"step": step_fails}
    wanted: dict[Answer, dict[str, Any]] = {}

    def come(each: dict[str, Any]) -> None:
        inputs = [tone(1, LEVELS[kind]) for kind in each["inputs"]]
        answer = clockwork.submit(inputs, each["priority"], each["batch_size"], **each["options"])
        wanted[answer] = each
        if each["cancelled"] is not None:
            clockwork.at(clockwork.engine.now + each["cancelled"], answer.request.cancel)

    def check() -> None:
        if "step" in random_engine.fail_in and random_engine.fail_in["step"] <= 0:
            del random_engine.fail_in["step"]  # it fails once

    for each in calls:
        clockwork.at(each["at"], lambda each=each: come(each))
    clockwork.run(check=check)

    assert not random_engine.active
    assert not clockwork.mixer.slots
    assert not clockwork.mixer._parked
    assert all(not queue.is_active for queue in clockwork.mixer.queues)
    assert len(wanted) == len(calls)
    for answer, each in wanted.items():
        assert answer.ends == 1
        assert not answer.request.tasks
        assert answer.request.occupied.total() == 0
        assert len(set(map(id, answer.jobs))) == len(answer.jobs) <= len(each["inputs"])
        if answer.error is not None:
            assert "encode broke" in str(answer.error) or "step broke" in str(answer.error)
            assert "unencodable" in each["inputs"] or step_fails is not None
        elif each["cancelled"] is None:
            assert len(answer.jobs) == len(each["inputs"])
            assert "unencodable" not in each["inputs"]
            failed = sum(job.error is not None for job in answer.jobs)
            assert failed == each["inputs"].count("poisoned")


def test_the_engine_grows_for_a_larger_request_although_it_is_never_idle() -> None:
    small = engine(rows=2)
    small.rows = 2
    sizes: list[int] = []

    def resize(slots: int) -> None:
        assert not small.active
        small.rows = slots
        sizes.append(slots)

    clockwork = Clockwork(small)
    clockwork.mixer = Mixer(small, 4, 2, resize)
    few = clockwork.submit(seconds(100), "bulk", batch_size=1)
    clockwork.run(until=lambda: len(few.jobs) > 10)
    assert not sizes  # fewer than there are is no reason to make them anew
    many = clockwork.submit(seconds(100, CLIP), "bulk", batch_size=8)
    clockwork.run(until=lambda: len(many.jobs) > 10)
    assert sizes == [8]
    assert sum(round(float(slot.pcm[0]), 2) == BULK for slot in small.active) <= 1
    clockwork.run()
    assert len(few.jobs) == len(many.jobs) == 100
    assert sizes in ([8], [8, 2])
