"""The decoder process: uploads to 16 kHz float32, one after another, behind limits of its own.

It reads a JSON object a line (``input``, ``output``, ``name``, ``channels``, ``end``, ``max_seconds``) and
answers each with one: ``seconds``, ``channels``, ``warnings``, ``damaged``, or ``error`` and ``status``. Whatever
hostile bytes do to FFmpeg happens here, where there are no keys, no models and no other client's audio in memory, and
ends here: the process may not grow beyond its limits, and its parent kills it when it takes too long.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from stapes.audio.confined import confine
from stapes.audio.decode import SAMPLE_RATE, open_audio
from stapes.errors import AudioError, StapesError

_MEMORY = 4 << 30  # bytes of address space, of which libraries take about one
_SLACK = 1.0  # seconds; the file may be that much longer than the limit before writing fails


class TooLong(StapesError):  # noqa: N818 - it is an answer more than an error
    """There are more seconds in it than are allowed."""

    http_status = 413


def decode(request: dict[str, Any]) -> dict[str, Any]:
    """Decode one upload. Raises StapesError."""
    most, name = request["max_seconds"], request["name"]
    limit = round(most * SAMPLE_RATE)
    written = 0
    with _named(request["input"], name) as file, Path(request["output"]).open("wb") as out:
        stream = open_audio(file, channels=request["channels"], end=request["end"], max_seconds=most + _SLACK)
        with stream:
            try:
                for chunk in stream:
                    written += chunk.size
                    if written > limit:
                        raise TooLong(_too_long(name, most, stream.channels))
                    out.write(np.ascontiguousarray(chunk.T).data)
            except AudioError as error:
                if " is longer than the " in str(error):
                    raise TooLong(_too_long(name, most, stream.channels)) from error
                if not written:
                    raise
                # What could be read is transcribed, and the client is told what was lost.
                return _result(stream, written, [*stream.warnings, str(error)], damaged=True)
        if not written:
            raise AudioError(f"{name} has no audio samples: record or export it again")
        return _result(stream, written, stream.warnings, damaged=stream.damaged)


def _result(stream: Any, written: int, warnings: list[str], *, damaged: bool) -> dict[str, Any]:
    samples = written // stream.channels
    return {
        "seconds": samples / SAMPLE_RATE,
        "channels": stream.channels,
        "warnings": list(warnings),
        "damaged": damaged,
    }


def _too_long(name: str, most: float, channels: int) -> str:
    of = f", counted over its {channels} channels" if channels > 1 else ""
    return f"{name} is longer than the {most:g} s that this server takes{of}: cut it into parts"


def _named(path: str, name: str) -> Any:
    """The upload under the name that the client gave, which is for messages alone."""
    file = io.FileIO(path)
    file.name = name  # type: ignore[misc]
    return contextlib.closing(file)


def main() -> None:
    """Entry point: ``python -m stapes.serving.decode_worker BYTES``, the most that a decoded file may hold."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails instead
    confine(memory=_MEMORY, file_bytes=int(sys.argv[1]), open_files=64)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            answer = decode(json.loads(line))
        except StapesError as error:
            answer = {"error": str(error), "status": error.http_status}
        except MemoryError:
            answer = {"error": "The recording needs more memory to decode than is allowed: convert it", "status": 413}
        except OSError as error:
            answer = {"error": f"The recording could not be stored ({error.strerror}): try again later", "status": 503}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
