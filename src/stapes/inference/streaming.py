"""Live sound: any number of sessions on one recogniser, whose windows share each batch with all other work.

    session = recognizer.stream(language="en")
    for chunk in microphone:                 # float32, 16 kHz, any size
        for event in session.feed(chunk):
            print(event)
    for event in session.finish():
        print(event)

One thread listens for all sessions together: it finds their speech in one batch on the CPU and sees what is to be
heard. Windows go to the scheduler as one interactive request, ends of turns before what is still being said. Events
are `SpeechStarted`, `Partial`, `Committed`, `SpeechStopped`, `Final` and `Failed`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.vad import VoiceActivityDetector
from stapes.errors import StapesError, UsageError
from stapes.inference.family import Family
from stapes.inference.feed import FeedWindow
from stapes.inference.ingest import Ingest, Job
from stapes.inference.live_events import (
    Committed,
    Event,
    Failed,
    Final,
    Partial,
    SpeechStarted,
    SpeechStopped,
    event_to_dict,
)
from stapes.inference.live_session import MakeVoice, Mark, Session
from stapes.inference.live_stream import LiveStream, Urgency
from stapes.inference.live_voices import open_voice
from stapes.inference.requests import Request
from stapes.inference.scheduler import Scheduler
from stapes.inference.turns import TurnOptions
from stapes.options import TranscribeOptions

__all__ = [
    "Committed",
    "Event",
    "Failed",
    "Final",
    "Live",
    "Partial",
    "Session",
    "SpeechStarted",
    "SpeechStopped",
    "TurnOptions",
    "event_to_dict",
]

log = logging.getLogger(__name__)

_INTERVAL = (0.3, 2.0)
"""Seconds of sound from one partial to the next, at least and at most."""

_INTERVAL_PER_LATENCY = 1.5
"""The interval is so many times what partials take: one stream leaves the engine a third of its time."""

_SMOOTHING = 0.1

_SOON = (0.2, 2.0)
"""Seconds in which the end of a turn is to be heard on average, or twice what it takes at least, where that is more:
it is begun 0.25 s before the turn is over. While it takes longer, partials are asked for less often."""

_PRESSURE_STEP = 1.03
_MOST_PRESSURE = 8.0
_FORGETTING = 1.001
"""How fast, from one end of a turn to the next, it is forgotten how little one can take."""

_GATHER_SECONDS, _GATHER_SECONDS_OF_MANY, _MANY = 0.01, 0.03, 32
"""Where several sessions speak, their chunks of so long are looked at together; where many do, a frame costs less."""


class Live:
    """All sessions of one recogniser. It has a thread while there are any.

    prepare: what the scheduler is to call in its thread at first.
    """

    def __init__(
        self, family: Family, scheduler: Scheduler, detector: VoiceActivityDetector, prepare: Callable[[], None]
    ) -> None:
        self.detector = detector
        self._family, self._scheduler, self._prepare = family, scheduler, prepare
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._sessions: dict[Session, None] = {}
        self._awake: dict[Session, None] = {}  # something has come for them
        self._windows = _Windows(self)
        self._thread: threading.Thread | None = None
        self._latency = 0.0  # of partials, from when they were due
        self._final_latency = 0.0  # of ends of turns
        self._least = math.inf  # of theirs
        self._pressure = 1.0  # the interval is so many times what one stream would have

    def open(
        self,
        options: TranscribeOptions,
        turns: TurnOptions,
        on_event: Callable[[Event], None] | None = None,
        *,
        sample_rate: int = SAMPLE_RATE,
        make_voice: MakeVoice | None = None,
    ) -> Session:
        """A new session. ``options`` were checked. make_voice: in place of the model's own."""
        make = make_voice or (lambda returned: open_voice(self._family, options, returned))
        session = Session(self, make, turns, on_event, sample_rate)
        with self._lock:
            self._sessions[session] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="stapes-live", daemon=True)
                self._thread.start()
        return session

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            sessions, thread = list(self._sessions), self._thread
        for session in sessions:
            session.fail(UsageError("the recogniser was closed before this session had ended"))
            self.leave(session)
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)

    @property
    def interval(self) -> float:
        """Seconds of sound from one partial to the next, just now."""
        alone = max(_INTERVAL_PER_LATENCY * self._latency, _INTERVAL[0])
        return min(alone * self._pressure, _INTERVAL[1])

    @property
    def count(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    def wake(self, session: Session) -> None:
        """Something has come for a session."""
        with self._lock:
            self._awake[session] = None
        self._bell.set()

    def ring(self) -> None:
        """Something has happened."""
        self._bell.set()

    def leave(self, session: Session) -> None:
        """A session is over."""
        with self._lock:
            self._sessions.pop(session, None)
            self._awake.pop(session, None)
        self._bell.set()

    def give_back(self, window: FeedWindow) -> None:
        """A window's language has become known: it is to be taken again."""
        self._windows.returned.append(window)

    # The listening thread.

    def _listen(self) -> None:
        request: Request | None = None
        while True:
            self._bell.wait(0.5)
            if len(self._awake) < (count := len(self._sessions)):
                time.sleep(_GATHER_SECONDS if count < _MANY else _GATHER_SECONDS_OF_MANY)
            self._bell.clear()
            with self._lock:
                awake = [session for session in self._awake if session in self._sessions]
                self._awake.clear()
                if not self._sessions:
                    self._thread = None
                    break
            if request is None or self._windows.abandoned:
                if request is not None:
                    self._recover(request)
                self._windows = _Windows(self, careful=self._windows.out)
                request = self._scheduler.submit(self._windows, prepare=self._prepare, priority="interactive")
                for session in list(self._sessions):
                    self.queue(session)
            try:
                self._look(awake)
            except Exception as error:  # whatever it is, those who speak must hear of it
                log.exception("live sessions failed")
                for session in awake:
                    session.fail(error)
                    self.leave(session)
        if request is not None:
            request.cancel()

    def _look(self, awake: list[Session]) -> None:
        """Find the speech in what has come for sessions, all together."""
        found: list[tuple[Session, np.ndarray, Mark | None]] = []
        for session in awake:
            with session.lock:
                pcm, mark = session.next_sound()
            if len(pcm) or mark is not None:
                found.append((session, pcm, mark))
        if not found:
            return
        probabilities = self.detector.probabilities(
            [session.vad for session, _, _ in found],
            [pcm for _, pcm, _ in found],
            final=[mark == "finish" for _, _, mark in found],
        )
        interval = self.interval
        for (session, pcm, mark), frames in zip(found, probabilities, strict=True):
            with session.changed:
                session.in_hand = False
                if not session.closed:
                    session.stream.interval = interval
                    _take_sound(session.stream, pcm, mark, frames)
                session.changed.notify_all()
                has_more = session.has_sound
            if has_more:
                self.wake(session)
            self.queue(session)

    def queue(self, session: Session) -> None:
        """See whether a session wants a window, and let it wait for one."""
        with session.lock:
            wanted = None if session.closed else session.stream.wanted()
            if wanted is None or wanted == session.queued:
                return
            session.queued = wanted
            session.asked_at = time.monotonic()
        self._windows.wait_for(session, wanted)

    def _recover(self, request: Request) -> None:
        """The request ended: the engine failed, and sessions go on; or it was closed, and they have ended too."""
        error: Exception = RuntimeError("the engine stopped")
        try:
            for _ in request:
                pass
        except Exception as raised:
            error = raised
        for session in list(self._sessions):
            if isinstance(error, StapesError):
                session.fail(error)
                self.leave(session)
                continue
            with session.changed:
                session.queued = None
                session.stream.lose(error)
                session.changed.notify_all()

    # The scheduling thread.

    def heard(self, urgency: Urgency, seconds: float) -> None:
        """A window came back so many seconds after it was wanted."""
        if urgency == "partial":
            self._latency += (_SMOOTHING if self._latency else 1.0) * (seconds - self._latency)
            return
        self._final_latency += (_SMOOTHING if self._final_latency else 1.0) * (seconds - self._final_latency)
        self._least = min(self._least * _FORGETTING, seconds)
        is_late = self._final_latency > max(_SOON[0], _SOON[1] * self._least)
        pressure = self._pressure * (_PRESSURE_STEP if is_late else 1 / _PRESSURE_STEP)
        self._pressure = min(max(pressure, 1.0), _MOST_PRESSURE)


class _Windows(Ingest):
    """The windows of all sessions, as the scheduler takes them; it is not over before it is cancelled.

    careful: so many windows were lost when the engine failed. One of them may be why: at first they are on their way
    one at a time, so that it fails alone.
    """

    def __init__(self, live: Live, careful: int = 0) -> None:
        self.abandoned = False
        self.out = 0
        """Windows on their way."""
        self._careful = careful
        self.returned: deque[FeedWindow] = deque()
        self._live = live
        self._finals: deque[Session] = deque()
        self._partials: deque[Session] = deque()
        self._listener: Callable[[], None] = _nobody

    def wait_for(self, session: Session, wanted: Urgency) -> None:
        """A session wants a window."""
        (self._finals if wanted == "final" else self._partials).append(session)
        self._listener()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    # All that follows is called in the scheduling thread.

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return -1 if self._finals or self.returned else 1

    def take(self) -> FeedWindow | None:
        """The next window: what came back first, then the ends of turns, then what is still being said."""
        if self.returned:
            return self.returned.popleft()
        if self._careful and self.out:
            return None
        while queue := self._finals or self._partials:
            urgency: Urgency = "final" if queue is self._finals else "partial"
            session = queue.popleft()
            with session.lock:
                if session.queued != urgency:
                    continue  # it has become more urgent, and waits there
                session.queued = None
                if session.closed or session.error is not None:
                    continue
                window = session.stream.take()
            if window is not None:
                self._follow(session, window, urgency)
                return window
        return None

    def _follow(self, session: Session, window: Any, urgency: Urgency) -> None:
        """Let the session's state hear of the window under its lock, and see what it wants next."""
        deliver, asked_at = window.deliver, session.asked_at or time.monotonic()
        self.out += 1

        def delivered(heard: Any) -> None:
            self.out -= 1
            self._careful = max(0, self._careful - 1)
            with session.changed:
                if not session.closed:
                    deliver(heard)
                session.changed.notify_all()
            self._live.heard(urgency, time.monotonic() - asked_at)
            self._live.queue(session)

        window.deliver = delivered

    def finished(self) -> list[Job]:
        return []

    def completed(self) -> None:
        """Sessions tell their own progress."""

    def collected(self) -> None:
        """There are no jobs."""

    @property
    def over(self) -> bool:
        return False

    def abandon(self) -> None:
        """The request has ended: windows on their way will not come back."""
        self.abandoned = True
        self._live.ring()

    def stop(self) -> None:
        """There are no threads to wait for."""


def _take_sound(stream: LiveStream, pcm: np.ndarray, mark: Mark | None, probabilities: np.ndarray) -> None:
    if mark == "finish":
        whole = len(probabilities) - 1 if len(probabilities) else 0
        stream.feed(pcm, probabilities[:whole])
        stream.finish(probabilities[whole:])
        return
    stream.feed(pcm, probabilities)
    if mark == "commit":
        stream.commit()
    elif mark == "clear":
        stream.clear()


def _nobody() -> None:
    """Listens to what nobody listens to."""
