"""The driver of a job: gives shards to workers, writes what comes back, and knows what to do when something dies.

A worker is kept busy a few recordings ahead, and one that has nothing left takes over what another has not begun. When
a worker dies its shards are given out again. When that happens to a shard twice, the recordings that may be to blame
are each given to a worker that has nothing else; one that ends two workers so is quarantined.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stapes.bulk.executor import Assignment, Died, Done, Event, Executor, Heard, Kept, Progress, Ready, Returned
from stapes.bulk.files import decompress
from stapes.bulk.options import Part
from stapes.bulk.plan import Plan
from stapes.bulk.report import Report
from stapes.bulk.rows import pack_rows, quarantined_row
from stapes.bulk.spec import Spec
from stapes.bulk.store import Counts, Store
from stapes.errors import StapesError

_STALL_SECONDS = 900.0
"""A worker that has work and gives no sign for so long is ended."""

_MOST_KILLS = 2
"""Workers that a recording may end while they do nothing else."""

_LEAST_ERRORS = 25
"""Failures that a job may always have, however few recordings are done."""

_WRITERS = 4
_MOST_WRITES = 64


class TooManyErrors(StapesError):  # noqa: N818 - it is a finding
    """More recordings fail than the job may have."""


class WorkersLost(StapesError):  # noqa: N818 - it is a finding
    """No worker can begin. ``exit_code``: of what kept the last one from it."""

    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue] - each its own


@dataclass(eq=False)
class _Worker:
    """What the driver knows of a worker."""

    name: str
    ready: Ready | None = None
    given: dict[int, Assignment] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    ended: dict[int, set[int]] = field(default_factory=dict)
    recalled: int | None = None
    on_trial: bool = False
    """It has one recording, which may be the end of it, and is given nothing else."""
    given_up: bool = False
    seen: float = 0.0

    outstanding: float = 0.0
    """Expected seconds of audio that it was given and has not finished."""

    def unbegun(self) -> list[int]:
        """What it could give back, oldest first: it keeps what it works on."""
        return [number for number in self.given if not self.begun[number]] if len(self.given) > 1 else []

    def take(self, assignment: Assignment) -> None:
        self.given[assignment.number] = assignment
        self.outstanding += assignment.seconds
        self.begun[assignment.number] = 0
        self.ended[assignment.number] = set()

    def drop(self, number: int) -> Assignment | None:
        self.begun.pop(number, None)
        self.ended.pop(number, None)
        if self.recalled == number:
            self.recalled = None
        self.on_trial = False
        found = self.given.pop(number, None)
        if found is not None:
            self.outstanding -= found.seconds
        return found

    def lose(self) -> list[Assignment]:
        """It has died: what it was given."""
        lost = list(self.given.values())
        self.ready, self.outstanding, self.on_trial, self.recalled = None, 0.0, False, None
        self.given, self.begun, self.ended = {}, {}, {}
        return lost


@dataclass(frozen=True, slots=True)
class _Work:
    """A part of a shard that is to be done. ``places``: None is all of it."""

    shard: int
    places: tuple[int, ...] | None = None


class Driver:
    """One run over the shards of a part. ``clock``: seconds, such as ``time.monotonic``."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        spec: Spec,
        executor: Executor,
        *,
        part: Part,
        max_errors: float,
        retry_failed: bool = False,
        report: Report | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.plan, self.spec, self.executor = store, plan, spec, executor
        self.part, self.max_errors, self._clock, self._is_stopped = part, max_errors, clock, is_stopped
        self._workers = {name: _Worker(name) for name in executor.workers}
        self._hungry: set[_Worker] = set()
        self._number = 0
        self._alone: deque[_Work] = deque()  # single recordings, each for a worker with nothing else
        self._parts: dict[int, dict[int, dict[str, Any]]] = {}  # shard → place → row, of shards done in parts
        self._deaths: Counter[int] = Counter()  # of workers on each shard, in company
        self._kills = store.deaths()
        self._new = Counts()
        self._writes: dict[Future[Any], tuple[int, Counts]] = {}
        self._writer = ThreadPoolExecutor(_WRITERS, thread_name_prefix="write")
        self.redone_seconds = 0.0
        """Of audio, as expected, that was begun and given out again because a worker had died."""
        self._sample: dict[str, str] = {}  # kind of error → one that says it
        self.report = report or Report(plan, part, executor.workers, clock)
        self._queue: deque[_Work] = deque(self._begin(retry_failed))
        self._left = len({work.shard for work in self._queue})

    def _begin(self, retry_failed: bool) -> Iterable[_Work]:
        """What is to be done: whole shards, the largest first, and what failed of others where that is wanted."""
        mine = [shard for shard in range(len(self.plan)) if shard % self.part.count == self.part.index]
        finished = set(self.store.finished())
        work: list[_Work] = []
        for shard in mine:
            if shard not in finished:
                continue
            done = self.store.read_done(shard)
            counts = Counts(**{name: done[name] for name in Counts.__slots__})
            if retry_failed and counts.failed:
                rows = self.store.read_rows(shard)
                self._parts[shard] = {place: row for place, row in enumerate(rows) if row["status"] == "ok"}
                places = tuple(place for place in range(len(rows)) if place not in self._parts[shard])
                self._kills = {
                    name: n for name, n in self._kills.items() if name not in {rows[p]["id"] for p in places}
                }
                work.append(_Work(shard, places))
            else:
                self.report.found(shard, counts)
        open_shards = np.array([shard for shard in mine if shard not in finished], np.int64)
        # By powers of two: among shards of about one size, the order of the plan stays.
        sizes = np.floor(np.log2(np.maximum(self.plan.seconds[open_shards], 1.0)))
        return [_Work(int(shard)) for shard in open_shards[np.argsort(-sizes, kind="stable")]] + work

    def run(self) -> None:
        """Work until everything is done, or ``is_stopped``; what is finished stays. Raises StapesError for what ends
        the job."""
        try:
            if self._left:
                self.executor.start()
            while (self._left or self._writes) and not self._is_stopped():
                self._assign()
                # A write that ends wakes nobody: it is looked after soon.
                for event in self.executor.events(0.02 if self._writes else 0.5):
                    self._take(event)
                self._collect()
                self._watch()
                self.report.write(self.store)
            stopped = self._left or self._writes
            self.report.end("stopped" if stopped else "finished", self.store, "interrupted" if stopped else None)
        except BaseException as error:
            said = str(error) if isinstance(error, StapesError) else "interrupted"
            self.report.end("stopped", self.store, said)
            raise
        finally:
            self.executor.close()
            self._writer.shutdown(wait=True)

    # Giving out work.

    def _assign(self) -> None:
        """Give work to those that have room for it: `_hungry` are at least all of them."""
        for worker in sorted(self._hungry, key=lambda worker: worker.outstanding):
            if self._alone and not worker.given:
                self._give(worker, self._alone.popleft())
                worker.on_trial = True
            while self._queue and not worker.on_trial and self._has_room(worker):
                self._give(worker, self._queue.popleft())
        if self._queue or self._alone:
            self._hungry = {worker for worker in self._hungry if not worker.given}
        elif any(not worker.given for worker in self._hungry):
            self._steal()

    def _has_room(self, worker: _Worker) -> bool:
        return worker.ready is not None and (len(worker.given) < 2 or worker.outstanding < worker.ready.ahead)

    def _give(self, worker: _Worker, work: _Work) -> None:
        items = self.plan.items(work.shard)
        places = tuple(range(len(items))) if work.places is None else work.places
        self._number += 1
        chosen = [items[place] for place in places]
        assignment = Assignment(self._number, work.shard, chosen, places, sum(item.seconds for item in chosen))
        worker.take(assignment)
        worker.seen = self._clock()
        self.executor.submit(worker.name, assignment)

    def _steal(self) -> None:
        """Ask the worker with most before it for what it was given last: somebody has nothing to do."""
        if any(worker.recalled is not None for worker in self._workers.values()):
            return
        rich = [worker for worker in self._workers.values() if worker.unbegun()]
        if rich:
            worker = max(rich, key=lambda worker: worker.outstanding)
            worker.recalled = worker.unbegun()[-1]
            self.executor.recall(worker.name, worker.recalled)

    # Taking what comes back.

    def _take(self, event: Event) -> None:
        worker = self._workers[event.worker]
        worker.seen = self._clock()
        if isinstance(event, Ready):
            worker.ready = event
            self._hungry.add(worker)
            self.report.ready(event)
        elif isinstance(event, Progress):
            if event.number in worker.given:
                worker.begun[event.number] = event.begun
                worker.ended[event.number].update(place for place, _, _ in event.ended)
                self.report.progress(event, worker.given[event.number].shard)
        elif isinstance(event, Heard):
            self.report.heard(event)
        elif isinstance(event, Returned):
            if (assignment := worker.drop(event.number)) is not None:
                self._hungry.add(worker)
                self._queue.append(self._work_of(assignment))
        elif isinstance(event, Kept):
            worker.recalled = None
            if event.number in worker.given:  # it has begun, though it has not said so yet
                worker.begun[event.number] = max(1, worker.begun[event.number])
        elif isinstance(event, Done):
            if (assignment := worker.drop(event.number)) is not None:
                self._hungry.add(worker)
                self._finish(assignment, event.rows, event.counts, worker)
        else:
            self._bury(worker, event)

    def _work_of(self, assignment: Assignment) -> _Work:
        whole = len(assignment.places) == self.plan.files[assignment.shard]
        return _Work(assignment.shard, None if whole else tuple(assignment.places))

    def _finish(self, assignment: Assignment, rows: bytes, counts: Counts, worker: _Worker) -> None:
        shard = assignment.shard
        if counts.failed and len(self._sample) < 20:
            self._remember(rows)
        self._check_errors(counts)
        if len(assignment.places) < self.plan.files[shard]:
            found = [json.loads(line) for line in decompress(rows).splitlines()]
            self._keep(shard, dict(zip(assignment.places, found, strict=True)))
            return
        self._write(shard, rows, counts, worker)

    def _keep(self, shard: int, rows: dict[int, dict[str, Any]]) -> None:
        """Keep the rows of a part of a shard until it is whole."""
        held = self._parts.setdefault(shard, {})
        held |= rows
        if len(held) == self.plan.files[shard]:
            del self._parts[shard]
            packed, counts = pack_rows([held[place] for place in range(len(held))])
            self._write(shard, packed, counts, None)

    def _write(self, shard: int, rows: bytes, counts: Counts, worker: _Worker | None) -> None:
        while len(self._writes) >= _MOST_WRITES:
            self._collect(wait=True)
        facts: dict[str, Any] = {"fingerprint": self.spec.fingerprint(), "finished": round(time.time(), 3)}
        if worker is not None and worker.ready is not None:
            facts["worker"] = {"name": worker.name, **worker.ready.facts}
        future = self._writer.submit(self.store.commit, shard, rows, counts, facts)
        self._writes[future] = shard, counts

    def _collect(self, *, wait: bool = False) -> None:
        for future in list(self._writes):
            if future.done() or wait:
                shard, counts = self._writes.pop(future)
                future.result()
                self._left -= 1
                self.report.committed(shard, counts)
                wait = False

    # When something goes wrong.

    def _bury(self, worker: _Worker, event: Died) -> None:
        """A worker has died: its work is given out again, with suspicion where that is due."""
        begun, ended = worker.begun, worker.ended
        window = worker.ready.window if worker.ready is not None else 0
        lost = worker.lose()
        alone = len(lost) == 1 and len(lost[0].items) == 1
        self._hungry.discard(worker)
        self.report.died(event, [assignment.number for assignment in lost])
        for assignment in reversed(lost):
            if begun[assignment.number]:
                self.redone_seconds += assignment.seconds
            if alone:
                self._try_again(assignment, event)
            elif not begun[assignment.number] and assignment is not lost[0]:
                self._queue.appendleft(self._work_of(assignment))
            else:
                self._deaths[assignment.shard] += 1
                if self._deaths[assignment.shard] < 2:
                    self._queue.appendleft(self._work_of(assignment))
                else:
                    # Who dies at once has had no time to say that it began.
                    reach = max(1, begun[assignment.number] + window)
                    self._part(assignment, reach, ended[assignment.number])
        if event.hopeless:
            worker.given_up = True
            if all(each.given_up for each in self._workers.values()):
                raise WorkersLost(f"no worker can go on: {event.worker} {event.reason}", event.exit_code)

    def _part(self, assignment: Assignment, reach: int, ended: set[int]) -> None:
        """Try the recordings that may have ended a worker one by one, and the rest of the shard without them."""
        suspects = [place for n, place in enumerate(assignment.places) if n < reach and n not in ended]
        rest = tuple(place for place in assignment.places if place not in suspects)
        if rest:
            self._queue.appendleft(_Work(assignment.shard, rest))
        self._alone.extend(_Work(assignment.shard, (place,)) for place in suspects)

    def _try_again(self, assignment: Assignment, event: Died) -> None:
        """A worker died while it did this recording and nothing else."""
        (item,), (place,) = assignment.items, assignment.places
        self._kills[item.id] = self._kills.get(item.id, 0) + 1
        self.store.note_death(item.id)
        if self._kills[item.id] < _MOST_KILLS:
            self._alone.append(_Work(assignment.shard, (place,)))
            return
        reason = f"ended {_MOST_KILLS} workers while they did nothing else (the last: {event.reason})"
        row = quarantined_row(item, self.spec, reason)
        self._sample.setdefault(row["kind"], row["error"])
        counts = Counts()
        counts.add_row(row)
        self._check_errors(counts)
        if self.plan.files[assignment.shard] == 1:
            self._write(assignment.shard, *pack_rows([row]), None)
        else:
            self._keep(assignment.shard, {place: row})

    def _remember(self, rows: bytes) -> None:
        for line in decompress(rows).splitlines():
            row = json.loads(line)
            if row["status"] != "ok":
                self._sample.setdefault(row["kind"], row["error"])

    def _check_errors(self, counts: Counts) -> None:
        """Raise TooManyErrors where more has failed in this run than may."""
        self._new.add(counts)
        new = self._new
        if new.failed <= max(_LEAST_ERRORS, self.max_errors * new.files):
            return
        kinds = sorted(new.errors.items(), key=lambda pair: -pair[1])
        found = "; ".join(f"{count} × {kind}, such as: {self._sample.get(kind, '')}" for kind, count in kinds[:3])
        raise TooManyErrors(
            f"{new.failed} of {new.files} recordings failed, more than --max-errors {self.max_errors:g} allows, "
            f"so the job was stopped ({found}). What is finished stays: mend the cause and run the same command "
            "again, or raise --max-errors"
        )

    def _watch(self) -> None:
        """End workers that have work and give no sign of life."""
        now = self._clock()
        for worker in self._workers.values():
            if worker.given and worker.ready is not None and now - worker.seen > _STALL_SECONDS:
                worker.seen = now
                self.executor.restart(worker.name)
