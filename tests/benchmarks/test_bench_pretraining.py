"""Pre-training and what it gains: from trainings to the page of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_bench import evaluation

from stapes.benchmarks.pretraining import curve_files, gather
from stapes.benchmarks.records import read_bench
from stapes.benchmarks.results_page import BLANK, render
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.evaluation.results import CorpusFacts, ModelFacts, Rate, write_result

GPU = "AMD Instinct MI300X"


def trained(folder: Path, lines: list[dict[str, Any]], *words: str, **changes: Any) -> dict[str, Any]:
    """A training that never happened. Returns what it cost."""
    command = ["stapes", "train", "pretrain", "--train", "/home/alice/all.jsonl.gz", "-o", str(folder)]
    for word in words:
        command += ["--set", word]
    cost = {"command": command, "corpus_hours": 8.5, "steps": 300, "hours": 0.05, "device": GPU} | changes
    cost.setdefault("audio_seconds_per_second", 9000.0)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "training.json").write_text(json.dumps(cost))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return cost


def pretrained(folder: Path, loss: float, *words: str) -> Path:
    scores = {"strict_loss": loss, "accuracy": 0.25, "code_perplexity": 90.0}
    train = [{"kind": "train", "step": 0, "time": 100.0, "contrastive_loss": 4.6}]
    dev = [{"kind": "dev", "step": step, "time": 100.0 + step, **scores} for step in (100, 200)]
    trained(folder, [*train, *dev, {"kind": "result", "step": 200, "time": 300.0, **scores}], *words)
    return folder


def searched(folder: Path, errors: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A search over learning rates. Returns the cost of the best."""
    costs = {}
    for rate, cer in errors.items():
        lines = [
            {"kind": kind, "step": step, "time": float(step), "cer": value, "wer": 2 * value}
            for kind, step, value in (("dev", 100, 0.9), ("dev", 200, cer), ("result", 200, cer))
        ]
        costs[cer] = trained(folder / rate, lines, f"optimizer.peak_lr={rate}", **{"corpus_hours": 1.0} | changes)
    return costs[min(costs)]


def judged(folder: Path, cost: dict[str, Any], cer: float) -> Path:
    rates = [
        Rate(value=value, low=0.9 * value, high=1.1 * value, method="bootstrap", why="") for value in (cer, 2 * cer)
    ]
    folder.mkdir()
    write_result(
        folder,
        evaluation(
            ModelFacts(name="model", precision="bf16", device=GPU, parameters=12_000_000, training_cost=cost),
            CorpusFacts(name="test", manifest="test.jsonl.gz", sha256="ab" * 32, utterances=100, hours=1.0, speakers=4),
            rates[1],
            rates[0],
        ),
    )
    return folder


def formatted(folder: Path, speed: float, loss: float, *words: str) -> Path:
    lines = [
        {
            "kind": "train",
            "step": step,
            "time": float(step),
            "audio_seconds_per_second": speed if step else 1.0,  # the first is slow
            "contrastive_loss": 4.0 if step == 0 else loss,
        }
        for step in range(0, 200, 20)
    ]
    trained(folder, lines, *words)
    return folder


def table_of(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    lines = page.partition("## Pre-training")[2].partition("\n## ")[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_a_search_stands_beside_that_of_its_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [pretrained(tmp_path / "easy", 4.2, "objective.hide_time_length=4"), pretrained(tmp_path / "long", 3.1)]
    best = searched(tmp_path / "with", {"2e-4": 0.4, "6e-4": 0.3})
    twin = searched(tmp_path / "without", {"2e-4": 0.5, "6e-4": 0.6})
    tests = [judged(tmp_path / "t1", best, 0.27), judged(tmp_path / "t2", twin, 0.54)]
    numbers = [
        formatted(tmp_path / "bf16", 1000.0, 4.0),
        formatted(tmp_path / "fp8", 1300.0, 4.02, "run.fp8=true", "run.compile=true"),
    ]
    options = ["--pretrained", str(tmp_path / "with"), "--scratch", str(tmp_path / "without")]
    for name, folders in (("--stage", stages), ("--test", tests), ("--numbers", numbers)):
        options += [word for folder in folders for word in (name, str(folder))]
    assert main(["bench", "pretraining", *options, "-o", str(tmp_path / "results")]) == 0
    assert "from pre-trained, learning rate 0.0006: CER 27.00 %" in capsys.readouterr().out

    (path,) = (tmp_path / "results").glob("*.json")
    result = read_bench(path)
    assert "alice" not in path.read_text()
    page = render([(path.name, result)])
    assert [row[2:] for row in table_of(page, "hardware | run | stage")] == [
        ["1, spans of 4 frames", "8.5", "300", "3.0", "9000", "4.200", "25.00", "90"],
        ["2, spans of 10 frames", "8.5", "300", "3.0", "9000", "3.100", "25.00", "90"],
    ]
    ours, other = table_of(page, "fine-tuned from")
    assert ours[:1] + ours[3:] == [
        "pre-trained",
        "0.0002: 40.00, **0.0006: 30.00**",
        "300",
        "3.0",
        "test",
        "27.00 (24.30–29.70)",
        "54.00 (48.60–59.40)",
        "50.0",
    ]
    assert (other[0], other[3], other[-1]) == ("nothing", "**0.0002: 50.00**, 0.0006: 60.00", "–")
    plain, fp8 = table_of(page, "hardware | products")
    assert (plain[1], plain[4:6], plain[8:]) == ("bf16, fused kernels", ["1000", "1.00"], ["–", "–"])
    assert (fp8[1], fp8[4:6], fp8[8:]) == ("fp8, layers compiled", ["1300", "1.30"], ["0.450", "0.500"])
    for kind in ("loss", "cer"):
        curve = path.with_name(f"{path.stem}-{kind}.svg")
        assert f"](results/{curve.name})" in page
        assert curve.read_text().startswith("<svg")
    assert "spans of 4 frames" in curve_files(result, "x")["x-loss.svg"]


def test_without_any_the_page_says_what_to_run() -> None:
    part = render([]).partition("## Pre-training")[2].partition("\n## ")[0]
    assert f"{BLANK}: `stapes bench pretraining`" in part


def test_searches_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    best = searched(tmp_path / "with", {"2e-4": 0.4})
    test = judged(tmp_path / "t", best, 0.3)
    searched(tmp_path / "rates", {"6e-4": 0.5})
    searched(tmp_path / "steps", {"2e-4": 0.5}, steps=500)
    searched(tmp_path / "twin", {"2e-4": 0.5})
    for other, message in (("rates", "other learning rates"), ("steps", "other steps"), ("twin", "no test is of")):
        with pytest.raises(UsageError, match=message):
            gather([], tmp_path / "with", tmp_path / other, [test], [], [])
    with pytest.raises(UsageError, match="does not say what its model cost"):
        gather([tmp_path], None, None, [test], [], [])
