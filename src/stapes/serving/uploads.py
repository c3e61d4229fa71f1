"""Reading a form with a file in it: counted while it comes, the file straight to a private folder.

The name that a client gives its file is for messages; in the spool a file is called what we call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from stapes.audio.sources import printable
from stapes.errors import OutputError
from stapes.serving.failures import ApiError

_MOST_FIELDS = 200
_MOST_FIELD_BYTES = 1 << 18
_DRAIN_BYTES = 64 << 20
_DRAIN_SECONDS = 5.0
_WRITE_BYTES = 1 << 20
_NAME_LENGTH = 80


class Spool:
    """A private folder for what is on its way; its content goes with it.

    What a server that was killed has left behind is removed by the next one.
    """

    def __init__(self, folder: Path | None) -> None:
        base = Path(folder or tempfile.gettempdir())
        for left in base.glob("stapes-spool-*"):
            if (owner := left.name.split("-")[2]).isdecimal() and not _is_alive(int(owner)):
                shutil.rmtree(left, ignore_errors=True)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"stapes-spool-{os.getpid()}-", dir=base))  # for this user alone
        except OSError as error:
            raise OutputError(f"{base}: uploads cannot be kept there ({error.strerror}); give --spool-dir") from error
        self._number = 0

    def new(self) -> Place:
        """Room for one request: a context manager, after which its files are gone."""
        self._number += 1
        return Place(self.path / str(self._number))

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


class Place:
    """The two files of a request: as it came, and decoded."""

    def __init__(self, stem: Path) -> None:
        self.upload, self.samples = stem.with_suffix(".upload"), stem.with_suffix(".pcm")

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        for path in (self.upload, self.samples):
            path.unlink(missing_ok=True)


@dataclass
class Form:
    """What a client sent: every value of every field, and its file."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    file_name: str | None = None
    """As the client calls it, made printable; None where no file was sent."""
    size: int = 0
    """Bytes of the file."""


async def read_form(request: Request, place: Place, *, max_bytes: int, idle_seconds: float) -> Form:
    """Read a multipart form, its ``file`` into the place.

    Raises ApiError: 413 too many bytes (said before they are read where the client tells how many there are), 408 the
    client stopped sending, 400 no such form, 503 nowhere to put it. ClientDisconnect when the client has left.
    """
    kind, parameters = parse_options_header(request.headers.get("content-type", ""))
    boundary = parameters.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(400, "The request is no multipart/form-data form: send the recording in its field `file`")
    too_large = ApiError(413, f"The request is larger than the {max_bytes:,} bytes that this server takes")
    told = request.headers.get("content-length", "")
    counter, reader = 0, _FormReader(place.upload, boundary)
    try:
        if told.isdecimal() and int(told) > max_bytes:
            raise too_large
        async with contextlib.aclosing(_chunks(request, idle_seconds)) as chunks:
            async for chunk in chunks:
                counter += len(chunk)
                if counter > max_bytes:
                    raise too_large
                reader.feed(chunk)
                if reader.waiting >= _WRITE_BYTES:
                    await asyncio.to_thread(reader.write)
        reader.finish()
        await asyncio.to_thread(reader.write)
    except MultipartParseError as error:
        raise ApiError(400, f"The form is damaged ({printable(str(error))}): send it again") from None
    except OSError as error:
        if isinstance(error, ConnectionError | TimeoutError):
            raise
        raise ApiError(503, f"There is no room for the upload ({error.strerror})", retry_after=30) from error
    except ApiError as error:
        if error.status == 413:
            await _drain(request)
        raise
    finally:
        reader.close()
    return reader.form


async def _chunks(request: Request, idle_seconds: float) -> AsyncGenerator[bytes, None]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(408, f"Nothing of the upload came for {idle_seconds:g} s: send it again") from None
        yield chunk


async def _drain(request: Request) -> None:
    """Read on for a moment: a client that is still sending would not look at the answer."""
    left = _DRAIN_BYTES
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return


class _FormReader:
    """Takes chunks of a form; keeps fields, and the file's bytes until they are written."""

    def __init__(self, path: Path, boundary: bytes) -> None:
        self.form = Form()
        self._path = path
        self._file: BinaryIO | None = None
        self._buffer: list[bytes] = []
        self.waiting = 0
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = b"", b""
        self._field, self._parts = "", 0
        self._text = bytearray()
        self._is_file = False
        self._over = False
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begin,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Raises MultipartParseError, ApiError."""
        self._parser.write(chunk)

    def finish(self) -> None:
        """There are no more. Raises ApiError where the form breaks off: never is a part taken for the whole."""
        self._parser.finalize()
        if not self._over:
            raise ApiError(400, "The form breaks off before its end: send it again")

    def write(self) -> None:
        """Write what waits to the file."""
        parts, self._buffer, self.waiting = self._buffer, [], 0
        if parts and self._file is not None:
            self._file.writelines(parts)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _part_begin(self) -> None:
        self._headers, self._name, self._value, self._text = {}, b"", b"", bytearray()
        self._parts += 1
        if self._parts > _MOST_FIELDS:
            raise ApiError(400, f"The form has more than {_MOST_FIELDS} fields")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _headers_finished(self) -> None:
        _, parameters = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = parameters.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._field == "file" and b"filename" in parameters
        if b"filename" in parameters and not self._is_file:
            raise ApiError(400, f"Only `file` can be a file, not `{printable(self._field[:40])}`")
        if self._is_file:
            if self._file is not None:
                raise ApiError(400, "There is more than one `file`: send one recording in each request", param="file")
            name = parameters[b"filename"].decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
            self.form.file_name = printable(name)[:_NAME_LENGTH] or "the recording"
            self._file = self._path.open("xb")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._buffer.append(data[start:end])
            self.waiting += end - start
            self.form.size += end - start
        else:
            self._text += data[start:end]
            if len(self._text) > _MOST_FIELD_BYTES:
                raise ApiError(400, f"The field `{printable(self._field[:40])}` is too long", param=self._field[:40])

    def _part_end(self) -> None:
        if not self._is_file:
            self.form.fields.setdefault(self._field, []).append(self._text.decode("utf-8", "replace"))

    def _end(self) -> None:
        self._over = True
