"""How long work reports itself, and how it is given up: one small protocol, whoever listens.

Work is counted in seconds of audio. The command line shows it with rich on a terminal and as JSON lines when
piped; a server sends the same events to its clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of a job. Methods may be called from any thread and must return at once."""

    def add_total(self, seconds: float) -> None:
        """More audio is known to be coming; a negative value corrects an estimate that was too high."""
        ...

    def advance(self, seconds: float) -> None:
        """This much more audio is done."""
        ...

    def note(self, message: str) -> None:
        """Something the user should know now."""
        ...


class Silent:
    """A listener that does not care."""

    def add_total(self, seconds: float) -> None:
        """Ignore."""

    def advance(self, seconds: float) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""


class Cancellation:
    """Gives up calls from another thread: hand it to them, then ``cancel()``. Once cancelled it stays so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acts: list[Callable[[], None]] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Give up all calls that have it. Returns at once; they end at their next scheduling point."""
        with self._lock:
            self._is_cancelled = True
            acts = list(self._acts)
        for act in acts:
            act()

    @contextmanager
    def calling(self, act: Callable[[], None]) -> Iterator[None]:
        """Until the block ends, cancelling calls ``act`` in the thread that cancels; now, if that was before."""
        with self._lock:
            self._acts.append(act)
            is_late = self._is_cancelled
        try:
            if is_late:
                act()
            yield
        finally:
            with self._lock:
                self._acts.remove(act)
