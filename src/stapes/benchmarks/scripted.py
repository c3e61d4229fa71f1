"""Live sessions on networks that know nothing: the work is done, and what is written is what a script says.

Random weights write nonsense that no two hypotheses agree on. Here the engine encodes, reads prompts and writes just as
many tokens as for real; then the words that were said up to the end of the window take the place of the nonsense. A
word that the window cuts off is misheard, as it would be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from stapes.audio.features import SAMPLE_RATE
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.feed import FeedWindow
from stapes.inference.live_voices import Deliver, Stretch, WhisperVoice
from stapes.inference.recording import Model
from stapes.options import TranscribeOptions
from stapes.recognizer import Recognizer

_FIRST_WORD = 256
"""Tokens below this are letters; from here on each is a word with its space."""

_LONG = 9
"""Words of so many letters are two tokens: on LibriSpeech, Whisper's tokenizer makes 1.3 of a word."""


@dataclass(frozen=True)
class SaidWord:
    """A word of the script, in seconds of the session's clock."""

    tokens: tuple[int, ...]
    start: float
    end: float

    @property
    def middle(self) -> float:
        """Where it belongs: to the stretch that has this."""
        return (self.start + self.end) / 2


def say(text: str, start: float, end: float, end_of_text: int) -> list[SaidWord]:
    """The words of a text, which take up the time from ``start`` to ``end`` by their letters."""
    words = text.split()
    letters = sum(len(word) + 1 for word in words)
    said, at = [], start
    for word in words:
        until = at + (end - start) * (len(word) + 1) / letters
        said.append(SaidWord(_tokens(word, end_of_text), at, until))
        at = until
    return said


def _tokens(word: str, end_of_text: int) -> tuple[int, ...]:
    number = crc32(word.encode())
    token = _FIRST_WORD + number % (end_of_text - _FIRST_WORD)
    return (token,) if len(word) < _LONG else (token, ord("a") - ord("!"))


@dataclass(frozen=True, kw_only=True)
class ScriptedRequest(DecodeRequest):
    """A request that says what will have been written."""

    script: tuple[int, ...] = ()


class ScriptedVoice(WhisperVoice):
    """A voice whose windows say what the script says."""

    def __init__(
        self,
        model: Model,
        options: TranscribeOptions,
        returned: Callable[[FeedWindow], None],
        words: Sequence[SaidWord],
    ) -> None:
        super().__init__(model, options, returned)
        self._words = words
        self._scripts: dict[Any, tuple[int, ...]] = {}
        self._middles = [word.middle for word in words]
        for feed in (self.final, self.quick):
            feed.request = self._scripted(feed.request)  # pyright: ignore[reportAttributeAccessIssue]
            feed.add_words = self._timed(feed.add_words)  # pyright: ignore[reportAttributeAccessIssue]

    def _scripted(self, request: Callable[[Any], DecodeRequest]) -> Callable[[Any], DecodeRequest]:
        def scripted(window: Any) -> DecodeRequest:
            script = self._scripts.pop(window)
            plain = replace(request(window), exact_tokens=max(1, len(script)))
            return ScriptedRequest(**vars(plain), script=script)

        return scripted

    def _timed(self, add_words: Callable[..., None]) -> Callable[..., None]:
        """Words are where the script has them: what knows nothing finds them anywhere."""

        def timed(window: Any, draft: Any, prompt: Any, alignment: Any) -> None:
            add_words(window, draft, prompt, alignment)
            begin = window.start / SAMPLE_RATE
            words = [word for segment in draft.segments for word in segment.words or []]
            said = self._words[bisect_left(self._middles, begin) :]
            for word, true in zip(words, said, strict=False):
                word.start, word.end = max(0.0, true.start - begin), true.end - begin

        return timed

    def window(self, stretch: Stretch, deliver: Deliver) -> FeedWindow:
        window = super().window(stretch, deliver)
        self._scripts[window] = tuple(self._written(stretch))
        return window

    def _written(self, stretch: Stretch) -> list[int]:
        begin, end = stretch.start / SAMPLE_RATE, (stretch.start + len(stretch.pcm)) / SAMPLE_RATE
        tokens: list[int] = []
        for word in self._words[bisect_left(self._middles, begin) :]:
            if word.middle >= end:
                break
            whole = word.end <= end or stretch.is_final
            tokens += word.tokens if whole else [_FIRST_WORD + round(1000 * end) % 1000]
        return tokens


class ScriptedEngine:
    """An engine that writes for real, and then says what the requests' scripts say."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scripts: dict[Any, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def slots(self) -> int:
        """Windows decoded together."""
        return self._engine.slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._engine.slots = slots

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Any]) -> list[Any]:
        """As the engine's own, and note what will have been written."""
        scripts = [request.script if isinstance(request, ScriptedRequest) else () for request in requests]
        slots = self._engine.admit(requests, encoded)
        self._scripts.update(zip(slots, scripts, strict=True))
        return slots

    def harvest(self) -> list[tuple[Any, DecodeResult]]:
        """What has ended, by the script."""
        return [
            (
                slot,
                replace(
                    result, tokens=list(self._scripts.get(slot, ())), avg_logprob=-0.2, no_speech_prob=0.0, looped=False
                ),
            )
            for slot, result in self._engine.harvest()
        ]

    def release(self, slot: Any) -> None:
        """Free a slot."""
        self._scripts.pop(slot, None)
        self._engine.release(slot)

    def clear(self) -> None:
        """Let go of all caches."""
        self._scripts.clear()
        self._engine.clear()


def with_script(recognizer: Recognizer) -> Recognizer:
    """A recogniser with random weights, whose engine says what scripts say."""
    family = recognizer.family
    family.engine = ScriptedEngine(family.engine)
    return Recognizer(family, recognizer.device)
