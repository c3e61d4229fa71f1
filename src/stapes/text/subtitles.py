"""Write transcripts as txt, srt, vtt, tsv and json: openai/whisper's formats and line rules.

``render`` is pure; ``write`` puts its result into a file that is either whole or absent. Where a segment has no word
times, the line rules still hold: lines break at spaces (between characters in scripts that write none), and a cue
that must be split shares its segment's time among its parts by their length.

Text is kept in logical order and never gains a space, so right-to-left and East Asian scripts come out as they
were recognised. Widths are counted in characters.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stapes.errors import UsageError
from stapes.text.files import whole_file
from stapes.transcript import Segment, Transcript

OutputFormat = Literal["txt", "srt", "vtt", "tsv", "json"]
FORMATS: tuple[OutputFormat, ...] = get_args(OutputFormat)

# openai/whisper: a pause longer than this ends a cue where cues may cross segments.
LONG_PAUSE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SubtitleOptions:
    """How srt and vtt cues are laid out. The other formats do not depend on it."""

    max_line_width: int | None = None
    """Most characters in a subtitle line; longer text wraps onto further lines."""

    max_line_count: int | None = None
    """Most lines in a subtitle; needs --max-line-width. Turns word timestamps on."""

    max_words_per_line: int | None = None
    """Most words shown at a time. Turns word timestamps on."""

    highlight_words: bool = False
    """Underline each word while it is spoken. Turns word timestamps on."""

    def __post_init__(self) -> None:
        for name in ("max_line_width", "max_line_count", "max_words_per_line"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
        if self.max_line_count is not None and self.max_line_width is None:
            raise UsageError("--max-line-count needs --max-line-width")

    @property
    def needs_words(self) -> bool:
        """Whether these rules are only exact with word timestamps."""
        return self.highlight_words or self.max_line_count is not None or self.max_words_per_line is not None


@dataclass(frozen=True, slots=True)
class Cue:
    """Text on the screen from ``start`` to ``end`` seconds. ``text`` may hold line breaks and ``<u>`` marks."""

    start: float
    end: float
    text: str
    speaker: str | None = None


@dataclass(frozen=True, slots=True)
class _Unit:
    """What a line is never broken within: a word, or a character where words are not marked."""

    text: str
    start: float
    end: float
    exact: bool
    """The times were measured, not shared out by length."""


def render(transcript: Transcript, format: OutputFormat, options: SubtitleOptions | None = None) -> str:
    """The whole content of a file of this format, ending in a line break unless it is empty.

    Raises:
        UsageError: the format is not one of ``FORMATS``.
    """
    writer = _WRITERS.get(format)
    if writer is None:
        raise UsageError(f"output format {format!r} is unknown: say one of {', '.join(FORMATS)}")
    return writer(transcript, options or SubtitleOptions())


def write(
    transcript: Transcript, path: str | os.PathLike[str], format: OutputFormat, options: SubtitleOptions | None = None
) -> None:
    """Render into a file (UTF-8). It appears under its name only when it is whole; missing folders are made.

    Raises:
        OutputError: it could not be written (no permission, disk full, a folder is a file).
    """
    content = render(transcript, format, options).encode("utf-8", "replace")
    with whole_file(path) as file:
        file.write(content)


def format_timestamp(seconds: float, *, always_include_hours: bool = False, decimal_marker: str = ".") -> str:
    """``[HH:]MM:SS.mmm``, as openai/whisper writes it. Negative times count as 0."""
    milliseconds = max(0, round(seconds * 1000.0))
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    hours_part = f"{hours:02d}:" if always_include_hours or hours else ""
    return f"{hours_part}{minutes:02d}:{milliseconds // 1000:02d}{decimal_marker}{milliseconds % 1000:03d}"


def plain_line(segment: Segment) -> str:
    """A segment's text on one line, after its speaker where there is one; empty for a segment without text."""
    text = _one_line(segment.text).strip()
    return f"[{segment.speaker}] {text}" if text and segment.speaker else text


