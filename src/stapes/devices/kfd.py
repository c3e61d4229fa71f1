"""AMD GPUs as the Linux kernel lists them, which needs neither ROCm nor PyTorch nor any rights.

The amdgpu driver publishes a folder a processor under ``/sys/class/kfd/kfd/topology/nodes``; ROCm's own runtime finds
its GPUs there. Containers see the host's list, whether or not they may open the GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class KfdGpu:
    """One GPU. ``memory_bytes``: VRAM, or what firmware sets aside where the GPU shares the system's memory.

    ``render_minor``: the number of its ``/dev/dri/renderD…``. ``pci``: ``0000:c1:00.0``.
    """

    node: int
    architecture: str
    memory_bytes: int | None
    render_minor: int | None
    pci: str | None
    is_apu: bool


def architecture_name(version: int) -> str:
    """90402 → ``gfx942``, 90010 → ``gfx90a``, 110501 → ``gfx1151``: the last two digits are hexadecimal ones."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def read_gpus(nodes: Path = NODES) -> list[KfdGpu]:
    """All GPUs of the kernel's list, in its order; [] where the driver is not loaded. Unreadable nodes are left out."""
    found = []
    folders = [path for path in nodes.iterdir() if path.name.isdecimal()] if nodes.is_dir() else []
    for folder in sorted(folders, key=lambda path: int(path.name)):
        properties = _numbers(folder / "properties")
        version = properties.get("gfx_target_version", 0)
        if not version:  # a CPU, or a node that this container may not see
            continue
        location, domain = properties.get("location_id"), properties.get("domain", 0)
        pci = None
        if location is not None:
            pci = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        found.append(
            KfdGpu(
                int(folder.name),
                architecture_name(version),
                _vram(folder),
                properties.get("drm_render_minor"),
                pci,
                properties.get("cpu_cores_count", 0) > 0,
            )
        )
    return found


def _vram(folder: Path) -> int | None:
    """Heaps of kind 1 and 2 are the GPU's own: memory that the host sees, and memory that it does not."""
    banks = [_numbers(path) for path in sorted(folder.glob("mem_banks/*/properties"))]
    sizes = [bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2)]
    return sum(sizes) or None


def _numbers(path: Path) -> dict[str, int]:
    """``key value`` lines; what is no number is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
