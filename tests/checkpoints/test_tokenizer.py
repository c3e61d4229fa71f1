"""A bare ``.pt`` borrows the tokenizer of a model of its kind, never that of another kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_whisper import CONFIG, random_weights, write_huggingface, write_openai

from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.errors import ModelError
from stapes.text.tokenizers import LANGUAGES

VOCABULARIES = {"english": 51864, "99 languages": 51865, "100 languages": 51866}


def write_tokenizer(folder: Path, kind: str) -> None:
    """A tokenizer.json with the markers of its kind and words that mean nothing."""
    words = 50256 if kind == "english" else 50257
    languages = list(LANGUAGES)[: 100 if kind == "100 languages" else 99]
    markers = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in languages)]
    markers += [f"<|{name}|>" for name in ("translate", "transcribe", "startoflm", "startofprev", "nospeech")]
    markers.append("<|notimestamps|>")
    definition = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": words + i,
                "content": marker,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, marker in enumerate(markers)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {f"w{i}": i for i in range(words)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))


@pytest.fixture(autouse=True)
def _only_our_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stapes.checkpoints.catalog._PACKAGES", {})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def install(models: Path, name: str, kind: str) -> None:
    config = replace(CONFIG, vocab_size=VOCABULARIES[kind])
    write_tokenizer(write_huggingface(models / name, random_weights(config=config), config=config), kind)


def bare(folder: Path, kind: str) -> Path:
    config = replace(CONFIG, vocab_size=VOCABULARIES[kind])
    return write_openai(folder / "mine.pt", random_weights(config=config), config)


NAMES = {"english": "tiny.en", "99 languages": "base", "100 languages": "turbo"}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_model_of_the_same_kind_lends_it(tmp_path, kind):
    install(tmp_path / "models", NAMES[kind], kind)
    tokenizer = open_tokenizer(open_checkpoint(bare(tmp_path, kind)), tmp_path / "models")
    assert len(tokenizer.language_ids) == {"english": 0, "99 languages": 99, "100 languages": 100}[kind]
    assert tokenizer.timestamp_begin + 1501 == VOCABULARIES[kind]


@pytest.mark.parametrize(("kind", "other"), [("100 languages", "99 languages"), ("99 languages", "english")])
def test_another_kind_does_not(tmp_path, kind, other):
    install(tmp_path / "models", NAMES[other], other)
    with pytest.raises(ModelError, match=r"mine\.pt comes without a tokenizer\.json"):
        open_tokenizer(open_checkpoint(bare(tmp_path, kind)), tmp_path / "models")


@pytest.mark.parametrize(("kind", "other"), [("100 languages", "99 languages"), ("99 languages", "english")])
def test_one_of_another_kind_beside_it_is_named(tmp_path, kind, other):
    path = bare(tmp_path, kind)
    write_tokenizer(tmp_path, other)
    with pytest.raises(ModelError, match=r"tokenizer\.json belongs to another model"):
        open_tokenizer(open_checkpoint(path), tmp_path / "models")


def test_its_own_beside_it_is_taken(tmp_path):
    path = bare(tmp_path, "100 languages")
    write_tokenizer(tmp_path, "100 languages")
    assert "yue" in open_tokenizer(open_checkpoint(path), tmp_path / "models").language_ids
