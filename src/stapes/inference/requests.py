"""A call on its way: what the caller and the thread that drives the engine share.

The caller iterates over the jobs of its `Request` and may cancel it at any time; the driving thread delivers jobs and
ends it, once, with or without an error. Neither waits for the other while it holds a lock.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stapes.inference.engine import DecodeRequest
from stapes.inference.feed import FeedWindow
from stapes.inference.ingest import Ingest, Job

Priority = Literal["interactive", "bulk"]
"""interactive: someone waits for it, its windows go first. bulk: it takes what is left, and a small share at least."""

Kind = tuple[int, bool, bool]
"""Candidates, whether they are beams, and whether they are served apart: windows of one kind share a lane of slots."""

_CANCEL_SECONDS = 1.0
"""How long a caller waits for its slots to be freed. An engine in the middle of a long operation frees them after."""


@dataclass(eq=False)
class Task:
    """A window of a request on its way through the engine. Only the driving thread touches it."""

    window: FeedWindow
    owner: Request
    attempt: DecodeRequest | None = None
    """How it is to be decoded next; known once it is encoded and its language is known."""

    returned: bool = False
    """It has been in a slot before, and waits for another attempt."""

    preempted: bool = False
    """It has left its slot to an interactive window: that happens to a window once at most."""

    passed_over: bool = False
    """There was no slot for it at a scheduling point."""

    parts: Iterator[Any] | None = None
    """Its encoding, which has been begun."""

    @property
    def kind(self) -> Kind:
        """Which slots it needs."""
        assert self.attempt is not None
        return self.attempt.candidates, self.attempt.is_beam, self.attempt.urgent


class Driver(Protocol):
    """What a request must know of its scheduler."""

    def ring(self, *, urgent: bool) -> None:
        """There may be work. urgent: at the next scheduling point, not after more has been encoded."""
        ...

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the thread that drives the engine."""
        ...


class Request:
    """The jobs of one call; iterate over it to get them as they are done.

    batch_size: the most windows of it in slots at a time, None for any number.
    """

    def __init__(self, driver: Driver, ingest: Ingest, priority: Priority, batch_size: int | None) -> None:
        self.ingest, self.priority, self.batch_size = ingest, priority, batch_size
        self.cancelled = False
        self.ended = False
        self.tasks: set[Task] = set()  # on their way; the driving thread's, like all that follows
        self.occupied: Counter[Kind] = Counter()
        self._driver = driver
        self._has_windows = self._has_jobs = True
        self._changed = threading.Condition()
        self._done: deque[Job] = deque()
        self._error: BaseException | None = None
        ingest.listen(self._stir)

    # The caller.

    def __iter__(self) -> Iterator[Job]:
        while (job := self._next()) is not None:
            yield job

    def _next(self) -> Job | None:
        with self._changed:
            while not self._done and not self.ended:
                self._changed.wait(0.2)  # a time limit lets signals in even where another thread got them
            if not self._done:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                return None
            job = self._done.popleft()
        self.ingest.collected()
        return job

    def cancel(self) -> None:
        """Give up what is left: its slots are free from the next scheduling point on. Returns at once."""
        if not self.ended:
            self.cancelled = True
            self._driver.ring(urgent=True)

    def close(self) -> None:
        """Cancel, wait (a second at most) until the engine is rid of it, and end its reading threads."""
        self.cancel()
        if not self._driver.is_current_thread:  # the garbage collector may have closed us there
            with self._changed:
                self._changed.wait_for(lambda: self.ended, _CANCEL_SECONDS)
        self.ingest.stop()

    # The driving thread.

    def _stir(self) -> None:
        """The reading threads, or the engine, have changed something: there may be a window or a job."""
        self._has_windows = self._has_jobs = True
        self._driver.ring(urgent=self.priority == "interactive")

    @property
    def rank(self) -> int:
        """Its place within its class: see `Ingest.rank`."""
        return self.ingest.rank

    def take(self) -> FeedWindow | None:
        """The next window that is ready to be encoded or, where its language was not known yet, decoded."""
        if not self._has_windows:
            return None
        self._has_windows = False  # before the look: what changes during it is seen next time
        window = self.ingest.take()
        self._has_windows |= window is not None
        return window

    def finished(self) -> list[Job]:
        """Jobs that are done and were not returned yet. Raises what ended the caller's iterator of inputs."""
        if not self._has_jobs:
            return []
        self._has_jobs = False
        jobs = self.ingest.finished()
        self._has_jobs |= bool(jobs)
        return jobs

    def touch(self) -> None:
        """A window of it came to its end, or its language is known: look for windows and jobs again."""
        self._has_windows = self._has_jobs = True

    def room(self, kind: Kind) -> int:
        """How many more of its windows of a kind its batch size allows in slots. Of many candidates they are fewer."""
        assert self.batch_size is not None
        return max(1, self.batch_size // kind[0]) - self.occupied[kind]

    def deliver(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the caller."""
        with self._changed:
            self._done.extend(jobs)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come. The caller gets the jobs that were delivered, then the error."""
        with self._changed:
            self.ended = True
            self._error = error
            self._changed.notify_all()


class Bell:
    """Wakes the driving thread, which sleeps only when nothing has rung since it last began to look.

    It has no lock: the garbage collector may close a call, and so ring, in the middle of anything.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rung = False

    def ring(self) -> None:
        """Wake it."""
        if not self._rung:
            self._rung = True
            self._rings.put(None)

    def heard(self) -> None:
        """Forget what has rung: the driving thread is about to look."""
        with suppress(queue.Empty):
            while True:
                self._rings.get_nowait()
        self._rung = False  # in this order: a ring in between is covered by the look that follows

    def wait(self, seconds: float | None) -> None:
        """Sleep until it rings, for so long at most; None: for ever."""
        with suppress(queue.Empty):
            self._rings.get(timeout=seconds)
