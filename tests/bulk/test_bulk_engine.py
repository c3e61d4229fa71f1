"""A worker by itself: what it does with assignments, and when decoders are lost."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from made_bulk import FakeTranscriber

from stapes.bulk.decoders import Lost
from stapes.bulk.engine import Opened, ShardWorker
from stapes.bulk.executor import Assignment, Done, Event, Kept, Returned
from stapes.bulk.files import decompress
from stapes.bulk.inputs import Item
from stapes.bulk.spec import Spec
from stapes.options import TranscribeOptions

SPEC = Spec(model="m", revision="r", options=TranscribeOptions(vad=False), settings={}, decoders=3)


class Messages:
    """What a decoder says of one recording."""

    def __init__(self, lost: bool) -> None:
        head = {"sha256": "0", "bytes": 1, "channels": 1, "seconds": 0.1, "recording": [16_000, 1, 0.1]}
        samples = np.full(1600, 0.5, np.float32)
        self.left = [b"H" + json.dumps(head).encode(), b"P" + samples.tobytes()]
        self.left.append(b"E" + json.dumps({"warnings": [], "damaged": False}).encode())
        self.lost = lost

    def get(self) -> bytes:
        if self.lost:
            raise Lost("decoder died", "ended its decoder")
        return self.left.pop(0)

    def close(self) -> None:
        pass


class Groups:
    """Decoders of groups: one bad recording costs all of its group."""

    speech = False
    group_seconds = 10.0

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def begin(self, requests: Sequence[dict[str, Any]], *, wait: bool) -> Sequence[Messages]:
        names = [request["audio"] for request in requests]
        self.groups.append(names)
        return [Messages("bad.wav" in names) for _ in requests]

    def close(self) -> None:
        pass


def assignment(number: int, names: Sequence[str]) -> Assignment:
    items = [Item(name, name, 2.0) for name in names]
    return Assignment(number, number, items, tuple(range(len(items))), 2.0 * len(items))


def begin(decoders: Groups, *assignments: Assignment) -> tuple[ShardWorker, queue.Queue[Event]]:
    events: queue.Queue[Event] = queue.Queue()
    worker = ShardWorker("w", SPEC, Opened(FakeTranscriber(), 2, False), decoders, events.put)
    for each in assignments:
        worker.give(each)
    threading.Thread(target=worker.run, daemon=True).start()
    return worker, events


def rows_of(events: queue.Queue[Event]) -> tuple[int, list[dict[str, Any]]]:
    while not isinstance(event := events.get(timeout=60), Done):
        pass
    return event.number, [json.loads(line) for line in decompress(event.rows).splitlines()]


def test_short_recordings_are_decoded_together_and_only_the_bad_one_is_quarantined() -> None:
    decoders = Groups()
    names = [*(f"{n}.wav" for n in range(7)), "bad.wav", *(f"{n}.wav" for n in range(8, 20))]
    worker, events = begin(decoders, assignment(1, names))
    number, rows = rows_of(events)
    worker.stop()
    assert number == 1
    assert [row["id"] for row in rows] == names
    assert {row["id"]: row["status"] for row in rows if row["status"] != "ok"} == {"bad.wav": "quarantined"}
    assert max(map(len, decoders.groups)) == 5
    assert decoders.groups.count(["bad.wav"]) == 1
    # What shared its group was decoded once more, by itself.
    assert sum(len(group) for group in decoders.groups) == 20 + 5


def test_assignments_come_back_in_their_order_and_unbegun_ones_can_be_recalled() -> None:
    worker, events = begin(Groups(), *(assignment(n, [f"slow-{n}-{k}.wav" for k in range(8)]) for n in range(1, 4)))
    worker.recall(3)
    worker.recall(77)
    found: list[Event] = []
    # On a busy machine the third may have been begun by then: it is kept.
    while (
        Kept("w", 77) not in found or sum(isinstance(event, Done) or event == Returned("w", 3) for event in found) < 3
    ):
        found.append(events.get(timeout=60))
    worker.stop()
    done = [event.number for event in found if isinstance(event, Done)]
    assert done == ([1, 2] if Returned("w", 3) in found else [1, 2, 3])
