"""Corpora in the layouts that they are published in, made up here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from made_corpora import RATE, tone, write

from stapes.data.manifest import Manifest
from stapes.data.options import PrepareOptions
from stapes.data.prepare import prepare
from stapes.errors import UsageError


def made(corpus: str, source: Path, **options) -> tuple[dict, dict[str, list]]:
    """The report, and the utterances of each split."""
    out = source.parent / f"{source.name}-out"
    report = prepare(corpus, source, out, PrepareOptions(jobs=1, **options))
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == report
    assert (out / "report.md").read_text(encoding="utf-8").startswith(f"# {corpus}")
    names = {path.name.removesuffix(".jsonl.gz") for path in out.glob("*.jsonl.gz")}
    assert names == set(report["splits"])
    return report, {name: list(Manifest(out / f"{name}.jsonl.gz")) for name in names}


def codes(report: dict) -> dict[str, int]:
    return report["rejected"]["by_reason"]


def librispeech(root: Path) -> Path:
    for split, speaker, chapter, hertz in (("train-clean-100", "103", "1240", 200), ("dev-clean", "84", "121123", 300)):
        folder = root / split / speaker / chapter
        lines = []
        for number in range(3):
            id = f"{speaker}-{chapter}-{number:04d}"
            write(folder / f"{id}.flac", 1.0 + 0.1 * number, hertz + number)
            lines.append(f"{id} CHAPTER ONE {'ABC'[number]}\n")
        (folder / f"{speaker}-{chapter}.trans.txt").write_text("".join(lines), encoding="utf-8")
    return root


def test_librispeech(tmp_path):
    root = librispeech(tmp_path / "LibriSpeech")
    folder = root / "dev-clean" / "84" / "121123"
    with (folder / "84-121123.trans.txt").open("a", encoding="utf-8") as file:
        file.write("84-121123-0009 NOT THERE\n")
    write(folder / "84-121123-0007.flac", 1.0, 999)
    report, splits = made("librispeech", root)
    assert {name: len(rows) for name, rows in splits.items()} == {"train-clean-100": 3, "dev-clean": 3}
    first = splits["train-clean-100"][0]
    assert (first.id, first.speaker, first.language, first.text) == ("103-1240-0000", "103", "en", "chapter one a")
    assert codes(report) == {"missing": 1, "no text": 1}
    # One split by itself is the same split.
    report, splits = made("librispeech", root / "train-clean-100")
    assert set(splits) == {"train-clean-100"}


def commonvoice(root: Path) -> Path:
    columns = ["client_id", "path", "sentence", "up_votes", "gender", "locale"]
    number = 0
    for split, clients in (("train", "ab"), ("dev", "c"), ("test", "d")):
        lines = ["\t".join(columns)]
        for client in clients:
            for _ in range(2):
                name = f"common_voice_tr_{number}.mp3"
                write(root / "clips" / name, 1.5, 300 + number, format="MP3")
                lines.append("\t".join([client * 8, name, f'"Işık {"abcdefgh"[number]}" dedi.', "2", "", "tr"]))
                number += 1
        (root / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_commonvoice_keeps_its_splits_whose_speakers_differ(tmp_path):
    root = commonvoice(tmp_path / "tr")
    report, splits = made("commonvoice", root)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "dev": 2, "test": 2}
    speakers = {name: {row.speaker for row in rows} for name, rows in splits.items()}
    assert not speakers["train"] & speakers["dev"] | speakers["train"] & speakers["test"]
    assert splits["train"][0].text == "ışık a dedi"  # Turkish letters, and quotation marks are no csv's
    assert splits["train"][0].language == "tr"
    assert not report["rejected"]["count"]
    # The release's folder holds languages; without splits, what was validated.
    other = tmp_path / "release" / "tr2"
    shutil.copytree(root, other)
    (other / "train.tsv").rename(other / "validated.tsv")
    (other / "dev.tsv").unlink()
    (other / "test.tsv").unlink()
    report, splits = made("commonvoice", tmp_path / "release", split="train=0.5,test=0.5")
    assert sum(map(len, splits.values())) == 4
    assert all(
        len({name for name, rows in splits.items() for row in rows if row.speaker == s}) == 1
        for s in ("a" * 8, "b" * 8)
    )


def test_tedlium_cuts_its_talks(tmp_path):
    root = tmp_path / "TEDLIUM_release-3"
    talk = np.concatenate([tone(2.0, 300 + 50 * part) for part in range(20)])
    for part, name in (
        ("data", "AaronHuey_2010X"),
        ("legacy/test", "BillGates_2010"),
        ("legacy/train", "AaronHuey_2010X"),
    ):
        (root / part / "sph").mkdir(parents=True)
        (root / part / "stm").mkdir()
        soundfile.write(
            root / part / "sph" / f"{name}.sph", talk if part != "legacy/test" else talk * 0.5, RATE, format="NIST"
        )
        (root / part / "stm" / f"{name}.stm").write_text(
            ";; a comment\n"
            f"{name} 1 {name} 2.00 4.00 <NA> it 's the <unk> second part\n"
            f"{name} 1 inter_segment_gap 4.00 6.00 <o,,unknown> ignore_time_segment_in_scoring\n"
            f"{name} 1 {name} 36.00 38.00 <o,f0,male> far into the talk\n"
            f"{name} 1 {name} nonsense\n"
        )  # fmt: skip
    report, splits = made("tedlium", root)
    assert {name: [row.text for row in rows] for name, rows in splits.items()} == {
        name: ["it's the second part", "far into the talk"] for name in ("train", "test")
    }
    assert codes(report) == {"manifest": 2, "not transcribed": 2}
    assert (splits["train"][1].start, splits["train"][1].duration) == (36.0, 2.0)
    report, converted = made("tedlium", root, convert="flac")
    for name, rows in converted.items():
        for row, part in zip(rows, splits[name], strict=True):
            assert row.start == 0.0
            expected = soundfile.read(part.audio, start=round(part.start * RATE), frames=2 * RATE, dtype="float32")[0]
            np.testing.assert_array_equal(soundfile.read(row.audio, dtype="float32")[0], expected)


def test_folder(tmp_path):
    root = tmp_path / "mine"
    for number, name in enumerate(("a.wav", "b.flac", "deep/c.ogg", "test/d.wav", "no text.wav")):
        path = write(root / name, 1.0, 300 + 20 * number)
        if name != "no text.wav":
            path.with_suffix(".txt").write_text(f"Hello,\n {path.stem}!\n", encoding="utf-8")
    (root / "notes.md").write_text("not audio")
    report, splits = made("folder", root)
    assert {name: sorted((row.id, row.text) for row in rows) for name, rows in splits.items()} == {
        "train": [("a", "hello a"), ("b", "hello b"), ("deep/c", "hello c")],
        "test": [("test/d", "hello d")],
    }
    assert codes(report) == {"no text": 1}


def test_jsonl_and_csv_say_the_same(tmp_path):
    rows = []
    for number in range(4):
        write(tmp_path / f"{number}.wav", 1.0 + number / 10, 300 + number)
        rows.append(
            {
                "audio": f"{number}.wav",
                "text": f"number, {'abcd'[number]}",
                "other": f"other {'abcd'[number]}",
                "duration": 1.0 + number / 10,
                "speaker": f"s{number}",
                "lang": "en",
                "split": "dev" if number == 3 else "train",
            }
        )
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{broken", '"text"', '{"text": "no audio"}']) + "\n")
    keys = list(rows[0])
    table = [",".join(keys), *(",".join(f'"{row[key]}"' for key in keys) for row in rows)]
    (tmp_path / "b.csv").write_text("\n".join(table) + "\n")
    jsonl, from_jsonl = made("jsonl", tmp_path / "a.jsonl")
    csv, from_csv = made("csv", tmp_path / "b.csv")
    assert from_jsonl == from_csv
    assert {name: len(found) for name, found in from_csv.items()} == {"train": 3, "dev": 1}
    assert codes(jsonl) == {"manifest": 3}
    assert codes(csv) == {}
    _, splits = made("jsonl", tmp_path / "a.jsonl", text_field="other", split="x=0.*,y=speaker:s[12],z=1")
    texts = {name: [row.text for row in found] for name, found in splits.items()}
    assert texts == {"x": ["other a"], "y": ["other b", "other c"], "z": ["other d"]}


@pytest.mark.parametrize("corpus", ["jsonl", "csv"])
def test_a_text_field_that_no_row_has_is_refused_with_those_there_are(tmp_path, corpus):
    write(tmp_path / "a.wav", 1.0, 300)
    source = tmp_path / f"rows.{corpus}"
    row = {"audio": "a.wav", "hebrew": "ken", "romanized": "yes"}
    source.write_text(json.dumps(row) + "\n" if corpus == "jsonl" else "audio,hebrew,romanized\na.wav,ken,yes\n")
    with pytest.raises(UsageError, match=r"'romanised'.* did you mean romanized.* audio, hebrew, romanized"):
        made(corpus, source, text_field="romanised")
    with pytest.raises(UsageError, match=r"'text' .* --text-field takes one of audio, hebrew, romanized"):
        made(corpus, source)
    assert [row.text for row in made(corpus, source, text_field="romanized")[1]["train"]] == ["yes"]


def test_another_recipe_of_lhotse(tmp_path):
    """LJSpeech's layout: lhotse knows it by name."""
    root = tmp_path / "LJSpeech-1.1"
    for number in range(3):
        write(root / "wavs" / f"LJ001-000{number}.wav", 1.0, 300 + number, rate=22_050)
    lines = [f"LJ001-000{number}|Text {number}|Text {'abc'[number]}" for number in range(3)]
    (root / "metadata.csv").write_text("\n".join(lines) + "\n")
    _, splits = made("ljspeech", root)
    assert sorted(row.text for row in splits["train"]) == ["text 0", "text 1", "text 2"]
    with pytest.raises(UsageError, match="recipe ami could not read"):
        prepare("ami", root / "metadata.csv", tmp_path / "out")


