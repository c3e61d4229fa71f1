"""A file that is either whole or absent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stapes.errors import OutputError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write into that takes its name only when the block ends well; missing folders are made.

    Raises OutputError: it could not be written (no permission, disk full, a folder is a file).
    """
    target = Path(path)
    # A short name of its own: the target's name may already be as long as the file system allows.
    partial = target.parent / f".stapes-{secrets.token_hex(6)}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("xb") as file:
                yield file
            partial.replace(target)
        except BaseException:  # KeyboardInterrupt too: nothing half-written stays behind
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(
            f"{target}: cannot be written ({error.strerror or error}); free the space, mend the permissions or choose "
            "another folder"
        ) from error
