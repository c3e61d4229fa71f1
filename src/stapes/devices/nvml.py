"""NVIDIA's management library (NVML), through ctypes: it comes with the driver, so nothing need be installed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from stapes.devices.readings import GpuProcess, Reading, celsius, fraction, megahertz, text, watts

_LIBRARY = "libnvidia-ml.so.1"
_GRAPHICS_CLOCK, _MEMORY_CLOCK = 0, 2
_CORE_TEMPERATURE = 0
_UNKNOWN_BYTES = 2**64 - 1
_TOO_SMALL = 7
"""NVML_ERROR_INSUFFICIENT_SIZE."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@cache
def library() -> Any:
    """NVML, ready to be asked. Raises OSError where it is not there or does not start."""
    nvml = ctypes.CDLL(_LIBRARY)
    if error := nvml.nvmlInit_v2():
        raise OSError(f"NVML does not start (error {error})")
    return nvml


def energy_counter(uuid: str) -> Callable[[], float | None]:
    """Joules that the GPU ``GPU-<uuid>`` has drawn since the driver was loaded. Raises OSError."""
    nvml = library()
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        raise OSError("NVML does not know this GPU")

    def joules() -> float | None:
        millijoules = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3

    return joules


def read(nvml: Any = None) -> list[Reading]:
    """Every NVIDIA GPU of this machine. Raises OSError where NVML is not there."""
    nvml = library() if nvml is None else nvml
    count = ctypes.c_uint()
    if error := nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        raise OSError(f"NVML does not count the GPUs (error {error})")
    readings = []
    for index in range(min(count.value, 1024)):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            readings.append(_reading(nvml, index, handle))
    return readings


def _reading(nvml: Any, index: int, handle: ctypes.c_void_p) -> Reading:
    memory, busy = _Memory(), _Utilisation()
    has_memory = not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) and memory.used <= memory.total
    has_busy = not nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy))
    milliwatts = _unsigned(nvml.nvmlDeviceGetPowerUsage, handle)
    return Reading(
        index=index,
        name=_text(nvml.nvmlDeviceGetName, handle),
        source="nvml",
        id=_text(nvml.nvmlDeviceGetUUID, handle),
        memory_used_bytes=memory.used if has_memory else None,
        memory_total_bytes=memory.total if has_memory else None,
        utilisation=fraction(busy.gpu) if has_busy else None,
        power_watts=None if milliwatts is None else watts(milliwatts / 1e3),
        temperature_c=celsius(_unsigned(nvml.nvmlDeviceGetTemperature, handle, _CORE_TEMPERATURE)),
        clock_mhz=megahertz(_unsigned(nvml.nvmlDeviceGetClockInfo, handle, _GRAPHICS_CLOCK)),
        memory_clock_mhz=megahertz(_unsigned(nvml.nvmlDeviceGetClockInfo, handle, _MEMORY_CLOCK)),
        processes=_processes(nvml, handle),
    )


def _unsigned(function: Any, handle: ctypes.c_void_p, *arguments: int) -> int | None:
    value = ctypes.c_uint()
    return None if function(handle, *arguments, ctypes.byref(value)) else value.value


def _text(function: Any, handle: ctypes.c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(96)
    return None if function(handle, buffer, ctypes.c_uint(len(buffer))) else text(buffer.value)


def _processes(nvml: Any, handle: ctypes.c_void_p) -> tuple[GpuProcess, ...] | None:
    room = 64
    while True:
        count = ctypes.c_uint(room)
        found = (_Process * room)()
        try:
            error = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found)
        except AttributeError:  # a driver before 2021
            return None
        if error != _TOO_SMALL or room >= 4096:
            break
        room *= 4
    if error:
        return None
    return tuple(
        GpuProcess(each.pid, process_name(each.pid), None if each.memory == _UNKNOWN_BYTES else each.memory)
        for each in found[: min(count.value, room)]
    )


def process_name(pid: int) -> str | None:
    """As the kernel calls it; None where it is not seen from here, as from inside a container."""
    try:
        return text(Path(f"/proc/{pid}/comm").read_bytes())
    except OSError:
        return None
