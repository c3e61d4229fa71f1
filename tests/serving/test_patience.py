"""Connections that say nothing are closed after a while; a WebSocket, which may be silent for hours, is not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from websockets.sync.client import connect

from stapes.serving.run import patient

SECONDS = 0.3


@pytest.fixture
def port() -> Iterator[int]:
    app = FastAPI()

    @app.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=patient(SECONDS), log_level="error"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def test_a_silent_websocket_outlives_the_time_for_a_request(port: int) -> None:
    """FunASR #3101: connections were cut after 20 to 30 minutes."""
    with connect(f"ws://127.0.0.1:{port}/echo") as client:
        time.sleep(3 * SECONDS)
        client.send("still here")
        assert client.recv(timeout=5) == "still here"


def test_a_connection_that_sends_no_request_is_closed(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n")
        assert client.recv(100) == b""
