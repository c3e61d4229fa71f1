"""What a GPU tells of itself at one moment, whichever source told it; and how its numbers are read.

Drivers answer with sentinels where they know nothing (``N/A``, 65535, 2³²−1), and tools change their JSON between
versions; so every number goes through ``number``, which gives None for all that cannot be true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program that has memory on a GPU."""

    pid: int
    name: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment. None is unknown: the source does not tell, or what it told cannot be true.

    ``index``: as the source counts, from 0; PyTorch may count otherwise (``CUDA_VISIBLE_DEVICES``), so ``id`` is what
    to match by: ``GPU-<uuid>`` on NVIDIA, the PCI address ``0000:0c:00.0`` on AMD. ``processes`` is None where they
    may not be seen.
    """

    index: int
    name: str | None
    source: str
    """``amdsmi``, ``amd-smi``, ``sysfs``, ``rocm-smi``, ``nvml`` or ``torch``."""
    id: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    """Fraction of the last moment in which some kernel ran, 0 to 1."""
    power_watts: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was told but that there is a GPU."""
        known = (self.memory_used_bytes, self.utilisation, self.power_watts, self.temperature_c, self.clock_mhz)
        return all(value is None for value in known)


_UNITS = {"b": 1, "kb": 1 << 10, "kib": 1 << 10, "mb": 1 << 20, "mib": 1 << 20, "gb": 1 << 30, "gib": 1 << 30}
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def number(value: Any, low: float = 0.0, high: float = math.inf) -> float | None:
    """The number in ``12``, ``"12.5 W"``, ``"(800Mhz)"`` or ``{"value": 12, "unit": "W"}``; None outside the bounds."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, str):
        found = _NUMBER.search(value)
        value = float(found[0]) if found else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) if low <= value <= high else None


def size(value: Any, unit: str = "b") -> int | None:
    """Bytes in a number of ``unit``; a unit that the value carries itself counts. These tools' MB are MiB."""
    if isinstance(value, dict) and isinstance(value.get("unit"), str):
        unit = value["unit"]
    elif isinstance(value, str) and (found := re.search(r"[KMG]?i?B\b", value, re.IGNORECASE)):
        unit = found[0]
    amount, factor = number(value, 0, 2**62), _UNITS.get(unit.strip().lower())
    return None if amount is None or factor is None or amount * factor >= 2**62 else int(amount * factor)


def fraction(percent: Any) -> float | None:
    """0 to 1, of per cent."""
    value = number(percent, 0, 100)
    return None if value is None else value / 100


def watts(value: Any) -> float | None:
    """A power that one board can draw."""
    return number(value, 0, 10_000)


def celsius(value: Any) -> float | None:
    """A temperature that a chip can have and still answer."""
    return number(value, -50, 200)


def megahertz(value: Any) -> float | None:
    """A clock that a chip can have; 65535 is nobody's."""
    return number(value, 0, 60_000)


def first(values: Iterable[Any]) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def text(value: Any) -> str | None:
    """A name as one printable line; None for ``N/A`` and what is no text."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return None
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in value).split())[:200]
    return None if line.upper() in {"", "N/A", "NA", "NONE", "UNKNOWN"} else line
