"""What the public object asks of a kind of model: which options it can follow, and how it writes down a recording."""

from __future__ import annotations

from typing import Any, Protocol

from stapes.inference.feed import FeedMaker
from stapes.options import TranscribeOptions


class Family(Protocol):
    """A loaded model of some kind, with its engine."""

    name: str
    """For messages and transcripts."""
    tokenizer: Any
    config: Any
    engine: Any
    """An `Engine` with a settable number of ``slots``."""
    replays: bool
    """Whether recordings may have to be read twice."""

    @property
    def parameters(self) -> int:
        """How many the network has."""
        ...

    def can_be_told(self, language: str) -> bool:
        """Whether a call may name this language where it is only known of each recording, not said by the user."""
        ...

    def check(self, options: TranscribeOptions) -> TranscribeOptions:
        """The options as this model takes them. Raises UsageError, with the remedy, for those that it cannot follow."""
        ...

    def feeds(self, options: TranscribeOptions) -> FeedMaker:
        """Makes the state machines of recordings. ``options`` were checked."""
        ...
