"""Decoding uploads in processes that may be killed: a hung or crashed decoder hurts only its own request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stapes.serving.failures import ApiError
from stapes.serving.logs import Log

_BYTES_PER_SECOND = 16_000 * 4


@dataclass(frozen=True)
class Decoded:
    """Float32 samples at 16 kHz in a file, interleaved; ``seconds`` long, of so many channels."""

    path: Path
    seconds: float
    channels: int
    warnings: list[str]
    damaged: bool


class Decoders:
    """A few processes, each decoding one upload at a time; the next upload waits for one to be free."""

    def __init__(self, count: int, max_seconds: float, deadline: float, log: Log) -> None:
        self._count, self._max_seconds, self._deadline, self._log = count, max_seconds, deadline, log
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        self._processes: set[asyncio.subprocess.Process] = set()
        self.killed = 0

    async def start(self) -> None:
        """Begin all processes, so that no request has to wait for that."""
        for process in await asyncio.gather(*(self._begin() for _ in range(self._count))):
            self._idle.put_nowait(process)

    async def stop(self) -> None:
        """End all processes."""
        for process in list(self._processes):
            await self._end(process)

    async def decode(self, source: Path, target: Path, *, name: str, channels: str, end: float | None) -> Decoded:
        """Decode an upload into another file of the spool.

        Raises ApiError: 413 (more seconds than allowed), 415 (no audio), 504 (took too long), 500 (crashed).
        """
        process = await self._idle.get()
        healthy = False
        try:
            if process is None or process.returncode is not None:
                process = await self._begin()
            request = {
                "input": str(source),
                "output": str(target),
                "name": name,
                "channels": channels,
                "end": end,
                "max_seconds": self._max_seconds,
            }
            answer = await self._ask(process, request, name)
            healthy = True
        finally:  # also when the client has left: what the process was doing is nobody's any more
            if not healthy and process is not None:
                self.killed += 1
                await asyncio.shield(self._end(process))
            self._idle.put_nowait(process if healthy else None)
        if "error" in answer:
            raise ApiError(answer["status"], answer["error"], param="file")
        return Decoded(target, answer["seconds"], answer["channels"], answer["warnings"], answer["damaged"])

    async def _ask(self, process: asyncio.subprocess.Process, request: dict[str, Any], name: str) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._deadline):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            self._log.error("decoder_hung", pid=process.pid, seconds=self._deadline)
            reason = f"Decoding {name} took longer than {self._deadline:g} s and was given up: convert it"
            raise ApiError(504, reason, param="file") from None
        except ConnectionError:
            line = b""
        if not line:
            self._log.error("decoder_crashed", pid=process.pid)
            raise ApiError(415, f"{name} broke the decoder: it is damaged, or made to; convert it", param="file")
        return json.loads(line)

    async def _begin(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "stapes.serving.decode_worker",
            str(round((self._max_seconds + 60) * _BYTES_PER_SECOND)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("STAPES_")},  # no keys
        )
        self._processes.add(process)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._processes.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
