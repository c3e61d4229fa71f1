"""Files of runs, the page made of them, and what is sent in."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from pathlib import Path

import pytest
from made_bench import MACHINE, bench, row

from stapes.benchmarks import anonymous, submit
from stapes.benchmarks.records import BenchResult, Weights, compare_runs, read_bench, write_bench
from stapes.benchmarks.results_page import BLANK, load_results, render
from stapes.cli.main import main
from stapes.devices import machine
from stapes.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_a_result_is_read_as_it_was_written_under_a_name_that_tells_day_machine_and_part(tmp_path: Path) -> None:
    result = bench(row(30.0, transformers=2.0), row(30.0, "rocm"))
    path = write_bench(tmp_path, result)
    assert path.name == "2026-12-01-amd-instinct-mi300x-012345-transcribe-medium-random.json"
    assert read_bench(path) == result
    assert write_bench(tmp_path, result) != path  # nothing is overwritten


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda value: value.pop("weights"), "lacks 'weights'"),
        (lambda value: value.update(format="other"), "no result of `stapes bench`"),
        (lambda value: value["machine"].pop("fingerprint"), "on which machine"),
        (lambda value: value["rows"][0].update(systems=[]), "without a system"),
        (lambda value: value["rows"][0]["systems"][0]["wall_seconds"].update(median=0.1), "do not follow"),
        (lambda value: value["rows"][0]["systems"][0]["wall_seconds"].update(rounds="2"), "'rounds'"),
    ],
)
def test_a_damaged_result_is_refused_by_what_is_wrong(tmp_path: Path, damage, message: str) -> None:
    path = write_bench(tmp_path, bench(row(30.0)))
    value = json.loads(path.read_text())
    damage(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_bench(path)
    assert path.name in str(caught.value)


def test_runs_of_one_machine_compare_and_of_two_do_not() -> None:
    before, after = bench(row(30.0, ours=(4.0, 4.2))), bench(row(30.0, ours=(2.0, 2.1)), row(300.0))
    (change,) = compare_runs(before, after)
    assert change.times_as_fast == pytest.approx(2.0)
    elsewhere = bench(row(30.0), machine={**MACHINE, "fingerprint": "ffffffffffff"})
    with pytest.raises(UsageError, match="different machines"):
        compare_runs(before, elsewhere)
    with pytest.raises(UsageError, match="share no case"):
        compare_runs(before, bench(row(30.0, "rocm")))
    with pytest.raises(UsageError, match="different weights"):
        compare_runs(before, bench(row(30.0), weights=dataclasses.replace(before.weights, kind="real")))


def test_the_command_refuses_two_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_bench(tmp_path, bench(row(30.0)))
    other = write_bench(tmp_path, bench(row(30.0), machine={**MACHINE, "fingerprint": "ffffffffffff"}))
    assert main(["bench", "compare", str(one), str(other)]) == 2
    assert "different machines" in capsys.readouterr().err
    assert main(["bench", "compare", str(one), str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["times_as_fast"] == 1.0


def test_without_any_run_the_page_is_blanks_beside_the_published_rows() -> None:
    page = render([])
    for figure in ("35.7", "732", "1684", "3.8", "0.28", "8.5", "16"):
        assert f"*{figure}*" in page
    ours = [line for line in page.splitlines() if line.startswith("|") and ", stapes" in line]
    assert len(ours) >= 8
    assert all(BLANK in line for line in ours)
    # Every published row has a footnote that says how far it was verified.
    published = [line for line in page.splitlines() if "*published*" in line]
    notes = {number for line in published for number in re.findall(r"\[\^(\d+)\]", line)}
    assert published
    assert all("[^" in line for line in published)
    assert all(re.search(rf"\[\^{number}\]: (Blog post|MLPerf Inference)", page) for number in notes)
    assert "Implausibly slow" in page


def test_measured_rows_carry_run_command_commit_and_hardware_and_fill_only_their_own_blanks() -> None:
    result = bench(row(30.0, transformers=2.0), row(30.0, "rocm", ours=(0.5, 0.4, 0.6)), row(300.0, "rocm"))
    page = render([("a.json", result)])
    whisper = page.partition("## wav2vec")[0]
    assert "0.50 (0.40–0.60)" in whisper
    gpu = next(line for line in whisper.splitlines() if "MI300X, stapes" in line)
    assert gpu.count(BLANK) == 1  # the hour
    assert "random weights, 92 tokens" in gpu
    assert "RX 6800 XT, stapes | medium" in whisper
    runs = page.partition("## Runs")[2]
    for fact in ("--model medium", "aaaaaaaaaaaaa", "AMD EPYC 9654", "AMD Instinct MI300X", "ROCm 7.2", "a.json"):
        assert fact in runs
    assert "2.00 (2.00–2.00)" in page.partition("## Beside other systems")[2]


def test_rows_of_the_mlperf_recipe_fill_their_blank_and_no_other() -> None:
    facts = {"device": "rocm", "device_name": "AMD Instinct MI300X", "threads": 96, "precision": "bf16"}
    case = {"work": "windows", **facts, "cache": "bf16", "slots": 128, "windows": 1280, "sound_seconds": 38400.0}
    measured = row(30.0, "rocm", ours=(10.0, 8.0, 12.8), transformers=5.0)
    measured.case = case
    measured.ours.figures = {"tokens_per_second": 8192.0, "mfu": 0.25, "encoder_of_product": 0.8, "step_of_copy": None}
    alone = row(30.0, "rocm", ours=(0.05, 0.06, 0.04))
    alone.case = {"work": "latency", **facts, "cache": "int8"}
    weights = Weights(name="large-v3", kind="random", tokens=64)
    page = render([("a.json", bench(measured, alone, name="mlperf", weights=weights))])
    ours = [line for line in page.splitlines() if line.startswith("| AMD Instinct MI300X, stapes | large-v3")]
    assert len(ours) == 2
    cells = [cell.strip() for cell in ours[0].strip("|").split("|")]
    assert cells[2:7] == ["bf16, 128", "R1", "128.0 (100.0–160.0)", "3840", "8192"]
    assert cells[7:10] == ["25.00", "80.00", "–"]
    assert cells[-1] == "5.00 (5.00–5.00), transformers"
    assert "bf16, int8 cache | R1 | 50.0 (40.0–60.0)" in ours[1]
    assert "| Instinct MI300X, stapes | large-v3 | bf16:" not in page
    assert "| H200, stapes | large-v3 | bf16:" in page
    assert "same recording" in page
    assert page.partition("## Beside other systems")[2].count("transformers") == page.count("--peer transformers`\n")


def test_the_same_results_give_the_same_page_and_trial_runs_give_none(tmp_path: Path) -> None:
    for result in (bench(row(30.0)), bench(row(300.0)), bench(row(3600.0), purpose="trial")):
        write_bench(tmp_path, result)
    found = load_results(tmp_path)
    assert len(found) == 2
    assert render(found) == render(load_results(tmp_path))
    assert render(found[:1]) != render(found)


def test_the_committed_page_is_what_the_committed_results_give() -> None:
    assert (ROOT / "RESULTS.md").read_text(encoding="utf-8") == render(load_results(ROOT / "results"))


def test_the_command_writes_the_page_and_checks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "results", tmp_path / "RESULTS.md"
    write_bench(folder, bench(row(30.0)))
    words = ["bench", "results", "--folder", str(folder), "-o", str(page)]
    assert main([*words, "--check"]) == 1
    assert not page.exists()
    assert main(words) == 0
    assert main([*words, "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["current"] is True


@pytest.fixture
def alice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Somebody with a home and a computer."""
    names = ["alice-workstation", "alice"]
    monkeypatch.setattr(submit, "personal_names", lambda: names)
    monkeypatch.setattr(anonymous, "personal_names", lambda: names)
    monkeypatch.setattr(machine, "facts", lambda: MACHINE)
    return names


