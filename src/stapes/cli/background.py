"""Run long work in a thread of its own, so that the main thread obeys Ctrl-C at once.

Python delivers a signal between two steps of the main thread's code. One step of a model can take many seconds, and
the main thread must not be in it when the user wants to leave.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Iterates over what ``produce()`` yields, which runs in another thread; its exceptions are raised here."""

    def __init__(self, produce: Callable[[], Generator[T, None, None]]) -> None:
        self._produce = produce
        self._queue: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stapes-work", daemon=True)

    def __iter__(self) -> Iterator[T]:
        self._thread.start()
        while True:
            try:
                # The time limit lets signals in even where the system gave them to another thread.
                item = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            if not isinstance(item, _End):
                yield item
                continue
            self._thread.join()
            if item.error is not None:
                raise item.error
            return

    def cancel(self, grace: float = 0.5) -> None:
        """Ask the work to end and wait for it this many seconds at most; it is told at its next result."""
        self._cancelled.set()
        if self._thread.is_alive():
            self._thread.join(grace)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            results = self._produce()
            try:
                for result in results:
                    if self._cancelled.is_set():
                        break
                    self._queue.put(result)
            finally:
                results.close()
        except BaseException as raised:  # whatever it is, it belongs to the main thread
            error = raised
        self._queue.put(_End(error))


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error
