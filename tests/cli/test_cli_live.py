"""``stapes live``: what stands on the screen, what a pipe gets, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import stapes
from stapes.cli.captions import Captions
from stapes.cli.interrupts import interruptible
from stapes.cli.main import main
from stapes.cli.terminal import Terminal
from stapes.inference.live_events import Committed, Event, Final, Partial
from stapes.transcript import Word


def word(text: str) -> Word:
    return Word(text, 0.0, 0.1, 0.9)


def committed(text: str) -> Committed:
    return Committed(0, [word(f" {each}") for each in text.split()])


def partial(text: str) -> Partial:
    return Partial(0, [word(f" {each}") for each in text.split()])


FINAL = Final(0, "", None, True)


class Screen(Terminal):
    """A terminal whose rows can be looked at."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.out_is_terminal = is_terminal
        self.rows = [""]

    def out(self, text: str) -> None:
        for part in text.replace("\x1b[2m", "<").replace("\x1b[0m", ">").replace("\r\x1b[2K", "\0").splitlines(True):
            for piece in part.rstrip("\n").split("\0")[1:] if "\0" in part else [self.rows[-1] + part.rstrip("\n")]:
                self.rows[-1] = piece
            if part.endswith("\n"):
                self.rows.append("")


def shown(events: list[Event], *, is_terminal: bool = True) -> list[str]:
    screen = Screen(is_terminal=is_terminal)
    captions = Captions(screen, json=False)
    for event in events:
        captions.show(event)
    return screen.rows


def test_provisional_words_are_dim_and_replaced(monkeypatch: pytest.MonkeyPatch):
    assert shown([partial("Mister Clerk")]) == ["<Mister Clerk>"]
    assert shown([partial("Mister Clerk"), committed("Mister"), partial("Quilter is")]) == ["Mister< Quilter is>"]
    assert shown([committed("Mister Quilter"), partial("was"), FINAL]) == ["Mister Quilter", ""]
    assert shown([partial("uh"), FINAL]) == [""]


def test_rows_are_broken_between_words_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "24")
    text = " ".join(f"word{n}" for n in range(20))
    rows = shown([partial("something"), *(committed(each) for each in text.split()), partial("a " * 60), FINAL])
    assert " ".join(rows).split() == text.split()
    assert all(len(row) <= 24 for row in rows)


def test_a_pipe_gets_committed_words_only():
    events = [partial("no"), committed("Yes"), partial("no"), committed("it is."), FINAL, committed("Next"), FINAL]
    assert shown(events, is_terminal=False) == ["Yes it is.", "Next", ""]


class Session:
    """Answers every chunk with its loudest sample."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def feed(self, pcm: np.ndarray) -> list[Event]:
        return [committed(str(round(float(pcm.max()) * 32768)))] if len(pcm) else []

    def events(self) -> list[Event]:
        return []

    def finish(self, timeout: float) -> list[Event]:
        self.ended.set()
        return [committed("last"), FINAL]


class Recognizer:
    name = "fake"

    def __init__(self) -> None:
        self.session = Session()
        self.asked: Any = None

    def stream(self, options: Any, turns: Any) -> Session:
        self.asked = options, turns
        return self.session

    def __enter__(self) -> Recognizer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def recognizer(monkeypatch: pytest.MonkeyPatch) -> Recognizer:
    fake = Recognizer()
    monkeypatch.setitem(vars(stapes), "load", lambda *_, **settings: fake)
    return fake


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The end that others write into; the other one is stdin."""
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(read, "rb", buffering=0)))
    with os.fdopen(write, "wb", buffering=0) as file:
        yield file


def test_stdin_is_heard_as_it_comes(recognizer: Recognizer, pipe: Any, capsys: pytest.CaptureFixture[str]):
    def speak() -> None:
        while recognizer.asked is None:
            time.sleep(0.01)
        for level in (3, 5):
            pipe.write(np.full(800, level, "<i2").tobytes())
            time.sleep(0.1)
        pipe.close()

    threading.Thread(target=speak).start()
    assert main(["live", "-", "--language", "de", "--silence-duration-ms", "700"]) == 0
    assert capsys.readouterr().out == "3 5 last\n"
    options, turns = recognizer.asked
    assert (options.language, turns.silence_duration_ms) == ("de", 700)


def test_json_lines(recognizer: Recognizer, pipe: Any, capsys: pytest.CaptureFixture[str]):
    pipe.write(np.full(800, 3, "<i2").tobytes())
    pipe.close()
    assert main(["live", "-", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["committed", "committed", "final"]


def test_ctrl_c_is_the_end_and_the_last_words_are_told(
    recognizer: Recognizer, pipe: Any, capsys: pytest.CaptureFixture[str]
):
    def interrupt() -> None:
        pipe.write(np.full(800, 3, "<i2").tobytes())
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with interruptible():
        threading.Thread(target=interrupt).start()
        assert main(["live", "-"]) == 0
    assert capsys.readouterr().out == "3 last\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["talk.mp3"], 2), (["-", "--rate", "1"], 2), (["-", "--encoding", "opus"], 2), (["-", "--threshold", "2"], 2)],
)
def test_what_makes_no_sense_is_said(recognizer: Recognizer, pipe: Any, arguments: list[str], code: int):
    assert main(["live", *arguments]) == code


def test_a_file_with_a_header_is_no_live_sound(recognizer: Recognizer, pipe: Any, capsys: pytest.CaptureFixture[str]):
    pipe.write(b"RIFF" + bytes(1000))
    pipe.close()
    assert main(["live", "-"]) == 1
    assert "transcribe -" in capsys.readouterr().err


def test_no_microphone_is_said_with_the_remedy(
    recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["live"]) == 3
    assert "pip install" in capsys.readouterr().err
