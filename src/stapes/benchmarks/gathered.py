"""What results share that are made of finished evaluations, where nothing is measured any more."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from stapes.benchmarks.anonymous import anonymous, anonymous_command, anonymous_text
from stapes.benchmarks.records import BenchResult, CaseRow, Weights
from stapes.evaluation.results import Result

OF_A_RUN = r" (--set seed=|-o |--output[ =])[^ ]+| --resume\b"
"""What a training's command says of one run, not of its settings."""


def gathered(
    name: str,
    last: Result,
    command: Sequence[str],
    *,
    made: str,
    audio: dict[str, Any],
    rows: list[CaseRow],
    notes: list[str],
) -> BenchResult:
    """A result on the machine of its ``last`` evaluation. made: how its models came to be."""
    return BenchResult(
        name=name,
        command=anonymous_command(command),
        stapes=last.stapes,
        commit=last.commit,
        date=last.date,
        machine=last.machine,
        weights=Weights(name=made, kind="none"),
        audio=anonymous(audio),
        rows=rows,
        notes=notes,
    )


def several(corpora: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What was heard, of the names and digests of corpora."""
    heard = list(corpora)
    names = ", ".join(sorted({name for name, _ in heard}))
    digest = hashlib.sha256("".join(sorted({sha256 for _, sha256 in heard})).encode()).hexdigest()
    return {"corpus": names, "sha256": digest}


def training_command(result: Result, of_a_run: str = OF_A_RUN) -> str:
    """The command that a model was trained by, without what ``of_a_run`` matches; empty where nobody wrote it down."""
    words: Any = (result.model.training_cost or {}).get("command")
    if not isinstance(words, list):
        return ""
    return anonymous_text(re.sub(of_a_run, "", " ".join(anonymous_command(map(str, words)))))


def training_commands(results: Iterable[Result], of_a_run: str = OF_A_RUN) -> list[str]:
    """Each of them once, as a note."""
    said = dict.fromkeys(training_command(result, of_a_run) for result in results)
    return [f"`{each}`" for each in said if each]
