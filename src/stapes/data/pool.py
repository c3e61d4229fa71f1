"""Processes that work through a stream of items; the death of one costs its item and no more."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 64  # items that may be done or in work beyond the one that is waited for, for each process
ALIVE_SECONDS = 1.0  # how often an idle process looks whether its parent still lives


@dataclass(frozen=True, slots=True)
class Died:
    """In place of a result: the process died at this item, twice. ``code`` is its exit code."""

    code: int | None


class _Worker(Generic[Item]):
    def __init__(self, function: Callable[[Item], Any]) -> None:
        context = get_context("fork")  # nothing is imported again, and nobody's script runs a second time
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.number: int | None = None

    def give(self, number: int, item: Item) -> None:
        self.number = number
        with suppress(OSError):  # it died while idle: reading from it says so
            self.pipe.send(item)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[tuple[Item, Result | Died], None, None]:
    """``(item, function(item))`` in the order of ``items``, which are drawn only a little ahead.

    ``function`` must not raise. Closing the iterator, or an exception where it is used, ends the processes at once.
    """
    workers: list[_Worker[Item]] = []
    source = enumerate(items)
    waiting: deque[tuple[int, Item]] = deque()  # drawn, not done, oldest first
    again: deque[tuple[int, Item]] = deque()  # their process died once
    results: dict[int, Result | Died] = {}
    failed: set[int] = set()
    exhausted = False
    try:
        workers += [_Worker(function) for _ in range(processes)]
        while True:
            for worker in workers:
                if worker.number is None:
                    entry = again.popleft() if again else None
                    if entry is None and not exhausted and len(waiting) < _AHEAD * processes:
                        entry = next(source, None)
                        exhausted = entry is None
                        if entry is not None:
                            waiting.append(entry)
                    if entry is not None:
                        worker.give(*entry)
            while waiting and waiting[0][0] in results:
                number, item = waiting.popleft()
                yield item, results.pop(number)
            if exhausted and not waiting:
                return
            busy = {worker.pipe: worker for worker in workers if worker.number is not None}
            for pipe in connection.wait(list(busy), timeout=0.2) if busy else ():
                worker = busy[pipe]  # pyright: ignore[reportArgumentType]
                number = worker.number
                assert number is not None
                try:
                    results[number] = worker.pipe.recv()
                    worker.number = None
                except (EOFError, OSError):
                    worker.process.join()
                    code = worker.process.exitcode
                    workers[workers.index(worker)] = _Worker(function)
                    worker.pipe.close()
                    if number in failed:
                        results[number] = Died(code)
                    else:
                        failed.add(number)
                        again.append(next(entry for entry in waiting if entry[0] == number))
    finally:
        for worker in workers:
            worker.end()


def _serve(function: Callable[[Any], Any], pipe: Any) -> None:
    """A process's life: items in, results out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    try:
        while True:
            # Siblings hold copies of the parent's end, so that its death does not close the pipe.
            while not pipe.poll(ALIVE_SECONDS):
                if os.getppid() != parent:
                    return
            pipe.send(function(pipe.recv()))
    except (EOFError, OSError):
        return
