"""``stapes monitor``: a table, one JSON sample, a CSV log that is whole whenever it ends."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stapes.cli import monitor as command
from stapes.cli.main import main
from stapes.devices import monitor
from stapes.devices.monitor import GpuProcess, Reading

H200 = Reading(
    0, "NVIDIA H200", "nvml", "GPU-1", 3 << 30, 141 << 30, 0.5, 300.0, 51.0, 1980.0, None, (GpuProcess(7, "python", 1),)
)
QUIET = Reading(1, None, "nvml")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor.Monitor, "gpus", lambda self: [H200, QUIET])


@pytest.mark.usefixtures("two_gpus")
def test_one_json_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert sample["gpus"][0]["power_watts"] == 300.0
    assert sample["gpus"][0]["processes"] == [{"pid": 7, "name": "python", "memory_bytes": 1}]
    assert sample["gpus"][1]["utilisation"] is None
    assert sample["host"]["memory_total_bytes"]


@pytest.mark.usefixtures("two_gpus")
def test_a_pipe_gets_the_table_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor"]) == 0
    out = capsys.readouterr().out
    for said in ("NVIDIA H200", "3.0 / 141.0 GiB", "50 %", "300 W", "51 °C", "1980 MHz", "python 7", "nvml"):
        assert said in out
    assert out.count("processor") == 1


@pytest.mark.usefixtures("two_gpus")
def test_the_log_has_a_line_for_every_gpu_and_sample_and_is_continued(tmp_path: Path) -> None:
    log = tmp_path / "new" / "gpu.csv"
    for _ in range(2):
        assert main(["monitor", "--csv", str(log), "--samples", "3", "--interval", "0.1"]) == 0
    rows = list(csv.DictReader(log.open()))
    assert [row["gpu"] for row in rows] == ["0", "1"] * 6
    assert rows[0]["power_watts"] == "300.0"
    assert rows[0]["processes"] == "1"
    assert rows[1]["name"] == rows[1]["processes"] == ""
    assert sorted(row["time"] for row in rows) == [row["time"] for row in rows]


def test_what_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diary = tmp_path / "diary.txt"
    diary.write_text("dear diary\n")
    assert main(["monitor", "--csv", str(diary)]) == 2
    assert diary.read_text() == "dear diary\n"
    assert main(["monitor", "--interval", "0"]) == 2
    assert main(["monitor", "--samples", "0"]) == 2
    assert main(["monitor", "--json", "--csv", "x.csv"]) == 2
    assert main(["monitor", "--csv", "/proc/nowhere/x.csv", "--samples", "1"]) == 1
    assert "choose another place" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_log_is_whole(tmp_path: Path, number: int) -> None:
    log = tmp_path / "gpu.csv"
    words = [sys.executable, "-m", "stapes", "monitor", "--csv", str(log), "--interval", "0.1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not log.exists() or log.read_text().count("\n") < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 130
    lines = log.read_text().split("\n")
    assert lines[-1] == ""
    assert {len(next(csv.reader([line]))) for line in lines[:-1]} == {len(command._columns())}
