"""``/livez``, ``/readyz`` and ``/metrics``: is the process there, does inference work, and how is it doing."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from stapes.serving.services import Services

router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The web process answers; of the engines it says nothing."""
    return {"status": "alive"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """200 while the device of some engine came further a short time ago, by a request or a canary; else 503."""
    services: Services = request.app.state.services
    ready = services.engines.is_ready and not services.limits.closing
    engines = {
        engine.name: "ready" if engine.is_ready else "stalled" if engine.up else engine.problem or "starting"
        for engine in services.engines.all
    }
    return JSONResponse({"status": "ready" if ready else "not ready", "engines": engines}, 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    services: Services = request.app.state.services
    return Response(await services.metrics.text(), media_type=CONTENT_TYPE_LATEST)
