"""What a recogniser returns: a transcript of segments of words, in seconds on the recording's own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Word:
    """One word with its place in the recording. ``word`` keeps its leading space, as openai/whisper's does."""

    word: str
    start: float
    end: float
    probability: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form, times rounded to milliseconds."""
        return {
            "word": self.word,
            "start": round(self.start, 3),
            "end": round(self.end, 3),
            "probability": round(self.probability, 4),
        }


@dataclass(slots=True)
class Alternative:
    """A text that a segment may say. ``score``: its log-probability with all that speaks for it, a language model for
    example; ``acoustic``: by the recording alone."""

    text: str
    score: float
    acoustic: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"text": self.text, "score": round(self.score, 4), "acoustic": round(self.acoustic, 4)}


@dataclass(slots=True)
class Segment:
    """A stretch of speech: usually a sentence or a phrase.

    ``seek`` is where the window that produced it begins, in hundredths of a second (openai/whisper's frames).
    ``tokens`` include the timestamp tokens. ``words`` is None unless word timestamps were asked for; ``alternatives``,
    the likeliest first, unless several texts were.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int] = field(default_factory=list)
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: list[Word] | None = None
    speaker: str | None = None
    alternatives: list[Alternative] | None = None

    def to_dict(self) -> dict[str, Any]:
        """openai/whisper's JSON shape; ``words``, ``speaker`` and ``alternatives`` only where they are known.

        Numbers are rounded to what they mean: the last digits of a probability depend on what was decoded beside it.
        """
        out: dict[str, Any] = {
            "id": self.id,
            "seek": self.seek,
            "start": round(self.start, 3),
            "end": round(self.end, 3),
            "text": self.text,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "avg_logprob": round(self.avg_logprob, 4),
            "compression_ratio": round(self.compression_ratio, 4),
            "no_speech_prob": round(self.no_speech_prob, 4),
        }
        if self.words is not None:
            out["words"] = [word.to_dict() for word in self.words]
        if self.speaker is not None:
            out["speaker"] = self.speaker
        if self.alternatives is not None:
            out["alternatives"] = [alternative.to_dict() for alternative in self.alternatives]
        return out


@dataclass(slots=True)
class Transcript:
    """The words of one recording, or the reason why there are none.

    ``error`` is one sentence when the recording could not be transcribed at all. ``warnings`` say what was lost
    of one that could be (truncated or damaged audio, channels that cancel each other). ``skipped`` lists the
    regions, in seconds, in which no speech was found. ``timings`` holds wall-clock seconds by stage.
    """

    text: str = ""
    language: str | None = None
    language_probability: float | None = None
    duration: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None
    path: str | None = None
    model: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    skipped: list[tuple[float, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    damaged: bool = False
    """True when part of the input was lost: what could be read is here, and the exit code is 1."""
    drafted: int = 0
    """Tokens that a draft model wrote in advance; 0 without one."""
    agreed: int = 0
    """Those of them that the model itself would have written, and that stand in the text."""

    def to_dict(self) -> dict[str, Any]:
        """JSON form: openai/whisper's shape plus ``duration``, ``model``, ``skipped`` and ``warnings``."""
        out: dict[str, Any] = {
            "text": self.text,
            "segments": [segment.to_dict() for segment in self.segments],
            "language": self.language,
            "language_probability": _rounded(self.language_probability),
            "duration": round(self.duration, 3),
            "model": self.model,
            "skipped": [[round(start, 3), round(end, 3)] for start, end in self.skipped],
            "warnings": self.warnings,
        }
        if self.error is not None:
            out["error"] = self.error
        if self.drafted:
            out["draft"] = {"tokens": self.drafted, "accepted": self.agreed, "acceptance_rate": self.acceptance_rate}
        return out

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that stand in the text; None without a draft model."""
        return round(self.agreed / self.drafted, 4) if self.drafted else None


def _rounded(probability: float | None) -> float | None:
    return None if probability is None else round(probability, 4)
