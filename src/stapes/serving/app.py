"""The server's application: `create_app`.

What is where. The *web process* runs this application on one event loop and never waits for a device: it checks keys
and origins (`access`), takes uploads to a private folder (`uploads`), has them decoded by processes that may be killed
(`decoders`), lets requests wait for their turn (`limits`) and asks an *engine process* for each device (`engines`),
which holds the models (`engine_worker`). A process that dies is begun again.

For rooms that mount here:

- Routes. An `APIRouter` is included in `create_app`, as ``transcriptions.router`` is; one line each.
- Everything shared is ``request.app.state.services`` (or ``websocket.app.state.services``), a `Services`: ``settings``,
  ``served.resolve(name)`` and ``served.source(name)``, ``limits``, ``engines``, ``metrics.registry``, ``log``.
- Keys and origins were checked before a route is called, of WebSockets too (`Gatekeeper`: bearer header, or
  subprotocol ``openai-insecure-api-key.KEY``); ``request.state.client`` (``websocket.state.client``) is whose key it
  was. A WebSocket that offers subprotocols has to be accepted with one of them that is not the key: ``realtime``.
- A live session is counted by ``with services.limits.session():`` (raises ApiError 429 or 503). When the server is told
  to stop, ``limits.closing`` is true, and ``limits.handing_back`` (an `asyncio.Event`) is set at the last moment.
- A live session in an engine: ``call = services.engines.open("live", services.served.source(model), {...})`` gives a
  `Call`. ``call.send({"type": "audio"}, pcm)`` never waits; ``call.end()`` says that nothing more comes;
  ``async for message, payload in call`` gives what the engine says, until it is over (ApiError where it failed,
  EngineLost 503 where the process died); ``call.close()`` gives it up.
- In the engine process, the module ``stapes.serving.live`` has ``run(call, recognizer, message)``, called in a thread
  of its own for every session; message is the dictionary given to ``open``. ``call.receive(timeout)`` gives
  the next (message, payload), None after ``end``; it raises queue.Empty after the time and CancelledError when the
  client has left, which ``call.cancellation`` knows too. ``call.send({...}, payload)`` from any thread, never waits.
  Returning ends the call. ``recognizer`` is a `stapes.recognizer.Recognizer`, the same object for all sessions of a
  model, so what sessions share may hang on it.
- Sums that should be in ``/metrics``: prometheus_client objects made with ``registry=services.metrics.registry``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import stapes
from stapes.errors import StapesError, UsageError
from stapes.serving import health, page, realtime, served, transcriptions
from stapes.serving.access import Gatekeeper, Keys, Origins
from stapes.serving.decoders import Decoders
from stapes.serving.engines import ENGINE_MODULE, Engine, Engines, EngineSettings
from stapes.serving.failures import ApiError
from stapes.serving.limits import Limits
from stapes.serving.logs import Log
from stapes.serving.metrics import Metrics
from stapes.serving.served import Served
from stapes.serving.services import Services
from stapes.serving.settings import USUAL_BATCH, ServerSettings
from stapes.serving.uploads import Spool


def create_app(settings: ServerSettings, log: Log | None = None, engine_module: str = ENGINE_MODULE) -> FastAPI:
    """The application, whose processes begin and end with it. Raises UsageError where the settings make no sense.

    engine_module: what engine processes run, as ``python -m``.
    """
    services = _services(settings, log or Log(), engine_module)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services.engines.start()
        try:
            await services.decoders.start()
            yield
        finally:
            services.limits.closing = True
            await services.decoders.stop()
            await services.engines.stop()
            services.spool.close()

    app = FastAPI(title="stapes", version=stapes.__version__, lifespan=lifespan, openapi_url=None)
    app.state.services = services
    app.include_router(health.router)
    app.include_router(served.router)
    app.include_router(transcriptions.router)
    app.include_router(realtime.router)
    app.include_router(page.page_router())
    for kind in (ApiError, StapesError, HTTPException, Exception):
        app.add_exception_handler(kind, _explain)
    app.add_exception_handler(ClientDisconnect, _nobody)
    # From the inside to the outside.
    app.add_middleware(Gatekeeper, keys=services.keys, origins=services.origins)
    if settings.network.allow_origin:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.network.allow_origin), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Recorder, services=services)
    return app


def _services(settings: ServerSettings, log: Log, engine_module: str) -> Services:
    models, limits, network = settings.models, settings.limits, settings.network
    keys = Keys.read(network.api_key_file, settings.keys)
    if not (network.is_local or keys or network.no_auth):
        raise UsageError(
            f"--host {network.host} without keys: whoever reaches the port could use it; give --api-key-file FILE "
            "(`stapes serve --new-key` makes a key), or say --no-auth"
        )
    names = Served(models.model, models.alias, models.adapter)
    preload = tuple(names.source(names.resolve(name)) for name in models.preload or (names.default,))
    engines = [
        Engine(
            device,
            EngineSettings(
                device=device,
                precision=models.precision,
                max_vram=models.max_vram,
                threads=models.threads,
                model_dir=models.model_dir,
                max_batch=models.max_batch,
                max_wait_ms=models.max_wait_ms,
                idle_timeout=models.idle_timeout,
                preload=preload,
                adapters=names.adapters,
            ),
            limits.canary_seconds,
            limits.stall_seconds,
            log,
            engine_module,
        )
        for device in models.devices
    ]
    services = Services(
        settings=settings,
        keys=keys,
        origins=Origins(network.allow_origin),
        served=names,
        limits=Limits(limits, (models.max_batch or USUAL_BATCH) * len(engines)),
        engines=Engines(engines),
        decoders=Decoders(limits.decoders, limits.max_audio_seconds, limits.decode_seconds, log),
        spool=Spool(limits.spool_dir),
        metrics=Metrics(),
        log=log,
    )
    services.metrics.collect_from(services)
    return services


async def _explain(request: Request, error: Exception) -> Response:
    """Every failure in OpenAI's shape."""
    if isinstance(error, StapesError):
        error = ApiError.of(error)
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, "The server failed: the log says more", code="internal_error")
    record = getattr(request.state, "record", {})
    record["error"] = error.code
    return error.response()


async def _nobody(request: Request, error: Exception) -> Response:
    """There is no one to answer."""
    request.state.record["left"] = True
    return Response(status_code=499)


class Recorder:
    """ASGI middleware: a line in the log and in the metrics for every request, whatever becomes of it.

    Routes put what is worth knowing into ``request.state.record``: numbers and names, no audio and no text.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 500
        identity = uuid.uuid4().hex[:12]
        record: dict[str, Any] = {}
        scope.setdefault("state", {})["record"] = record

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            took = time.monotonic() - began
            route = getattr(scope.get("route"), "path", "other")
            status = 499 if record.get("left") else status
            self._services.metrics.requests.labels(route, str(status)).inc()
            self._services.metrics.latency.labels(route).observe(took)
            if route not in ("/livez", "/readyz", "/metrics"):
                client = getattr(scope["state"].get("client"), "label", None)
                self._services.log.info(
                    "request",
                    id=identity,
                    method=scope["method"],
                    route=route,
                    status=status,
                    client=client,
                    seconds=round(took, 4),
                    **record,
                )
