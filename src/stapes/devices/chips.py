"""GPUs we know figures of: wave size, shared memory, matrix units, dense peaks, bandwidth. Unknown is unknown.

A chip is found by the architecture that the driver reports and by its full product name: a cut-down sibling (a laptop
part, a MIG slice, an "XT" without its "X") never gets the figures of another. Peaks are the vendors' theoretical
maxima at boost clock, without sparsity; sustained clocks are lower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

AMD_SPECS = "https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
CUDA_GUIDE = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/ (compute capabilities)"


@dataclass(frozen=True)
class Chip:
    """What is known of a GPU.

    ``architecture``: ``gfx942``, ``sm_90``. ``names``: as drivers write it; empty where only the architecture is
    known. ``wave_size``: threads that run in lockstep. ``lds_bytes``: most shared memory of one workgroup.
    ``matrix``: kind of matrix unit. ``peak_tflops``: dense, by ``fp32``, ``fp16``, ``bf16``, ``fp8``, ``int8`` (tera
    operations); what a matrix product can use, so MFMA's fp32 on CDNA; absent is unknown or not there. ``fp8``: the
    8-bit floats that the matrix units read.
    """

    architecture: str
    names: tuple[str, ...]
    wave_size: int
    lds_bytes: int | None
    matrix: Literal["mfma", "wmma", "tensor core"] | None
    peak_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    bandwidth_gb_s: float | None = None
    memory_gb: float | None = None
    fp8: Literal["fnuz", "ocp"] | None = None
    notes: str = ""
    source: str = ""


def _amd(
    names: str,
    wave: int,
    matrix: Literal["mfma", "wmma"] | None,
    *,
    fp8: Literal["fnuz", "ocp"] | None = None,
    lds_kib: int = 64,
    notes: str = "",
) -> dict[str, Chip]:
    return {
        name: Chip(name, (), wave, lds_kib << 10, matrix, fp8=fp8, notes=notes, source=AMD_SPECS)
        for name in names.split()
    }


def _nvidia(name: str, shared_kib: int, *, fp8: bool = False, notes: str = "") -> dict[str, Chip]:
    kind = "ocp" if fp8 else None
    return {name: Chip(name, (), 32, shared_kib << 10, "tensor core", fp8=kind, notes=notes, source=CUDA_GUIDE)}


ARCHITECTURES: Mapping[str, Chip] = MappingProxyType(
    {
        **_amd("gfx900 gfx906", 64, None, notes="no matrix units; no bf16 arithmetic"),
        **_amd("gfx908", 64, "mfma", notes="bf16 at half the rate of fp16"),
        **_amd("gfx90a", 64, "mfma", notes="no fp8"),
        **_amd("gfx942", 64, "mfma", fp8="fnuz", notes="the only AMD architecture with TF32"),
        **_amd("gfx950", 64, "mfma", fp8="ocp", lds_kib=160),
        **_amd("gfx1010 gfx1011 gfx1012", 32, None, notes="no matrix units; no bf16 arithmetic"),
        **_amd(
            "gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036",
            32,
            None,
            notes="no matrix units; no bf16 arithmetic; no fused attention in PyTorch; refused by Triton 3.9",
        ),
        **_amd("gfx1100 gfx1101 gfx1102 gfx1103", 32, "wmma", notes="no fp8"),
        **_amd("gfx1150 gfx1151 gfx1152 gfx1153", 32, "wmma", notes="shares the system's memory; no fp8"),
        **_amd("gfx1200 gfx1201", 32, "wmma", fp8="ocp"),
        **_nvidia("sm_70", 96, notes="no bf16 arithmetic"),
        **_nvidia("sm_75", 64, notes="no bf16 arithmetic"),
        **_nvidia("sm_80", 163),
        **_nvidia("sm_86", 99),
        **_nvidia("sm_87", 163, notes="shares the system's memory"),
        **_nvidia("sm_89", 99, fp8=True),
        **_nvidia("sm_90", 227, fp8=True),
        **_nvidia("sm_100", 227, fp8=True),
        **_nvidia("sm_103", 227, fp8=True),
        **_nvidia("sm_120", 99, fp8=True),
        **_nvidia("sm_121", 99, fp8=True, notes="shares the system's memory"),
    }
)


def _chip(
    architecture: str,
    names: str,
    peaks: str,
    bandwidth: float | None,
    memory: float | None,
    source: str,
    notes: str = "",
) -> Chip:
    known = ARCHITECTURES[architecture]
    tflops = {key: float(value) for key, value in (pair.split("=") for pair in peaks.split())}
    return replace(
        known,
        names=tuple(name.strip() for name in names.split("|")),
        peak_tflops=tflops,
        bandwidth_gb_s=bandwidth,
        memory_gb=memory,
        notes="; ".join(note for note in (notes, known.notes) if note),
        source=f"{source}; {known.source}",
    )


_FP16_SUMS = "fp16 and bf16 with sums in fp32; fp16 with sums in fp16 is twice as fast on GeForce"
_INSTINCT = "AMD Instinct data sheet"
_RADEON = "AMD Radeon product page"
_WMMA = "matrix rates: 512 operations a cycle and unit on RDNA 3"

# fmt: off
CHIPS: tuple[Chip, ...] = (
    _chip("gfx908", "AMD Instinct MI100", "fp32=46.1 fp16=184.6 bf16=92.3 int8=184.6", 1228.8, 32, _INSTINCT),
    _chip("gfx90a", "AMD Instinct MI210", "fp32=45.3 fp16=181 bf16=181 int8=181", 1638.4, 64, _INSTINCT),
    _chip("gfx90a", "AMD Instinct MI250", "fp32=45.3 fp16=181 bf16=181 int8=181", 1638.4, 64, _INSTINCT,
          "one of its two dies: each is a device of its own"),
    _chip("gfx90a", "AMD Instinct MI250X", "fp32=47.9 fp16=191.5 bf16=191.5 int8=191.5", 1638.4, 64, _INSTINCT,
          "one of its two dies: each is a device of its own"),
    _chip("gfx942", "AMD Instinct MI300A", "fp32=122.6 fp16=980.6 bf16=980.6 fp8=1961.2 int8=1961.2", 5300, 128,
          _INSTINCT, "shares its memory with its processor"),
    _chip("gfx942", "AMD Instinct MI300X", "fp32=163.4 fp16=1307.4 bf16=1307.4 fp8=2614.9 int8=2614.9", 5300, 192,
          _INSTINCT),
    _chip("gfx942", "AMD Instinct MI325X", "fp32=163.4 fp16=1307.4 bf16=1307.4 fp8=2614.9 int8=2614.9", 6000, 256,
          _INSTINCT),
    _chip("gfx950", "AMD Instinct MI350X", "fp32=144.2 fp16=2306.9 bf16=2306.9 fp8=4613.7 int8=4613.7", 8000, 288,
          _INSTINCT),
    _chip("gfx950", "AMD Instinct MI355X", "fp32=157.3 fp16=2516.6 bf16=2516.6 fp8=5033.2 int8=5033.2", 8000, 288,
          _INSTINCT),
    _chip("gfx1030", "AMD Radeon RX 6800", "fp32=16.2 fp16=32.3", 512, 16, _RADEON),
    _chip("gfx1030", "AMD Radeon RX 6800 XT", "fp32=20.7 fp16=41.5", 512, 16, _RADEON),
    _chip("gfx1030", "AMD Radeon RX 6900 XT", "fp32=23 fp16=46.1", 512, 16, _RADEON),
    _chip("gfx1100", "AMD Radeon RX 7900 XT", "fp32=51.6 fp16=103.2 bf16=103.2 int8=103.2", 800, 20,
          f"{_RADEON}; {_WMMA}"),
    _chip("gfx1100", "AMD Radeon RX 7900 XTX", "fp32=61.4 fp16=122.8 bf16=122.8 int8=122.8", 960, 24,
          f"{_RADEON}; {_WMMA}"),
    _chip("gfx1100", "AMD Radeon PRO W7900", "fp32=61.3 fp16=122.6 bf16=122.6 int8=122.6", 864, 48,
          f"{_RADEON}; {_WMMA}"),
    _chip("gfx1101", "AMD Radeon RX 7800 XT", "fp32=37.3 fp16=74.6 bf16=74.6 int8=74.6", 624, 16,
          f"{_RADEON}; {_WMMA}"),
    _chip("gfx1151", "AMD Radeon 8060S|AMD Radeon 8060S Graphics", "fp32=29.7 fp16=59.4 bf16=59.4 int8=59.4", 256,
          None, f"computed: 40 units at 2.9 GHz; {_WMMA}; 256-bit LPDDR5X-8000",
          "half of the peak is what users measure (ROCm/TheRock #6530)"),
    _chip("gfx1200", "AMD Radeon RX 9060 XT", "fp32=25.6 fp16=103 bf16=103 fp8=205 int8=205", 320, None, _RADEON),
    _chip("gfx1201", "AMD Radeon RX 9070", "fp32=36.1 fp16=145 bf16=145 fp8=289 int8=289", 640, 16, _RADEON),
    _chip("gfx1201", "AMD Radeon RX 9070 XT", "fp32=48.7 fp16=195 bf16=195 fp8=389 int8=389", 640, 16, _RADEON),
    _chip("gfx1201", "AMD Radeon AI PRO R9700", "fp32=47.8 fp16=191 bf16=191 fp8=383 int8=383", 640, 32, _RADEON),
    _chip("sm_70", "Tesla V100-SXM2-16GB|Tesla V100-SXM2-32GB", "fp32=15.7 fp16=125", 900, None,
          "NVIDIA V100 data sheet"),
    _chip("sm_75", "Tesla T4|NVIDIA T4", "fp32=8.1 fp16=65 int8=130", 320, 16, "NVIDIA T4 data sheet"),
    _chip("sm_80", "NVIDIA A100-SXM4-40GB|NVIDIA A100-PCIE-40GB", "fp32=19.5 fp16=312 bf16=312 int8=624", 1555, 40,
          "NVIDIA A100 data sheet"),
    _chip("sm_80", "NVIDIA A100-SXM4-80GB", "fp32=19.5 fp16=312 bf16=312 int8=624", 2039, 80,
          "NVIDIA A100 data sheet"),
    _chip("sm_80", "NVIDIA A100 80GB PCIe", "fp32=19.5 fp16=312 bf16=312 int8=624", 1935, 80,
          "NVIDIA A100 data sheet"),
    _chip("sm_86", "NVIDIA A10", "fp32=31.2 fp16=125 bf16=125 int8=250", 600, 24, "NVIDIA A10 data sheet"),
    _chip("sm_86", "NVIDIA GeForce RTX 3090", "fp32=35.6 fp16=71 bf16=71 int8=284", 936, 24,
          "NVIDIA GA102 white paper", _FP16_SUMS),
    _chip("sm_89", "NVIDIA L4", "fp32=30.3 fp16=121 bf16=121 fp8=242 int8=242", 300, 24, "NVIDIA L4 data sheet"),
    _chip("sm_89", "NVIDIA L40S", "fp32=91.6 fp16=362 bf16=362 fp8=733 int8=733", 864, 48, "NVIDIA L40S data sheet"),
    _chip("sm_89", "NVIDIA GeForce RTX 4090", "fp32=82.6 fp16=165.2 bf16=165.2 fp8=330.3 int8=660.6", 1008, 24,
          "NVIDIA Ada white paper", _FP16_SUMS),
    _chip("sm_90", "NVIDIA H100 80GB HBM3", "fp32=66.9 fp16=989.4 bf16=989.4 fp8=1978.9 int8=1978.9", 3350, 80,
          "NVIDIA H100 data sheet"),
    _chip("sm_90", "NVIDIA H100 PCIe", "fp32=51.2 fp16=756 bf16=756 fp8=1513 int8=1513", 2039, 80,
          "NVIDIA H100 data sheet"),
    _chip("sm_90", "NVIDIA H100 NVL", "fp32=60 fp16=835 bf16=835 fp8=1671 int8=1671", 3900, 94,
          "NVIDIA H100 data sheet"),
    _chip("sm_90", "NVIDIA H200", "fp32=66.9 fp16=989.4 bf16=989.4 fp8=1978.9 int8=1978.9", 4800, 141,
          "NVIDIA H200 data sheet"),
    _chip("sm_100", "NVIDIA B200", "fp32=75 fp16=2250 bf16=2250 fp8=4500 int8=4500", 8000, 180,
          "NVIDIA DGX B200 data sheet, an eighth"),
    _chip("sm_120", "NVIDIA GeForce RTX 5090", "fp32=104.8 fp16=209.5 bf16=209.5 fp8=419 int8=838", 1792, 32,
          "NVIDIA Blackwell RTX white paper", _FP16_SUMS),
)
# fmt: on


def find_chip(architecture: str, device_name: str) -> Chip | None:
    """What is known of a GPU, from the driver's words for it.

    architecture: ``gfx942`` or ``gfx942:sramecc+:xnack-``, ``sm_90``. A product that is not in the table gets what its
    architecture says alone, without peaks, bandwidth and memory; an architecture that is not gets None.
    """
    architecture = architecture.partition(":")[0]
    wanted = _plain(device_name)
    for chip in CHIPS:
        if chip.architecture == architecture and wanted in {_plain(name) for name in chip.names}:
            return chip
    return ARCHITECTURES.get(architecture)


def _plain(name: str) -> str:
    """Drivers differ in the maker's name before it, in case and in trademark signs."""
    return re.sub(r"^(amd|nvidia) |\((tm|r)\)|™|®", "", " ".join(name.lower().split())).strip()
