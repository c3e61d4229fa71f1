"""What a teacher wrote: what is kept of it, and that nobody listens twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_corpus import cut, tones, write_wav

from stapes.cli.main import main
from stapes.cli.transcribe import ModelOptions
from stapes.data.manifest import Manifest
from stapes.data.options import PseudoLabelOptions
from stapes.errors import UsageError
from stapes.training.pseudo_labels import pseudo_label
from stapes.transcript import Segment, Transcript

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "red green blue white black pink gold teal plum rose",
    "hello there",
    "",
    "x",
]
WRITTEN: list[list[tuple[float, float, str]]] = [
    [(0.0, 0.5, " The cat sat on the mat.")],
    [(0.0, 0.5, " A frog.")],
    [(0.0, 0.2, " Red green blue white black"), (0.3, 9.0, " pink gold teal plum rose lime.")],
    [],
    [(0.0, 0.5, " Nobody knows.")],
    [(0.0, 0.5, " go on go on go on go on go on go on")],
]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    lines = []
    for number, text in enumerate(TEXTS):
        path = tmp_path / f"{number}.wav"
        samples = tones("abcab" + "a" * number, number)  # each has another length
        write_wav(path, samples)
        lines.append(cut(path, text, len(samples) / 16_000))
    lines.append(cut(tmp_path / "gone.wav", "gone", 1.0))
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


class Teacher:
    """Knows an utterance by its length."""

    def __init__(self, after: int = 99) -> None:
        self.heard: list[int] = []
        self.after = after

    def __call__(self, pcm: np.ndarray, language: str | None) -> list[tuple[float, float, str]]:
        number = len(pcm) // 1600 - 5
        if len(self.heard) >= self.after:
            raise RuntimeError("the power went")
        self.heard.append(number)
        return WRITTEN[number]


def label(manifest: Path, teacher: Teacher, name: str = "labelled.jsonl.gz", **settings: Any) -> dict[str, Any]:
    options = PseudoLabelOptions(**settings)
    return pseudo_label(manifest, manifest.parent / name, teacher, options, identity={"teacher": "t"})


def test_what_agrees_is_kept_and_the_rest_named(manifest: Path) -> None:
    report = label(manifest, Teacher())
    assert (report["utterances"], report["kept"], report["compared"]) == (7, 3, 5)
    assert report["dropped"] == {"disagrees": 1, "empty": 1, "repeats": 1, "unreadable": 1}
    # A frog for a dog, a lime too many, two words that were not heard, and twelve for one.
    assert report["wer"] == pytest.approx((1 + 1 + 2 + 12) / (6 + 2 + 10 + 2 + 1))
    assert [each["id"] for each in report["dropped_utterances"]] == ["1", "3", "5", "gone"]
    kept = Manifest(manifest.parent / "labelled.jsonl.gz")
    assert [each.id for each in kept] == ["0", "2", "4"]
    assert kept[0].text == "The cat sat on the mat."
    assert [segment[2].strip() for segment in kept[1].segments] == [said.strip() for _, _, said in WRITTEN[2]]
    times = [(start, end) for start, end, _ in kept[1].segments]
    assert times[0] == pytest.approx((0.0, 0.2))
    assert times[1] == pytest.approx((0.3, kept[1].duration))  # no later than the sound ends
    assert json.loads((manifest.parent / "labelled.report.json").read_text()) == report


def test_another_threshold_or_way_of_writing_needs_no_second_listening(manifest: Path) -> None:
    label(manifest, Teacher(), max_wer=0.0)
    deaf = Teacher(after=0)
    assert label(manifest, deaf, max_wer=0.0)["kept"] == 2
    assert label(manifest, deaf, max_wer=0.6)["kept"] == 4
    assert label(manifest, deaf, normalize="basic")["kept"] == 3
    assert Manifest(manifest.parent / "labelled.jsonl.gz")[0].text == "the cat sat on the mat"
    assert deaf.heard == []


def test_an_interruption_costs_nothing(manifest: Path) -> None:
    with pytest.raises(RuntimeError):
        label(manifest, Teacher(after=3))
    journal = manifest.parent / "labelled.labels.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-7])  # killed in the middle of a line
    assert not (manifest.parent / "labelled.jsonl.gz").exists()
    second = Teacher()
    report = label(manifest, second)
    assert second.heard == [2, 3, 4, 5]
    again = label(manifest, Teacher(), "other.jsonl.gz")
    assert {**report} == {**again}


def test_labels_of_another_teacher_or_damaged_ones_are_not_gone_on_from(manifest: Path) -> None:
    label(manifest, Teacher())
    out = manifest.parent / "labelled.jsonl.gz"
    with pytest.raises(UsageError, match="another teacher"):
        pseudo_label(manifest, out, Teacher(), identity={"teacher": "u"})
    (manifest.parent / "labelled.labels.jsonl").write_text("{]\n")
    with pytest.raises(UsageError, match="damaged"):
        label(manifest, Teacher())
    with pytest.raises(UsageError, match="the manifest itself"):
        pseudo_label(manifest, manifest, Teacher())
    with pytest.raises(UsageError, match="--max-wer"):
        PseudoLabelOptions(max_wer=-0.1)


def test_the_command(manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = Teacher()

    searched: list[bool] = []

    def transcribe(pcm: np.ndarray, options: Any, **_: Any) -> Transcript:
        searched.append(options.vad)
        return Transcript(segments=[Segment(0, 0, *each) for each in teacher(pcm, options.language)])

    fake = SimpleNamespace(
        name="fake",
        family=SimpleNamespace(can_be_told=lambda language: True),
        engine=SimpleNamespace(slots=1),
        transcribe=transcribe,
        close=lambda: None,
    )
    monkeypatch.setattr(ModelOptions, "load", lambda *_, **__: fake)
    out = manifest.parent / "out.jsonl"
    assert main(["label", str(manifest), str(out), "--model", "fake", "--json"]) == 1  # one cannot be read
    assert json.loads(capsys.readouterr().out)["kept"] == 3
    assert main(["label", str(manifest), str(out), "--model", "fake", "--max-wer", "0.6"]) == 1
    assert "kept 4 of 7" in capsys.readouterr().out
    other = str(manifest.parent / "other.jsonl")
    assert main(["label", str(manifest), other, "--model", "fake", "--language", "en"]) == 1
    assert not any(searched)  # an utterance is speech, whichever other option is given
    assert main(["label", str(manifest), str(out)]) == 2
    assert main(["label", str(manifest.parent / "none.jsonl"), str(out), "--model", "fake"]) == 2
