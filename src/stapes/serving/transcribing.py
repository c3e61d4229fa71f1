"""Calls of the kind "transcribe", in the engine process: one decoded recording to segments, as they come."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.errors import AudioError
from stapes.options import TranscribeOptions
from stapes.recognizer import Recognizer
from stapes.serving.engine_worker import Cancelled, WorkerCall
from stapes.serving.watched import Follower


def run(call: WorkerCall, recognizer: Recognizer, message: dict[str, Any]) -> None:
    """Transcribe the samples in a file.

    message: ``path`` of float32 samples at 16 kHz, interleaved, of so many ``channels``; ``options`` by name;
    ``priority``. Sends ``segments`` as they are done, then ``transcript``. Raises Cancelled, StapesError.
    """
    options = TranscribeOptions(**message["options"])
    samples = np.memmap(message["path"], dtype=np.float32, mode="r").reshape(-1, message["channels"]).T
    follower = Follower(lambda segments: call.send({"type": "segments", "segments": segments}), options.clips()[0][0])
    is_over: queue.SimpleQueue[bool] = queue.SimpleQueue()
    call.when_cancelled(lambda: _hurry(is_over, recognizer))

    def inputs() -> Iterator[np.ndarray]:
        """The one recording; then the end of the inputs, which is an error when the call was cancelled before.

        The recogniser waits for more inputs while it works, and gives up at once when they fail.
        """
        yield samples
        if not is_over.get():
            raise Cancelled

    with call.gate.passed(message["priority"]), follower.watching():
        if call.cancelled.is_set():
            raise Cancelled
        transcripts = recognizer.transcribe_many(
            inputs(), options, sample_rate=SAMPLE_RATE, progress=follower, priority=message["priority"]
        )
        with closing(transcripts):  # pyright: ignore[reportArgumentType] - it is a generator
            try:
                transcript = next(iter(transcripts))
            finally:
                is_over.put(True)
    if transcript.error is not None:
        raise AudioError(transcript.error)
    segments = [segment.to_dict() for segment in transcript.segments]
    call.send({"type": "segments", "segments": segments[follower.sent :]})
    call.send({"type": "transcript", "transcript": transcript.to_dict(), "notes": follower.notes})


def _hurry(is_over: queue.SimpleQueue[bool], recognizer: Recognizer) -> None:
    """Let the inputs fail, and the engine look up before it encodes more."""
    is_over.put(False)
    recognizer._scheduler.ring(urgent=True)
