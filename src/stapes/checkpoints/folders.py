"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from stapes.errors import OutputError


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes ``folder`` when the block has ended and everything is on the disk.

    Whatever ends the block or the process before leaves ``folder`` as it was. Raises OutputError where the disk is
    full or may not be written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_symlink():  # what it points to is not ours
                    continue
                path.chmod(0o755 if path.is_dir() else 0o644)
                flush(path)
            temporary.chmod(0o755)
            flush(temporary)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(temporary, folder)  # noqa: PTH104
            flush(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{folder}: cannot be written ({reason}); free space or choose another folder") from error


def flush(path: Path) -> None:
    """Have the disk hold it: a rename alone survives the end of the process, not that of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
