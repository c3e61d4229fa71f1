"""What follows from the facts: for each subject whether it works, what is wrong, and the fix.

Pure functions of ``Facts``, so that any machine can be put together in a test. Hardware, drivers and rights are here;
``engine_findings`` has the Python packages, ``setting_findings`` the environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stapes.diagnostics.facts import WEAK_GRAPHICS, DeviceNode, Facts, numbers

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note", "ok")


@dataclass(frozen=True)
class Finding:
    """One thing about the machine. ``fix``: what to do, empty where there is nothing to do.

    ``ok`` works; ``note`` is good to know; ``warning`` works, and worse than it could; ``problem`` does not work.
    """

    level: Level
    subject: str
    what: str
    fix: str = ""


_GIB = 1 << 30
GROUPS_FIX = "sudo usermod -aG render,video $USER, then log out and in again (newgrp render tries it at once)"


def machine_findings(facts: Facts) -> Iterator[Finding]:
    """The operating system, the drivers, the GPUs and the rights to them."""
    system = facts.system
    memory = f", {system.memory_bytes / _GIB:.0f} GiB of memory" if system.memory_bytes else ""
    where = f", in a {system.container} container" if system.container else ", in WSL" if system.is_wsl else ""
    yield Finding("ok", "system", f"{system.os}, Linux {system.kernel}, Python {system.python}{memory}{where}")
    yield from _memory(facts)
    yield from _caches(facts)
    if facts.has_amd:
        yield from _amd(facts)
    if facts.has_nvidia:
        yield from _nvidia(facts)
    if not facts.has_amd and not facts.has_nvidia:
        if system.is_wsl and facts.node("/dev/dxg"):
            yield from _wsl(facts)
        elif len(facts.own_pci) < len(facts.pci):
            yield Finding("note", "GPU", "all GPUs are given to virtual machines (vfio-pci): the CPU is what is left")
        else:
            yield Finding("note", "GPU", "no AMD or NVIDIA GPU on the PCI bus: everything runs on the CPU")
    for probe, reason in facts.failures.items():
        yield Finding("note", probe, f"could not be looked at: {reason}")


def _memory(facts: Facts) -> Iterator[Finding]:
    system = facts.system
    if system.memory_bytes is not None and system.memory_bytes < 2 * _GIB:
        yield Finding(
            "warning",
            "memory",
            f"{system.memory_bytes / _GIB:.1f} GiB of memory: base needs about 1 GiB, turbo about 4 on the CPU",
            "give the machine or container more memory, or use tiny",
        )
    shared = system.shared_memory_bytes
    if system.container and shared is not None and shared < _GIB:
        yield Finding(
            "warning",
            "shared memory",
            f"{shared / 2**20:.0f} MiB at its mount: data loaders and NCCL or RCCL die with a bus error when it is "
            "full",
            "start the container with --ipc=host or --shm-size=8g",
        )


def _caches(facts: Facts) -> Iterator[Finding]:
    system, free = facts.system, facts.system.cache_free_bytes
    if not system.cache_is_writable:
        yield Finding(
            "warning",
            "cache",
            f"{system.cache_folder} cannot be written to: models cannot be pulled, and compiled kernels are lost",
            "set XDG_CACHE_HOME to a folder that can be written to",
        )
    if free is not None and free < 5 * _GIB:
        yield Finding(
            "problem" if free < _GIB // 2 else "warning",
            "cache",
            f"{free / _GIB:.1f} GiB free at {system.cache_folder}: turbo takes 1.6 GB, MIOpen's and Triton's kernels 1",
            "make room, or set XDG_CACHE_HOME (STAPES_MODEL_DIR for models alone) to a folder on a larger disk",
        )
    if system.container and system.cache_is_temporary and (facts.has_amd or facts.has_nvidia):
        yield Finding(
            "warning",
            "cache",
            f"{system.cache_folder} goes with the container: each new one downloads models and compiles kernels again",
            "mount a volume there, such as -v stapes-cache:/root/.cache",
        )


def _amd(facts: Facts) -> Iterator[Finding]:
    system = facts.system
    driver = f"amdgpu {system.amdgpu_version}" if system.amdgpu_version else "the kernel's own amdgpu driver"
    for gpu in facts.kfd:
        size = f", {gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else ""
        kind = " (graphics inside the processor)" if gpu.is_apu or gpu.architecture in WEAK_GRAPHICS else ""
        name = next((f"{each.name} " for each in facts.readings if each.name and each.id == gpu.pci), "")
        yield Finding("ok", "AMD GPU", f"{name}{gpu.architecture}{size}{kind}, seen by {driver}")
    if not facts.kfd and not facts.node("/dev/kfd"):
        yield from _amd_driver_missing(facts)
        return
    yield from _amd_rights(facts)
    yield from _mixed_graphics(facts)
    yield from _strix_halo(facts)
    if any(name in ("gfx942", "gfx950") for name in facts.amd_architectures) and system.numa_balancing:
        yield Finding(
            "note",
            "NUMA",
            "the kernel moves memory between sockets by itself, which AMD advises against on Instinct",
            "sudo sysctl kernel.numa_balancing=0",
        )
    if facts.amd_smi.found and facts.amd_smi.code != 0:
        told = (facts.amd_smi.error or facts.amd_smi.out).strip().partition("\n")[0][:200]
        yield Finding("note", "amd-smi", f"failed: {told or 'no answer'}", "update ROCm, or its amd-smi-lib package")
    elif not facts.amd_smi.found:
        yield Finding("note", "amd-smi", "not installed: `stapes monitor` reads the driver's files instead")
    if facts.rocm_bootstrap is not None:
        yield Finding("note", "rocm-bootstrap", f"detects {facts.rocm_bootstrap}")


def _amd_driver_missing(facts: Facts) -> Iterator[Finding]:
    system = facts.system
    what = "an AMD GPU is on the PCI bus, but /dev/kfd is not there"
    # It may be the graphics of the processor, which nobody means to compute on.
    is_wanted = facts.torch is not None and facts.torch.hip is not None
    level: Level = "problem" if is_wanted else "note" if facts.has_nvidia else "warning"
    if "nomodeset" in system.kernel_command_line:
        what += ": the kernel was started with nomodeset, which keeps amdgpu from loading"
        yield Finding(level, "AMD driver", what, "take nomodeset out of the boot options and reboot")
    elif system.container:
        what += f" in this {system.container} container"
        yield Finding(
            level,
            "AMD GPU",
            what,
            "start it with --device /dev/kfd --device /dev/dri (Kubernetes: AMD's device plugin, amd.com/gpu: 1)",
        )
    elif not system.amdgpu_loaded:
        yield Finding(
            level,
            "AMD driver",
            f"{what}: the amdgpu driver is not loaded",
            "sudo modprobe amdgpu; if that fails, install a newer kernel or AMD's amdgpu-dkms, and see dmesg",
        )
    else:
        yield Finding(
            level,
            "AMD driver",
            f"{what}: amdgpu is loaded without its compute part (GPU too old, or no PCIe atomics)",
            "see `dmesg | grep kfd`; use another PCIe slot or a newer kernel",
        )


def _amd_rights(facts: Facts) -> Iterator[Finding]:
    """Numbers, not names: a container has its own names for the host's groups."""
    system = facts.system
    closed = [node for node in facts.nodes if not node.usable and node.path.startswith(("/dev/kfd", "/dev/dri/"))]
    if not facts.node("/dev/kfd"):
        fix = (
            "start the container with --device /dev/kfd --device /dev/dri (Kubernetes: AMD's device plugin)"
            if system.container
            else "load amdgpu's compute part: see `dmesg | grep kfd`"
        )
        yield Finding("problem", "/dev/kfd", "not there: the kernel lists AMD GPUs, but none can be opened", fix)
    elif not any(node.path.startswith("/dev/dri/") for node in facts.nodes):
        yield Finding(
            "problem",
            "/dev/dri",
            "there is /dev/kfd and no /dev/dri/renderD…: ROCm needs both",
            "start the container with --device /dev/dri too" if system.container else "see `dmesg | grep amdgpu`",
        )
    for group in dict.fromkeys((node.group_id, node.refusal) for node in closed):
        yield _closed([node for node in closed if (node.group_id, node.refusal) == group], facts)
    if facts.kfd and not closed and facts.node("/dev/kfd"):
        yield Finding("ok", "/dev/kfd", "it and /dev/dri may be opened")