@pytest.mark.parametrize(
    ("corpus", "source", "words"),
    [
        ("librispech", ".", "librispeech"),
        ("librispeech", "nowhere", "not there"),
        ("librispeech", ".", "no .*trans.txt"),
        ("commonvoice", ".", "tsv"),
        ("tedlium", ".", "stm"),
        ("folder", ".", "no recordings"),
        ("jsonl", ".", "manifest.jsonl"),
        ("csv", ".", "no file"),
    ],
)
def test_a_corpus_that_is_not_there(tmp_path, corpus, source, words):
    with pytest.raises(UsageError, match=words):
        prepare(corpus, tmp_path / source, tmp_path / "out", PrepareOptions(jobs=1))


@pytest.mark.parametrize("text", ["train", "train=", "train=0.9,dev=0.2", "train=0", "a/b=1", "=1"])
def test_splits_that_make_no_sense(tmp_path, text):
    with pytest.raises(UsageError, match="--split"):
        prepare("folder", tmp_path, tmp_path / "out", PrepareOptions(split=text))


def test_shares_are_by_speaker_and_about_as_large_as_asked():
    from stapes.data.corpora import Row
    from stapes.data.splits import split_rule

    rule = split_rule("train=0.8,dev=0.1,test=0.1")
    rows = [Row(id=f"{n}", audio="a", text="", speaker=f"s{n // 5}") for n in range(10_000)]
    splits = [rule(row) for row in rows]
    by_speaker = {row.speaker: set() for row in rows}
    for row, split in zip(rows, splits, strict=True):
        by_speaker[row.speaker].add(split)
    assert all(len(found) == 1 for found in by_speaker.values())
    assert 7_700 < splits.count("train") < 8_300
    assert 800 < splits.count("dev") < 1_200
    assert rule(Row(id="x", audio="a", text="")) is not None
    assert split_rule("dev=0.1")(rows[0]) in ("dev", None)
