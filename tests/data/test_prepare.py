"""``stapes prepare``: what is rejected and why, manifests that lhotse reads, going on after any kind of end."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from made_corpora import RATE, simple, tone, write

from shared_data import DATA
from stapes.cli.main import main
from stapes.data import prepare as prepare_module
from stapes.data.checks import REASONS, UNREADABLE, AudioFacts, fingerprint
from stapes.data.corpora import Row
from stapes.data.manifest import Manifest
from stapes.data.options import PrepareOptions
from stapes.data.prepare import prepare
from stapes.data.reading import read_samples
from stapes.data.vocabulary import build_vocabulary
from stapes.errors import OutputError, UsageError

ONE = PrepareOptions(jobs=1)


def rows(folder: Path, *values: dict) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def rejected(report: dict) -> dict[str, str]:
    return {each["id"]: each["code"] for each in report["rejected"]["utterances"]}


def bad_corpus(folder: Path) -> tuple[Path, dict[str, str]]:
    """A corpus with everything that can be wrong, and what it is by id."""
    good = write(folder / "good.wav", 1.0, 300)
    soundfile.write(folder / "same.flac", soundfile.read(good, dtype="int16")[0], RATE)  # the same in another format
    write(folder / "short.wav", 0.05)
    write(folder / "long.wav", 5.0)
    write(folder / "fast.wav", 1.0, 310)
    write(folder / "letters.wav", 1.0, 320)
    write(folder / "duration.wav", 1.0, 330)
    write(folder / "dense.wav", 0.3, 340)
    soundfile.write(folder / "silent.wav", 1e-5 * np.ones(RATE, np.float32), RATE)
    soundfile.write(folder / "clipped.wav", np.clip(50 * tone(1.0), -1, 1), RATE)
    (folder / "unreadable.wav").write_bytes(b"this is no audio at all")
    (folder / "empty.wav").write_bytes(b"")
    write(folder / "whole.flac", 3.0, 350)
    content = (folder / "whole.flac").read_bytes()
    (folder / "damaged.flac").write_bytes(content[: len(content) // 2])
    (folder / "whole.flac").unlink()
    names = {
        "same.flac": "duplicate",
        "short.wav": "too short",
        "long.wav": "too long",
        "fast.wav": "text too long",
        "dense.wav": "text too long",
        "letters.wav": "vocabulary",
        "duration.wav": "duration",
        "silent.wav": "silent",
        "clipped.wav": "clipped",
        "unreadable.wav": "unreadable",
        "empty.wav": "unreadable",
        "damaged.flac": "damaged",
        "nowhere.wav": "missing",
        "notext.wav": "no text",
        "marks.wav": "no text",
    }
    for name in ("notext.wav", "marks.wav"):
        write(folder / name, 1.0, 360)
    texts = {"letters.wav": "ok Ω", "fast.wav": "a" * 60, "dense.wav": "aaaaaaaaa", "notext.wav": "", "marks.wav": "?!"}
    values = [{"audio": good.name, "text": "a good one"}]
    for name in names:
        values.append({"audio": name, "text": texts.get(name, "a good one")})
        if name == "duration.wav":
            values[-1]["duration"] = 4.0
    return rows(folder, *values), names


def test_everything_that_can_be_wrong_is_rejected_with_its_reason(tmp_path, capsys):
    source, names = bad_corpus(tmp_path)
    vocabulary = tmp_path / "vocabulary"
    vocabulary.mkdir()
    tokenizer = build_vocabulary(["a good one ok"])
    tokens = {token: id for token, id in tokenizer.vocabulary.items() if token != "<unk>"}
    type(tokenizer)(tokens, unknown=None).save(vocabulary)
    out = tmp_path / "out"
    code = main(
        ["prepare", "jsonl", str(source), str(out), "--max-seconds", "4", "--vocabulary", str(vocabulary), "--json"]
    )
    assert code == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert rejected(report) == names
    assert report["splits"]["train"]["utterances"] == 1
    assert report["rejected"]["unreadable"] == 4
    assert [row.text for row in Manifest(out / "train.jsonl.gz")] == ["a good one"]
    readable = (out / "report.md").read_text(encoding="utf-8")
    for each in report["rejected"]["utterances"]:
        assert each["reason"] and each["code"] in REASONS  # noqa: PT018
        assert f"`{each['id']}`" in readable
        named = each["audio"] in captured.err
        assert named == (each["code"] in UNREADABLE), each
    assert "'ω'" in next(each["reason"] for each in report["rejected"]["utterances"] if each["code"] == "vocabulary")


def test_rejects_that_are_expected_are_no_failure(tmp_path, capsys):
    source = simple(tmp_path / "in", [0.5, 1.0, 3.0])
    assert main(["prepare", "jsonl", str(source), str(tmp_path / "out"), "--max-seconds", "2", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "train: 2 utterances" in out
    assert "left out: 1 (1 too long)" in out


def test_without_texts_recordings_are_kept_and_their_texts_are_not(tmp_path):
    """For pre-training: nobody has to have written anything, and what is written must not be a reason."""
    write(tmp_path / "in" / "alone.wav", 1.0)
    write(tmp_path / "in" / "beside.wav", 1.2)
    (tmp_path / "in" / "beside.txt").write_text("far too long a text to be spoken in a second " * 9)
    report = prepare("folder", tmp_path / "in", tmp_path / "out", PrepareOptions(jobs=1, untranscribed=True))
    assert not report["rejected"]["count"]
    assert [each.text for each in Manifest(tmp_path / "out" / "train.jsonl.gz")] == ["", ""]
    strict = prepare("folder", tmp_path / "in", tmp_path / "strict", PrepareOptions(jobs=1))
    assert strict["rejected"]["by_reason"] == {"no text": 1, "text too long": 1}


def test_nothing_kept_is_a_failure_with_its_reasons(tmp_path, capsys):
    source = simple(tmp_path / "in", [0.5, 1.0])
    out = tmp_path / "out"
    assert main(["prepare", "jsonl", str(source), str(out), "--max-seconds", "0.1", "--jobs", "1"]) == 1
    assert "no utterance was kept (2 too long)" in capsys.readouterr().err
    assert not list(out.glob("*.jsonl.gz"))


def test_lhotse_reads_the_manifest_and_hears_the_same(tmp_path):
    from lhotse import CutSet

    folder = tmp_path / "in"
    write(folder / "a.wav", 1.3, 300, rate=22_050)
    write(folder / "b.flac", 2.0, 310)
    soundfile.write(folder / "c.wav", np.stack([tone(1.0, 320), tone(1.0, 640)], 1), RATE)
    values = [{"audio": f"{name}", "text": name, "speaker": "s", "lang": "en"} for name in ("a.wav", "b.flac", "c.wav")]
    values.append({"audio": "b.flac", "text": "part", "offset": 0.5, "duration": 1.0, "id": "part"})
    prepare("jsonl", rows(folder, *values), tmp_path / "out", ONE)
    prepare("jsonl", folder / "rows.jsonl", tmp_path / "converted", PrepareOptions(jobs=1, convert="wav"))
    for out in ("out", "converted"):
        cuts = {cut.id: cut for cut in CutSet.from_file(tmp_path / out / "train.jsonl.gz")}
        assert len(cuts) == 4
        for utterance in Manifest(tmp_path / out / "train.jsonl.gz"):
            cut = cuts[utterance.id]
            (said,) = cut.supervisions
            assert (said.text, said.duration) == (utterance.text, pytest.approx(utterance.duration))
            heard = cut.load_audio()[0]
            assert len(heard) == round(cut.duration * cut.sampling_rate)
            ours = read_samples(
                utterance.audio, utterance.start, utterance.start + utterance.duration, utterance.channel
            )
            assert len(ours) == pytest.approx(utterance.duration * RATE, abs=1)
            if cut.sampling_rate == RATE and utterance.id != "c.wav":  # of two channels lhotse takes the first
                np.testing.assert_allclose(heard, ours, atol=1e-4)
    mixed = next(u for u in Manifest(tmp_path / "out" / "train.jsonl.gz") if u.id == "c.wav")
    np.testing.assert_allclose(read_samples(mixed.audio), (tone(1.0, 320) + tone(1.0, 640)) / 2, atol=1e-3)


def test_a_rerun_measures_only_what_is_new(tmp_path):
    source = simple(tmp_path / "in", [1.0, 1.1, 1.2])
    out = tmp_path / "out"
    assert prepare("jsonl", source, out, ONE)["measured"] == 3
    before = (out / "train.jsonl.gz").read_bytes()
    os.utime(tmp_path / "in" / "0.wav")  # a date says nothing
    assert prepare("jsonl", source, out, ONE)["measured"] == 0
    assert (out / "train.jsonl.gz").read_bytes() == before
    write(tmp_path / "in" / "1.wav", 1.1, 999)  # the content does
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"audio": write(tmp_path / "in" / "new.wav", 1.0, 888).name, "text": "new"}) + "\n")
    report = prepare("jsonl", source, out, ONE)
    assert report["measured"] == 2
    assert report["splits"]["train"]["utterances"] == 4
    # Other options decide anew without measuring anew; a split that is no more has no manifest left.
    report = prepare("jsonl", source, out, PrepareOptions(jobs=1, min_seconds=1.05, split="dev=1"))
    assert report["measured"] == 0
    assert sorted(path.name for path in out.glob("*.gz")) == ["dev.jsonl.gz"]
    assert report["splits"]["dev"]["utterances"] == 2


def test_a_fingerprint_is_of_the_beginning_the_end_and_the_size(tmp_path):
    path = tmp_path / "a.wav"
    row = Row(id="a", audio=str(path), text="")
    content = bytearray(3 << 20)

    def found(**changes) -> str:
        path.write_bytes(content)
        return fingerprint(replace(row, **changes), None)

    seen = {found()}
    for place in (0, (1 << 20) - 1, len(content) - 1):
        content[place] ^= 1
        seen.add(found())
    content.append(0)
    seen |= {found(), found(start=1.0), found(end=2.0), found(channel=1), fingerprint(row, "wav")}
    assert len(seen) == 9
    assert found(text="other", speaker="s", split="dev") in seen  # they change nothing in the audio


def test_converted_files_that_were_lost_are_made_again(tmp_path):
    source = simple(tmp_path / "in", [1.0, 1.1])
    out = tmp_path / "out"
    options = PrepareOptions(jobs=1, convert="flac")
    prepare("jsonl", source, out, options)
    first, second = Manifest(out / "train.jsonl.gz")
    assert soundfile.info(first.audio).samplerate == RATE
    Path(first.audio).unlink()
    Path(second.audio).write_bytes(b"cut off")
    assert prepare("jsonl", source, out, options)["measured"] == 2
    assert len(read_samples(first.audio)) == RATE


def test_a_converted_corpus_can_be_moved(tmp_path):
    source = simple(tmp_path / "in", [1.0, 1.1])
    prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=1, convert="wav"))
    before = [read_samples(utterance.audio) for utterance in Manifest(tmp_path / "out" / "train.jsonl.gz")]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").rename(tmp_path / "elsewhere" / "corpus")
    moved = list(Manifest(tmp_path / "elsewhere" / "corpus" / "train.jsonl.gz"))
    assert all(str(tmp_path / "elsewhere" / "corpus") in utterance.audio for utterance in moved)
    for utterance, samples in zip(moved, before, strict=True):
        np.testing.assert_array_equal(read_samples(utterance.audio), samples)


def test_duplicates_can_be_kept_and_equal_ids_are_told_apart(tmp_path):
    write(tmp_path / "a.wav", 1.0)
    source = rows(tmp_path, *({"audio": "a.wav", "text": text, "speaker": "s"} for text in ("one", "one", "two")))
    report = prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=1, keep_duplicates=True))
    assert [row.id for row in Manifest(tmp_path / "out" / "train.jsonl.gz")] == ["a.wav", "a.wav#2", "a.wav#3"]
    assert any("1 utterances repeat what the same speaker said" in note for note in report["notes"])
    report = prepare("jsonl", source, tmp_path / "out", ONE)
    assert rejected(report) == {"a.wav#2": "duplicate", "a.wav#3": "duplicate"}


def test_of_audio_in_two_splits_the_copy_to_test_with_is_kept(tmp_path):
    write(tmp_path / "a.wav", 1.0, 300)
    write(tmp_path / "b.wav", 1.0, 300)
    source = rows(
        tmp_path,
        {"audio": "a.wav", "text": "a", "split": "train-clean"},
        {"audio": "b.wav", "text": "b", "split": "test"},
        {"audio": "a.wav", "text": "no split fits", "id": "c", "split": "dev"},
    )
    report = prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=1))
    assert rejected(report) == {"a.wav": "duplicate", "c": "duplicate"}
    assert list(report["splits"]) == ["test"]
    report = prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=1, split="test=b.*"))
    assert rejected(report) == {"a.wav": "split", "c": "split"}


def test_a_speaker_in_two_splits_is_noted(tmp_path):
    source = simple(tmp_path, [1.0, 1.1], speaker="s")
    report = prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=1, split="train=0.*,test=1.*"))
    assert any("more than one split" in note for note in report["notes"])


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    source = simple(tmp_path / "in", [1.0])
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match="out"):
        prepare("jsonl", source, tmp_path / "out", ONE)


def test_two_runs_do_not_write_to_one_folder(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(prepare_module.pool, "ALIVE_SECONDS", 0.05)
    source, out = simple(tmp_path / "in", [1.0]), tmp_path / "out"
    out.mkdir()
    folder = os.open(out, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="Another"):
        prepare("jsonl", source, out, ONE)
    os.close(folder)
    (out / ".stapes-0123.part").write_text("left by one that was killed")
    prepare("jsonl", source, out, ONE)
    assert not list(out.glob(".stapes-*"))


def test_a_full_disk_while_converting_ends_it_with_the_reason(tmp_path, monkeypatch):
    source = simple(tmp_path / "in", [1.0])
    monkeypatch.setattr(soundfile.SoundFile, "write", _no_space)
    with pytest.raises(OutputError, match="No space"):
        prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=1, convert="wav"))
    assert not list((tmp_path / "out").rglob("*.wav*"))


def _no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_damaged_journal_costs_time_and_no_more(tmp_path):
    source = simple(tmp_path / "in", [1.0])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "measured.sqlite").write_bytes(b"nonsense" * 1000)
    assert prepare("jsonl", source, tmp_path / "out", ONE)["measured"] == 1


_SLOW = """
import sys, time
from stapes.data import checks, pool, prepare
from stapes.data.options import PrepareOptions
prepare._COMMIT_SECONDS, pool.ALIVE_SECONDS = 0.0, 0.1
measure = checks.measure
def slow(*arguments):
    time.sleep(0.05)
    return measure(*arguments)
