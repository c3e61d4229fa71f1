"""Open a model on several devices: its engines are in processes of their own, all else is here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stapes.checkpoints.catalog import Location
from stapes.checkpoints.huggingface import open_huggingface
from stapes.checkpoints.load import model_type, open_checkpoint
from stapes.checkpoints.onnx_folder import is_onnx, read_onnx_folder
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.devices.backend import Device, resolve
from stapes.errors import UsageError
from stapes.inference.ctc_open import CTC_KINDS
from stapes.inference.engine import Engine
from stapes.inference.family import Family
from stapes.inference.pool import PoolCTCEngine, PoolEngine
from stapes.inference.pool_ctc import open_far_ctc
from stapes.inference.whisper_family import WhisperFamily


def several(device: str) -> tuple[str, ...]:
    """The devices that ``cuda:0,cuda:1`` or ``cpu,cpu`` names, where it is more than one; none otherwise."""
    names = tuple(name.strip() for name in device.split(","))
    if len(names) == 1:
        return ()
    if not all(names):
        raise UsageError(f"--device is {device!r}: one name is empty; say such as cuda:0,cuda:1")
    return names


def threads_of_each(names: Sequence[str], threads: int | None) -> int | None:
    """CPU threads of each process: so many in all, or the cores, in equal parts for those on the CPU."""
    on_cpu = sum(name.lower() == "cpu" for name in names)
    if not on_cpu:
        return threads
    cores = threads or len(os.sched_getaffinity(0))
    return max(1, cores // on_cpu)


def open_pool(
    name: str,
    location: Location,
    openers: Sequence[tuple[str, Callable[[], Engine]]],
    model_dir: str | Path | None = None,
    language: str | None = None,
) -> tuple[Family, Device, Callable[[], None]]:
    """The family of a model whose engines ``openers`` make; what to call its devices; and what ends its processes.

    language: which of its adapters the openers load. Raises UsageError and ModelError for a model that cannot be
    opened so, DeviceError, and what the openers raise.
    """
    where = [resolve(device) for device, _ in openers]
    path = location.path
    if is_onnx(path):
        folder = read_onnx_folder(path)
        kind = folder.kind
    else:
        folder, kind = None, model_type(path)
    engine: PoolEngine
    if kind is not None and kind in CTC_KINDS:
        engine = PoolCTCEngine(openers)
        try:
            family: Family = open_far_ctc(name, path, kind, folder, engine, language)
        except BaseException:
            engine.close()
            raise
    else:
        if folder is None:
            checkpoint = open_checkpoint(path, name, location.parts)
        else:
            checkpoint = open_huggingface(path, name, has_weights=False)
            checkpoint = replace(checkpoint, alignment_heads=folder.alignment_heads)
        tokenizer = open_tokenizer(checkpoint, model_dir)
        engine = PoolEngine(openers)
        family = WhisperFamily(name, checkpoint, tokenizer, engine)  # type: ignore[arg-type]
    names = [device.name for device in where]
    label = f"{len(names)} × {names[0]}" if len(set(names)) == 1 else ", ".join(names)
    # Tensors of this process are on the CPU: what it gets from the others, and what it makes of that.
    device = replace(where[0], name=label, torch=resolve("cpu").torch)
    return family, device, engine.close
