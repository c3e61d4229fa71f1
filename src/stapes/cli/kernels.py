"""``stapes kernels compile``: every Triton kernel for every GPU target, on a machine that may have no GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from stapes.cli.terminal import Terminal, display, to_json
from stapes.errors import OutputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stapes.kernels.compile import Outcome

app = App(
    name="kernels",
    help_format="markdown",
    help="The GPU kernels of the project.\n\nExample: stapes kernels compile --targets gfx1100",
)


@app.command(name="compile")
def compile_kernels(
    *,
    targets: str = "",
    kernels: str = "",
    table: Path | None = None,
    record: Path | None = None,
    cache: bool = True,
    workers: int | None = None,
    json: bool = False,
) -> int:
    """Compile every kernel for every GPU target and check the code; no GPU is needed.

    Checked: the ELF file and the machine in its flags, matrix instructions where the chip has them and the kernel
    wants them, local memory, and that no register is spilled. What is unchanged since it passed is not compiled
    again. Exit code 1 when a kernel fails.

    Examples:

        stapes kernels compile
        stapes kernels compile --targets gfx942,gfx1100 --kernels log_mel
        stapes kernels compile --no-cache --table KERNELS.md

    Parameters
    ----------
    targets:
        Architectures separated by commas, such as gfx942,sm_90. Default: all.
    kernels:
        Parts of kernels' names separated by commas. Default: all.
    table:
        Write the table to this Markdown file, which keeps a section for each version of Triton.
    record:
        File that names what passed, kept with the source: a machine with an empty cache compiles only what changed
        since. What passes now is written into it.
    cache:
        Count what passed before; --no-cache compiles everything.
    workers:
        Kernels compiled at a time. Default: one for each core.
    json:
        Print the outcomes as JSON.
    """
    if workers is not None and not 1 <= workers <= 256:
        raise UsageError(f"--workers is {workers}: give 1 to 256")
    from stapes.kernels.compile import compile_all, triton_version
    from stapes.kernels.table import totals, update_page

    terminal = Terminal()

    def report(outcome: Outcome) -> None:
        name = f"{outcome.kernel} {outcome.dtype} for {outcome.target}"
        if outcome.problems:
            terminal.failure(f"{name}: {'; '.join(outcome.problems)}")
        elif outcome.seconds >= 5 and terminal.interactive:
            terminal.note(f"{name}: {outcome.seconds:.0f} s")

    version = triton_version()
    outcomes = compile_all(
        _listed(targets), _listed(kernels), workers=workers, use_cache=cache, record=record, report=report
    )
    if table is not None:
        _write(table, lambda page: update_page(page, version, outcomes))
    failed = any(outcome.problems for outcome in outcomes)
    if json:
        terminal.out(to_json({"triton": version, "outcomes": [asdict(outcome) for outcome in outcomes]}) + "\n")
    else:
        terminal.out(_table(outcomes, terminal.out_is_terminal))
        terminal.out(f"Triton {version}: {totals(outcomes)}\n")
    return 1 if failed else 0


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _write(path: Path, update: Callable[[str], str]) -> None:
    try:
        page = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(update(page), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the table cannot be written ({error}); choose another file") from error


def _table(outcomes: Sequence[Outcome], fit_terminal: bool) -> str:
    """A table as wide as the terminal; in a pipe, wide enough that nothing wraps."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from stapes.kernels.table import HEADINGS, cells

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        right = heading in ("registers", "spills", "LDS")
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=heading == "target")
    for outcome in outcomes:
        style = "red" if outcome.problems else "dim" if outcome.skipped else ""
        table.add_row(*(Text(display(cell), style=style) for cell in cells(outcome)))
    buffer = StringIO()
    console = Console(
        file=buffer, force_terminal=fit_terminal, width=Console().width if fit_terminal else 1000, highlight=False
    )
    console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
