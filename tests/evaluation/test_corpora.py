"""Manifests of every kind give the same rows; what is wrong with one is said with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stapes.errors import UsageError
from stapes.evaluation.corpora import open_corpus

DATA = Path(__file__).parents[3] / "shared" / "data"


def write(path: Path, *values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(value) + "\n" for value in values)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def recording(name: str, duration: float = 10.0) -> dict[str, Any]:
    source = {"type": "file", "channels": [0], "source": f"{name}.wav"}
    return {"id": name, "sources": [source], "sampling_rate": 16000, "num_samples": 160000, "duration": duration}


def supervision(name: str, start: float, duration: float, text: str, **more: Any) -> dict[str, Any]:
    common = {"id": name, "recording_id": "a", "start": start, "duration": duration, "channel": 0, "text": text}
    return {**common, "speaker": "anna", "language": "English", **more}


def test_simple_manifest_with_paths_from_its_folder(tmp_path: Path) -> None:
    manifest = write(
        tmp_path / "manifest.jsonl",
        {"audio": "x/a.wav", "text": "hi", "duration": 1, "speaker": 7, "lang": "de", "split": "test", "snr_db": 12},
        {"audio_filepath": "b.wav", "text": ""},
        {"audio": "x/a.wav", "text": "hi"},
    )
    first, second, again = open_corpus(str(manifest)).rows
    assert (first.audio, first.text, first.duration) == (str(tmp_path / "x/a.wav"), "hi", 1.0)
    assert (first.speaker, first.language, first.split, first.snr_db) == ("7", "de", "test", 12.0)
    assert (second.id, second.text, second.duration) == ("b.wav", "", None)
    assert (first.id, again.id) == ("x/a.wav", "x/a.wav#2")


def test_lhotse_cuts_and_supervisions_give_the_same_parts(tmp_path: Path) -> None:
    said = [supervision("a-1", 0.0, 4.0, "one"), supervision("a-2", 4.0, 6.0, "two")]
    cuts = [
        {
            "id": each["id"],
            "start": each["start"],
            "duration": each["duration"],
            "channel": 0,
            "supervisions": [each | {"start": 0.0}],
            "recording": recording("a"),
            "type": "MonoCut",
        }
        for each in said
    ]
    from_cuts = open_corpus(str(write(tmp_path / "cuts.jsonl.gz", *cuts))).rows
    write(tmp_path / "x_recordings.jsonl.gz", recording("a"))
    from_supervisions = open_corpus(str(write(tmp_path / "x_supervisions.jsonl.gz", *said))).rows
    assert from_cuts == from_supervisions
    assert [(row.start, row.end, row.text, row.language, row.speaker) for row in from_cuts] == [
        (0.0, 4.0, "one", "en", "anna"),
        (4.0, 10.0, "two", "en", "anna"),
    ]
    assert from_cuts[0].audio == str(tmp_path / "a.wav")
    whole = write(tmp_path / "whole.jsonl", cuts[0] | {"duration": 10.0})
    assert open_corpus(str(whole)).rows[0].end is None


def test_common_voice_and_csv(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips/a.mp3").touch()
    (tmp_path / "test.tsv").write_text(
        'client_id\tpath\tsentence\tlocale\ns1\ta.mp3\tSay "hi\tzh-CN\n', encoding="utf-8"
    )
    (row,) = open_corpus(str(tmp_path / "test.tsv")).rows
    assert (row.audio, row.text, row.speaker) == (str(tmp_path / "clips/a.mp3"), 'Say "hi', "s1")
    assert row.language == "zh"
    (tmp_path / "x.csv").write_text('audio,text,duration\na.wav,"one, two",1.5\nb.wav,,\n', encoding="utf-8")
    first, silent = open_corpus(str(tmp_path / "x.csv")).rows
    assert (first.text, first.duration, silent.text, silent.duration) == ("one, two", 1.5, "", None)


def test_corpus_by_name_split_language_every_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"audio": f"{i}.wav", "text": "x", "lang": "ru" if i % 2 else "en", "split": "test" if i < 6 else "dev"}
        for i in range(10)
    ]
    write(tmp_path / "c/manifest.jsonl", *rows)
    monkeypatch.setenv("STAPES_DATA", str(tmp_path))
    assert open_corpus("c").name == "c"
    assert [row.id for row in open_corpus("c:test:ru").rows] == ["1.wav", "3.wav", "5.wav"]
    assert [row.id for row in open_corpus("c", every=4, limit=2).rows] == ["0.wav", "4.wav"]
    with pytest.raises(UsageError, match="no split or language 'xx'; there are dev, en, ru, test"):
        open_corpus("c:xx")
    with pytest.raises(UsageError, match=r"no corpus of that name in .*\(there are c"):
        open_corpus("nothing", data=tmp_path)


def test_the_hash_follows_the_words_and_not_the_place(tmp_path: Path) -> None:
    row = {"audio": "a.wav", "text": "one", "duration": 1.0}
    here = open_corpus(str(write(tmp_path / "1/m.jsonl", row)))
    there = open_corpus(str(write(tmp_path / "2/m.jsonl", row)))
    other = open_corpus(str(write(tmp_path / "3/m.jsonl", row | {"text": "two"})))
    assert here.sha256() == there.sha256() != other.sha256()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{broken\n", "line 1 is no JSON"),
        (b"[1]\n", "line 1 is no JSON object"),
        (b'{"text": "x"}\n', "line 1 has no 'audio'"),
        (b'{"audio": "a.wav"}\n', "line 1 has no 'text'"),
        (b'{"audio": "a.wav", "text": "x", "duration": "long"}\n', "'duration' is 'long'"),
        (b'{"id": "c", "type": "MixedCut", "tracks": []}\n', "only cuts of one recording"),
        (b'{"id": "s", "recording_id": "a", "text": "x"}\n', "put the recordings' manifest beside it"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "has no rows"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        open_corpus(str(tmp_path / "m.jsonl"))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count"),
    [("librispeech:test", 214), ("speechocean762:test", 2000), ("asterisk:ru", 441), ("noise-rir", 17)],
)
def test_shared_corpora_by_name(name: str, count: int) -> None:
    corpus = open_corpus(name, data=DATA)
    assert len(corpus.rows) == count
    assert all(Path(row.audio).exists() for row in corpus.rows[::50])
