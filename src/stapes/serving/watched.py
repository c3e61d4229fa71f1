"""Looking at an engine at work, and gathering what is to be begun together."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stapes.serving.metrics import BATCH_SIZES


class Sizes:
    """How often batches had which size."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BATCH_SIZES) + 1)
        self.total = 0

    def add(self, size: int) -> None:
        """Count a batch."""
        self.counts[bisect_left(BATCH_SIZES, size)] += 1
        self.total += size

    def to_dict(self) -> dict[str, Any]:
        """For a message."""
        return {"counts": list(self.counts), "total": self.total}


class Meter:
    """What engines have done so far. One is shared by all engines of a process."""

    def __init__(self) -> None:
        self.encoded, self.decoded = Sizes(), Sizes()
        self.advanced = 0
        """Grows whenever a device has come further."""
        self.windows_in_slots = 0
        self._lock = threading.Lock()

    def has_encoded(self, windows: int) -> None:
        """A batch was encoded."""
        with self._lock:
            self.encoded.add(windows)
            self.advanced += 1

    def has_stepped(self, rows: int) -> None:
        """Tokens were written in so many slots."""
        with self._lock:
            self.decoded.add(rows)
            self.advanced += 1

    def occupy(self, slots: int) -> None:
        """So many more windows are in slots; a negative number have left them."""
        with self._lock:
            self.windows_in_slots += slots

    def to_dict(self) -> dict[str, Any]:
        """For a message."""
        with self._lock:
            return {
                "encoded": self.encoded.to_dict(),
                "decoded": self.decoded.to_dict(),
                "advanced": self.advanced,
                "windows_in_slots": self.windows_in_slots,
            }


class MeteredEngine:
    """An `Engine` whose batches are counted. It changes nothing, and is taken for what it wraps."""

    def __init__(self, engine: Any, meter: Meter) -> None:
        object.__setattr__(self, "_inner", engine)
        object.__setattr__(self, "_meter", meter)
        object.__setattr__(self, "_occupied", 0)
        object.__setattr__(self, "_urgent", set())

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def encode(self, windows: Sequence[Any], **how: Any) -> list[Any]:
        encoded = self._inner.encode(windows, **how)
        self._meter.has_encoded(len(windows))
        return encoded

    def encode_in_parts(self, window: Any, **how: Any) -> Iterator[Any]:
        for encoded in self._inner.encode_in_parts(window, **how):
            if encoded is not None:
                self._meter.has_encoded(1)
            yield encoded

    def admit(self, requests: Sequence[Any], encoded: Sequence[Any]) -> list[Any]:
        slots = self._inner.admit(requests, encoded)
        self._occupy(len(slots))
        self._urgent.update(slot for slot, request in zip(slots, requests, strict=True) if request.urgent)
        return slots

    def step(self, count: int, *, urgent: bool = False) -> None:
        if urgent:
            self._inner.step(count, urgent=True)
        else:
            self._inner.step(count)
        self._meter.has_stepped(len(self._urgent) if urgent else self._occupied)

    def release(self, slot: Any) -> None:
        self._occupy(-1)
        self._urgent.discard(slot)
        self._inner.release(slot)

    def clear(self) -> None:
        self._occupy(-self._occupied)
        self._urgent.clear()
        self._inner.clear()

    def _occupy(self, slots: int) -> None:
        object.__setattr__(self, "_occupied", self._occupied + slots)
        self._meter.occupy(slots)


class Gate:
    """Gathers requests that come while others of their class are at work, so that they are begun together.

    The first to wait waits at most ``seconds``; all go on as soon as ``batch`` of them wait, or none of their class
    is at work any more. Nobody waits where nothing of its class is at work, so the device is never idle for it.
    """

    def __init__(self, batch: int, seconds: float) -> None:
        self._batch, self._seconds = batch, seconds
        self._changed = threading.Condition()
        self._at_work: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._round: dict[str, int] = {}
        self._due: dict[str, float] = {}

    @contextmanager
    def passed(self, priority: str) -> Iterator[None]:
        """Wait for one's turn; then one is at work, until the block ends."""
        with self._changed:
            self._gather(priority)
            self._at_work[priority] = self._at_work.get(priority, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work[priority] -= 1
                if not self._at_work[priority]:
                    self._open(priority)

    def _gather(self, priority: str) -> None:
        if not self._seconds or not self._at_work.get(priority):
            return
        if not self._waiting.get(priority):
            self._due[priority] = time.monotonic() + self._seconds
        turn = self._round.get(priority, 0)
        self._waiting[priority] = self._waiting.get(priority, 0) + 1
        if self._waiting[priority] >= self._batch:
            self._open(priority)
            return
        due = self._due[priority]
        while self._round.get(priority, 0) == turn and (left := due - time.monotonic()) > 0:
            self._changed.wait(left)
        if self._round.get(priority, 0) == turn:
            self._open(priority)

    def _open(self, priority: str) -> None:
        self._waiting[priority] = 0
        self._round[priority] = self._round.get(priority, 0) + 1
        self._changed.notify_all()
