"""Any number of calls on one engine, which one thread drives.

A call submits its `Ingest` and iterates over the `Request` that it gets. The driving thread begins with the first
request and ends with the last, so that an idle recogniser has no thread and holds nobody up. Which window comes when is
the `Mixer`'s business.
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
        self._thread: threading.Thread | None = None
        self._closing = False
        self._bell = Bell()
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
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._drive, args=(prepare,), name="stapes-engine", daemon=True)
                self._thread.start()
        self.ring(urgent=True)
        return request

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

    def _drive(self, prepare: Callable[[], None] | None) -> None:
        while self._welcome():
            try:
                if prepare is not None:
                    prepare()
                    prepare = None
                worked = self._mixer.point()
            except BaseException as error:  # whatever it is, every caller must hear of it
                self._drop_all(error)
            else:
                if not worked and self._mixer.requests:
                    self._bell.wait(_DOZE_SECONDS)

    def _welcome(self) -> bool:
        """Take up new requests. False: there are none at all, and the driving thread is no more."""
        self._bell.heard()
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            for request in arrivals:
                self._mixer.add(request)
            closing, self._closing = self._closing, False
            if not closing:
                if not self._mixer.requests:
                    self._thread = None
                return self._thread is not None
        self._drop_all(UsageError("the recogniser was closed before this call had ended"))
        return self._welcome()

    def _drop_all(self, error: BaseException) -> None:
        for request in self._mixer.requests:
            self._mixer.drop(request, error)


def _close_all() -> None:
    """The interpreter ends: no engine may be at work while it is taken apart."""
    for scheduler in list(_schedulers):
        scheduler.close()


atexit.register(_close_all)
