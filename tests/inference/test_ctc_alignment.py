"""Words lie where they are said, over windows and lines; a pair that fails stops no other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import stapes
from ctc_models import babble, save
from stapes.cli.main import main
from stapes.errors import AudioError, UsageError
from stapes.inference import ctc_alignment
from stapes.inference.ctc_alignment import Aligner, segment_texts
from stapes.progress import Silent
from stapes.recognizer import Recognizer
from stapes.text.ctc_tokenizer import CTCTokenizer

HOP = 320
LETTERS = CTCTokenizer(
    {"<pad>": 0, "<unk>": 1, "|": 2, "'": 3, **{c: 4 + n for n, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}}
)


class Nothing:
    def feed(self, pcm: np.ndarray) -> None: ...

    def cut(self) -> None: ...

    def result(self) -> None: ...


class Reader:
    """A `CTCModel` for recordings that `sound` made: it reads the label that each frame's samples say."""

    tokenizer, device = LETTERS, torch.device("cpu")
    hop, window, context = HOP, 40 * HOP, 4 * HOP

    def __init__(self, *languages: str) -> None:
        self.lock = threading.Lock()
        self.languages = languages

    def frame_count(self, samples: int) -> int:
        return samples // HOP

    def meter(self) -> Nothing:
        return Nothing()

    def tokenizer_for(self, language: str | None) -> CTCTokenizer:
        if language is not None:
            raise UsageError(f"it knows no {language}")
        return LETTERS

    def set_language(self, language: str | None) -> None: ...

    def __call__(self, waveform: torch.Tensor, lengths: torch.Tensor, measured: Any = None) -> Any:
        frames = waveform.unfold(1, HOP, HOP).mean(dim=2)
        labels = (frames * 64).round().long()
        return 9.0 * torch.nn.functional.one_hot(labels, LETTERS.size).float(), lengths // HOP


class Counted(Silent):
    def __init__(self) -> None:
        self.total = self.done = 0.0

    def add_total(self, seconds: float) -> None:
        self.total += seconds

    def advance(self, seconds: float) -> None:
        self.done += seconds


def sound(text: str) -> np.ndarray:
    """A frame a letter; ``.`` is a blank."""
    labels = [0 if letter == "." else LETTERS.vocabulary[letter] for letter in text]
    return np.repeat(np.array(labels, dtype=np.float32) / 64, HOP)


SAID = "..H.EL.LO..|.YOU" + "." * 50 + "H.OW..|A.R.E|..YOU..." + "." * 30 + "B.Y.E.."


def align(text: str, said: str = SAID, **settings: Any) -> Any:
    return Aligner(Reader(), Silent(), sample_rate=16_000, **settings).align(sound(said), text)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_that_is_not_what_is_said_is_a_warning(batch: int) -> None:
    (right, wrong) = Aligner(Reader(), Silent(), sample_rate=16_000, batch=batch).align_many(
        [(sound(SAID), "hello you 42 how are you bye"), (sound(SAID), "quite different things")]
    )
    assert (right.error, right.warnings, wrong.error) == (None, [], None)
    (warning,) = wrong.warnings
    assert "the text may not be what is said" in warning
    assert not wrong.damaged


@pytest.mark.parametrize("batch", [1, 3])
def test_words_lie_where_they_are_said(batch: int) -> None:
    found = align("Hello you!\n\nHow are you?\nBye.", batch=batch)
    assert [segment.text for segment in found.segments] == [" Hello you!", " How are you?", " Bye."]
    assert found.text == "Hello you! How are you? Bye."
    words = [word for segment in found.segments for word in segment.words]
    spans = [SAID[round(word.start * 50) : round(word.end * 50)].replace(".", "") for word in words]
    assert spans == ["HELLO", "YOU", "HOW", "ARE", "YOU", "BYE"]
    assert min(word.probability for word in words) > 0.9
    for segment in found.segments:
        assert (segment.start, segment.end) == (segment.words[0].start, segment.words[-1].end)
        assert (
            LETTERS.decode(segment.tokens)
            == "".join(c for c in segment.text.upper() if c.isalpha() or c == " ").strip()
        )
    assert found.duration == pytest.approx(len(SAID) / 50)


def test_one_line_is_cut_into_sentences() -> None:
    assert segment_texts("Hello you! How are… you?\n") == ["Hello you!", "How are…", "you?"]
    assert segment_texts("a. b\nc") == ["a. b", "c"]
    assert segment_texts("你好。吗？") == ["你好。", "吗？"]
    assert [segment.text for segment in align("Hello you! How are you? Bye.").segments] == [
        " Hello you!",
        " How are you?",
        " Bye.",
    ]


def test_lines_of_what_is_not_said_and_words_that_cannot_be_written() -> None:
    found = align("—\nHello 2U!\n* * *\nHow are you? [laughs]\n\nBye.")
    assert "".join(segment.text for segment in found.segments).split() == [
        "—",
        "Hello",
        "2U!",
        "*",
        "*",
        "*",
        "How",
        "are",
        "you?",
        "[laughs]",
        "Bye.",
    ]
    assert [segment.text for segment in found.segments] == [" — Hello 2U!", " * * *", " How are you? [laughs]", " Bye."]


def test_speech_around_the_text_is_left_to_open_ends() -> None:
    (segment,) = align("How are you", open_ends=True).segments
    assert SAID[round(segment.start * 50) : round(segment.end * 50)].replace(".", "") == "HOW|ARE|YOU"


