"""Where an export may be written: nothing that it did not write itself is ever lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ctc_models import save
from stapes.cli.main import main
from stapes.errors import ModelError, OutputError, UsageError
from stapes.export import ctc
from stapes.export.target import RECORD, check_target, export_target


def write(folder: Path, text: str = "new") -> None:
    with export_target(folder) as temporary:
        (temporary / "graph.onnx").write_text(text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "model", layers=1)
    return tmp_path / "model"


@pytest.mark.parametrize("empty", [False, True])
def test_a_new_or_empty_folder_is_written(tmp_path: Path, empty: bool) -> None:
    target = tmp_path / "out"
    if empty:
        target.mkdir()
    write(target)
    assert {path.name for path in target.iterdir()} == {"graph.onnx", RECORD}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_export_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    write(target, "old")

    def fail() -> None:
        with export_target(target) as temporary:
            (temporary / "graph.onnx").write_text("half")
            assert (target / "graph.onnx").read_text() == "old"
            raise ModelError("the numbers differ")

    with pytest.raises(ModelError):
        fail()
    assert (target / "graph.onnx").read_text() == "old"
    write(target, "new")
    assert (target / "graph.onnx").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["notes.txt", "graph.onnx", "folder/thesis.txt"])
def test_an_earlier_export_with_files_of_others_is_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "out"
    write(target)
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text("mine, and not to be lost")
    with pytest.raises(UsageError, match=rf"{name.partition('/')[0]} in it did not come from that: move"):
        write(target)
    assert (target / name).read_text() == "mine, and not to be lost"


def test_what_comes_while_it_is_written_is_not_lost(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def while_somebody_writes() -> None:
        with export_target(target):
            target.mkdir()
            (target / "thesis.txt").write_text("mine")

    with pytest.raises(UsageError, match="not empty"):
        while_somebody_writes()
    assert (target / "thesis.txt").read_text() == "mine"


def test_a_rename_that_fails_puts_the_earlier_export_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    write(target, "old")
    rename, calls = os.rename, []

    def second_fails(source: Path, to: Path, **_: object) -> None:
        calls.append(to)
        if len(calls) == 2:
            raise OSError(5, "the disk is gone")
        rename(source, to)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OutputError, match="the disk is gone"):
        write(target, "new")
    assert (target / "graph.onnx").read_text() == "old"


@pytest.mark.parametrize("target", [".", "..", "../..", "here"])
def test_the_folder_one_is_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    where = Path(target) if target != "here" else tmp_path / "here"
    with pytest.raises(UsageError, match="the folder that you are in"):
        check_target(where)


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("mine")
    for name in ("link", "file"):
        with pytest.raises(UsageError, match=f"is a {name}"):
            check_target(tmp_path / name)


@pytest.mark.parametrize(
    "words", [["export"], ["export", "--to", "huggingface"], ["export", "--to", "tensorrt"], ["quantize"]]
)
@pytest.mark.parametrize("target", ["home", ".", "{model}", "{model}/.."])
def test_the_command_line_deletes_nothing(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    target: str,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    monkeypatch.chdir(tmp_path if target == "home" else home)
    before = sorted(tmp_path.rglob("*"))
    where = target.format(model=model)
    assert main([words[0], str(model), *words[1:], "-o", where]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"-o {Path(where)}" in said
    assert "folder" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_export_leaves_no_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc, "write_ctc", lambda *_: (_ for _ in ()).throw(ModelError("cannot be exported")))
    assert main(["export", str(model), "-o", str(tmp_path / "new" / "folder")]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
