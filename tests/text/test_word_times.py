"""Praat and sclite get every word, in order, whatever the times are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapes.errors import UsageError
from stapes.text.word_times import ALIGNMENT_FORMATS, ctm, render_alignment, textgrid, write_alignment
from stapes.transcript import Segment, Transcript, Word


def transcript(words: list[Word], speaker: str | None = None, duration: float = 10.0) -> Transcript:
    text = "".join(word.word for word in words)
    start, end = (words[0].start, words[-1].end) if words else (0.0, 0.0)
    segment = Segment(0, 0, start, end, text, words=words, speaker=speaker)
    return Transcript(text=text, duration=duration, segments=[segment], path="a talk/two words.wav")


def read_textgrid(text: str) -> tuple[float, dict[str, list[tuple[float, float, str]]]]:
    """Tiers of a TextGrid, read as strictly as Praat reads it."""
    lines = text.splitlines()
    assert lines[:3] == ['File type = "ooTextFile"', 'Object class = "TextGrid"', ""]
    duration = float(re.fullmatch(r"xmax = (\S+)", lines[4])[1])  # type: ignore[index]
    tiers: dict[str, list[tuple[float, float, str]]] = {}
    for block in re.split(r"\n    item \[\d+\]:\n", text)[1:]:
        name = re.search(r'name = "((?:[^"]|"")*)"\n', block)[1].replace('""', '"')  # type: ignore[index]
        found = re.findall(r'xmin = (\S+)\n +xmax = (\S+)\n +text = "((?:[^"]|"")*)"(?:\n|$)', block)
        assert len(found) == int(re.search(r"intervals: size = (\d+)", block)[1])  # type: ignore[index]
        tiers[name] = [(float(a), float(b), label.replace('""', '"')) for a, b, label in found]
    assert len(tiers) == int(re.search(r"^size = (\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    return duration, tiers


times = st.floats(0, 12, allow_nan=False)
some_words = st.lists(
    st.builds(
        lambda a, b, w: Word(f" {w}", min(a, b), max(a, b), 0.5), times, times, st.sampled_from(['a"b', "x", "y z"])
    ),
    max_size=8,
)


@given(some_words, st.floats(0, 12))
def test_a_textgrid_fills_the_recording_and_keeps_every_word(words: list[Word], duration: float) -> None:
    end, tiers = read_textgrid(textgrid(transcript(words, duration=duration)))
    assert list(tiers) == ["words", "segments"]
    for intervals in tiers.values():
        place = 0.0
        for start, stop, _ in intervals:
            assert start == place
            assert stop > start
            place = stop
        assert place == end
    ordered = sorted(words, key=lambda word: word.start)
    assert [text for *_, text in tiers["words"] if text] == [word.word.strip() for word in ordered]


def test_words_that_do_not_overlap_keep_their_times() -> None:
    words = [Word(" one", 0.5, 1.0, 0.9), Word(" two", 1.0, 1.5, 0.8), Word(" three", 2.0, 2.0, 0.0)]
    _, tiers = read_textgrid(textgrid(transcript(words, duration=3.0)))
    assert tiers["words"] == [
        (0.0, 0.5, ""),
        (0.5, 1.0, "one"),
        (1.0, 1.5, "two"),
        (1.5, 2.0, ""),
        (2.0, 2.001, "three"),
        (2.001, 3.0, ""),
    ]


def test_speakers_have_tiers_and_channels_of_their_own() -> None:
    both = transcript([Word(" hello", 0.0, 2.0, 0.9)], "Ann")
    both.segments += transcript([Word(" yes", 1.0, 1.5, 0.25)], "Bob").segments
    _, tiers = read_textgrid(textgrid(both))
    assert list(tiers) == ["Ann - words", "Ann - segments", "Bob - words", "Bob - segments"]
    assert ctm(both) == "two_words 1 0.000 2.000 hello 0.9000\ntwo_words 2 1.000 0.500 yes 0.2500\n"


@given(some_words)
def test_ctm_has_six_fields_in_order_of_time(words: list[Word]) -> None:
    rows = [line.split(" ") for line in ctm(transcript(words), "a b").splitlines()]
    assert len(rows) == len(words)
    assert all(len(row) == 6 and row[0] == "a_b" for row in rows)
    assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)
    assert all(float(row[3]) >= 0 for row in rows)


def test_every_format_is_written_whole(tmp_path: Path) -> None:
    spoken = transcript([Word(" hello", 0.0, 1.0, 0.9)])
    for format in ALIGNMENT_FORMATS:
        path = tmp_path / "new" / format
        write_alignment(spoken, path, format)
        assert path.read_text(encoding="utf-8") == render_alignment(spoken, format)
        assert "hello" in path.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="docx"):
        render_alignment(spoken, "docx")  # type: ignore[arg-type]
    assert read_textgrid(textgrid(Transcript()))[1]["words"] == [(0.0, 0.001, "")]
    assert ctm(Transcript()) == ""
