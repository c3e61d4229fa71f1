"""The one place that knows vendors: what devices there are, and what they are called.

PyTorch calls AMD's GPUs ``cuda`` too; ``rocm`` and ``hip`` are accepted here as aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from stapes.devices.chips import Chip, find_chip
from stapes.errors import DeviceError, UsageError
from stapes.options import Precision

Backend = Literal["rocm", "cuda", "cpu"]

_GPU_NAMES = ("cuda", "rocm", "hip")


@dataclass(frozen=True)
class Device:
    """A device to run on.

    ``memory``: bytes in all, None for the CPU. ``architecture``: ``gfx1100``, ``sm_90``, None for the CPU. ``chip``:
    what is known of it, None where that is nothing.
    """

    torch: torch.device
    backend: Backend
    name: str
    memory: int | None
    architecture: str | None = None
    chip: Chip | None = None


def gpu_backend() -> Backend | None:
    """Which kind of GPU this PyTorch was built for and can see; None when there is none."""
    if not torch.cuda.is_available():
        return None
    return "rocm" if torch.version.hip else "cuda"


def resolve(device: str) -> Device:
    """Find the device that ``auto``, ``cpu``, ``cuda``, ``rocm``, ``hip`` or ``cuda:1`` stands for.

    Raises DeviceError when it is not there, UsageError when the name means nothing.
    """
    wanted = device.strip().lower()
    kind, _, index = wanted.partition(":")
    if wanted == "auto":
        kind, index = ("cuda", "") if gpu_backend() else ("cpu", "")
    if kind == "cpu" and not index:
        return Device(torch.device("cpu"), "cpu", "CPU", None)
    if "," in wanted:
        raise UsageError(f"--device is {device!r}: one device at a time; run a process for each GPU")
    if kind not in _GPU_NAMES or (index and not index.isdigit()):
        raise UsageError(f"--device is {device!r}: say auto, cpu, cuda (AMD too; rocm and hip mean the same) or cuda:1")
    backend = gpu_backend()
    if backend is None:
        built = torch.version.hip or torch.version.cuda
        hint = (
            "no GPU answers: check the driver, and for AMD that you may open /dev/kfd (group render)"
            if built
            else "this PyTorch is built for the CPU only: install PyTorch for ROCm or CUDA first, see README"
        )
        raise DeviceError(f"--device {device}: {hint}; or use --device cpu")
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise DeviceError(f"--device {device}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    properties = torch.cuda.get_device_properties(number)
    where = architecture_of(properties, backend)
    chip = find_chip(where, properties.name)
    return Device(torch.device("cuda", number), backend, properties.name, properties.total_memory, where, chip)


def architecture_of(properties: Any, backend: Backend) -> str:
    """``gfx1100`` or ``sm_90``, from PyTorch's properties of a GPU."""
    if backend == "rocm":
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def choose_dtype(precision: Precision, device: Device) -> torch.dtype:
    """The dtype to run in. ``auto`` is fp32 on the CPU and fp16 on a GPU, the dtype Whisper was published in."""
    if precision == "auto":
        return torch.float32 if device.backend == "cpu" else torch.float16
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if precision not in dtypes:
        raise UsageError(f"--precision {precision} is not available for this model yet: use fp32, fp16 or bf16")
    return dtypes[precision]
