"""Words that are found in a thread of their own: the same results, and errors where they belong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, FakeSlot, fake_recognizer, tone

from stapes.inference.engine import Alignment
from stapes.inference.words import Draft, WordFinder

BAD = 0.66


class AheadEngine(FakeEngine):
    """Frees slots before their words are known; ``delay``: seconds that these take. Words of `BAD` windows fail."""

    enqueues = finds_words_apart = True
    delay = 0.0

    def encode(self, windows: Any, *, again: bool = False, urgent: bool = False) -> list[Any]:
        return super().encode(windows, again=again)

    def is_encoded(self, encoded: Any) -> bool:
        return True

    def align_ahead(self, slots: Sequence[FakeSlot], prompts: Any, texts: Any) -> list[tuple[Alignment, bool]]:
        bad = [round(float(slot.pcm[0]), 2) == BAD for slot in slots]
        return list(zip(super().align(slots, prompts, texts), bad, strict=True))

    def align(self, slots: Any, prompts: Any, texts: Any) -> list[Alignment]:
        raise AssertionError("nobody is to wait for words")

    @contextmanager
    def aligned(self, ahead: tuple[Alignment, bool]) -> Iterator[Alignment]:
        self.threads.add(threading.get_ident())
        time.sleep(self.delay)
        if ahead[1]:
            raise RuntimeError("the device broke")
        yield ahead[0]

    def warm_up(self) -> None:
        """There is nothing to do."""


def recordings() -> list[np.ndarray]:
    pause = np.zeros(24_000, np.float32)
    return [np.concatenate([tone(5, level), pause, tone(4, level)]) for level in (0.1, 0.2, 0.3, 0.4, 0.5)]


def transcripts(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, sound: Sequence[np.ndarray]) -> list[Any]:
    with fake_recognizer(monkeypatch, engine) as recognizer:
        found = recognizer.transcribe_many(sound, sample_rate=16_000, language="en", word_timestamps=True)
        return sorted(found, key=lambda each: each.text)


def test_words_are_those_that_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = AheadEngine(encoder_batch=2)
    found = transcripts(monkeypatch, apart, recordings())
    plain = transcripts(monkeypatch, FakeEngine(encoder_batch=2), recordings())
    assert [each.segments for each in found] == [each.segments for each in plain]
    assert all(segment.words for each in found for segment in each.segments)
    assert len(apart.threads) == 2
    assert not apart.active


def test_an_error_of_one_window_s_words_is_its_recording_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = transcripts(monkeypatch, AheadEngine(encoder_batch=4), [*recordings(), tone(3, BAD)])
    assert sum(each.error is not None for each in found) == 1
    assert sum(bool(each.text) for each in found) == 5


def test_many_windows_do_not_run_ahead_of_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, most = AheadEngine(rows=4, encoder_batch=2), 0
    engine.delay = 0.002
    find = WordFinder.find

    def watched(finder: WordFinder, drafts: Sequence[Draft]) -> None:
        nonlocal most
        find(finder, drafts)
        most = max(most, len(finder._others))

    monkeypatch.setattr(WordFinder, "find", watched)
    sound = [tone(3, 0.1 + 0.8 * number / 80) for number in range(80)]
    assert len(transcripts(monkeypatch, engine, sound)) == 80
    assert 0 < most <= 16 + 4 + 4


def test_a_call_that_is_given_up_waits_for_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AheadEngine()
    engine.delay = 0.3
    with fake_recognizer(monkeypatch, engine) as recognizer:
        results = recognizer.transcribe_many(recordings(), sample_rate=16_000, language="en", word_timestamps=True)
        next(results)
        began = time.monotonic()
        results.close()  # type: ignore[attr-defined]
        assert time.monotonic() - began < 0.3
        engine.delay = 0.0
        assert recognizer.transcribe(tone(3, 0.7), sample_rate=16_000, language="en", word_timestamps=True).text
