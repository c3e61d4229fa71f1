"""Give freed memory back to the system, and make do with little of a GPU's."""

from __future__ import annotations

import ctypes
import os

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries have none


def trim_heap() -> None:
    """Return the holes that short-lived tensors leave between others; glibc keeps them otherwise."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def save_gpu_memory() -> None:
    """Settings for a small budget, where the user has made none; before anything is on the GPU.

    The BLAS's workspaces, twice 32 MiB on Hopper and 76 on AMD, become 8; and blocks grow in place rather than leave
    gaps between them, but not on ROCm, where that has hung (pytorch #192259).
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    os.environ.setdefault("HIPBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "4096")
    os.environ.setdefault("HIPBLASLT_WORKSPACE_SIZE", "4096")
    if not torch.version.hip:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
