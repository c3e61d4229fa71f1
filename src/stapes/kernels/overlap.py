"""Kernels that are launched while the one before still runs (programmatic dependent launch; NVIDIA from Hopper on).

A decoder's step is a chain of some three hundred kernels of a few microseconds, of which starting is a good part. A
kernel with ``OVERLAP`` waits for what came before only when it needs it. Elsewhere nothing changes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from stapes.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def follow(OVERLAP: tl.constexpr):
    """First thing in a kernel: wait until all before has been written, and let the next one be launched."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache(maxsize=64)
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may be launched with ``OVERLAP``."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(device: torch.device) -> dict[str, Any]:
    """Options of a launch: the constant of the kernel, and what tells the driver."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}
