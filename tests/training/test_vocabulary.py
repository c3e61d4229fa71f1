"""Words as tokens, and what the command line says of a run before it begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_corpus import small_config, write_corpus

from stapes.cli.main import main
from stapes.data.manifest import Manifest
from stapes.errors import UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.dry_run import plan_run
from stapes.training.settings import to_toml
from stapes.training.vocabulary import encoder_of, open_vocabulary, word_vocabulary


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 12)


def test_each_word_is_a_token_and_reads_as_it_was(manifest: Path, tmp_path: Path) -> None:
    tokenizer = word_vocabulary(Manifest(manifest))
    encoder = encoder_of(tokenizer)
    for utterance in Manifest(manifest):
        ids = encoder.encode(utterance.text)
        assert len(ids) == len(utterance.text.split())
        assert tokenizer.decode(ids) == utterance.text
    tokenizer.save(tmp_path)
    again = CTCTokenizer.from_folder(tmp_path)
    assert encoder_of(again).encode("abc") == encoder.encode("abc")


def test_a_word_that_was_never_said_is_spelt(manifest: Path) -> None:
    tokenizer = word_vocabulary(Manifest(manifest))
    ids = encoder_of(tokenizer).encode("abcabcabcabc")
    assert len(ids) == 13  # the mark between words, and the letters
    assert tokenizer.decode(ids) == "abcabcabcabc"


def test_an_ordinary_vocabulary_writes_as_it_always_did(manifest: Path, tmp_path: Path) -> None:
    tokenizer = open_vocabulary(small_config(tmp_path, manifest), Manifest(manifest), None)
    assert encoder_of(tokenizer) is tokenizer


def test_too_many_words_are_refused(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stapes.training.vocabulary._MOST_WORDS", 3)
    with pytest.raises(UsageError, match="say bpe or char"):
        word_vocabulary(Manifest(manifest))


def test_a_plan_counts_what_the_run_has(manifest: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", manifest, steps=None)  # pyright: ignore[reportArgumentType]
    config.run.epochs = 3
    plan = plan_run(config)
    assert plan.utterances == 12
    assert plan.steps == 3 * plan.steps_per_epoch
    assert 0 < plan.trained_parameters < plan.parameters
    assert plan.memory_bytes > 16 * plan.trained_parameters
    assert f"{plan.steps:,}" in plan.text()


def test_dry_run_and_settings_at_the_command_line(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(small_config(tmp_path / "run", manifest, steps=5)))
    assert main(["train", "words", "--config", str(path), "--set", "run.epochs=none", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    assert not (tmp_path / "run").exists()
    assert main(["train", "words", "--print-config", "--set", "optimizer.peak_lr=1e-5"]) == 0
    assert "peak_lr = 1e-05" in capsys.readouterr().out
    assert main(["train", "word"]) == 2
    assert "did you mean words" in capsys.readouterr().err
    assert main(["train", "words", "--train", str(manifest), "--parallel", "dp=2"]) == 2
    assert "the number of processes" in capsys.readouterr().err
