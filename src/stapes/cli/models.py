"""``stapes models``: what can be loaded and where it is; ``stapes models pull NAME`` brings it here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from stapes.cli.terminal import Terminal, display, to_json
from stapes.errors import ModelError, UsageError

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


@app.command
def merge(
    base: Annotated[str, Parameter(name="BASE")],
    learnt: Annotated[Path, Parameter(name="LEARNT")],
    output: Annotated[Path, Parameter(name="OUT")],
    /,
    *,
    share: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 1.0,
    model_dir: str | None = None,
    json: bool = False,
) -> int:
    """Write a Whisper with a LoRA adapter merged in, or one between a Whisper and what fine-tuning made of it.

    The result is a model of its own in Hugging Face's layout.

    Examples:

        stapes models merge base runs/mine/model base-mine
        stapes models merge base runs/mine/model base-mine --share 0.6     # it forgets less of what base can do
        stapes transcribe talk.mp3 --model ./base-mine

    Parameters
    ----------
    base:
        The model that was trained: name, folder or .pt file.
    learnt:
        An adapter that `stapes train whisper_lora` or peft wrote, or a model of `stapes train whisper`.
    output:
        A new or empty folder.
    share:
        How far the weights go from BASE to LEARNT; part of the way, less is learnt and less forgotten. Choose it on
        recordings of both kinds.
    model_dir:
        Folder where models are looked for.
    json:
        Print the path as JSON.
    """
    from dataclasses import replace

    from stapes.checkpoints import catalog
    from stapes.checkpoints.between import between
    from stapes.checkpoints.files import ADAPTER_SETTINGS
    from stapes.checkpoints.load import open_checkpoint
    from stapes.checkpoints.low_rank import with_adapter
    from stapes.checkpoints.save import save_huggingface
    from stapes.checkpoints.tokenizer import find_tokenizer

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already: name a new or empty folder")
    found = catalog.find(base, model_dir)
    if found is None:
        raise ModelError(f"There is no model named {base!r} on this machine; {catalog.hint(base)}")
    checkpoint = open_checkpoint(found.path, base, found.parts)
    checkpoint = replace(checkpoint, tokenizer=find_tokenizer(checkpoint, model_dir)[0])
    if (learnt / ADAPTER_SETTINGS).exists():
        made = with_adapter(checkpoint, learnt, share)
    elif learnt.exists() and share < 1.0:
        made = between(checkpoint, open_checkpoint(learnt), share)
    elif learnt.exists():
        raise UsageError(f"{learnt} is a whole model, which needs no merging: --share 0.5 makes one half-way to it")
    else:
        raise ModelError(f"{learnt} is not there: name the folder that `stapes train` wrote, such as runs/mine/model")
    save_huggingface(made, output)
    terminal = Terminal()
    terminal.out(to_json({"path": str(output)}) + "\n" if json else f"{display(str(output))}\n")
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
