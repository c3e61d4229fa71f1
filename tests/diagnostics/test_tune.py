"""Tuning: phases in order, what is kept and what is not, and processes that fail."""

from __future__ import annotations

import json
import sys
import wave
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stapes.cli.main import main
from stapes.devices import tuned
from stapes.devices.backend import Device
from stapes.diagnostics import tune as tuning
from stapes.diagnostics import tune_worker
from stapes.diagnostics.tune import TuneSettings, run_worker, tune
from stapes.errors import ModelError, StapesError, UsageError
from stapes.transcript import Transcript

MI300X = Device(torch.device("cuda", 0), "rocm", "AMD Instinct MI300X", 192 << 30, "gfx942")
H200 = Device(torch.device("cuda", 0), "cuda", "NVIDIA H200", 141 << 30, "sm_90")
UNTUNED = "GemmTunableOp_Half_TN,tn_512_8_512_ld_512_512_512\nGemmTunableOp_Half_TN,tn_512_1_512_ld_512_512_512\n"


class FakeWorker:
    """Answers each phase; the tuned model takes ``after`` seconds, the other one 2."""

    def __init__(self, after: float, untuned: str = UNTUNED, table: str | None = "t", text: str = "a") -> None:
        self.after, self.untuned, self.table, self.text = after, untuned, table, text
        self.phases: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    def __call__(self, request: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        self.phases.append((request["phase"], request, dict(variables)))
        if request["phase"] == "record":
            path = Path(variables["PYTORCH_TUNABLEOP_UNTUNED_FILENAME"])
            path.with_name("untuned0.csv").write_text(self.untuned)
            return {"batch": 8}
        if request["phase"] == "tune":
            assert Path(request["untuned"][0]).read_text() == self.untuned
            return {"results": [["G", "p", "Gemm_Rocblas_7", 0.1], ["G", "q", "Default", 0.2]], "validators": []}
        is_tuned = variables["STAPES_TUNED"] != "0"
        if is_tuned:
            assert (Path(variables["STAPES_TUNED"]) / tuned.GEMMS).is_file()
        return {
            "seconds": [self.after if is_tuned else 2.0] * request["rounds"],
            "texts": ["a", self.text if is_tuned else "a"],
            "table": self.table if is_tuned else None,
        }


@pytest.fixture
def on_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "resolve", lambda device: MI300X)
    monkeypatch.setattr(tuning.catalog, "find", lambda *arguments: "here")


@pytest.mark.usefixtures("on_rocm")
def test_phases_run_in_order_each_with_its_own_settings_and_a_faster_table_is_kept() -> None:
    worker = FakeWorker(after=1.6)
    result = tune(TuneSettings(model="base", rounds=3), worker)
    assert [phase for phase, _, _ in worker.phases] == ["measure", "record", "tune", "measure"]
    (_, record, variables) = worker.phases[1]
    assert variables["PYTORCH_TUNABLEOP_RECORD_UNTUNED"] == "1"
    assert variables["PYTORCH_TUNABLEOP_TUNING"] == "0"
    assert variables["MIOPEN_FIND_ENFORCE"] == "3"
    assert len(record["audio"]) == 16
    assert worker.phases[2][2]["PYTORCH_TUNABLEOP_TUNING"] == "1"
    assert worker.phases[2][1]["known"] is None
    assert result.times_as_fast == pytest.approx(1.25)
    assert (result.gemms, result.changed) == (2, 1)
    assert result.notes == []
    facts = tuned.read_facts(Path(result.folder or ""))
    assert facts["architecture"] == "gfx942"
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["models"]["base"]["after"] == [1.6] * 3


@pytest.mark.usefixtures("on_rocm")
def test_a_second_model_adds_to_the_table_of_the_first() -> None:
    tune(TuneSettings(model="base"), FakeWorker(after=1.0))
    worker = FakeWorker(after=1.0)
    result = tune(TuneSettings(model="turbo"), worker)
    known = worker.phases[2][1]["known"]
    assert known == str(tuned.folder_for(MI300X) / tuned.GEMMS)
    assert set(tuned.read_facts(Path(result.folder or ""))["models"]) == {"base", "turbo"}


@pytest.mark.usefixtures("on_rocm")
def test_what_is_no_faster_is_not_kept_unless_asked() -> None:
    result = tune(TuneSettings(model="base"), FakeWorker(after=1.999))
    assert result.folder is None
    assert "no faster" in result.notes[0]
    assert not tuned.folder_for(MI300X).exists()
    assert tune(TuneSettings(model="base", keep=True), FakeWorker(after=3.0)).folder
    refused = tune(TuneSettings(model="base"), FakeWorker(after=1.0, table=None))
    assert "refused" in refused.notes[0]
    nothing = tune(TuneSettings(model="base"), FakeWorker(after=1.0, untuned="Validator,x,y\n"))
    assert nothing.gemms == 0
    assert "no product" in nothing.notes[0]


