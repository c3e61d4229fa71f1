"""How much is taken on: requests in all and of each key, how long one may wait, and which goes first.

Requests wait in two classes. Short recordings are interactive, longer ones bulk; each class has its own number of
requests at work, so a short one never waits for a long one to end, and the engine lets its windows go first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from stapes.serving.access import Client
from stapes.serving.failures import ApiError
from stapes.serving.settings import LimitSettings

if TYPE_CHECKING:
    from stapes.inference.requests import Priority

_INTERACTIVE_PER_SLOT = 4
_FORGETTING = 0.1
"""Weight of the latest request in the mean time at work."""


class Limits:
    """Counts requests. slots: windows that the engines decode together, all of them."""

    def __init__(self, settings: LimitSettings, slots: int) -> None:
        self.settings = settings
        self._most: dict[Priority, int] = {"interactive": _INTERACTIVE_PER_SLOT * slots, "bulk": slots}
        self.at_work: Counter[Priority] = Counter()
        self._waiting: dict[Priority, deque[asyncio.Future[None]]] = {"interactive": deque(), "bulk": deque()}
        self._jobs: Counter[str] = Counter()
        self.inside = self.sessions = 0
        self.closing = False
        """The server is being stopped: nothing new is taken on."""
        self.handing_back = asyncio.Event()
        """What is not done by now is handed back."""
        self._usual_seconds = 1.0

    @property
    def waiting(self) -> dict[Priority, int]:
        """Requests that wait for their turn."""
        return {priority: len(queue) for priority, queue in self._waiting.items()}

    @contextmanager
    def admitted(self, client: Client) -> Iterator[None]:
        """A request is here until the block ends. Raises ApiError: 429 there are too many, 503 the server stops."""
        if self.closing:
            raise stopping()
        most = self.settings.jobs_per_key
        if client.has_key and self._jobs[client.label] >= most:
            raise ApiError(429, f"This key has {most} requests on their way, the most it may", retry_after=self.delay())
        if self.inside >= self.settings.max_queue:
            raise ApiError(429, "The queue is full: try again later", code="queue_full", retry_after=self.delay())
        self._jobs[client.label] += 1
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._jobs[client.label] -= 1
            if not self._jobs[client.label]:
                del self._jobs[client.label]

    @contextmanager
    def session(self) -> Iterator[None]:
        """A live session is here until the block ends. Raises ApiError: 429 too many are, 503 the server stops."""
        if self.closing:
            raise stopping()
        if self.sessions >= self.settings.max_sessions:
            raise ApiError(429, "There are as many live sessions as may be: try again later", retry_after=self.delay())
        self.sessions += 1
        try:
            yield
        finally:
            self.sessions -= 1

    def priority(self, seconds: float) -> Priority:
        """The class of a recording of that length."""
        return "interactive" if seconds <= self.settings.interactive_seconds else "bulk"

    @asynccontextmanager
    async def turn(self, priority: Priority, came: float) -> AsyncIterator[None]:
        """Wait for one's turn, and be at work until the block ends.

        came: when the request was received. Raises ApiError 503 where it has waited too long.
        """
        if self.at_work[priority] >= self._most[priority] or self._waiting[priority]:
            await self._wait(priority, self.settings.max_queue_seconds - (time.monotonic() - came))
        else:
            self.at_work[priority] += 1
        began = time.monotonic()
        try:
            yield
            self._usual_seconds += _FORGETTING * (time.monotonic() - began - self._usual_seconds)
        finally:
            self.at_work[priority] -= 1
            self._next(priority)

    async def _wait(self, priority: Priority, patience: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[priority].append(turn)
        try:
            async with asyncio.timeout(max(0.0, patience)):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its turn came at the same moment: the next one has it
                self.at_work[priority] -= 1
                self._next(priority)
            elif turn in self._waiting[priority]:
                self._waiting[priority].remove(turn)
            if isinstance(error, TimeoutError):
                reason = f"The request waited {self.settings.max_queue_seconds:g} s for its turn and is handed back"
                raise ApiError(503, reason, code="queue_timeout", retry_after=self.delay()) from None
            raise

    def _next(self, priority: Priority) -> None:
        while self._waiting[priority] and self.at_work[priority] < self._most[priority]:
            turn = self._waiting[priority].popleft()
            if not turn.done():
                self.at_work[priority] += 1
                turn.set_result(None)

    def delay(self) -> float:
        """Seconds after which it may be worth trying again: as long as requests are usually at work."""
        return min(120.0, max(1.0, self._usual_seconds))


def stopping() -> ApiError:
    """What is said to those who come too late."""
    return ApiError(503, "The server is being stopped: send it again", code="shutting_down", retry_after=10)
