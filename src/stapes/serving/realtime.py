"""``WS /v1/realtime?intent=transcription``: OpenAI's Realtime API, as far as it is about transcription.

Events have the names and shapes of the present API; the old beta's are understood, and answered in kind. Ours beyond
them, which other clients pass over: 16 kHz; ``provisional`` words beside a ``delta``; ``words``, ``start`` and ``end``
of a completed item; ``?session_id=`` goes on with a session whose connection broke up to 60 s ago, from the
``audio_ms`` that ``session.created`` (and now and then ``input_audio_buffer.acknowledged``) says.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from contextlib import suppress
from typing import Any, NoReturn

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from stapes.serving.failures import ApiError
from stapes.serving.realtime_session import Session, Sessions
from stapes.serving.realtime_settings import LiveSettings
from stapes.serving.services import Services

router = APIRouter()

_LINGER_SECONDS = 60.0
_START_SECONDS = 120.0
"""A connection on which no sound has come for so long, and never has, is closed."""

_IDLE_SECONDS = 900.0
"""A session whose client sends nothing at all for so long has its connection closed."""

_SEND_SECONDS = 20.0
"""A client that takes nothing for so long has its connection closed."""

_LAST_WORD_SECONDS = 0.1

_MOST_BYTES = 15 << 20
"""Sound in one event."""

_MOST_ERRORS = 32
"""Events in a row that make no sense; then the connection is closed."""

_NORMAL, _GOING_AWAY, _POLICY, _TRY_AGAIN = 1000, 1001, 1008, 1013


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """One connection: a new session, or one that goes on."""
    offered = websocket.scope.get("subprotocols") or []
    await websocket.accept("realtime" if "realtime" in offered else None)
    services: Services = websocket.app.state.services
    sessions = sessions_of(websocket)
    connection = _Connection(websocket, services, sessions)
    try:
        session = connection.session()
    except ApiError as error:
        await _refuse(websocket, error)
        return
    await connection.serve(session)


def sessions_of(websocket: WebSocket) -> Sessions:
    """All sessions of the application."""
    state = websocket.app.state
    if not hasattr(state, "live_sessions"):
        state.live_sessions = Sessions(_LINGER_SECONDS)
    return state.live_sessions


async def _refuse(websocket: WebSocket, error: ApiError) -> None:
    body = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
    with suppress(RuntimeError, WebSocketDisconnect):
        await websocket.send_text(json.dumps({"type": "error", "event_id": "event_0", "error": body}))
        await websocket.close(_TRY_AGAIN if error.status in (429, 503) else _POLICY, error.message[:120])


class _Connection:
    """One WebSocket."""

    def __init__(self, websocket: WebSocket, services: Services, sessions: Sessions) -> None:
        self._websocket, self._services, self._sessions = websocket, services, sessions
        self._errors = 0
        self._code = _NORMAL
        self._replaced = asyncio.Event()

    def replace(self) -> None:
        """Another connection has taken over the session."""
        self._replaced.set()

    def session(self) -> Session:
        """The session that the address asks for. Raises ApiError."""
        query, client = self._websocket.query_params, self._websocket.state.client
        if query.get("intent", "transcription") != "transcription":
            raise ApiError(400, "intent must be transcription: this server does not talk", param="intent")
        if self._services.limits.closing:
            raise ApiError(503, "The server is being stopped", code="shutting_down")
        if (named := query.get("session_id")) is not None:
            session = self._sessions.resume(named, client)
            if session is not None:
                if isinstance(session.connection, _Connection):
                    session.connection.replace()
                session.connection = self
                session.repeat_ends()
                return session
        model = query.get("model") or self._services.served.default
        self._services.served.resolve(model)
        session = Session(self._services, client, LiveSettings(model=model))
        session.connection = self
        self._sessions.add(session)
        return session

    async def serve(self, session: Session) -> None:
        """Until either side has enough."""
        services = self._services
        services.log.info("live_began", session=session.id[:13], client=session.client.label)
        receiver = asyncio.create_task(self._receive(session))
        stopping = asyncio.create_task(services.limits.handing_back.wait())
        others = [asyncio.create_task(self._tell(session)), asyncio.create_task(self._replaced.wait())]
        tasks = [receiver, stopping, *others]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([receiver], timeout=_LAST_WORD_SECONDS)  # a goodbye, where sending has failed
        finally:
            code = _GOING_AWAY if stopping.done() else _TRY_AGAIN if session.over else self._code
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if session.connection is self:
                session.connection = None
                if results[0] == _NORMAL:
                    self._sessions.remove(session)
                else:
                    self._sessions.leave(session)
            await self._close(code)
            failure = next((type(each).__name__ for each in results if isinstance(each, Exception)), None)
            services.log.info("live_ended", session=session.id[:13], audio_ms=session.audio_ms, failure=failure)

    async def _close(self, code: int) -> None:
        with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            if self._websocket.application_state is not WebSocketState.DISCONNECTED:
                async with asyncio.timeout(_SEND_SECONDS):
                    await self._websocket.close(code)

    @staticmethod
    def _created(session: Session) -> dict[str, Any]:
        kind = "transcription_session.created" if session.settings.is_beta else "session.created"
        return {"type": kind, "event_id": "event_0", "session": session.describe()}

    # To the client.

    async def _tell(self, session: Session) -> None:
        await self._send(self._created(session))
        while (event := await session.next_event(self)) is not None:
            try:
                await self._send(event)
            except BaseException:
                session.put_back(event)
                raise

    async def _send(self, event: dict[str, Any]) -> None:
        async with asyncio.timeout(_SEND_SECONDS):
            await self._websocket.send_text(json.dumps(event, ensure_ascii=False))

    # From the client.

    async def _receive(self, session: Session) -> int:
        """Take events until the client leaves; its close code, or ours where it has to go."""
        while session.connection is self:
            patience = _IDLE_SECONDS if session.has_begun else _START_SECONDS
            try:
                async with asyncio.timeout(patience):
                    message = await self._websocket.receive()
            except TimeoutError:
                self._code = _POLICY
                return _POLICY
            if message["type"] == "websocket.disconnect":
                return message.get("code") or 1006
            event: Any = None
            try:
                event = _parsed(message.get("text") or message.get("bytes"))
                await self._do(session, event)
                self._errors = 0
            except ApiError as error:
                given = event.get("event_id") if isinstance(event, dict) else None
                session.tell_error(error, given if isinstance(given, str) else None)
                self._errors += 1
                if self._errors >= _MOST_ERRORS:
                    self._code = _POLICY
                    return _POLICY
        return _GOING_AWAY

    async def _do(self, session: Session, event: dict[str, Any]) -> None:
        match event["type"]:
            case "input_audio_buffer.append":
                await session.append(_sound(event.get("audio")))
            case "input_audio_buffer.commit":
                session.commit()
            case "input_audio_buffer.clear":
                session.clear()
            case "session.update" | "transcription_session.update" as kind:
                is_beta = kind == "transcription_session.update"
                session.update(session.settings.updated(event.get("session"), self._services.served, is_beta=is_beta))
                updated = "transcription_session.updated" if is_beta else "session.updated"
                session.tell(updated, session=session.describe())
            case other:
                reason = f"The event {str(other)[:80]!r} has no meaning in a transcription session"
                raise ApiError(400, reason, code="unknown_event", param="type")


def _parsed(text: str | bytes | None) -> dict[str, Any]:
    try:
        event = json.loads(text or "", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "The message is not JSON", code="invalid_json") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise ApiError(400, "The message is not an object with a type", code="invalid_event", param="type")
    return event


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _sound(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ApiError(400, "audio must be a text in base64", code="invalid_audio", param="audio")
    if len(text) > _MOST_BYTES * 4 // 3 + 4:
        raise ApiError(413, f"One event holds at most {_MOST_BYTES >> 20} MiB of audio", param="audio")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "audio is not base64", code="invalid_audio", param="audio") from None