checks.measure = slow
from stapes.cli.main import main
sys.exit(main(["prepare", "jsonl", sys.argv[1], sys.argv[2], "--jobs", "2", "--convert", "wav"]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_after_any_end_it_goes_on_and_leaves_nothing_half_done(tmp_path, how):
    source = simple(tmp_path / "in", [0.3 + 0.01 * number for number in range(60)])
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", _SLOW, source, out], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    done = 0
    while done < 8 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        if (out / "measured.sqlite").exists():
            with sqlite3.connect(out / "measured.sqlite", timeout=30) as journal:
                try:
                    (done,) = journal.execute("SELECT count(*) FROM measured").fetchone()
                except sqlite3.OperationalError:
                    continue
    children = _children(process.pid)
    assert 8 <= done < 60
    process.send_signal(how)
    _, err = process.communicate(timeout=10)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130), err
    assert not list(out.glob("*.jsonl.gz"))
    assert not (out / "report.json").exists()
    while any(map(_lives, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_lives, children))
    report = prepare("jsonl", source, out, PrepareOptions(jobs=1, convert="wav"))
    assert report["measured"] <= 60 - done
    assert report["splits"]["train"]["utterances"] == 60
    assert len(list(out.rglob("*.wav"))) == 60
    assert not list(out.rglob(".*"))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_file_that_kills_the_decoder_stops_nothing(tmp_path, monkeypatch):
    source = simple(tmp_path / "in", [1.0, 1.1, 1.2, 1.3])
    measure = prepare_module.checks.measure

    def deadly(row, convert, out):
        if row.audio.endswith("1.wav"):
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(row, convert, out)

    monkeypatch.setattr(prepare_module.checks, "measure", deadly)
    report = prepare("jsonl", source, tmp_path / "out", PrepareOptions(jobs=2))
    assert rejected(report) == {"1.wav": "unreadable"}
    assert "ended the decoder's process" in report["rejected"]["utterances"][0]["reason"]
    assert [row.id for row in Manifest(tmp_path / "out" / "train.jsonl.gz")] == ["0.wav", "2.wav", "3.wav"]


@pytest.mark.data
@pytest.mark.parametrize("corpus", ["yesno", "pocketsphinx", "misc-en", "noise-rir"])
def test_real_corpora(tmp_path, corpus):
    report = prepare("jsonl", DATA / corpus, tmp_path / "out", PrepareOptions(jobs=1, normalize="basic"))
    lines = (DATA / corpus / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    kept = sum(split["utterances"] for split in report["splits"].values())
    assert kept + report["rejected"]["count"] == len(lines)
    assert report["rejected"]["by_reason"] == ({"no text": 17} if corpus == "noise-rir" else {})
    if corpus == "yesno":
        assert set(report["splits"]["train"]["characters"]) == set("לאכן ")


def test_much_that_is_not_committed_locks_nobody_out(tmp_path: Path) -> None:
    """On 16 cores thousands of measurements come between two commits: more than SQLite keeps in memory by itself."""
    facts = AudioFacts(code="", digest="0" * 64, error="x" * 400)
    with prepare_module._Journal(tmp_path / "measured.sqlite") as journal:
        journal.add(prepare_module._Measured("first", facts, True))
        journal._commit()
        for number in range(12_000):
            journal._committed = time.monotonic()
            journal.add(prepare_module._Measured(f"{number:064}", facts, True))
        looking = sqlite3.connect(f"{journal.path.resolve().as_uri()}?mode=ro", uri=True, timeout=0.1)
        assert looking.execute("SELECT count(*) FROM measured").fetchone() == (1,)
        looking.close()
    assert prepare_module._look_up(tmp_path / "measured.sqlite", f"{11_999:064}") == facts
