"""The model of a job: where it is, and which one it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from stapes.bulk.spec import Spec
from stapes.checkpoints.catalog import Location, find, hint, is_offline, pull, repository_of
from stapes.errors import ModelError
from stapes.progress import Progress


def open_spec(model: str, settings: dict[str, Any], progress: Progress, **rest: Any) -> Spec:
    """The spec of a job with this model, which is brought here where it has to be. Raises ModelError."""
    return Spec(model=model, settings=settings, revision=revision(locate(model, settings, progress)), **rest)


def locate(name: str, settings: dict[str, Any], progress: Progress) -> Location:
    """Where a model is on this machine; it is downloaded where that is allowed and needed. Raises ModelError."""
    found = find(name, settings.get("model_dir"))
    if found is not None:
        return found
    if repository_of(name) is None:
        raise ModelError(f"There is no model named {name!r} and no such file; {hint(name)}")
    if not is_offline(settings.get("offline", False)):
        progress.note(f"{name} is not on this machine: downloading it")
    return Location(pull(name, settings.get("model_dir"), progress, settings.get("offline", False)))


def revision(location: Location) -> str:
    """16 hexadecimal digits of the SHA-256 of a model's files and their names: the same wherever the files lie.

    Raises ModelError where one cannot be read.
    """
    folder = location.path
    files = sorted(each for each in folder.rglob("*") if each.is_file()) if folder.is_dir() else [folder]
    files = [each for each in files if not _is_beside(each, folder)]
    total = hashlib.sha256()
    try:
        for file in [*files, *(part for part in location.parts or [] if part not in files)]:
            with file.open("rb") as content:
                total.update(file.name.encode("utf-8", "surrogateescape"))
                total.update(hashlib.file_digest(content, "sha256").digest())
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read ({error.strerror}): fetch the model again") from None
    return total.hexdigest()[:16]


def _is_beside(file: Path, folder: Path) -> bool:
    """What is no part of the model: hidden files, and what Python and training leave in its folder."""
    inside = file.relative_to(folder).parts if file != folder else ()
    return any(part.startswith(".") or part in ("__pycache__", "checkpoints") for part in inside)
