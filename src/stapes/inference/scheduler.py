"""Any number of calls on one engine, which one thread drives.

A call submits its `Ingest` and iterates over the `Request` that it gets. The driving thread begins with the first
request and ends with the last, so that an idle recogniser has no thread and holds nobody up; an engine for which a new
thread is costly keeps its own (``keeps_thread``). Which window comes when is the `Mixer`'s business.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import nullcontext

from stapes.errors import CancelledError, UsageError
from stapes.inference.engine import Engine
from stapes.inference.ingest import Ingest, Job
from stapes.inference.mixer import Mixer
from stapes.inference.requests import Bell, Priority, Request
from stapes.progress import Cancellation

_PATIENCE_SECONDS = 5.0
"""How long closing waits for the driving thread, which may be in the middle of a long operation of the engine."""

_DOZE_SECONDS = 0.2
"""The longest sleep of the driving thread while it has requests; everything that gives it work wakes it."""

_schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()


class Scheduler:
    """Owns an engine: only its driving thread calls it.

    steps: tokens written in each slot from one scheduling point to the next; None asks the engine
    (``steps_per_look``), one where it does not say. slots: how many the engine has; ``resize(count)`` makes them anew
    while nothing is in them.
    """

    def __init__(
        self, engine: Engine, steps: int | None = None, *, slots: int = 1, resize: Callable[[int], None] | None = None
    ) -> None:
        self._mixer = Mixer(engine, steps or engine.steps_per_look, slots, resize)
        self._lock = threading.Lock()
        self._arrivals: list[Request] = []
        self._chores: list[Chore] = []
        self._thread: threading.Thread | None = None
        self._closing = self._ending = False
        self._stays: bool = getattr(engine, "keeps_thread", False)
        self._bell = Bell()
        weakref.finalize(self, self._bell.ring)  # a thread that stayed ends when nobody else knows of its scheduler
        if self._mixer.words is not None:
            self._mixer.words.found = self._bell.ring
        _schedulers.add(self)

    def run(
        self,
        ingest: Ingest,
        priority: Priority = "bulk",
        batch_size: int | None = None,
        prepare: Callable[[], None] | None = None,
        cancellation: Cancellation | None = None,
    ) -> Generator[Job, None, None]:
        """Transcribe everything; yield each job as it is done. Closing the iterator cancels what is left.

        cancellation: does so from another thread; CancelledError is raised then. As `submit` otherwise.
        """
        request = self.submit(ingest, priority, batch_size, prepare)
        try:
            with cancellation.calling(request.cancel) if cancellation else nullcontext():
                yield from request
            if cancellation is not None and cancellation.is_cancelled:
                raise CancelledError("the call was cancelled before it had ended: call again")
        finally:
            request.close()

    def submit(
        self,
        ingest: Ingest,
        priority: Priority = "bulk",
        batch_size: int | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Request:
        """Begin to transcribe everything that ``ingest`` reads, beside all other requests.

        batch_size: windows decoded together, None for what the engine had at first. The engine is made to have as many
        slots as the request that asks for the most, and at least those; this one never occupies more than it asks for.
        prepare: called first in the driving thread, if one is begun now.
        """
        request = Request(self, ingest, priority, batch_size)
        with self._lock:
            self._arrivals.append(request)
            self._begin(prepare)
        self.ring(urgent=True)
        return request

    def do(self, work: Callable[[], None], prepare: Callable[[], None] | None = None) -> None:
        """Have the driving thread do something between its scheduling points, and wait. Raises what it raises."""
        chore = Chore(work)
        with self._lock:
            self._chores.append(chore)
            self._begin(prepare)
        self.ring(urgent=True)
        chore.wait()

    def _begin(self, prepare: Callable[[], None] | None) -> None:
        if self._thread is None or not self._thread.is_alive():
            arguments = weakref.ref(self), self._bell, prepare
            self._thread = threading.Thread(target=_drive, args=arguments, name="stapes-engine", daemon=True)
            self._thread.start()

    def close(self) -> bool:
        """End all requests, with an error in those that are not over; False: the engine is still at work.

        The scheduler may be used again.
        """
        with self._lock:
            thread = self._thread
            self._closing = thread is not None
        if thread is None or thread is threading.current_thread():
            return True
        self.ring(urgent=True)
        thread.join(_PATIENCE_SECONDS)
        return not thread.is_alive()

    def ring(self, *, urgent: bool) -> None:
        """Wake the driving thread. urgent: it is to come to its next scheduling point soon."""
        if urgent:
            self._mixer.urgent = True
        self._bell.ring()

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the driving thread."""
        return self._thread is threading.current_thread()

    def drive(self, prepare: Callable[[], None] | None) -> bool:
        """Work, in the driving thread, until there is nothing to do. Whether the thread is to stay for more."""
        while self._welcome():
            try:
                if prepare is not None:
                    prepare()
                    prepare = None
                for chore in self._take_chores():
                    chore.do()
                worked = self._mixer.point()
            except BaseException as error:  # whatever it is, every caller must hear of it
                self._drop_all(error)
            else:
                if not worked and self._mixer.requests:
                    self._bell.wait(_DOZE_SECONDS)
        return self.is_current_thread

    def _welcome(self) -> bool:
        """Take up new requests. False: there is nothing to do at all; the driving thread is no more, or stays idle."""
        self._bell.heard()
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            for request in arrivals:
                self._mixer.add(request)
            closing, self._closing = self._closing, False
            self._ending |= closing
            busy = bool(self._mixer.requests or self._chores)
            if not busy and (self._ending or not self._stays):
                self._thread, self._ending = None, False
        if closing and busy:
            self._drop_all(UsageError("the recogniser was closed before this call had ended"))
            return self._welcome()
        return busy

    def _take_chores(self) -> list[Chore]:
        with self._lock:
            chores, self._chores = self._chores, []
        return chores

    def _drop_all(self, error: BaseException) -> None:
        for request in self._mixer.requests:
            self._mixer.drop(request, error)
        for chore in self._take_chores():
            chore.end(error)


class Chore:
    """Something that another thread is to do, and that is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def do(self) -> None:
        """Do it; what it raises is kept for whoever waits."""
        try:
            self._work()
        except BaseException as error:
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """It is over, with an error or without."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Until it is done."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def _drive(reference: weakref.ref[Scheduler], bell: Bell, prepare: Callable[[], None] | None) -> None:
    """The driving thread. While it is idle it holds nothing of its scheduler."""
    while (scheduler := reference()) is not None and scheduler.drive(prepare):
        prepare = None
        del scheduler
        bell.wait(None)


def _close_all() -> None:
    """The interpreter ends: no engine may be at work while it is taken apart."""
    for scheduler in list(_schedulers):
        scheduler.close()


atexit.register(_close_all)
