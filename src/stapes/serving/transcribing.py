"""Calls of the kind "transcribe", in the engine process: one decoded recording to segments, as they come."""

from __future__ import annotations

from typing import Any

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.options import TranscribeOptions
from stapes.recognizer import Recognizer
from stapes.serving.engine_worker import WorkerCall
from stapes.transcript import Segment


def run(call: WorkerCall, recognizer: Recognizer, message: dict[str, Any]) -> None:
    """Transcribe the samples in a file.

    message: ``path`` of float32 samples at 16 kHz, interleaved, of so many ``channels``; ``options`` by name;
    ``priority``. Sends ``segments`` as they are done, then ``transcript``. Raises StapesError.
    """

    def tell(segments: list[Segment]) -> None:
        call.send({"type": "segments", "segments": [segment.to_dict() for segment in segments]})

    samples = np.memmap(message["path"], dtype=np.float32, mode="r").reshape(-1, message["channels"]).T
    with call.gate.passed(message["priority"]):
        transcript = recognizer.transcribe(
            samples,
            TranscribeOptions(**message["options"]),
            sample_rate=SAMPLE_RATE,
            priority=message["priority"],
            on_segments=tell,
            cancellation=call.cancellation,
        )
    call.send({"type": "transcript", "transcript": transcript.to_dict()})
