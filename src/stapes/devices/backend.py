"""The one place that knows vendors: what devices there are, and what they are called.

PyTorch calls AMD's GPUs ``cuda`` too; ``rocm`` and ``hip`` are accepted here as aliases.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stapes.devices import rocm
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
    rocm.apply_defaults()  # here, because no GPU is touched before it has been resolved
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


def computes_in_bf16() -> bool:
    """Whether this CPU has units for bf16 (AVX-512 BF16 or AMX): others convert every value to fp32 and back."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_dtype(precision: Precision, device: Device) -> torch.dtype:
    """The dtype of activations, and of weights that are not quantised.

    ``auto`` is fp32 on the CPU and fp16 on a GPU, the dtype Whisper was published in. Raises UsageError for what the
    device cannot do.
    """
    if precision == "auto":
        return torch.float32 if device.backend == "cpu" else torch.float16
    plain = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if precision in plain:
        return plain[precision]
    if device.backend == "cpu":
        if precision == "int8" and computes_in_bf16():
            return torch.bfloat16
        other = " here, or a folder that `stapes quantize` made" if precision == "int8" else ""
        needs = "a GPU, or a CPU with bf16 units" if precision == "int8" else "a GPU"
        raise UsageError(f"--precision {precision} needs {needs}: use fp32{other}")
    if precision == "fp8":
        fp8_dtype(device)
        return torch.bfloat16
    return torch.float16


def fp8_dtype(device: Device) -> torch.dtype:
    """The 8-bit floats that a GPU multiplies. Raises UsageError where it does not."""
    use, reason = usable_dtypes(device)["fp8"]
    if use != "native" or device.chip is None:
        raise UsageError(f"--precision fp8: {reason}; use --precision fp16")
    return torch.float8_e4m3fnuz if device.chip.fp8 == "fnuz" else torch.float8_e4m3fn


Use = Literal["native", "slow", "no"]


def usable_dtypes(device: Device) -> dict[str, tuple[Use, str]]:
    """For fp32, fp16, bf16 and fp8, whether the device computes in it, and why not or how.

    ``slow``: it works, in another dtype underneath or without matrix units. What a chip of an unknown architecture can
    do beyond fp32 and fp16 is ``no``: nobody has said that it can.
    """
    if device.backend == "cpu":
        return {
            "fp32": ("native", ""),
            "fp16": ("slow", "most CPUs convert every value to fp32 and back"),
            "bf16": ("slow", "only CPUs with AMX or AVX-512 BF16 gain from it"),
            "fp8": ("no", "no CPU computes in fp8"),
        }
    architecture, chip = device.architecture or "", device.chip
    bf16: tuple[Use, str] = ("native", "")
    if chip is None:
        bf16 = ("no", f"nothing is known of {architecture}")
    elif "no bf16 arithmetic" in chip.notes:
        bf16 = ("slow", f"{architecture} has no bf16 arithmetic: use fp16")
    kind = chip.fp8 if chip else None
    fp8: tuple[Use, str] = ("no", f"{architecture} has no fp8 matrix units")
    if kind is not None:
        fp8 = ("native", {"fnuz": "float8_e4m3fnuz, not OCP's", "ocp": "float8_e4m3fn (OCP)"}[kind])
    slow = chip is not None and chip.matrix is None
    fp16: tuple[Use, str] = ("native", "without matrix units: at most twice fp32's speed" if slow else "")
    return {"fp32": ("native", ""), "fp16": fp16, "bf16": bf16, "fp8": fp8}


@dataclass(frozen=True)
class AttentionKernels:
    """``chosen``: what scaled_dot_product_attention takes by itself. ``refused``: kernel → the reason it gave."""

    chosen: str
    usable: tuple[str, ...]
    refused: dict[str, str]


_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@torch.inference_mode()
def attention_kernels(
    device: torch.device, dtype: torch.dtype = torch.float16, shape: Sequence[int] = (1, 8, 256, 64)
) -> AttentionKernels:
    """Find out which attention kernels really run, by running each, and which one PyTorch takes unasked.

    shape: (batch, heads, positions, head width). ``math`` holds all scores in memory: many times slower for the 1500
    positions of a window (11.8 times at 4096, unsloth #8821). On ROCm some architectures have the others only behind
    TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL.
    """
    query = torch.ones(tuple(shape), device=device, dtype=dtype)
    usable, refused = [], {}
    for name, kernel in _KERNELS.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # PyTorch warns of the reasons, then raises that no kernel is left
            try:
                with sdpa_kernel(kernel):
                    F.scaled_dot_product_attention(query, query, query).sum().item()
                usable.append(name)
            except Exception as error:  # a kernel that cannot run has been asked, that is all
                reasons = [str(warning.message).partition(" (Triggered")[0] for warning in said]
                refused[name] = reasons[-1] if reasons else rocm.one_line(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        choice = torch.ops.aten._fused_sdp_choice(query, query, query)
    chosen = {kernel.value: name for name, kernel in _KERNELS.items()}.get(int(choice), "math")
    return AttentionKernels(chosen, tuple(usable), refused)
