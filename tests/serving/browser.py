"""Headless Chromium for tests of the page, driven over its DevTools protocol; nothing else has to be installed."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """Chromium's path, else skip the test."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no Chromium is installed (looked for {', '.join(NAMES)})")


class Browser:
    """A process with a profile of its own. microphone: a WAV file that it hears over and over."""

    def __init__(self, profile: Path, *, microphone: Path | None = None) -> None:
        self.profile = profile
        arguments = [
            chromium(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--mute-audio",
            "--autoplay-policy=no-user-gesture-required",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
        ]
        if microphone:
            arguments += [
                "--use-fake-device-for-media-stream",
                "--use-fake-ui-for-media-stream",
                f"--use-file-for-fake-audio-capture={microphone}",
            ]
        self._process = subprocess.Popen(
            [*arguments, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._port = int(wait_for(self._port_file).splitlines()[0])

    def _port_file(self) -> str:
        assert self._process.poll() is None, "Chromium ended at once"
        file = self.profile / "DevToolsActivePort"
        return file.read_text() if file.exists() else ""

    def page(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        """Open an address in the browser's tab, and wait until it is loaded."""
        with urlopen(f"http://127.0.0.1:{self._port}/json/list") as answer:
            target = next(each for each in json.load(answer) if each["type"] == "page")
        page = Page(target["webSocketDebuggerUrl"])
        page.look(width, height, dark=dark)
        page.go(url)
        return page

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


class Page:
    """One tab. ``problems`` are uncaught errors, error messages and refusals of the content security policy."""

    def __init__(self, url: str) -> None:
        self._socket = connect(url, max_size=None)
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._heard(message.get("method"), message.get("params", {}))

    def _heard(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.problems.append(f"{event['entry']['text']} ({event['entry'].get('url')})")
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.call("Page.handleJavaScriptDialog", accept=True)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited. Errors in it are errors here."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"].get("description", script))
        return result["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> Any:
        """Wait until an expression is true, as JavaScript sees it."""
        return wait_for(lambda: self.run(f"Boolean({condition})"), seconds, what=condition)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def key(self, key: str, *, alt: bool = False) -> None:
        """Press a key."""
        code = {" ": "Space"}.get(key, f"Key{key.upper()}" if len(key) == 1 and key.isalpha() else key)
        shared = {"key": key, "code": code, "modifiers": 1 if alt else 0}
        text = {"text": key} if len(key) == 1 and not alt else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def choose_files(self, selector: str, *files: Path) -> None:
        """Put files into a file field, as a person does with its dialog."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def drop_files(self, *files: Path) -> None:
        """Drop files onto the page, with real drag events."""
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=400, y=300, data=data)

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Size of the window in CSS pixels, and colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


def wait_for(question: Any, seconds: float = 20, *, what: str = "") -> Any:
    """Ask until the answer is true; the answer."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < end, f"not true after {seconds} s: {what or question}"
        time.sleep(0.05)
    return answer
