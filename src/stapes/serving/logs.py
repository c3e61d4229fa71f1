"""The log: a JSON object a line on stderr, with numbers and names, never with audio or text."""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO


class Log:
    """Writes events. file: where to; None is stderr as it is at the time."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()

    def info(self, event: str, **fields: Any) -> None:
        """Something happened as it should."""
        self._write("info", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something happened that should not."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "level": level, "event": event, **fields}, ensure_ascii=True, default=str)
        with self._lock:
            try:
                print(line, file=self._file or sys.stderr, flush=True)
            except (OSError, ValueError):  # whoever read it has gone; the server goes on
                return
