"""Files: written whole or not at all, read with errors that say what to do."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from stapes.errors import ModelError, OutputError


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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model. Raises ModelError when it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: this folder is no model, or it was only partly downloaded") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the model again")
    return value
