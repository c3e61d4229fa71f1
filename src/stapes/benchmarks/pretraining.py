"""What pre-training gains: a result made of finished trainings and evaluations, and its curves.

Nothing is measured here. The networks were pre-trained in stages, each on the weights of the one before; a search over
learning rates fine-tuned what came out, and another one its twin from nothing, with the same steps on the same hours.
The rate with the lowest character error rate on dev is tested. Beside these, trainings that differ in the number format
of their products alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from stapes.benchmarks.anonymous import anonymous_command
from stapes.benchmarks.gathered import gathered
from stapes.benchmarks.records import BenchResult, CaseRow, Spread, SystemRow
from stapes.errors import UsageError
from stapes.evaluation.results import Result, read_result
from stapes.evaluation.training_cost import COST, read_cost

NAME = "pretraining"

STAGE, TUNED, FORMAT = "pre-training", "fine-tuning", "number format"
"""Parts of the result: what a row tells of (``case["part"]``)."""

PRETRAINED, NOTHING = "pre-trained", "nothing"
"""What fine-tuning started from (``case["start"]``)."""

_MOST_POINTS = 120
"""Of a curve that is kept."""

_WARM_UP = 0.3
"""Share of a training's lines whose speed does not count: kernels are compiled, the GPU's clocks settle."""


@dataclass(frozen=True)
class _Run:
    """A folder of ``stapes train``, or what was brought home of it."""

    folder: Path
    cost: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def dev(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "dev"]

    @property
    def train(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "train"]

    @property
    def kept(self) -> dict[str, Any]:
        """The dev figures of the weights that were taken."""
        results = [line for line in self.lines if line["kind"] == "result"]
        if not results:
            raise UsageError(f"{self.folder} did not come to its end: go on with it by --resume")
        return results[-1]

    @property
    def seconds(self) -> Spread:
        return Spread.of([3600 * self.cost["hours"]])

    def setting(self, name: str, default: Any = None) -> Any:
        """What the run's own command says of a setting; the last word counts."""
        found = default
        for word in map(str, self.cost.get("command") or []):
            if word.startswith(f"{name}="):
                found = word.partition("=")[2]
        return found

    def rate(self) -> float:
        """The highest learning rate."""
        value = self.setting("optimizer.peak_lr")
        if value is None:
            raise UsageError(f"{self.folder} does not say its learning rate: --set optimizer.peak_lr")
        return float(value)


def gather(
    stages: Sequence[Path],
    pretrained: Path | None,
    scratch: Path | None,
    tests: Sequence[Path],
    numbers: Sequence[Path],
    command: Sequence[str],
) -> BenchResult:
    """The result of these trainings, and of the evaluations of the two models that dev chose (``tests``).

    ``pretrained`` and ``scratch`` hold a training for each learning rate. ``numbers``: trainings in other number
    formats, the one they are compared with first. Raises UsageError where the
    two searches are not alike, or a test is of another model than the one that dev chose.
    """
    rows = [_stage(number, _read(folder)) for number, folder in enumerate(stages, 1)]
    results = [read_result(folder) for folder in tests]
    searches = {PRETRAINED: _search(pretrained), NOTHING: _search(scratch)}
    if any(searches.values()):
        _check_alike(searches)
        rows += [_tuned(start, search, results) for start, search in searches.items()]
    rows += _formats([_read(folder) for folder in numbers])
    if not rows or not results:
        raise UsageError("name the trainings, and the evaluations of the models that dev chose")
    last = max(results, key=lambda result: result.date)
    if len({(result.machine["fingerprint"], result.commit, result.corpus.sha256) for result in results}) > 1:
        raise UsageError("these evaluations are of several machines, commits or test sets")
    return gathered(
        NAME,
        last,
        command,
        made="trained here",
        audio={"corpus": last.corpus.name, "sha256": last.corpus.sha256},
        rows=rows,
        notes=[_said(row) for row in rows],
    )


def _read(folder: Path) -> _Run:
    places = [place for place in (folder / "model", folder) if (place / COST).is_file()]
    cost = read_cost(places[0]) if places else None
    if not cost or "hours" not in cost:
        raise UsageError(f"{folder} does not say what its model cost to train: name a folder of `stapes train`")
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}/metrics.jsonl cannot be read ({error})") from None
    return _Run(folder, cost, lines)


def _search(folder: Path | None) -> list[_Run]:
    return [] if folder is None else [_read(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))]


def _case(part: str, run: _Run, **more: Any) -> dict[str, Any]:
    cost = run.cost
    return {
        "part": part,
        "steps": cost["steps"],
        "corpus_hours": cost.get("corpus_hours"),
        "device": "cpu" if str(cost.get("device")).lower().startswith("cpu") else "cuda",
        "device_name": cost.get("device"),
        "threads": None,
        "command": anonymous_command(map(str, cost.get("command") or [])),
        **more,
    }


def _row(run: _Run, case: dict[str, Any], figures: dict[str, float | None], version: str | None = None) -> CaseRow:
    ours = SystemRow(system="stapes", version=version, wall_seconds=run.seconds, figures=figures)
    return CaseRow(case=case, systems=[ours])


