"""Which recordings the arguments stand for, and how their outputs are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stapes.cli.inputs import expand, plan_outputs
from stapes.errors import UsageError


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree of empty files; the tests stand in it."""
    monkeypatch.chdir(tmp_path)
    for name in ["a.mp3", "b.WAV", "notes.txt", "in/x.mp4", "in/deep/y.ogg", "in/.hidden.wav", "song [live].mp3"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    return tmp_path


def test_a_folder_is_searched_for_media_below_it() -> None:
    os.mkfifo("in/pipe.wav")
    assert expand(["in"]) == (["in/x.mp4", "in/deep/y.ogg"], [])


def test_named_files_are_tried_whatever_they_are_called_and_missing_ones_are_passed_on() -> None:
    assert expand(["notes.txt", "gone.mp3", "-"]) == (["notes.txt", "gone.mp3", "-"], [])


def test_patterns_match_as_in_the_shell_but_an_existing_name_is_itself() -> None:
    assert expand(["*.[mW]*"])[0] == ["a.mp3", "b.WAV", "song [live].mp3"]
    assert expand(["song [live].mp3"])[0] == ["song [live].mp3"]
    assert expand(["in/**/*.ogg"])[0] == ["in/deep/y.ogg"]


def test_each_recording_comes_once_in_the_order_given() -> None:
    assert expand(["b.WAV", "./b.WAV", "in/x.mp4", "in", "-", "-"])[0] == ["b.WAV", "in/x.mp4", "in/deep/y.ogg", "-"]


def test_lists_have_comments_blank_lines_and_any_kind_of_input() -> None:
    Path("list.txt").write_bytes(b"\xef\xbb\xbf# first\r\n\r\na.mp3\r\n  # more\nin/*.mp4\nna\xefve.wav\n  \n")
    assert expand(["@list.txt"])[0] == ["a.mp3", "in/x.mp4", os.fsdecode(b"na\xefve.wav")]


def test_what_holds_nothing_is_a_failure_of_its_own() -> None:
    Path("empty").mkdir()
    found, failures = expand(["empty", "*.flac", "a.mp3"])
    assert found == ["a.mp3"]
    assert [f.path for f in failures] == ["empty", "*.flac"]


def test_an_unreadable_list_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match=r"@none\.txt"):
        expand(["@none.txt"])


def names(recordings: list[str], formats: tuple[str, ...] = ("srt",)) -> list[str]:
    plan = plan_outputs(recordings, Path("out"), formats)
    return [str(path.relative_to("out")) for name in recordings for path in plan[name].values()]


@pytest.mark.parametrize(
    ("recordings", "expected"),
    [
        (["a.mp3", "x/b.wav"], ["a.srt", "b.srt"]),
        (["a.mp3", "a.wav", "b.wav"], ["a.mp3.srt", "a.wav.srt", "b.srt"]),
        (["r/x/a.mp3", "r/y/a.mp3", "r/y/b.mp3"], ["x/a.srt", "y/a.srt", "b.srt"]),
        (["x/a.mp3", "x/a.wav", "y/a.mp3"], ["x/a.mp3.srt", "x/a.wav.srt", "y/a.srt"]),
        (["a.mp3", "a.wav", "a.mp3.ogg"], ["a.mp3.srt", "a.wav.srt", "a.mp3.ogg.srt"]),
        (["-", "stdin.wav"], ["stdin.srt", "stdin.wav.srt"]),
        (["v1.2 final.mp3"], ["v1.2 final.srt"]),
        (["noext"], ["noext.srt"]),
    ],
)
def test_names_are_short_and_never_collide(recordings: list[str], expected: list[str]) -> None:
    assert names(recordings) == expected


def test_an_output_never_takes_the_place_of_a_recording() -> None:
    Path("out").mkdir()
    assert names(["out/talk.json"], ("json", "srt")) == ["talk.json.json", "talk.json.srt"]


def test_two_recordings_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(UsageError, match="same file"):
        plan_outputs(["-", "out/stdin"], Path("out"), ["srt"])
