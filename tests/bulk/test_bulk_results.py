"""What is made of a finished job: training data, subtitles, tables, figures to compare."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_bulk_driver import SPEC

from stapes.bulk.convert import export_job
from stapes.bulk.decoders import Outcome
from stapes.bulk.inputs import Item
from stapes.bulk.labels import Filters, join_segments, make_labels
from stapes.bulk.options import LabelOptions
from stapes.bulk.plan import make_plan
from stapes.bulk.rows import make_row, pack_rows, to_transcript
from stapes.bulk.store import Store, read, verify
from stapes.bulk.summary import summarize_job
from stapes.data.manifest import read_cuts
from stapes.errors import UsageError
from stapes.transcript import Segment, Transcript


def segment(start: float, end: float, text: str, **facts: Any) -> Segment:
    return Segment(0, 0, start, end, f" {text}", **{"avg_logprob": -0.2, "compression_ratio": 1.2, **facts})


def said(
    *segments: Segment, duration: float = 6.0, language: str = "en", probability: float | None = 0.95
) -> Transcript:
    return Transcript(
        text="".join(each.text for each in segments).strip(),
        language=language,
        language_probability=probability,
        duration=duration,
        segments=list(segments),
        model="m",
    )


def write_job(folder: Path, made: dict[str, Transcript], **items: Any) -> Path:
    """A finished job of one shard with these transcripts."""
    store = Store(folder)
    store.make()
    store.begin(SPEC, ["in"], [], add=False)
    planned = [Item(name, f"/d/{name}", 6.0, **items) for name in made]
    make_plan(folder, lambda: planned, ["in"], shard_seconds=1e9, shard_files=100)
    outcome = Outcome(sha256="0" * 64, bytes=1, recording=(44_100, 2, 6.0))
    rows = [make_row(item, SPEC, outcome, made[item.id]) for item in planned]
    packed, counts = pack_rows(rows)
    store.commit(0, packed, counts, {"fingerprint": SPEC.fingerprint()})
    return folder


GOOD = segment(0.2, 5.5, "one two three four five six")


@pytest.mark.parametrize(
    ("transcript", "reason"),
    [
        (said(GOOD), None),
        (said(GOOD, language="fr"), "other language"),
        (said(GOOD, probability=0.3), "language unsure"),
        (said(segment(0, 5, "это не по английски")), "other script"),
        (said(segment(0, 5, "Thank you for watching!")), "known phrase"),
        (said(segment(0, 5, "and then we went on and then we went on and then we went on")), "repeats itself"),
        (said(segment(0, 5, "na na na", compression_ratio=3.0)), "repeats itself"),
        (said(segment(0, 5, "a")), "too slow"),
        (said(segment(0, 0.6, "far too many words for so little time"), duration=0.6), "too fast"),
        (said(segment(0, 5, "mumble mumble something", avg_logprob=-1.2)), "unsure"),
        (said(segment(0, 5, "is anybody there at all", no_speech_prob=0.9)), "perhaps no speech"),
        (said(segment(0, 5, "...")), "no words"),
        (said(segment(0, 0.3, "yes"), duration=0.3), "too short"),
    ],
)
def test_each_filter_names_its_reason(tmp_path: Path, transcript: Transcript, reason: str | None) -> None:
    (row,) = read(write_job(tmp_path, {"a": transcript}))
    ((_, found),) = Filters(LabelOptions(language="English")).judge(row)
    assert found == reason


def test_labels_are_cuts_that_training_reads_and_the_rest_is_reported(tmp_path: Path) -> None:
    long = said(
        segment(1.0, 9.0, "first part"),
        segment(9.2, 20.0, "second part"),
        segment(20.1, 38.0, "third part of it"),
        segment(45.0, 50.0, "after a long pause"),
        duration=60.0,
    )
    out = write_job(tmp_path / "out", {"long.wav": long, "good.wav": said(GOOD), "bad.wav": said(GOOD, language="de")})
    options = LabelOptions(language="en", min_characters_per_second=0.1)
    report = make_labels(out, tmp_path / "train.jsonl.gz", options)
    cuts = list(read_cuts(tmp_path / "train.jsonl.gz"))
    assert [cut.text for cut in cuts] == [
        "first part second part",
        "third part of it",
        "after a long pause",
        "one two three four five six",
    ]
    assert len({cut.id for cut in cuts}) == 4
    assert all(cut.duration <= 30 and cut.language == "en" for cut in cuts)
    assert (cuts[0].start, cuts[0].audio) == (0.9, "/d/long.wav")
    assert (cuts[3].start, cuts[3].duration) == (0.0, 6.0)
    assert report["kept"]["utterances"] == 4
    assert {reason: each["utterances"] for reason, each in report["rejected"].items()} == {"other language": 1}
    (rejected,) = map(json.loads, (tmp_path / "train.rejected.jsonl").read_text().splitlines())
    assert (rejected["id"], rejected["reason"]) == ("bad.wav", "other language")
    assert json.loads((tmp_path / "train.report.json").read_text()) == report


def test_utterances_never_overlap_and_hold_every_word(tmp_path: Path) -> None:
    segments = [segment(n * 7.0, n * 7.0 + 6.9, f"word{n}") for n in range(20)]
    (row,) = read(write_job(tmp_path, {"a": said(*segments, duration=140.0)}))
    found = list(join_segments(row, LabelOptions()))
    assert [text for each in found for text in each.text.split()] == [f"word{n}" for n in range(20)]
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(found))
    assert all(each.seconds <= 30 for each in found)


def test_two_passes_have_to_agree(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    first = write_job(tmp_path / "first", dict.fromkeys(names, said(GOOD)))
    again = {"a": said(GOOD), "b": said(GOOD, language="nl"), "c": Transcript(error="broken")}
    second = write_job(tmp_path / "second", again)
    report = make_labels(first, tmp_path / "m.jsonl", LabelOptions(second_pass=second))
    assert report["kept"]["utterances"] == 1
    assert set(report["rejected"]) == {"passes disagree on the language", "second pass failed"}
    other = write_job(tmp_path / "other", {"x": said(GOOD), "b": said(GOOD), "c": said(GOOD)})
    with pytest.raises(UsageError, match="other inputs"):
        make_labels(first, tmp_path / "m.jsonl", LabelOptions(second_pass=other))


def test_subtitles_are_written_in_the_recordings_folders_and_not_twice(tmp_path: Path) -> None:
    out = write_job(tmp_path / "out", {"x/1.wav": said(GOOD), "/abs/../2.wav": said(GOOD), "s3://b/3.wav": said(GOOD)})
    assert export_job(out, tmp_path / "srt", "srt") == (1, 3)
    assert sorted(str(each.relative_to(tmp_path / "srt")) for each in (tmp_path / "srt").rglob("*.srt")) == [
        "abs/2.wav.srt",
        "b/3.wav.srt",
        "x/1.wav.srt",
    ]
    assert "one two three" in (tmp_path / "srt" / "x" / "1.wav.srt").read_text()
    assert export_job(out, tmp_path / "srt", "srt") == (0, 0)
    (row, *_) = read(out)
    assert to_transcript(row).to_dict()["segments"] == row["segments"]


def test_parquet_holds_every_row(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'stapes[parquet]'")
    out = write_job(tmp_path / "out", {"a": said(GOOD), "b": Transcript(error="broken")})
    assert export_job(out, tmp_path / "tables", "parquet") == (1, 1)
    rows = parquet.read_table(tmp_path / "tables").to_pylist()
    assert [(row["id"], row["status"]) for row in rows] == [("a", "ok"), ("b", "failed")]
    assert rows[0]["segments"][0]["text"] == GOOD.text


def test_a_summary_is_what_compare_reads(tmp_path: Path) -> None:
    pytest.importorskip("jiwer")
    made = {"a": said(GOOD), "b": said(segment(0, 5, "one two four")), "c": Transcript(error="broken")}
    with_text = write_job(tmp_path / "out", made, text="one two three", speaker="s", language="en")
    result = summarize_job(with_text, tmp_path / "result", normalizer="none")
    # Three words inserted in the first, one substituted in the second, three lost in the third.
    assert (result.counts.words, result.counts.insertions, result.counts.deletions) == (9, 3, 3)
    assert result.counts.substitutions == 1
    assert result.failed == 1
    without = write_job(tmp_path / "plain", made)
    nothing = summarize_job(without, tmp_path / "nothing", normalizer="none")
    assert nothing.wer.value is None
    assert nothing.hallucination.silence_insertions_per_minute is None

    report = pytest.importorskip("stapes.evaluation.report", reason="comparing needs stapes[evaluate]")
    comparison = report.compare([tmp_path / "result"])
    assert comparison.sets[0].systems[0].wer.value == pytest.approx(7 / 9)
    assert report.compare([tmp_path / "nothing"]).sets[0].utterances == 3


def test_readers_trust_only_what_is_done_and_whole(tmp_path: Path) -> None:
    out = write_job(tmp_path / "out", {"a": said(GOOD), "b": said(GOOD)})
    store = Store(out)
    data = store.rows_path(0).read_bytes()
    store.rows_path(0).write_bytes(data[:-1] + b"\0")
    assert [bool(problem) for _, problem in verify(out)] == [True]
    with pytest.raises(UsageError, match=r"its hash is not.*shard-000000\.done"):
        list(read(out))
    store.rows_path(0).write_bytes(data)
    assert [problem for _, problem in verify(out)] == [None]
    store.done_path(0).unlink()
    assert list(read(out)) == []
    with pytest.raises(UsageError, match="holds no bulk work"):
        list(read(tmp_path / "elsewhere"))
