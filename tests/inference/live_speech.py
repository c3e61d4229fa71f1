"""Made speech for live sessions: words whose sound says what they are, and those who hear them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from fakes import FakeEngine, at, result

from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.live_events import Committed, Event, Final, Partial

RATE = 16_000
WORD = 0.32
"""Seconds of a word: ten frames of the detector."""


def say(numbers: Sequence[int]) -> np.ndarray:
    """Words, one after the other: number n sounds at the level n / 1000."""
    return np.repeat(np.array(numbers, np.float32) / 1000, round(WORD * RATE))


def pause(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def understand(pcm: np.ndarray) -> list[int]:
    """The words of a window; one that is cut short at its end is misheard, another way at every length."""
    padded = np.concatenate([[0.0], pcm, [0.0]])
    edges = np.flatnonzero(np.diff(padded))
    words = []
    for start, end in pairwise(edges):
        level = round(float(pcm[start]) * 1000)
        count, rest = divmod(int(end - start), round(WORD * RATE))
        if level:
            words += [level] * count + ([950 + rest * 20 // round(WORD * RATE)] if rest > 600 else [])
    return words


def word_starts(pcm: np.ndarray) -> list[float]:
    """Seconds where the words of a window begin."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0.0], pcm, [0.0]])))
    size = round(WORD * RATE)
    return [at / RATE for start, end in pairwise(edges) if pcm[start] for at in range(start, end - 600, size)]


def script(pcm: np.ndarray, request: DecodeRequest) -> DecodeResult:
    """What the fake engine writes."""
    words = understand(pcm)
    if not words:
        return result([at(0), at(0.02)], no_speech_prob=0.9, avg_logprob=-2.0)
    return result([at(0), *words, at(len(pcm) / RATE)])


class SpeechEngine(FakeEngine):
    """Understands made speech. ``windows``: the seconds of all that were encoded."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**({"script": script, "rows": 16, "encoder_batch": 8} | changes))
        self.windows: list[float] = []

    def align(self, slots: Any, prompts: Any, texts: Any) -> list[Any]:
        """Words are where they sound."""
        out = []
        for slot, prompt, text in zip(slots, prompts, texts, strict=True):
            self.words = lambda text, pcm=slot.pcm: word_starts(pcm)[: len(text)]
            out += super().align([slot], [prompt], [text])
        return out

    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False) -> list[np.ndarray]:
        self.windows += [len(window) / RATE for window in windows]
        return super().encode(windows, again=again)


class LevelDetector:
    """Speech wherever there is sound in a frame."""

    def state(self) -> list[np.ndarray]:
        return [np.zeros(0, np.float32)]

    def probabilities(self, states: Any, pcm: Any, *, final: Any = False) -> list[np.ndarray]:
        ends = [final] * len(states) if isinstance(final, bool) else final
        out = []
        for state, samples, is_end in zip(states, pcm, ends, strict=True):
            held = np.concatenate([state[0], samples])
            count = -(-len(held) // 512) if is_end else len(held) // 512
            frames = np.pad(held, (0, max(0, count * 512 - len(held))))[: count * 512].reshape(count, 512)
            out.append((np.abs(frames).max(axis=1, initial=0) > 0).astype(np.float32) * 0.98 + 0.01)
            state[0] = held[count * 512 :]
        return out


def check_order(events: Sequence[Event]) -> None:
    """What a listener may rely on: committed words of a turn, put together, are its final text; turns come in order."""
    committed: dict[int, str] = {}
    final: dict[int, str] = {}
    ended: set[int] = set()
    last = 0
    for event in events:
        match event:
            case Committed():
                assert event.turn >= last
                assert event.turn not in ended
                committed[event.turn] = committed.get(event.turn, "") + event.text
                last = event.turn
            case Partial():
                assert event.turn not in ended
            case Final():
                final[event.turn] = final.get(event.turn, "") + event.text
                if event.ends_turn:
                    assert event.turn not in ended
                    ended.add(event.turn)
            case _:
                pass
    assert committed == {turn: text for turn, text in final.items() if text}


def said(events: Sequence[Event]) -> list[int]:
    """The numbers of all final texts."""
    return [int(word) for event in events if isinstance(event, Final) for word in event.text.split()]
