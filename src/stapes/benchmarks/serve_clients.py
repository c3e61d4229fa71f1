"""Clients of a transcription server: requests as fast as they are answered, or at times of their own.

A request's latency counts from the moment when it was due, whether or not the client was late; each has a connection
of its own.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import ssl
import time
import wave
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11
import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.errors import UsageError

_PATH = "/v1/audio/transcriptions"
_BOUNDARY = "stapes-bench-4c6f7265"
_UNTOLD_SECONDS = 5.0
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"


@dataclass(frozen=True)
class Recording:
    """What a request sends: the form, and seconds of sound in it. name: the same for the same recording."""

    name: str
    seconds: float
    form: bytes


def as_form(name: str, pcm: np.ndarray, fields: Mapping[str, str]) -> Recording:
    """A recording of 16 kHz samples as a form, with a 16-bit wave file in it."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes((np.clip(pcm, -1.0, 32767 / 32768) * 32768).round().astype("<i2").tobytes())
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in fields.items()
    ]
    parts.append(f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n')
    form = "".join(parts).encode() + file.getvalue() + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return Recording(name, len(pcm) / SAMPLE_RATE, form)


@dataclass(frozen=True)
class Answer:
    """What became of a request. Times are seconds on one clock; status 0: no answer came."""

    recording: Recording
    due: float
    done: float
    status: int
    text: str | None

    @property
    def latency(self) -> float:
        """Seconds from when it was due."""
        return self.done - self.due


class Server:
    """Where requests go. url: its address, without the path. key: for the header that says who one is."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url is {url!r}: give scheme and host, such as http://127.0.0.1:8000")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self._base, self._key, self._timeout = parts.path.rstrip("/").removesuffix("/v1"), key, timeout
        self._authority = parts.netloc.rpartition("@")[2]

    async def transcribe(self, recording: Recording, due: float) -> Answer:
        """Send a recording, and wait for what is answered. Never raises for what a server may do."""
        status, body = 0, b""
        with suppress(OSError, TimeoutError, h11.RemoteProtocolError, ssl.SSLError, EOFError):
            async with asyncio.timeout(self._timeout):
                status, body = await self.ask("POST", _PATH, recording.form, _FORM)
        text = None
        if status == 200:
            with suppress(ValueError, KeyError, TypeError):
                text = str(json.loads(body)["text"])
            if text is None:  # a page of some proxy
                status = 0
        return Answer(recording, due, time.perf_counter(), status, text)

    async def wait_until_at_work(self, call: asyncio.Task[None]) -> None:
        """Until an engine has windows in slots, or the call that is to bring them is over.

        A server that does not tell (no `/metrics` like ours) is given some seconds.
        """
        for _ in range(600):
            with suppress(OSError, EOFError, h11.RemoteProtocolError):
                status, body = await self.ask("GET", "/metrics")
                found = re.findall(rb"^stapes_engine_windows_in_slots\S* (\S+)$", body, re.MULTILINE)
                if status != 200 or not found:
                    await asyncio.sleep(_UNTOLD_SECONDS)
                    return
                if any(float(number) > 0 for number in found):
                    return
            if call.done():
                return
            await asyncio.sleep(0.1)

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
        """One exchange: status and body. Raises OSError, EOFError, h11.RemoteProtocolError."""
        async with self._connection() as (reader, writer):
            exchange = h11.Connection(h11.CLIENT)
            headers = [
                ("Host", self._authority),
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            if self._key:
                headers.append(("Authorization", f"Bearer {self._key}"))
            request = h11.Request(method=method, target=self._base + path, headers=headers)
            events = (request, h11.Data(data=body), h11.EndOfMessage())
            with suppress(ConnectionError):  # refused before all was sent: the answer is there all the same
                for event in events:
                    writer.write(exchange.send(event) or b"")
                await writer.drain()
            return await _read(exchange, reader)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        context = ssl.create_default_context() if self.tls else None
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
        try:
            yield reader, writer
        finally:
            writer.close()


async def _read(exchange: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, parts = 0, []
    while True:
        event = exchange.next_event()
        if event is h11.NEED_DATA:
            exchange.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return status, b"".join(parts)
        elif not isinstance(event, h11.InformationalResponse):
            raise EOFError


async def closed_loop(server: Server, recordings: Sequence[Recording], clients: int) -> list[Answer]:
    """So many clients, each of which sends the next recording as soon as its last was answered."""
    answers: list[Answer] = []
    waiting = iter(recordings)

    async def client() -> None:
        for recording in waiting:
            answers.append(await server.transcribe(recording, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def open_loop(server: Server, recordings: Sequence[Recording], arrivals: Iterable[float]) -> list[Answer]:
    """Each recording at its time (seconds from now), whatever became of those before it."""
    began = time.perf_counter()

    async def one(recording: Recording, due: float) -> Answer:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await server.transcribe(recording, due)

    calls = [one(recording, began + at) for recording, at in zip(recordings, arrivals, strict=True)]
    return list(await asyncio.gather(*calls))


async def beside(
    server: Server, recordings: Sequence[Recording], long: Recording, pauses: Sequence[float]
) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Recordings one after the other, with pauses before them: with nothing else there, and beside a long one.

    The long one is sent again whenever it is answered, so that there is always one on its way. Returns both lots of
    answers, and those to the long one.
    """

    async def in_turn() -> list[Answer]:
        answers = []
        for recording, pause in zip(recordings, pauses, strict=True):
            await asyncio.sleep(pause)
            answers.append(await server.transcribe(recording, time.perf_counter()))
        return answers

    alone = await in_turn()
    over = asyncio.Event()
    long_answers: list[Answer] = []

    async def keep_busy() -> None:
        while not over.is_set():
            long_answers.append(await server.transcribe(long, time.perf_counter()))

    busy = asyncio.create_task(keep_busy())
    try:
        await server.wait_until_at_work(busy)
        together = await in_turn()
    finally:
        over.set()
        busy.cancel()  # the server gives up what nobody waits for
        await asyncio.gather(busy, return_exceptions=True)
    return alone, together, long_answers


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times in seconds at which requests come that know nothing of each other, ``rate`` of them a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return np.cumsum(gaps).tolist()


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which so large a share lies."""
    return float(np.quantile(values, share)) if values else None


def as_figures(answers: Sequence[Answer], target: float) -> dict[str, Any]:
    """Figures of a run; see `serve` for what they are."""
    good = [answer for answer in answers if answer.status == 200]
    seconds = max((answer.done for answer in answers), default=0) - min((answer.due for answer in answers), default=0)
    latencies = [answer.latency for answer in good]
    refused = sum(answer.status in (429, 503) for answer in answers)
    lost = sum(answer.status == 0 for answer in answers)
    return {
        **{f"latency_p{share}": quantile(latencies, share / 100) for share in (50, 95, 99)},
        "requests_per_second": len(good) / seconds if seconds else 0.0,
        "sound_per_second": sum(answer.recording.seconds for answer in good) / seconds if seconds else 0.0,
        "goodput": sum(latency <= target for latency in latencies) / seconds if seconds else 0.0,
        "answered": float(len(good)),
        "refused": float(refused),
        "failed": float(len(answers) - len(good) - refused - lost),
        "lost": float(lost),
    }
