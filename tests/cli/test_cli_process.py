"""What only a process of its own shows: signals, closed pipes, import time."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# The real entry point with a recogniser that answers a.mp3 at once and then works in one long step.
SLOW = """
import sys, threading, time
import stapes
from stapes.transcript import Segment, Transcript

class Recognizer:
    def transcribe_many(self, paths, options, progress):
        progress.add_total(70.0)
        for path in paths:
            if path == "slow.mp3":
                time.sleep(60)
            yield Transcript(path=path, segments=[Segment(id=0, seek=0, start=0, end=7, text=" Hello.")])
            progress.advance(7.0)
    def close(self):
        pass

vars(stapes)["load"] = lambda *args, **settings: Recognizer()
from stapes.cli.main import main
main()
"""


def start(
    folder: Path, *argv: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    for name in ("a.mp3", "b.mp3", "slow.mp3"):
        (folder / name).touch()  # what is not there is named before anything is loaded
    return subprocess.Popen([sys.executable, "-c", SLOW, "transcribe", *argv], cwd=folder, stdout=stdout, stderr=stderr)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_finished_outputs_whole_and_ends_soon(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "a.mp3", "slow.mp3", "-o", "out", "-f", "srt", "--json")
    wait_for(tmp_path / "out" / "a.srt")
    begun = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert time.monotonic() - begun < 3  # usually half a second; the work would sleep for a minute
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a.srt"]
    assert (tmp_path / "out" / "a.srt").read_text() == "1\n00:00:00,000 --> 00:00:07,000\nHello.\n\n"
    assert "1 of 2" in err.decode()
    assert "--skip-existing" in err.decode()
    report = json.loads(out)
    assert report["interrupted"]
    assert [t["path"] for t in report["transcripts"]] == ["a.mp3"]


def test_a_reader_that_leaves_is_no_error_message(tmp_path: Path) -> None:
    process = start(tmp_path, "a.mp3", "b.mp3", "slow.mp3")
    assert process.stdout is not None
    process.stdout.close()  # before anything is printed, as a `| true` would
    assert process.stderr is not None
    err = process.stderr.read().decode()
    assert process.wait(timeout=10) == 1
    assert "Traceback" not in err
    assert "rror" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(tmp_path, "a.mp3", stdout=full.fileno())
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"No space left" in err
    assert b"Traceback" not in err


def test_a_terminal_gets_a_bar_in_audio_seconds_and_the_cursor_back(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(tmp_path, "a.mp3", "slow.mp3", stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"real time" not in shown:
        shown += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other end has closed
            break
        if not block:
            break
        shown += block
    out, _ = process.communicate(timeout=10)
    os.close(ours)
    assert process.returncode == 130
    assert b"0:07 / 1:10 audio" in shown
    assert b"interrupted: 1 of 2 recordings" in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    assert out == b"==> a.mp3 <==\nHello.\n\n"


def test_help_is_quick_and_needs_no_model_code() -> None:
    for words in (["--help"], ["transcribe", "--help"]):
        command = [sys.executable, "-X", "importtime", "-m", "stapes", *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert not {"torch", "numpy", "av", "transformers"} & imported
        assert (
            len(imported) < 550
        )  # some 410, which half a second is enough for; counted, for clocks are not to be trusted
    for said in ("--word-timestamps", "Language spoken", "stapes transcribe video.mp4 -f srt", "--max-line-width"):
        assert said in result.stdout
