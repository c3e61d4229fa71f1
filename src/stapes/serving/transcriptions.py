"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: from a form to an answer or a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stapes.options import Task
from stapes.serving import responses
from stapes.serving.decoders import Decoded
from stapes.serving.engines import EngineLost
from stapes.serving.failures import ApiError
from stapes.serving.limits import Limits, stopping
from stapes.serving.parameters import Wanted, as_fields, read_parameters
from stapes.serving.services import Services
from stapes.serving.settings import size_in_bytes
from stapes.serving.uploads import Form, Place, read_form

router = APIRouter()
T = TypeVar("T")

_ATTEMPTS = 2
"""How often a request is begun at most: once more when its engine was lost before anything was said."""

_RESTART_SECONDS = 30.0
"""How long a request waits for its engine to be there."""

_KEEP_ALIVE_SECONDS = 15.0
"""In a stream, something is sent so often: a comment where there is nothing to say."""


@router.post("/v1/audio/transcriptions")
async def transcribe(request: Request) -> Response:
    """Write down what is said in a recording."""
    return await _Job(request, "transcribe").respond()


@router.post("/v1/audio/translations")
async def translate(request: Request) -> Response:
    """Write down in English what is said in a recording."""
    return await _Job(request, "translate").respond()


class _Job:
    """One request on its way. Whatever it holds is given back when its stack is closed."""

    def __init__(self, request: Request, task: Task) -> None:
        self.request = request
        self.task: Task = task
        self.services: Services = request.app.state.services
        self.came = time.monotonic()
        self.stack = AsyncExitStack()
        self.record: dict[str, Any] = request.state.record

    async def respond(self) -> Response:
        """The answer. Raises ApiError, ClientDisconnect."""
        try:
            self.stack.enter_context(self.services.limits.admitted(self.request.state.client))
            place = self.stack.enter_context(self.services.spool.new())
            limits = self.services.settings.limits
            form = await read_form(
                self.request, place, max_bytes=size_in_bytes(limits.max_upload), idle_seconds=limits.upload_idle_seconds
            )
            wanted = self._read(form)
            results = self._results(form, place, wanted)
            await self.stack.enter_async_context(aclosing(results))
            work = _first(results) if wanted.stream else _last(results)
            result = await unless_left(self.request.receive, work, self.services.limits)
        except BaseException:
            await self.stack.aclose()
            raise
        if wanted.stream:
            return _EventStream(self, result, results, wanted)
        await self.stack.aclose()
        return responses.answer(result["transcript"], wanted)

    def _read(self, form: Form) -> Wanted:
        if form.file_name is None:
            if "file" in form.fields:
                raise ApiError(400, "`file` must be sent as a file: addresses and texts are not fetched", param="file")
            raise ApiError(400, "There is no `file`: send the recording as one", param="file")
        if not form.size:
            raise ApiError(400, f"{form.file_name} is empty: it has no audio samples", param="file")
        wanted = read_parameters(form.fields, self.task, self.services.served)
        self.record |= {"model": wanted.model, "upload_bytes": form.size, "stream": wanted.stream}
        return wanted

    async def _results(self, form: Form, place: Place, wanted: Wanted) -> AsyncGenerator[dict[str, Any], None]:
        """What the engine says: ``segments`` as they are done, then the ``transcript``."""
        services, options = self.services, wanted.options
        decoded = await services.decoders.decode(
            place.upload,
            place.samples,
            name=form.file_name or "",
            channels=options.channels,
            end=options.clips()[-1][1],
        )
        place.upload.unlink(missing_ok=True)
        if wanted.format == "diarized_json" and decoded.channels == 1:
            raise ApiError(
                400,
                f"{form.file_name} has one channel: speakers are told apart by channel alone, so diarized_json needs a "
                "recording with a channel for each",
                param="response_format",
            )
        seconds = decoded.seconds * decoded.channels
        self.record["audio_seconds"] = round(decoded.seconds, 3)
        self.record["decode_seconds"] = round(time.monotonic() - self.came, 4)
        priority = services.limits.priority(seconds)
        async with services.limits.turn(priority, self.came):
            began = time.monotonic()
            self.record["wait_seconds"] = round(began - self.came, 4)
            message = {
                "path": str(decoded.path),
                "channels": decoded.channels,
                # One channel that was chosen or mixed is all there is by now.
                "options": asdict(options) | {"channels": "separate" if options.channels == "separate" else "mix"},
                "priority": priority,
            }
            async for result in self._ask(services.served.source(wanted.model), message, seconds):
                if result["type"] == "transcript":
                    _add_warnings(result["transcript"], decoded)
                yield result
            services.metrics.audio_done(wanted.model, decoded.seconds, time.monotonic() - began)

    async def _ask(self, source: str, message: dict[str, Any], seconds: float) -> AsyncIterator[dict[str, Any]]:
        """The engine's messages; the work is begun once more if the engine is lost before it has said anything."""
        engines = self.services.engines
        for attempt in range(1, _ATTEMPTS + 1):
            said = False
            await engines.wait_until(lambda: any(engine.up for engine in engines.all), _RESTART_SECONDS)
            try:
                call = engines.open("transcribe", source, message, cost=seconds)
                try:
                    async for result, _ in call:
                        said = said or bool(result.get("segments"))
                        yield result
                    return
                finally:
                    call.close()
            except EngineLost:
                if said or attempt == _ATTEMPTS or self.services.limits.closing:
                    raise
                self.record["begun_again"] = True
            except ApiError as error:
                raise as_fields(error.status, error.message) if error.status == 400 else error from None


