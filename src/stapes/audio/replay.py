"""Reading a recording twice: what normalises the whole of it must be known before its first part is heard."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stapes.audio.decode import AudioSource, AudioStream, open_audio
from stapes.audio.sources import can_seek, open_reader
from stapes.errors import AudioError


class Replay:
    """A source that `open` reads from its beginning, any number of times; a context manager.

    Files, bytes and arrays are opened again; a file object that can seek is set back to where it stood. Anything else
    (stdin, a pipe) is first copied, as it is, to a temporary file, which has no name and goes when this is closed.
    ``settings``: the arguments of `open_audio`. Raises AudioError where the input or the copy cannot be read or made.
    """

    def __init__(self, source: AudioSource, **settings: Any) -> None:
        self._settings = settings
        self._copy: BinaryIO | None = None
        self._position = 0
        if _comes_once(source):
            source = self._copy = _copied(source)
        elif hasattr(source, "read"):
            self._position = source.tell()  # type: ignore[union-attr]
        self._source = source
        self._is_file = hasattr(source, "read")

    def open(self) -> AudioStream:
        """The recording from its beginning. A stream that was opened before is of no use any more."""
        if self._is_file:
            self._source.seek(self._position)  # type: ignore[union-attr]
        return open_audio(self._source, **self._settings)

    def close(self) -> None:
        """Let go of the copy, if there is one."""
        if self._copy is not None:
            self._copy.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Copy(tempfile.SpooledTemporaryFile[bytes]):
    """Named as what it was copied from, for messages."""

    name: Any = "<file>"


def _comes_once(source: Any) -> bool:
    if isinstance(source, np.ndarray | bytes | bytearray | memoryview):
        return False
    if isinstance(source, str) and source == "-":
        return True
    if isinstance(source, str | os.PathLike):
        try:
            return stat.S_ISFIFO(Path(os.fsdecode(source)).stat().st_mode)
        except (OSError, ValueError):  # opening it will say what is wrong
            return False
    return hasattr(source, "read") and not can_seek(source)


def _copied(source: Any) -> BinaryIO:
    name, reader = open_reader(source)
    try:
        copy = _Copy(max_size=1 << 24)
        copy.name = name
        shutil.copyfileobj(reader, copy, 1 << 20)  # type: ignore[arg-type]
        copy.seek(0)
    except OSError as error:
        raise AudioError(
            f"{name} could not be copied to be read twice ({error.strerror}): save it as a file, and give that"
        ) from error
    finally:
        reader.close()
    return copy  # type: ignore[return-value]
