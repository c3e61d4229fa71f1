"""The engine process of `stapes bench serve`: how requests are batched may be changed, and weights may be random.

Everything else is the server's own. It is begun as ``python -m stapes.benchmarks.serve_engine FD``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stapes.benchmarks.random_weights import load_random
from stapes.devices.backend import resolve
from stapes.inference.engine import DecodeRequest
from stapes.inference.feed import AudioFeed, Clips, FeedMaker
from stapes.options import TranscribeOptions
from stapes.recognizer import Recognizer
from stapes.serving import engine_worker
from stapes.serving.engine_worker import WorkerCall
from stapes.serving.settings import USUAL_BATCH
from stapes.serving.watched import Gate

RANDOM = "random:"
"""What a model's name begins with that is a published size with random weights."""

LENGTHS = "STAPES_BENCH_LENGTHS"
"""The variable that names the file of a corpus' lengths: pairs of seconds and tokens, as JSON."""


class SwitchedGate(Gate):
    """A gate that may be told to begin requests in batches of a fixed size.

    Then a batch is begun when so many wait, or the first has waited as long as may be, and nothing is at work; and the
    next not before all of it have ended.
    """

    def __init__(self, batch: int, seconds: float) -> None:
        super().__init__(batch, seconds)
        self._patience = seconds
        self._size: int | None = None
        self._batched = threading.Condition()
        self._queue: list[object] = []
        self._inside: set[object] = set()

    def switch(self, size: int | None) -> None:
        """From the next request on: batches of this size, or None for the server's own way."""
        with self._batched:
            self._size = size

    @contextmanager
    def passed(self, priority: str) -> Iterator[None]:
        size = self._size
        if size is None:
            with super().passed(priority):
                yield
            return
        ticket = object()
        self._wait(ticket, size)
        try:
            yield
        finally:
            with self._batched:
                self._inside.discard(ticket)
                self._batched.notify_all()

    def _wait(self, ticket: object, size: int) -> None:
        with self._batched:
            self._queue.append(ticket)
            self._batched.notify_all()
            due = time.monotonic() + self._patience
            while ticket in self._queue:
                left = due - time.monotonic()
                if self._inside:
                    self._batched.wait()
                elif len(self._queue) >= size or left <= 0:
                    self._inside.update(self._queue[:size])
                    del self._queue[:size]
                    self._batched.notify_all()
                else:
                    self._batched.wait(left)


def run(call: WorkerCall, recognizer: Recognizer, message: dict[str, Any]) -> None:
    """Calls of the kind "batching": message has the ``size`` of batches, or None."""
    assert isinstance(call.gate, SwitchedGate)
    call.gate.switch(message["size"])


class Lengths:
    """How many tokens are written for so many seconds: as many as a recording of a corpus has that is as long.

    rows: seconds and tokens of recordings.
    """

    def __init__(self, rows: Sequence[tuple[float, int]]) -> None:
        self._rows = sorted(rows)
        self._seconds = [seconds for seconds, _ in self._rows]

    def of(self, seconds: float) -> int:
        """Tokens of a window."""
        return self._rows[min(bisect_left(self._seconds, seconds), len(self._rows) - 1)][1]

    def around(self, make: FeedMaker) -> FeedMaker:
        """The same state machines, whose windows are written just so long."""

        def made(clips: Clips) -> AudioFeed:
            feed = make(clips)
            plain = feed.request

            def request(window: Any) -> DecodeRequest:
                return replace(plain(window), exact_tokens=self.of(window.duration))

            feed.request = request
            return feed

        return made


def load(name: str, settings: dict[str, Any]) -> Recognizer:
    """As the server loads models; ``random:SIZE`` has weights that know nothing, and writes as much as the corpus."""
    if not name.startswith(RANDOM):
        return engine_worker.load_model(name, settings)
    usual = 3 if resolve(settings["device"]).backend == "cpu" else USUAL_BATCH
    recognizer = load_random(
        name.removeprefix(RANDOM),
        tokens=1,
        device=settings["device"],
        precision=settings["precision"],
        threads=settings["threads"],
        batch_size=settings["max_batch"] or usual,
    )
    lengths = Lengths([(seconds, tokens) for seconds, tokens in json.loads(Path(os.environ[LENGTHS]).read_text())])
    family: Any = recognizer.family
    feeds = family.feeds

    def with_lengths(options: TranscribeOptions) -> FeedMaker:
        return lengths.around(feeds(options))

    family.feeds = with_lengths
    return recognizer


def main() -> None:
    """Entry point."""
    engine_worker.KINDS["batching"] = "stapes.benchmarks.serve_engine"
    engine_worker.main(load=load, make_gate=SwitchedGate)


if __name__ == "__main__":
    from stapes.benchmarks import serve_engine  # calls know the module by this name

    serve_engine.main()
