"""Servers as users start them, in processes of their own, on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import openai


class Server:
    """``stapes serve`` with some arguments; what it logs is in ``events``."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.url = ""
        self.spool = Path(tempfile.mkdtemp())
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STAPES_SPOOL_DIR": str(self.spool), **variables}
        command = [sys.executable, "-m", "stapes", "serve", "--port", "0", "--threads", "1", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"event": "text", "text": line}
            if event["event"] == "note" and (found := re.search(r"http://\S+", event["message"])):
                self.url = found[0]
            self.events.append(event)

    def ready(self) -> Server:
        """Wait until it can work."""
        until(lambda: self.url or self.process.poll() is not None, 60)
        until(lambda: httpx.get(f"{self.url}/readyz").status_code == 200, 60)
        return self

    def sdk(self, key: str = "none", **settings: Any) -> openai.OpenAI:
        """The official client."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **settings)

    def post(self, audio: bytes = b"", path: str = "/v1/audio/transcriptions", **fields: Any) -> httpx.Response:
        """A form with a recording."""
        headers = fields.pop("headers", {})
        files = {"file": (fields.pop("name", "talk.wav"), audio)}
        return httpx.post(f"{self.url}{path}", files=files, data=fields, headers=headers, timeout=60)

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        """The sum of all samples of a name."""
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def engine_pid(self) -> int:
        """The newest engine process that was ready."""
        return [event["pid"] for event in self.events if event["event"] == "engine_ready"][-1]

    def requests(self) -> list[dict[str, Any]]:
        """What was logged of requests."""
        return [event for event in self.events if event["event"] == "request"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tell it to end; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


def until(condition: Any, seconds: float) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
