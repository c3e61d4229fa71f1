"""``stapes bench objectives``: what trainings cost and how well their models hear, as one result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import tell
from stapes.cli.terminal import Terminal

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def objectives(
    *evaluations: Annotated[Path, Parameter(name="EVALUATION")],
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    json: bool = False,
) -> int:
    """Make a result of evaluations of models that `stapes train` made: CTC, attention and hybrid side by side.

    Nothing is measured: accuracy is what the evaluations found, time and memory what the trainings wrote down.
    Trainings that differ in their seed alone become one row, their mean.

    For example:

        stapes evaluate runs/ctc/model test.jsonl.gz -o evaluated/ctc
        stapes bench objectives evaluated/* -o results

    Parameters
    ----------
    evaluations:
        Folders that `stapes evaluate` wrote.
    output_dir:
        Folder for the result.
    json:
        Print the result as one JSON object.
    """
    from stapes.benchmarks.objectives import gather
    from stapes.benchmarks.records import write_bench

    result = gather(evaluations, ["stapes", *sys.argv[1:]])
    path = write_bench(output_dir, result)
    tell(result, path, Terminal(), _line, json=json)
    return 0


def _line(row: CaseRow) -> str:
    case, figures = row.case, row.ours.figures
    start = "nothing" if case.get("init") is None else case["init"]
    rates = (f"{name.upper()} {100 * (figures[name] or 0.0):.2f} %" for name in ("wer", "cer"))
    return f"{case['objective']} from {start}, {case['corpus']}: {', '.join(rates)}, {row.ours.options}\n"
