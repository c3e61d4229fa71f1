"""``stapes profile COMMAND…``: the command's own options, output and exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_recognizer import FakeRecognizer

import stapes.diagnostics
from stapes.cli.arguments import normalise
from stapes.cli.main import app, main
from stapes.errors import AudioError


@pytest.fixture(autouse=True)
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.mp3 is there; what it holds is the fake recogniser's affair."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp3").touch()


def test_what_follows_the_command_belongs_to_it() -> None:
    words = ["profile", "-o", "p.html", "transcribe", "-o", "out", "--word_timestamps", "True", "-", "--json"]
    assert normalise(app, words) == ["profile", "-o=p.html", "--", *words[3:]]
    assert normalise(app, ["profile", "--json", "models"]) == ["profile", "--json", "--", "models"]


@pytest.mark.parametrize("fails", [False, True])
def test_output_and_exit_code_are_the_commands(
    fake: FakeRecognizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    if fails:
        fake.answers["a.mp3"] = AudioError("a.mp3 is damaged")
    page = tmp_path / "p.html"
    code = main(["profile", "-o", str(page), "transcribe", "a.mp3", "--model", "tiny"])
    assert code == (1 if fails else 0)
    assert fake.loaded["model"] == "tiny"
    captured = capsys.readouterr()
    assert captured.out == ("" if fails else "Hello there.\n")
    assert f"wrote {page}" in captured.err
    assert "transcribe a.mp3 --model tiny" in page.read_text()


def test_json_has_stdout_for_itself_and_needs_no_page(
    fake: FakeRecognizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--json", "-o", str(tmp_path / "p.html"), "transcribe", "a.mp3"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert figures["exit_code"] == 0
    assert figures["command"] == ["transcribe", "a.mp3"]
    assert "Hello there." in captured.err
    assert figures["html"] == str(tmp_path / "p.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["profile", "--json", "transcribe", "a.mp3"]) == 0
    assert json.loads(capsys.readouterr().out)["html"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp3", "p.html"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to profile"),
        (["--nope", "models"], "no option of profile"),
        (["profile", "models"], "cannot be profiled"),
        (["--seconds", "0", "models"], "--seconds is 0"),
        (["--after", "-1", "models"], "--after is -1"),
        (["--tool", "nsys", "--json", "models"], "leave --json"),
    ],
)
def test_what_cannot_be_profiled_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_tool_or_library_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profile", "--tool", "rocprofv3", "models"]) == 2
    assert "ROCm" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "stapes.diagnostics.profile_page", raising=False)
    monkeypatch.delattr(stapes.diagnostics, "profile_page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["profile", "-o", str(tmp_path / "p.html"), "models"]) == 2
    assert "stapes[evaluate]" in capsys.readouterr().err
