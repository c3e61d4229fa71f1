"""A live session, as those who speak see it: sound is fed, events are told."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.pcm import StreamResampler
from stapes.audio.vad import VadState, VoiceActivityDetector
from stapes.errors import UsageError
from stapes.inference.feed import FeedWindow
from stapes.inference.live_events import Event, EventLog
from stapes.inference.live_stream import LiveStream, Urgency
from stapes.inference.live_voices import Voice
from stapes.inference.turns import TurnOptions

log = logging.getLogger(__name__)

_BITE = 10 * SAMPLE_RATE
"""Samples of a session that are looked at in one go, so that one that sends an hour keeps nobody waiting."""

_BACKLOG_SECONDS = 30.0
"""Sound that may wait; `Session.feed` then waits too, where it may."""

MakeVoice = Callable[[Callable[[FeedWindow], None]], Voice]
"""Makes a session's voice; see `open_voice`."""


class Host(Protocol):
    """What a session must know of those who listen to it."""

    detector: VoiceActivityDetector

    def wake(self, session: Session, /) -> None:
        """Something has come for it."""
        ...

    def leave(self, session: Session, /) -> None:
        """It is over."""
        ...

    def give_back(self, window: FeedWindow, /) -> None:
        """A window's language has become known: it is to be taken again."""
        ...


Mark = Literal["commit", "clear", "finish"]


class Session:
    """One live session: one speaker, or one microphone. Made by `Recognizer.stream`; any thread may use it.

    Close it, or finish it; it is a context manager. ``on_event``: called with each event, in a thread that others wait
    for, so it must return at once; without it events are kept until `feed`, `events` or `finish` returns them.
    ``sample_rate``: of what is fed; events count seconds all the same.
    """

    def __init__(
        self,
        host: Host,
        make_voice: MakeVoice,
        turns: TurnOptions,
        on_event: Callable[[Event], None] | None,
        sample_rate: int,
    ) -> None:
        self.vad: VadState = host.detector.state()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.error: Exception | None = None
        self.closed = False
        self.queued: Urgency | None = None
        """Where it waits to have its next window taken; the listening threads' own."""
        self.in_hand = False
        """Some of its sound was taken and is being looked at."""
        self.stream = LiveStream(make_voice(host.give_back), turns, self._tell)
        self.asked_at: float | None = None
        self._host = host
        self._resampler = StreamResampler(sample_rate)
        self._inbox: deque[np.ndarray | Mark] = deque()
        self._unheard = 0  # samples in the inbox
        self._on_event = on_event
        self._log = EventLog()
        self._finishing = False

    # Whoever speaks.

    def feed(self, pcm: np.ndarray, *, wait: bool = True) -> list[Event]:
        """Take the next samples, float32, any number of them; what has happened since the last call.

        wait: where much more has come than the engine can hear, wait until it has caught up. Raises UsageError after
        `finish` and `close`, and whatever ended the session.
        """
        pcm = np.asarray(pcm, dtype=np.float32)
        if pcm.ndim != 1:
            raise UsageError(f"a session takes one channel of samples, not an array of shape {pcm.shape}")
        # A copy, with numbers only; whether there are others, one product tells.
        sound = math.isfinite(np.dot(pcm, pcm))
        pcm = pcm.copy() if sound else np.nan_to_num(pcm, copy=True, nan=0.0, posinf=1.0, neginf=-1.0)
        with self.changed:
            self._check()
            self._put(self._resampler.feed(pcm))
        self._host.wake(self)
        with self.changed:
            while wait and self.error is None and not self.closed and self._backlog() > _BACKLOG_SECONDS:
                self.changed.wait(0.2)
            return self._taken()

    def commit(self) -> None:
        """End the turn here. With manual turns that is how a turn ends."""
        self._mark("commit")

    def clear(self) -> None:
        """Forget what was said since the last turn ended, if it is not on its way to its `Final` yet."""
        self._mark("clear")

    def configure(self, turns: TurnOptions) -> None:
        """Change when turns begin and end, from the next chunk on."""
        with self.lock:
            self.stream.options = turns

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        with self.lock:
            return self._taken()

    def finish(self, timeout: float | None = None) -> list[Event]:
        """No more sound will come: wait for the last words; what has happened since the last call.

        The session is closed after it. timeout: seconds to wait at most. Raises whatever ended the session.
        """
        self.end()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while self.error is None and not self.closed and not self.stream.done:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self.changed.wait(0.2)  # a time limit lets signals in
            if self.error is not None:
                raise self.error
            events = self._taken()
        self.close()
        return events

    def end(self) -> None:
        """No more sound will come; do not wait for the last words."""
        with self.changed:
            if self._finishing or self.closed or self.error is not None:
                return
            self._finishing = True
            self._put(self._resampler.finish())
            self._inbox.append("finish")
        self._host.wake(self)

    def close(self) -> None:
        """Give up what is left of it."""
        with self.changed:
            self.closed = True
            self._inbox.clear()
            self._unheard = 0
            self.changed.notify_all()
        self._host.leave(self)

    @property
    def done(self) -> bool:
        """Whether its end has been told."""
        return self.stream.done or self.closed or self.error is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was fed waits, or is on its way through the engine."""
        with self.lock:
            return self.closed or self.error is not None or not (self._inbox or self.in_hand or self.stream.is_busy)

    @property
    def backlog(self) -> float:
        """Seconds of sound that wait to be heard."""
        with self.lock:
            return self._backlog()

    @property
    def seconds(self) -> float:
        """Sound that was fed so far: the session's clock."""
        with self.lock:
            return (self.stream.received + self._unheard) / SAMPLE_RATE

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, pcm: np.ndarray) -> None:
        if len(pcm):
            self._inbox.append(pcm)
            self._unheard += len(pcm)

    def _mark(self, mark: Mark) -> None:
        with self.changed:
            self._check()
            self._inbox.append(mark)
        self._host.wake(self)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self.closed or self._finishing:
            raise UsageError("this session has ended: open a new one")

    def _backlog(self) -> float:
        return (self._unheard + self.stream.waiting) / SAMPLE_RATE

    def _taken(self) -> list[Event]:
        events = self._log.take()
        if not events and self.error is not None:
            raise self.error
        return events

    # The threads that listen; they hold the lock.

    def _tell(self, event: Event) -> None:
        if self._on_event is None:
            self._log.add(event)
            return
        try:
            self._on_event(event)
        except Exception as error:  # of whoever listens: it is no other session's
            log.exception("a listener of a live session failed")
            self.error = error

    def next_sound(self) -> tuple[np.ndarray, Mark | None]:
        """The samples that have come, up to a mark."""
        chunks: list[np.ndarray] = []
        size, mark = 0, None
        while self._inbox and size < _BITE and mark is None:
            item = self._inbox.popleft()
            if isinstance(item, str):
                mark = item
            else:
                rest = item[_BITE - size :]
                if len(rest):
                    self._inbox.appendleft(rest)
                chunks.append(item[: _BITE - size])
                size += len(chunks[-1])
        self._unheard -= size
        self.in_hand = bool(size or mark)
        return np.concatenate(chunks) if chunks else np.zeros(0, np.float32), mark

    @property
    def has_sound(self) -> bool:
        """Whether anything has come."""
        return bool(self._inbox)

    def fail(self, error: Exception) -> None:
        """It cannot go on."""
        with self.changed:
            self.error = self.error or error
            self._inbox.clear()
            self.changed.notify_all()
