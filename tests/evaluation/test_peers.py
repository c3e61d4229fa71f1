"""Other systems hear the same samples through one protocol; the command against a server of OpenAI's contract."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from stapes.cli.main import main
from stapes.errors import StapesError, UsageError
from stapes.evaluation.peers import is_peer, open_peer, samples
from stapes.evaluation.results import read_result, read_utterances
from stapes.evaluation.scoring import word_errors
from stapes.options import TranscribeOptions

DATA = Path(__file__).parents[3] / "shared" / "data"


class Server(ThreadingHTTPServer):
    """Answers as OpenAI's transcriptions do: the text is how long the sound is, in tenths of a second."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.forms: list[dict[str, bytes]] = []
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        boundary = self.headers["Content-Type"].partition("boundary=")[2].encode()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form: dict[str, bytes] = {"path": self.path.encode()}
        for part in body.split(b"--" + boundary)[1:-1]:
            head, _, value = part.partition(b"\r\n\r\n")
            form[head.split(b'name="')[1].split(b'"')[0].decode()] = value[:-2]
        self.server.forms.append(form)
        time.sleep(self.server.delay)
        sound, rate = soundfile.read(io.BytesIO(form["file"]))
        broken = form["model"] == b"broken"
        answer = b"no such model" if broken else json.dumps({"text": f" {10 * len(sound) / rate:.0f} "}).encode()
        self.send_response(404 if broken else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    lines = []
    for i in range(1, 9):
        soundfile.write(tmp_path / f"{i}.wav", np.full(i * 4410, 0.1), 44_100)
        lines.append({"audio": f"{i}.wav", "text": str(i), "duration": i / 10, "lang": "en", "speaker": "s"})
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_openai_contract(server: Server, manifest: Path) -> None:
    peer = open_peer(f"openai:{server.url}?concurrency=3#large", options=TranscribeOptions(initial_prompt="Numbers."))
    paths = [str(manifest.parent / f"{i}.wav") for i in range(1, 9)]
    found = dict(peer.transcribe_many([*paths, "/nowhere.wav"], "de"))
    assert [found[path] for path in paths] == [str(i) for i in range(1, 9)]
    assert isinstance(found["/nowhere.wav"], StapesError)
    form = server.forms[0]
    assert (form["path"], form["model"], form["language"]) == (b"/v1/audio/transcriptions", b"large", b"de")
    assert form["prompt"] == b"Numbers."
    ((_, error),) = open_peer(f"openai:{server.url}/v1#broken").transcribe_many(paths[:1], None)
    assert "answered 404 (no such model)" in str(error)


def test_samples_are_at_16_khz_whatever_the_file(manifest: Path) -> None:
    heard = samples(str(manifest.parent / "5.wav"))
    assert (heard.dtype, heard.shape) == (np.float32, (8000,))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("openai:nowhere", "give the server's address"),
        ("faster-whisper:base?beams=5", "has no option 'beams': it has batch_size, beam_size, compute_type"),
        ("whisper.cpp:base", "is no system: say faster-whisper:MODEL"),
        ("transformers:", "is no system"),
    ],
)
def test_a_peer_that_makes_no_sense_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_peer(name)


def test_names_with_a_system_before_them_are_peers() -> None:
    assert is_peer("faster-whisper:base")
    assert not any(map(is_peer, ("base", "openai/whisper-base", "faster-whisper", "C:/models")))


def test_the_command_measures_names_failures_and_goes_on(
    server: Server, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "8.wav").unlink()
    words = [f"openai:{server.url}#m", str(manifest), "-o", str(tmp_path / "out"), "--normalizer", "none"]
    words += ["--threads", "1", "--precision", "fp32"]
    assert main(["evaluate", *words]) == 1
    out, err = capsys.readouterr()
    assert "WER 12.50 %" in out
    assert "1 failed: all of their words count as deleted" in out
    assert "8.wav" in err
    result = read_result(tmp_path / "out")
    assert (result.system, result.model.name, result.corpus.name) == ("openai", "m", "numbers")
    assert (result.failed, result.counts.deletions, result.normalizer) == (1, 1, "none")
    assert result.machine["fingerprint"]
    requests = len(server.forms)
    assert main(["evaluate", "--json", *words]) == 1  # complete: adds up again, asks no one
    out, _ = capsys.readouterr()
    assert json.loads(out)["counts"] == {"words": 8, "hits": 7, "substitutions": 0, "deletions": 1, "insertions": 0}
    assert len(server.forms) == requests
    assert main(["evaluate", *words, "--beam-size", "5"]) == 2
    assert "options.beam_size was 1, now 5" in capsys.readouterr().err


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "base"]) == 2
    assert main(["evaluate", "base", "nothing", "-o", str(tmp_path / "out"), "--data", str(tmp_path)]) == 2
    assert main(["evaluate", "base", "nothing"]) == 2
    err = capsys.readouterr().err
    assert "name a model and a manifest" in err
    assert "there is no such manifest and no corpus of that name" in err
    assert "give -o DIR" in err


def test_an_interrupted_command_leaves_whole_lines_and_goes_on(server: Server, manifest: Path, tmp_path: Path) -> None:
    server.delay = 0.5
    out = tmp_path / "out"
    model = f"openai:{server.url}?concurrency=1#m"
    command = [sys.executable, "-m", "stapes", "evaluate", model, str(manifest), "-o", str(out), "--normalizer", "none"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not ((out / "utterances.jsonl").exists() and (out / "utterances.jsonl").stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert b"the same command goes on" in err
    done = len(list(read_utterances(out)))
    assert 1 <= done < 8
    assert not (out / "result.json").exists()
    server.delay = 0.0
    asked = len(server.forms)
    assert main(command[3:]) == 0
    assert len(server.forms) - asked == 8 - done
    assert read_result(out).wer.value == 0.0


@pytest.mark.data
@pytest.mark.parametrize(
    "name", ["faster-whisper:tiny.en?compute_type=int8", "faster-whisper:tiny.en?batch_size=4", "transformers:tiny.en"]
)
def test_installed_peers_load_models_that_come_with_pip(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = name.partition(":")[0].replace("-", "_")
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[peers]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STAPES_MODEL_DIR", raising=False)
    with (DATA / "librispeech/manifest.jsonl").open(encoding="utf-8") as lines:
        row = json.loads(next(lines))
    peer = open_peer(name, device="cpu", threads=1)
    paths = [str(DATA / "librispeech" / row["audio"]), "/nowhere.wav"]
    found = dict(peer.transcribe_many(paths, "en"))
    peer.close()
    assert isinstance(found["/nowhere.wav"], StapesError)
    text = found[paths[0]]
    assert isinstance(text, str)
    heard = "".join(letter for letter in text.upper() if letter.isalpha() or letter == " ")
    errors = word_errors(row["text"], heard.replace("MR ", "MISTER "))
    assert errors.hits >= 15, text
    assert peer.facts.path is not None