def _stage(number: int, run: _Run) -> CaseRow:
    begin = run.lines[0]["time"]
    curve = [[round(line["time"] - begin, 1), line["strict_loss"], line["accuracy"]] for line in run.dev]
    figures = {
        name: run.kept.get(name) for name in ("strict_loss", "accuracy", "code_perplexity", "probability_perplexity")
    }
    figures["audio_seconds_per_second"] = run.cost.get("audio_seconds_per_second")
    mask = int(run.setting("objective.hide_time_length", 10))
    return _row(run, _case(STAGE, run, stage=number, mask=mask, curve=_thinned(curve)), figures)


def _check_alike(searches: dict[str, list[_Run]]) -> None:
    ours, twins = searches.values()
    if sorted(run.rate() for run in ours) != sorted(run.rate() for run in twins):
        raise UsageError("the two searches tried other learning rates: their best cannot be compared")
    spent = {(run.cost["steps"], run.cost.get("corpus_hours")) for run in (*ours, *twins)}
    if len(spent) > 1:
        raise UsageError(f"these trainings made other steps on other hours: {sorted(spent, key=str)}")


def _tuned(start: str, search: list[_Run], results: Sequence[Result]) -> CaseRow:
    best = min(search, key=lambda run: run.kept["cer"])
    tested = [result for result in results if (result.model.training_cost or {}).get("command") == best.cost["command"]]
    if not tested:
        raise UsageError(f"no test is of {best.folder}, which was the best on dev of those from {start}")
    found = tested[0]
    figures: dict[str, float | None] = {"dev_cer": best.kept["cer"], "dev_wer": best.kept["wer"]}
    for name, rate in (("cer", found.cer), ("wer", found.wer)):
        figures |= {name: rate.value, f"{name}_low": rate.low, f"{name}_high": rate.high}
    case = _case(
        TUNED,
        best,
        start=start,
        rate=best.rate(),
        search=sorted([run.rate(), run.kept["cer"]] for run in search),
        curve=_thinned([[line["step"], line["cer"]] for line in best.dev]),
        corpus=found.corpus.name,
        corpus_sha256=found.corpus.sha256,
        parameters=found.model.parameters,
    )
    return _row(best, case, figures, found.stapes)


def _formats(runs: Sequence[_Run]) -> list[CaseRow]:
    rows = []
    for run in runs:
        reference, name = runs[0], "contrastive_loss" if "contrastive_loss" in run.train[-1] else "loss"
        losses, expected = ({line["step"]: line[name] for line in each.train} for each in (run, reference))
        both = sorted(losses.keys() & expected.keys())
        if not both or run.cost["steps"] != reference.cost["steps"]:
            raise UsageError(f"{run.folder} and {reference.folder} did not make the same steps")
        apart = [abs(losses[step] / expected[step] - 1) for step in both]
        speeds = {each.folder: _speed(each) for each in (run, reference)}
        case = _case(
            FORMAT,
            run,
            fp8=run.setting("run.fp8", "false") == "true",
            compile=run.setting("run.compile", "false") == "true",
            curve=_thinned([[step, losses[step]] for step in both]),
        )
        figures = {
            "audio_seconds_per_second": speeds[run.folder],
            "loss": losses[both[-1]],
            "first_loss": losses[both[0]],
            "apart": fmean(apart),
            "most_apart": max(apart),
            "times_as_fast": speeds[run.folder] / speeds[reference.folder],
        }
        rows.append(_row(run, case, figures))
    return rows


def _speed(run: _Run) -> float:
    """Seconds of audio a second, once warm."""
    speeds = [line["audio_seconds_per_second"] for line in run.train if "audio_seconds_per_second" in line]
    return median(speeds[round(_WARM_UP * len(speeds)) :])


def _thinned(curve: list[list[float]]) -> list[list[float]]:
    step = -(-len(curve) // _MOST_POINTS)
    return curve if step <= 1 else [*curve[:-1:step], curve[-1]]


def _said(row: CaseRow) -> str:
    """The training's own command."""
    case = row.case
    head = f"{case['part']} {case.get('stage') or case.get('start') or ''}".strip()
    return f"{head}: `{' '.join(case['command'])}`"


def curve_files(result: BenchResult, stem: str) -> dict[str, str]:
    """The SVGs of a result's curves, by file name: losses of pre-training over seconds, errors over steps.

    Needs matplotlib (``stapes[evaluate]``).
    """
    from stapes.evaluation.report_plots import over_time

    files = {}
    lines = []
    before = 0.0
    for row in result.rows:
        if row.case["part"] == STAGE and row.case["curve"]:
            label = f"stage {row.case['stage']}, spans of {row.case['mask']} frames"
            seconds = [before + point[0] for point in row.case["curve"]]
            lines.append((label, seconds, [point[1] for point in row.case["curve"]]))
            before = seconds[-1]
    if lines:
        plot = over_time("loss", "Pre-training", "strict loss on dev", lines)
        files[f"{stem}-loss.svg"] = plot.file
    lines = [
        (
            f"from {row.case['start']}",
            [point[0] for point in row.case["curve"]],
            [100 * y for _, y in row.case["curve"]],
        )
        for row in result.rows
        if row.case["part"] == TUNED and row.case["curve"]
    ]
    if lines:
        files[f"{stem}-cer.svg"] = over_time("cer", "Fine-tuning", "CER on dev, %", lines, along="steps").file
    return files
