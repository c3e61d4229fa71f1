"""Segments of a recording while the rest of it is still at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from stapes.audio.features import SAMPLE_RATE
from stapes.inference.feed import AudioFeed, Clips, FeedMaker
from stapes.inference.results import shift
from stapes.progress import Progress
from stapes.transcript import Segment

SegmentListener = Callable[[list[Segment]], None]
"""Gets the next segments of a recording; in the thread that drives the engine, so it must return at once."""


class Follower:
    """Hands on the segments of one recording in order, as soon as nothing can come before them any more.

    It is the progress of the recording's request, all of which it passes on, and makes its state machines. offset:
    seconds at which the first part that is transcribed begins.
    """

    def __init__(self, tell: SegmentListener, make: FeedMaker, progress: Progress, offset: float) -> None:
        self._tell, self._make, self._progress, self._offset = tell, make, progress, offset
        self._feeds: list[AudioFeed] = []
        self._told = 0

    def make(self, clips: Clips) -> AudioFeed:
        """The state machine of the next channel."""
        feed = self._make(clips)
        self._feeds.append(feed)
        return feed

    def add_total(self, seconds: float) -> None:
        """Pass it on."""
        self._progress.add_total(seconds)

    def note(self, message: str) -> None:
        """Pass it on."""
        self._progress.note(message)

    def advance(self, seconds: float) -> None:
        """The recording is done up to some later moment: hand on what begins before it."""
        self._progress.advance(seconds)
        feeds = self._feeds
        until = min((feed.settled for feed in feeds), default=0) / SAMPLE_RATE
        found: list[tuple[Segment, int]] = []
        for number, feed in enumerate(feeds, 1):
            found += [(segment, number) for segment in feed.sorted_segments() if segment.start < until]
        found.sort(key=lambda each: (each[0].start, each[0].end))
        new = []
        for index, (segment, number) in enumerate(found[self._told :], self._told):
            copy: Any = deepcopy(segment)  # the transcript's own are put on the recording's clock at the end
            copy.id, copy.speaker = index, f"Speaker {number}" if len(feeds) > 1 else None
            shift(copy, self._offset)
            new.append(copy)
        self._hand_on(new)

    def finish(self, segments: Sequence[Segment]) -> None:
        """The transcript is there: hand on those of its segments that are left."""
        self._hand_on(list(segments[self._told :]))

    def _hand_on(self, segments: list[Segment]) -> None:
        if segments:
            self._told += len(segments)
            self._tell(segments)
