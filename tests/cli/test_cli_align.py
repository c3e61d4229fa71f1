"""``stapes align`` from arguments to files and exit code, with a recogniser that needs no model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stapes
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.transcript import Segment, Transcript, Word


def said(path: str, text: str) -> Transcript:
    words = [Word(f" {word}", n + 0.5, n + 1.0, 0.9) for n, word in enumerate(text.split())]
    segment = Segment(id=0, seek=50, start=0.5, end=float(len(words)), text=f" {text}", words=words)
    return Transcript(text=text, duration=9.0, segments=[segment], path=path)


class Aligner:
    """Stands in for a recogniser: every pair is aligned but those whose text is ``bad``."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.refuses = False
        self.closed = False

    def load(self, model: str | None, **settings: Any) -> Aligner:
        return self

    def align_many(
        self, pairs: Iterable[tuple[str, str | Path]], progress: Any, **settings: Any
    ) -> Iterator[Transcript]:
        self.settings = settings
        if self.refuses:
            raise UsageError("base is a Whisper model")
        for recording, text in pairs:
            written = text.read_text() if isinstance(text, Path) and text.exists() else str(text)
            yield Transcript(path=recording, error="does not fit") if "bad" in written else said(recording, written)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def aligner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Aligner:
    monkeypatch.chdir(tmp_path)
    for name, text in (("a", "hello you"), ("b", "bad"), ("c", "bye")):
        Path(f"{name}.mp3").touch()
        Path(f"{name}.txt").write_text(text)
    found = Aligner()
    monkeypatch.setitem(vars(stapes), "load", found.load)
    return found


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["align", *argv, "--model", "m"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_text_is_a_file_or_itself(capsys: pytest.CaptureFixture[str], aligner: Aligner) -> None:
    expected = "a 1 0.500 0.500 hello 0.9000\na 1 1.500 0.500 you 0.9000\n"
    for text in ("a.txt", "hello you"):
        assert run(capsys, "a.mp3", text)[:2] == (0, expected)
    assert aligner.closed
    assert aligner.settings == {"language": None, "open_ends": False, "channels": "mix"}
    assert run(capsys, "a.mp3", "a.txt", "-f", "srt", "--language", "de")[1].startswith("1\n00:00:00,500 --> ")
    assert aligner.settings["language"] == "de"


def test_files_of_all_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "a.mp3", "a.txt", "-o", "out")[0] == 0
    names = {"a.json", "a.TextGrid", "a.srt", "a.vtt", "a.ctm"}
    assert {path.name for path in Path("out").iterdir()} == names
    assert json.loads(Path("out/a.json").read_text())["segments"][0]["words"][1]["word"] == " you"


def test_a_folder_with_its_texts_and_one_bad_pair(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, ".", "-o", "out", "-f", "ctm,textgrid", "--json")
    assert code == 1
    report = json.loads(out)
    assert [entry["path"] for entry in report["transcripts"]] == ["./a.mp3", "./c.mp3"]
    assert report["failures"] == [{"path": "./b.mp3", "reason": "does not fit"}]
    assert "does not fit" in err
    assert {path.name for path in Path("out").iterdir()} == {"a.ctm", "a.TextGrid", "c.ctm", "c.TextGrid"}


def test_texts_in_a_folder_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").mkdir()
    Path("texts/c.txt").write_text("so long")
    assert run(capsys, "c.mp3", "--texts", "texts")[1].count("\n") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a.mp3", "none.txt"], "no such file"),
        (["a.mp3", "hi", "-f", "doc"], "'doc' is no output format"),
        (["a.mp3", "hi", "-f", "all"], "give -o DIR"),
        (["a.mp3", "hi", "-f", "srt", "--json"], "--json takes stdout"),
        ([".", "hi"], "is a folder"),
        (["a.mp3", "hi", "--texts", "."], "TEXT and --texts"),
        ([".", "-f", "srt"], "of 3 recordings"),
        (["-"], "from stdin has no text"),
    ],
)
def test_what_makes_no_sense(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert message in err


def test_a_model_must_be_named_and_able(capsys: pytest.CaptureFixture[str], aligner: Aligner) -> None:
    assert main(["align", "a.mp3", "hi"]) == 2
    assert "give --model" in capsys.readouterr().err
    aligner.refuses = True
    code, _, err = run(capsys, "a.mp3", "hi")
    assert code == 2
    assert "Whisper" in err
