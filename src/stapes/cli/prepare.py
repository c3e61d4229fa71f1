"""``stapes prepare``: from a corpus on disk to checked manifests for training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, display, to_json
from stapes.data.options import PrepareOptions

_OPTIONS = PrepareOptions()


def prepare(
    corpus: Annotated[
        str, Parameter(help="librispeech, commonvoice, tedlium, folder, jsonl, csv, or a recipe of lhotse.")
    ],
    source: Annotated[Path, Parameter(help="The folder, or for jsonl and csv the file, that the corpus is in.")],
    out: Annotated[Path, Parameter(help="Folder for SPLIT.jsonl.gz, report.md and report.json.")],
    /,
    *,
    options: Annotated[PrepareOptions, Parameter(name="*")] = _OPTIONS,
    json: bool = False,
) -> int:
    """Check a corpus and write its manifests: lhotse's cuts, a file a split, and a report of what was left out and why.

    The same command goes on after an interruption, and measures only what is new. A recording that is broken stops
    nothing.

    For example:

        stapes prepare folder recordings/ data/mine --split train=0.9,dev=0.1
        stapes prepare librispeech LibriSpeech/ data/librispeech
        stapes prepare commonvoice cv-corpus/tr data/tr --convert flac --max-seconds 20
        stapes prepare jsonl yesno/manifest.jsonl data/yesno --split train=0_*,test=1_*

    Exit code: 0 all done, also where utterances were left out; 1 where some could not be read or the corpus's own lists
    are damaged, each named in report.md, and where nothing at all was kept; 2 wrong usage; 130 interrupted.

    Parameters
    ----------
    json:
        Print report.json.
    """
    # Imported here: `stapes --help` needs none of it.
    from stapes.data.checks import UNREADABLE
    from stapes.data.prepare import prepare as run

    terminal = Terminal()
    with terminal.progress("seconds", "reading the corpus …") as progress:
        report = run(corpus, source, out, options, progress=progress, command=shlex.join(["stapes", *sys.argv[1:]]))
    rejected = report["rejected"]
    for each in rejected["utterances"]:
        if each["code"] in UNREADABLE:
            terminal.failure(each["reason"], each["audio"])
    terminal.out(to_json(report) + "\n" if json else _summary(report, out))
    if not report["splits"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in rejected["by_reason"].items())
        first = rejected["utterances"][0]
        terminal.failure(f"no utterance was kept ({reasons}): the first is {first['id']}, {first['reason']}")
        return 1
    return 1 if rejected["unreadable"] else 0


def _summary(report: dict[str, Any], out: Path) -> str:
    lines = [
        f"{name}: {split['utterances']:,} utterances, {split['hours']:.2f} h"
        + (f", {split['speakers']:,} speakers" if split["speakers"] else "")
        for name, split in report["splits"].items()
    ]
    rejected = report["rejected"]
    if rejected["count"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in rejected["by_reason"].items())
        lines.append(f"left out: {rejected['count']:,} ({reasons})")
    lines += report["notes"]
    return "".join(f"{display(line)}\n" for line in [*lines, f"wrote {out / 'report.md'}"])
