"""CTC models as recognisers: options, languages, segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeDetector, FakeEngine, fake_recognizer

import stapes
from ctc_models import LETTERS, VOCABULARIES, babble, load, said, save, save_languages, text_of, whole
from fake_hub import FakeHub
from stapes.decoding.ctc import CTCToken
from stapes.errors import ModelError, UsageError
from stapes.inference.ctc_phrases import PhraseCutter, make_segment, marks_words, units_of
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.text.ctc_tokenizer import CTCTokenizer

pytestmark = pytest.mark.timeout(120)
TOKENIZER = CTCTokenizer(LETTERS)
SECOND = 16_000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def sound_is_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stapes.recognizer.VoiceActivityDetector", lambda **_: FakeDetector())


def test_options_that_cannot_apply_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "model", "layer")
    refused = {
        "task": "translate",
        "without_timestamps": True,
        "condition_on_previous_text": True,
        "temperature": 0.4,
        "temperature_increment_on_fallback": 0.1,
        "best_of": 3,
        "patience": 2.0,
        "length_penalty": 0.5,
        "initial_prompt": "Hello",
        "carry_initial_prompt": True,
        "compression_ratio_threshold": 2.0,
        "logprob_threshold": -0.5,
        "no_speech_threshold": 0.5,
        "suppress_tokens": "5",
        "lm_weight": 0.7,
        "lm": str(tmp_path / "none.arpa"),
        "hotwords": "1234",
    }
    pcm = babble(0.5)
    with load(tmp_path / "model") as recognizer:
        for option, value in refused.items():
            with pytest.raises((UsageError, ModelError)) as caught:
                recognizer.transcribe(pcm, sample_rate=SECOND, **{option: value})
            assert any(word in str(caught.value) for word in (option.replace("_", "-"), "none.arpa", "1234"))
        kept = {"temperature_increment_on_fallback": None, "logprob_threshold": None, "seed": 3, "language": "German"}
        assert recognizer.transcribe(pcm, sample_rate=SECOND, **kept).language == "de"
    with pytest.raises(UsageError, match="int8"):
        stapes.load(tmp_path / "model", device="cpu", precision="int8")


def test_a_whisper_has_no_use_for_a_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recognizer = fake_recognizer(monkeypatch, FakeEngine())
    for option in ({"lm": "words.arpa"}, {"lm_weight": 0.2}, {"n_best": 2}):
        with pytest.raises(UsageError, match=next(iter(option)).replace("_", "-")):
            recognizer.transcribe(babble(0.5), sample_rate=SECOND, **option)


def test_a_language_model_and_hotwords_speak_for_texts(tmp_path: Path) -> None:
    save(tmp_path / "model", "layer")
    pcm = babble(1.0)
    with load(tmp_path / "model") as recognizer:

        def run(**options: Any) -> stapes.Transcript:
            return recognizer.transcribe(pcm, sample_rate=SECOND, vad=False, word_timestamps=True, **options)

        plain, searched = run(), run(beam_size=8, n_best=3)
        alternatives = searched.segments[0].alternatives
        assert alternatives is not None
        assert len({each.text for each in alternatives}) == 3
        assert [each.score for each in alternatives] == sorted([each.score for each in alternatives], reverse=True)
        assert searched.segments[0].text.strip() == alternatives[0].text
        assert "alternatives" in searched.to_dict()["segments"][0]
        assert "alternatives" not in plain.to_dict()["segments"][0]

        second = alternatives[1].text
        grams = "".join(f"-0.5\t{word}\n" for word in sorted({"<s>", "</s>", *second.split()}))
        (tmp_path / "a.arpa").write_text(f"\\data\\\nngram 1={grams.count(chr(10))}\n\n\\1-grams:\n{grams}\n\\end\\\n")
        listening = run(lm=str(tmp_path / "a.arpa"), lm_weight=2.0)
        assert listening.text == second != searched.text
        hoping = run(hotwords=f"{second}, BAD CAB")
        assert hoping.text == second
    for transcript in (searched, listening, hoping):
        words = [word for segment in transcript.segments for word in segment.words or []]
        assert " ".join(word.word.strip() for word in words) == transcript.text
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert all(0 < word.probability <= 1 for word in words)


def test_languages_of_one_model_take_turns(tmp_path: Path) -> None:
    models = save_languages(tmp_path / "mms")
    pcm = babble(1.5)
    expected = {language: said_in(language, model, pcm) for language, model in models.items()}
    with load(tmp_path / "mms") as recognizer:

        def run(language: str | None) -> stapes.Transcript:
            return recognizer.transcribe(pcm, sample_rate=SECOND, vad=False, language=language)

        assert [run(language).text for language in (None, "deu", "eng", "deu", None)] == [
            expected[language] for language in ("eng", "deu", "eng", "deu", "eng")
        ]
        assert run("deu").language == "deu"
        assert run(None).language == "eng"
        with pytest.raises(UsageError, match="deu"):
            run("de")
    with load(tmp_path / "mms", language="deu") as recognizer:
        assert recognizer.transcribe(pcm, sample_rate=SECOND, vad=False).text == expected["deu"]


def test_the_adapter_of_a_language_is_fetched_with_the_model_or_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = save_languages(tmp_path / "published")
    pcm = babble(1.5)
    with FakeHub("someone/small-mms", tmp_path / "published") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for language in ("eng", "deu"):
            with load(Path("someone/small-mms"), model_dir=tmp_path / "models", language=language) as recognizer:
                text = recognizer.transcribe(pcm, sample_rate=SECOND, vad=False, language=language).text
            assert text == said_in(language, models[language], pcm)
        with pytest.raises(UsageError, match="fra"):
            load(Path("someone/small-mms"), model_dir=tmp_path / "models", language="fra")
        files = [name for name, _ in hub.requests]
    assert len(files) == len(set(files))
    assert "vocab.json" in files


def said_in(language: str, model: Wav2Vec2, pcm: np.ndarray) -> str:
    return text_of(said(whole(model, pcm)), VOCABULARIES[language])


# Segments.


def tokens_at(*words: tuple[str, float]) -> list[CTCToken]:
    """Words that begin at these seconds, a letter every four frames, a mark behind each."""
    out = []
    for word, start in words:
        for i, letter in enumerate(word + "|"):
            frame = round(start * 50) + 4 * i
            out.append(CTCToken(LETTERS[letter], frame, frame + 2, 0.9))
    return out


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_phrases_are_cut_at_pauses_and_share_all_frames(step: int) -> None:
    cutter = PhraseCutter(TOKENIZER, 0.02)
    rng = np.random.default_rng(1)
    words, time = [], 0.5
    for _ in range(300):
        words.append(("".join(rng.choice(list("ABCDEFGHIJ"), rng.integers(1, 6))), time))
        time += 0.5 + (2.0 if rng.random() < 0.05 else rng.uniform(0, 0.25))
    tokens = tokens_at(*words)
    frames = tokens[-1].end + 100
    phrases = [phrase for i in range(0, len(tokens), step) for phrase in cutter.add(tokens[i : i + step])]
    phrases += cutter.finish([], frames)
    edges = [(phrase.begin, phrase.end) for phrase in phrases]
    assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == frames
    segments = [make_segment(phrase.tokens, phrase.units, " ", 0.02, 0.0, with_words=True) for phrase in phrases]
    found = [word for segment in segments for word in segment.words or []]
    assert [word.word.strip() for word in found] == [word for word, _ in words]
    for segment, phrase in zip(segments, phrases, strict=True):
        assert segment.end - segment.start <= 12.0
        assert phrase.begin * 0.02 <= segment.start <= segment.end <= phrase.end * 0.02
        starts, ends = [w.start for w in segment.words or []], [w.end for w in segment.words or []]
        assert all(b - a < 1.0 for a, b in zip(ends, starts[1:], strict=False))


def test_a_model_without_marks_between_words_gives_a_word_a_token() -> None:
    tokenizer = replace(CTCTokenizer({"<pad>": 0, "你": 1, "好": 2}), delimiter=None)
    tokens = [CTCToken(1, 2, 3, 0.5), CTCToken(2, 6, 8, 0.25)]
    units = units_of(tokens, tokenizer)
    assert not marks_words(tokenizer)
    segment = make_segment(tokens, units, "", 0.02, 1.0, with_words=True)
    assert segment.text == "你好"
    assert [(word.word, round(word.start, 2), round(word.end, 2)) for word in segment.words or []] == [
        ("你", 1.04, 1.06),
        ("好", 1.12, 1.16),
    ]
