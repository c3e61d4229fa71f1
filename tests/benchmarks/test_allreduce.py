"""All-reduce: right sums, nccl-tests' bandwidths, and ranks that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import made_bench
import pytest
import torch

from stapes.benchmarks import allreduce, results_page
from stapes.benchmarks.allreduce import AllreduceBench, Ranks, as_row, bus_factor
from stapes.benchmarks.records import Weights, read_bench
from stapes.cli.main import main
from stapes.errors import DeviceError, UsageError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_four_gloo_processes_agree_and_the_record_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "allreduce", "--ranks", "4", "--backend", "gloo", "--sizes", "8B,4KiB", "--quick"]
    assert main([*words, "-o", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-allreduce-gloo-4-ranks.json")
    result = read_bench(path)
    assert result.is_trial
    assert json.loads(path.read_text()) == printed
    assert [row.case["bytes"] for row in result.rows] == [8, 4096]
    for row in result.rows:
        figures = row.ours.figures
        assert figures["wrong_elements"] == 0
        assert figures["bus_gb_s"] == pytest.approx(1.5 * figures["algorithm_gb_s"])  # type: ignore[operator]
        assert figures["algorithm_gb_s"] == pytest.approx(row.case["bytes"] / row.ours.wall_seconds.median / 1e9)
        assert len(row.ours.wall_seconds.rounds) == 2


def test_under_a_launcher_each_process_is_one_rank_and_the_first_writes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "stapes", "bench", "allreduce", "--quick", "--sizes", "8B"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*words, "-o", str(tmp_path), "--backend", "gloo"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    result = read_bench(path)
    assert result.rows[0].case["ranks"] == 2
    assert done.stdout.count("wrote") == 1
    assert any("launcher" in note for note in result.notes)


def test_a_wrong_sum_is_counted_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = torch.empty(100)
    allreduce._fill(buffer, 3)
    assert buffer[:8].tolist() == [3, 6, 9, 12, 15, 18, 21, 3]
    assert allreduce._count_wrong(buffer, 3) == 0
    buffer[17] += 1
    assert allreduce._count_wrong(buffer, 3) == 1
    assert allreduce._count_wrong(buffer, 1) == 100

    found = {"bytes": 400, "seconds": [1e-5], "wrong": 3, "iterations": 1, "device": "CPU", "library": "gloo"}
    monkeypatch.setattr(allreduce.Ranks, "results", lambda self: iter([found]))
    monkeypatch.setattr(allreduce.Ranks, "__init__", lambda self, bench: setattr(self, "_processes", []))
    monkeypatch.setattr(allreduce.Ranks, "close", lambda self: None)
    assert main(["bench", "allreduce", "--backend", "gloo", "-o", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "WRONG at 3 places" in captured.out
    assert "wrong sums at 400 B" in captured.err


def test_chunks_are_filled_and_checked_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.empty(100)
    allreduce._fill(whole, 2)
    monkeypatch.setattr(allreduce, "_CHUNK", 9)
    parts = torch.empty(100)
    allreduce._fill(parts, 2)
    assert torch.equal(whole, parts)
    parts[99] = 0
    assert allreduce._count_wrong(parts, 2) == 1


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert [bus_factor(ranks) for ranks in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]
    found = {
        "bytes": 2 << 30,
        "seconds": [0.01, 0.02, 0.01],
        "wrong": 0,
        "iterations": 5,
        "device": "x",
        "library": "y",
    }
    row = as_row(AllreduceBench(backend="gloo", ranks=8), found)
    assert row.ours.figures["algorithm_gb_s"] == pytest.approx(214.748, rel=1e-4)
    assert row.ours.figures["bus_gb_s"] == pytest.approx(375.81, rel=1e-4)


def dies(bench: AllreduceBench, rank: int, where: str, pipe: Any) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def complains(bench: AllreduceBench, rank: int, where: str, pipe: Any) -> None:
    if rank == 1:
        pipe.send(("error", "RuntimeError: no route to host"))
        raise SystemExit(1)
    time.sleep(60)


@pytest.mark.parametrize(
    ("target", "said"),
    [(dies, "rank 1 of 2 was ended by SIGKILL"), (complains, "rank 1 of 2 failed: RuntimeError: no")],
)
def test_a_rank_that_dies_is_named_and_the_others_do_not_linger(target: Any, said: str) -> None:
    ranks = Ranks(AllreduceBench(backend="gloo", ranks=2), target)
    begun = time.monotonic()
    with pytest.raises(DeviceError, match=said):
        list(ranks.results())
    assert time.monotonic() - begun < 30
    assert not any(process.is_alive() for process in ranks._processes)


def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--ranks", "0"], ["--sizes", "6B"], ["--sizes", "big"], ["--rounds", "0"], ["--timeout", "0"]):
        assert main(["bench", "allreduce", "--backend", "gloo", *words]) == 2
        assert words[0] in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "allreduce", "--backend", "nccl", "--ranks", "2"]) == 3
    assert "a GPU for each" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "allreduce", "--backend", "gloo", "--ranks", "4"]) == 2
    with pytest.raises(UsageError, match="multiples of 4"):
        AllreduceBench(backend="gloo", ranks=2, sizes=(5,))


def test_the_page_of_results_has_a_row_for_it_and_its_run() -> None:
    def one(size: int, seconds: float, wrong: int = 0) -> Any:
        found = {"bytes": size, "seconds": [seconds], "wrong": wrong, "iterations": 1, "device": "MI300X"}
        return as_row(AllreduceBench(backend="gloo", ranks=2), {**found, "library": "RCCL 2.27"})

    weights = Weights(name="nccl-2-ranks", kind="none")
    result = made_bench.bench(one(8, 12e-6), one(2**30, 0.004), name="allreduce", weights=weights, audio={})
    page = results_page.render([("a.json", result)])
    assert "| 2, RCCL 2.27 | R1 | 12.0 (12.0–12.0) | 268.4 | 1,073,741,824 B |" in page
    assert "nccl-2-ranks: no weights, 2 cases of 1 rounds" in page
    wrong = made_bench.bench(one(8, 1.0, 3), name="allreduce", weights=weights, audio={})
    assert "**wrong sums**" in results_page.render([("a.json", wrong)])
    assert "stapes bench allreduce" in results_page.render([])


def test_an_interruption_ends_the_ranks_quietly(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "stapes", "bench", "allreduce", "--ranks", "2", "--backend", "gloo"]
    process = subprocess.Popen(
        [*words, "-o", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not _ranks_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = _ranks_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _ranks_of(pid: int) -> list[int]:
    """Processes that a process has started to be ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and "spawn_main" in (path / "cmdline").read_text():
                found.append(int(path.name))
        except OSError:
            continue
    return found
