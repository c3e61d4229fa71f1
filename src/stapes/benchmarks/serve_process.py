"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stapes.benchmarks.serve_clients import Server
from stapes.benchmarks.serve_engine import LENGTHS, RANDOM
from stapes.errors import DeviceError

if TYPE_CHECKING:
    from stapes.benchmarks.serve import ServeSettings

_START_SECONDS = 600.0
_END_SECONDS = 20.0
_UNLIMITED = 1_000_000


@dataclass
class ServerProcess:
    """Begun by ``with``, which gives the `Server`; ended when the block ends.

    lengths: seconds and tokens of a corpus, for random weights. Raises DeviceError where it cannot begin.
    """

    settings: ServeSettings
    max_batch: int | None
    lengths: Sequence[tuple[float, int]] | None
    log: Callable[[str], None]
    threads: int = field(default_factory=torch.get_num_threads)

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="stapes-bench-")
        try:
            return self._begin()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        process: subprocess.Popen[str] | None = getattr(self, "_process", None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        self._folder.cleanup()

    def _begin(self) -> Server:
        environment = dict(os.environ)
        folder = Path(self._folder.name)
        if self.lengths is not None:
            environment[LENGTHS] = str(folder / "lengths.json")
            (folder / "lengths.json").write_text(json.dumps(self.lengths), encoding="utf-8")
        self._said = folder / "server.log"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "stapes.benchmarks.serve_server", json.dumps(self._values())],
                stdin=subprocess.PIPE,  # closes when we are no more, however that came, and then it ends too
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us alone: we end it
            )
        deadline = time.monotonic() + _START_SECONDS
        url = self._address(deadline)
        self.log(f"the server listens at {url}; loading {self.settings.model}")
        server = Server(url)
        while not self._is_ready(server):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise DeviceError(f"the server did not begin: {self._last_words()}")
            time.sleep(0.1)
        return server

    def _values(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "models": {
                "model": [RANDOM + settings.model if settings.random else settings.model],
                "device": settings.device,
                "precision": settings.precision,
                "threads": settings.threads,
                "model_dir": settings.model_dir,
                "max_batch": self.max_batch,
                "max_wait_ms": settings.max_wait_ms,
            },
            "limits": {"max_queue": _UNLIMITED, "max_queue_seconds": 600.0, "decoders": settings.decoders},
        }

    def _address(self, deadline: float) -> str:
        """What it prints first. A thread reads, so that one that hangs is not waited for without end."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        stdout = self._process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        with suppress(queue.Empty):
            if line := lines.get(timeout=max(0.0, deadline - time.monotonic())).strip():
                return line
        raise DeviceError(f"the server did not begin: {self._last_words()}")

    def _is_ready(self, server: Server) -> bool:
        with suppress(OSError, EOFError):
            status, body = asyncio.run(server.ask("GET", "/readyz"))
            for state in json.loads(body).get("engines", {}).values():
                if state not in ("ready", "stalled", "starting"):
                    raise DeviceError(f"the server's engine cannot begin: {state}")
            return status == 200
        return False

    def _last_words(self) -> str:
        lines = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"
