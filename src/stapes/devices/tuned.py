"""What ``stapes tune`` found for a GPU, kept in our cache folder and used again without tuning.

A folder for each GPU, architecture and version of PyTorch and of ROCm or CUDA: ``gemms.csv`` is TunableOp's own table,
``tuned.json`` says what was tuned. TunableOp itself refuses a table made with other versions of the BLAS libraries.
What MIOpen found lies in its own database, whose folder ``devices.rocm`` sets.

``STAPES_TUNED=0`` leaves tables unused; ``STAPES_TUNED=FOLDER`` uses the one in a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from stapes.devices.backend import Device
from stapes.errors import OutputError

GEMMS, FACTS = "gemms.csv", "tuned.json"
_SWITCH = "STAPES_TUNED"


def root() -> Path:
    """``stapes/tuned`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stapes" / "tuned"


def versions() -> dict[str, str | None]:
    """Of the libraries whose kernels a table names."""
    return {"torch": torch.__version__, "rocm": torch.version.hip, "cuda": torch.version.cuda}


def folder_for(device: Device) -> Path:
    """Where this GPU's table is kept, for the libraries that are installed now."""
    words = re.findall(r"[a-z0-9]+", f"{device.name} {device.architecture or ''}".lower())
    identity = json.dumps([device.name, device.architecture, versions()], sort_keys=True)
    return root() / f"{'-'.join(words[:8])}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def activate(device: Device) -> Path | None:
    """Let PyTorch take the products that were tuned for this GPU; the table, or None where there is none to use.

    Nothing is tuned here, and nothing changes where the user steers TunableOp by its own variables. A table that does
    not fit or cannot be read is left alone: everything then runs untuned.
    """
    chosen = os.environ.get(_SWITCH, "")
    if device.torch.type != "cuda" or chosen.lower() in ("0", "off", "false", "no"):
        return None
    if any(name.startswith("PYTORCH_TUNABLEOP_") for name in os.environ):
        return None
    table = (Path(chosen) if chosen not in ("", "1") else folder_for(device)) / GEMMS
    if not table.is_file():
        return None
    from torch.cuda import tunable

    try:
        tunable.enable(True)
        tunable.tuning_enable(False)
        # Its own file, which it writes to, is another; ours is only read.
        tunable.set_filename(os.devnull)
        if tunable.read_file(str(table)):
            return table
        tunable.enable(False)
    except (RuntimeError, AttributeError):  # a PyTorch without TunableOp
        return None
    return None


def keep(
    device: Device, results: Iterable[tuple[Any, ...]], validators: Iterable[tuple[Any, ...]], facts: dict[str, Any]
) -> Path:
    """Store a table for this GPU: whole or not at all, in place of an older one. Raises OutputError."""
    folder = folder_for(device)
    partial = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        write_table(partial, results, validators, facts)
        old = folder.with_name(f"{partial.name}-old")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: the tuned table cannot be kept ({error.strerror}); free the space or set XDG_CACHE_HOME"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def write_table(
    folder: Path, results: Iterable[tuple[Any, ...]], validators: Iterable[tuple[Any, ...]], facts: dict[str, Any]
) -> None:
    """A table in TunableOp's format, from what ``torch.cuda.tunable`` gives. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"Validator,{name},{value}" for name, value, *_ in validators]
    lines += [",".join(map(str, row)) for row in results]
    (folder / GEMMS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """What was tuned; nothing where the file is not there or damaged."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
