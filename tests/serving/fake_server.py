"""A server with the page and scripted answers, so that the page is tested without a model."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse, StreamingResponse

from stapes.serving.page import page_router

WORDS = [
    {"word": " Mister", "start": 0.5, "end": 0.9, "probability": 0.98},
    {"word": " Quilter", "start": 0.9, "end": 1.4, "probability": 0.31},
    {"word": " smiled.", "start": 1.4, "end": 2.0, "probability": 0.9},
]


class FakeServer:
    """Answers on a port of its own. What came is in ``forms``, ``heard`` (audio of live sessions) and ``updates``."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.failures: list[tuple[int, dict[str, str], dict[str, Any]]] = []
        self.forms: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.heard: dict[str, bytearray] = {}
        self.protocols: list[str] = []
        self.pause = asyncio.Event()
        self.left = 0
        self.is_cut = False
        self.refusal: str | None = None  # of live sessions
        self.drop_after: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._server = uvicorn.Server(uvicorn.Config(self._app(), port=0, log_level="error", ws="websockets-sansio"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def close(self) -> None:
        self.let_on()
        self._server.should_exit = True
        self._thread.join(10)

    def let_on(self) -> None:
        """Streams that wait after their first segment go on."""
        if self.loop:
            self.loop.call_soon_threadsafe(self.pause.set)

    def hold(self) -> None:
        """Streams wait after their first segment."""
        self.pause = asyncio.Event()

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.mount("/below", app)  # as a proxy would have it
        self.pause.set()
        app.include_router(page_router())

        def refusal(request: Request) -> JSONResponse | None:
            self.loop = asyncio.get_running_loop()
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "no key", "code": "invalid_api_key"}}, 401)
            return None

        @app.get("/v1/models")
        async def models(request: Request) -> Any:
            return refusal(request) or {"object": "list", "data": [{"id": "base"}, {"id": "tiny.en"}]}

        @app.get("/readyz")
        async def ready() -> dict[str, str]:
            return {"status": "ok"}

        @app.post("/v1/audio/transcriptions")
        async def transcribe(request: Request) -> Any:
            if refused := refusal(request):
                return refused
            form = await request.form()
            fields: dict[str, Any] = {name: form.getlist(name) for name in form if name != "file"}
            fields["file"] = (form["file"].filename, form["file"].size)  # type: ignore[union-attr]
            self.forms.append(fields)
            if self.failures:
                status, headers, body = self.failures.pop(0)
                return JSONResponse(body, status, headers)
            return StreamingResponse(self._events(), media_type="text/event-stream")

        @app.websocket("/v1/realtime")
        async def realtime(socket: WebSocket) -> None:
            await self._live(socket)

        return app

    async def _events(self) -> AsyncIterator[str]:
        def line(event: dict[str, Any]) -> str:
            return f"data: {json.dumps(event)}\n\n"

        first = {"id": "seg_000", "start": 0.5, "end": 2.0, "text": "Mister Quilter smiled.", "speaker": "A"}
        try:
            yield line({"type": "transcript.text.delta", "delta": "Mister Quilter smiled."})
            yield line({"type": "transcript.text.segment", **first, "words": WORDS})
            await self.pause.wait()
            if self.is_cut:
                return
            last = {"id": "seg_001", "start": 3.0, "end": 4.0, "text": "So did <we> & they.", "speaker": "A"}
            yield line({"type": "transcript.text.segment", **last})
            yield ": at work\n\n"
            yield line(
                {"type": "transcript.text.done", "text": "Mister …", "languages": [{"code": "en"}], "duration": 5.0}
            )
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _live(self, socket: WebSocket) -> None:
        self.protocols = socket.scope["subprotocols"]
        session = socket.query_params.get("session_id", "sess_1")
        heard = self.heard.setdefault(session, bytearray())
        await socket.accept("realtime")
        if self.refusal:
            await socket.close(1008, self.refusal)
            return
        await socket.send_json({"type": "session.created", "session": {"id": session, "audio_ms": len(heard) / 48}})
        name = "conversation.item.input_audio_transcription"
        try:
            while True:
                event = await socket.receive_json()
                if event["type"] == "session.update":
                    self.updates.append(event["session"])
                elif event["type"] == "input_audio_buffer.append":
                    heard += base64.b64decode(event["audio"])
                    if self.drop_after is not None and len(heard) > self.drop_after:
                        self.drop_after = None
                        await socket.close(1012)
                        return
                    if len(heard) == 2 * 4800:
                        await socket.send_json(
                            {"type": "input_audio_buffer.speech_started", "item_id": "a", "audio_start_ms": 100}
                        )
                        await socket.send_json(
                            {"type": f"{name}.delta", "item_id": "a", "delta": "Sure", "provisional": " perhaps"}
                        )
                elif event["type"] == "input_audio_buffer.commit":
                    await socket.send_json(
                        {"type": "input_audio_buffer.speech_stopped", "item_id": "a", "audio_end_ms": 400}
                    )
                    await socket.send_json({"type": f"{name}.completed", "item_id": "a", "transcript": "Sure enough."})
        except WebSocketDisconnect:
            pass
