"""What every subtitle writer must keep to, whatever the transcript."""

from __future__ import annotations

import errno
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.errors import OutputError, UsageError
from stapes.text.subtitles import FORMATS, SubtitleOptions, cues, format_timestamp, render, write
from stapes.transcript import Segment, Transcript, Word


def segment(text: str, start: float, end: float, *, words: bool = False, speaker: str | None = None) -> Segment:
    """A segment whose words, if any, share its time evenly."""
    timed = None
    if words:
        parts = text.split(" ")
        step = (end - start) / len(parts)
        timed = [Word(f" {part}", start + i * step, start + (i + 0.8) * step, 0.9) for i, part in enumerate(parts)]
    return Segment(id=0, seek=0, start=start, end=end, text=f" {text}", words=timed, speaker=speaker)


def transcript(*segments: Segment) -> Transcript:
    return Transcript(text="".join(s.text for s in segments), language="en", segments=list(segments))


TWO = transcript(segment("Hello there.", 0.0, 1.5), segment("a --> b", 3661.25, 3662.0))


def test_txt_is_a_line_a_segment() -> None:
    assert render(TWO, "txt") == "Hello there.\na --> b\n"


def test_srt_numbers_cues_and_always_writes_hours() -> None:
    assert render(TWO, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b\n\n"
    )


def test_vtt_writes_hours_only_where_needed() -> None:
    assert render(TWO, "vtt") == (
        "WEBVTT\n\n00:00.000 --> 00:01.500\nHello there.\n\n01:01:01.250 --> 01:01:02.000\na -> b\n\n"
    )


def test_tsv_is_in_whole_milliseconds_and_a_tab_in_the_text_does_not_add_a_column() -> None:
    assert render(transcript(segment("one\ttwo", 0.0004, 1.2346)), "tsv") == "start\tend\ttext\n0\t1235\tone two\n"


def test_json_is_openai_whispers_shape_and_always_valid() -> None:
    one = transcript(segment("日本", 0, 1))
    one.segments[0].avg_logprob = float("nan")
    text = render(one, "json")
    assert "日本" in text
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert value["segments"][0].keys() >= {"id", "seek", "start", "end", "text", "tokens", "temperature"}
    assert "words" not in value["segments"][0]
    assert {"text", "language", "duration", "model", "skipped", "warnings"} <= value.keys()


def test_an_empty_transcript_makes_valid_files() -> None:
    assert [render(Transcript(), f) for f in ("txt", "srt", "vtt", "tsv")] == [
        "",
        "",
        "WEBVTT\n\n",
        "start\tend\ttext\n",
    ]


def test_segments_without_text_make_no_cue() -> None:
    assert render(transcript(segment("", 0, 1), segment("x", 1, 2)), "srt").startswith("1\n00:00:01,000")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "00:00.000"), (59.9996, "01:00.000"), (360000.001, "100:00:00.001")]
)
def test_timestamps_round_to_milliseconds(seconds: float, text: str) -> None:
    assert format_timestamp(seconds) == text


def test_speakers_are_labelled_in_every_format() -> None:
    two = transcript(segment("Yes.", 0, 1, speaker="Speaker 1"), segment("No.", 1, 2, speaker="Speaker 2"))
    assert render(two, "txt") == "[Speaker 1] Yes.\n[Speaker 2] No.\n"
    assert "[Speaker 2] No.\n" in render(two, "srt")
    assert "<v Speaker 2>No.\n" in render(two, "vtt")
    assert render(two, "tsv").splitlines()[:2] == ["start\tend\ttext\tspeaker", "0\t1000\tYes.\tSpeaker 1"]
    assert json.loads(render(two, "json"))["segments"][1]["speaker"] == "Speaker 2"


def test_vtt_escapes_what_would_be_markup() -> None:
    assert "R&amp;D &lt;b>" in render(transcript(segment("R&D <b>", 0, 1)), "vtt")


def test_cues_take_their_times_from_the_words() -> None:
    one = transcript(segment("a b", 0.0, 10.0))
    one.segments[0].words = [Word(" a", 2.0, 3.0, 1), Word(" b", 4.0, 5.0, 1)]
    assert [(c.start, c.end) for c in cues(one, SubtitleOptions())] == [(2.0, 5.0)]


def test_highlighting_underlines_each_word_in_turn_and_none_between_words() -> None:
    one = transcript(segment("a b", 0, 2))
    one.segments[0].words = [Word(" a,", 0.0, 0.5, 1), Word(" b", 1.0, 2.0, 1)]
    got = [(c.start, c.end, c.text) for c in cues(one, SubtitleOptions(highlight_words=True))]
    assert got == [(0.0, 0.5, "<u>a,</u> b"), (0.5, 1.0, "a, b"), (1.0, 2.0, "a, <u>b</u>")]


def test_highlighting_needs_measured_words() -> None:
    assert [c.text for c in cues(transcript(segment("a b", 0, 2)), SubtitleOptions(highlight_words=True))] == ["a b"]


def test_max_words_per_line_makes_cues_within_segments() -> None:
    two = transcript(segment("a b c", 0, 3, words=True), segment("d", 3, 4, words=True))
    assert [c.text for c in cues(two, SubtitleOptions(max_words_per_line=2))] == ["a b", "c", "d"]


