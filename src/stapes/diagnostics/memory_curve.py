"""Memory over time, sampled in a thread; steps grow, so that a long run takes no more room than a short one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MOST = 1200
_STEP = 0.02


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes at one moment, ``seconds`` after the start. The GPU's are None until a process uses it.

    ``allocated``: in tensors; ``reserved``: by PyTorch's allocator; both on all GPUs. ``allocations`` and ``segments``
    count since the process began: blocks given out, and calls of the driver for them. The driver itself is never asked:
    it would answer late, and not at all while a graph is captured.
    """

    seconds: float
    resident: int | None
    allocated: int | None = None
    reserved: int | None = None
    allocations: int | None = None
    segments: int | None = None


class MemoryCurve:
    """Samples from ``start`` to ``stop``; at most ``most`` of them, evenly spread."""

    def __init__(self, step: float = _STEP, most: int = _MOST) -> None:
        self.samples: list[MemorySample] = []
        self._step, self._most = step, max(8, most)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stapes-memory-curve", daemon=True)
        self._begun = time.monotonic()

    def start(self) -> None:
        """Begin."""
        self._begun = time.monotonic()
        self._thread.start()

    def stop(self) -> list[MemorySample]:
        """End, with one sample more."""
        self._over.set()
        self._thread.join(2)
        self._take()
        return self.samples

    def _run(self) -> None:
        while not self._over.wait(self._step):
            self._take()

    def _take(self) -> None:
        gpu = _gpu_memory()
        self.samples.append(MemorySample(time.monotonic() - self._begun, resident_bytes(), **gpu))
        if len(self.samples) > self._most:
            del self.samples[1::2]
            self._step *= 2


def resident_bytes() -> int | None:
    """Memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * 4096


def _gpu_memory() -> dict[str, Any]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    names = {
        "allocated": "allocated_bytes.all.current",
        "reserved": "reserved_bytes.all.current",
        "allocations": "allocation.all.allocated",
        "segments": "segment.all.allocated",
    }
    try:
        stats = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    except RuntimeError:  # the device is lost
        return {}
    return {name: sum(each.get(key, 0) for each in stats) for name, key in names.items()}
