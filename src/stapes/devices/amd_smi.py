"""AMD's own tools: the Python module ``amdsmi``, the command ``amd-smi``, and the older ``rocm-smi``.

The module comes with ROCm; PyPI's package of its name holds no library and raises KeyError when imported. Both tools
changed the shape of their JSON between releases (ROCm 6 gives a list, 7 an object with ``gpu_data``), so fields are
looked for by name wherever they may stand.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from stapes.devices.readings import GpuProcess, Reading, celsius, first, fraction, megahertz, number, size, text, watts

Command = Callable[[Sequence[str]], Any]
"""Runs a tool and gives what its JSON holds; raises OSError or ValueError."""

_PATIENCE = 10.0
"""Seconds: a driver that hangs must not take us with it."""


@cache
def module() -> Any:
    """``amdsmi``, started. Raises whatever its import raises: KeyError, OSError, its own exceptions."""
    smi = importlib.import_module("amdsmi")
    smi.amdsmi_init()
    return smi


def energy_counter(address: str) -> Callable[[], float | None]:
    """Joules that the GPU at a PCI address has drawn, by its accumulator. Raises what ``amdsmi`` raises."""
    smi = module()
    handle = smi.amdsmi_get_processor_handle_from_bdf(address)

    def joules() -> float | None:
        count = smi.amdsmi_get_energy_count(handle)
        accumulator = count.get("energy_accumulator", count.get("power"))
        return accumulator * count["counter_resolution"] / 1e6  # the resolution is in microjoules

    return joules


def run_command(words: Sequence[str]) -> Any:
    """What a tool prints as JSON. Raises OSError where it is absent or fails, ValueError where it is no JSON."""
    if shutil.which(words[0]) is None:
        raise OSError(f"{words[0]} is not installed")
    try:
        done = subprocess.run(list(words), capture_output=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]} did not answer in {_PATIENCE:g} s") from None
    out = done.stdout.decode("utf-8", "replace")
    # Warnings may stand before the JSON.
    start = re.search(r"^\s*[\[{]", out, re.MULTILINE)
    if start is None:
        raise OSError(f"{words[0]} gave no JSON (exit code {done.returncode})")
    return json.JSONDecoder().raw_decode(out[start.start() :].lstrip())[0]


def read_module(smi: Any = None) -> list[Reading]:
    """Every AMD GPU, by the module ``amdsmi``. Raises what its import raises."""
    smi = module() if smi is None else smi
    return [_from_module(smi, index, handle) for index, handle in enumerate(smi.amdsmi_get_processor_handles())]


def _from_module(smi: Any, index: int, handle: Any) -> Reading:
    def ask(function: str, *names: str) -> dict[str, Any]:
        """What one function answers; nothing where this release lacks it, or this GPU does not tell."""
        with suppress(Exception):
            arguments = [_attribute(smi, name) for name in names]
            answer = getattr(smi, function)(handle, *arguments)
            return answer if isinstance(answer, dict) else {"value": answer}
        return {}

    vram, power = ask("amdsmi_get_gpu_vram_usage"), ask("amdsmi_get_power_info")
    heat = (
        celsius(
            ask("amdsmi_get_temp_metric", f"AmdSmiTemperatureType.{kind}", "AmdSmiTemperatureMetric.CURRENT").get(
                "value"
            )
        )
        for kind in ("HOTSPOT", "JUNCTION", "EDGE")
    )
    clocks = {kind: ask("amdsmi_get_clock_info", f"AmdSmiClkType.{kind}") for kind in ("GFX", "MEM")}
    return Reading(
        index=index,
        name=text(ask("amdsmi_get_gpu_asic_info").get("market_name")),
        source="amdsmi",
        id=_address(ask("amdsmi_get_gpu_device_bdf").get("value")),
        memory_used_bytes=size(vram.get("vram_used"), "mb"),
        memory_total_bytes=size(vram.get("vram_total"), "mb"),
        utilisation=fraction(ask("amdsmi_get_gpu_activity").get("gfx_activity")),
        power_watts=_power(power),
        temperature_c=first(heat),
        clock_mhz=_clock(clocks["GFX"]),
        memory_clock_mhz=_clock(clocks["MEM"]),
        processes=_processes(ask("amdsmi_get_gpu_process_list").get("value")),
    )


def read_command(run: Command = run_command) -> list[Reading]:
    """Every AMD GPU, by the command ``amd-smi``. Raises OSError, ValueError."""
    metrics = _gpus(run(["amd-smi", "metric", "--json"]))
    if not metrics:
        raise ValueError("amd-smi names no GPU")

    def beside(what: str) -> dict[int, dict[str, Any]]:
        with suppress(OSError, ValueError):
            return _gpus(run(["amd-smi", what, "--json"]))
        return {}

    names, places, programs = beside("static"), beside("list"), beside("process")
    out = []
    for index, found in sorted(metrics.items()):
        asic, vram = _section(names.get(index, {}), "asic"), _section(found, "mem_usage", "fb_usage", "vram")
        clocks, heat = _section(found, "clock"), _section(found, "temperature")
        processes = programs.get(index, {}).get("process_list")
        address = first(_address(each.get(index, {}).get("bdf")) for each in (places, _bus(names)))
        out.append(
            Reading(
                index=index,
                name=text(asic.get("market_name")),
                source="amd-smi",
                id=address,
                memory_used_bytes=size(first(vram.get(name) for name in ("used_vram", "used", "vram_used")), "mb"),
                memory_total_bytes=size(first(vram.get(name) for name in ("total_vram", "total", "vram_total")), "mb"),
                utilisation=fraction(_section(found, "usage").get("gfx_activity")),
                power_watts=_power(_section(found, "power")),
                temperature_c=first(
                    celsius(heat.get(name)) for name in ("hotspot", "hotspot_temperature", "edge", "edge_temperature")
                ),
                clock_mhz=_clock(_section(clocks, "gfx_0", "gfx")),
                memory_clock_mhz=_clock(_section(clocks, "mem_0", "mem")),
                processes=_processes(processes),
            )
        )
    return out


def _bus(static: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The ``bus`` part of ``amd-smi static``, which knows the PCI address too."""
    return {index: _section(each, "bus") for index, each in static.items()}


