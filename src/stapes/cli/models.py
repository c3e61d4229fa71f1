"""``stapes models``: what can be loaded and where it is; ``stapes models pull NAME`` brings it here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from stapes.cli.terminal import Terminal, display, to_json

if TYPE_CHECKING:
    from stapes.checkpoints.catalog import ModelEntry

app = App(name="models", help_format="markdown")


@app.default
def list_models(*, model_dir: str | None = None, json: bool = False) -> int:
    """List the models that can be loaded: size, languages, where each is or would come from.

    Examples:

        stapes models
        stapes models pull base

    Parameters
    ----------
    model_dir:
        Folder where models are looked for and downloaded to.
    json:
        Print the list as JSON.
    """
    from stapes.checkpoints import catalog

    entries = catalog.list_models(model_dir=model_dir)
    terminal = Terminal()
    if json:
        terminal.out(to_json({"models": [asdict(entry) for entry in entries]}) + "\n")
    else:
        terminal.out(_table(entries, terminal.out_is_terminal))
    return 0


@app.command
def pull(
    name: Annotated[str, Parameter(name="NAME")],
    /,
    *,
    model_dir: str | None = None,
    offline: bool = False,
    json: bool = False,
) -> int:
    """Download a model, going on where an earlier try ended, and check it.

    Example:

        stapes models pull base

    Parameters
    ----------
    name:
        A name that `stapes models` lists, or a Hugging Face id.
    model_dir:
        Folder where models are looked for and downloaded to.
    offline:
        Never download: only say where the model is.
    json:
        Print the name and the path as JSON.
    """
    from stapes.checkpoints import catalog

    terminal = Terminal()
    try:
        with terminal.progress("bytes", f"looking for {display(name)} …") as progress:
            path = catalog.pull(name, model_dir=model_dir, progress=progress, offline=offline)
    finally:
        terminal.end_progress()
    terminal.out(to_json({"name": name, "path": str(path)}) + "\n" if json else f"{display(str(path))}\n")
    return 0


def _table(entries: list[ModelEntry], fit_terminal: bool) -> str:
    """A table as wide as the terminal; in a pipe, wide enough that nothing wraps."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "params", "size", "languages", "where, or Hugging Face id"):
        right = heading in ("params", "size")
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=heading == "model")
    for entry in entries:
        languages = "English" if not entry.multilingual and entry.languages <= 1 else str(entry.languages or "?")
        where = (
            f"here: {entry.location}"
            if entry.location
            else ", ".join(source.removeprefix("Hugging Face: ") for source in entry.sources)
        )
        cells = [
            entry.name,
            f"{entry.parameters / 1e6:.0f} M" if entry.parameters else "?",
            f"{entry.size_bytes / 1e6:.0f} MB" if entry.size_bytes else "?",
            languages,
            f"{where} ({entry.note})" if entry.note else where,
        ]
        table.add_row(*(Text(display(cell), style="green" if entry.location else "") for cell in cells))
    buffer = StringIO()
    console = Console(
        file=buffer, force_terminal=fit_terminal, width=Console().width if fit_terminal else 1000, highlight=False
    )
    console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
