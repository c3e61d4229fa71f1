"""What a model's folder holds, found out without PyTorch: the server's web process looks for models too."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stapes.errors import ModelError
from stapes.text.files import read_json

ADAPTER_SETTINGS = "adapter_config.json"


def weight_files(folder: Path, stem: str = "model", suffix: str = ".safetensors") -> list[Path]:
    """The weights in ``folder``: one file, or the shards that an index names; none where there are neither.

    Raises ModelError for an index that is broken or names files that are missing or elsewhere.
    """
    single = folder / f"{stem}{suffix}"
    if single.exists():
        return [single]
    index = folder / f"{stem}{suffix}.index.json"
    if not index.exists():
        return []
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ModelError(f"{index} has no 'weight_map'; fetch the model again")
    files = [folder / file for file in sorted(set(places.values()))]
    for file in files:
        if file.resolve().parent != folder.resolve() and not file.is_symlink():
            raise ModelError(f"{index} points outside its folder; fetch the model again")
        if not file.exists():
            raise ModelError(f"{file} is missing; fetch the model again")
    return files


def has_weights(folder: Path) -> bool:
    """Whether all the weights are in ``folder``."""
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / ADAPTER_SETTINGS).is_file() and not (folder / "config.json").is_file()


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
