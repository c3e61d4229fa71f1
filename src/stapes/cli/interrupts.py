"""Ctrl-C and SIGTERM: the first ends the work in order, as KeyboardInterrupt; the second ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_shields = 0
_pending = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread for either signal, until the block ends."""
    global _pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A shell starts background jobs with Ctrl-C ignored: leave it so.
    caught = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.getsignal(number) for number in caught}
    _pending = False

    def interrupt(number: int, frame: object) -> None:
        global _pending
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        if _shields:
            _pending = True
        else:
            raise KeyboardInterrupt

    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def shielded() -> Iterator[None]:
    """Hold KeyboardInterrupt back until the block ends: for short steps that must not stop half-way.

    Signals are handled in the main thread alone, so elsewhere there is nothing to hold back.
    """
    global _shields, _pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1
    if _pending and not _shields:
        _pending = False
        raise KeyboardInterrupt
