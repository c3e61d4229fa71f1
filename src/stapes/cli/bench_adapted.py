"""``stapes bench adapted``: before and after an adaptation, and what was forgotten, as one result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import tell
from stapes.cli.terminal import Terminal

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow

_Folders = Annotated[list[Path] | None, Parameter(negative="")]


def adapted(
    *learnt: Annotated[Path, Parameter(name="EVALUATION")],
    before: _Folders = None,
    kept: _Folders = None,
    drafted: _Folders = None,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    json: bool = False,
) -> int:
    """Make a result of evaluations of what was there before and of what `stapes train` made of it.

    Nothing is measured: accuracy is what the evaluations found, time and memory what the trainings wrote down. Each
    is held against the evaluation before that has its utterances, heard with the same options. Trainings that differ
    in their seed alone, or in the part of a corpus that they did not see, become one row.

    For example:

        stapes evaluate base test.jsonl.gz -o evaluated/before
        stapes evaluate runs/mine/model test.jsonl.gz -o evaluated/after
        stapes bench adapted evaluated/after --before evaluated/before -o results

    Parameters
    ----------
    learnt:
        Folders that `stapes evaluate` wrote: of what was made, on what it was made for.
    before:
        Of what was there before: the model that was fine-tuned, the teacher, or the same network without a teacher.
        This and those below may be repeated.
    kept:
        Of what was made, on what could be done before.
    drafted:
        Of a model of --before, with the student as a draft (`--draft`).
    output_dir:
        Folder for the result.
    json:
        Print the result as one JSON object.
    """
    from stapes.benchmarks.adapted import gather
    from stapes.benchmarks.records import write_bench

    result = gather(before or [], learnt, kept or [], drafted or [], ["stapes", *sys.argv[1:]])
    path = write_bench(output_dir, result)
    tell(result, path, Terminal(), _line, json=json)
    return 0


def _line(row: CaseRow) -> str:
    case, figures = row.case, row.ours.figures
    if case["work"] == "draft":
        faster, differ = row.ratios[0].times_as_fast.median, figures.get("differing_texts") or 0
        return f"{case['before']} with a draft, {case['corpus']}: {faster:.2f} × as fast, {differ:.0f} differ\n"
    shown = {name: f"{100 * (value or 0):.2f}" for name, value in figures.items()}
    rates = (f"{name.upper()} {shown[f'before_{name}']} → {shown[f'after_{name}']} %" for name in ("wer", "cer"))
    return f"{case['recipe']}, {case['corpus']} ({case['work']}): {', '.join(rates)}, {row.ours.options}\n"
