"""The page as a person uses it, in headless Chromium against a server with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from browser import Browser, Page, wait_for
from fake_server import FakeServer

SECONDS = 5


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five seconds of a rising tone, which tells where one is."""
    path = tmp_path_factory.mktemp("audio") / "Talk & more.wav"
    times = np.arange(SECONDS * 48_000) / 48_000
    soundfile.write(path, 0.5 * np.sin(2 * np.pi * (200 + 300 * times) * times), 48_000)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, recording: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"), microphone=recording)
    yield browser
    browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def page(browser: Browser, server: FakeServer) -> Iterator[Page]:
    page = browser.page(server.url)
    page.until("document.querySelector('#server').dataset.ready === 'true'")
    yield page
    page.run("for (const name of Object.keys(localStorage)) localStorage.removeItem(name)")
    elsewhere = [url for url in page.requests if not url.startswith((server.url, "blob:", "ws", "about:"))]
    page.call("Page.navigate", url="about:blank")
    page.close()
    # What the browser itself reports of answers like 401 is no fault of the page.
    assert not [problem for problem in page.problems if "status of" not in problem and "WebSocket" not in problem]
    assert not elsewhere


def status(page: Page, row: int = 1) -> str:
    return page.run(f"document.querySelector('.job:nth-child({row})')?.dataset.status")


def done(page: Page, row: int = 1) -> None:
    wait_for(lambda: status(page, row) == "done", what=f"row {row} is done")


