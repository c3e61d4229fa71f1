"""Write the times of words for phoneticians and scorers: Praat's TextGrid and NIST's ctm. Pure functions of text.

Both are written for a transcript whose segments have words; what has none is left out of the words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from stapes.errors import UsageError
from stapes.text.files import whole_file
from stapes.text.subtitles import SubtitleOptions, render
from stapes.transcript import Segment, Transcript, Word

AlignmentFormat = Literal["json", "textgrid", "srt", "vtt", "ctm"]
ALIGNMENT_FORMATS: tuple[AlignmentFormat, ...] = get_args(AlignmentFormat)
EXTENSIONS: dict[AlignmentFormat, str] = {**{name: name for name in ALIGNMENT_FORMATS}, "textgrid": "TextGrid"}
"""What the name of a file ends in; Praat's users write it so."""


def render_alignment(transcript: Transcript, format: AlignmentFormat, options: SubtitleOptions | None = None) -> str:
    """The whole content of a file of this format. Raises UsageError: the format is not one of these."""
    if format == "textgrid":
        return textgrid(transcript)
    if format == "ctm":
        return ctm(transcript)
    if format not in ALIGNMENT_FORMATS:
        raise UsageError(f"format {format!r} is unknown: say one of {', '.join(ALIGNMENT_FORMATS)}")
    return render(transcript, format, options)


def write_alignment(
    transcript: Transcript,
    path: str | os.PathLike[str],
    format: AlignmentFormat,
    options: SubtitleOptions | None = None,
) -> None:
    """Render into a file (UTF-8) that is whole or absent. Raises OutputError: it could not be written."""
    content = render_alignment(transcript, format, options).encode("utf-8", "replace")
    with whole_file(path) as file:
        file.write(content)


class _Interval(NamedTuple):
    """Text from ``start`` to ``end``, in milliseconds."""

    start: int
    end: int
    text: str


def textgrid(transcript: Transcript) -> str:
    """A TextGrid in Praat's long form, with a tier of words and one of segments for each speaker.

    Praat's intervals fill the whole recording, and each has a length: gaps become empty ones, one that overlaps the
    next ends where that begins, and a word without a length gets a millisecond.
    """
    tiers: dict[str, list[_Interval]] = {}
    for speaker in _speakers(transcript) or [None]:
        prefix = f"{speaker} - " if speaker else ""
        segments = [segment for segment in transcript.segments if segment.speaker == speaker]
        words = [(word.start, word.end, word.word) for segment in segments for word in segment.words or []]
        tiers[f"{prefix}words"] = _apart(words)
        tiers[f"{prefix}segments"] = _apart([(segment.start, segment.end, segment.text) for segment in segments])
    duration = max([1, round(1000 * transcript.duration), *(tier[-1].end for tier in tiers.values() if tier)])

    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", f"xmax = {duration / 1000:.3f}"]
    lines += ["tiers? <exists>", f"size = {len(tiers)}", "item []:"]
    for number, (name, intervals) in enumerate(tiers.items(), 1):
        filled = _filled(intervals, duration)
        lines += [f"    item [{number}]:", '        class = "IntervalTier"', f"        name = {_quoted(name)}"]
        lines += ["        xmin = 0", f"        xmax = {duration / 1000:.3f}"]
        lines += [f"        intervals: size = {len(filled)}"]
        for place, interval in enumerate(filled, 1):
            lines += [f"        intervals [{place}]:", f"            xmin = {interval.start / 1000:.3f}"]
            lines += [f"            xmax = {interval.end / 1000:.3f}", f"            text = {_quoted(interval.text)}"]
    return "\n".join(lines) + "\n"


def _speakers(transcript: Transcript) -> list[str | None]:
    return list(dict.fromkeys(segment.speaker for segment in transcript.segments))


def _apart(texts: Sequence[tuple[float, float, str]]) -> list[_Interval]:
    """Intervals by time, none of which overlaps another or is empty."""
    out: list[_Interval] = []
    for start, end, text in sorted(texts, key=lambda each: each[0]):
        begin = max(0, round(1000 * start))
        if out and out[-1].start < begin < out[-1].end:
            out[-1] = out[-1]._replace(end=begin)
        if out:
            begin = max(begin, out[-1].end)
        out.append(_Interval(begin, max(begin + 1, round(1000 * end)), " ".join(text.split())))
    return out


def _filled(intervals: Sequence[_Interval], duration: int) -> list[_Interval]:
    """The same with empty intervals in the gaps, from 0 to ``duration``."""
    out: list[_Interval] = []
    place = 0
    for interval in [*intervals, _Interval(duration, duration, "")]:
        if interval.start > place:
            out.append(_Interval(place, interval.start, ""))
        if interval.end > interval.start:
            out.append(interval)
        place = interval.end
    return out


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def ctm(transcript: Transcript, recording: str | None = None) -> str:
    """A line for each word: recording, channel, start, duration, word, confidence (NIST sclite's ctm, sorted by time).

    ``recording`` names it; None: the file's name without its extension. Each speaker has a channel: 1, 2, …
    """
    name = recording if recording is not None else Path(transcript.path or "recording").stem
    name = re.sub(r"\s+", "_", name.strip()) or "recording"
    lines: list[str] = []
    for channel, speaker in enumerate(_speakers(transcript), 1):
        for word in _words(transcript.segments, speaker):
            text = re.sub(r"\s+", "_", word.word.strip())
            start, length = round(word.start, 3), round(word.end, 3) - round(word.start, 3)
            lines.append(f"{name} {channel} {start:.3f} {max(0.0, length):.3f} {text} {word.probability:.4f}\n")
    return "".join(lines)


def _words(segments: Sequence[Segment], speaker: str | None) -> list[Word]:
    words = [word for segment in segments if segment.speaker == speaker for word in segment.words or []]
    return sorted((word for word in words if word.word.strip()), key=lambda word: word.start)
