"""Engine processes as the web process sees them: one a device, begun again when it dies, asked without blocking.

`Engines.open` begins a call and returns a `Call`: an async iterator of what the engine sends. An engine that is killed,
crashes, or hangs (its canary does not come back) ends its calls with `EngineLost` and is begun again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stapes.serving import wire
from stapes.serving.failures import ApiError
from stapes.serving.logs import Log

ENGINE_MODULE = "stapes.serving.engine_worker"
"""What an engine process runs."""

_LONGEST_PAUSE = 30.0
"""Seconds between attempts to begin an engine that dies at once, again and again."""

_STABLE_SECONDS = 60.0
"""An engine that lived so long is begun again without a pause."""

_MOST_UNREAD = 1 << 28
"""Bytes that may wait for an engine process to read them: hundreds of live sessions for many seconds."""

_GRACE = 30.0
"""Seconds beyond its canary's turn in which a device may be silent and still counts as ready: a long window of a large
model on a slow processor."""


class EngineLost(ApiError):  # noqa: N818 - of the family of ApiError, and said as it is
    """The engine process has ended in the middle of a call."""

    def __init__(self) -> None:
        super().__init__(503, "The engine was lost during this request: send it again", retry_after=5)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine process is told."""

    device: str
    precision: str
    max_vram: str | None
    threads: int | None
    model_dir: str | None
    max_batch: int | None
    max_wait_ms: float
    idle_timeout: float
    preload: tuple[str, ...]
    adapters: Mapping[str, str]
    """Models to the folders of their adapters."""