def read_rocm_smi(run: Command = run_command) -> list[Reading]:
    """Every AMD GPU, by ``rocm-smi``, which ROCm 10 no longer brings. Raises OSError, ValueError."""
    flags = "--showproductname --showbus --showmeminfo vram --showuse --showpower --showtemp --showclocks --json"
    answer = run(["rocm-smi", *flags.split()])
    cards = {
        int(found[1]): card
        for name, card in (answer.items() if isinstance(answer, dict) else ())
        if (found := re.fullmatch(r"card(\d{1,4})", str(name))) and isinstance(card, dict)
    }
    if not cards:
        raise ValueError("rocm-smi names no GPU")
    out = []
    for index, card in sorted(cards.items()):

        def value(pattern: str, card: dict[str, Any] = card) -> Any:
            return first(card[key] for key in card if re.search(pattern, str(key), re.IGNORECASE))

        out.append(
            Reading(
                index=index,
                name=text(first([value(r"^card series"), value(r"^card model")])),
                source="rocm-smi",
                id=_address(value(r"^PCI Bus")),
                memory_used_bytes=size(value(r"VRAM Total Used Memory")),
                memory_total_bytes=size(value(r"VRAM Total Memory")),
                utilisation=fraction(value(r"GPU use")),
                power_watts=watts(value(r"(?:Socket|Average).*Power")),
                temperature_c=first([celsius(value(r"Temperature.*junction")), celsius(value(r"Temperature.*edge"))]),
                clock_mhz=megahertz(value(r"^sclk clock speed")),
                memory_clock_mhz=megahertz(value(r"^mclk clock speed")),
            )
        )
    return out


def _gpus(answer: Any) -> dict[int, dict[str, Any]]:
    """GPU number → what was said about it."""
    if isinstance(answer, dict):
        answer = first([answer.get("gpu_data"), answer.get("gpus"), [answer]])
    found = {}
    for each in answer if isinstance(answer, list) else ():
        place = number(each.get("gpu"), 0, 1023) if isinstance(each, dict) else None
        if place is not None:
            found[int(place)] = each
    return found


def _section(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return first(value[name] for name in names if isinstance(value.get(name), dict)) or {}


def _power(power: dict[str, Any]) -> float | None:
    names = ("current_socket_power", "socket_power", "average_socket_power")
    values = [watts(power.get(name)) for name in names]
    # 65535 W is how older releases say that a field is not theirs.
    return first(value for value in values if value)


def _clock(clock: dict[str, Any]) -> float | None:
    return first(megahertz(clock.get(name)) for name in ("clk", "cur_clk", "value"))


def _address(value: Any) -> str | None:
    found = re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", str(value).lower())
    return found[0] if found else None


def _processes(value: Any) -> tuple[GpuProcess, ...] | None:
    """From a list of processes; None where there is no list."""
    if not isinstance(value, list):
        return None
    return tuple(_each_process(value))


def _each_process(value: list[Any]) -> Iterator[GpuProcess]:
    for each in value:
        info = each.get("process_info", each) if isinstance(each, dict) else None
        pid = number(info.get("pid"), 1, 2**31) if isinstance(info, dict) else None  # else "no running processes"
        if pid is None or not isinstance(info, dict):
            continue
        memory = info.get("memory_usage")
        used = first([memory.get("vram_mem")] if isinstance(memory, dict) else [info.get("mem")])
        yield GpuProcess(int(pid), text(info.get("name")), size(used))


def _attribute(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value
