"""The folder that an export writes: a new one, or an earlier export that is replaced. Nothing else is ever deleted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from stapes.checkpoints.folders import flush
from stapes.errors import ModelError, OutputError, UsageError
from stapes.text.files import read_json

RECORD = "stapes_files.json"
"""Name → bytes of each file that an export wrote: what else lies there is somebody's own."""


def check_target(folder: Path, source: Path | None = None) -> None:
    """Raises UsageError where ``folder`` may not be written: it holds ``source``, the model, or anything of others."""
    target, here = folder.resolve(), Path.cwd()
    if source is not None and target in (source.resolve(), *source.resolve().parents):
        raise UsageError(f"-o {folder} holds the model itself: choose another folder")
    if target in (here, *here.parents):
        raise UsageError(f"-o {folder} holds the folder that you are in: name a new one, such as -o ./exported")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"-o {folder} is a {'link' if folder.is_symlink() else 'file'}: name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        others = _others(folder)
        if others is None:
            raise UsageError(f"-o {folder} is not empty and no earlier export: name a new folder, or empty this one")
        if others:
            raise UsageError(
                f"-o {folder} is an earlier export, but {', '.join(others[:3])} in it did not come from that: move "
                "such files away, or name a new folder"
            )


@contextmanager
def export_target(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``folder`` when the block has ended and all is on the disk.

    Whatever ends the block before leaves ``folder`` as it was. An earlier export steps aside by a rename, and is
    deleted when the new one is in its place. Raises UsageError as `check_target`, OutputError where the disk is full or
    may not be written to.
    """
    check_target(folder)
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
            made = Path(place) / folder.name
            made.mkdir()
            yield made
            record(made, (path.name for path in made.iterdir()))
            for path in (*made.iterdir(), made):
                path.chmod(0o755 if path.is_dir() else 0o644)
                flush(path)
            check_target(folder)  # again: it took minutes
            earlier = Path(place) / "earlier"
            if folder.exists():
                folder.rename(earlier)
            try:
                made.rename(folder)
            except OSError:
                if earlier.exists():
                    earlier.rename(folder)
                raise
            flush(folder.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{folder}: cannot be written ({reason}); free space or choose another folder") from error
    finally:
        if not folder.exists():
            for parent in missing:
                with suppress(OSError):  # somebody else's file is in it by now
                    parent.rmdir()


def record(folder: Path, names: Iterable[str]) -> None:
    """Add files of an export to its record, those of them that are there."""
    known = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    files = [folder / name for name in sorted({*known, *names} - {RECORD})]
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    (folder / RECORD).write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")


def _others(folder: Path) -> list[str] | None:
    """What in a folder was not written by an export, or changed since; None where no export was."""
    try:
        known = read_json(folder / RECORD)
    except ModelError:
        return None
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name != RECORD
        and (path.is_symlink() or not path.is_file() or known.get(path.name) != path.stat().st_size)
    )
