"""A live session of the Realtime API, apart from its connection: it outlives one that breaks.

Sound goes to a call of an engine; what the engine says becomes OpenAI's events, which wait here for the client. Nothing
here waits for the client, and what waits is bounded.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from stapes.serving.access import Client
from stapes.serving.engines import Call
from stapes.serving.failures import ApiError
from stapes.serving.realtime_settings import LiveSettings
from stapes.serving.services import Services

LONGEST_SECONDS = 24 * 3600
"""Sound of one session."""

_MOST_WAITING = 2_000
"""Events that may wait for the client; a session whose client takes none is given up."""

_AHEAD_SECONDS = 60.0
"""Sound that may have been sent and not been heard; then the client is not listened to until it has."""

_REMEMBERED_SECONDS = 90.0
"""Ends of items are told once more to a client that comes back: what was on the line when it broke is lost."""

_ACKNOWLEDGE_SECONDS = 1.0

_RESTART_SECONDS = 60.0
"""How long an engine that was lost is waited for."""

_NAME = "conversation.item.input_audio_transcription"


@dataclass
class _Item:
    """What one turn becomes."""

    id: str
    text: str = ""
    """That was told in deltas."""
    transcript: str = ""
    """Of its parts that are complete."""
    provisional: str = ""
    words: list[dict[str, Any]] = field(default_factory=list)
    start: float | None = None
    end: float | None = None
    is_committed: bool = False
    failure: str | None = None


class Session:
    """One live session. It counts as a request of its client from its first sound on."""

    def __init__(self, services: Services, client: Client, settings: LiveSettings) -> None:
        self.id = f"sess_{secrets.token_hex(16)}"
        self.client, self.settings = client, settings
        self.expires_at = int(time.time()) + LONGEST_SECONDS
        self.over = False
        self.connection: object | None = None
        """Whoever serves it now."""
        self._services = services
        self._stack = ExitStack()
        self._call: Call | None = None
        self._reader: asyncio.Task[None] | None = None
        self._bytes = 0  # received in all
        self._call_bytes = self._heard_bytes = 0  # sent to the call, and heard by it
        self._clock = 0.0  # seconds of the session before the call's clock began
        self._committed_at = 0  # bytes when the client committed last
        self._manual_turn = 0  # of the call
        self._items: dict[int, _Item] = {}
        self._last_item: str | None = None
        self._waiting: deque[dict[str, Any]] = deque()
        self._ends: deque[tuple[float, dict[str, Any]]] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._acknowledged = 0.0
        self._lost = False

    @property
    def audio_ms(self) -> int:
        """Sound that was received, in milliseconds."""
        return self._bytes * 1000 // self.settings.bytes_per_second

    @property
    def has_begun(self) -> bool:
        """Whether any sound has come."""
        return self._bytes > 0

    def describe(self) -> dict[str, Any]:
        """The session object."""
        return self.settings.describe(self.id, self.expires_at, self.audio_ms)

    # The client.

    def tell(self, type: str, **fields: Any) -> None:
        """Let an event wait for the client. Provisional words take the place of those before."""
        event = {"type": type, "event_id": f"event_{secrets.token_hex(8)}", **fields}
        last = self._waiting[-1] if self._waiting else None
        if last is not None and _only_shows(event) and _only_shows(last) and last["item_id"] == event["item_id"]:
            self._waiting[-1] = event
        else:
            self._waiting.append(event)
        if len(self._waiting) > _MOST_WAITING:
            self.close()
        self._changed.set()

    def tell_error(self, error: ApiError, event_id: str | None = None) -> None:
        """Something that the client asked for cannot be done; the session goes on."""
        body = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        self.tell("error", error={**body, "event_id": event_id})

    async def next_event(self, connection: object) -> dict[str, Any] | None:
        """The next event for the client; None when the session is over and all were told, or another connection
        serves it."""
        while self.connection is connection:
            if self._waiting:
                return self._waiting.popleft()
            if self.over:
                return None
            self._changed.clear()
            await self._changed.wait()
        return None

    def put_back(self, event: dict[str, Any]) -> None:
        """An event that could not be sent."""
        self._waiting.appendleft(event)

    def repeat_ends(self) -> None:
        """Tell the ends of the latest items again, unless they still wait."""
        self._forget_ends()
        waiting = {id(event) for event in self._waiting}
        self._waiting.extendleft(event for _, event in reversed(self._ends) if id(event) not in waiting)
        self._changed.set()

    async def append(self, data: bytes) -> None:
        """Take sound; wait while too much of it has not been heard. Raises ApiError."""
        if not data:
            return
        if self.audio_ms >= LONGEST_SECONDS * 1000:
            raise ApiError(
                400, f"A session lasts {LONGEST_SECONDS // 3600} hours: begin a new one", code="session_full"
            )
        call = await self._open()
        self._bytes += len(data)
        self._call_bytes += len(data)
        call.send({"type": "audio"}, data)
        self._acknowledge()
        self._make_room()
        await self._room.wait()

    def commit(self) -> None:
        """End the turn here. Raises ApiError where nothing was sent since the last one."""
        if self._call is None or self._bytes == self._committed_at:
            raise _nothing_to_commit()
        self._committed_at = self._bytes
        if self.settings.turns.manual:
            self._commit_item(self._item(self._manual_turn))
            self._manual_turn += 1
        self._call.send({"type": "commit"})

    def clear(self) -> None:
        """Forget what was not committed."""
        self._committed_at = self._bytes
        if self._call is not None:
            self._call.send({"type": "clear"})
            self._items = {turn: item for turn, item in self._items.items() if item.is_committed}
        self.tell("input_audio_buffer.cleared")

    def update(self, settings: LiveSettings) -> None:
        """Listen otherwise from here on. Raises ApiError for what cannot change once sound has come."""
        if self.has_begun and self.settings.needs_anew(settings):
            raise ApiError(
                400,
                "Model, format, language, prompt and keywords cannot change once audio was sent: begin a new session",
                code="session_has_begun",
            )
        if self.has_begun and self.settings.turns.manual != settings.turns.manual:
            raise ApiError(400, "turn_detection cannot be switched on or off once audio was sent", code="invalid_value")
        if not self.has_begun:
            _ = self._services.served.resolve(settings.model)
        self.settings = settings
        if self._call is not None:
            self._call.send({"type": "turns", "turns": settings.turn_options})

    def close(self) -> None:
        """Give it up."""
        self.over = True
        if self._call is not None:
            self._call.close()
        if self._reader is not None:
            self._reader.cancel()
        self._stack.close()
        self._room.set()
        self._changed.set()

    # The engine.

    async def _open(self) -> Call:
        if self.over:
            raise ApiError(400, "The session is over: begin a new one", code="session_over")
        if self._call is not None:
            return self._call
        services, settings = self._services, self.settings
        model = services.served.resolve(settings.model)
        if self._reader is None:
            self._stack.enter_context(services.limits.session())
        if self._lost:  # an engine that was lost is soon there again; whoever speaks waits for it
            await services.engines.wait_until(
                lambda: any(engine.up for engine in services.engines.all), _RESTART_SECONDS
            )
            self._lost = False
        message = {
            "options": settings.options,
            "turns": settings.turn_options,
            "format": settings.format,
            "rate": settings.rate,
        }
        self._call = services.engines.open("live", services.served.source(model), message)
        self._call_bytes = self._heard_bytes = 0
        self._clock = self._bytes / settings.bytes_per_second
        self._reader = asyncio.create_task(self._read(self._call), name=f"live-{self.id[:12]}")
        return self._call

    async def _read(self, call: Call) -> None:
        failure: ApiError | None = None
        try:
            async for message, _ in call:
                if message["type"] == "heard":
                    self._heard_bytes = message["bytes"]
                    self._make_room()
                elif message["type"] == "event":
                    self._take(message["event"])
        except ApiError as error:
            failure = error
        if self.over:
            return
        if failure is not None:
            self.tell_error(failure)
        if failure is None or failure.status < 500:
            self.close()
            return
        # What was being said is lost; a new call takes what comes from here on.
        self._call, self._lost = None, True
        self._room.set()
        for item in self._items.values():
            self._fail(item, failure.message)
        self._items.clear()
        self._manual_turn = 0

    def _make_room(self) -> None:
        ahead = (self._call_bytes - self._heard_bytes) / self.settings.bytes_per_second
        if ahead > _AHEAD_SECONDS and not self.over:
            self._room.clear()
        else:
            self._room.set()

    def _acknowledge(self) -> None:
        now = time.monotonic()
        if now - self._acknowledged >= _ACKNOWLEDGE_SECONDS:
            self._acknowledged = now
            self.tell("input_audio_buffer.acknowledged", audio_ms=self.audio_ms)

    def _item(self, turn: int) -> _Item:
        return self._items.setdefault(turn, _Item(f"item_{secrets.token_hex(8)}"))

    def _take(self, event: dict[str, Any]) -> None:
        turn, kind = event["turn"], event["event"]
        if kind == "final" and event["ends_turn"] and turn not in self._items:
            self.tell_error(_nothing_to_commit())  # the client committed where nobody spoke
            return
        item = self._item(turn)
        match kind:
            case "speech_started":
                item.start = start = self._clock + event["time"]
                at = round(1000 * start)
                self.tell("input_audio_buffer.speech_started", audio_start_ms=at, item_id=item.id)
            case "speech_stopped":
                item.end = end = self._clock + event["time"]
                at = round(1000 * end)
                self.tell("input_audio_buffer.speech_stopped", audio_end_ms=at, item_id=item.id)
                self._committed_at = self._bytes
                self._commit_item(item)
            case "committed":
                self._delta(item, event["text"], "", event["words"])
            case "partial":
                self._delta(item, "", event["text"], [])
            case "final":
                self._take_final(turn, item, event)
            case "failed":
                item.failure = event["message"]
                if event["ends_turn"]:
                    self._end(turn, item, None)

    def _delta(self, item: _Item, text: str, provisional: str, words: list[dict[str, Any]]) -> None:
        if not item.text:
            text, provisional = text.lstrip(), provisional if text else provisional.lstrip()
        if not text and provisional == item.provisional:
            return
        item.text += text
        item.provisional = provisional
        extra = {"logprobs": _logprobs(words)} if self.settings.logprobs and words else {}
        self.tell(f"{_NAME}.delta", item_id=item.id, content_index=0, delta=text, provisional=provisional, **extra)

    def _take_final(self, turn: int, item: _Item, event: dict[str, Any]) -> None:
        item.transcript += event["text"]
        if (segment := event["segment"]) is not None:
            for word in segment["words"]:
                shifted = {name: round(word[name] + self._clock, 3) for name in ("start", "end")}
                item.words.append({**word, **shifted})
        if event["ends_turn"]:
            self._end(turn, item, event.get("language"))

    def _end(self, turn: int, item: _Item, language: str | None) -> None:
        del self._items[turn]
        if not item.is_committed:
            self._commit_item(item)
        if item.failure is not None:
            self._fail(item, item.failure)
            return
        words = item.words
        start = item.start if item.start is not None else words[0]["start"] if words else 0.0
        end = item.end if item.end is not None else words[-1]["end"] if words else start
        extra: dict[str, Any] = {"logprobs": _logprobs(words)} if self.settings.logprobs else {}
        if language is not None:
            extra["languages"] = [{"code": language}]
        self._remember(
            f"{_NAME}.completed",
            item_id=item.id,
            content_index=0,
            transcript=item.transcript.strip(),
            usage={"type": "duration", "seconds": round(end - start, 3)},
            words=words,
            start=round(start, 3),
            end=round(end, 3),
            **extra,
        )

    def _fail(self, item: _Item, message: str) -> None:
        error = {"type": "server_error", "code": "transcription_failed", "message": message, "param": None}
        self._remember(f"{_NAME}.failed", item_id=item.id, content_index=0, error=error)

    def _remember(self, type: str, **fields: Any) -> None:
        self.tell(type, **fields)
        self._forget_ends()
        if self._waiting:  # it may have been one event too many
            self._ends.append((time.monotonic(), self._waiting[-1]))

    def _forget_ends(self) -> None:
        while self._ends and time.monotonic() - self._ends[0][0] > _REMEMBERED_SECONDS:
            self._ends.popleft()

    def _commit_item(self, item: _Item) -> None:
        """Tell that an item will come of what was said."""
        item.is_committed = True
        previous, self._last_item = self._last_item, item.id
        self.tell("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)
        content = [{"type": "input_audio", "transcript": None}]
        shown = {"id": item.id, "object": "realtime.item", "type": "message", "role": "user", "status": "completed"}
        kinds = ("created",) if self.settings.is_beta else ("added", "done")
        for kind in kinds:
            self.tell(f"conversation.item.{kind}", previous_item_id=previous, item={**shown, "content": content})


def _only_shows(event: dict[str, Any]) -> bool:
    return event["type"] == f"{_NAME}.delta" and not event["delta"]


def _logprobs(words: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of words, the mean over their tokens."""
    out = []
    for word in words:
        logprob = math.log(max(word["probability"], 1e-10))
        out.append({"token": word["word"], "logprob": round(logprob, 4), "bytes": list(word["word"].encode())})
    return out


def _nothing_to_commit() -> ApiError:
    return ApiError(
        400,
        "There is nothing to commit: no speech has come since the last item",
        code="input_audio_buffer_commit_empty",
    )


class Sessions:
    """Sessions whose connection broke wait here for their clients."""

    def __init__(self, linger: float) -> None:
        self._linger = linger
        self.all: dict[str, Session] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, session: Session) -> None:
        """A session has begun."""
        self.all[session.id] = session

    def resume(self, id: str, client: Client) -> Session | None:
        """A client's session, which it has to name; None where there is none any more."""
        session = self.all.get(id)
        if session is None or session.over or session.client != client:
            return None
        with suppress(KeyError):
            self._timers.pop(id).cancel()
        return session

    def leave(self, session: Session) -> None:
        """Its connection broke: it waits for a while."""
        if session.over or not session.has_begun:
            self.remove(session)
            return
        loop = asyncio.get_running_loop()
        self._timers[session.id] = loop.call_later(self._linger, self.remove, session)

    def remove(self, session: Session) -> None:
        """It is over."""
        session.close()
        self.all.pop(session.id, None)
        with suppress(KeyError):
            self._timers.pop(session.id).cancel()
