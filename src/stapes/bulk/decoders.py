"""Recordings decoded by processes that may be killed, as sources that a recogniser reads like files.

`Decoders` is the protocol: local processes here, tasks of a cluster in `on_ray`. A `Source` is begun early, so that the
next recordings are on their way while others are transcribed, and remembers what became of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from stapes.audio.decode import SAMPLE_RATE, DecodedElsewhere
from stapes.audio.sources import printable
from stapes.bulk.inputs import Item
from stapes.errors import AudioError

_FRAME = 512
"""Samples that a speech probability is of (`stapes.audio.vad.FRAME`, which takes PyTorch to import)."""

_START_SECONDS = 120.0
"""A process that has not begun by then never will."""

_AHEAD = 6
"""Messages of one recording, of ten to twenty seconds each, that are read before they are wanted."""


class Lost(Exception):  # noqa: N818 - what happened, to be told in a sentence elsewhere
    """The process died at this recording, or gave nothing any more and was ended. ``kind``: which of them."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class Feed(Protocol):
    """The messages of one recording (see `decode_worker`)."""

    def get(self) -> bytes | memoryview:
        """The next one. Raises Lost."""
        ...

    def close(self) -> None:
        """No more is wanted."""
        ...


class Decoders(Protocol):
    """Where recordings are decoded."""

    speech: bool
    """Whether speech probabilities come with the samples."""
    group_seconds: float
    """Short recordings are begun together while they last no longer than this; 0: each by itself."""

    def begin(self, requests: Sequence[dict[str, Any]], *, wait: bool) -> Sequence[Feed] | None:
        """Begin with recordings; where nothing is free, wait for it or give None."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


@dataclass(eq=False)
class Outcome:
    """What is known of a recording once it was read."""

    sha256: str | None = None
    bytes: int | None = None
    recording: tuple[int, int, float | None] | None = None
    """Hz, channels and seconds of the file."""
    error: str | None = None
    kind: str | None = None
    lost: bool = False
    """Its decoder died or was ended."""


@dataclass(eq=False)
class Source(DecodedElsewhere):
    """A recording on its way from a decoder. ``name``: what the recogniser is to call it."""

    name: str
    item: Item
    request: dict[str, Any]
    decoders: Decoders
    outcome: Outcome = field(default_factory=Outcome)
    feed: Feed | None = None
    """It is being decoded."""
    retried: bool = False
    """Its decoder was lost on it before."""

    def open(self, start: float, end: float | None, channels: str) -> Frames:
        """Its frames. What to read was settled when the request was made."""
        feed, self.feed = self.feed, None
        if feed is None:
            begun = self.decoders.begin([self.request], wait=True)
            assert begun is not None
            feed = begun[0]
        frames = Frames(self, feed)
        frames.read_head()
        return frames

    def fail(self, error: Lost) -> AudioError:
        """The decoder was lost on it."""
        name = printable(self.item.audio)
        self.outcome.lost, self.outcome.kind = True, error.kind
        self.outcome.error = f"{name} {error}: it is damaged, or made to do so; convert it"
        return AudioError(self.outcome.error)


def begin_together(sources: Sequence[Source]) -> bool:
    """Have recordings decoded from now on; False where no decoder is free."""
    feeds = sources[0].decoders.begin([source.request for source in sources], wait=False)
    for source, feed in zip(sources, feeds or (), strict=feeds is not None):
        source.feed = feed
    return feeds is not None


class Frames:
    """Decoded samples as they come: what `stapes.audio.decode` reads a source by."""

    def __init__(self, source: Source, feed: Feed) -> None:
        self.name, self.rate, self.channels = printable(source.item.audio), SAMPLE_RATE, 1
        self.seconds: float | None = None
        self.damaged = False
        self.warnings: list[str] = []
        self.speech = Speech() if source.decoders.speech else None
        self._source, self._feed = source, feed
        self._over = False

    def read_head(self) -> None:
        """Read what comes first. Raises AudioError where the recording cannot be read at all."""
        message = self._next()
        if message is not None:
            head = json.loads(bytes(message[1:]))
            self.channels, self.seconds = head["channels"], head["seconds"]
            outcome = self._source.outcome
            outcome.sha256, outcome.bytes, outcome.recording = head["sha256"], head["bytes"], head["recording"]

    def seek(self, seconds: float) -> int:
        """It is cut already."""
        return 0

    def frames(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (rate, float32 (channels, samples)). Raises AudioError."""
        while (message := self._next()) is not None:
            values = np.frombuffer(message, np.float32, offset=1) if len(message) % 4 == 1 else None
            if values is None:
                raise AudioError(f"{self.name}: its decoder sent half a message; run the same command again")
            values = values.reshape(self.channels, -1)
            if bytes(message[:1]) == b"P":
                yield self.rate, values
            elif self.speech is not None:
                self.speech.add(values)

    def _next(self) -> bytes | memoryview | None:
        """The next message; None at the end, which is taken note of. Raises AudioError."""
        if self._over:
            return None
        try:
            message = self._feed.get()
        except Lost as error:
            self._over = True
            raise self._source.fail(error) from None
        if bytes(message[:1]) != b"E":
            return message
        self._over = True
        end = json.loads(bytes(message[1:]))
        self.warnings += end["warnings"]
        self.damaged = end["damaged"]
        if "error" in end:
            self._source.outcome.error, self._source.outcome.kind = end["error"], end["kind"]
            raise AudioError(end["error"])
        return None

    def close(self) -> None:
        """No more is wanted."""
        self._feed.close()


