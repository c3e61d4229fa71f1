"""Messages between the web process and its engine processes: a JSON object each, with bytes that belong to it.

JSON, not pickle: neither side can make the other run anything. A message is two lengths (32 bits, big-endian), the
object in UTF-8, and the bytes.
"""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stapes.text.subtitles import finite

Message = tuple[dict[str, Any], bytes]

_LENGTHS = struct.Struct(">II")
_MOST = 1 << 30


def pack(message: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """A message as it goes over the socket. What JSON cannot write (NaN, infinities) becomes null."""
    text = json.dumps(finite(dict(message)), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


async def read(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the other side is gone."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        text, payload = _lengths(await reader.readexactly(_LENGTHS.size))
        message = json.loads(await reader.readexactly(text))
        return message, await reader.readexactly(payload)
    return None


class Wire:
    """The engine's end: any thread may post, and never waits for the socket; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="stapes-wire", daemon=True).start()

    def post(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a message some time soon, in order."""
        self._outgoing.put(pack(message, payload))

    def receive(self) -> Message | None:
        """Wait for the next message; None when the other side is gone."""
        with suppress(ConnectionError, EOFError):
            text, payload = _lengths(self._exactly(_LENGTHS.size))
            message = json.loads(self._exactly(text))
            return message, self._exactly(payload)
        return None

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(1 << 20, count - len(parts)))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _write(self) -> None:
        with suppress(OSError):  # the receiving thread notices too, and ends the process
            while True:
                self._socket.sendall(self._outgoing.get())


def _lengths(header: bytes) -> tuple[int, int]:
    text, payload = _LENGTHS.unpack(header)
    if max(text, payload) > _MOST:
        raise ConnectionError("a message of impossible length")
    return text, payload
