"""Give freed memory back to the system."""

from __future__ import annotations

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries have none


def trim_heap() -> None:
    """Return the holes that short-lived tensors leave between others; glibc keeps them otherwise."""
    if _malloc_trim is not None:
        _malloc_trim(0)
