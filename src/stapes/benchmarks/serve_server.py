"""The server that `stapes bench serve` measures: `stapes serve`, with one more route to change how it batches.

``python -m stapes.benchmarks.serve_server SETTINGS`` (JSON: ``models``, ``limits``) listens on a free port of loopback
and prints its address. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress

from fastapi import APIRouter, FastAPI, Request

from stapes.serving.app import create_app
from stapes.serving.failures import ApiError
from stapes.serving.logs import Log
from stapes.serving.run import run
from stapes.serving.services import Services
from stapes.serving.settings import LimitSettings, ModelSettings, NetworkSettings, ServerSettings

router = APIRouter()


@router.post("/bench/batching")
async def change_batching(request: Request) -> dict[str, int]:
    """Batch otherwise, in all engines, from now on: ``size`` of fixed batches, null for the server's own way.

    Answers with how many windows they decode together.
    """
    services: Services = request.app.state.services
    size = (await request.json())["size"]
    model = services.served.source(services.served.default)
    for engine in services.engines.all:
        async for _ in engine.open("batching", model, {"size": size}):
            pass
    return {"slots": sum(engine.models[model]["max_batch"] for engine in services.engines.all)}


def make_app(settings: ServerSettings, log: Log) -> FastAPI:
    """The server's application, on engines that can be switched."""
    app = create_app(settings, log, engine_module="stapes.benchmarks.serve_engine")
    app.include_router(router)
    return app


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Entry point."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    values = json.loads(sys.argv[1])
    settings = ServerSettings(
        network=NetworkSettings(port=0),
        models=ModelSettings(**{**values["models"], "model": tuple(values["models"]["model"])}),
        limits=LimitSettings(**values["limits"]),
    )
    with suppress(ApiError):
        run(settings, started=lambda url: print(url, flush=True), make_app=make_app)  # noqa: T201 - for who began it


if __name__ == "__main__":
    main()
