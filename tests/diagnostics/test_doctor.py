"""The doctor as a whole: nothing stops it, its transcriptions decide, and its report can be shown around."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from machines import machine, radeon

from stapes.cli.doctor import _as_text
from stapes.cli.main import main
from stapes.diagnostics import doctor, engine_probes, machine_probes
from stapes.diagnostics.doctor import Report, examine, trial_findings, usable_devices, working
from stapes.diagnostics.known_errors import KNOWN_ERRORS, explain
from stapes.diagnostics.trial import CLIP_TEXT, Trial, agreement, compare, find_clip, run_trials


def trial(device: str, text: str | None = CLIP_TEXT, **changes: object) -> Trial:
    made = Trial(device, "tiny.en", "float16", text, 2.6, 1.0, 0.5, 0.2)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_probe_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("libamd_smi.so")

    for module in (machine_probes, engine_probes):
        for name in [name for name in vars(module) if name.startswith(("probe_", "run_tool"))]:
            monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(doctor, "installed_models", fail)
    report = examine()
    assert report.exit_code == 3
    assert {"system", "pci", "kfd", "torch", "onnx", "models"} <= report.facts.failures.keys()
    assert any("KeyError" in finding.what for finding in report.findings)
    assert json.loads(json.dumps(report.as_dict()))["exit_code"] == 3


def test_without_a_model_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: machine(models=()))
    report = examine()
    assert (report.exit_code, report.trials) == (3, [])
    assert "stapes models pull" in report.findings[-1].fix


def test_without_a_clip_what_computes_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "collect", radeon)
    monkeypatch.setattr(doctor, "find_clip", lambda: None)
    report = examine()
    assert (report.exit_code, report.works) == (0, ["cuda:0", "cpu"])
    assert "--audio FILE" in report.findings[-1].fix


def test_every_gpu_that_computes_is_tried_and_the_transcription_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "collect", radeon)
    monkeypatch.setattr(doctor, "find_clip", lambda: Path("clip.wav"))
    tried: list[str] = []

    def run(devices: list[str], model: str, audio: Path, spoken: str | None) -> list[Trial]:
        tried.extend(devices)
        return compare([trial("cpu"), trial("cuda:0", "Thank you. Thank you.")], spoken)

    monkeypatch.setattr(doctor, "run_trials", run)
    report = examine()
    assert tried == ["cpu", "cuda:0"]
    assert (report.works, report.exit_code) == (["cpu"], 0)
    (wrong,) = [finding for finding in report.findings if finding.level == "problem"]
    assert "transcribes something else: 'Thank you. Thank you.'" in wrong.what
    assert wrong.fix


def test_a_device_that_failed_its_tests_is_not_tried() -> None:
    facts = radeon()
    assert facts.torch is not None
    processor, card = facts.torch.devices
    torch = replace(facts.torch, devices=(processor, replace(card, failure="crashed (SIGSEGV)")))
    assert usable_devices(replace(facts, torch=torch)) == ["cpu"]


def test_trials_and_what_they_show() -> None:
    trials = compare(
        [
            trial("cpu", second_seconds=0.05),
            trial("cuda:0", "The quick brown fox jumps over a lazy dog.", first_seconds=700.0),
            trial("cuda:1", None, failure="crashed (SIGABRT): HW Exception by GPU node-1 reason :GPU Hang"),
        ],
        CLIP_TEXT,
    )
    assert [result.agreement for result in trials] == [1.0, pytest.approx(8 / 9), None]
    assert working(machine(), trials) == ["cuda:0", "cpu"]
    found = list(trial_findings(trials))
    texts = [f"{finding.level} {finding.subject} {finding.what} {finding.fix}" for finding in found]
    assert any("ok cuda:0 transcribes 89% of the CPU's words, 13.0 × real time" in text for text in texts)
    assert any("warning cuda:0 the first transcription took 700 s" in text for text in texts)
    assert any("problem cuda:1" in text and "the GPU hung" in text and "6.18.4" in text for text in texts)
    assert any("slower than the CPU" in text for text in texts)


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        ("", "", 1.0),
        ("", "words", 0.0),
        ("The Fox, jumps!", "the fox jumps", 1.0),
        ("one two three four", "one two four", 0.75),
        ("a b c d", "d c b a", 0.25),
    ],
)
def test_agreement_is_the_share_of_words_in_order(first: str, second: str, share: float) -> None:
    assert agreement(first, second) == share == agreement(second, first)


def test_each_known_error_is_found_by_a_text_of_its_own() -> None:
    for text, cause in {
        "symbol lookup error: undefined symbol: hsa_amd_enable_logging": "older",
        "HIP error: invalid device function": "no kernels",
        "RuntimeError: miopenStatusUnknownError": "MIOpen failed",
        "fatal error: 'hiprand_xorwow.h' file not found": "headers",
        "libmigraphx_c.so.3: cannot open shared object file": "needs a ROCm",
        "CUDA driver version is insufficient for CUDA runtime version": "driver is older",
        "Unable to open /dev/kfd read-write: Permission denied": "may not open",
        "HIP out of memory. Tried to allocate 2.00 GiB": "not enough free",
        "PyTorch is not linked with support for hip devices": "called 'hip'",
        "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found": "newer Linux",
    }.items():
        known = explain(text)
        assert known is not None, text
        assert cause in known.cause
    assert explain("all is well") is explain(None) is None
    assert all(known.cause and known.fix for known in KNOWN_ERRORS)


def test_the_table_shows_every_finding_with_its_fix() -> None:
    facts = radeon(environment={"HSA_OVERRIDE_GFX_VERSION": "9.0.0", "HIP_VISIBLE_DEVICES": "\x1b[31m-1"})
    report = Report(facts, doctor.findings(facts), compare([trial("cpu")], CLIP_TEXT), ["cpu"])
    text = _as_text(report, False)
    for finding in report.findings:
        assert finding.subject in text
    assert "→ unset HSA_OVERRIDE_GFX_VERSION" in text
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "stapes transcribes on cpu; 1 problem above."


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--audio", "nowhere.wav"]) == 2
    assert "nowhere.wav" in capsys.readouterr().err


def test_exit_code_3_when_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: machine(torch=None, models=("tiny.en",)))
    assert main(["doctor", "--no-transcribe", "--json"]) == 3
    out = capsys.readouterr().out
    assert json.loads(out)["works"] == []
    assert out.count("\n") == 1


def test_a_model_that_is_not_here_is_the_trial_s_failure(tmp_path: Path) -> None:
    (result,) = run_trials(["cpu"], "large-v1-of-nobody", tmp_path / "a.wav", None)
    assert "large-v1-of-nobody" in (result.failure or "")


@pytest.mark.skipif(find_clip() is None, reason="pytest-audioeval, whose clips are used, is not installed")
@pytest.mark.skipif(not doctor.installed_models(), reason="no model is installed")
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert "cpu" in report["works"]
    (processor,) = [trial for trial in report["trials"] if trial["device"] == "cpu"]
    assert processor["correct"] >= 0.8
    assert processor["agreement"] == 1
    assert not report["facts"]["failures"]
    for name in (platform.node(), getpass.getuser()):
        assert len(name) < 5 or f'"{name}"' not in text
