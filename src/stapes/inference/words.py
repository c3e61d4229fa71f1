"""Word times in a thread of their own, for engines that work while the host does something else.

To find them the device has to be waited for, and the cheapest path through a text's attention takes the host some
milliseconds. The thread that drives the engine would stand still meanwhile, and soon the device with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stapes.inference.engine import AsyncEngine
from stapes.inference.requests import Task

_MOST_WAITING = 16
"""Bulk drafts that may wait before no more windows are begun: each holds MB of the device's memory."""


@dataclass(frozen=True)
class Draft:
    """What a window became, whose words are to be found: ``ahead``, by `AsyncEngine.align_ahead`, behind ``prompt``."""

    task: Task
    draft: Any
    prompt: Sequence[int]
    ahead: Any


class WordFinder:
    """Gives drafts their words, those of interactive requests first. ``found`` is called, in its thread, when one has
    them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.found: Callable[[], None] = _nobody
        self._engine = engine
        self._thread: ThreadPoolExecutor | None = None
        self._urgent: deque[Draft] = deque()
        self._others: deque[Draft] = deque()
        self._done: deque[tuple[Draft, Exception | None]] = deque()

    def find(self, drafts: Sequence[Draft]) -> None:
        """Begin to look for the words of drafts; returns at once."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stapes-words")
        for each in drafts:
            (self._urgent if each.task.owner.priority == "interactive" else self._others).append(each)
            self._thread.submit(self._find_next)

    @property
    def is_behind(self) -> bool:
        """Whether bulk windows end sooner than their words are found."""
        return len(self._others) > _MOST_WAITING

    def take(self) -> list[tuple[Draft, Exception | None]]:
        """Those that have their words by now, or an error in place of them; each once."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def _find_next(self) -> None:
        each, error = (self._urgent or self._others).popleft(), None
        window = each.task.window
        try:
            if not each.task.owner.ended:
                with self._engine.aligned(each.ahead) as alignment:
                    window.recording.add_words(window, each.draft, each.prompt, alignment)
        except Exception as raised:  # of this window, or of the device
            error = raised
        self._done.append((each, error))
        self.found()


def _nobody() -> None:
    """Hears of what nobody waits for."""
