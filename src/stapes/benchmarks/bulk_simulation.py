"""How far one driver goes: the real plan and the real driver, with workers that only exist on a clock of their own.

What is measured is real (seconds of this processor for each file that is planned, each shard that is given out, each
one that is written, and the memory of the process); what the workers do takes no time at all.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stapes.bulk.driver import Driver
from stapes.bulk.executor import Assignment, Died, Done, Event, Executor, Kept, Progress, Ready, Returned
from stapes.bulk.files import compress
from stapes.bulk.inputs import Item
from stapes.bulk.options import Part
from stapes.bulk.plan import Plan, make_plan
from stapes.bulk.spec import Spec
from stapes.bulk.store import Counts, Store
from stapes.devices.machine import peak_rss_bytes, reset_peak_memory
from stapes.options import TranscribeOptions

_START_SECONDS = 60.0
"""Of the simulated clock, until a worker has its model."""

_ROW = 2_500
"""Bytes of a row of some ten seconds of speech, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A job to simulate. ``speed``: seconds of audio that a worker transcribes a second; ``deaths_per_hour``: of each
    worker; ``writes``: shards that are really written, to see what that takes."""

    files: int
    workers: int
    speed: float
    file_seconds: float = 10.0
    shard_seconds: float = 3600.0
    deaths_per_hour: float = 0.01
    writes: int = 200
    seed: int = 0


class _Worker:
    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.queue: deque[Assignment] = deque()
        self.epoch = 0
        """Goes up when it dies: what it had begun then never ends."""
        self.up = False


class SimulatedExecutor(Executor):
    """Workers on a clock of their own, some faster than others, some dying now and then."""

    def __init__(self, scale: Scale) -> None:
        self._random = random.Random(scale.seed)  # noqa: S311 - a simulation
        self._scale = scale
        self.now = 0.0
        self.deaths = 0
        self._given = self._starting = 0
        self._order = 0
        self._agenda: list[tuple[float, int, str, str, int, int]] = []
        self._found: list[Event] = []
        self._workers = {
            f"worker-{n}": _Worker(scale.speed * math.exp(self._random.gauss(0.0, 0.1))) for n in range(scale.workers)
        }
        self._rows: dict[int, bytes] = {}  # how many → rows that say nothing

    @property
    def workers(self) -> Sequence[str]:
        return list(self._workers)

    def clock(self) -> float:
        """The simulated time, in seconds."""
        return self.now

    def start(self) -> None:
        for name in self._workers:
            self._plan("ready", name, _START_SECONDS)
            self._plan_death(name)

    def submit(self, worker: str, assignment: Assignment) -> None:
        state = self._workers[worker]
        state.queue.append(assignment)
        self._given += 1
        if len(state.queue) == 1:
            self._begin(worker, state)

    def recall(self, worker: str, number: int) -> None:
        state = self._workers[worker]
        found = next((each for each in list(state.queue)[1:] if each.number == number), None)
        if found is None:
            self._found.append(Kept(worker, number))
        else:
            state.queue.remove(found)
            self._given -= 1
            self._found.append(Returned(worker, number))

    def restart(self, worker: str) -> None:
        self._die(worker)

    def events(self, timeout: float) -> Sequence[Event]:
        # Where nobody has work, deaths alone are nothing to wait for.
        while not self._found and self._agenda and (self._given or self._starting):
            at, _, what, worker, epoch, number = heapq.heappop(self._agenda)
            state = self._workers[worker]
            if what != "death" and epoch != state.epoch:
                continue
            self.now = max(self.now, at)
            if what == "ready":
                self._starting -= 1
                state.up = True
                ahead = 120 * 30.0
                self._found.append(Ready(worker, 264, max(ahead, 2 * self._scale.shard_seconds)))
            elif what == "death":
                self._die(worker)
                self._plan_death(worker)
            else:
                done = state.queue.popleft()
                self._given -= 1
                assert done.number == number
                self._found.append(self._done(worker, done))
                if state.queue:
                    self._begin(worker, state)
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        self._agenda = []

    def _plan(self, what: str, worker: str, delay: float, number: int = 0) -> None:
        self._order += 1
        self._starting += what == "ready"
        entry = (self.now + delay, self._order, what, worker, self._workers[worker].epoch, number)
        heapq.heappush(self._agenda, entry)

    def _plan_death(self, worker: str) -> None:
        if self._scale.deaths_per_hour:
            self._plan("death", worker, self._random.expovariate(self._scale.deaths_per_hour / 3600))

    def _begin(self, worker: str, state: _Worker) -> None:
        self._found.append(Progress(worker, state.queue[0].number, 1, ()))
        self._plan("done", worker, state.queue[0].seconds / state.speed, state.queue[0].number)

    def _die(self, worker: str) -> None:
        state = self._workers[worker]
        if state.up:
            state.up = False
            state.epoch += 1
            self._given -= len(state.queue)
            state.queue.clear()
            self.deaths += 1
            self._found.append(Died(worker, "the simulation had it so"))
            self._plan("ready", worker, _START_SECONDS)

    def _done(self, worker: str, assignment: Assignment) -> Done:
        counts = Counts(files=len(assignment.items), seconds=assignment.seconds)
        size = len(assignment.items)
        if size not in self._rows:
            self._rows[size] = compress(b'{"id": "", "status": "ok", "duration": 0.0}\n' * size)
        return Done(worker, assignment.number, self._rows[size], counts)


def sample_rows(scale: Scale) -> bytes:
    """The rows of a shard, about as large as those of words are."""
    return compress(b"".join(_line(number) for number in range(round(scale.shard_seconds / scale.file_seconds))))


def _line(number: int) -> bytes:
    """A row that compresses about as words do: four bits a character."""
    text = random.Random(number).randbytes(_ROW // 4).hex()  # noqa: S311 - a simulation
    return json.dumps({"id": str(number), "text": text + " " * (_ROW // 2)}).encode() + b"\n"


class _QuietStore(Store):
    """Writes nothing: what writing takes is measured by itself."""

    def commit(self, shard: int, rows: bytes, counts: Counts, facts: dict[str, Any]) -> dict[str, Any]:
        return {}


def _write_seconds(store: Store, scale: Scale) -> float:
    """Seconds that a shard takes where four are written at a time, as a driver does."""
    rows, counts = sample_rows(scale), Counts(files=1)
    with ThreadPoolExecutor(4) as writers:
        began = time.perf_counter()
        for future in [writers.submit(store.commit, n, rows, counts, {}) for n in range(scale.writes)]:
            future.result()
        return (time.perf_counter() - began) / scale.writes


def simulate(scale: Scale, folder: Path | None = None) -> dict[str, Any]:
    """Plan and drive a job of this size; what it took, as JSON. folder: where to write; default: a temporary one."""
    place = Path(tempfile.mkdtemp(prefix="stapes-bulk-", dir=folder))
    try:
        store = _QuietStore(place)
        store.make()
        reset_peak_memory()
        began = time.process_time()
        plan = make_plan(
            place, lambda: _items(scale), ["simulated"], shard_seconds=scale.shard_seconds, shard_files=1 << 20
        )
        planning, planning_rss = time.process_time() - began, peak_rss_bytes()
        reset_peak_memory()
        executor = SimulatedExecutor(scale)
        began = time.process_time()
        driver = _driver(store, plan, executor)
        driver.run()
        driving = time.process_time() - began
        driving_rss = peak_rss_bytes()
        write = _write_seconds(Store(place), scale)
        plan_bytes = sum(each.stat().st_size for each in place.glob("plan.*"))
        measured = _Measured(planning, planning_rss, driving, driving_rss, write, plan_bytes)
        return _findings(scale, plan, executor, driver, measured)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _driver(store: Store, plan: Plan, executor: SimulatedExecutor) -> Driver:
    from stapes.bulk.report import Report

    spec = Spec(model="simulated", revision="none", options=TranscribeOptions(), settings={})
    report = Report(plan, Part(), executor.workers, executor.clock)
    return Driver(store, plan, spec, executor, part=Part(), max_errors=1.0, report=report, clock=executor.clock)


def _items(scale: Scale) -> Iterator[Item]:
    """Recordings of lengths as they are found: most of a few seconds, some of minutes (log-normal)."""
    source = random.Random(scale.seed)  # noqa: S311 - a simulation
    spread = 0.8
    center = math.log(scale.file_seconds) - spread**2 / 2
    for number in range(scale.files):
        name = f"s3://corpus/audio/{number // 10_000:05d}/{number:09d}.opus"
        yield Item(name, name, round(source.lognormvariate(center, spread), 2))


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds of this processor and bytes of its memory; ``write``: wall-clock seconds of a shard."""

    planning: float
    planning_rss: int | None
    driving: float
    driving_rss: int | None
    write: float
    plan_bytes: int


