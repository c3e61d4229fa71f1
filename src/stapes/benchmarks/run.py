"""From a part of the suite to its file of results and its log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stapes
from stapes.benchmarks.anonymous import anonymous, anonymous_command, anonymous_text
from stapes.benchmarks.records import BenchResult, CaseRow, Weights, write_bench
from stapes.benchmarks.rounds import Case, measure_cases
from stapes.devices import machine
from stapes.errors import OutputError


class Run:
    """One run: rows come as they are measured, ``write`` keeps them.

    What is written names no person, no computer and no folder, so that it can be published.
    """

    def __init__(
        self,
        name: str,
        cases: Iterable[Case],
        *,
        rounds: int,
        weights: Weights,
        audio: dict[str, Any],
        command: Sequence[str],
        quick: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._cases, self._rounds, self._say = cases, rounds, log
        self._lines: list[str] = []
        self.result = BenchResult(
            name=name,
            command=anonymous_command(command),
            stapes=stapes.__version__,
            commit=machine.commit(),
            date=_now(),
            purpose="trial" if quick else "measurement",
            machine=machine.facts(),
            load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
            weights=weights,
            audio=audio,
            rows=[],
        )
        self.result.weights.name = anonymous_text(weights.name)
        self.result.audio = anonymous(audio)
        load, cores = self.result.load_average, machine.available_cores()
        if load is not None and load > 0.3 * cores:
            self.result.notes.append(f"the machine was busy: {load:g} processes wanted its {cores} cores at the start")

    def rows(self) -> Iterator[CaseRow]:
        """Measure; each row as soon as it is there."""
        for note in self.result.notes:
            self._log(note)
        for row in measure_cases(self._cases, self._rounds, self._log):
            self.result.rows.append(row)
            yield row

    def write(self, folder: Path) -> Path:
        """Write the result into ``folder``, and the log beside it. Raises OutputError."""
        path = write_bench(folder, self.result)
        log = path.with_suffix(".log")
        try:
            log.write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{log}: cannot be written ({error.strerror}); choose another folder") from error
        return path

    def _log(self, line: str) -> None:
        self._lines.append(f"{_now()} {anonymous_text(line)}")
        self._say(line)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
