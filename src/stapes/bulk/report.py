"""How far a job is: hours, speed, each worker, time left, errors by kind; told to a listener and kept in a file."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stapes.bulk.executor import Died, Heard, Progress, Ready
from stapes.bulk.options import Part
from stapes.bulk.plan import Plan
from stapes.bulk.store import Counts, Store
from stapes.progress import Progress as Listener
from stapes.progress import Silent

FORMAT = "stapes-bulk-status-1"
_EVERY = 2.0
"""Seconds between two versions of the file."""

_SAY_EVERY = 60.0
"""Seconds between two notes of what the listener does not see."""

_WINDOW = 60.0
"""Seconds that the present speed is taken over."""


@dataclass(slots=True)
class _Running:
    """An assignment that is not written yet."""

    shard: int
    files: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Line:
    """A worker."""

    facts: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"
    deaths: int = 0
    reason: str | None = None
    before: float = 0.0
    heard: float = 0.0
    marks: deque[tuple[float, float]] = field(default_factory=deque)


class Report:
    """Adds up what a driver hears."""

    def __init__(
        self,
        plan: Plan,
        part: Part,
        workers: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        listener: Listener | None = None,
    ) -> None:
        self.plan, self.part, self._clock = plan, part, clock
        self._listener = listener or Silent()
        mine = slice(part.index, None, part.count)
        self.files, self.shards = int(plan.files[mine].sum()), len(plan.files[mine])
        self._expected = float(plan.seconds[mine].sum())
        self._open = self._expected  # expected seconds of shards that are not written
        self.done = Counts()
        self.new = Counts()
        """Of this run."""
        self.shards_done = 0
        self._running: dict[int, _Running] = {}
        self._of_shard: dict[int, set[int]] = {}  # shard → assignments
        self._in_work = 0.0  # seconds of audio of what is over in them
        self._lines = {name: _Line() for name in workers}
        self._started = clock()
        self._began = time.time()
        self._first: float | None = None
        self._written = self._started - _EVERY
        self._said = self._started
        self._told = 0.0
        self._told_total = 0.0

    # What happens.

    def found(self, shard: int, counts: Counts) -> None:
        """A shard was finished before."""
        self._add(shard, counts)

    def ready(self, event: Ready) -> None:
        """A worker can work."""
        self._first = self._first if self._first is not None else self._clock()
        line = self._lines[event.worker]
        line.state, line.facts = "working", event.facts

    def progress(self, event: Progress, shard: int) -> None:
        """A worker is further with an assignment."""
        running = self._running.get(event.number)
        if running is None:
            running = self._running[event.number] = _Running(shard)
            self._of_shard.setdefault(shard, set()).add(event.number)
        for _, seconds, kind in event.ended:
            running.files += 1
            running.seconds += seconds
            self._in_work += seconds
            if kind is not None:
                running.errors[kind] += 1

    def heard(self, event: Heard) -> None:
        """A worker has transcribed more."""
        line = self._lines[event.worker]
        line.heard = event.seconds
        now = self._clock()
        line.marks.append((now, line.before + line.heard))
        while len(line.marks) > 2 and line.marks[1][0] < now - _WINDOW:
            line.marks.popleft()

    def committed(self, shard: int, counts: Counts) -> None:
        """A shard is written."""
        self._drop(self._of_shard.pop(shard, ()))
        self._add(shard, counts)
        self.new.add(counts)

    def _add(self, shard: int, counts: Counts) -> None:
        self.done.add(counts)
        self.shards_done += 1
        self._open -= float(self.plan.seconds[shard])

    def died(self, event: Died, lost: Sequence[int]) -> None:
        """A worker is no more, and what it did with these assignments."""
        line = self._lines[event.worker]
        line.state = "gone" if event.hopeless else "starting again"
        line.deaths += 1
        line.reason = event.reason
        line.before, line.heard = line.before + line.heard, 0.0
        self._drop(lost)
        self._listener.note(f"worker {event.worker} ended: {event.reason}")

    def _drop(self, numbers: Iterable[int]) -> None:
        """Assignments are written, or lost."""
        for number in numbers:
            if (running := self._running.pop(number, None)) is not None:
                self._in_work -= running.seconds
                if running.shard in self._of_shard:
                    self._of_shard[running.shard].discard(number)

    # How far it is.

    @property
    def seconds(self) -> float:
        """Of audio that is done, as far as is known."""
        return self.done.seconds + self._in_work

    def rate(self, name: str) -> float | None:
        """Seconds of audio a second of a worker, lately; None while unknown."""
        marks = self._lines[name].marks
        if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
            return None
        return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])

    def mean_rate(self) -> float | None:
        """Seconds of audio a second, since the first worker was ready."""
        if self._first is None or (elapsed := self._clock() - self._first) <= 0:
            return None
        return (self.new.seconds + self._in_work) / elapsed

    def left(self) -> float:
        """Expected seconds of audio to come: what the plan says, corrected by how far it was off so far."""
        known = self._expected - self._open
        off = self.done.seconds / known if known > 0 and self.done.seconds > 0 else 1.0
        return max(0.0, self._open * off - self._in_work)

    def to_dict(self, state: str = "running", said: str | None = None) -> dict[str, Any]:
        """Everything, as JSON."""
        rate = self.mean_rate()
        errors = self.errors()
        workers = [
            {
                "name": name,
                "state": line.state,
                "audio_seconds": round(line.before + line.heard, 1),
                "audio_seconds_per_second": _rounded(self.rate(name)),
                "deaths": line.deaths,
                **({"last_death": line.reason} if line.reason else {}),
                **line.facts,
            }
            for name, line in self._lines.items()
        ]
        return {
            "format": FORMAT,
            "part": [self.part.index, self.part.count],
            "state": state,
            **({"reason": said} if said else {}),
            "pid": os.getpid(),
            "began": round(self._began, 3),
            "updated": round(time.time(), 3),
            "elapsed_seconds": round(self._clock() - self._started, 2),
            "working_seconds": None if self._first is None else round(self._clock() - self._first, 2),
            "shards": self.shards,
            "shards_done": self.shards_done,
            "files": self.files,
            "files_done": self.done.files + sum(each.files for each in self._running.values()),
            "failed": sum(errors.values()),
            "quarantined": self.done.quarantined,
            "damaged": self.done.damaged,
            "errors": dict(errors),
            "audio_seconds": round(self.seconds, 1),
            "audio_seconds_now": round(self.new.seconds, 1),
            "files_now": self.new.files,
            "audio_seconds_left": round(self.left(), 1),
            "audio_seconds_per_second": _rounded(rate),
            "seconds_left": round(self.left() / rate, 1) if rate else None,
            "workers": workers,
        }

    def write(self, store: Store) -> None:
        """Tell the listener, and now and then the file."""
        seconds, total = self.seconds, self.seconds + self.left()
        if total != self._told_total:
            self._listener.add_total(total - self._told_total)
            self._told_total = total
        if seconds != self._told:
            self._listener.advance(seconds - self._told)
            self._told = seconds
        now = self._clock()
        if now - self._said >= _SAY_EVERY:
            self._said = now
            self._listener.note(self._line())
        if now - self._written >= _EVERY:
            self._written = now
            store.write_status(self.part, self.to_dict())

    def _line(self) -> str:
        """Workers and errors, in words."""
        workers = []
        for name, line in list(self._lines.items())[:16]:
            rate = self.rate(name)
            workers.append(f"{name} {line.state}" if rate is None else f"{name} {rate:.1f} ×")
        more = f" and {len(self._lines) - 16} more" if len(self._lines) > 16 else ""
        errors = self.errors()
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in errors.most_common(5))
        failed = f"; {sum(errors.values()):,} failed: {kinds}" if errors else ""
        return f"{self.shards_done:,} of {self.shards:,} shards; {', '.join(workers)}{more}{failed}"

    def errors(self) -> Counter[str]:
        """Kinds of errors so far, also in shards that are not written."""
        errors = Counter(self.done.errors)
        for each in self._running.values():
            errors.update(each.errors)
        return errors

    def end(self, state: str, store: Store, said: str | None = None) -> None:
        """The run is over."""
        self.write(store)
        store.write_status(self.part, self.to_dict(state, said))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
