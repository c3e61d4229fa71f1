"""``stapes bench pretraining``: what pre-training gains, as one result with its curves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import tell
from stapes.cli.terminal import Terminal
from stapes.errors import OutputError

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def pretraining(
    *,
    stage: tuple[Path, ...] = (),
    pretrained: Path | None = None,
    scratch: Path | None = None,
    test: tuple[Path, ...] = (),
    numbers: tuple[Path, ...] = (),
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    json: bool = False,
) -> int:
    """Make a result of finished trainings: pre-training, fine-tuning after it and from nothing, number formats.

    Nothing is measured. Both searches must have tried the same learning rates in the same steps; the model with the
    lowest character error rate on dev is the one whose evaluation counts. The curves are written beside the result.

    For example:

        stapes evaluate runs/pretrained/6e-4/model test.jsonl.gz -o tests/pretrained
        stapes evaluate runs/scratch/6e-4/model test.jsonl.gz -o tests/scratch
        stapes bench pretraining --stage runs/easy --stage runs/long --pretrained runs/pretrained \\
            --scratch runs/scratch --test tests/pretrained --test tests/scratch

    Parameters
    ----------
    stage:
        Folder of `stapes train pretrain`; again for one that went on from its weights.
    pretrained:
        Folder with a folder of `stapes train wav2vec2` for each learning rate, from what was pre-trained.
    scratch:
        The same from nothing.
    test:
        Folder that `stapes evaluate` wrote for the best of one of them; again for the other.
    numbers:
        Folder of a training that differs from others in the format of its products (run.fp8) alone; again for each, the
        one to compare with first.
    output_dir:
        Folder for the result and its curves.
    json:
        Print the result as one JSON object.
    """
    from stapes.benchmarks.pretraining import curve_files, gather
    from stapes.benchmarks.records import write_bench

    result = gather(stage, pretrained, scratch, test, numbers, ["stapes", *sys.argv[1:]])
    curves = curve_files(result, "")  # first: where matplotlib is missing nothing is written
    path = write_bench(output_dir, result)
    for name, text in curves.items():
        file = output_dir / f"{path.stem}{name}"
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{file}: cannot be written ({error.strerror})") from error
    tell(result, path, Terminal(), _line, json=json)
    return 0


def _line(row: CaseRow) -> str:
    """Of what was fine-tuned; the rest is in the result."""
    if row.case["part"] != "fine-tuning":
        return ""
    rates = (f"{name.upper()} {100 * (row.ours.figures[name] or 0.0):.2f} %" for name in ("cer", "wer"))
    return f"from {row.case['start']}, learning rate {row.case['rate']:g}: {', '.join(rates)}\n"
