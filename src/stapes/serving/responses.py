"""Transcripts in OpenAI's shapes: json, text, srt, vtt, verbose_json, diarized_json, and events of a stream.

They are made from what the engine process sends: a transcript and segments as `Transcript.to_dict` and
`Segment.to_dict` write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response

from stapes.serving.parameters import Wanted
from stapes.text.subtitles import OutputFormat, finite, render
from stapes.text.tokenizers import LANGUAGES
from stapes.transcript import Segment, Transcript, Word

_SEGMENT_FIELDS = (
    "id",
    "seek",
    "start",
    "end",
    "text",
    "tokens",
    "temperature",
    "avg_logprob",
    "compression_ratio",
    "no_speech_prob",
)


def answer(transcript: dict[str, Any], wanted: Wanted) -> Response:
    """The whole response to a request that is not streamed."""
    if wanted.format == "text":
        return PlainTextResponse(transcript["text"] + "\n")
    if wanted.format in ("srt", "vtt"):
        kind: OutputFormat = "srt" if wanted.format == "srt" else "vtt"
        return PlainTextResponse(render(_rebuilt(transcript), kind, wanted.subtitles), media_type=_MEDIA[kind])
    make = {"json": _json, "verbose_json": _verbose, "diarized_json": _diarized}[wanted.format]
    return JSONResponse(finite(make(transcript, wanted)))


_MEDIA = {"srt": "application/x-subrip", "vtt": "text/vtt"}


def _json(transcript: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    out: dict[str, Any] = {"text": transcript["text"], "usage": _usage(transcript)}
    if transcript["language"] is not None:
        out["languages"] = [{"code": transcript["language"]}]
    if wanted.logprobs:
        out["logprobs"] = logprobs(transcript["segments"])
    return out | _remarks(transcript, wanted)


def _verbose(transcript: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    segments = transcript["segments"]
    out: dict[str, Any] = {
        "task": wanted.task,
        "language": "english" if wanted.task == "translate" else _language_name(transcript["language"]),
        "duration": transcript["duration"],
        "text": transcript["text"],
        "usage": _usage(transcript),
    }
    if wanted.granularities != {"word"}:
        kept = (*_SEGMENT_FIELDS, "speaker", "alternatives")
        out["segments"] = [{key: segment[key] for key in kept if key in segment} for segment in segments]
    if wanted.options.word_timestamps and (not wanted.logprobs or "word" in wanted.granularities):
        out["words"] = [_word(word) for segment in segments for word in segment.get("words", ())]
    if wanted.logprobs:
        out["logprobs"] = logprobs(segments)
    if transcript["skipped"]:
        out["skipped"] = transcript["skipped"]
    return out | _remarks(transcript, wanted)


def _diarized(transcript: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    return {
        "task": "transcribe",
        "duration": transcript["duration"],
        "text": plain_text(transcript["segments"]),
        "segments": [segment_event(segment, wanted) for segment in transcript["segments"]],
        "usage": _usage(transcript),
    } | _remarks(transcript, wanted)


def plain_text(segments: Iterable[dict[str, Any]]) -> str:
    """All that is said, without who said it."""
    return "".join(segment["text"] for segment in segments).strip()


def delta_event(segment: dict[str, Any], wanted: Wanted, *, first: bool) -> dict[str, Any]:
    """A segment's text as the next piece of the whole."""
    text = segment["text"]
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": text.lstrip() if first else text}
    if wanted.logprobs:
        event["logprobs"] = logprobs([segment])
    if wanted.format == "diarized_json":
        event["segment_id"] = _segment_id(segment)
    return event


def segment_event(segment: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """A segment with its speaker; the same in a stream and in diarized_json. With verbose_json all that is known."""
    further = segment if wanted.format == "verbose_json" else {}
    return {
        **further,
        "type": "transcript.text.segment",
        "id": _segment_id(segment),
        "start": segment["start"],
        "end": segment["end"],
        "speaker": _letter(segment.get("speaker")),
        "text": segment["text"].strip(),
    }


def done_event(transcript: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """The end of a stream: the whole text."""
    separate = wanted.format == "diarized_json"
    text = plain_text(transcript["segments"]) if separate else transcript["text"]
    event: dict[str, Any] = {"type": "transcript.text.done", "text": text}
    if transcript["language"] is not None:
        event["languages"] = [{"code": transcript["language"]}]
    if wanted.logprobs:
        event["logprobs"] = logprobs(transcript["segments"])
    if wanted.format == "verbose_json":
        known = ("duration", "language_probability", "model", "segments", "skipped")
        event |= {name: transcript[name] for name in known}
    return event | _remarks(transcript, wanted)


def logprobs(segments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities, of words: the logarithm of each word's probability, the mean of its tokens'."""
    return [
        {
            "token": word["word"],
            "bytes": list(word["word"].encode()),
            "logprob": round(math.log(max(word["probability"], 1e-6)), 4),
        }
        for segment in segments
        for word in segment.get("words", ())
    ]


def _usage(transcript: dict[str, Any]) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript["duration"])}


def _remarks(transcript: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """What was lost of the recording, or not followed of the request: nothing is passed over in silence."""
    warnings = [*wanted.warnings, *transcript["warnings"]]
    return {"warnings": warnings} if warnings else {}


def _word(word: dict[str, Any]) -> dict[str, Any]:
    return {**word, "word": word["word"].strip()}


def _language_name(code: str | None) -> str:
    """As OpenAI says it: the English name, in small letters."""
    return "" if code is None else LANGUAGES.get(code, code)


def _segment_id(segment: dict[str, Any]) -> str:
    return f"seg_{segment['id']:03d}"


def _letter(speaker: str | None) -> str:
    """Speaker 1 is A, as OpenAI calls them; beyond Z it is a number again."""
    if speaker is None:
        return "A"
    number = int(speaker.rpartition(" ")[2])
    return chr(ord("A") + number - 1) if number <= 26 else str(number)


def _rebuilt(transcript: dict[str, Any]) -> Transcript:
    segments = []
    for values in transcript["segments"]:
        words = [Word(**word) for word in values["words"]] if "words" in values else None
        kept = {key: values[key] for key in (*_SEGMENT_FIELDS, "speaker") if key in values}
        segments.append(Segment(**kept, words=words))
    return Transcript(transcript["text"], transcript["language"], duration=transcript["duration"], segments=segments)
