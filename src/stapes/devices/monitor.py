"""How the GPUs and the host are doing now: for ``stapes monitor``, the trainer's log and ``/metrics``.

AMD GPUs are read through the Python module ``amdsmi``, else the command ``amd-smi``, else the driver's files in
``/sys``, else ``rocm-smi``; NVIDIA GPUs through NVML; where none of these answers, PyTorch tells the memory of the
GPUs it sees. A source that fails, hangs or talks nonsense is passed over for the next, and ``notes`` say so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stapes.devices import amd_smi, amd_sysfs, machine, nvml
from stapes.devices.readings import GpuProcess as GpuProcess
from stapes.devices.readings import Reading as Reading
from stapes.devices.readings import number

Source = Callable[[], list[Reading]]


@dataclass(frozen=True, slots=True)
class HostReading:
    """The machine around the GPUs. ``utilisation``: of all its cores, 0 to 1, since the reading before."""

    utilisation: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    load_average: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one moment."""

    time: str
    """ISO 8601, UTC."""
    gpus: list[Reading]
    host: HostReading
    notes: list[str]
    """Why a number may be missing."""


def read_torch() -> list[Reading]:
    """The GPUs that PyTorch sees, with their memory alone. Raises OSError where it sees none."""
    import torch

    if not torch.cuda.is_available():
        raise OSError("PyTorch sees no GPU")
    readings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        identity = machine.gpu_id(index)
        readings.append(Reading(index, properties.name, "torch", identity, total - free, total))
    return readings


class Monitor:
    """Reads again and again. What answered last time is asked first, so that absent tools are not started each time."""

    def __init__(
        self,
        amd: Mapping[str, Source] | None = None,
        nvidia: Mapping[str, Source] | None = None,
        fallback: Mapping[str, Source] | None = None,
    ) -> None:
        self._amd = amd or {
            "amdsmi": amd_smi.read_module,
            "amd-smi": amd_smi.read_command,
            "sysfs": amd_sysfs.read,
            "rocm-smi": amd_smi.read_rocm_smi,
        }
        self._nvidia = nvidia or {"nvml": nvml.read}
        self._fallback = fallback or {"torch": read_torch}
        self._working: dict[int, str | None] = {}
        self._notes: list[str] = []
        self._ticks = _cpu_ticks()

    def gpus(self) -> list[Reading]:
        """Every GPU. Never raises."""
        self._notes = []
        found = [*self._read(self._amd), *self._read(self._nvidia)]
        if not found:
            found = self._read(self._fallback)
        if not found:
            self._notes.append("no GPU answers: the processor and the memory alone are shown")
        return found

    def sample(self) -> Sample:
        """GPUs and host together."""
        gpus = self.gpus()
        return Sample(datetime.now(UTC).isoformat(timespec="milliseconds"), gpus, self._host(), list(self._notes))

    def _read(self, sources: Mapping[str, Source]) -> list[Reading]:
        known = self._working.get(id(sources), "")
        if known is None:  # nothing answered the first time: drivers do not appear while we run
            return []
        for name in sorted(sources, key=lambda each: each != known):
            try:
                readings = sources[name]()
            except Exception as error:  # whatever a driver's library raises, the next source is asked
                if known:
                    self._notes.append(f"{name} stopped answering ({error})")
                continue
            if readings and not all(reading.is_empty for reading in readings):
                self._working[id(sources)] = name
                return readings
        if not known:
            self._working[id(sources)] = None
        return []

    def _host(self) -> HostReading:
        before, self._ticks = self._ticks, _cpu_ticks()
        busy = None
        if before and self._ticks and self._ticks[1] > before[1]:
            busy = number((self._ticks[0] - before[0]) / (self._ticks[1] - before[1]), 0, 1)
        total = machine.memory_bytes()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return HostReading(busy, _memory_used(), total, load)


_shared: Monitor | None = None
_lock = threading.Lock()


def read_gpus() -> list[Reading]:
    """Every GPU of this machine now, whoever uses it; empty where none answers. From any thread; never raises."""
    global _shared
    with _lock:
        _shared = _shared or Monitor()
        return _shared.gpus()


def read_gpu(index: int, readings: Sequence[Reading] | None = None) -> Reading | None:
    """The GPU that this process's PyTorch calls ``cuda:<index>``, among ``readings`` or read now; None if unknown."""
    identity = machine.gpu_id(index)
    readings = read_gpus() if readings is None else readings
    return next((each for each in readings if identity is not None and each.id == identity), None)


def as_metrics(reading: Reading) -> dict[str, float]:
    """A reading as numbers to log or to export, named with their units; what is unknown is left out."""
    values = {
        "gpu_memory_used_bytes": reading.memory_used_bytes,
        "gpu_memory_total_bytes": reading.memory_total_bytes,
        "gpu_utilisation": reading.utilisation,
        "gpu_power_watts": reading.power_watts,
        "gpu_temperature_celsius": reading.temperature_c,
        "gpu_clock_mhz": reading.clock_mhz,
        "gpu_memory_clock_mhz": reading.memory_clock_mhz,
        "gpu_processes": None if reading.processes is None else len(reading.processes),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _cpu_ticks() -> tuple[int, int] | None:
    """(busy, all) ticks of all cores since the machine began."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
        # user nice system idle iowait irq softirq steal; guests are counted in user.
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(ticks) - sum(ticks[3:5]), sum(ticks)) if len(ticks) >= 5 else None


def _memory_used() -> int | None:
    """Of the control group where it has a limit, else of the machine; what can be dropped at once is not counted."""
    group = Path("/sys/fs/cgroup")
    try:
        if (group / "memory.max").read_text(encoding="ascii").strip() != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            return max(0, used - int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
        return (kib["MemTotal"] - kib["MemAvailable"]) * 1024
    except (OSError, ValueError, KeyError):
        return None
