"""What a live session tells: dataclasses in the order in which things happen. Seconds are those of the session's clock,
which counts the sound that was fed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stapes.transcript import Segment, Word


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Somebody begins to speak: turn number ``turn`` (from 0), whose sound is kept from ``time`` on."""

    turn: int
    time: float


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The turn is over; its sound is kept up to ``time``. Its last words follow."""

    turn: int
    time: float


@dataclass(frozen=True, slots=True)
class Committed:
    """Words that will not change any more. Their times are near; `Final` has the exact ones."""

    turn: int
    words: list[Word]

    @property
    def text(self) -> str:
        """The words as text, which goes on where the committed words before ended."""
        return "".join(word.word for word in self.words)


@dataclass(frozen=True, slots=True)
class Partial:
    """What seems to follow the committed words just now. It replaces the partial before."""

    turn: int
    words: list[Word]

    @property
    def text(self) -> str:
        """The words as text."""
        return "".join(word.word for word in self.words)


@dataclass(frozen=True, slots=True)
class Final:
    """A part of a turn is complete; a turn has one part unless it is long, and none where nothing was said.

    ``text`` is that of its committed words; ``segment`` has them with their exact times, None where there are none.
    """

    turn: int
    text: str
    segment: Segment | None
    ends_turn: bool
    language: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A part of a turn could not be transcribed; the session goes on."""

    turn: int
    message: str
    ends_turn: bool


Event = SpeechStarted | SpeechStopped | Committed | Partial | Final | Failed

_NAMES = {
    SpeechStarted: "speech_started",
    SpeechStopped: "speech_stopped",
    Committed: "committed",
    Partial: "partial",
    Final: "final",
    Failed: "failed",
}


@dataclass(slots=True)
class EventLog:
    """Events that nobody has taken yet. Of partials only the last is kept, so that it stays short."""

    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Put an event at the end."""
        if self.events and isinstance(event, Partial) and isinstance(self.events[-1], Partial):
            self.events[-1] = event
        else:
            self.events.append(event)

    def take(self) -> list[Event]:
        """All of them; then there are none."""
        events, self.events = self.events, []
        return events


def event_to_dict(event: Event) -> dict[str, Any]:
    """JSON form: ``event`` names the kind, and the rest are its fields."""
    out: dict[str, Any] = {"event": _NAMES[type(event)], "turn": event.turn}
    match event:
        case SpeechStarted() | SpeechStopped():
            out["time"] = round(event.time, 3)
        case Committed() | Partial():
            out |= {"text": event.text, "words": [word.to_dict() for word in event.words]}
        case Final():
            segment = None if event.segment is None else event.segment.to_dict()
            out |= {"text": event.text, "segment": segment, "ends_turn": event.ends_turn, "language": event.language}
        case Failed():
            out |= {"message": event.message, "ends_turn": event.ends_turn}
    return out
