"""Models that were adapted: from evaluations before and after to the page of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_bench import MACHINE, evaluation

from stapes.benchmarks.adapted import gather
from stapes.benchmarks.records import read_bench
from stapes.benchmarks.results_adapt import DRAFT_HEADER, HEADER
from stapes.benchmarks.results_page import BLANK, render
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.evaluation.results import UTTERANCES, CorpusFacts, Counts, ModelFacts, Rate, Speed, write_result

RATE = Rate(value=None, low=None, high=None, method="bootstrap by speaker", why="")


def evaluated(
    folder: Path,
    errors: dict[str, int],
    corpus: str = "so/test",
    recipe: str | None = None,
    wall: float = 36.0,
    batch_size: int | None = None,
    model: str = "base",
    machine: str = MACHINE["fingerprint"],
    learnt_from: str = "br",
    **cost: Any,
) -> Path:
    """An evaluation that never happened. errors: of each utterance's ten words; half as many of 20 characters."""
    path = Path("/home/alice/d") / f"{corpus}.jsonl.gz"
    if recipe is not None:
        words = [
            "stapes",
            "train",
            recipe,
            "--train",
            f"/home/alice/{learnt_from}/train-{len(errors)}.jsonl.gz",
            "-o",
            "/home/alice/runs/x",
        ]
        words += ["--set", f"seed={cost.get('seed', 0)}", "--set", "run.steps=60", "--resume"]
        cost = {
            "recipe": recipe,
            "init": "base",
            "augmentation": "SpecAugment",
            "seed": 0,
            "command": words,
            "corpus_hours": 0.05,
            "steps": 60,
            "hours": 0.01,
            "peak_memory_bytes": 2_000_000_000,
        } | cost
    result = evaluation(
        ModelFacts(
            name="model" if recipe else model,
            precision="fp16",
            device="AMD Instinct MI300X",
            parameters=50_000_000 if recipe == "distill" else 72_000_000,
            training_cost=cost or None,
        ),
        CorpusFacts(
            name=path.name.partition(".")[0], manifest=str(path), sha256="c" * 64, utterances=1, hours=1.0, speakers=4
        ),
        RATE,
        RATE,
        command=["stapes", "evaluate", model, corpus],
        machine={**MACHINE, "fingerprint": machine},
        options={"beam_size": 1, "batch_size": batch_size, "model": {"name": str(folder)}},
        normalizer="auto",
        counts=Counts(words=1, hits=1, substitutions=0, deletions=0, insertions=0),
        speed=Speed(audio_seconds=3600.0, wall_seconds=wall, real_time_factor=0.01, throughput=100.0),
    )
    folder.mkdir(parents=True)
    write_result(folder, result)
    lines = [
        {
            "id": name,
            "audio": f"{name}.wav",
            "duration": 1.0,
            "reference": "x",
            "hypothesis": f"{wrong} wrong",
            "normalized_reference": "x",
            "normalized_hypothesis": "x",
            "hits": 10 - wrong,
            "substitutions": wrong,
            "deletions": 0,
            "insertions": 0,
            "char_hits": 20 - wrong,
            "char_substitutions": wrong,
            "char_deletions": 0,
            "char_insertions": 0,
        }
        for name, wrong in errors.items()
    ]
    (folder / UTTERANCES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def cells_of(page: str, header: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of the table with this header, by column."""
    lines = page.partition(f"| {' | '.join(header)} |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [dict(zip(header, (cell.strip() for cell in line.strip("|").split(" | ")), strict=True)) for line in lines]


def test_seeds_and_folds_become_one_row_and_what_was_forgotten_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [
        evaluated(tmp_path / "b-br", {"a": 8, "b": 8, "c": 4}, "br/all"),
        evaluated(tmp_path / "b-ls", {"p": 1}, "ls/test"),
    ]
    learnt = [
        evaluated(tmp_path / "0-0", {"a": 2, "b": 4}, "br/test-0", "whisper_lora"),
        evaluated(tmp_path / "0-1", {"c": 4}, "br/test-1", "whisper_lora"),
        evaluated(tmp_path / "1-0", {"a": 2, "b": 4}, "br/test-0", "whisper_lora", seed=1),
        evaluated(tmp_path / "1-1", {"c": 1}, "br/test-1", "whisper_lora", seed=1, hours=0.03),
    ]
    evaluated(tmp_path / "k", {"p": 2}, "ls/test", "whisper_lora")
    evaluated(tmp_path / "k-cy", {"p": 3}, "ls/test", "whisper_lora", learnt_from="cy")
    words = ["-o", tmp_path / "results", "--before", before[0], "--before", before[1]]
    words += ["--kept", tmp_path / "k", "--kept", tmp_path / "k-cy"]
    assert main(["bench", "adapted", *map(str, [*learnt, *words])]) == 0
    assert "whisper_lora, br/all (learnt): WER 66.67 → 28.33 %, CER 33.33 → 14.17 %" in capsys.readouterr().out
    (path,) = (tmp_path / "results").glob("*.json")
    assert path.name == "2026-12-01-amd-instinct-mi300x-012345-adapted-adapted-here.json"
    result = read_bench(path)
    assert "alice" not in path.read_text()
    assert result.notes == ["`stapes train whisper_lora --set run.steps=60`"]  # of whatever seed and fold
    page = render([(path.name, result)])
    row, forgotten, other = (each for each in cells_of(page, HEADER) if each["made by"] == "whisper_lora")
    assert (row["test set"], row["utterances"], row["seeds"]) == ("br/all", "3 in 2 folds", "2")
    assert row["WER, %"] == "66.67 → 28.33 (23.33–33.33)"
    assert row["fewer errors, % of words, characters"] == "57.5, 57.5"
    assert (row["learnt from, min an epoch"], row["memory, GB"]) == ("br: 3", "2.0")
    assert row["training, min"] == "0.9, 60 steps"
    assert forgotten["test set"] == "ls/test, *kept*"
    assert forgotten["WER, %"] == "10.00 → 20.00"
    assert (other["learnt from, min an epoch"], other["WER, %"]) == ("cy: 3", "10.00 → 30.00")
    assert forgotten["fewer errors, % of words, characters"] == "−100.0, −100.0"


def test_a_student_stands_beside_its_teacher_and_as_a_draft_of_it(tmp_path: Path) -> None:
    before = [
        evaluated(tmp_path / "b", {"p": 1, "q": 1}),
        evaluated(tmp_path / "b1", {"p": 1, "q": 1}, wall=60.0, batch_size=1),
    ]
    learnt = [evaluated(tmp_path / "s", {"p": 2, "q": 1}, recipe="distill")]
    drafted = [evaluated(tmp_path / "d", {"p": 1, "q": 2}, wall=40.0, batch_size=1)]
    result = gather(before, learnt, [], drafted, ["stapes", "bench", "adapted"])
    page = render([("a.json", result)])
    (student,) = (each for each in cells_of(page, HEADER) if each["test set"] == "so/test")
    assert (student["made by"], student["before"], student["WER, %"]) == (
        "distill (50 of 72 M)",
        "base",
        "10.00 → 15.00",
    )
    (row,) = cells_of(page, DRAFT_HEADER)
    assert (row["recordings, batch"], row["texts that differ"], row["× as fast"]) == ("so/test: 2, 1", "**1**", "1.50")


def test_a_student_of_ctc_is_held_against_the_one_of_its_seed_that_had_no_teacher(tmp_path: Path) -> None:
    before = [evaluated(tmp_path / f"b{seed}", {"p": 4 + seed}, recipe="ctc", seed=seed) for seed in (0, 1)]
    learnt = [evaluated(tmp_path / f"l{seed}", {"p": 3}, recipe="distill_ctc", seed=seed) for seed in (1, 0)]
    page = render([("a.json", gather(before, learnt, [], [], []))])
    (row,) = (each for each in cells_of(page, HEADER) if each["made by"] == "distill_ctc")
    assert (row["before"], row["seeds"]) == ("ctc, trained here", "2")
    assert row["WER, %"] == "45.00 (40.00–50.00) → 30.00"


def test_without_any_the_page_says_what_to_run() -> None:
    page = render([])
    rows = cells_of(page, HEADER)
    assert [row["WER, %"] for row in rows] == [BLANK] * 4
    assert "`stapes train distill --set distill.teacher=base" in rows[2]["made by"]
    assert cells_of(page, DRAFT_HEADER)[0]["× as fast"] == BLANK


def test_what_cannot_be_held_against_anything_is_refused(tmp_path: Path) -> None:
    base = evaluated(tmp_path / "b", {"p": 1})
    once = evaluated(tmp_path / "1", {"p": 1}, recipe="whisper")
    for learnt, message in (
        ([], "name folders"),
        ([base], "does not say what its model cost"),
        ([evaluated(tmp_path / "2", {"z": 1}, recipe="whisper")], "no evaluation of --before"),
        ([evaluated(tmp_path / "3", {"p": 1}, recipe="whisper", batch_size=4)], "same options"),
        ([evaluated(tmp_path / "4", {"p": 1}, recipe="whisper", machine="f" * 12)], "several machines"),
        ([once, evaluated(tmp_path / "5", {"p": 1}, recipe="whisper")], "judged twice"),
    ):
        with pytest.raises(UsageError, match=message):
            gather([base], learnt, [], [], [])
    both = evaluated(tmp_path / "6", {"p": 1, "q": 1})
    seeds = [once, evaluated(tmp_path / "7", {"q": 1}, recipe="whisper", seed=1)]
    with pytest.raises(UsageError, match="other seeds"):
        gather([both], seeds, [], [], [])
    with pytest.raises(UsageError, match="not the same utterances"):
        gather([both], [], [], [base], [])
