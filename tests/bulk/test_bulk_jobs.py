"""Whole jobs in processes: every recording has one row, whatever is killed, filled up or damaged on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_bulk import fake_job, made_model, write_recordings

from stapes.bulk import read
from stapes.bulk.driver import TooManyErrors, WorkersLost
from stapes.bulk.files import is_locked
from stapes.bulk.state import look
from stapes.bulk.store import Store, verify
from stapes.errors import OutputError, UsageError
from stapes.options import TranscribeOptions

PATIENCE = 120.0
SHARDS = {"shard_files": 4}


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    """Rows by id; each comes once, and all shards are well."""
    assert [problem for _, problem in verify(out) if problem] == []
    rows = list(read(out))
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def shard_bytes(out: Path) -> list[bytes]:
    store = Store(out)
    return [store.rows_path(shard).read_bytes() for shard in store.finished()]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recordings(tmp_path / "in", 18)
    return tmp_path / "in"


def test_one_worker_and_two_write_the_same_files_and_a_rerun_writes_nothing(folder: Path, tmp_path: Path) -> None:
    model = made_model(tmp_path)
    one = fake_job([folder], tmp_path / "one", model, workers=1, **SHARDS)
    two = fake_job([folder], tmp_path / "two", model, workers=2, decoders=2, **SHARDS)
    assert one["files_done"] == two["files_done"] == 18
    assert shard_bytes(tmp_path / "one") == shard_bytes(tmp_path / "two")
    rows = rows_of(tmp_path / "one")
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len({row["key"] for row in rows.values()}) == len({row["sha256"] for row in rows.values()}) == 18

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one" / "shards").iterdir()}
    again = fake_job([folder], tmp_path / "one", model, **SHARDS)
    assert again["files_now"] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "one" / "shards").iterdir()} == before
    assert look(tmp_path / "one")["state"] == "finished"


def test_damaged_recordings_are_rows_with_their_error(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "text.wav").write_text("this is no sound")
    (folder / "a" / "empty.wav").write_bytes(b"")
    truncated = (folder / "a" / "0001.wav").read_bytes()[:2000]
    (folder / "a" / "cut.wav").write_bytes(truncated)
    manifest = tmp_path / "all.jsonl"
    names = [*sorted(str(each) for each in folder.rglob("*.wav")), str(tmp_path / "gone.wav")]
    manifest.write_text("".join(f'{{"audio": "{name}"}}\n' for name in names))
    result = fake_job([manifest], tmp_path / "out", made_model(tmp_path), **SHARDS)
    rows = rows_of(tmp_path / "out")
    failed = {Path(name).name: row["kind"] for name, row in rows.items() if row["status"] == "failed"}
    assert failed == {"text.wav": "audio", "empty.wav": "empty", "gone.wav": "missing"}
    assert "text.wav" in rows[str(folder / "a" / "text.wav")]["error"]
    assert rows[str(folder / "a" / "cut.wav")]["damaged"]
    assert result["failed"] == 3
    assert result["damaged"] == 1
    assert len(rows) == 22


def test_a_recording_that_kills_workers_is_quarantined_and_no_other(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "0003.wav").rename(folder / "a" / "0003-kills.wav")
    result = fake_job([folder], tmp_path / "out", made_model(tmp_path), **SHARDS)
    rows = rows_of(tmp_path / "out")
    assert {Path(name).name for name, row in rows.items() if row["status"] != "ok"} == {"0003-kills.wav"}
    (bad,) = [row for row in rows.values() if row["status"] != "ok"]
    assert bad["status"] == "quarantined"
    assert "SIGKILL" in bad["error"]
    assert result["quarantined"] == 1
    assert len(rows) == 18


def test_a_decoder_that_hangs_is_ended_and_its_recording_quarantined(tmp_path: Path) -> None:
    pipe = tmp_path / "never.wav"
    os.mkfifo(pipe)  # alone: on a busy machine any other recording might seem to hang as well
    result = fake_job([pipe], tmp_path / "out", made_model(tmp_path), decode_seconds=0.2, **SHARDS)
    row = rows_of(tmp_path / "out")[str(pipe)]
    assert (row["status"], row["kind"]) == ("quarantined", "decoder hung")
    assert result["failed"] == 1


def test_a_job_that_goes_wrong_stops_and_says_why_and_goes_on_when_it_is_mended(folder: Path, tmp_path: Path) -> None:
    for number in range(60):
        (folder / f"bad-{number}.wav").write_text("no sound")
    model = made_model(tmp_path)
    with pytest.raises(TooManyErrors, match=r"(?s)--max-errors 0.1.*audio, such as: .*bad-"):
        fake_job([folder], tmp_path / "out", model, **SHARDS)
    assert look(tmp_path / "out")["state"] == "stopped"
    finished = len(Store(tmp_path / "out").finished())
    for number in range(60):
        (folder / f"bad-{number}.wav").write_bytes((folder / "a" / "0001.wav").read_bytes())
    result = fake_job([folder], tmp_path / "out", model, retry_failed=True, **SHARDS)
    rows = rows_of(tmp_path / "out")
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len(rows) == 78
    assert result["shards_done"] > finished


def test_another_model_or_other_options_are_refused_unless_forced(folder: Path, tmp_path: Path) -> None:
    model, out = made_model(tmp_path), tmp_path / "out"
    fake_job([folder], out, model, **SHARDS)
    before = rows_of(out)
    with pytest.raises(UsageError, match=r"beam_size was 1, now 5.*--force"):
        fake_job([folder], out, model, options=TranscribeOptions(beam_size=5), **SHARDS)
    with pytest.raises(UsageError, match=r"--add"):
        fake_job([folder / "a", tmp_path / "model.bin"], out, model, **SHARDS)
    Path(model).write_bytes(b"other weights")
    with pytest.raises(UsageError, match="revision was"):
        fake_job([folder], out, model, **SHARDS)
    assert rows_of(out) == before
    fake_job([folder], out, model, force=True, **SHARDS)
    assert {row["key"] for row in rows_of(out).values()}.isdisjoint(row["key"] for row in before.values())


def test_what_is_new_in_a_folder_is_added(folder: Path, tmp_path: Path) -> None:
    model, out = made_model(tmp_path), tmp_path / "out"
    fake_job([folder], out, model, **SHARDS)
    before = shard_bytes(out)
    write_recordings(folder, 21)
    assert fake_job([folder], out, model, **SHARDS)["files_now"] == 0
    assert fake_job([folder], out, model, add=True, **SHARDS)["files_now"] == 3
    assert shard_bytes(out)[: len(before)] == before
    assert len(rows_of(out)) == 21


def test_machines_share_the_work_in_parts(folder: Path, tmp_path: Path) -> None:
    model, out = made_model(tmp_path), tmp_path / "out"
    fake_job([folder], out, model, shard_index=0, shard_count=2, **SHARDS)
    assert look(out)["state"] == "stopped"
    fake_job([folder], out, model, shard_index=1, shard_count=2, **SHARDS)
    assert look(out)["state"] == "finished"
    assert len(rows_of(out)) == 18


def test_workers_that_cannot_begin_end_the_job(folder: Path, tmp_path: Path) -> None:
    options = TranscribeOptions(initial_prompt="die at once")
    with pytest.raises(WorkersLost, match="there is no engine"):
        fake_job([folder], tmp_path / "out", made_model(tmp_path), options=options)


def test_a_full_disk_stops_the_job_and_loses_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = made_model(tmp_path), tmp_path / "out"
    real, calls = os.fsync, []

    def fails_now_and_then(handle: int) -> None:
        name = str(Path(f"/proc/self/fd/{handle}").readlink())
        if "/shards/.stapes-" in name:
            calls.append(name)
            if len(calls) > 5:
                raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fails_now_and_then)
    with pytest.raises(OutputError, match="the disk is full"):
        fake_job([folder], out, model, **SHARDS)
    monkeypatch.setattr(os, "fsync", real)
    assert not list((out / "shards").glob(".stapes-*"))
    assert len(Store(out).finished()) < 5
    rows_of(out)
    fake_job([folder], out, model, **SHARDS)
    assert len(rows_of(out)) == 18


DRIVER = """
import sys
from made_bulk import fake_job
fake_job([sys.argv[1]], sys.argv[2], sys.argv[3], workers=2, shard_files=4)
"""


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes in /proc")
def test_after_kill_9_of_workers_and_driver_every_recording_has_one_row(tmp_path: Path) -> None:
    folder, out, model = tmp_path / "in", tmp_path / "out", made_model(tmp_path)
    for path in write_recordings(folder, 32):
        path.rename(path.with_name(f"slow-{path.name}"))
    store = Store(out)
    for stop_at in (2, 5):
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), str(out), model])
        killed = False
        try:
            while driver.poll() is None and len(store.finished()) < stop_at:
                if not killed and len(store.finished()) == stop_at - 1:
                    workers = children(driver.pid)
                    killed = bool(workers)
                    if workers:
                        os.kill(workers[-1], signal.SIGKILL)
                time.sleep(0.01)
        finally:
            orphans = children(driver.pid) if driver.poll() is None else []
            driver.kill()
            driver.wait()
        before = {shard: store.rows_path(shard).stat().st_mtime_ns for shard in store.finished()}
        # The lock went with the driver, and its workers go because it is gone.
        wait_for(lambda: not is_locked(out / ".lock"))
        for pid in orphans:
            wait_for(
                lambda pid=pid: (
                    not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
                )
            )
    result = fake_job([folder], out, model, **SHARDS)
    assert result["state"] == "finished"
    # What was finished before was not done again.
    assert {shard: store.rows_path(shard).stat().st_mtime_ns for shard in before} == before
    rows = rows_of(out)
    assert len(rows) == 32
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_a_second_driver_is_refused(folder: Path, tmp_path: Path) -> None:
    model, out = made_model(tmp_path), tmp_path / "out"
    fake_job([folder], out, model, **SHARDS)
    store = Store(out)
    from stapes.bulk.options import Part

    with store.held(Part()):
        for settings in ({}, {"shard_index": 0, "shard_count": 2}):
            with pytest.raises(UsageError, match="Another `stapes bulk`"):
                fake_job([folder], out, model, **SHARDS, **settings)
    with store.held(Part(1, 2)):
        with pytest.raises(UsageError, match="Another `stapes bulk`"):
            fake_job([folder], out, model, **SHARDS)
        with pytest.raises(UsageError, match="another number of parts"):
            fake_job([folder], out, model, shard_index=0, shard_count=3, **SHARDS)
        fake_job([folder], out, model, shard_index=0, shard_count=2, **SHARDS)