def personal(result: BenchResult) -> BenchResult:
    result.command = ["stapes", "bench", "transcribe", "--model", "/home/alice/my models/base", "-o=~/alice/out"]
    result.notes = [
        "Alice's GPU of alice-workstation at 192.168.1.7, see /mnt/secret/notes.txt or mail a.b@example.org"
    ]
    result.audio["corpus"] = "../../alice/private/corpus.jsonl"
    return result


def test_what_is_sent_in_names_nobody_and_keeps_every_figure(tmp_path: Path, alice: list[str]) -> None:
    result = personal(bench(row(30.0, transformers=2.0)))
    path = write_bench(tmp_path / "alice", result)
    path.with_suffix(".log").write_text("10:00 alice@alice-workstation:/home/alice/x.wav round 1: 2.0 s\n")
    output = tmp_path / "out.zip"
    names = submit.pack([path.parent], output)
    with zipfile.ZipFile(output) as archive:
        assert archive.namelist() == names
        texts = {name: archive.read(name).decode() for name in names}
    assert {Path(name).suffix for name in names} == {".json", ".txt", ".log"}
    everything = "\n".join([*names, *texts.values()]).lower()
    for secret in ("alice", "workstation", "/home", "/mnt", "secret", "private", "192.168", "example.org"):
        assert secret not in everything
    (name,) = [name for name in names if name.startswith("results/")]
    sent = json.loads(texts[name])
    assert sent["rows"] == json.loads(path.read_text())["rows"]
    assert sent["machine"] == MACHINE
    assert "torch==" in texts["versions.txt"]
    assert "round 1: 2.0 s" in texts[name.replace("results/", "logs/").replace(".json", ".log")]


def test_results_of_another_machine_are_not_sent_in(tmp_path: Path, alice: list[str]) -> None:
    path = write_bench(tmp_path, bench(row(30.0), machine={**MACHINE, "fingerprint": "ffffffffffff"}))
    with pytest.raises(UsageError, match="another machine"):
        submit.pack([path], tmp_path / "out.zip")
    with pytest.raises(UsageError, match="no results"):
        submit.pack([tmp_path / "empty"], tmp_path / "out.zip") if (tmp_path / "empty").mkdir() is None else None


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("openai/whisper-base", "openai/whisper-base"),
        ("2.0 s / round, 1/2, and/or", "2.0 s / round, 1/2, and/or"),
        ("--model=/home/bob/models/base", "--model=base"),
        ("../shared/data/manifest.jsonl", "manifest.jsonl"),
        ("see C:\\Users\\bob\\x.wav", "see x.wav"),
        ("http://gpu7.example.org:8000/v1#M", "http://<host>/v1#M"),
        ("Bob's run", "<name>'s run"),
        ("bobbin", "bobbin"),
    ],
)
def test_only_what_names_somebody_is_taken_out(text: str, clean: str) -> None:
    assert anonymous.anonymous_text(text, ["bob"]) == clean


def test_a_path_with_spaces_in_a_command_keeps_its_last_part() -> None:
    words = anonymous.anonymous_command(["stapes", "--model", "/home/bob/my models/base v2", "--data=~/a b/c d", "-o"])
    assert words == ["stapes", "--model", "base v2", "--data=c d", "-o"]