@pytest.mark.usefixtures("on_rocm")
def test_texts_that_change_are_told() -> None:
    result = tune(TuneSettings(model="base"), FakeWorker(after=1.0, text="b"))
    assert "1 of 2 texts" in result.notes[0]


def test_on_nvidia_and_on_the_cpu_it_says_what_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "base", "--device", "cpu"]) == 0
    assert "nothing to tune on the CPU" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "resolve", lambda device: H200)
    monkeypatch.setattr(tuning.catalog, "find", lambda *arguments: "here")
    worker = FakeWorker(after=2.0)
    monkeypatch.setattr(tuning, "run_worker", worker)
    assert main(["tune", "base", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "one solution for each product" in result["notes"][0]
    assert not worker.phases
    assert main(["tune", "base", "--keep"]) == 0
    assert "1.000 × as fast" in capsys.readouterr().out
    assert not any(name.startswith("MIOPEN") for name in worker.phases[1][2])


@pytest.mark.usefixtures("on_rocm")
def test_what_cannot_be_tuned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(after=1.0)
    with pytest.raises(UsageError, match="--rounds"):
        tune(TuneSettings(model="base", rounds=0), worker)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    with pytest.raises(UsageError, match="PYTORCH_TUNABLEOP_ENABLED is set"):
        tune(TuneSettings(model="base"), worker)
    monkeypatch.delenv("PYTORCH_TUNABLEOP_ENABLED")
    monkeypatch.setattr(tuning.catalog, "find", lambda *arguments: None)
    with pytest.raises(ModelError, match="models pull base"):
        tune(TuneSettings(model="base", offline=True), worker)
    assert not worker.phases
    assert main(["tune", "base", "--audio", "no-such.wav"]) == 1


def python(tmp_path: Path, body: str) -> str:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_a_phase_that_dies_or_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python(tmp_path, "cat >/dev/null; echo noise; echo '{\"batch\": 3}'"))
    assert run_worker({"phase": "record"}, {}) == {"batch": 3}
    monkeypatch.setattr(sys, "executable", python(tmp_path, "cat >/dev/null; echo 'HIP error: bad' >&2; exit 134"))
    with pytest.raises(StapesError, match=r"'record' of tuning ended with exit code 134: HIP error"):
        run_worker({"phase": "record"}, {})
    answer = json.dumps({"error": "base is not here", "exit_code": 3})
    monkeypatch.setattr(sys, "executable", python(tmp_path, f"cat >/dev/null; echo '{answer}'"))
    with pytest.raises(ModelError, match="not here"):
        run_worker({"phase": "measure"}, {})


class FakeRecognizer:
    engine = SimpleNamespace(slots=6)

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def transcribe_many(self, paths: list[str], options: Any) -> Any:
        assert not options.vad
        self.groups.append(paths)
        for path in reversed(paths):
            yield Transcript(path=path, text=f"text of {path}", error="damaged" if path == "bad" else None)


def test_the_work_runs_batches_of_every_size_and_is_timed_warm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    import stapes

    recognizer = FakeRecognizer()
    monkeypatch.setitem(vars(stapes), "load", lambda **settings: recognizer)
    request = {"phase": "measure", "rounds": 2, "load": {"model": "x", "device": "cpu"}, "audio": ["a", "b", "c"]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    assert tune_worker.main() == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(answer["seconds"]) == 2
    assert [len(group) for group in recognizer.groups[:4]] == [1, 2, 4, 6]
    assert len(recognizer.groups) == 3 * 4
    assert answer["texts"][:3] == ["text of a", "text of a", "text of b"]
    with pytest.raises(StapesError, match="bad: damaged"):
        tune_worker.work(recognizer, ["bad"], 1)


def test_made_sounds_are_loud_whole_windows_that_differ(tmp_path: Path) -> None:
    first, second = (tune_worker.speech_like(seed) for seed in (0, 1))
    assert len(first) == 30 * 16_000
    assert np.abs(first).max() > 10_000
    assert not np.array_equal(first, second)
    assert np.array_equal(first, tune_worker.speech_like(0))
    (path,) = tune_worker.write_sounds(tmp_path, 1)
    with wave.open(path) as file:
        assert (file.getframerate(), file.getnframes()) == (16_000, 480_000)
