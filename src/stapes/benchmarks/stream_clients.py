"""Clients of live sessions: real recordings at the pace of speech, and how long words took to come.

All times are measured from when the sound in question was spoken: a chunk of 100 ms is sent when its last sample has
been. Clients begin a fraction of a chunk apart, and in different recordings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.inference.live_events import Committed, Event, Failed, Final, Partial, SpeechStarted, SpeechStopped
from stapes.inference.live_session import Session

CHUNK = SAMPLE_RATE // 10
"""Samples that are sent at once."""

PAUSE_SECONDS = 1.0
"""Silence between recordings."""

_LAST_WORDS_SECONDS = 120.0


@dataclass(frozen=True)
class Clip:
    """A recording and its words."""

    pcm: np.ndarray
    text: str


@dataclass
class Delays:
    """Seconds, one value each time; see `figures` in `stream` for what they are."""

    first_words: list[float] = field(default_factory=list)
    words: list[float] = field(default_factory=list)
    final_after_speech: list[float] = field(default_factory=list)
    final_after_stop: list[float] = field(default_factory=list)
    changed: int = 0
    """Committed words that a final text does not have in their place."""
    revised: int = 0
    """Provisional words that the next hypothesis took back."""
    said: int = 0
    """Words of final texts."""
    failed: int = 0

    def add(self, other: Delays) -> None:
        """Put another client's beside them."""
        for name in ("first_words", "words", "final_after_speech", "final_after_stop"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("changed", "revised", "said", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Client:
    """One speaker: takes its session's events as they happen.

    word_ends: where words really end, in seconds of the session, for scripts; None: as the final texts say.
    """

    def __init__(self, pcm: np.ndarray, word_ends: Sequence[float] | None = None) -> None:
        self.pcm = pcm
        self.delays = Delays()
        self.texts: list[str] = []
        self.began = 0.0
        """When the session's first sample was spoken."""
        self.sent = 0
        self.session: Session | None = None
        self._word_ends = word_ends
        self._spoken = 0  # committed words in all
        self._committed: list[tuple[str, float]] = []  # of the part that goes on: text, and when
        self._shown: list[str] = []  # provisional
        self._first: float | None = None  # when the first words of the part came
        self._stopped = 0.0

    def take(self, event: Event) -> None:
        """Note when something happened."""
        now = time.perf_counter() - self.began
        match event:
            case Committed() | Partial():
                self._take_words(event, now)
            case SpeechStopped():
                self._stopped = now
            case Final():
                self._take_final(event, now)
            case Failed():
                self.delays.failed += 1
                self._committed.clear()
            case SpeechStarted():
                pass

    def _take_words(self, event: Committed | Partial, now: float) -> None:
        words = [word.word for word in event.words]
        if self._first is None and words:
            self._first = now
        if isinstance(event, Committed):
            kept = self._shown[: len(words)]
            self.delays.revised += sum(shown != word for shown, word in zip(kept, words, strict=False))
            self._shown = self._shown[len(words) :]
            self._committed += [(word, now) for word in words]
        else:
            gone = [shown != word for shown, word in zip(self._shown, words, strict=False)]
            self.delays.revised += sum(gone) + max(0, len(self._shown) - len(words))
            self._shown = words

    def _take_final(self, event: Final, now: float) -> None:
        delays = self.delays
        words = [] if event.segment is None else event.segment.words or []
        final = [word.word for word in words]
        delays.changed += sum(committed != word for (committed, _), word in zip(self._committed, final, strict=False))
        delays.changed += abs(len(final) - len(self._committed))
        delays.said += len(words)
        ends = [word.end for word in words]
        if self._word_ends is not None:
            ends = list(self._word_ends[self._spoken : self._spoken + len(words)])
            ends += [now] * (len(words) - len(ends))
        delays.words += [when - end for (_, when), end in zip(self._committed, ends, strict=False)]
        if words:
            self.texts.append(event.text)
            if self._first is not None:
                delays.first_words.append(self._first - words[0].start)
            if event.ends_turn:
                delays.final_after_speech.append(now - ends[-1])
                delays.final_after_stop.append(now - self._stopped)
        self._spoken += len(words)
        self._committed, self._first, self._shown = [], None, []


@dataclass
class Played:
    """What came of one round."""

    delays: Delays
    texts: list[str]
    """Of each client."""
    interval: float
    """Mean seconds from one partial to the next, as the load allowed."""
    late: float
    """Seconds by which a chunk was sent too late, at most: above a chunk's length, the clients were too slow."""


def play(clients: Sequence[Client], listen: Callable[[Client], Session], interval: Callable[[], float]) -> Played:
    """Let all clients speak at once, each for its whole recording; ends when their last words have come."""
    for client in clients:
        client.session = listen(client)
    begin = time.perf_counter() + 0.2
    for number, client in enumerate(clients):
        client.began = begin + 0.1 * number / len(clients)
    late, intervals = 0.0, []
    speaking = list(clients)
    tick = 0
    while speaking:
        tick += 1
        for client in list(speaking):
            due = client.began + tick * CHUNK / SAMPLE_RATE
            wait = due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            late = max(late, -wait)
            _speak(client)
            if client.sent >= len(client.pcm):
                speaking.remove(client)
        intervals.append(interval())
    _hear_out(clients)
    delays = Delays()
    for client in clients:
        delays.add(client.delays)
    texts = ["".join(client.texts).strip() for client in clients]
    return Played(delays, texts, sum(intervals) / max(1, len(intervals)), late)


def _speak(client: Client) -> None:
    assert client.session is not None
    client.session.feed(client.pcm[client.sent : client.sent + CHUNK], wait=False)
    client.sent += CHUNK
    if client.sent >= len(client.pcm):
        client.session.end()


def _hear_out(clients: Sequence[Client]) -> None:
    def finish(client: Client) -> None:
        assert client.session is not None
        client.session.finish(timeout=_LAST_WORDS_SECONDS)

    threads = [threading.Thread(target=finish, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def recording_of(clips: Sequence[Clip], first: int, seconds: float) -> tuple[np.ndarray, list[tuple[Clip, float]]]:
    """Whole clips, beginning with one of them, with a pause before each and at the end, of ``seconds`` at least.

    Returns the samples, and the clips with the seconds where they begin.
    """
    pause = np.zeros(round(PAUSE_SECONDS * SAMPLE_RATE), np.float32)
    parts: list[np.ndarray] = [pause]
    placed: list[tuple[Clip, float]] = []
    length = len(pause)
    while length < seconds * SAMPLE_RATE:
        clip = clips[(first + len(placed)) % len(clips)]
        placed.append((clip, length / SAMPLE_RATE))
        parts += [clip.pcm, pause]
        length += len(clip.pcm) + len(pause)
    return np.concatenate(parts), placed


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which so large a share lies."""
    return float(np.quantile(values, share)) if values else None


def as_figures(played: Played) -> dict[str, Any]:
    """Medians and 95th percentiles of the delays, and the counts."""
    delays = played.delays
    figures: dict[str, Any] = {}
    for name in ("first_words", "words", "final_after_speech", "final_after_stop"):
        values = getattr(delays, name)
        figures[f"{name}_p50"], figures[f"{name}_p95"] = quantile(values, 0.5), quantile(values, 0.95)
    return figures | {
        "committed_changed": float(delays.changed),
        "revised_per_word": delays.revised / max(1, delays.said),
        "partial_interval": played.interval,
        "words": float(delays.said),
        "turns": float(len(delays.final_after_stop)),
        "failed": float(delays.failed),
        "sent_late": played.late,
    }