def transcript(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.text')].map((each) => each.textContent)")


def test_text_appears_while_it_is_made(page: Page, server: FakeServer, recording: Path) -> None:
    server.hold()
    page.choose_files("#files", recording)
    page.until("document.querySelectorAll('.segment').length === 1")
    assert status(page) == "working"
    page.until(f"Math.abs(document.querySelector('.job-bar').value - 2 / {SECONDS}) < 0.01")  # the length is known
    assert "40 %" in page.text(".job-detail")
    assert not page.run("document.querySelector('.text').isContentEditable")
    server.let_on()
    done(page)
    assert transcript(page) == ["Mister Quilter smiled.", "So did <we> & they."]
    assert "English" in page.text("#facts")
    assert page.run("[...document.querySelectorAll('.unsure')].map((each) => each.textContent)") == ["Quilter"]
    assert server.forms[0]["file"] == ("Talk & more.wav", recording.stat().st_size)
    assert server.forms[0]["timestamp_granularities[]"] == ["segment", "word"]


def test_dropped_files_become_rows(page: Page, server: FakeServer, recording: Path) -> None:
    page.drop_files(recording, recording, recording, recording)
    page.until("document.querySelectorAll('.job').length === 4")
    for row in range(1, 5):
        done(page, row)
    assert len(server.forms) == 4


def test_cancelling_stops_the_server_and_keeps_the_text(page: Page, server: FakeServer, recording: Path) -> None:
    server.hold()
    page.choose_files("#files", recording)
    page.until("document.querySelectorAll('.segment').length === 1")
    page.click(".job-stop")
    assert status(page) == "cancelled"
    wait_for(lambda: server.left == 1, what="the server noticed")
    assert transcript(page) == ["Mister Quilter smiled."]
    server.let_on()
    page.click("#again")
    done(page)
    assert len(transcript(page)) == 2


def test_busy_server_is_asked_again(page: Page, server: FakeServer, recording: Path) -> None:
    server.failures = [
        (429, {"retry-after": "1"}, {"error": {"message": "Too many."}}),
        (503, {"retry-after": "1"}, {}),
    ]
    page.choose_files("#files", recording)
    page.until("document.querySelector('.job-detail')?.innerText.includes('trying again')")
    done(page)
    assert len(server.forms) == 3


def test_refusals_are_said_in_words(page: Page, server: FakeServer, recording: Path) -> None:
    server.failures = [(413, {}, {"error": {"message": "Longer than 2 hours: split it."}}), (500, {}, {})]
    page.choose_files("#files", recording)
    page.until("document.querySelector('#problem-text').innerText === 'Longer than 2 hours: split it.'")
    assert status(page) == "failed"
    page.click("#again")
    page.until("document.querySelector('#problem-text').innerText.includes('status 500')")
    page.click("#again")
    done(page)
    assert page.run("document.querySelector('#problem').hidden")


def test_answer_that_ends_early_is_no_success(page: Page, server: FakeServer, recording: Path) -> None:
    server.is_cut = True
    page.choose_files("#files", recording)
    page.until("document.querySelector('#problem-text').innerText.includes('ended before')")
    assert status(page) == "failed"
    assert transcript(page) == ["Mister Quilter smiled."]


def test_key_is_asked_for_and_kept_in_the_session_alone(page: Page, server: FakeServer, recording: Path) -> None:
    server.key = "sk-secret"
    page.choose_files("#files", recording)
    page.until("!document.querySelector('#problem-key').hidden")
    assert "API key" in page.text("#problem-text")
    page.click("#problem-key")
    page.run("document.querySelector('[name=key]').focus()")
    page.type("sk-secret")
    page.click("#options [method=dialog] button")
    page.click("#again")
    done(page)
    kept = page.run("[JSON.stringify(localStorage), document.cookie, location.href, JSON.stringify(sessionStorage)]")
    assert ["sk-secret" in place for place in kept] == [False, False, False, True]
    command = page.run("document.querySelector('#curl').textContent")
    assert "sk-secret" not in command
    assert '-H "Authorization: Bearer $STAPES_API_KEY"' in command
    page.run("sessionStorage.clear()")


def test_options_reach_the_server_and_the_command(page: Page, server: FakeServer, recording: Path) -> None:
    page.run("""(() => {
      const { elements } = document.querySelector('#settings-form');
      elements.language.value = 'de';
      elements.model.value = 'tiny.en';
      elements.prompt.value = "It's @ 5; \\"so\\"";
      elements.hotwords.value = 'Siobhán, Kubernetes ,';
      elements.words.checked = elements.vad.checked = false;
      elements.prompt.dispatchEvent(new Event('input', { bubbles: true }));
    })()""")
    page.choose_files("#files", recording)
    done(page)
    form = server.forms[0]
    assert {name: form[name] for name in ("language", "model", "prompt", "keywords[]", "vad")} == {
        "language": ["de"],
        "model": ["tiny.en"],
        "prompt": ['It\'s @ 5; "so"'],
        "keywords[]": ["Siobhán", "Kubernetes"],
        "vad": ["false"],
    }
    assert form["timestamp_granularities[]"] == ["segment"]
    command = page.run("document.querySelector('#curl').textContent")
    assert f"curl {server.url}v1/audio/transcriptions" in command
    assert """--form-string 'prompt=It'\\''s @ 5; "so"'""" in command
    page.go(server.url)
    assert page.run("document.querySelector('[name=language]').value") == "de"


def test_corrections_are_in_downloads_and_keep_word_times(page: Page, server: FakeServer, recording: Path) -> None:
    page.choose_files("#files", recording)
    done(page)
    page.run("""(() => {
      const text = document.querySelector('.text');
      text.focus();
      getSelection().selectAllChildren(text.querySelectorAll('.word')[1]);
    })()""")
    page.type("Quiltër<b>")
    page.run("URL.createObjectURL = (blob) => ((saved = blob), 'blob:x'); HTMLAnchorElement.prototype.click = () => {}")
    page.click("[data-format=json]")
    saved = json.loads(page.run("saved.text()"))
    first = saved["segments"][0]
    assert first["text"] == " Mister Quiltër<b> smiled."
    assert [word["word"] for word in first["words"]] == [" Mister", " Quiltër<b>", " smiled."]
    assert [(word["start"], word["end"]) for word in first["words"]] == [(0.5, 0.9), (0.9, 1.4), (1.4, 2.0)]
    page.click("[data-format=vtt]")
    assert "Quiltër&lt;b> smiled." in page.run("saved.text()")
    assert "edited" in page.text(".job-detail")
    page.run("document.activeElement.blur()")
    assert not page.run("document.querySelector('.text b')")


def test_word_is_followed_and_a_click_seeks(page: Page, server: FakeServer, recording: Path) -> None:
    page.choose_files("#files", recording)
    done(page)
    page.until("document.querySelector('#audio').readyState >= 1")
    page.click(".word:nth-of-type(3)")
    page.until("document.querySelector('.now')?.textContent === 'smiled.'")
    assert page.run("document.querySelector('#audio').currentTime") == pytest.approx(1.4, abs=0.01)
    page.run("document.querySelector('#wave').focus()")
    page.key("ArrowLeft")
    page.until("document.querySelector('#audio').currentTime < 0.5")
    assert page.run("document.querySelector('#wave').getAttribute('aria-valuetext')") == "0:00 of 0:05"
    page.key(" ")
    page.until("document.querySelector('.now')?.textContent === 'Quilter'")
    page.key(" ")
    page.until("document.querySelector('#audio').paused")


def test_unsure_words_are_walked_with_a_key(page: Page, server: FakeServer, recording: Path) -> None:
    page.choose_files("#files", recording)
    done(page)
    page.until("document.querySelector('#audio').readyState >= 1")
    page.key("u")
    assert page.run("getSelection().toString()") == "Quilter"
    page.until("document.querySelector('#audio').currentTime === 0.9")


def test_letters_are_keys_outside_fields_alone_and_can_be_switched_off(
    page: Page, server: FakeServer, recording: Path
) -> None:
    page.choose_files("#files", recording)
    done(page)
    page.run("document.querySelector('.text').focus()")
    page.key("l")
    assert not page.run("!document.querySelector('#live').hidden")
    assert "l" in transcript(page)[0]
    page.run("document.activeElement.blur()")
    page.key("?")
    assert page.run("document.querySelector('#help').open")
    page.click("[name=singleKeys]")
    page.click("#help [method=dialog] button")
    page.key(",")
    assert not page.run("document.querySelector('#options').open")


def test_everything_has_a_name_for_screen_readers(page: Page, server: FakeServer, recording: Path) -> None:
    page.choose_files("#files", recording)
    done(page)
    roles: dict[str, list[str]] = {}
    for dialog in (None, "#open-options", "#open-help"):
        if dialog:
            page.click(dialog)
        page.call("Accessibility.enable")
        for node in page.call("Accessibility.getFullAXTree")["nodes"]:
            if not node.get("ignored"):
                name = node.get("name", {}).get("value", "")
                roles.setdefault(node["role"]["value"], []).append(name)
        page.run("document.querySelector('dialog[open]')?.close()")
    for role in ("button", "textbox", "combobox", "checkbox", "slider", "dialog", "complementary", "article"):
        assert roles[role], role
        assert all(roles[role]), role
    assert {"banner", "main", "navigation"} <= roles.keys()
    assert "Remove Talk & more.wav" in roles["button"]


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_nothing_is_wider_than_the_window(page: Page, server: FakeServer, recording: Path, width: int) -> None:
    page.look(width, 800)
    page.choose_files("#files", recording)
    done(page)
    page.click(".curl summary")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.click("#open-options")
    assert page.run("document.querySelector('#options').scrollWidth <= document.querySelector('#options').clientWidth")


def live(page: Page) -> dict[str, Any]:
    return page.run("""({
      committed: document.querySelector('.committed')?.textContent,
      provisional: document.querySelector('.provisional')?.textContent,
      state: document.querySelector('#live-state').textContent,
      clock: document.querySelector('#live-clock').textContent,
    })""")


def pitch(samples: np.ndarray, rate: int) -> np.ndarray:
    """The loudest frequency of every tenth of a second."""
    frames = samples[: len(samples) // (rate // 10) * (rate // 10)].reshape(-1, rate // 10)
    return np.abs(np.fft.rfft(frames * np.hanning(rate // 10))).argmax(1) * 10.0


def test_live_captions_from_the_microphone(page: Page, server: FakeServer) -> None:
    """What the microphone hears arrives as it is; sure words are told from those that may change."""
    page.click("#start-live")
    page.until("document.querySelector('.provisional')?.textContent === ' perhaps'")
    assert live(page)["committed"] == "Sure"
    colours = page.run(
        "['.committed', '.provisional'].map((each) => getComputedStyle(document.querySelector(each)).color)"
    )
    assert colours[0] != colours[1]
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("document.querySelector('#live-level span').getBoundingClientRect().height") == 4
    wait_for(lambda: len(server.heard["sess_1"]) > 2.5 * 48_000)
    page.click("#live-stop")
    done(page)
    assert server.protocols == ["realtime"]
    assert server.updates[0]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
    assert transcript(page) == ["Sure enough."]
    heard = np.frombuffer(bytes(server.heard["sess_1"]), "<i2") / 32768
    assert np.abs(heard).max() > 0.3
    pitches = pitch(heard, 24_000)
    rising = np.diff(pitches[np.abs(heard[: len(pitches) * 2400]).reshape(-1, 2400).max(1) > 0.2])
    assert np.median(rising) == pytest.approx(60, abs=10)  # 600 Hz a second: no piece is lost or twice
    page.until("document.querySelector('#audio').duration > 2.4")
    assert page.run("document.querySelector('#audio').duration") == pytest.approx(len(heard) / 24_000, abs=0.11)


def test_broken_connection_is_resumed_without_loss(page: Page, server: FakeServer) -> None:
    """TranscriptionSuite #239: a socket that dropped lost all that had been streamed."""
    server.drop_after = 48_000
    server.key = "sk-secret"
    page.run("document.querySelector('[name=key]').value = 'sk-secret'")
    page.run("document.querySelector('[name=key]').dispatchEvent(new Event('input', { bubbles: true }))")
    page.click("#start-live")
    page.until("document.querySelector('#live').dataset.state === 'reconnecting'")
    page.until("document.querySelector('#live').dataset.state === 'open'")
    wait_for(lambda: len(server.heard["sess_1"]) > 3 * 48_000)
    page.click("#live-stop")
    done(page)
    assert list(server.heard) == ["sess_1"]
    assert server.protocols == ["realtime", "openai-insecure-api-key.sk-secret"]
    page.until("document.querySelector('#audio').duration > 2")
    recorded = page.run("document.querySelector('#audio').duration")
    assert len(server.heard["sess_1"]) / 48_000 == pytest.approx(recorded, abs=0.001)
    page.run("sessionStorage.clear()")


def test_what_a_failed_session_lost_is_transcribed_from_the_recording(page: Page, server: FakeServer) -> None:
    server.refusal = "Too many sessions."
    page.click("#start-live")
    page.until("document.querySelector('#live-error').innerText === 'Too many sessions.'")
    page.until("document.querySelector('#live-clock').innerText === '0:01'")
    page.click("#live-stop")
    done(page)
    assert transcript(page) == ["Mister Quilter smiled.", "So did <we> & they."]
    assert len(server.forms) == 1


def test_recording_is_transcribed_when_it_ends(page: Page, server: FakeServer) -> None:
    page.key("r")
    page.until("document.querySelector('#live-clock').innerText === '0:01'")
    page.key("Escape")
    done(page)
    name, size = server.forms[0]["file"]
    assert name.endswith(".wav")
    assert size > 48_000
    assert not server.heard


def test_microphone_that_is_not_allowed(page: Page, server: FakeServer) -> None:
    page.run("navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', 'NotAllowedError') }")
    page.click("#start-record")
    page.until("document.querySelector('#live-error').innerText.includes('not allowed to use the microphone')")
    page.click("#live-stop")
    page.until("document.querySelector('#live').hidden")


def test_file_that_the_browser_cannot_play_is_transcribed_all_the_same(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "speech.amr"
    file.write_bytes(b"#!AMR\n" + bytes(2000))
    page.choose_files("#files", file)
    done(page)
    page.until("!document.querySelector('#player-error').hidden && document.querySelector('#wave').hidden")
    assert len(transcript(page)) == 2


def test_works_below_a_path_of_a_proxy(page: Page, server: FakeServer, recording: Path) -> None:
    page.go(f"{server.url}below/")
    page.choose_files("#files", recording)
    done(page)
    page.until("document.querySelector('#server').dataset.ready === 'true'")
    page.click("#start-live")
    page.until("document.querySelector('#live').dataset.state === 'open'")
    page.click("#live-stop")
    page.until("document.querySelector('#live').hidden")
    addresses = [url.removeprefix(server.url) for url in page.requests if url.startswith(server.url)]
    assert all(each.startswith("below/") for each in addresses[addresses.index("below/") :])


def test_on_a_touch_screen_correcting_is_switched_on(page: Page, server: FakeServer, recording: Path) -> None:
    """A tap on a word is to play it, not to bring up a keyboard."""
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.look(390, 844)
    page.go(f"{server.url}?touch")
    page.choose_files("#files", recording)
    done(page)
    assert not page.run("document.querySelector('.text').isContentEditable")
    page.click("#correct")
    assert page.run("document.querySelector('.text').isContentEditable")
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)
