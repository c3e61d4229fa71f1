"""How long work reports itself: one small protocol, whoever listens.

Work is counted in seconds of audio. The command line shows it with rich on a terminal and as JSON lines when
piped; a server sends the same events to its clients.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of a job. Methods may be called from any thread and must return at once."""

    def add_total(self, seconds: float) -> None:
        """More audio is known to be coming; a negative value corrects an estimate that was too high."""
        ...

    def advance(self, seconds: float) -> None:
        """This much more audio is done."""
        ...

    def note(self, message: str) -> None:
        """Something the user should know now."""
        ...


class Silent:
    """A listener that does not care."""

    def add_total(self, seconds: float) -> None:
        """Ignore."""

    def advance(self, seconds: float) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""