def cues(
    transcript: Transcript,
    options: SubtitleOptions,
    *,
    label: Callable[[str], str] = lambda speaker: "",
    escape: Callable[[str], str] = lambda text: text,
) -> list[Cue]:
    """Lay a transcript out as subtitles; the rules are those of openai/whisper's ``SubtitlesWriter``.

    Without both a line width and a line count, a cue never crosses a segment, and ``max_words_per_line`` ends
    cues; with both, cues are filled up across segments until a long pause or another speaker, and it ends lines.
    ``label`` is the text that will stand before the first line of a speaker's cue, so that its width is counted;
    ``escape`` rewrites every word for the format, and is not counted.
    """
    out: list[Cue] = []
    for speaker, lines in _layout(transcript.segments, options, label):
        if options.highlight_words and all(unit.exact for line in lines for unit in line):
            out.extend(_highlighted(lines, speaker, escape))
        else:
            text = "\n".join("".join(escape(unit.text) for unit in line).strip() for line in lines)
            out.append(Cue(lines[0][0].start, lines[-1][-1].end, text, speaker))
    return out


_Lines = list[list[_Unit]]


def _layout(
    segments: list[Segment], options: SubtitleOptions, label: Callable[[str], str]
) -> Iterator[tuple[str | None, _Lines]]:
    """Units in lines in cues, each cue with its speaker."""
    within_segments = options.max_line_width is None or options.max_line_count is None
    max_width = options.max_line_width or math.inf
    max_words = options.max_words_per_line or math.inf
    max_lines = options.max_line_count or math.inf
    lines: _Lines = []
    speaker: str | None = None
    width = words = 0
    previous_start = 0.0

    for segment in segments:
        for index, unit in enumerate(_units(segment)):
            segment_break = index == 0 and (within_segments or segment.speaker != speaker)
            long_pause = not within_segments and unit.start - previous_start > LONG_PAUSE_SECONDS
            line_full = width + len(unit.text) > max_width or words >= max_words
            words_end_cue = within_segments and words >= max_words
            cue_full = line_full and len(lines) >= max_lines
            if not lines or segment_break or long_pause or words_end_cue or cue_full:
                if lines:
                    yield speaker, lines
                speaker = segment.speaker
                lines = [[]]
                width = len(label(speaker)) if speaker else 0
                words = 0
            elif line_full:
                lines.append([])
                width = 0
                words = words if within_segments else 0
            if not lines[-1]:
                unit = replace(unit, text=unit.text.lstrip())
            lines[-1].append(unit)
            width += len(unit.text)
            words += 1
            previous_start = unit.start
    if lines:
        yield speaker, lines


def _highlighted(lines: _Lines, speaker: str | None, escape: Callable[[str], str]) -> Iterator[Cue]:
    """A cue for each word while it is spoken, with it underlined, and one for each gap with none underlined."""

    def text(spoken: _Unit | None) -> str:
        def mark(unit: _Unit) -> str:
            word = unit.text.strip()
            before, after = unit.text.split(word, 1)
            return f"{before}<u>{escape(word)}</u>{after}" if unit is spoken else escape(unit.text)

        return "\n".join("".join(map(mark, line)).strip() for line in lines)

    last = lines[0][0].start
    for unit in (unit for line in lines for unit in line):
        if round(unit.start * 1000) > round(last * 1000):
            yield Cue(last, unit.start, text(None), speaker)
        yield Cue(unit.start, unit.end, text(unit), speaker)
        last = unit.end


def _units(segment: Segment) -> list[_Unit]:
    """A segment's words with their times; where it has none, its words by spaces with its time shared out."""
    if segment.words:
        words = [_Unit(_one_line(w.word), w.start, max(w.start, w.end), True) for w in segment.words if w.word.strip()]
        if words:
            return words
    pieces = break_points(_one_line(segment.text).strip())
    total = sum(map(len, pieces))
    length = max(0.0, segment.end - segment.start)
    out: list[_Unit] = []
    done = 0
    for piece in pieces:
        start = segment.start + length * done / total
        done += len(piece)
        out.append(_Unit(piece, start, segment.start + length * done / total, False))
    return out


