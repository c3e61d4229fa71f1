"""Looking into a recogniser at work: what its engine does, and segments as they are done.

A `Recognizer` is put together from a `Family` and its engine; the server puts these two around them. They change
nothing, and are taken for what they wrap.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from stapes.audio.features import SAMPLE_RATE
from stapes.inference.family import Family
from stapes.inference.feed import AudioFeed, FeedMaker
from stapes.options import TranscribeOptions
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


class _Around:
    """Stands for another object: what it does not do itself, that one does."""

    _own: tuple[str, ...] = ()

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)


class MeteredEngine(_Around):
    """An `Engine` whose batches are counted."""

    _own = ("_meter", "_occupied")

    def __init__(self, engine: Any, meter: Meter) -> None:
        super().__init__(engine)
        self._meter, self._occupied = meter, 0

    def encode(self, windows: Sequence[Any], **how: Any) -> list[Any]:
        encoded = self._inner.encode(windows, **how)
        self._meter.has_encoded(len(windows))
        return encoded

    def admit(self, requests: Sequence[Any], encoded: Sequence[Any]) -> list[Any]:
        slots = self._inner.admit(requests, encoded)
        self._occupy(len(slots))
        return slots

    def step(self, count: int) -> None:
        self._inner.step(count)
        self._meter.has_stepped(self._occupied)

    def release(self, slot: Any) -> None:
        self._occupy(-1)
        self._inner.release(slot)

    def clear(self) -> None:
        self._occupy(-self._occupied)
        self._inner.clear()

    def _occupy(self, slots: int) -> None:
        self._occupied += slots
        self._meter.occupy(slots)


_feeds: ContextVar[list[AudioFeed] | None] = ContextVar("feeds", default=None)


class WatchedFamily(_Around):
    """A `Family` whose recordings can be looked at while they are transcribed (`watching`)."""

    _own = ("engine",)

    def __init__(self, family: Family, meter: Meter) -> None:
        super().__init__(family)
        self.engine = MeteredEngine(family.engine, meter)

    def feeds(self, options: TranscribeOptions) -> FeedMaker:
        make, feeds = self._inner.feeds(options), _feeds.get()

        def made(*arguments: Any) -> AudioFeed:
            feed = make(*arguments)
            if feeds is not None:
                feeds.append(feed)
            return feed

        return made


class Follower:
    """The progress of a call, which hands on the segments of its one recording in order, as soon as nothing can come
    before them any more.

    take: gets new segments (dictionaries, times on the recording's own clock); it must return at once. offset: seconds
    at which the first part that is transcribed begins.
    """

    def __init__(self, take: Callable[[list[dict[str, Any]]], None], offset: float) -> None:
        self._take, self._offset = take, offset
        self.feeds: list[AudioFeed] = []
        self.sent = 0
        self.notes: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What this thread begins to transcribe is followed."""
        token = _feeds.set(self.feeds)
        try:
            yield
        finally:
            _feeds.reset(token)

    def add_total(self, seconds: float) -> None:
        """Of no interest: the recording was measured when it was decoded."""

    def advance(self, seconds: float) -> None:
        """The recording is done up to some later moment: hand on what lies before it."""
        if not self.feeds:
            return
        until = min(feed.settled for feed in self.feeds) / SAMPLE_RATE
        segments = [
            (segment, number) for number, feed in enumerate(self.feeds, 1) for segment in feed.sorted_segments()
        ]
        segments.sort(key=lambda each: (each[0].start, each[0].end))
        new = [each for each in segments if each[0].start < until][self.sent :]
        if not new:
            return
        found = []
        for index, (segment, number) in enumerate(new, self.sent):
            out = segment.to_dict() | {"id": index}
            if len(self.feeds) > 1:
                out["speaker"] = f"Speaker {number}"
            if self._offset:
                for timed in (out, *out.get("words", ())):
                    timed["start"] = round(timed["start"] + self._offset, 3)
                    timed["end"] = round(timed["end"] + self._offset, 3)
            found.append(out)
        self.sent += len(found)
        self._take(found)

    def note(self, message: str) -> None:
        """Keep what the user should know."""
        self.notes.append(message)


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