@pytest.mark.parametrize("batch", [1, 4])
def test_a_pair_that_fails_stops_no_other(tmp_path: Path, batch: int) -> None:
    (tmp_path / "hello.txt").write_text("hello you", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfd")
    pairs = [
        (sound("H.I"), "hi there, much too long"),
        (sound("..HEL.LO|YOU."), tmp_path / "hello.txt"),
        (sound("H.I"), tmp_path / "none.txt"),
        (sound("H.I"), tmp_path / "bytes.txt"),
        (sound("H.I"), " — "),
        (sound("H.I"), "hi"),
    ]
    found = list(Aligner(Reader(), Silent(), batch=batch, sample_rate=16_000).align_many(pairs))
    wanted = ["recording has 3", None, "none.txt", "no UTF-8", "no words", None]
    for transcript, message in zip(found, wanted, strict=True):
        assert transcript.error is None if message is None else message in str(transcript.error), transcript.error
    assert [word.word for word in found[1].segments[0].words or []] == [" hello", " you"]
    aligner = Aligner(Reader(), Silent(), batch=batch)
    (transcript,) = aligner.align_many([(tmp_path / "none.wav", "hello")])
    assert "none.wav" in str(transcript.error)
    assert transcript.path == str(tmp_path / "none.wav")
    with pytest.raises(AudioError, match=r"none\.wav"):
        aligner.align(tmp_path / "none.wav", "hello")


def test_together_and_alone_are_the_same_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short recordings in batches, long ones in windows."""
    monkeypatch.setattr(ctc_alignment, "_GROUP", 5)
    monkeypatch.setattr(ctc_alignment, "_BATCH_SECONDS", 2)
    texts = ["HI", "OH NO", "YES", "A LONG STORY", "SO"] * 3
    draw = np.random.default_rng(0)
    pairs = []
    for text in texts:
        gaps = ["." * int(draw.integers(1, 9)) + letter for letter in text.replace(" ", "|")]
        pairs.append((sound("".join(gaps) + "." * int(draw.integers(0, 20))), text))
    assert {len(pcm) > Reader.window for pcm, _ in pairs} == {False, True}
    progress = Counted()
    alone = Aligner(Reader(), Silent(), sample_rate=16_000)
    found = Aligner(Reader(), progress, batch=3, sample_rate=16_000).align_many(pairs)
    for (pcm, text), transcript in zip(pairs, found, strict=True):
        wanted = alone.align(pcm, text)
        wanted.timings = transcript.timings = {}
        assert transcript == wanted
    assert progress.total == progress.done == pytest.approx(sum(len(pcm) for pcm, _ in pairs) / 16_000)


def test_an_unknown_language_is_an_error_of_its_own() -> None:
    with pytest.raises(UsageError, match="knows no xx"):
        Aligner(Reader("en"), Silent(), language="xx")
    with pytest.raises(UsageError, match="separate"):
        Aligner(Reader(), Silent(), channels="separate")


def test_the_text_that_a_model_writes_lies_where_it_wrote_it(tmp_path: Path) -> None:
    """The likeliest path says it: no alignment of this text is likelier. In one window and in several."""
    save(tmp_path / "model")
    with stapes.load(tmp_path / "model", device="cpu", precision="fp32") as recognizer:
        for seconds in (3, 40):
            pcm = babble(seconds, seed=seconds)
            progress = Counted()
            heard = recognizer.transcribe(pcm, sample_rate=16_000, word_timestamps=True, vad=False)
            wanted = [word for segment in heard.segments for word in segment.words or []]
            found = recognizer.align(pcm, heard.text, sample_rate=16_000, progress=progress)
            words = [word for segment in found.segments for word in segment.words or []]
            assert wanted
            assert [word.word for word in words] == [word.word for word in wanted]
            for word, other in zip(words, wanted, strict=True):
                assert (word.start, word.end) == pytest.approx((other.start, other.end), abs=1e-6)
                assert word.probability == pytest.approx(other.probability, abs=1e-3)
            assert (progress.total, progress.done) == pytest.approx((seconds, seconds))
            assert found.model == "model"


def test_from_the_command_line_to_a_textgrid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model")
    for name, text in (("a", "abba feed"), ("b", "cab " * 400)):
        soundfile.write(tmp_path / f"{name}.wav", babble(2, seed=ord(name)), 16_000)
        (tmp_path / f"{name}.txt").write_text(text)
    model = ["--model", str(tmp_path / "model"), "--device", "cpu"]
    assert main(["align", str(tmp_path), *model, "-o", str(tmp_path / "out"), "-f", "textgrid,json"]) == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.TextGrid", "a.json"}
    assert 'text = "abba"' in (tmp_path / "out" / "a.TextGrid").read_text()
    assert "the text is not of this recording" in capsys.readouterr().err
    assert main(["align", str(tmp_path / "a.wav"), str(tmp_path / "a.txt"), *model, "--language", "en"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines] == ["abba", "feed"]
    assert all(0.0 <= float(line.split()[2]) <= 2.0 for line in lines)


def test_a_model_of_another_kind_is_refused_by_name() -> None:
    recognizer = Recognizer.__new__(Recognizer)
    recognizer.family, recognizer.name = object(), "base"  # type: ignore[assignment]
    with pytest.raises(UsageError, match="base is no CTC model"):
        recognizer.align(sound("H.I"), "hi", sample_rate=16_000)