def break_points(text: str) -> list[str]:
    """Cut where a line may break: before spaces, and between characters of scripts that write no spaces.

    Marks and closing punctuation stay with what is before them, opening punctuation with what is after it
    (the common part of Unicode's line breaking, UAX 14). Joined again, the pieces are the text.
    """
    pieces: list[str] = []
    for word in re.findall(r"\s*\S+", text):
        start = 0
        for i in range(1, len(word)):
            before, after = word[i - 1], word[i]
            if before.isspace() or after.isspace() or not (_is_unspaced(before) or _is_unspaced(after)):
                continue
            category = unicodedata.category
            sticks = category(after) in {"Mn", "Mc", "Me", "Pe", "Pf", "Po", "Lm", "Cf"} or category(before) in {
                "Ps",
                "Pi",
            }
            if not sticks:
                pieces.append(word[start:i])
                start = i
        pieces.append(word[start:])
    return pieces


# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, kana, CJK ideographs and their compatibility
# forms and full-width punctuation. (Korean writes spaces.)
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3001-\u30ff\u31f0-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff01-\uff60\U00020000-\U0003ffff]"
)


def _is_unspaced(character: str) -> bool:
    return _UNSPACED.match(character) is not None


def _one_line(text: str) -> str:
    """Every kind of line break, with the white space around it, becomes one space: a blank line would end a cue."""
    return re.sub(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*", " ", text)


def _without_arrows(text: str) -> str:
    return re.sub("-{2,}>", "->", text)


def _txt(transcript: Transcript, options: SubtitleOptions) -> str:
    lines = (plain_line(segment) for segment in transcript.segments)
    return "".join(f"{line}\n" for line in lines if line)


def _srt(transcript: Transcript, options: SubtitleOptions) -> str:
    def label(speaker: str) -> str:
        return f"[{speaker}] "

    def time(seconds: float) -> str:
        return format_timestamp(seconds, always_include_hours=True, decimal_marker=",")

    blocks: list[str] = []
    for number, cue in enumerate(cues(transcript, options, label=label), start=1):
        text = (label(cue.speaker) if cue.speaker else "") + cue.text
        blocks.append(f"{number}\n{time(cue.start)} --> {time(cue.end)}\n{_without_arrows(text)}\n\n")
    return "".join(blocks)


def _vtt(transcript: Transcript, options: SubtitleOptions) -> str:
    def escape(text: str) -> str:  # WebVTT §4.2.2: a bare & or < would start an escape or a tag
        return text.replace("&", "&amp;").replace("<", "&lt;")

    blocks = ["WEBVTT\n\n"]
    for cue in cues(transcript, options, escape=escape):
        voice = f"<v {escape(cue.speaker).replace('>', '&gt;')}>" if cue.speaker else ""
        times = f"{format_timestamp(cue.start)} --> {format_timestamp(cue.end)}"
        blocks.append(f"{times}\n{voice}{_without_arrows(cue.text)}\n\n")
    return "".join(blocks)


def _tsv(transcript: Transcript, options: SubtitleOptions) -> str:
    """Times in whole milliseconds; a fourth column only where a speaker is known."""
    with_speaker = any(segment.speaker for segment in transcript.segments)
    rows = ["start\tend\ttext\tspeaker\n" if with_speaker else "start\tend\ttext\n"]
    for segment in transcript.segments:
        text = _one_line(segment.text).strip().replace("\t", " ")
        speaker = f"\t{segment.speaker or ''}" if with_speaker else ""
        rows.append(f"{round(1000 * segment.start)}\t{round(1000 * segment.end)}\t{text}{speaker}\n")
    return "".join(rows)


def _json(transcript: Transcript, options: SubtitleOptions) -> str:
    return json.dumps(finite(transcript.to_dict()), ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same JSON value with None for the numbers that JSON cannot write (NaN, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


_WRITERS: dict[str, Callable[[Transcript, SubtitleOptions], str]] = {
    "txt": _txt,
    "srt": _srt,
    "vtt": _vtt,
    "tsv": _tsv,
    "json": _json,
}