def _add_warnings(transcript: dict[str, Any], decoded: Decoded) -> None:
    transcript["warnings"] = [*decoded.warnings, *transcript["warnings"]]


async def _first(results: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return await anext(results)


async def _last(results: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [result async for result in results][-1]


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T], limits: Limits) -> T:
    """The result of some work, which is cancelled when the client leaves or the server has to end.

    Raises ClientDisconnect, ApiError 503 then.
    """
    task = asyncio.create_task(work)
    watches = [asyncio.create_task(_left(receive)), asyncio.create_task(limits.handing_back.wait())]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watches[0].done():
            raise ClientDisconnect
        raise stopping()
    finally:
        for each in (task, *watches):
            each.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(Response):
    """Server-sent events: deltas of text, segments with speakers, the whole at the end."""

    media_type = "text/event-stream"

    def __init__(self, job: _Job, first: dict[str, Any], rest: AsyncIterator[dict[str, Any]], wanted: Wanted) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._job, self._first, self._rest, self._wanted = job, first, rest, wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_left(receive, self._send_all(send), self._job.services.limits)
        except ClientDisconnect:
            self._job.record["left"] = True
        except ApiError as error:
            await _send_line(send, error.body())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._job.stack.aclose()

    async def _send_all(self, send: Send) -> None:
        beat = asyncio.create_task(self._keep_alive(send))
        try:
            await self._send_events(send)
        finally:
            beat.cancel()
            with suppress(asyncio.CancelledError):
                await beat
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        results = self._rest
        try:
            first, begun = True, self._first
            for event in self._events(begun, first=first):
                await _send_line(send, event)
            first = not begun.get("segments")
            async for result in results:
                for event in self._events(result, first=first):
                    await _send_line(send, event)
                first = first and not result.get("segments")
        except ApiError as error:  # too late for a status
            self._job.record["error"] = error.code
            await _send_line(send, error.body())

    def _events(self, result: dict[str, Any], *, first: bool) -> list[dict[str, Any]]:
        wanted, events = self._wanted, []
        if result["type"] == "transcript":
            return [responses.done_event(result["transcript"], wanted)]
        for segment in result["segments"]:
            events.append(responses.delta_event(segment, wanted, first=first))
            if wanted.format == "diarized_json" or "segment" in wanted.granularities:
                events.append(responses.segment_event(segment, wanted))
            first = False
        return events

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_SECONDS)
            await send({"type": "http.response.body", "body": b": at work\n\n", "more_body": True})


async def _send_line(send: Send, event: dict[str, Any]) -> None:
    data = json.dumps(responses.finite(event), ensure_ascii=False, allow_nan=False)
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
