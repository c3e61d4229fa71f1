"""The page against a real server with a real model: a recorded voice as a file, and through the microphone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from browser import Browser, Page, wait_for
from servers import Server

DATA = Path(__file__).parents[3] / "shared" / "data" / "librispeech"


@pytest.fixture(scope="module")
def clip() -> tuple[Path, str]:
    """Six seconds of speech, and what is said."""
    if not DATA.is_dir():
        pytest.skip(f"the recordings are not here: {DATA} is absent")
    first = json.loads((DATA / "manifest.jsonl").open().readline())
    return DATA / first["audio"], first["text"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, clip: tuple[Path, str], whisper: Server) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("microphone")
    samples, rate = soundfile.read(clip[0])
    soundfile.write(folder / "voice.wav", np.concatenate([samples, np.zeros(8 * rate)]), rate)
    browser = Browser(folder / "profile", microphone=folder / "voice.wav")
    page = browser.page(whisper.url)
    page.until("document.querySelector('#settings-form').elements.model.value === 'tiny.en'")
    yield page
    assert not page.problems
    page.close()
    browser.close()


def agreement(text: str, heard: list[str]) -> float:
    """The part of the words that is the same in both, without case and punctuation."""
    said = text.lower().replace("mister", "mr").split()
    return SequenceMatcher(None, said, [re.sub(r"[^a-z]", "", word.lower()) for word in heard], autojunk=False).ratio()


def words(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.word')].map((each) => each.textContent)")


def test_file_becomes_text_with_words_to_follow(page: Page, clip: tuple[Path, str]) -> None:
    page.choose_files("#files", clip[0])
    page.until("document.querySelector('.job')?.dataset.status === 'done'", 60)
    assert agreement(clip[1], words(page)) > 0.85
    middle = len(words(page)) // 2
    page.until("document.querySelector('#audio').readyState >= 1")
    page.run(f"document.querySelectorAll('.word')[{middle}].click()")
    page.until("document.querySelector('.now')")
    assert page.text(".now") == words(page)[middle]
    assert 1 < page.run("document.querySelector('#audio').currentTime") < 5
    assert "English" in page.text("#facts")


def test_voice_becomes_captions(page: Page, clip: tuple[Path, str]) -> None:
    """Words appear while they are spoken, those that were committed stay, and the recording has them afterwards."""
    before = page.run("document.querySelectorAll('.job').length")
    page.click("#start-live")
    committed: list[str] = []

    def heard_all() -> bool:
        committed.append(page.run("document.querySelector('.committed')?.textContent ?? ''"))
        return page.run("document.querySelector('#live-finals').children.length > 0")

    wait_for(heard_all, 100)
    assert all(later.startswith(earlier.rstrip(".,")) for earlier, later in pairwise(committed[:-1]))
    page.click("#live-stop")
    page.until(f"document.querySelector('.job:nth-child({before + 1})')?.dataset.status === 'done'", 100)
    assert agreement(clip[1], words(page)) > 0.8
    page.until("document.querySelector('#audio').readyState >= 1")
    page.click(".word")
    page.until("document.querySelector('.now')")
