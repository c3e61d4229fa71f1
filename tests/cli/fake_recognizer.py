"""A recogniser that needs no model: what the command line does with results does not depend on how they came about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stapes.options import TranscribeOptions
from stapes.transcript import Segment, Transcript


def hello(path: str, text: str = "Hello there.") -> Transcript:
    """A transcript of one segment."""
    segments = [Segment(id=0, seek=0, start=0.0, end=7.0, text=f" {text}")]
    return Transcript(text=f" {text}", language="en", duration=7.0, segments=segments, path=path, model="fake")


@dataclass
class FakeRecognizer:
    """Answers every path with ``answers[path]`` (a transcript, or an exception to raise), in reverse order."""

    answers: dict[str, Transcript | BaseException] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    options: TranscribeOptions | None = None
    closed: int = 0
    on_load: Callable[[], None] = lambda: None

    def load(self, model: str | None, **settings: Any) -> FakeRecognizer:
        self.loaded = {"model": model, **settings}
        self.on_load()
        return self

    def transcribe_many(self, paths: Sequence[str], options: TranscribeOptions, progress: Any) -> Iterator[Transcript]:
        self.paths = list(paths)
        self.options = options
        for _ in self.paths:
            progress.add_total(7.0)
        for path in reversed(self.paths):
            answer = self.answers.get(path) or hello(path)
            if isinstance(answer, BaseException):
                raise answer
            progress.advance(7.0)
            yield answer

    def check_language(self, language: str) -> None: ...

    def close(self) -> None:
        self.closed += 1
