"""What the measuring commands of ``stapes bench`` share."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stapes.cli.background import Background
from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, to_json
from stapes.errors import StapesError, UsageError

if TYPE_CHECKING:
    from stapes.benchmarks.records import BenchResult, CaseRow
    from stapes.benchmarks.run import Run


def measure(run: Run, folder: Path, terminal: Terminal) -> Path:
    """Run to the end; where it is stopped or fails, the rows that are whole are kept."""

    def rows() -> Generator[CaseRow, None, None]:
        yield from run.rows()

    work = Background(rows)
    try:
        for _ in work:
            pass
    except (KeyboardInterrupt, StapesError) as error:
        work.cancel()
        with shielded():
            if run.result.rows:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
                run.result.notes.append(f"ended early, cases are missing: {why}")
                terminal.note(f"wrote what was measured: {run.write(folder)}")
        raise
    with shielded():
        return run.write(folder)


def tell(result: BenchResult, path: Path, terminal: Terminal, line: Callable[[CaseRow], str], *, json: bool) -> None:
    """Print what was measured: the whole result as JSON, or ``line`` of each row and where the result is."""
    if json:
        terminal.out(to_json(asdict(result)) + "\n")
    else:
        terminal.out("".join(map(line, result.rows)) + f"wrote {path}\n")


def percent(share: float | None) -> str:
    """A share as people read it."""
    return "unknown" if share is None else f"{100 * share:.1f} %"


def listed(option: str, text: str) -> list[str]:
    """Words between commas. Raises UsageError for none, and for one said twice."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise UsageError(f"{option} is {text!r}: give one or more values separated by commas, each once")
    return words
