"""``stapes transcribe`` from arguments to output and exit code, with a recogniser that needs no model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_recognizer import FakeRecognizer, hello

from stapes.cli.main import main
from stapes.errors import DeviceError, ModelError, UsageError
from stapes.transcript import Transcript, Word


def listing(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests stand in a folder with three recordings."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.mp3", "b.mp3", "c.mp3"):
        Path(name).touch()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["transcribe", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def events(err: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, err.splitlines()) if event["event"] == kind]


def test_one_file_prints_its_text_and_nothing_else(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "a.mp3")
    assert (code, out) == (0, "Hello there.\n")
    assert fake.loaded["model"] is None
    assert fake.closed == 1


def test_several_files_print_in_input_order_under_headers(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "a.mp3", "b.mp3")  # the fake finishes the last one first
    assert code == 0
    assert out == "==> a.mp3 <==\nHello there.\n\n==> b.mp3 <==\nHello there.\n\n"


def test_one_format_is_printed_without_a_folder(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "a.mp3", "-f", "srt")[1] == "1\n00:00:00,000 --> 00:00:07,000\nHello there.\n\n"


def test_files_are_written_and_named(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "a.mp3", "b.mp3", "-o", "out", "-f", "srt,txt")
    assert (code, out) == (0, "")
    assert listing("out") == ["a.srt", "a.txt", "b.srt", "b.txt"]
    assert any("out/a.txt" in note["message"] for note in events(err, "note"))


def test_a_folder_and_no_format_gives_every_format_as_openai_whisper_does(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "a.mp3", "--output_dir", "out")[0] == 0
    assert listing("out") == ["a.json", "a.srt", "a.tsv", "a.txt", "a.vtt"]


def test_failed_and_damaged_inputs_do_not_stop_the_others(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["a.mp3"] = Transcript(path="a.mp3", error="a.mp3 holds no audio; give another file")
    damaged = hello("b.mp3")
    damaged.damaged, damaged.warnings = True, ["the last 3 s could not be decoded"]
    fake.answers["b.mp3"] = damaged
    code, out, err = run(capsys, "a.mp3", "b.mp3", "c.mp3", "none*.mp3", "-o", "out", "-f", "txt", "--json")
    assert code == 1
    report = json.loads(out)
    assert [t["path"] for t in report["transcripts"]] == ["b.mp3", "c.mp3"]
    assert [t["damaged"] for t in report["transcripts"]] == [True, False]
    assert [f["path"] for f in report["failures"]] == ["none*.mp3", "a.mp3"]
    assert listing("out") == ["b.txt", "c.txt"]
    assert {f["path"] for f in events(err, "failure")} == {"a.mp3", "none*.mp3"}
    assert events(err, "warning")[0]["message"] == "the last 3 s could not be decoded"


def test_damage_alone_is_exit_code_1(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["a.mp3"] = hello("a.mp3")
    fake.answers["a.mp3"].damaged = True
    code, out, err = run(capsys, "a.mp3")
    assert (code, out) == (1, "Hello there.\n")
    assert events(err, "warning")


def test_a_recording_without_an_answer_is_a_failure(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRecognizer, "transcribe_many", lambda *_, **__: (t for t in [hello("a.mp3")]))
    code, _, err = run(capsys, "a.mp3", "b.mp3")
    assert code == 1
    assert [f["path"] for f in events(err, "failure")] == ["b.mp3"]


@pytest.mark.parametrize(("error", "code"), [(UsageError("u"), 2), (ModelError("m"), 3), (DeviceError("d"), 3)])
@pytest.mark.parametrize("when", ["load", "transcribe"])
def test_what_concerns_all_inputs_has_its_own_exit_code(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str], error: Exception, code: int, when: str
) -> None:
    def fail() -> None:
        raise error

    if when == "load":
        fake.on_load = fail
    else:
        fake.answers["a.mp3"] = error
    got, out, err = run(capsys, "a.mp3", "b.mp3", "--json")
    assert got == code
    assert json.loads(out)["error"] == str(error)
    assert str(error) in err


def test_an_unwritable_output_fails_that_input_only(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/a.txt").mkdir(parents=True)
    code, _, err = run(capsys, "a.mp3", "b.mp3", "-o", "out", "-f", "txt")
    assert code == 1
    assert [f["path"] for f in events(err, "failure")] == ["a.mp3"]
    assert listing("out") == ["a.txt", "b.txt"]


def test_a_folder_that_cannot_be_made_is_found_before_the_work(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "a.mp3", "-o", "b.mp3")
    assert code == 1
    assert "b.mp3" in err
    assert not fake.loaded


def test_skip_existing_leaves_out_what_is_complete(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "a.mp3", "-o", "out", "-f", "txt,srt")
    Path("out/b.txt").touch()  # one of two: not complete
    code, out, _ = run(capsys, "a.mp3", "b.mp3", "-o", "out", "-f", "txt,srt", "--skip-existing", "--json")
    assert code == 0
    assert fake.paths == ["b.mp3"]
    assert json.loads(out)["skipped_existing"] == ["a.mp3"]
    fake.loaded.clear()
    assert run(capsys, "a.mp3", "-o", "out", "-f", "txt", "--skip_existing", "True")[0] == 0
    assert not fake.loaded


def test_verbose_shows_times_in_place_of_the_text(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    line = "[00:00.000 --> 00:07.000] Hello there."
    assert run(capsys, "a.mp3", "--verbose", "True")[1] == f"{line}\n"
    assert run(capsys, "a.mp3", "--verbose", "-o", "out")[1] == f"{line}\n"
    _, out, err = run(capsys, "a.mp3", "--verbose", "-f", "srt")
    assert out.startswith("1\n")
    assert line in err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--word_timestamps", "True"], {"word_timestamps": True}),
        (["--word-timestamps", "False"], {"word_timestamps": False}),
        (["--vad", "false", "--word_timestamps"], {"vad": False, "word_timestamps": True}),
        (["--no_vad"], {"vad": False}),
        (["--temperature_increment_on_fallback", "None"], {"temperature_increment_on_fallback": None}),
        (["--logprob_threshold", "-2.5", "--beam-size=3"], {"logprob_threshold": -2.5, "beam_size": 3}),
        (["--suppress_tokens", "-1,50"], {"suppress_tokens": "-1,50"}),
        (["--initial_prompt", "- Hi", "--language", "None"], {"initial_prompt": "- Hi", "language": None}),
        (["--language", "de", "--language", "None"], {"language": None}),
        (["--language", "de", "--language", "fr"], {"language": "fr"}),
        (["--prepend_punctuations", "\"'([{-"], {"prepend_punctuations": "\"'([{-"}),
        (["--max_words_per_line", "3"], {"word_timestamps": True}),
        (["--highlight_words", "True"], {"word_timestamps": True}),
        (["--max_line_width", "40"], {"word_timestamps": False}),
    ],
)
def test_options_are_written_as_in_openai_whisper(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str], argv: list[str], expected: dict[str, object]
) -> None:
    assert run(capsys, *argv, "a.mp3")[0] == 0  # an option's value is never taken for an input,
    assert fake.paths == ["a.mp3"]
    assert run(capsys, "a.mp3", *argv)[0] == 0  # wherever the inputs stand
    assert fake.paths == ["a.mp3"]
    assert {name: getattr(fake.options, name) for name in expected} == expected


def test_what_concerns_the_model_reaches_load(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "base", "--device", "cuda:0,cuda:1", "--fp16", "False", "--max-vram", "6GB", "--threads", "2"]
    argv += ["--backend", "torch", "--task", "translate", "--language", "de"]  # a default is chosen that can do both
    assert run(capsys, "a.mp3", *argv, "--model_dir", "m", "--offline")[0] == 0
    del fake.loaded["progress"]
    assert fake.loaded == {
        "model": "base", "device": "cuda:0,cuda:1", "precision": "fp32", "backend": "torch", "max_vram": "6GB",
        "threads": 2, "model_dir": "m", "offline": True,
        "task": "translate", "language": "de", "adapter": None, "draft": None, "draft_tokens": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name a file"),
        (["a.mp3", "--beamsize", "3"], "--beam-size"),
        (["a.mp3", "--beam-size", "0"], "between 1 and 64"),
        (["a.mp3", "--beam-size"], "requires an argument"),
        (["a.mp3", "--task", "sing"], "sing"),
        (["a.mp3", "-f", "docx"], "docx"),
        (["a.mp3", "-f", "all"], "-o DIR"),
        (["a.mp3", "b.mp3", "-f", "srt"], "-o DIR"),
        (["a.mp3", "-f", "srt", "--json"], "-o DIR"),
        (["a.mp3", "--skip-existing"], "-o DIR"),
        (["a.mp3", "--max-line-count", "2"], "--max-line-width"),
        (["a.mp3", "--fp16", "True", "--precision", "fp32"], "contradicts"),
        (["a.mp3", "--threads", "0"], "at least 1"),
        (["@none.txt"], "@none.txt"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_sentence(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not fake.loaded
    if "--json" in argv:
        assert json.loads(out)["exit_code"] == 2


def test_names_that_look_like_options_or_are_not_text(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    strange = ["-dash.mp3", "new\nline.mp3", os.fsdecode(b"caf\xe9.mp3")]
    for name in strange:
        Path(name).touch()
    code, out, _ = run(capsys, "-f", "txt", "--", *strange)
    assert code == 0
    assert fake.paths == strange
    assert [line for line in out.splitlines() if "==>" in line] == [
        "==> -dash.mp3 <==", "==> new\\nline.mp3 <==", "==> caf\\xe9.mp3 <==",
    ]  # fmt: skip
    code, out, err = run(capsys, strange[2], "--json", "-o", "out")
    assert json.loads(out)["transcripts"][0]["path"] == strange[2]
    assert Path(os.fsdecode(b"out/caf\xe9.srt")).exists()
    assert events(err, "note")


def test_what_is_not_there_does_not_wait_for_a_model(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "misspelt.mp3")
    assert code == 1
    assert not fake.loaded
    assert "misspelt.mp3 does not exist" in err


def test_stdin_is_an_input(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "-", "-o", "out", "-f", "vtt")[0] == 0
    assert fake.paths == ["-"]
    assert listing("out") == ["stdin.vtt"]


def test_progress_is_json_lines_where_stderr_is_no_terminal(
    fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]
) -> None:
    last = events(run(capsys, "a.mp3", "b.mp3")[2], "progress")[-1]
    assert (last["unit"], last["done"], last["total"]) == ("seconds", 14.0, 14.0)
    assert last["rtf"] >= 0
    assert last["eta"] == 0


def test_json_survives_what_json_cannot_write(fake: FakeRecognizer, capsys: pytest.CaptureFixture[str]) -> None:
    odd = hello("a.mp3")
    odd.segments[0].avg_logprob = float("-inf")
    odd.segments[0].words = [Word(" Hello", 0.0, 1.0, float("nan"))]
    fake.answers["a.mp3"] = odd
    _, out, _ = run(capsys, "a.mp3", "--json")
    json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