def _findings(
    scale: Scale, plan: Plan, executor: SimulatedExecutor, driver: Driver, measured: _Measured
) -> dict[str, Any]:
    audio, files, shards = float(plan.seconds.sum()), int(plan.files.sum()), len(plan)
    shard_seconds = audio / shards
    demand = scale.workers * scale.speed / shard_seconds  # shards a second
    # Seconds, for each shard, of what there is one of.
    of_a_shard = {"driving": measured.driving / shards, "writing": measured.write}
    capacity = {name: shard_seconds / seconds for name, seconds in of_a_shard.items() if seconds}
    first = min(capacity, key=lambda name: capacity[name])
    ideal = audio / (scale.workers * scale.speed)
    return {
        "files": files,
        "workers": scale.workers,
        "shards": shards,
        "hours": round(audio / 3600, 1),
        "deaths": executor.deaths,
        "redone_share": None if not shards else round(driver.redone_seconds / audio, 5),
        "simulated_hours": round(executor.now / 3600, 3),
        "share_of_ideal": round(ideal / max(1e-9, executor.now - _START_SECONDS), 4),
        "planning_microseconds_per_file": round(1e6 * measured.planning / files, 2),
        "driving_microseconds_per_file": round(1e6 * measured.driving / files, 2),
        "driving_milliseconds_per_shard": round(1e3 * measured.driving / shards, 3),
        "writing_milliseconds_per_shard": round(1e3 * measured.write, 3),
        "plan_bytes": measured.plan_bytes,
        "planning_peak_rss_bytes": measured.planning_rss,
        "driving_peak_rss_bytes": measured.driving_rss,
        "shards_per_second_needed": round(demand, 2),
        "audio_seconds_per_second_at_most": {name: round(value) for name, value in capacity.items()},
        "first_bottleneck": first,
        "workers_at_most": math.floor(capacity[first] / scale.speed),
        # A write costs about the same whatever is in it; driving grows with the files, and is shared out by parts.
        "shard_hours_for_all": round(scale.shard_seconds / 3600 * measured.write * demand, 2),
        "drivers_for_all": math.ceil(of_a_shard["driving"] * demand),
    }
