"""Mixes the windows of all recordings on one engine.

Windows are encoded in small batches as slots become free, join the decoder at once, and leave it when they end.
A window whose attempt failed goes to the front of the queue for its next temperature. Nothing waits while the engine
could work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from stapes.inference.engine import DecodeRequest, Engine
from stapes.inference.ingest import Ingest, Job
from stapes.inference.recording import Draft, Window

_RETRIES_WAITING = 32
"""Windows that may wait for their next temperature before new ones are held back; each holds some MB of encoding."""


class Scheduler:
    """Drives an engine through the windows that an `Ingest` provides."""

    def __init__(self, engine: Engine, steps: int = 1) -> None:
        self.engine, self.steps = engine, steps
        self.encoded: deque[Window] = deque()
        self.slots: dict[Any, Window] = {}

    def run(self, ingest: Ingest) -> Iterator[Job]:
        """Transcribe everything; yield each job as it is done."""
        try:
            while True:
                seen = ingest.changes
                worked = self._encode(ingest)
                worked |= self._admit()
                if self.slots:
                    self.engine.step(self.steps)
                    if self._harvest():
                        ingest.completed()
                    worked = True
                yield from ingest.finished()
                if ingest.over and not self.slots and not self.encoded:
                    return
                if not worked:
                    ingest.wait(seen, 0.2)
        finally:
            for slot in list(self.slots):
                self.engine.release(slot)
            self.slots.clear()
            self.encoded.clear()

    def _encode(self, ingest: Ingest) -> bool:
        """Encode the next windows, as many as the engine likes at once, when there is or will soon be room."""
        batch: list[Window] = []
        # Those that are to be tried again wait for slots of another kind: they must not keep new ones from theirs.
        while (
            sum(not window.attempts for window in self.encoded) + len(batch) < self.engine.encoder_batch
            and sum(bool(window.attempts) for window in self.encoded) < _RETRIES_WAITING
        ):
            window = ingest.take()
            if window is None:
                break
            if window.encoded is not None:  # its language was not known; now it is
                self.encoded.append(window)
            else:
                batch.append(window)
        if not batch:
            return bool(self.encoded) and not self.slots
        for window, encoded in zip(batch, self.engine.encode([window.pcm for window in batch]), strict=True):
            window.encoded = encoded
        unknown = [window for window in batch if window.recording.language is None]
        self.encoded.extend(window for window in batch if window not in unknown)
        if unknown:
            votes = self.engine.detect_language([window.encoded for window in unknown])
            for window, vote in zip(unknown, votes, strict=True):
                window.recording.vote(window, vote)
        return True

    def _admit(self) -> bool:
        """Put encoded windows into free slots, together with others of the same kind."""
        admitted = False
        while self.encoded:
            request = self.encoded[0].recording.request(self.encoded[0])
            room = self.engine.free_slots(request)
            group: list[tuple[Window, DecodeRequest]] = []
            kept: deque[Window] = deque()
            for window in self.encoded:
                candidate = window.recording.request(window)
                if len(group) < room and _kind(candidate) == _kind(request):
                    group.append((window, candidate))
                else:
                    kept.append(window)
            if not group:
                # The first kind is full: let others pass it.
                return self._admit_other(_kind(request)) or admitted
            self.encoded = kept
            self._enter(group)
            admitted = True
        return admitted

    def _admit_other(self, full: tuple[int, bool]) -> bool:
        group: list[tuple[Window, DecodeRequest]] = []
        for window in self.encoded:
            request = window.recording.request(window)
            kind = _kind(request)
            if (
                kind != full
                and (not group or kind == _kind(group[0][1]))
                and len(group) < self.engine.free_slots(request)
            ):
                group.append((window, request))
        taken = {id(window) for window, _ in group}
        self.encoded = deque(window for window in self.encoded if id(window) not in taken)
        if group:
            self._enter(group)
        return bool(group)

    def _enter(self, group: list[tuple[Window, DecodeRequest]]) -> None:
        requests = [request for _, request in group]
        slots = self.engine.admit(requests, [window.encoded for window, _ in group])
        self.slots.update(zip(slots, (window for window, _ in group), strict=True))

    def _harvest(self) -> bool:
        """Take what has ended: try again, or give it its words and hand it back. Whether there was any.

        An error in handling a window is its recording's end, and no other's.
        """
        ready: list[tuple[Any, Window, Draft]] = []
        wanted: list[tuple[Any, Window, Draft, list[int], list[int]]] = []
        retries: list[Window] = []
        harvested = self.engine.harvest()
        for slot, result in harvested:
            window = self.slots[slot]
            try:
                draft = window.recording.judge(window, result)
                words = None if draft is None else window.recording.words_wanted(window, draft)
            except Exception as error:
                self._free(slot)
                window.recording.fail(error, window)
                continue
            if draft is None:
                retries.append(window)
                self._free(slot)
            elif words is None:
                ready.append((slot, window, draft))
            else:
                wanted.append((slot, window, draft, *words))
        alignments = self.engine.align([w[0] for w in wanted], [w[3] for w in wanted], [w[4] for w in wanted])
        for (slot, window, draft, prompt, _), alignment in zip(wanted, alignments, strict=True):
            try:
                window.recording.add_words(window, draft, prompt, alignment)
            except Exception as error:
                self._free(slot)
                window.recording.fail(error, window)
            else:
                ready.append((slot, window, draft))
        for slot, window, draft in ready:
            self._free(slot)
            try:
                window.recording.complete(window, draft)
            except Exception as error:
                window.recording.fail(error, window)
        self._retry(retries)
        return bool(harvested)

    def _retry(self, windows: list[Window]) -> None:
        """Put windows in front for their next attempt; encode those again that get a second look."""
        unseen = [window for window in windows if window.encoded is None]
        for first in range(0, len(unseen), self.engine.encoder_batch):
            batch = unseen[first : first + self.engine.encoder_batch]
            encodings = self.engine.encode([window.pcm for window in batch], again=True)
            for window, encoded in zip(batch, encodings, strict=True):
                window.encoded = encoded
        self.encoded.extendleft(reversed(windows))

    def _free(self, slot: Any) -> None:
        del self.slots[slot]
        self.engine.release(slot)


def _kind(request: DecodeRequest) -> tuple[int, bool]:
    return request.candidates, request.is_beam