def _closed(closed: list[DeviceNode], facts: Facts) -> Finding:
    """Device files that cannot be opened, all for the same reason."""
    first, *others = closed
    what = (f"and {', '.join(node.path for node in others)} " if others else "") + "may not be opened: "
    container = facts.system.container
    if first.refusal == "EPERM" and container:
        what += "they are there, and the container's device rules forbid them"
        return Finding(
            "problem", first.path, what, "start the container with --device /dev/kfd --device /dev/dri, not with -v"
        )
    if first.refusal not in (None, "EACCES", "EPERM"):
        return Finding("problem", first.path, f"{what}{first.refusal}", "see `dmesg | grep -e amdgpu -e kfd`; reboot")
    named = f"group {first.group}" if first.group else "a group without a name here"
    what += f"it belongs to {named} ({first.group_id}), mode {first.mode}, and we are not in it"
    fix = GROUPS_FIX
    if container:
        fix = f"start the container with --group-add {first.group_id} (the host's number: names mean others in here)"
    return Finding("problem", first.path, what, fix)


def _mixed_graphics(facts: Facts) -> Iterator[Finding]:
    weak = [gpu for gpu in facts.kfd if gpu.architecture in WEAK_GRAPHICS]
    strong = [gpu for gpu in facts.kfd if gpu.architecture not in WEAK_GRAPHICS]
    hidden = any(facts.environment.get(name) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    if weak and strong and not hidden:
        index = facts.kfd.index(strong[0])
        yield Finding(
            "warning",
            "processor graphics",
            f"{weak[0].architecture} is visible beside {strong[0].architecture}, and ROCm's libraries have no kernels "
            "for it: a library that takes it by mistake crashes",
            f"export ROCR_VISIBLE_DEVICES={index} (or switch it off in the firmware)",
        )
    elif weak and not strong:
        yield Finding(
            "note",
            "AMD GPU",
            f"{weak[0].architecture} is a small one inside the processor: the CPU is as fast, and ROCm has no kernels "
            "for it",
        )


def _strix_halo(facts: Facts) -> Iterator[Finding]:
    system = facts.system
    if "gfx1151" not in facts.amd_architectures:
        return
    if numbers(system.kernel) < (6, 18, 4):
        yield Finding(
            "warning",
            "kernel",
            f"Linux {system.kernel} with gfx1151: kernels before 6.18.4 save too few registers, and the GPU hangs "
            "(ROCm/TheRock #2151)",
            "update to Linux 6.18.4 or newer; until then boot with amdgpu.cwsr_enable=0"
            + (" (it is set)" if system.amdgpu_cwsr is False else ""),
        )
    elif system.amdgpu_cwsr is False:
        yield Finding(
            "note",
            "kernel",
            "amdgpu.cwsr_enable=0 is set, which this kernel no longer needs",
            "take amdgpu.cwsr_enable=0 out of the boot options",
        )
    if system.gtt_bytes and system.memory_bytes and system.gtt_bytes < 0.6 * system.memory_bytes:
        pages = int(0.85 * system.memory_bytes) // 4096
        yield Finding(
            "note",
            "GPU memory",
            f"the GPU may use {system.gtt_bytes / _GIB:.0f} of the system's {system.memory_bytes / _GIB:.0f} GiB, the "
            "kernel's default; speech models fit easily, large language models may not",
            f"boot with ttm.pages_limit={pages} to allow 85 %",
        )


def _nvidia(facts: Facts) -> Iterator[Finding]:
    system, tool = facts.system, facts.nvidia_smi
    told = f"{tool.out}\n{tool.error}"
    rows = [row for row in tool.out.splitlines() if row.count(",") >= 2] if tool.code == 0 else []
    for row in rows:
        name, driver, memory = [cell.strip() for cell in row.split(",")][:3]
        yield Finding("ok", "NVIDIA GPU", f"{name}, {memory}, driver {driver}")
    if not rows:  # nvidia-smi is not in every container; the library behind it mostly is
        for reading in facts.readings:
            if reading.source == "nvml":
                rows.append(reading.name or "unknown")
                size = f", {reading.memory_total_bytes / _GIB:.0f} GiB" if reading.memory_total_bytes else ""
                driver = f", driver {system.nvidia_version}" if system.nvidia_version else ""
                yield Finding("ok", "NVIDIA GPU", f"{reading.name}{size}{driver}")
    if "Driver/library version mismatch" in told:
        yield Finding(
            "problem",
            "NVIDIA driver",
            "the driver was updated, and its old kernel module is still loaded",
            "reboot (or unload and load the nvidia module)",
        )
    elif not rows and not any(node.path.startswith("/dev/nvidia") for node in facts.nodes):
        fix = (
            "start the container with --gpus all (and install the NVIDIA container toolkit on the host)"
            if system.container
            else "install NVIDIA's driver and reboot"
        )
        yield Finding("problem", "NVIDIA driver", "an NVIDIA GPU is there, and no /dev/nvidia0: no driver for it", fix)
    elif tool.found and tool.code != 0:
        reason = (tool.error or tool.out).strip().partition("\n")[0][:200] or "no answer"
        yield Finding("problem", "NVIDIA driver", f"nvidia-smi failed: {reason}", "install the driver anew and reboot")
    elif not rows and system.nvidia_version:
        yield Finding("ok", "NVIDIA GPU", f"driver {system.nvidia_version}")


def _wsl(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if torch is not None and torch.is_available:
        yield Finding("ok", "WSL", "Windows' driver lends a GPU through /dev/dxg")
        return
    is_rocm = torch is not None and torch.hip is not None
    fix = (
        "install AMD's ROCm for WSL (its user-space driver librocdxg), then remove torch/lib/libhsa-runtime64.so* from "
        "the PyTorch package so that ROCm's own is found"
        if is_rocm
        else "for AMD install ROCm for WSL and PyTorch for ROCm; for NVIDIA install Windows' driver and PyTorch for "
        "CUDA, and nothing inside WSL"
    )
    yield Finding(
        "warning",
        "WSL",
        "Windows lends a GPU through /dev/dxg, and PyTorch does not see it (ROCm/legacy-rocm-build #5461)",
        fix,
    )
