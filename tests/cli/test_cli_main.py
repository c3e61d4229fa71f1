"""Commands and their errors."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import stapes
import stapes.checkpoints
from stapes.cli.main import main
from stapes.errors import ModelError


@dataclass
class Entry:
    name: str
    parameters: int | None = 39_000_000
    multilingual: bool = True
    languages: int = 99
    sources: list[str] = field(default_factory=lambda: ["openai/whisper-tiny"])
    location: str | None = None
    size_bytes: int | None = 151_000_000
    note: str = ""


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A catalogue of two models, one of them here."""

    def pull(name: str, model_dir: str | None = None, progress: Any = None, offline: bool = False) -> Path:
        if name != "tiny":
            raise ModelError(f"{name} is no model that is known; `stapes models` lists them")
        progress.add_total(10.0)
        progress.advance(10.0)
        return Path(model_dir or "cache") / name

    entries = [Entry("tiny"), Entry("base.en", 74_000_000, False, 1, location="/models/base.en", note="a note")]
    fake = types.SimpleNamespace(list_models=lambda model_dir=None: entries, pull=pull)
    monkeypatch.setitem(sys.modules, "stapes.checkpoints.catalog", fake)
    monkeypatch.setattr(stapes.checkpoints, "catalog", fake, raising=False)
    return fake


def test_models_are_a_table_or_json(catalog: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for said in ("tiny", "39 M", "151 MB", "99", "openai/whisper-tiny", "English", "here: /models/base.en", "a note"):
        assert said in out
    assert main(["models", "--json", "True"]) == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)["models"]] == ["tiny", "base.en"]


def test_pull_prints_where_the_model_is(catalog: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "tiny", "--model_dir", "d"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "d/tiny\n"
    assert json.loads(captured.err.splitlines()[-1])["unit"] == "bytes"


def test_an_unknown_model_is_exit_code_3(catalog: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "gigantic", "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("stapes: gigantic")
    assert json.loads(captured.out) == {"error": captured.err[len("stapes: ") :].strip(), "exit_code": 3}


def test_a_file_in_the_place_of_a_command_gets_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("talk.mp3").touch()
    assert main(["talk.mp3"]) == 2
    assert "stapes transcribe talk.mp3" in capsys.readouterr().err
    assert main(["sing"]) == 2
    assert "sing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["--help"], ["transcribe", "--help"], ["models", "--help"], ["models", "pull", "-h"]]
)
def test_help_has_an_example(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "xample" in out
    assert "stapes " in out


@pytest.mark.parametrize(
    "command", ["transcribe", "live", "align", "evaluate", "prepare", "train", "tune", "serve", "bench transcribe"]
)
def test_help_names_arguments_as_they_are_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "--empty" not in out
    assert not re.search(r"--[A-Z]|^. +\*? *[A-Z]+ +•", out, re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == stapes.__version__
