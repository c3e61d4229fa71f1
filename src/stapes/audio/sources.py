"""Opening whatever a caller names as audio: paths, stdin, bytes, file objects. What FFmpeg reads from is made here."""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from stapes.errors import AudioError, UsageError

_HEAD = 1 << 16

_MEDIA_EXTENSIONS = """
3g2 3gp aac ac3 aif aifc aiff alac amr ape asf au avi caf dts dv f4v flac flv gsm m2ts m4a m4b m4v mka mkv mov mp1 mp2
mp3 mp4 mpc mpe mpeg mpg mts mxf nut oga ogg ogv opus qt ra rm rmvb sln snd sph spx tta ts vob voc w64 wav wave weba
webm wma wmv wv
"""
MEDIA_EXTENSIONS = frozenset(_MEDIA_EXTENSIONS.split())
"""What a folder is searched for. A file that is named itself is tried whatever it is called."""


def printable(text: str) -> str:
    """``text`` on one line, with whatever cannot be shown escaped (newlines, bytes that are not UTF-8)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class Reader:
    """What FFmpeg reads from: bytes of one input, counted, with a head that was looked at before.

    PyAV copies whatever ``read`` returns into a buffer of the size it asked for, unchecked, so the length is
    enforced here: a file object may return more.
    """

    def __init__(self, file: BinaryIO, *, owned: bool) -> None:
        self._file, self._owned = file, owned
        self._seekable = can_seek(file)
        self._base = file.tell() if self._seekable else 0
        self._ahead = b""
        self.total = 0  # bytes read so far, head included; the size of the input once it has ended
        self.head = self._read_head()
        if self._seekable:
            file.seek(self._base)
            self._ahead, self.total = b"", 0

    def _read_head(self) -> bytes:
        head = b""
        while len(head) < _HEAD and (more := self.read(_HEAD - len(head))):
            head += more
        self._ahead = head
        return head

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; none at the end."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        data = self._file.read(size)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise OSError("it does not return bytes: open it in binary, blocking mode")
        if len(data) > size:
            raise OSError("it returned more bytes than were asked for")
        self.total += len(data)
        return bytes(data)

    def seekable(self) -> bool:
        """Whether ``seek`` works."""
        return self._seekable

    def seek(self, offset: int, whence: int = 0) -> int:
        """As for files; position 0 is where the input stood when it was handed over."""
        return self._file.seek(offset + self._base if whence == 0 else offset, whence) - self._base

    def tell(self) -> int:
        """The position that ``seek`` counts."""
        return self._file.tell() - self._base

    def tail(self, count: int) -> tuple[int, bytes]:
        """(Size of the input, its last ``count`` bytes); the position is kept."""
        here = self.tell()
        size = self.seek(0, os.SEEK_END)
        self.seek(max(0, size - count))
        data = self._file.read(count)
        self.seek(here)
        return size, bytes(data)

    def spooled(self) -> Reader:
        """The same input copied to a temporary file, so that it can seek."""
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - the new reader owns it
        try:
            shutil.copyfileobj(self, spool, 1 << 20)
            spool.seek(0)
            return Reader(spool, owned=True)  # type: ignore[arg-type]
        except BaseException:
            spool.close()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the file if it was opened here."""
        if self._owned:
            self._file.close()


def can_seek(file: BinaryIO) -> bool:
    """Whether a file object can be set back to where it stands."""
    try:
        return file.seekable() and file.tell() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def open_reader(source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO) -> tuple[str, Reader]:
    """(What messages call it, a reader) of any source but an array.

    Raises:
        AudioError: it cannot be opened or is no kind of file that holds audio.
        UsageError: it is of a type that is no source.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return "<bytes>", Reader(io.BytesIO(source), owned=True)
    if isinstance(source, str) and source == "-":
        name, file, owned = "<stdin>", _stdin(), False
    elif isinstance(source, str | os.PathLike):
        path = os.fsdecode(source)
        name, file, owned = printable(path), _open_path(path), True
    elif hasattr(source, "read"):
        label = getattr(source, "name", None)
        name, file, owned = printable(label) if isinstance(label, str) else "<file>", source, False
    else:
        raise UsageError(f"{type(source).__name__} is no audio source: give a path, bytes, a binary file or an array")
    try:
        reader = Reader(file, owned=owned)
        # MP4 keeps its index at either end: from a pipe it has to be whole before it can be read.
        if not reader.seekable() and reader.head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
            reader = reader.spooled()
    except Exception as error:  # whatever the file object raises
        if owned:
            file.close()
        raise AudioError(f"{name} could not be read: {reason(error)}") from error
    return name, reader


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise AudioError("<stdin> is closed: pipe a recording into it")
    if sys.stdin.isatty():
        raise AudioError("<stdin> is a terminal: pipe a recording into it, or give a file")
    return getattr(sys.stdin, "buffer", sys.stdin)  # type: ignore[return-value]


def check_path(path: str) -> None:
    """Raise AudioError where there is no file to read at a path, before anything else is done for it."""
    name = printable(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise AudioError(f"{name} is a URL: download it first, then give the file")
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        if Path(path).is_symlink():
            raise AudioError(f"{name} is a link to a file that does not exist: mend the link") from None
        raise AudioError(f"{name} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        raise AudioError(f"{name} cannot be opened: {reason(error)}") from error
    if stat.S_ISDIR(mode):
        raise AudioError(f"{name} is a folder: give a recording in it")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # /dev/zero never ends
        raise AudioError(f"{name} is a device or a socket: give a file, or pipe it into stdin")


def _open_path(path: str) -> BinaryIO:
    check_path(path)
    name = printable(path)
    try:
        return open(path, "rb", buffering=0)  # noqa: PTH123 - the reader owns it
    except PermissionError:
        raise AudioError(f"{name} cannot be opened: you have no permission to read it") from None
    except (OSError, ValueError) as error:
        raise AudioError(f"{name} cannot be opened: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What an error says, on one line."""
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
