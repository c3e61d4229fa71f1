"""The command line with a CTC model in a folder: transcribe, models, evaluate."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import soundfile

from ctc_models import LETTERS, babble, save
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.inference.ctc_family import CTCFamily
from stapes.recognizer import Recognizer
from stapes.text.ctc_tokenizer import CTCTokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and two recordings; the tests stand in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(tmp_path / "models" / "small-ctc", "layer")
    for seed in range(2):
        soundfile.write(tmp_path / f"{seed}.wav", babble(1.5 + seed, seed), 16_000)
    return tmp_path


MODEL = ["--model", "models/small-ctc", "--device", "cpu", "--no-vad"]


def test_all_formats_are_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", "0.wav", "1.wav", "broken.wav", *MODEL, "-o", "out", "--word-timestamps"]) == 1
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert names == sorted(f"{seed}.{format}" for seed in range(2) for format in ("json", "srt", "tsv", "txt", "vtt"))
    transcript = json.loads((folder / "out" / "1.json").read_text())
    assert transcript["model"] == "small-ctc"
    assert transcript["language"] is None
    assert transcript["skipped"] == []
    words = [word["word"] for segment in transcript["segments"] for word in segment["words"]]
    assert "".join(words).strip() == transcript["text"] == " ".join((folder / "out" / "1.txt").read_text().split())
    assert all(segment["avg_logprob"] < 0 and segment["end"] > segment["start"] for segment in transcript["segments"])
    assert "broken.wav does not exist" in capsys.readouterr().err


def test_what_cannot_apply_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--initial-prompt", "Hello"], ["--task", "translate"], ["--best_of", "3"], ["--lm", "none.arpa"]):
        code = main(["transcribe", "0.wav", *MODEL, *option])
        assert code in (2, 3)
        assert option[1 if option[0] == "--lm" else 0].replace("_", "-") in capsys.readouterr().err


def test_a_language_that_the_model_cannot_choose_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", "0.wav", *MODEL, "--language", "de"]) == 2
    assert "--language de cannot be chosen with small-ctc" in capsys.readouterr().err


def test_the_language_that_a_model_was_trained_for_may_be_named() -> None:
    model = types.SimpleNamespace(languages=())
    family = CTCFamily.__new__(CTCFamily)
    family.model, family.tokenizer = model, CTCTokenizer(LETTERS, language="de")  # type: ignore[assignment]
    recognizer = Recognizer.__new__(Recognizer)
    recognizer.family, recognizer.name = family, "small"
    for language in ("de", "German"):
        recognizer.check_language(language)
    with pytest.raises(UsageError, match="it knows de"):
        recognizer.check_language("fr")
    model.languages = ("deu", "eng")  # named to the model itself, which knows what it has
    recognizer.check_language("fr")


def test_where_no_words_were_heard_a_note_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile.write(folder / "short.wav", babble(1.5, 0)[:200], 16_000)
    assert main(["transcribe", "short.wav", "0.wav", *MODEL]) == 0
    captured = capsys.readouterr()
    assert "no words were heard in short.wav" in captured.err
    assert "no words were heard in 0.wav" not in captured.err


def test_n_best_is_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", "0.wav", *MODEL, "--n-best", "2", "-f", "json"]) == 0
    (segment,) = json.loads(capsys.readouterr().out)["segments"]
    assert [set(each) for each in segment["alternatives"]] == [{"text", "score", "acoustic"}] * 2
    assert segment["text"].strip() == segment["alternatives"][0]["text"]


def test_a_language_model_that_was_built_is_listened_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "texts.txt").write_text("bad cab\na cab fed a dad\nhe jade\n" * 20)
    for units in ("words", "tokens"):
        build = ["lm", "build", "texts.txt", "-o", f"{units}.arpa", "--model", "models/small-ctc", "--units", units]
        assert main(build) == 0
        capsys.readouterr()
        assert main(["transcribe", "0.wav", *MODEL, "--lm", f"{units}.arpa", "--lm-weight", "2", "--json"]) == 0
        (transcript,) = json.loads(capsys.readouterr().out)["transcripts"]
        assert transcript["text"]


def test_models_lists_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--model-dir", "models"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "small-ctc" in line]
    assert "wav2vec2" in line
    assert main(["transcribe", "0.wav", "--model", "small-ctc", "--model-dir", "models", "--offline"]) == 0


def test_evaluate_measures_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"audio": f"{seed}.wav", "text": "A B", "duration": 1.5 + seed, "lang": "en"} for seed in range(2)]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["evaluate", "models/small-ctc", "manifest.jsonl", "-o", "result", "--device", "cpu", "--json"]
    assert main([*argv, "--language", "en"]) == 0
    result = json.loads((folder / "result" / "result.json").read_text())
    text = json.dumps(result)
    assert "small-ctc" in text
    utterances = [json.loads(line) for line in (folder / "result" / "utterances.jsonl").read_text().splitlines()]
    assert len(utterances) == 2