class Speech:
    """Stands in for a voice activity detector: hands out the probabilities that came with the samples."""

    def __init__(self) -> None:
        self._waiting: list[np.ndarray] = []
        self._samples = 0
        self._given = 0

    def add(self, probabilities: np.ndarray) -> None:
        """Take (channels, frames) more."""
        self._waiting.append(probabilities)

    def state(self) -> None:
        """The state is here."""

    def probabilities(self, states: list[Any], pcm: list[np.ndarray], *, final: bool = False) -> list[np.ndarray]:
        """As a detector's: for each channel those of the frames that ``pcm`` has made complete."""
        self._samples += len(pcm[0])
        held = np.concatenate([np.zeros((len(pcm), 0), np.float32), *self._waiting], axis=1)
        count = held.shape[1] if final else min(held.shape[1], self._samples // _FRAME - self._given)
        self._given += count
        self._waiting = [held[:, count:]]
        return list(held[:, :count])


class LocalDecoders:
    """A few processes, each decoding one recording at a time; one that dies is begun again."""

    group_seconds = 0.0

    def __init__(self, count: int, *, patience: float, speech: bool) -> None:
        self.speech = speech
        self._patience = patience
        self._changed = threading.Condition()
        self._idle: list[_Process | None] = [None] * count
        self._waiting = 0
        self._closed = False
        self._busy: set[_Process] = set()

    def begin(self, requests: Sequence[dict[str, Any]], *, wait: bool) -> Sequence[Feed] | None:
        """Begin with a recording. Who waits goes before those that only look ahead."""
        (request,) = requests
        with self._changed:
            if not wait and (not self._idle or self._waiting):
                return None
            self._waiting += 1
            while not self._idle and not self._closed:
                self._changed.wait()
            self._waiting -= 1
            if self._closed:
                raise AudioError("the work was ended")
            process = self._idle.pop()
        try:
            if process is None or not process.alive:
                process = _Process(speech=self.speech)
        except OSError as error:
            self._give_back(None)
            raise AudioError(f"no decoder could be started ({error.strerror}): run the same command again") from None
        with self._changed:
            self._busy.add(process)
        return [_LocalFeed(process, request, self._patience, self._give_back)]

    def _give_back(self, process: _Process | None) -> None:
        with self._changed:
            self._busy = {each for each in self._busy if each is not process and each.alive}
            if self._closed and process is not None:
                process.kill()
            else:
                self._idle.append(process)
            self._changed.notify()

    def close(self) -> None:
        """End all processes."""
        with self._changed:
            self._closed = True
            for process in [*self._idle, *self._busy]:
                if process is not None:
                    process.kill()
            self._changed.notify_all()


class _Process:
    def __init__(self, *, speech: bool) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "stapes.bulk.decode_worker", str(theirs.fileno()), str(int(speech))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.pipe = Connection(ours.detach())
        self._is_new = True

    def greet(self) -> None:
        """Wait until it has begun, which is no recording's fault. Raises OSError, EOFError."""
        if self._is_new:
            if not self.pipe.poll(_START_SECONDS):
                self.kill()
                raise OSError(f"a decoder did not begin within {_START_SECONDS:g} s")
            self.pipe.recv_bytes()
            self._is_new = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def code(self) -> int:
        """How it ended; waits for that."""
        return self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()


class _LocalFeed:
    """The messages of one process for one recording, read ahead by a thread."""

    def __init__(
        self, process: _Process, request: dict[str, Any], patience: float, give_back: Callable[[_Process | None], None]
    ) -> None:
        self._process, self._patience, self._give_back = process, patience, give_back
        self._messages: queue.Queue[bytes | Lost] = queue.Queue(_AHEAD)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(request,), daemon=True, name="decoded")
        self._thread.start()

    def get(self) -> bytes:
        message = self._messages.get()
        if isinstance(message, Lost):
            raise message
        return message

    def close(self) -> None:
        """Nobody wants the rest: where there is one, the process is ended."""
        self._given_up.set()

    def _read(self, request: dict[str, Any]) -> None:
        process: _Process | None = self._process
        try:
            self._process.greet()
            self._process.pipe.send_bytes(json.dumps(request).encode())
            while True:
                if not self._process.pipe.poll(self._patience):
                    self._process.kill()
                    self._put(Lost("decoder hung", f"kept its decoder busy for {self._patience:g} s without a sample"))
                    process = None
                    break
                message = self._process.pipe.recv_bytes()
                if not self._put(message):
                    self._process.kill()
                    process = None
                    break
                if message[:1] == b"E":
                    break
        except (EOFError, OSError):
            code = self._process.code()
            self._put(Lost("decoder died", f"ended its decoder ({ending(code)})"))
            process = None
        finally:
            if process is None:
                self._process.pipe.close()
            self._give_back(process)

    def _put(self, message: bytes | Lost) -> bool:
        """Hand a message over; False when nobody wants it any more."""
        while not self._given_up.is_set():
            with contextlib.suppress(queue.Full):
                self._messages.put(message, timeout=0.5)
                return True
        return isinstance(message, bytes) and message[:1] == b"E"


def ending(code: int) -> str:
    """What an exit code says, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        import signal

        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