class Call:
    """Work in an engine process: iterate over it for (message, payload); close it when no more is wanted.

    Iterating raises ApiError where the engine says that it failed, EngineLost where it died.
    """

    def __init__(self, engine: Engine, number: int, cost: float) -> None:
        self._engine, self._number, self.cost = engine, number, cost
        self._inbox: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.over = False

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Tell the call in the engine something; never waits."""
        if not self.over:
            self._engine.post({**message, "call": self._number}, payload)

    def end(self) -> None:
        """Nothing more will be sent: the call may come to its end."""
        self.send({"type": "end"})

    def close(self) -> None:
        """Give it up, unless it is over: the engine is rid of it within a step."""
        self.send({"type": "cancel"})
        self._engine.forget(self._number)
        self.over = True

    def deliver(self, message: wire.Message) -> None:
        """What the engine sent."""
        self._inbox.put_nowait(message)

    def __aiter__(self) -> AsyncIterator[wire.Message]:
        return self

    async def __anext__(self) -> wire.Message:
        if self.over and self._inbox.empty():
            raise StopAsyncIteration
        message, payload = await self._inbox.get()
        kind = message["type"]
        if kind == "lost":
            self.over = True
            raise EngineLost
        if kind in ("end", "failed"):
            self.close_quietly()
            if kind == "failed":
                raise ApiError(message["status"], message["message"])
            raise StopAsyncIteration
        return message, payload

    def close_quietly(self) -> None:
        """The engine has ended it."""
        self.over = True
        self._engine.forget(self._number)


class Engine:
    """One engine process and its successors."""

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        canary_seconds: float,
        stall_seconds: float,
        log: Log,
        module: str = ENGINE_MODULE,
    ) -> None:
        self.name, self.settings = name, settings
        self.up = False
        """Its models are there."""
        self.restarts = 0
        self.problem: str | None = None
        """Why it could not begin."""
        self.stats: dict[str, Any] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.advanced_at = 0.0
        """When the device last came further."""
        self.pid: int | None = None
        self._canary_seconds, self._stall_seconds, self._log, self._module = canary_seconds, stall_seconds, log, module
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._writer: asyncio.StreamWriter | None = None
        self._changed = asyncio.Event()

    @property
    def outstanding(self) -> float:
        """Seconds of audio on their way."""
        return sum(call.cost for call in self._calls.values())

    @property
    def is_ready(self) -> bool:
        """Whether the device came further not long ago."""
        return self.up and time.monotonic() - self.advanced_at < self._canary_seconds + _GRACE

    def open(self, kind: str, model: str | None, message: Mapping[str, Any], cost: float = 0.0) -> Call:
        """Begin a call. Raises EngineLost where no process is there."""
        if self._writer is None:
            raise EngineLost
        self._number += 1
        call = self._calls[self._number] = Call(self, self._number, cost)
        self.post({**message, "type": "open", "kind": kind, "model": model, "call": self._number})
        return call

    def post(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a message; nothing happens where no process is there. One that takes in nothing any more is ended."""
        if self._writer is None:
            return
        self._writer.write(wire.pack(message, payload))
        if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            self._log.error("engine_stalled", engine=self.name, pid=self.pid)
            self._kill()

    def forget(self, number: int) -> None:
        """A call is over."""
        self._calls.pop(number, None)

    async def run(self) -> None:
        """Keep a process alive, until cancelled."""
        pause = 0.0
        while True:
            began = time.monotonic()
            try:
                await self._live()
            except OSError as error:  # no memory or handles for a process: there may be later
                self._log.error("engine_not_started", engine=self.name, reason=str(error))
            finally:
                self._lose()
            pause = 0.0 if time.monotonic() - began > _STABLE_SECONDS else min(_LONGEST_PAUSE, 2 * pause + 0.2)
            self.restarts += 1
            self._log.error("engine_lost", engine=self.name, again_in_seconds=pause)
            await asyncio.sleep(pause)

    async def _live(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = process.pid
        reader, writer = await asyncio.open_connection(sock=ours)
        watch = asyncio.create_task(self._watch(process.pid))
        try:
            self._writer = writer
            self.post({"type": "start", "settings": vars(self.settings)})
            while (received := await wire.read(reader)) is not None:
                self._take(*received)
        finally:
            watch.cancel()
            self._writer = None
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _take(self, message: dict[str, Any], payload: bytes) -> None:
        kind = message["type"]
        if (number := message.get("call")) is not None:
            if (call := self._calls.get(number)) is not None:
                call.deliver((message, payload))
        elif kind == "stats":
            if message["advanced"] != self.stats.get("advanced"):
                self.advanced_at = time.monotonic()
            self.stats, self.models = message, message["models"]
        elif kind == "ready":
            self.up, self.models, self.problem = True, message["models"], None
            self.advanced_at = time.monotonic()
            self._log.info("engine_ready", engine=self.name, pid=self.pid, models=sorted(self.models))
        elif kind == "fatal":
            self.problem = message["message"]
            self._log.error("engine_failed", engine=self.name, reason=self.problem)
            self._kill()
        self._changed.set()

    def _lose(self) -> None:
        self.up, self.pid, self.stats, self.models = False, None, {}, {}
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.deliver(({"type": "lost"}, b""))
        self._changed.set()

    async def _watch(self, pid: int) -> None:
        """Send canaries while nothing else shows that the device works; kill a process that has come to a stop."""
        while True:
            await asyncio.sleep(min(1.0, self._canary_seconds))
            if not self.up or time.monotonic() - self.advanced_at < self._canary_seconds:
                continue
            began = time.monotonic()
            canary = self.open("canary", None, {})
            try:
                while True:
                    try:
                        await asyncio.wait_for(canary.__anext__(), min(1.0, self._stall_seconds))
                    except TimeoutError:
                        if time.monotonic() - max(began, self.advanced_at) > self._stall_seconds:
                            self._log.error("engine_stalled", engine=self.name, pid=pid)
                            self._kill()
                            return
            except StopAsyncIteration:  # it came back
                self.advanced_at = time.monotonic()
            except EngineLost:
                return
            except ApiError as error:
                self._log.error("canary_failed", engine=self.name, reason=error.message)
            finally:
                canary.close()

    def _kill(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    async def changed(self) -> None:
        """Wait until it may have come up or gone down."""
        self._changed.clear()
        await self._changed.wait()


class Engines:
    """All engines; new work goes to the one that has the fewest seconds of audio on their way."""

    def __init__(self, engines: list[Engine]) -> None:
        self.all = engines
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin all processes; returns at once."""
        self._tasks = [asyncio.create_task(engine.run(), name=f"engine-{engine.name}") for engine in self.all]

    async def stop(self) -> None:
        """End all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        """Whether there is one whose device came further not long ago."""
        return any(engine.is_ready for engine in self.all)

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """The models that are loaded somewhere, with what is known of each."""
        return {name: facts for engine in self.all for name, facts in engine.models.items()}

    def open(self, kind: str, model: str | None, message: Mapping[str, Any], *, cost: float = 0.0) -> Call:
        """Begin a call on the engine with the least to do. cost: seconds of audio. Raises ApiError 503 without one."""
        up = [engine for engine in self.all if engine.up]
        if not up:
            problem = next((engine.problem for engine in self.all if engine.problem), None)
            reason = f"The engine cannot begin: {problem}" if problem else "The engine is being started: try again"
            raise ApiError(503, reason, code="engine_starting", retry_after=5)
        return min(up, key=lambda engine: engine.outstanding).open(kind, model, message, cost)

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is true of the engines, for so long at most; whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    waits = [asyncio.create_task(engine.changed()) for engine in self.all]
                    try:
                        await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for wait in waits:
                            wait.cancel()
        return condition()
