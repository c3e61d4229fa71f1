"""Trainings with CTC, attention and both: from evaluations to the page of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_bench import MACHINE, evaluation

from stapes.benchmarks.objectives import gather
from stapes.benchmarks.records import read_bench
from stapes.benchmarks.results_objectives import HEADER
from stapes.benchmarks.results_page import BLANK, render
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.evaluation.results import CorpusFacts, ModelFacts, Rate, write_result

RATE = {"low": None, "high": None, "method": "bootstrap by speaker", "why": ""}


def evaluated(folder: Path, objective: str, wer: float, seed: int = 0, corpus: str = "ls/test", **changes: Any) -> Path:
    """An evaluation that never happened, of a model that was never trained."""
    cost: dict[str, Any] = {
        "objective": objective,
        "recipe": objective,
        "init": "base",
        "augmentation": "speed, gain, SpecAugment",
        "seed": seed,
        "command": ["stapes", "train", objective, "--set", f"seed={seed}", "-o", "/home/alice/runs/mine"],
        "corpus_hours": 4.0,
        "steps": 1200,
        "hours": 0.05 + 0.01 * seed,
        "audio_seconds_per_second": 1500.0,
        "processes": 1,
        "device": "AMD Instinct MI300X",
        "peak_memory_bytes": 8_000_000_000,
    } | changes
    cost = {name: value for name, value in cost.items() if value is not None}
    machine = {**MACHINE, "fingerprint": cost.pop("machine", MACHINE["fingerprint"])}
    folder.mkdir(parents=True)
    result = evaluation(
        ModelFacts(name="model", precision="fp16", device="AMD Instinct MI300X", training_cost=cost or None),
        CorpusFacts(
            name=corpus, manifest=f"{corpus}.jsonl.gz", sha256=corpus[:2] * 32, utterances=100, hours=1.0, speakers=4
        ),
        Rate(value=wer, **RATE),
        Rate(value=wer / 3, **RATE),
        date=f"2026-12-01T1{seed}:00:00+00:00",
        machine=machine,
        options={"beam_size": 1, "lm": None},
    )
    write_result(folder, result)
    return folder


def cells_of(page: str) -> list[dict[str, str]]:
    """Our rows of the table, by column."""
    part = page.partition("## CTC and attention")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|") and ", stapes" in line]
    return [dict(zip(HEADER, (cell.strip() for cell in line.strip("|").split(" | ")), strict=True)) for line in lines]


def test_seeds_become_one_row_and_the_rest_stays_blank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        *(evaluated(tmp_path / f"h{seed}", "hybrid", wer, seed) for seed, wer in enumerate((0.10, 0.12, 0.11))),
        evaluated(tmp_path / "so", "hybrid", 0.3, corpus="so/test"),
        evaluated(tmp_path / "a", "ctc", 0.5, init=None),
        evaluated(tmp_path / "p", "ctc", 0.7, init=None, augmentation="none", peak_memory_bytes=None),
    ]
    assert main(["bench", "objectives", *map(str, folders), "-o", str(tmp_path / "results")]) == 0
    assert "hybrid from base, ls/test: WER 11.00 %, CER 3.67 %, seeds 0, 1, 2" in capsys.readouterr().out
    (path,) = (tmp_path / "results").glob("*.json")
    assert path.name == "2026-12-01-amd-instinct-mi300x-012345-objectives-trained-here.json"
    result = read_bench(path)
    assert result.date.startswith("2026-12-01T12")  # of the last
    assert result.notes == ["`stapes train hybrid`", "`stapes train ctc`"]  # of whatever seed
    assert "alice" not in path.read_text()
    page = render([(path.name, result)])
    assert "note: `stapes train hybrid`" in page.partition("## Runs")[2]
    rows = cells_of(page)
    assert [(row["objective"], row["starts from"], row["augmentation"]) for row in rows[:4]] == [
        ("hybrid, stapes", "encoder of base", "speed, gain, SpecAugment"),
        ("hybrid, stapes", "encoder of base", "speed, gain, SpecAugment"),
        ("ctc, stapes", "nothing", "speed, gain, SpecAugment"),
        ("ctc, stapes", "nothing", "none"),
    ]
    first = rows[0]
    assert (first["test set"], first["seeds"], first["WER, %"]) == ("ls/test", "3", "11.00 (10.00–12.00)")
    assert (first["hours of training"], first["memory, GB"], first["audio s/s"]) == ("0.060, 1200 steps", "8.0", "1500")
    assert (rows[1]["test set"], rows[1]["WER, %"]) == ("so/test", "30.00")
    assert rows[3]["memory, GB"] == "–"
    blanks = {(row["objective"], row["starts from"]) for row in rows[4:]}
    assert blanks == {
        ("ctc, stapes", "encoder of base"),
        ("attention, stapes", "encoder of base"),
        ("attention, stapes", "nothing"),
        ("hybrid, stapes", "nothing"),
    }
    assert all(row["WER, %"] == BLANK for row in rows[4:])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"seed": 0}, "comes twice"),
        ({"seed": 1, "machine": "ffffffffffff"}, "several machines"),
        ({"seed": 1, "hours": None}, "does not say what its model cost"),
    ],
)
def test_what_cannot_be_one_result_is_refused(tmp_path: Path, second: dict[str, Any], message: str) -> None:
    folders = [evaluated(tmp_path / "a", "ctc", 0.1), evaluated(tmp_path / "b", "ctc", 0.1, **second)]
    with pytest.raises(UsageError, match=message):
        gather(folders, ["stapes", "bench", "objectives"])


def test_other_settings_are_another_row(tmp_path: Path) -> None:
    folders = [evaluated(tmp_path / "a", "ctc", 0.1), evaluated(tmp_path / "b", "ctc", 0.2, steps=600)]
    rows = gather(folders, ["stapes"]).rows
    assert [row.case["steps"] for row in rows] == [1200, 600]
    assert json.dumps(rows[0].case) != json.dumps(rows[1].case)
