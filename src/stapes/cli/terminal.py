"""What the commands print: results on stdout; progress, notes and failures on stderr.

On a terminal, stderr shows a bar in seconds of audio (or bytes, for downloads) and plain sentences. Otherwise it
carries JSON lines, one event each: ``progress`` (done, total, unit, elapsed, rtf, eta), ``note``, ``warning`` and
``failure`` (message, and path where it concerns one input).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from stapes.cli.interrupts import shielded
from stapes.errors import OutputError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Unit = Literal["seconds", "bytes"]

# Seconds between two progress lines in a log.
_LINE_INTERVAL = 1.0


def display(text: str) -> str:
    """Text safe to show on one line: control characters and bytes that are no UTF-8 come out escaped."""

    def shown(character: str) -> str:
        if unicodedata.category(character) not in {"Cc", "Cs", "Zl", "Zp"}:
            return character
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name, kept by surrogateescape
            return f"\\x{code - 0xDC00:02x}"
        return character.encode("unicode_escape").decode("ascii")

    return "".join(map(shown, text))


def to_json(value: Any) -> str:
    """One line of JSON that any UTF-8 stream can carry; undecodable bytes of file names stay as surrogate escapes."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")


def prepare_streams() -> None:
    """Make printing safe for every name and text: files and pipes get UTF-8, terminals their own encoding."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]


class Terminal:
    """The two streams of one command. Methods may be called from any thread."""

    def __init__(self) -> None:
        # A stream is None where the caller closed it.
        self._out: TextIO | None = sys.stdout
        self._err: TextIO | None = sys.stderr
        self._lock = threading.RLock()
        self._bar: Bar | None = None
        self.interactive = self._err is not None and self._err.isatty()
        self.out_is_terminal = self._out is not None and self._out.isatty()
        self.out_closed = self._out is None
        """Whoever read stdout has gone (``| head``): there is no one left to print for."""

    def out(self, text: str) -> None:
        """Print a result as it is.

        Raises:
            OutputError: stdout cannot take it (its disk is full). A closed pipe only sets ``out_closed``.
        """
        if self._out is None or self.out_closed:
            return
        with self._lock, self._bar_aside():
            try:
                self._out.write(text)
                self._out.flush()
            except BrokenPipeError:
                self._abandon_out()
            except OSError as error:
                self._abandon_out()
                raise OutputError(f"stdout: cannot be written ({error.strerror}); free the space or use -o") from error

    def note(self, message: str) -> None:
        """Something worth knowing."""
        self._say("note", message)

    def warning(self, message: str, path: str | None = None) -> None:
        """Something was lost, but there is a result."""
        self._say("warning", message, path)

    def failure(self, message: str, path: str | None = None) -> None:
        """Something gave no result, and why."""
        self._say("failure", message, path)

    def verbose(self, line: str) -> None:
        """A line of the result on stderr, where stdout is taken."""
        self._say("segment", line)

    @contextmanager
    def progress(self, unit: Unit, waiting: str) -> Iterator[Reporter]:
        """Show the progress of one job for as long as the block runs; ``waiting`` until its size is known."""
        reporter = Reporter(self, unit, waiting)
        if self.interactive:
            with self._lock:
                self._bar = _make_bar(reporter, self._err)
                self._bar.start()
        try:
            yield reporter
        finally:
            self.end_progress()
            if reporter.done and not self.interactive:
                self.line(reporter.event())

    def end_progress(self) -> None:
        """Take the bar off the screen for good, also while its job still runs in another thread."""
        with self._lock, shielded():
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def line(self, event: dict[str, Any]) -> None:
        """Write one JSON line to stderr."""
        self._write_err(to_json(event) + "\n")

    def _say(self, event: str, message: str, path: str | None = None) -> None:
        if not self.interactive:
            named = {"event": event, "path": path} if path is not None else {"event": event}
            self.line({**named, "message": message})
            return
        # An error often begins with the name already.
        prefix = "" if path is None or message.startswith(path) else f"{display(path)}: "
        kind = {"warning": "warning: ", "failure": "failed: "}.get(event, "")
        self._write_err(f"{kind}{prefix}{display(message)}\n")

    def _write_err(self, text: str) -> None:
        if self._err is None:
            return
        with self._lock, self._bar_aside():
            try:
                self._err.write(text)
                self._err.flush()
            except OSError:  # the log has gone; the work goes on
                self._err = None

    @contextmanager
    def _bar_aside(self) -> Iterator[None]:
        """Take the bar off the screen while something is printed."""
        if self._bar is None:
            yield
            return
        # An exception in the middle of rich's own steps would leave the screen and its locks as they are then.
        with shielded():
            self._bar.stop()
        try:
            yield
        finally:
            with shielded():
                self._bar.start()

    def _abandon_out(self) -> None:
        self.out_closed = True
        # What is still in the buffer would fail again, loudly, when the interpreter flushes it on its way out.
        assert self._out is not None
        with suppress(OSError, ValueError):  # raised where stdout is not a real file, which then needs nothing
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)


class Reporter:
    """Counts what is done of one job and shows it: ``stapes.progress.Progress`` for the command line."""

    def __init__(self, terminal: Terminal, unit: Unit, waiting: str) -> None:
        self.unit = unit
        self.waiting = waiting
        self.total = 0.0
        self.done = 0.0
        self._terminal = terminal
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._last_line = 0.0

    def add_total(self, seconds: float) -> None:
        """More is known to be coming, or less where negative."""
        with self._lock:
            self.total = max(0.0, self.total + seconds)

    def advance(self, seconds: float) -> None:
        """This much more is done."""
        with self._lock:
            self.done += seconds
            now = time.monotonic()
            due = not self._terminal.interactive and now - self._last_line >= _LINE_INTERVAL
            if due:
                self._last_line = now
        if due:
            self._terminal.line(self.event())

    def note(self, message: str) -> None:
        """Something the user should know now."""
        self._terminal.note(message)

    @property
    def elapsed(self) -> float:
        """Wall-clock seconds since the job began."""
        return time.monotonic() - self._started

    @property
    def is_measured(self) -> bool:
        """Whether enough is done to tell the speed: the skipped silence before the first words is not."""
        return self.done >= 1 or 0 < self.total <= self.done

    @property
    def remaining(self) -> float | None:
        """Wall-clock seconds that the rest would take at the speed so far; None while that is unknown."""
        return self.elapsed * max(0.0, self.total - self.done) / self.done if self.is_measured else None

    def event(self) -> dict[str, Any]:
        """The state as a ``progress`` event. ``rtf`` is wall-clock seconds per second of audio: below 1 is faster."""
        out: dict[str, Any] = {
            "event": "progress",
            "unit": self.unit,
            "done": round(self.done, 2),
            "total": round(max(self.total, self.done), 2),
            "elapsed": round(self.elapsed, 2),
        }
        if self.is_measured:
            if self.unit == "seconds":
                out["rtf"] = round(self.elapsed / self.done, 4)
            out["eta"] = round(self.remaining or 0.0, 1)
        return out

    def summary(self) -> str:
        """The state in words, for the end of the bar."""
        total = max(self.total, self.done)
        if not total:
            return self.waiting
        if self.unit == "bytes":
            text = f"{self.done / 1e6:.1f} / {total / 1e6:.1f} MB"
        else:
            text = f"{clock(self.done)} / {clock(total)} audio"
            if self.is_measured:
                speed = self.done / max(self.elapsed, 1e-6)
                text += f" · {speed:.1f} × real time (RTF {1 / speed:.3f})"
        return text if self.remaining is None else f"{text} · {clock(self.remaining)} left"


def clock(seconds: float) -> str:
    """``M:SS`` or ``H:MM:SS``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _make_bar(reporter: Reporter, stream: TextIO | None) -> Bar:
    # Imported here: a log in a pipe does not need rich.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
    from rich.text import Text

    class Fraction(BarColumn):
        """The bar, fed from the reporter when it is drawn, so that reporting never waits for the screen."""

        def render(self, task: Task) -> Any:
            task.completed = reporter.done
            task.total = max(reporter.total, reporter.done) or None
            return super().render(task)

    class Summary(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(reporter.summary())

    # stdout stays the caller's: rich would send it to stderr's console.
    bar = Progress(
        SpinnerColumn(),
        Fraction(bar_width=12),
        Summary(),
        console=Console(file=stream),
        transient=True,
        refresh_per_second=5,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("")
    return bar
