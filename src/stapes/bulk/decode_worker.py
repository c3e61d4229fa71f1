"""The decoder process: one recording after another, from wherever it lies to 16 kHz float32, in pieces.

It reads a request (JSON) from a socket and answers with messages whose first byte says what they are: ``H`` the head
(JSON: ``sha256`` and ``bytes`` of the content, ``channels`` and ``seconds`` of what comes, ``recording``: Hz, channels
and seconds of the file), ``P`` samples (channels, n) float32, ``V`` speech probabilities of the channels (channels, n)
float32 where they were asked for, and at last ``E`` the end (JSON: ``warnings``, ``damaged``, and perhaps ``error`` and
its ``kind``). What hostile bytes do to FFmpeg ends here; the parent kills a process that gives nothing any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np

from stapes.audio.confined import confine
from stapes.audio.decode import open_audio
from stapes.audio.sources import check_path, printable, reason
from stapes.bulk.inputs import URL, filesystem
from stapes.errors import AudioError, StapesError

_MEMORY = 4 << 30  # bytes of address space, of which libraries take about one
_TRIES = 3  # of fetching what lies elsewhere
_PAUSE = 1.0  # seconds before the second try; twice that before the third
_BLOCK = 1 << 20


class FetchError(StapesError):
    """What lies elsewhere could not be brought here."""


class Decoder:
    """Answers requests. ``speech``: it also finds where speech is, with a network of its own."""

    def __init__(self, *, speech: bool) -> None:
        self._detector: Any = None
        if speech:
            from stapes.audio.vad import VoiceActivityDetector

            self._detector = VoiceActivityDetector()

    def answer(self, request: dict[str, Any]) -> Iterator[bytes]:
        """The messages for one recording; the last one is the end, whatever happens."""
        facts: dict[str, Any] = {"warnings": [], "damaged": False}
        end: dict[str, Any] = {}
        try:
            yield from self._messages(request, facts)
        except FetchError as error:
            end = {"error": str(error), "kind": "fetch"}
        except AudioError as error:
            end = {"error": str(error), "kind": _kind(str(error))}
        except StapesError as error:
            end = {"error": str(error), "kind": "audio"}
        except MemoryError:
            end = {
                "error": f"{printable(request['audio'])} takes too much memory to decode: convert it",
                "kind": "memory",
            }
        except Exception as error:  # one bad input must never end the work
            name = printable(request["audio"])
            end = {"error": f"{name} could not be read ({type(error).__name__}: {reason(error)})", "kind": "audio"}
        yield b"E" + json.dumps({**facts, **end}).encode()

    def _messages(self, request: dict[str, Any], facts: dict[str, Any]) -> Iterator[bytes]:
        audio: str = request["audio"]
        with _content(audio) as (file, size, sha256):
            stream = open_audio(
                file,
                start=request["start"],
                end=request["end"],
                channels=request["channels"],
                max_seconds=request["max_seconds"],
            )
            facts["warnings"] = stream.warnings
            with stream:
                head = {
                    "sha256": sha256,
                    "bytes": size,
                    "channels": stream.channels,
                    "seconds": stream.duration,
                    "recording": [stream.source_rate, stream.source_channels, stream.source_seconds],
                }
                yield b"H" + json.dumps(head).encode()
                states = [self._detector.state() for _ in range(stream.channels)] if self._detector else []
                nothing = np.zeros((stream.channels, 0), np.float32)
                try:
                    for chunk in stream:
                        yield from self._heard(chunk, states, final=False)
                finally:
                    facts["damaged"] = stream.damaged
                yield from self._heard(nothing, states, final=True)

    def _heard(self, chunk: np.ndarray, states: list[Any], *, final: bool) -> Iterator[bytes]:
        # Probabilities first: once its samples are there, they are asked for.
        if self._detector is not None:
            found = np.stack(self._detector.probabilities(states, list(chunk), final=final))
            if found.size:
                yield b"V" + found.tobytes()
        if chunk.size:
            yield b"P" + np.ascontiguousarray(chunk, np.float32).tobytes()


def _kind(message: str) -> str:
    if "does not exist" in message:
        return "missing"
    if " is longer than the " in message:
        return "too long"
    return "empty" if "no audio samples" in message else "audio"


@contextlib.contextmanager
def _content(audio: str) -> Iterator[tuple[Any, int, str]]:
    """(An open file with the recording's name, its bytes, their SHA-256)."""
    if URL.match(audio):
        with tempfile.TemporaryFile(prefix="stapes-") as copy:
            sha256 = _fetch(audio, copy)  # pyright: ignore[reportArgumentType] - it is one in all but name
            yield _Named(copy, printable(audio)), copy.tell(), sha256
        return
    check_path(audio)
    try:
        with open(audio, "rb", buffering=0) as file:  # noqa: PTH123 - keeps odd names as they are
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            yield _Named(file, printable(audio)), size, sha256
    except OSError as error:
        raise AudioError(f"{printable(audio)} cannot be read: {reason(error)}") from error


class _Named(io.RawIOBase):
    """A file from its beginning, under the name that messages are to say. Closing it leaves the file open."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self.name = file, name
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def _fetch(url: str, copy: BinaryIO) -> str:
    """Bring the content of a URL here; its SHA-256. Raises FetchError."""
    for attempt in range(_TRIES):
        digest = hashlib.sha256()
        copy.seek(0)
        copy.truncate()
        try:
            files, path = filesystem(url)
            with files.open(path, "rb") as source:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    copy.write(block)
            return digest.hexdigest()
        except FileNotFoundError:
            raise AudioError(f"{printable(url)} does not exist: check the address") from None
        except Exception as error:  # whatever the driver raises
            if attempt == _TRIES - 1:
                name = printable(url)
                raise FetchError(f"{name} could not be fetched ({type(error).__name__}: {reason(error)})") from error
            time.sleep(_PAUSE * 2**attempt)
    raise AssertionError("unreachable")


def main() -> None:
    """Entry point: ``python -m stapes.bulk.decode_worker FD SPEECH``, with the number of a socket and 0 or 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe = Connection(int(sys.argv[1]))
    speech = sys.argv[2] == "1"
    decoder = Decoder(speech=speech)
    # PyTorch alone, where it was built for GPUs, maps more than FFmpeg may need.
    confine(memory=None if speech else _MEMORY, file_bytes=None, open_files=256)
    with contextlib.suppress(EOFError, OSError):  # the parent has gone
        pipe.send_bytes(b"R")
        while True:
            for message in decoder.answer(json.loads(pipe.recv_bytes())):
                pipe.send_bytes(message)


if __name__ == "__main__":
    main()
