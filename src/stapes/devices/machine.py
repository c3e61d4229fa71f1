"""Facts of this machine, for every figure to carry: processor, memory, GPUs, versions; its memory and energy meters.

Nothing here names the machine or its user: results are meant to be published.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stapes.devices import amd_smi, nvml

_VERSIONS = ("torch", "numpy", "transformers", "faster-whisper", "ctranslate2", "onnxruntime")


def facts() -> dict[str, Any]:
    """What this machine is, as JSON. Unknown values are None.

    ``cpu``, ``instructions`` (the widest that PyTorch uses on it: AVX2, AVX512), ``cores`` (that this process may
    use), ``memory_bytes``, ``gpus`` (``name``, ``memory_bytes``, ``backend``,
    ``driver``), ``os``, ``kernel``, ``python``, ``versions`` of packages, ``cuda``, ``rocm``, ``threads`` of PyTorch,
    and ``fingerprint``: the same for machines with the same processor, cores, memory and GPUs, whatever runs on them.
    Virtual machines may not tell which of a maker's processors they have; what it can compute is then all there is.
    """
    import torch

    gpus = _gpus(torch)
    memory = memory_bytes()
    hardware = {
        "cpu": _cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": available_cores(),
        # Firmware keeps a little for itself, and not always the same.
        "memory_gib": round(memory / 2**30) if memory else None,
        "gpus": [(gpu["name"], round(gpu["memory_bytes"] / 2**30)) for gpu in gpus],
    }
    digest = hashlib.sha256(json.dumps(hardware, sort_keys=True).encode())
    return {
        "fingerprint": digest.hexdigest()[:12],
        "cpu": hardware["cpu"],
        "instructions": hardware["instructions"],
        "cores": hardware["cores"],
        "memory_bytes": memory,
        "gpus": gpus,
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: found for name in _VERSIONS if (found := _version(name))},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The git commit of the checkout that runs, with ``+`` where it was changed; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        # Installed into a folder that some other repository keeps, the package is not tracked by it.
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def available_cores() -> int:
    """CPUs that this process may use: its affinity, and its control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def reset_peak_memory(gpu: int | None = None) -> None:
    """Start counting the peaks anew from here (the process's, where the system allows it; a GPU's always)."""
    with suppress(OSError):  # the peak since the process began is then what is left to report
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if gpu is not None:
        import torch

        torch.cuda.reset_peak_memory_stats(gpu)


def peak_rss_bytes() -> int | None:
    """Most resident memory of this process since ``reset_peak_memory``, else since it began."""
    for line in (_read("/proc/self/status") or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def peak_device_bytes(gpu: int | None) -> int | None:
    """Most memory that PyTorch allocated on a GPU since ``reset_peak_memory``; None for the CPU."""
    if gpu is None:
        return None
    import torch

    return torch.cuda.max_memory_allocated(gpu)


def gpu_id(index: int) -> str | None:
    """What a driver calls the GPU that this process's PyTorch calls ``cuda:<index>``: NVIDIA's UUID, AMD's PCI address.

    None where this PyTorch does not tell.
    """
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    try:
        if not torch.version.hip:
            return f"GPU-{properties.uuid}"
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None


class EnergyMeter:
    """Joules that a device has drawn since the meter was made, by its own counter.

    NVIDIA: NVML's total energy counter; AMD: amd-smi's accumulator; CPU: the packages' RAPL counters where they may
    be read. The device's whole draw is counted, other processes' share included.
    """

    def __init__(self, gpu: int | None) -> None:
        self._counter = _energy_counter(gpu)
        self._start = self._counter() if self._counter else None

    def joules(self) -> float | None:
        """Since the meter was made; None where the device does not say."""
        now = self._counter() if self._counter else None
        if now is None or self._start is None or now < self._start:  # wrapped around
            return None
        return now - self._start


def _energy_counter(gpu: int | None) -> Callable[[], float | None] | None:
    if gpu is None:
        return _rapl_joules
    import torch

    try:
        identity = gpu_id(gpu) or ""
        return amd_smi.energy_counter(identity) if torch.version.hip else nvml.energy_counter(identity)
    except Exception:  # a driver library that is absent, older or forbidden: there is no meter then
        return None


def _rapl_joules() -> float | None:
    # Packages only (intel-rapl:0, on AMD processors too): their sub-domains are counted in them.
    zones = [path for path in Path("/sys/class/powercap").glob("intel-rapl:*") if path.name.count(":") == 1]
    readings = [_read(zone / "energy_uj") for zone in zones]
    values = [int(reading) for reading in readings if reading and reading.isdigit()]
    return sum(values) / 1e6 if values and len(values) == len(zones) else None


def _gpus(torch: Any) -> list[dict[str, Any]]:
    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "backend": "rocm" if torch.version.hip else "cuda",
                "driver": _driver(torch),
            }
        )
    return found


def _driver(torch: Any) -> str | None:
    return _read("/sys/module/amdgpu/version" if torch.version.hip else "/sys/module/nvidia/version")


def _cpu_name() -> str | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or its control group's limit where that is less."""
    limits = [_read("/sys/fs/cgroup/memory.max")]
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(str(int(line.split()[1]) * 1024))
    return min((int(limit) for limit in limits if limit and limit.isdigit()), default=None)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603, S607
    return done.stdout.strip()


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
