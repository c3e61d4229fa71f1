"""A system that needs no model, and corpora that need no sound: scoring does not depend on how texts came about."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stapes.errors import AudioError, StapesError
from stapes.evaluation.corpora import Corpus, Row
from stapes.evaluation.results import ModelFacts

WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "he")


@dataclass
class FakePeer:
    """Answers each path from ``answers``; an Exception there is a failure. Results come in an order of its own."""

    answers: dict[str, str | StapesError]
    system: str = "fake"
    facts: ModelFacts = field(default_factory=lambda: ModelFacts(name="fake", precision="fp32", device="CPU"))
    gpu: int | None = None
    calls: list[str | None] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    window: int = 4

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        self.calls.append(language)
        waiting: list[str] = []
        for path in paths:
            self.heard.append(path)
            waiting.append(path)
            if len(waiting) >= self.window:
                yield self._answer(waiting.pop())
        while waiting:
            yield self._answer(waiting.pop())

    def _answer(self, path: str) -> tuple[str, str | StapesError]:
        return path, self.answers[path]

    def close(self) -> None: ...


def rows(count: int, *, speakers: int = 5, languages: tuple[str, ...] = ("en",), seed: int = 0) -> list[Row]:
    """Recordings of random words; every seventh has none."""
    random_ = random.Random(seed)
    return [
        Row(
            id=f"utterance-{i}",
            audio=f"/nowhere/{i}.wav",
            text="" if i % 7 == 3 else " ".join(random_.choices(WORDS, k=random_.randint(1, 12))),
            duration=round(random_.uniform(0.5, 40.0), 2),
            speaker=f"speaker-{i % speakers}",
            language=languages[i % len(languages)],
        )
        for i in range(count)
    ]


def damage(text: str, random_: random.Random, rate: float = 0.2) -> str:
    """The words with some deleted, replaced or added."""
    out: list[str] = []
    for word in [*text.split(), ""]:
        draw = random_.random()
        if draw < rate / 3:
            continue
        out.append(random_.choice(WORDS) if draw < 2 * rate / 3 else word)
        if draw > 1 - rate / 3:
            out.append(random_.choice(WORDS))
    return " ".join(filter(None, out))


def answers_for(corpus: Corpus, *, rate: float = 0.2, failing: tuple[int, ...] = ()) -> dict[str, str | StapesError]:
    """A damaged text for every row; an error for those of these places."""
    random_ = random.Random(1)
    answers: dict[str, str | StapesError] = {row.audio: damage(row.text, random_, rate) for row in corpus.rows}
    for i in failing:
        answers[corpus.rows[i].audio] = AudioError(f"{corpus.rows[i].audio} is not there")
    return answers
