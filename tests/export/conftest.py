"""Small random models, exported once for all tests of this folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ctc_models import save
from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import open_checkpoint
from stapes.export.onnx import export_onnx
from stapes.models.whisper import WhisperConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
from borrowed_tokenizer import a_tokenizer
from small_whisper import random_weights, write_huggingface

logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # pytest would keep thousands of lines of an export
CONFIG = WhisperConfig(80, 51865, 32, 1, 2, 2, 4, text_context=160)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> WhisperCheckpoint:
    """A small random Whisper as Hugging Face's folder, with a tokenizer."""
    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = a_tokenizer()
    weights = {name: 0.3 * value if value.ndim > 1 else value for name, value in random_weights(config=CONFIG).items()}
    write_huggingface(folder, weights, config=CONFIG, generation={"alignment_heads": [[0, 1], [1, 2], [1, 0]]})
    (folder / "tokenizer.json").symlink_to(tokenizer)
    return open_checkpoint(folder, "small")


@pytest.fixture(scope="session")
def exported(whisper: WhisperCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its ONNX folder."""
    folder = tmp_path_factory.mktemp("exported") / "small-onnx"
    export_onnx("small", catalog.Location(whisper.path), folder)
    return folder


@pytest.fixture(scope="session")
def ctc(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small random wav2vec 2.0 (with a group norm, the harder kind), and its ONNX folder."""
    folder = tmp_path_factory.mktemp("ctc")
    save(folder / "model", "group")
    export_onnx("model", catalog.Location(folder / "model"), folder / "onnx")
    return folder / "model", folder / "onnx"
