"""Models trained here, on disk: what is saved is what is loaded, and damage is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from stapes.checkpoints.folders import written_whole
from stapes.checkpoints.spectrogram_models import (
    build,
    load_spectrogram_model,
    open_spectrogram_model,
    save_spectrogram_model,
)
from stapes.errors import ModelError, OutputError
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTCConfig, WhisperEncoderConfig
from stapes.models.hybrid import HybridConfig
from stapes.text.ctc_tokenizer import CTCTokenizer

TOKENIZER = CTCTokenizer({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5, "b": 6})
CONFORMER = ConformerConfig(20, 24, 2, 4, 32, 7, 4, 8, dropout=0.2)
CONFIGS = {
    "ctc": CTCConfig(CONFORMER, 7),
    "whisper": CTCConfig(WhisperEncoderConfig(20, 24, 2, 4, audio_context=50), 7),
    "hybrid": HybridConfig(CONFORMER, 7, 2, 4, 32),
    "attention": HybridConfig(CONFORMER, 7, 2, 4, 32, has_ctc=False),
}


def saved(folder: Path, name: str = "ctc") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = build(CONFIGS[name]).state_dict()
    save_spectrogram_model(folder, CONFIGS[name], weights, TOKENIZER)
    return weights


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_is_what_is_loaded(name: str, tmp_path: Path) -> None:
    weights = saved(tmp_path / "model", name)
    checkpoint = open_spectrogram_model(tmp_path / "model")
    assert checkpoint.config == CONFIGS[name]
    assert checkpoint.tokenizer.vocabulary == TOKENIZER.vocabulary
    model = load_spectrogram_model(checkpoint, torch.float32, torch.device("cpu"))
    assert not model.training
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 3}, "7 tokens"),
        ({"encoder": {"type": "lstm"}}, "which encoder"),
        ({"encoder": {"type": "conformer", "width": 24, "heads": 5}}, "multiple of its heads"),
        ({"encoder": {"type": "conformer", "subsampling": 3}}, "subsampling"),
        ({"head_dropout": "much"}, "head_dropout"),
        ({"model_type": "whisper"}, "whisper"),
    ],
)
def test_a_damaged_config_is_told(values: dict[str, object], said: str, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    change(tmp_path / "model", **values)
    with pytest.raises(ModelError, match=said):
        open_spectrogram_model(tmp_path / "model")


def test_weights_that_do_not_belong_are_told(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    encoder = json.loads((tmp_path / "model" / "config.json").read_text())["encoder"]
    change(tmp_path / "model", encoder=encoder | {"layers": 3})
    with pytest.raises(ModelError, match="lacks the weights"):
        load_spectrogram_model(open_spectrogram_model(tmp_path / "model"), torch.float32, torch.device("cpu"))
    change(tmp_path / "model", encoder=encoder | {"layers": 1})
    with pytest.raises(ModelError, match=r"layers\.1"):
        load_spectrogram_model(open_spectrogram_model(tmp_path / "model"), torch.float32, torch.device("cpu"))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with written_whole(folder) as new:
        (new / "file").write_text("first")

    def fail(new: Path) -> None:
        (new / "file").write_text("second")
        raise RuntimeError

    with pytest.raises(RuntimeError), written_whole(folder) as new:
        fail(new)
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(OutputError, match="free space"), written_whole(folder):
        raise OSError(28, os.strerror(28))
    assert (folder / "file").read_text() == "first"
