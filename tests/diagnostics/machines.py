"""Machines put together by hand: what probes would have said of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from stapes.devices.backend import Backend, Device, usable_dtypes
from stapes.devices.chips import find_chip
from stapes.devices.kfd import KfdGpu
from stapes.diagnostics.facts import (
    DeviceNode,
    Facts,
    Onnx,
    OnnxProvider,
    Parity,
    PciGpu,
    System,
    ToolOutput,
    Torch,
    TorchDevice,
    Triton,
)

GIB = 1 << 30
PARITY = (Parity("LSTM", True, 3e-7, 0.01), Parity("convolution (log-mel)", True, 2e-7, 0.01))
CPU = TorchDevice("cpu", "cpu", label="CPU", attention="flash", parity=PARITY)
ORT_CPU = OnnxProvider("CPUExecutionProvider", True, ("CPUExecutionProvider",))
ROCM_ARCHITECTURES = (
    *("gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102"),
    *("gfx1150", "gfx1151", "gfx1200", "gfx1201"),
)
LINUX = System(
    os="Ubuntu 24.04.3 LTS",
    kernel="6.18.12-generic",
    python="3.12.3",
    memory_bytes=64 * GIB,
    shared_memory_bytes=32 * GIB,
    cache_free_bytes=200 * GIB,
    user_id=1000,
    groups=(992, 1000),
    amdgpu_loaded=True,
)
CONTAINER = replace(LINUX, container="docker", user_id=0, groups=(0,))


def kfd(architecture: str, node: int = 1, memory: int | None = 24 * GIB) -> KfdGpu:
    return KfdGpu(node, architecture, memory, 127 + node, f"0000:0{node}:00.0", False)


def nodes(refusal: str | None = None, group: str | None = "render", gid: int = 992) -> tuple[DeviceNode, ...]:
    paths = ("/dev/kfd", "/dev/dri/renderD128")
    return tuple(DeviceNode(path, refusal is None, gid, group, "660", refusal) for path in paths)


def gpu(architecture: str, label: str, memory: int = 24 * GIB, kind: Backend = "rocm", **changes: Any) -> TorchDevice:
    """A GPU that passed everything, with the changes asked for."""
    device = Device(torch.device("cuda", 0), kind, label, memory, architecture, find_chip(architecture, label))
    healthy = TorchDevice(
        "cuda:0",
        kind,
        0,
        label,
        architecture,
        memory,
        memory - GIB,
        dict(usable_dtypes(device)),
        "flash",
        {},
        PARITY,
        (True, "8 replays of a captured step are what eager computes"),
    )
    return replace(healthy, **changes)


def rocm_torch(*devices: TorchDevice, **changes: Any) -> Torch:
    found = Torch("2.13.0+rocm7.2", "7.2.26015", None, bool(devices), len(devices), ROCM_ARCHITECTURES, (CPU, *devices))
    return replace(found, **changes)


def cuda_torch(*devices: TorchDevice, **changes: Any) -> Torch:
    found = Torch(
        "2.13.0+cu130",
        None,
        "13.0",
        bool(devices),
        len(devices),
        ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
        (CPU, *devices),
    )
    return replace(found, **changes)


CPU_TORCH = Torch("2.13.0+cpu", devices=(CPU,))


def machine(**changes: Any) -> Facts:
    """A healthy Linux machine without a GPU."""
    healthy = Facts(
        system=LINUX,
        packages={"torch": "2.13.0", "onnxruntime": "1.32.0"},
        torch=CPU_TORCH,
        onnx=Onnx("1.32.0", ("onnxruntime",), (ORT_CPU,)),
        triton=Triton("3.7.1"),
        models=("tiny.en", "base"),
    )
    return replace(healthy, **changes)


def amd(architecture: str, label: str, **changes: Any) -> Facts:
    """A healthy machine with one AMD GPU."""
    healthy = machine(
        pci=(PciGpu("0000:01:00.0", "amd", "0x744c", "amdgpu"),),
        kfd=(kfd(architecture),),
        nodes=nodes(),
        amd_smi=ToolOutput(True, 0, "AMDSMI Tool: 26.2.0 | ROCm version: 7.2.0"),
        torch=rocm_torch(gpu(architecture, label)),
        onnx=Onnx(
            "1.27.1",
            ("onnxruntime-migraphx",),
            (OnnxProvider("MIGraphXExecutionProvider", True, ("MIGraphXExecutionProvider",)), ORT_CPU),
        ),
        triton=Triton("3.7.1", {architecture: None}),
    )
    return replace(healthy, **changes)


def radeon(**changes: Any) -> Facts:
    return amd("gfx1100", "AMD Radeon RX 7900 XTX", **changes)


def nvidia(**changes: Any) -> Facts:
    """A healthy machine with an H200."""
    healthy = machine(
        system=replace(LINUX, amdgpu_loaded=False, nvidia_version="580.95.05"),
        pci=(PciGpu("0000:01:00.0", "nvidia", "0x2335", "nvidia"),),
        nodes=(DeviceNode("/dev/nvidia0", True, 0, "root", "666"),),
        nvidia_smi=ToolOutput(True, 0, "NVIDIA H200, 580.95.05, 143771 MiB"),
        torch=cuda_torch(gpu("sm_90", "NVIDIA H200", 141 * GIB, "cuda")),
        onnx=Onnx(
            "1.32.0",
            ("onnxruntime-gpu",),
            (OnnxProvider("CUDAExecutionProvider", True, ("CUDAExecutionProvider",)), ORT_CPU),
        ),
    )
    return replace(healthy, **changes)


def strix(**changes: Any) -> Facts:
    return amd("gfx1151", "AMD Radeon 8060S Graphics", **changes)


@dataclass(frozen=True)
class Case:
    """A machine, and what must be said of it; patterns are searched for without regard to case."""

    name: str
    facts: Facts
    level: str
    cause: str
    fix: str
