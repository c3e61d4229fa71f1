"""``stapes models``: what can be loaded and where it is; ``stapes models pull NAME`` brings it here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

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
    *folders: Annotated[Path, Parameter(name="LEARNT… OUT")],
    share: Annotated[tuple[float, ...], Parameter(negative=(), show_default=False)] = (),
    adapter: bool = False,
    model_dir: str | None = None,
    json: bool = False,
) -> int:
    """Write a Whisper with a LoRA adapter merged in, or one between a Whisper and what fine-tuning made of it.

    The result is a model of its own in Hugging Face's layout. What several trainings learnt from the same Whisper is
    averaged, which is often better than each of them.

    Examples:

        stapes models merge base runs/mine/model base-mine
        stapes models merge base runs/mine/model base-mine --share 0.6     # it forgets less of what base can do
        stapes models merge base runs/a/model runs/b/model base-mine --share 0.5 --share 0.3
        stapes models merge base runs/a/model runs/b/model mine --adapter  # one adapter of two
        stapes transcribe talk.mp3 --model ./base-mine

    Parameters
    ----------
    base:
        The model that was trained: name, folder or .pt file.
    folders:
        Adapters that `stapes train whisper_lora` or peft wrote, or models of `stapes train whisper`; then a new or
        empty folder.
    share:
        How far the weights go from BASE to LEARNT, by default all the way; part of the way, less is learnt and less
        forgotten. Choose it on recordings of both kinds. Of several LEARNT: one for each, or one for all, to be
        divided among them.
    adapter:
        Write an adapter of adapters, to be used beside BASE, whose rank is the sum of theirs.
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
    from stapes.checkpoints.low_rank import add_adapters, base_to_say, with_adapter
    from stapes.checkpoints.save import save_huggingface
    from stapes.checkpoints.tokenizer import find_tokenizer

    if len(folders) < 2:
        raise UsageError("say what was learnt and where to write: stapes models merge base runs/mine/model base-mine")
    *learnt, output = folders
    shares = _shares(share, len(learnt))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already: name a new or empty folder")
    found = catalog.find(base, model_dir)
    if found is None:
        raise ModelError(f"There is no model named {base!r} on this machine; {catalog.hint(base)}")
    checkpoint = open_checkpoint(found.path, base, found.parts)
    checkpoint = replace(checkpoint, tokenizer=find_tokenizer(checkpoint, model_dir)[0])
    for each in learnt:
        if not each.exists():
            raise ModelError(f"{each} is not there: name the folder that `stapes train` wrote, such as runs/mine/model")
    pairs = list(zip(learnt, shares, strict=True))
    adapters = [pair for pair in pairs if (pair[0] / ADAPTER_SETTINGS).exists()]
    models = [pair for pair in pairs if pair not in adapters]
    if adapter and models:
        raise UsageError(f"{models[0][0]} is a whole model, of which --adapter can make none")
    if len(pairs) == 1 and models and shares[0] == 1:
        raise UsageError(f"{learnt[0]} is a whole model, which needs no merging: --share 0.5 makes one half-way to it")
    if adapter:
        add_adapters(output, checkpoint, adapters, base=base_to_say(base))
    else:
        if models:
            checkpoint = between(checkpoint, [(open_checkpoint(path), each) for path, each in models])
        for path, each in adapters:
            checkpoint = with_adapter(checkpoint, path, each)
        save_huggingface(checkpoint, output)
    terminal = Terminal()
    terminal.out(to_json({"path": str(output)}) + "\n" if json else f"{display(str(output))}\n")
    return 0


def _shares(given: tuple[float, ...], count: int) -> list[float]:
    """One for each of so many trainings. Raises UsageError where they are not all of the way or less."""
    if len(given) not in (0, 1, count):
        raise UsageError(f"--share is given {len(given)} times for {count} trainings: give one for each, or for all")
    shares = list(given) if len(given) == count else [(given[0] if given else 1.0) / count] * count
    if min(shares) <= 0 or sum(shares) > 1 + 1e-6:
        raise UsageError(f"--share says {', '.join(f'{each:g}' for each in shares)}: above 0, and together at most 1")
    return shares


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
