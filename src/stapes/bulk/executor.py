"""Who does the work: workers that are given shards, and tell what became of them.

An `Executor` has workers somewhere (processes of this machine in `local`, actors of a cluster in `on_ray`, none at all
in a simulation); the driver gives them `Assignment`s and hears `Event`s. Nothing else passes between them, so the same
driver writes the same files whoever does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stapes.bulk.inputs import Item
from stapes.bulk.store import Counts


@dataclass(frozen=True, slots=True)
class Assignment:
    """A shard to transcribe, or some of its items. ``places``: of the items in the shard; they are in its order."""

    number: int
    """Of the assignment: no two have the same."""
    shard: int
    items: Sequence[Item]
    places: Sequence[int]
    seconds: float
    """Expected."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has its model. ``window``: how many recordings it has in work at once, at most; ``ahead``: seconds of
    audio that it should have before it, so as not to run dry."""

    worker: str
    window: int
    ahead: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker is with an assignment: items that it has begun, and those that are over."""

    worker: str
    number: int
    begun: int
    """It has begun with the first so many."""
    ended: Sequence[tuple[int, float, str | None]]
    """(Place among the items, seconds of audio, kind of its error) of those that are newly over."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Seconds of audio that a worker has transcribed since it began, also of recordings that are not over."""

    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """An assignment is finished. ``rows``: JSON lines in a zstd frame, in the order of its items."""

    worker: str
    number: int
    rows: bytes
    counts: Counts


@dataclass(frozen=True, slots=True)
class Returned:
    """A worker gives back an assignment that it had not begun."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A worker was asked for an assignment that it has begun: it keeps it."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Died:
    """A worker is no more, and its assignments with it; another takes its place under the same name.

    ``hopeless``: it could not even begin, for a reason that is the same next time.
    """

    worker: str
    reason: str
    hopeless: bool = False
    exit_code: int = 1
    """What the command is to end with, where no other worker can go on."""


Event = Ready | Progress | Heard | Done | Returned | Kept | Died


class Executor(Protocol):
    """Has workers and passes messages; called from one thread."""

    @property
    def workers(self) -> Sequence[str]:
        """Their names."""
        ...

    def start(self) -> None:
        """Begin all workers; returns before they are ready."""
        ...

    def submit(self, worker: str, assignment: Assignment) -> None:
        """Give an assignment to a worker. One that dies meanwhile says so."""
        ...

    def recall(self, worker: str, number: int) -> None:
        """Ask for an assignment back: `Returned` or `Kept` is the answer, or it is done first."""
        ...

    def events(self, timeout: float) -> Sequence[Event]:
        """What has happened, waiting at most so many seconds for something."""
        ...

    def restart(self, worker: str) -> None:
        """End a worker that does nothing any more; `Died` follows, and another takes its place."""
        ...

    def close(self) -> None:
        """End all workers, at once."""
        ...
