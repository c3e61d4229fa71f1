"""What ``session.update`` says, in OpenAI's present shape and in the one of its beta, and what we say back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from stapes.errors import UsageError
from stapes.options import TranscribeOptions, TurnOptions
from stapes.serving.failures import ApiError
from stapes.serving.served import Served

_RATES = (24_000, 16_000)
_FORMATS = {"audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}
_NAMES = {ours: theirs for theirs, ours in _FORMATS.items()}
_EAGERNESS = {"low": 1000, "medium": 600, "auto": 600, "high": 300}
"""``semantic_vad`` is taken for silence of so many milliseconds: whether a sentence is complete is not looked at."""

_MOST = 1e9
_LOGPROBS = "item.input_audio_transcription.logprobs"
_BYTES_PER_SAMPLE = {"pcm16": 2, "g711_ulaw": 1, "g711_alaw": 1}


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """How a session is to listen."""

    model: str
    """As the client calls it."""
    format: str = "pcm16"
    rate: int = 24_000
    language: str | None = None
    prompt: str | None = None
    keywords: tuple[str, ...] = ()
    turns: TurnOptions = field(default_factory=TurnOptions)
    logprobs: bool = False
    is_beta: bool = False
    """The client speaks the old shape."""

    @property
    def bytes_per_second(self) -> int:
        """Of the sound that is sent."""
        return self.rate * _BYTES_PER_SAMPLE[self.format]

    @property
    def options(self) -> dict[str, Any]:
        """For the recogniser. Raises UsageError."""
        options: dict[str, Any] = {"language": self.language}
        if self.prompt:
            options["initial_prompt"] = self.prompt
        if self.keywords:
            options["hotwords"] = ", ".join(self.keywords)
        TranscribeOptions(**options)
        return options

    @property
    def turn_options(self) -> dict[str, Any]:
        """As the engine process gets them."""
        turns = self.turns
        return {
            "threshold": turns.threshold,
            "prefix_padding_ms": turns.prefix_padding_ms,
            "silence_duration_ms": turns.silence_duration_ms,
            "manual": turns.manual,
        }

    def needs_anew(self, other: LiveSettings) -> bool:
        """Whether sound that has been heard with these would have had to be heard otherwise with the others."""
        same = {"turns": self.turns, "logprobs": self.logprobs, "is_beta": self.is_beta}
        return replace(other, **same) != self

    def updated(self, session: Any, served: Served, *, is_beta: bool) -> LiveSettings:
        """These with what an update changes. Raises ApiError that names the field."""
        if not isinstance(session, dict):
            raise _wrong("session", "must be an object")
        try:
            changed = self._beta(session, served) if is_beta else self._present(session, served)
            _ = changed.options
        except UsageError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        if (include := session.get("include")) is not None:
            if not isinstance(include, list) or any(each != _LOGPROBS for each in include):
                raise _wrong("session.include", f"may hold {_LOGPROBS}")
            changed = replace(changed, logprobs=_LOGPROBS in include)
        return changed

    def _present(self, session: dict[str, Any], served: Served) -> LiveSettings:
        if session.get("type", "transcription") != "transcription":
            raise _wrong("session.type", "must be transcription: this server does not talk")
        given = _object(_object(session, "audio", "session"), "input", "session.audio")
        changed = self
        if (format := given.get("format")) is not None:
            changed = changed._with_format(format)
        changed = changed._with_transcription(given.get("transcription"), "session.audio.input", served)
        if "turn_detection" in given:
            place = "session.audio.input.turn_detection"
            changed = replace(changed, turns=_turns(given["turn_detection"], changed.turns, place))
        return replace(changed, is_beta=False)

    def _beta(self, session: dict[str, Any], served: Served) -> LiveSettings:
        changed = self
        if (format := session.get("input_audio_format")) is not None:
            if not isinstance(format, str) or format not in _NAMES:
                raise _wrong("session.input_audio_format", f"must be one of {', '.join(_NAMES)}")
            changed = replace(changed, format=format, rate=24_000 if format == "pcm16" else 8_000)
        changed = changed._with_transcription(session.get("input_audio_transcription"), "session", served)
        if "turn_detection" in session:
            changed = replace(changed, turns=_turns(session["turn_detection"], changed.turns, "session.turn_detection"))
        return replace(changed, is_beta=True)

    def _with_format(self, format: Any) -> LiveSettings:
        place = "session.audio.input.format"
        name = format.get("type") if isinstance(format, dict) else None
        if not isinstance(name, str) or name not in _FORMATS:
            raise _wrong(f"{place}.type", f"must be one of {', '.join(_FORMATS)}")
        if name != "audio/pcm":
            return replace(self, format=_FORMATS[name], rate=8_000)
        rate = format.get("rate", _RATES[0])
        if rate not in _RATES:
            raise _wrong(f"{place}.rate", "must be 24000, or 16000")
        return replace(self, format="pcm16", rate=rate)

    def _with_transcription(self, given: Any, place: str, served: Served) -> LiveSettings:
        if given is None:
            return self
        if not isinstance(given, dict):
            raise _wrong(f"{place}.transcription", "must be an object")
        changed = self
        for name in ("model", "language", "prompt"):
            value = given.get(name)
            if value is None:
                continue
            if not isinstance(value, str) or len(value) > 4_000:
                raise _wrong(f"{place}.transcription.{name}", "must be a text of reasonable length")
            if name == "model":
                served.resolve(value)
            changed = replace(changed, **{name: value or None})
        languages, keywords = given.get("languages"), given.get("keywords")
        if languages is not None:
            if not _is_texts(languages):
                raise _wrong(f"{place}.transcription.languages", "must be a list of languages")
            if len(languages) == 1 and given.get("language") is None:
                changed = replace(changed, language=languages[0])
        if keywords is not None:
            if not _is_texts(keywords):
                raise _wrong(f"{place}.transcription.keywords", "must be a list of at most 100 words or phrases")
            changed = replace(changed, keywords=tuple(keywords))
        return changed

    def describe(self, session_id: str, expires_at: int, audio_ms: int) -> dict[str, Any]:
        """The session object, in the shape that the client speaks; ``audio_ms`` is our extension."""
        transcription: dict[str, Any] = {"model": self.model, "language": self.language, "prompt": self.prompt or ""}
        detection = None if self.turns.manual else {"type": "server_vad", **self.turn_options}
        if detection is not None:
            del detection["manual"]
        shared = {
            "id": session_id,
            "expires_at": expires_at,
            "include": [_LOGPROBS] if self.logprobs else None,
            "audio_ms": audio_ms,
        }
        if self.is_beta:
            return {
                **shared,
                "object": "realtime.transcription_session",
                "input_audio_format": self.format,
                "input_audio_transcription": transcription,
                "input_audio_noise_reduction": None,
                "turn_detection": detection,
            }
        format: dict[str, Any] = {"type": _NAMES[self.format]}
        if self.format == "pcm16":
            format["rate"] = self.rate
        if self.keywords:
            transcription["keywords"] = list(self.keywords)
        return {
            **shared,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": format,
                    "noise_reduction": None,
                    "transcription": transcription,
                    "turn_detection": detection,
                }
            },
        }


def _turns(given: Any, now: TurnOptions, place: str) -> TurnOptions:
    if given is None:
        return replace(now, manual=True)
    kind = given.get("type", "server_vad") if isinstance(given, dict) else None
    if kind == "semantic_vad":
        eagerness = given.get("eagerness", "auto")
        if not isinstance(eagerness, str) or eagerness not in _EAGERNESS:
            raise _wrong(f"{place}.eagerness", f"must be one of {', '.join(_EAGERNESS)}")
        return TurnOptions(silence_duration_ms=_EAGERNESS[eagerness])
    if kind != "server_vad":
        raise _wrong(f"{place}.type", "must be server_vad or semantic_vad, or turn_detection null")
    changes: dict[str, Any] = {"manual": False}
    for name in ("threshold", "prefix_padding_ms", "silence_duration_ms"):
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
            raise _wrong(f"{place}.{name}", "must be a number")
        changes[name] = value if name == "threshold" else round(value)
    return replace(now, **changes)


def _object(given: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(f"{place}.{name}", "must be an object")
    return value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 100 and all(isinstance(x, str) and len(x) <= 200 for x in value)


def _wrong(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param} {reason}", code="invalid_value", param=param)
