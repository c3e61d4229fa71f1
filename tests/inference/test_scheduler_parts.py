"""An engine that encodes window by window, as on a CPU: a clip beside a long recording, by the engine's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import Answer, Clockwork, TimedEngine, tone

from stapes.inference.engine import DecodeRequest
from stapes.inference.queues import TURNS, Queues
from stapes.inference.streaming import _Windows

BULK, CLIP = 0.25, 0.75
PARTS = 7


@dataclass
class PartsEngine(TimedEngine):
    """Encoding takes 38 steps, in seven parts: as Whisper base does on one core. Clips have 22 tokens."""

    rows: int = 3
    encode_seconds: tuple[float, float] = (0.0, 0.57)
    step_seconds: tuple[float, float] = (0.0, 0.015)
    steps_per_look = 1
    is_serial: bool = True
    between: Callable[[], None] = lambda: None
    broken_part: int | None = None

    def step(self, count: int, *, urgent: bool = False) -> None:
        """A step takes as many times as long as there are windows in slots."""
        stepped = [slot for slot in self.active if slot.request.urgent or not urgent]
        self.log.append(("step", len(stepped)))
        for slot in stepped:
            slot.left -= count
        self.now += count * self.step_seconds[1] * len(stepped)

    def free_slots(self, request: DecodeRequest) -> int:
        return self.rows - sum(slot.request.urgent == request.urgent for slot in self.active)

    def encode_in_parts(self, window: np.ndarray, *, again: bool = False) -> Iterator[Any]:
        for number in range(PARTS):
            self.now += self.encode_seconds[1] / PARTS
            self.log.append(("part", number, round(float(window[0]), 2)))
            if number == self.broken_part:
                raise RuntimeError("a part broke")
            self.between()
            if number < PARTS - 1:
                yield None
        yield window


def seconds(count: int, level: float = BULK) -> list[np.ndarray]:
    return [tone(1, level) for _ in range(count)]


def clockwork(**changes: Any) -> Clockwork:
    engine = PartsEngine(steps=lambda pcm, request: 90 if round(float(pcm[0]), 2) == BULK else 22, **changes)
    made = Clockwork(engine, steps=1)

    def ring() -> None:
        """Whoever comes now wants the next scheduling point soon."""
        if made.events and made.events[0][0] <= engine.now:
            made.mixer.urgent = True

    engine.between = ring
    return made


def alone() -> float:
    made = clockwork()
    made.submit(seconds(1, CLIP), "interactive")
    made.run()
    return made.engine.now


def beside(made: Clockwork, every: float = 3.037) -> list[float]:
    """Seconds that clips take beside a long recording, whenever they come."""
    clips: list[tuple[float, Answer]] = []
    made.submit(seconds(300 if every > 1 else 2000), "bulk")
    for number in range(40):
        due = 1.0 + every * number  # it may come in the middle of something
        made.at(due, lambda due=due: clips.append((due, made.submit(seconds(1, CLIP), "interactive"))))
    made.run(until=lambda: len(clips) == 40 and all(clip.request.ended for _, clip in clips))
    return sorted(made.finished[clip] - due for due, clip in clips)


def test_three_seconds_beside_ten_minutes_take_less_than_twice_as_long() -> None:
    """whisper.cpp #1803: a clip of 3 s waited for minutes behind a file of ten."""
    waits = beside(clockwork())
    assert waits[-2] < 2 * alone()  # of forty, the 95th percentile
    assert waits[20] < 1.6 * alone()


def test_together_with_others_it_would_take_longer() -> None:
    assert beside(clockwork(is_serial=False))[20] > 1.2 * beside(clockwork())[20]


def test_bulk_loses_next_to_nothing_and_every_text_is_the_same() -> None:
    def texts(made: Clockwork, answer: Answer) -> list[str]:
        return [segment.text for job in answer.jobs for channel in job.channels for segment in channel.segments]

    lonely, shared = clockwork(), clockwork()
    want = lonely.submit(seconds(60), "bulk")
    lonely.run()
    got = shared.submit(seconds(60), "bulk")
    for number in range(20):
        shared.at(3.037 * number, lambda: shared.submit(seconds(1, CLIP), "interactive"))
    shared.run()
    own = 20 * alone()
    assert shared.engine.now < lonely.engine.now + 1.5 * own
    assert texts(shared, got) == texts(lonely, want)
    parts = [entry for entry in shared.engine.log if entry[0] == "part"]
    assert len(parts) == PARTS * 60  # no part is done twice


def test_bulk_keeps_a_share_whatever_comes() -> None:
    made = clockwork()
    bulk = made.submit(seconds(6), "bulk")
    flood = [made.submit(seconds(80, CLIP), "interactive") for _ in range(8)]
    made.run(until=lambda: len(bulk.jobs) == 6)
    share = 6 / (6 + sum(len(answer.jobs) for answer in flood))
    assert 1 / (6 * TURNS) < share < 0.5  # of windows; its own take twice as long


