"""Run what may crash or hang in a process of its own: a GPU library that dies then says so instead of taking us along.

A child writes records to stdout as lines of JSON behind the character RS; whatever libraries print besides is no
record. What arrived before a crash counts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_MARK = "\x1e"
_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class ChildResult:
    """What a child wrote and how it ended. ``failure``: None where it ended well."""

    records: list[dict[str, Any]]
    said: str
    failure: str | None


def emit(record: dict[str, Any]) -> None:
    """Write one record from inside a child."""
    sys.stdout.write(_MARK + json.dumps(record) + "\n")
    sys.stdout.flush()


def run_child(arguments: list[str], timeout: float) -> ChildResult:
    """Run ``python -m ARGUMENTS…`` for at most ``timeout`` seconds."""
    # Files, not pipes: a library's helper process that outlives the child would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            # Python's own trace of a crash would hide what the library said last.
            env={name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
            | {"PYTHONIOENCODING": "utf-8"},
        )
        _running.add(process)
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # an interruption too
            _running.discard(process)
            _end(process)
        out.seek(0)
        err.seek(0)
        return read_result(out.read().decode(errors="replace"), err.read().decode(errors="replace"), code, timeout)


def end_all() -> None:
    """End the children of all threads, because the user wants to leave."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_result(out: str, said: str, code: int | None, timeout: float) -> ChildResult:
    """Interpret what a child wrote. code: None where it had to be ended."""
    records = []
    for line in out.split("\n"):  # splitlines would split at the mark too
        if line.startswith(_MARK):
            try:
                record = json.loads(line[1:])
            except json.JSONDecodeError:  # cut off by a crash
                continue
            if isinstance(record, dict):
                records.append(record)
    failure = None
    if code is None:
        failure = f"no answer within {timeout:.0f} s"
    elif code < 0:
        failure = f"crashed ({_signal(-code)}){_tail(said)}"
    elif code:
        failure = f"ended with exit code {code}{_tail(said)}"
    return ChildResult(records, said, failure)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(said: str) -> str:
    """The last line that means something: a traceback's end, or what a library said before it aborted."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in said.splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
