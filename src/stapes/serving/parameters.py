"""The fields of a transcription request: OpenAI's, and our own options under their own names.

Every field is either followed or refused with the reason; what is followed in part is said in ``warnings``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stapes.errors import StapesError, UsageError
from stapes.options import Task, TranscribeOptions
from stapes.serving.failures import ApiError
from stapes.serving.served import Served
from stapes.text.subtitles import SubtitleOptions

Format = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]

_OPTIONS = {each.name for each in fields(TranscribeOptions)}
_NOT_OURS_TO_GIVE = {
    "lm": "it would be a file of the server",
    "task": "the address says it: /v1/audio/transcriptions or /v1/audio/translations",
    "batch_size": "the server decides how many windows are decoded together",
}
_LAYOUT = {each.name for each in fields(SubtitleOptions)}
_TYPES = get_type_hints(TranscribeOptions) | get_type_hints(SubtitleOptions)
_INCLUDES, _GRANULARITIES = ("logprobs",), ("word", "segment")
_OF_SPEAKERS = {"known_speaker_names", "known_speaker_references"}


@dataclass
class Wanted:
    """What a request asks for."""

    model: str
    options: TranscribeOptions
    subtitles: SubtitleOptions
    format: Format
    granularities: frozenset[str]
    logprobs: bool
    stream: bool
    warnings: list[str] = field(default_factory=list)

    @property
    def task(self) -> Task:
        """transcribe or translate."""
        return self.options.task


def read_parameters(sent: dict[str, list[str]], task: Task, served: Served) -> Wanted:
    """Make sense of a form. Raises ApiError 400 or 404 that names the field and the remedy."""
    values = _Values(sent)
    model = served.resolve(values.text("model") or served.default)
    format = _one_of("response_format", values.text("response_format") or "json", get_args(Format))
    granularities = values.several("timestamp_granularities", _GRANULARITIES)
    includes = values.several("include", _INCLUDES)
    stream = values.flag("stream")
    if granularities and format != "verbose_json":
        raise _wrong("timestamp_granularities", "works with response_format=verbose_json alone")
    if includes and format not in ("json", "verbose_json"):
        raise _wrong("include", "works with response_format json or verbose_json: other formats have no place for it")
    if stream and format in ("srt", "vtt"):
        raise _wrong("stream", f"does not work with response_format={format}: subtitles are laid out at the end")
    if task == "translate" and format == "diarized_json":
        raise _wrong("response_format", "diarized_json is for transcriptions")
    warnings: list[str] = []
    options: dict[str, Any] = {"task": task}
    options |= _chunking(values, warnings)
    options |= _hints(values, warnings)
    further = _further(values)
    layout = {name: further.pop(name) for name in _LAYOUT & further.keys()}
    options |= further
    if format == "diarized_json":
        if options.setdefault("channels", "separate") != "separate":
            raise _wrong("channels", "must be separate for diarized_json: speakers are told apart by channel")
        if includes:
            raise _wrong("include", "does not work with diarized_json")
    try:
        subtitles = SubtitleOptions(**layout)
        if "word" in granularities or includes or subtitles.needs_words:
            options["word_timestamps"] = True
        checked = TranscribeOptions(**options)
    except UsageError as error:
        raise from_options(error) from None
    kept = frozenset(granularities)
    return Wanted(model, checked, subtitles, format, kept, bool(includes), stream, warnings)


def from_options(error: StapesError) -> ApiError:
    """An error about an option, in the words of HTTP: fields instead of flags."""
    return as_fields(error.http_status, str(error))


def as_fields(status: int, message: str) -> ApiError:
    """The same for a message whose status is known."""
    flags = re.findall(r"--([a-z][a-z-]+)", message)
    for flag in flags:
        message = message.replace(f"--{flag}", flag.replace("-", "_"))
    param = flags[0].replace("-", "_") if flags else "language" if message.startswith("Language") else None
    return ApiError(status, message, param=param)


class _Values:
    """The fields of a form: each is taken once, and what is left is unknown."""

    def __init__(self, sent: dict[str, list[str]]) -> None:
        self.left: dict[str, list[str]] = {}
        self.nested: dict[str, dict[str, str]] = {}
        for name, values in sent.items():
            base, _, rest = name.partition("[")
            key = rest.removesuffix("]")
            if not key or key.isdecimal():
                self.left.setdefault(base, []).extend(values)
            else:
                self.nested.setdefault(base, {})[key] = values[-1]
        if (unknown := self.nested.keys() - {"chunking_strategy"}) and (name := min(unknown)):
            raise _wrong(name, "has no parts")

    def text(self, name: str) -> str | None:
        """A field with one value; None where it is absent or empty."""
        values = self.left.pop(name, [])
        if len(values) > 1:
            raise _wrong(name, "was given more than once")
        return values[0].strip() or None if values else None

    def flag(self, name: str) -> bool:
        """A field that is true or false."""
        value = self.text(name)
        return value is not None and _as_bool(name, value)

    def many(self, name: str) -> list[str]:
        """A field with several values: repeated, or separated by commas."""
        values = self.left.pop(name, [])
        return [part.strip() for value in values for part in value.split(",") if part.strip()]

    def several(self, name: str, allowed: tuple[str, ...]) -> list[str]:
        """The same, of which each is one of a few words."""
        return [_one_of(name, value, allowed) for value in self.many(name)]


def _chunking(values: _Values, warnings: list[str]) -> dict[str, Any]:
    """``chunking_strategy``: windows are cut in silences whatever it says; its numbers are checked and not used."""
    name = "chunking_strategy"
    strategy: Any = values.nested.pop(name, None)
    text = values.text(name)
    if text is not None and text != "auto":
        try:
            strategy = json.loads(text)
        except ValueError:
            strategy = None
        if not isinstance(strategy, dict):
            raise _wrong(name, 'must be "auto" or an object of type server_vad')
    if strategy is None:
        return {}
    _one_of(f"{name}[type]", str(strategy.pop("type", None)), ("server_vad",))
    numbers = {"prefix_padding_ms": 60_000, "silence_duration_ms": 60_000, "threshold": 1}
    for key, most in numbers.items():
        if key in strategy:
            _number(f"{name}[{key}]", strategy.pop(key), 0, most)
            warnings.append(f"chunking_strategy: {key} was not used; windows are cut in silences")
    if strategy:
        raise _wrong(f"{name}[{min(strategy)}]", "is not known")
    return {"vad": True}


def _hints(values: _Values, warnings: list[str]) -> dict[str, Any]:
    """What OpenAI calls otherwise than we: prompt, keywords, languages."""
    options: dict[str, Any] = {}
    for name in sorted(_OF_SPEAKERS & values.left.keys()):
        raise _wrong(name, "cannot be followed: this server tells speakers apart by channel alone")
    if (prompt := values.text("prompt")) is not None:
        options["initial_prompt"] = prompt
    keywords = [word.strip() for word in values.left.pop("keywords", []) if word.strip()]
    if keywords:
        options["hotwords"] = ", ".join(keywords)
    languages = values.many("languages")
    if len(languages) == 1:
        options["language"] = languages[0]
    elif languages:
        warnings.append("languages: the language was detected among all that the model knows")
    return options


def _further(values: _Values) -> dict[str, Any]:
    """Our own options; anything else is unknown."""
    options: dict[str, Any] = {}
    for name in list(values.left):
        if name in _NOT_OURS_TO_GIVE:
            raise _wrong(name, f"cannot be set by a request: {_NOT_OURS_TO_GIVE[name]}")
        if name not in _OPTIONS | _LAYOUT:
            raise ApiError(400, f"There is no field {name[:60]!r}", code="unknown_parameter", param=name[:60])
        text = values.text(name)
        if text is not None:
            options[name] = _as_type(name, text)
    return options


def _as_type(name: str, text: str) -> Any:
    kind = _TYPES[name]
    kinds = set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if bool in kinds:
        return _as_bool(name, text)
    if int in kinds:
        if not re.fullmatch(r"[+-]?\d{1,19}", text):
            raise _wrong(name, "must be a whole number")
        return int(text)
    if float in kinds:
        return _number(name, text)
    return text


def _as_bool(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise _wrong(name, "must be true or false")
    return text.lower() in ("true", "1")


def _number(name: str, value: Any, low: float = -1e300, high: float = 1e300) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _wrong(name, "must be a number") from None
    if not low <= number <= high:  # false for NaN
        raise _wrong(name, f"must be a number between {low:g} and {high:g}")
    return number


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise _wrong(name, f"is {value[:40]!r}: say {' or '.join(allowed)}")
    return value


def _wrong(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} {why}", code="invalid_value", param=name)