def test_width_and_count_fill_cues_across_segments_but_not_across_a_pause_or_a_speaker() -> None:
    options = SubtitleOptions(max_line_width=5, max_line_count=2)
    near = transcript(segment("aa bb", 0, 1, words=True), segment("cc dd", 1, 2, words=True))
    assert [c.text for c in cues(near, options)] == ["aa bb\ncc dd"]
    far = transcript(segment("aa bb", 0, 1, words=True), segment("cc dd", 10, 11, words=True))
    assert [c.text for c in cues(far, options)] == ["aa bb", "cc dd"]
    other = transcript(segment("aa", 0, 1, words=True, speaker="A"), segment("bb", 1, 2, words=True, speaker="B"))
    assert [c.text for c in cues(other, options)] == ["aa", "bb"]


def test_the_speaker_label_counts_towards_the_width() -> None:
    one = transcript(segment("aaa bbb", 0, 1, speaker="S"))
    assert "[S] aaa\nbbb\n" in render(one, "srt", SubtitleOptions(max_line_width=8))


def test_text_without_spaces_wraps_at_characters_and_punctuation_stays_with_its_character() -> None:
    text = "我今天很高兴，因为天气好。"
    (cue,) = cues(transcript(segment(text, 0, 3)), SubtitleOptions(max_line_width=6))
    lines = cue.text.split("\n")
    assert "".join(lines) == text
    assert all(len(line) <= 6 for line in lines)
    assert not any(line[0] in "，。" for line in lines)


@pytest.mark.parametrize("text", ["שלום, מה שלומך?", "مرحبا بالعالم", "日本語とEnglish混在", "สวัสดีครับ"])
@pytest.mark.parametrize("format", ["txt", "srt", "vtt", "tsv"])
def test_no_format_changes_a_character_of_any_script(text: str, format: str) -> None:
    assert text in render(transcript(segment(text, 0, 1)), format)  # pyright: ignore[reportArgumentType]


WORDS = st.lists(st.text("abcdé漢字שلو.-", min_size=1, max_size=9), min_size=1, max_size=12)
SEGMENTS = st.lists(st.tuples(WORDS, st.booleans(), st.sampled_from([None, "A", "B"])), min_size=1, max_size=5)
LIMIT = st.none() | st.integers(1, 20)


@settings(max_examples=200, deadline=None)
@given(SEGMENTS, LIMIT, LIMIT, LIMIT)
def test_layout_keeps_all_text_in_order_within_its_limits(
    parts: list[tuple[list[str], bool, str | None]], width: int | None, count: int | None, words: int | None
) -> None:
    options = SubtitleOptions(max_line_width=width, max_line_count=count if width else None, max_words_per_line=words)
    segments = [
        segment(" ".join(texts), 2.0 * i, 2.0 * i + 1.5, words=timed, speaker=speaker)
        for i, (texts, timed, speaker) in enumerate(parts)
    ]
    got = cues(transcript(*segments), options)
    assert re.sub(r"\s", "", "".join(c.text for c in got)) == re.sub(r"\s", "", "".join(s.text for s in segments))
    assert all(c.start <= c.end for c in got)
    assert all(a.start <= b.start and a.end <= b.end for a, b in itertools.pairwise(got))
    lines = [line for c in got for line in c.text.split("\n")]
    assert all(lines)
    if width:
        # Only a single word that is wider than the line may stick out.
        assert all(len(line) <= width for line in lines if " " in line)
    if options.max_line_count:
        assert all(c.text.count("\n") < options.max_line_count for c in got)
    if words:
        assert all(len(line.split()) <= words for line in lines)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("-> \n\u2028a", max_size=8), max_size=4), st.booleans())
def test_no_text_can_break_a_cue(texts: list[str], highlight: bool) -> None:
    segments = [segment(text, i, i + 1, words=bool(text.strip())) for i, text in enumerate(texts)]
    for format in ("srt", "vtt"):
        for block in render(transcript(*segments), format, SubtitleOptions(highlight_words=highlight)).split("\n\n"):
            times = [line for line in block.split("\n") if "-->" in line]
            assert len(times) <= 1
            assert all(re.fullmatch(r"[\d:.,]+ --> [\d:.,]+", line) for line in times)
            assert "\u2028" not in block


@pytest.mark.parametrize("bad", [{"max_line_width": 0}, {"max_words_per_line": -1}, {"max_line_count": 2}])
def test_options_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--max-"):
        SubtitleOptions(**bad)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match=r"docx.*txt, srt"):
        render(TWO, "docx")  # pyright: ignore[reportArgumentType]


def test_write_makes_folders_and_leaves_only_the_file(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / f"{'n' * 251}.srt"
    for format in FORMATS:
        write(TWO, target, format)
        assert target.read_text(encoding="utf-8") == render(TWO, format)
    assert [p.name for p in target.parent.iterdir()] == [target.name]
    assert target.stat().st_mode & 0o044  # readable as an ordinary file is, not private as a temporary one


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    target = tmp_path / "x.txt"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError if isinstance(failure, OSError) else KeyboardInterrupt):
        write(TWO, target, "txt")
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]
    assert target.read_text() == "old"


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="out"):
        write(TWO, tmp_path / "out" / "x.srt", "srt")
