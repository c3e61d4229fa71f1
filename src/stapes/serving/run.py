"""Running the application: sockets, signals, an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from stapes.errors import UsageError
from stapes.serving.app import create_app
from stapes.serving.limits import Limits
from stapes.serving.logs import Log
from stapes.serving.settings import ServerSettings

KEEP_ALIVE_SECONDS = 75
"""How long a connection may rest between two requests: longer than proxies and load balancers keep theirs (60 s), for
the side that closes must be the one that sends, or requests are lost on their way."""

_LAST_WORDS = 5.0
"""Seconds in which requests that are handed back get their answers."""


def run(
    settings: ServerSettings,
    *,
    started: Callable[[str], None] = lambda url: None,
    make_app: Callable[[ServerSettings, Log], FastAPI] = create_app,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends at once. started: gets the address. Raises UsageError."""
    log = Log()
    sockets = _listen(settings.network.host, settings.network.port)
    app = make_app(settings, log)
    _more_handles()
    with _uvicorn_logs(log):
        asyncio.run(_serve(app, settings, sockets, started))


async def _serve(
    app: FastAPI, settings: ServerSettings, sockets: list[socket.socket], started: Callable[[str], None]
) -> None:
    limits: Limits = app.state.services.limits
    grace = settings.limits.shutdown_seconds
    config = uvicorn.Config(
        app,
        http=patient(settings.limits.header_seconds),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=round(grace + _LAST_WORDS),
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    ending: list[asyncio.TimerHandle] = []

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = limits.closing = True
        ending.append(loop.call_later(grace, limits.handing_back.set))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    host, port = sockets[0].getsockname()[:2]
    started(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await server.serve(sockets)


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def patient(seconds: float) -> type[H11Protocol]:
    """The HTTP protocol, which closes connections that have not sent a whole request head for so long."""

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _is_upgraded = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._timer = self.loop.call_later(seconds, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_upgraded or not self._is_waiting():
                self._stop_timer()
            elif self._timer is None and self.timeout_keep_alive_task is None:
                self._timer = self.loop.call_later(seconds, self._give_up)

        def handle_websocket_upgrade(self, event: Any) -> None:
            self._is_upgraded = True
            self._stop_timer()
            super().handle_websocket_upgrade(event)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _is_waiting(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if self._is_waiting() and not self.transport.is_closing():
                self.transport.close()

    return Patient


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets of every address of a host. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening: list[socket.socket] = []
        for family, _, _, _, address in found:
            end = socket.socket(family, socket.SOCK_STREAM)
            listening.append(end)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                end.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            end.bind(address)
            end.listen(2048)
    except OSError as error:
        raise UsageError(f"{host}:{port} cannot be listened at ({error.strerror}): choose another --port") from error
    return listening


def _more_handles() -> None:
    """A connection takes a file handle: have as many as are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _uvicorn_logs(log: Log) -> Iterator[None]:
    """What uvicorn has to say becomes lines of our log."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields: dict[str, Any] = {"reason": record.getMessage().strip()}
            if record.exc_info:
                fields["traceback"] = "".join(traceback.format_exception(*record.exc_info))
            (log.error if record.levelno >= logging.WARNING else log.info)("http_server", **fields)

    logger, handler = logging.getLogger("uvicorn"), Handler()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
