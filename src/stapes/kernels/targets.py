"""The GPUs that every kernel is compiled for, and what a kernel's file says about compiling it.

Each file of kernels has ``compile_cases(target)``: its kernels with the tiles that suit that target. RDNA needs smaller
ones than CDNA (256 registers a lane, no accumulation registers), so tiles live beside the kernel, not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch

from stapes.devices.backend import resolve
from stapes.kernels.jit import Kernel

Family = Literal["cdna", "rdna2", "rdna3", "rdna4", "cuda"]


@dataclass(frozen=True)
class Target:
    """A GPU architecture to compile for."""

    name: str
    """``gfx942``, ``sm_90``."""
    family: Family
    wave_size: int
    lds_bytes: int
    """Local data share (AMD) or shared memory (NVIDIA) that one block may use."""
    mach: int
    """What the low byte of the ELF's flags says: LLVM's EF_AMDGPU_MACH_…, or the compute capability of a cubin."""
    matrix: frozenset[str]
    """Dtypes whose ``tl.dot`` is a matrix instruction here: fp32, fp16, bf16, int8, fp8 (OCP), fp8fnuz."""

    @property
    def is_amd(self) -> bool:
        """Whether it is compiled by Triton's AMD backend."""
        return self.family != "cuda"


_CDNA = frozenset({"fp32", "fp16", "bf16", "int8"})
_RDNA3 = frozenset({"fp16", "bf16", "int8"})

# LDS: AMD's table of GPU specifications, CUDA's of compute capabilities. MACH: LLVM's AMDGPUUsage.
# Matrix instructions: what Triton 3.7 really emits.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("gfx90a", "cdna", 64, 65_536, 0x3F, _CDNA),
        Target("gfx942", "cdna", 64, 65_536, 0x4C, _CDNA | {"fp8fnuz"}),
        Target("gfx950", "cdna", 64, 163_840, 0x4F, _CDNA | {"fp8"}),
        Target("gfx1030", "rdna2", 32, 65_536, 0x36, frozenset()),
        Target("gfx1100", "rdna3", 32, 65_536, 0x41, _RDNA3),
        Target("gfx1151", "rdna3", 32, 65_536, 0x4A, _RDNA3),
        Target("gfx1201", "rdna4", 32, 65_536, 0x4E, _RDNA3 | {"fp8"}),
        Target("sm_90", "cuda", 32, 232_448, 90, _RDNA3 | {"tf32", "fp8"}),
    )
}


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the types and constants that it is launched with on a target."""

    name: str
    """Of the kernel, with what sets this case apart but the dtype: ``log_mel 80``."""
    dtype: str
    """What it computes in: fp32, fp16, bf16, int8, fp8, fp8fnuz."""
    kernel: Kernel
    signature: Mapping[str, str] = field(default_factory=dict)
    """Types of the run-time arguments as Triton writes them: ``*fp16``, ``i32``, ``fp32``."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Values of the ``tl.constexpr`` arguments."""
    dot: str | None = None
    """Dtype of its ``tl.dot``, that must become a matrix instruction where the target has one for it."""
    warps: int = 4
    stages: int = 2
    aligned: tuple[str, ...] | None = None
    """Arguments that are multiples of 16, on which Triton specialises. Default: pointers and ``stride…``."""
    skip: str | None = None
    """Why this target does without it (the reference runs there): ``no bf16 arithmetic``. Shown in the table."""


def nearest_target(architecture: str | None) -> Target | None:
    """The target whose tiles suit an architecture: itself, or one of its family; None for what is unknown.

    ``gfx1101`` is built like ``gfx1100``, ``sm_80`` like ``sm_90`` as far as tiles go.
    """
    if architecture is None:
        return None
    name = architecture.partition(":")[0]  # AMD's names carry features: gfx90a:sramecc+:xnack-
    if name in TARGETS:
        return TARGETS[name]
    families = {r"gfx9[0-9a-f]{2}": "gfx90a", r"gfx103\d": "gfx1030", r"gfx11\d\d": "gfx1100", r"gfx12\d\d": "gfx1201"}
    families |= {r"sm_\d+[a-z]?": "sm_90"}
    return next((TARGETS[like] for pattern, like in families.items() if re.fullmatch(pattern, name)), None)


@lru_cache(maxsize=64)
def target_of(device: torch.device) -> Target | None:
    """The target whose tiles suit a GPU; None for the CPU and for an architecture that is unknown."""
    return nearest_target(resolve(str(device)).architecture) if device.type == "cuda" else None
