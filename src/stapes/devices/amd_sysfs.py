"""AMD's kernel driver tells the essentials in files: no ROCm, no tool and no right but to read is needed."""

from __future__ import annotations

import re
from pathlib import Path

from stapes.devices.readings import Reading, celsius, first, fraction, megahertz, number, size, text, watts

DRM = Path("/sys/class/drm")
_AMD = "0x1002"


def read(root: Path = DRM) -> list[Reading]:
    """Every AMD GPU whose driver keeps an account of its memory. Raises OSError where there is none."""
    cards = sorted(
        (path for path in root.glob("card*") if re.fullmatch(r"card\d+", path.name)),
        key=lambda path: int(path.name[4:]),
    )
    devices = [card / "device" for card in cards if _line(card / "device" / "vendor") == _AMD]
    readings = [_reading(index, device) for index, device in enumerate(devices)]
    if not readings:
        raise OSError(f"{root} lists no AMD GPU")
    return readings


def _reading(index: int, device: Path) -> Reading:
    sensors = next(iter(sorted(device.glob("hwmon/hwmon*"))), device / "hwmon")
    power = first(number(_line(sensors / name)) for name in ("power1_average", "power1_input"))
    heat = {_line(path): path.with_name(path.name.replace("label", "input")) for path in sensors.glob("temp*_label")}
    degrees = first(number(_line(heat[name])) for name in ("junction", "edge") if name in heat)
    degrees = number(_line(sensors / "temp1_input")) if degrees is None else degrees
    return Reading(
        index=index,
        name=text(_line(device / "product_name")) or _by_number(device),
        source="sysfs",
        id=_address(device),
        memory_used_bytes=size(_line(device / "mem_info_vram_used")),
        memory_total_bytes=size(_line(device / "mem_info_vram_total")),
        utilisation=fraction(_line(device / "gpu_busy_percent")),
        power_watts=None if power is None else watts(power / 1e6),
        temperature_c=None if degrees is None else celsius(degrees / 1e3),
        clock_mhz=_active_clock(device / "pp_dpm_sclk"),
        memory_clock_mhz=_active_clock(device / "pp_dpm_mclk"),
    )


def _active_clock(path: Path) -> float | None:
    """The level with a star: ``1: 2100Mhz *``."""
    found = re.search(r":\s*(\d+)\s*mhz\s*\*", _line(path) or "", re.IGNORECASE)
    return megahertz(found[1]) if found else None


def _by_number(device: Path) -> str | None:
    identity = _line(device / "device")
    return f"AMD GPU {identity}" if identity else None


def _address(device: Path) -> str | None:
    found = re.search(r"^PCI_SLOT_NAME=(\S+)$", _line(device / "uevent") or "", re.MULTILINE)
    return found[1].lower() if found else None


def _line(path: Path) -> str | None:
    try:
        return path.read_bytes()[:4096].decode("utf-8", "replace").strip()
    except OSError:
        return None
