"""Mixes the windows of all recordings on one engine.

Windows are encoded in small batches as slots become free, join the decoder at once, and leave it when they end.
A window whose attempt failed goes to the front of the queue for its next temperature; its encoding is kept. Nothing
waits while the engine could work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from stapes.inference.engine import DecodeRequest, Engine
from stapes.inference.ingest import Ingest, Job
from stapes.inference.recording import Draft, Window


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
                worked = self._encode(ingest)
                worked |= self._admit()
                if self.slots:
                    self.engine.step(self.steps)
                    self._harvest()
                    worked = True
                yield from ingest.finished()
                if ingest.over and not self.slots and not self.encoded:
                    return
                if not worked:
                    ingest.wait(0.2)
        finally:
            for slot in list(self.slots):
                self.engine.release(slot)
            self.slots.clear()
            self.encoded.clear()

    def _encode(self, ingest: Ingest) -> bool:
        """Encode the next windows, as many as the engine likes at once, when there is or will soon be room."""
        batch: list[Window] = []
        while len(self.encoded) + len(batch) < self.engine.encoder_batch:
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

    def _harvest(self) -> None:
        """Take what has ended: try again, or give it its words and hand it back."""
        ready: list[tuple[Any, Window, Draft]] = []
        for slot, result in self.engine.harvest():
            window = self.slots[slot]
            draft = window.recording.judge(window, result)
            if draft is None:
                self.encoded.appendleft(window)
                self._free(slot)
            else:
                ready.append((slot, window, draft))
        wanted = [(entry, wish) for entry in ready if (wish := entry[1].recording.words_wanted(entry[2])) is not None]
        alignments = self.engine.align(
            [entry[0] for entry, _ in wanted], [wish[0] for _, wish in wanted], [wish[1] for _, wish in wanted]
        )
        for ((_, window, draft), wish), alignment in zip(wanted, alignments, strict=True):
            window.recording.add_words(window, draft, wish[0], alignment)
        for slot, window, draft in ready:
            self._free(slot)
            window.recording.complete(window, draft)

    def _free(self, slot: Any) -> None:
        del self.slots[slot]
        self.engine.release(slot)


def _kind(request: DecodeRequest) -> tuple[int, bool]:
    return request.candidates, request.is_beam