def test_a_part_that_fails_is_its_own_requests_end() -> None:
    made = clockwork(broken_part=3)
    broken = made.submit(seconds(3), "bulk")
    clip = made.submit(seconds(1, CLIP), "interactive")
    made.run()
    assert "a part broke" in str(broken.error)
    assert clip.error is None
    assert len(clip.jobs) == 1
    assert not made.engine.active


def test_between_two_parts_a_request_may_be_cancelled() -> None:
    made = clockwork()
    bulk = made.submit(seconds(3), "bulk")

    def leave() -> None:
        bulk.request.cancel()

    made.engine.between = leave  # type: ignore[attr-defined]
    made.run()
    assert bulk.ends == 1
    assert [entry[1] for entry in made.engine.log if entry[0] == "part"] == [0]


@dataclass(eq=False)
class Waiting:
    rank: int
    take: Callable[[], int | None]
    tasks: set[Any] = field(default_factory=set)
    batch_size: int | None = None


def windows(rank: int, count: int) -> Any:
    """A request with so many windows of a rank."""
    left = list(range(count))

    return Waiting(rank, lambda: left.pop() if left else None)


def test_ends_of_turns_come_first_and_partials_last_but_for_their_share() -> None:
    queues = Queues()
    finals, clips, partials = windows(-1, 5), windows(0, 40), windows(1, 40)
    queues.interactive.requests += [clips, partials, finals]
    order: list[Any] = []
    while (task := queues.take(queues.interactive, 1)) is not None:
        order.append(task.owner)
    assert order[:5] == [finals] * 5
    first = order[5:45]
    assert first.count(partials) == pytest.approx(40 / TURNS, abs=1)
    assert order[-30:] == [partials] * 30


def test_live_windows_say_how_urgent_they_are() -> None:
    live: Any = SimpleNamespace()
    waiting = _Windows(live)
    waiting.wait_for(SimpleNamespace(queued="partial"), "partial")  # type: ignore[arg-type]
    assert waiting.rank == 1
    waiting.wait_for(SimpleNamespace(queued="final"), "final")  # type: ignore[arg-type]
    assert waiting.rank == -1


@dataclass
class AsyncEngine(TimedEngine):
    """A GPU that encodes beside the steps it makes, turbo's figures: a window is its sound and when it is encoded."""

    rows: int = 64
    encoder_batch: int = 16
    encode_seconds: tuple[float, float] = (0.001, 0.0045)
    step_seconds: tuple[float, float] = (0.0015, 0.00002)
    enqueues = finds_words_apart = True
    encoder_free: float = 0.0
    asks: bool = True

    def encode(self, windows: Any, *, again: bool = False, urgent: bool = False) -> list[Any]:
        self.now += 0.002  # what the host does
        took = self.encode_seconds[0] + self.encode_seconds[1] * len(windows)
        begin = self.now if urgent else max(self.now, self.encoder_free)
        self.encoder_free = max(begin, self.encoder_free) + took
        self.log.append(("encode", len(windows)))
        return [(window, begin + took) for window in windows]

    def is_encoded(self, encoded: tuple[np.ndarray, float]) -> bool:
        return not self.asks or encoded[1] <= self.now

    def admit(self, requests: Any, encoded: Any) -> list[Any]:
        ready = max(when for _, when in encoded)
        self.now = max(self.now, ready) + 0.004
        return super().admit(requests, [window for window, _ in encoded])


def async_clockwork(**changes: Any) -> Clockwork:
    return Clockwork(AsyncEngine(steps=lambda pcm, request: 90 if round(float(pcm[0]), 2) == BULK else 12, **changes))


def test_what_is_encoded_beside_steps_does_not_hold_them_up() -> None:
    lonely = async_clockwork()
    lonely.submit(seconds(1, CLIP), "interactive")
    lonely.run()
    waits = beside(async_clockwork(), every=0.137)
    assert waits[-2] < 3 * lonely.engine.now  # of slots that are all taken
    assert beside(async_clockwork(asks=False), every=0.137)[-2] > 2 * waits[-2]


def test_the_encoder_is_kept_at_work_beside_the_steps() -> None:
    made = async_clockwork()
    made.submit(seconds(1000), "bulk")
    made.run()
    first, each = AsyncEngine.encode_seconds
    assert made.engine.now < 1.2 * 1000 * (each + first / AsyncEngine.encoder_batch)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_few_windows_are_on_the_device(priority: Any) -> None:
    made = async_clockwork(rows=2)
    made.submit(seconds(400, CLIP), priority)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(made.mixer.queues.interactive.fresh) + len(made.mixer.queues.bulk.fresh))

    for number in range(200):
        made.at(0.01 * number, look)
    made.run()
    assert 0 < most <= 3 * AsyncEngine.encoder_batch
