"""Readings of GPUs, from what each source answers: whole, changed between releases, or garbage."""

from __future__ import annotations

import ctypes
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.devices import amd_smi, amd_sysfs, machine, monitor, nvml
from stapes.devices.monitor import GpuProcess, Monitor, Reading, as_metrics, read_gpu
from stapes.devices.readings import number, size

MI300X = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 87, "unit": "%"}, "umc_activity": {"value": 12, "unit": "%"}},
    "power": {"socket_power": {"value": 512, "unit": "W"}, "gfx_voltage": "N/A"},
    "clock": {"gfx_0": {"clk": {"value": 2104, "unit": "MHz"}}, "mem_0": {"clk": {"value": 1300, "unit": "MHz"}}},
    "temperature": {"edge": "N/A", "hotspot": {"value": 61, "unit": "C"}, "mem": {"value": 50, "unit": "C"}},
    "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 4096, "unit": "MB"}},
}
STATIC = {"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}, "bus": {"bdf": "0000:0C:00.0"}}
PROCESS = {
    "gpu": 0,
    "process_list": [
        {"process_info": {"name": "python", "pid": 77, "memory_usage": {"vram_mem": {"value": 2**30, "unit": "B"}}}},
        {"process_info": "No running processes detected"},
    ],
}


def tool(**answers: Any) -> amd_smi.Command:
    """An amd-smi whose subcommands answer so; what is missing fails."""

    def run(words: Any) -> Any:
        if words[1] not in answers:
            raise OSError("unknown subcommand")
        return answers[words[1]]

    return run


@pytest.mark.parametrize("wrapped", [False, True], ids=["ROCm 6", "ROCm 7"])
def test_amd_smi_of_two_releases_gives_the_same_reading(wrapped: bool) -> None:
    def as_release(value: dict[str, Any]) -> Any:
        return {"gpu_data": [value]} if wrapped else [value]

    run = tool(metric=as_release(MI300X), static=as_release(STATIC), process=as_release(PROCESS))
    (reading,) = amd_smi.read_command(run)
    assert reading == Reading(
        index=0,
        name="AMD Instinct MI300X",
        source="amd-smi",
        id="0000:0c:00.0",
        memory_used_bytes=4096 << 20,
        memory_total_bytes=196592 << 20,
        utilisation=0.87,
        power_watts=512,
        temperature_c=61,
        clock_mhz=2104,
        memory_clock_mhz=1300,
        processes=(GpuProcess(77, "python", 2**30),),
    )


def test_what_the_tool_does_not_know_is_unknown_and_not_a_number() -> None:
    blank = {
        "gpu": 0,
        "usage": "N/A",
        "power": {"socket_power": {"value": 65535, "unit": "W"}, "average_socket_power": {"value": 31, "unit": "W"}},
        "clock": {"gfx_0": {"clk": {"value": 4294967295, "unit": "MHz"}}},
        "temperature": {"hotspot": {"value": 65535, "unit": "C"}, "edge": {"value": 40, "unit": "C"}},
        "mem_usage": {"used_vram": {"value": 12, "unit": "MB"}},
    }
    (reading,) = amd_smi.read_command(tool(metric=[blank]))
    assert (reading.power_watts, reading.temperature_c) == (31, 40)
    assert reading.clock_mhz is reading.utilisation is reading.name is reading.memory_total_bytes is None
    assert reading.processes is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["gpu", "gpu_data", "usage", "gfx_activity", "power", "socket_power", "value", "unit", "clock", "gfx_0", "clk",
         "mem_usage", "used_vram", "process_list", "process_info", "pid", "memory_usage", "vram_mem", "asic",
         "market_name", "card0", "GPU use (%)", "temperature", "hotspot"]), inner, max_size=5),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_garbage_is_refused_or_read_within_what_can_be_true(answer: Any) -> None:
    for read in (amd_smi.read_command, amd_smi.read_rocm_smi):
        try:
            readings = read(lambda words: answer)
        except (OSError, ValueError):
            continue
        for reading in readings:
            assert reading.utilisation is None or 0 <= reading.utilisation <= 1
            assert reading.power_watts is None or 0 <= reading.power_watts <= 10_000
            json.dumps(as_metrics(reading), allow_nan=False)


def test_rocm_smi_is_read_too() -> None:
    card = {
        "Card Series": "Radeon RX 6800 XT",
        "PCI Bus": "0000:2F:00.0",
        "VRAM Total Memory (B)": "17163091968",
        "VRAM Total Used Memory (B)": "1048576",
        "GPU use (%)": "3",
        "Average Graphics Package Power (W)": "35.5",
        "Temperature (Sensor edge) (C)": "45.0",
        "Temperature (Sensor junction) (C)": "48.0",
        "sclk clock speed:": "(2575Mhz)",
        "mclk clock speed:": "(1000Mhz)",
    }
    (reading,) = amd_smi.read_rocm_smi(lambda words: {"system": {"Driver version": "6.1"}, "card0": card})
    assert reading == Reading(
        0, "Radeon RX 6800 XT", "rocm-smi", "0000:2f:00.0", 2**20, 17163091968, 0.03, 35.5, 48, 2575, 1000
    )


def test_a_tool_that_prints_warnings_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match="not installed"):
        amd_smi.run_command(["stapes-no-such-tool"])
    script = tmp_path / "amd-smi"
    for body, outcome in (
        ("echo 'WARNING: user is not in group render'; echo '[{\"gpu\": 0}]'", [{"gpu": 0}]),
        ("echo no; exit 1", "no JSON"),
        ("exec sleep 60", "did not answer"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        if isinstance(outcome, list):
            assert amd_smi.run_command(["amd-smi"]) == outcome
        else:
            monkeypatch.setattr(amd_smi, "_PATIENCE", 0.3 if "sleep" in body else 10)
            with pytest.raises(OSError, match=outcome):
                amd_smi.run_command(["amd-smi"])


def smi_module(**functions: Any) -> Any:
    kinds = types.SimpleNamespace(HOTSPOT="hot", EDGE="edge", GFX="gfx", MEM="mem", CURRENT="now")
    return types.SimpleNamespace(
        amdsmi_get_processor_handles=lambda: ["handle"],
        AmdSmiTemperatureType=kinds,
        AmdSmiTemperatureMetric=kinds,
        AmdSmiClkType=kinds,
        **functions,
    )


def test_the_python_module_is_read_function_by_function() -> None:
    def refuses(handle: str) -> Any:
        raise RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")

    smi = smi_module(
        amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "Radeon RX 7900 XTX"},
        amdsmi_get_gpu_device_bdf=lambda handle: "0000:03:00.0",
        amdsmi_get_gpu_vram_usage=lambda handle: {"vram_total": 24560, "vram_used": 1024},
        amdsmi_get_gpu_activity=refuses,
        amdsmi_get_power_info=lambda handle: {"average_socket_power": 303, "current_socket_power": "N/A"},
        amdsmi_get_temp_metric=lambda handle, kind, metric: 71 if kind == "hot" else 60,
        amdsmi_get_clock_info=lambda handle, kind: {"clk": 2500} if kind == "gfx" else {"cur_clk": 1249},
        amdsmi_get_gpu_process_list=lambda handle: [{"name": "whisper", "pid": 5, "memory_usage": {"vram_mem": 7}}],
    )
    (reading,) = amd_smi.read_module(smi)
    assert reading.name == "Radeon RX 7900 XTX"
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (1024 << 20, 24560 << 20)
    assert (reading.power_watts, reading.temperature_c, reading.clock_mhz, reading.memory_clock_mhz) == (
        303,
        71,
        2500,
        1249,
    )
    assert reading.utilisation is None
    assert reading.processes == (GpuProcess(5, "whisper", 7),)


def sysfs(root: Path, card: str, **files: str) -> None:
    for name, content in {"vendor": "0x1002", **files}.items():
        path = root / card / "device" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def test_the_drivers_files_are_enough(tmp_path: Path) -> None:
    sysfs(
        tmp_path,
        "card1",
        mem_info_vram_used="1073741824",
        mem_info_vram_total="17163091968",
        gpu_busy_percent="42",
        uevent="DRIVER=amdgpu\nPCI_SLOT_NAME=0000:2f:00.0",
        pp_dpm_sclk="0: 500Mhz \n1: 2100Mhz *",
        pp_dpm_mclk="0: 96Mhz *\n1: 1000Mhz ",
        hwmon__hwmon3__power1_average="35000000",
        hwmon__hwmon3__temp1_input="45000",
        hwmon__hwmon3__temp1_label="edge",
        hwmon__hwmon3__temp2_input="51000",
        hwmon__hwmon3__temp2_label="junction",
        device="0x73bf",
    )
    sysfs(tmp_path, "card0", vendor="0x10de")  # another vendor's
    (tmp_path / "card1-DP-1").mkdir()
    (reading,) = amd_sysfs.read(tmp_path)
    assert reading == Reading(0, "AMD GPU 0x73bf", "sysfs", "0000:2f:00.0", 2**30, 17163091968, 0.42, 35, 51, 2100, 96)
    with pytest.raises(OSError, match="no AMD GPU"):
        amd_sysfs.read(tmp_path / "nowhere")


class FakeNvml:
    """Answers as NVML would for one GPU; ``without`` names functions that fail."""

    def __init__(self, *without: str) -> None:
        self.without = without

    def __getattr__(self, name: str) -> Any:
        if name in self.without:
            return lambda *arguments: 3  # not supported
        values = {"Count_v2": 1, "PowerUsage": 412_345, "Temperature": 55, "ClockInfo": 1980}
        texts = {"Name": b"NVIDIA H200", "UUID": b"GPU-1234"}
        what = name.removeprefix("nvmlDeviceGet")

        def call(*arguments: Any) -> int:
            target = getattr(arguments[-1], "_obj", None)
            if what in values:
                target.value = values[what]
            elif what in texts:
                arguments[1].value = texts[what]
            elif what == "MemoryInfo":
                target.total, target.used = 150 << 30, 30 << 30
            elif what == "UtilizationRates":
                target.gpu = 99
            elif what == "ComputeRunningProcesses_v3":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_uint)).contents.value = 1
                arguments[2][0].pid, arguments[2][0].memory = 2**30, 2**64 - 1
            return 0

        return call


def test_nvml_is_read_and_what_it_refuses_is_unknown() -> None:
    (reading,) = nvml.read(FakeNvml())
    assert reading == Reading(
        0, "NVIDIA H200", "nvml", "GPU-1234", 30 << 30, 150 << 30, 0.99, 412.345, 55, 1980, 1980, (GpuProcess(2**30),)
    )
    (poor,) = nvml.read(FakeNvml("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetName"))
    assert poor.power_watts is poor.utilisation is poor.name is None
    assert poor.memory_used_bytes == 30 << 30
    with pytest.raises(OSError, match="count"):
        nvml.read(FakeNvml("nvmlDeviceGetCount_v2"))


def test_sources_are_asked_in_turn_and_the_one_that_answered_stays() -> None:
    asked: list[str] = []
    alive = {"files": True}

    def source(name: str, answer: Any) -> Any:
        def read() -> list[Reading]:
            asked.append(name)
            if isinstance(answer, Exception) or not alive.get(name, True):
                raise answer if isinstance(answer, Exception) else OSError("gone")
            return answer

        return read

    watched = Monitor(
        amd={
            "module": source("module", KeyError("libamd_smi.so")),
            "tool": source("tool", [Reading(0, "GPU", "tool")]),  # told nothing at all
            "files": source("files", [Reading(0, "GPU", "files", power_watts=3)]),
            "old": source("old", [Reading(0, "GPU", "old", power_watts=4)]),
        },
        nvidia={"nvml": source("nvml", OSError("no library"))},
        fallback={"torch": source("torch", [Reading(0, "GPU", "torch")])},
    )
    assert [reading.source for reading in watched.gpus()] == ["files"]
    assert asked == ["module", "tool", "files", "nvml"]
    asked.clear()
    watched.gpus()
    assert asked == ["files"]  # neither what failed nor the vendor that is not there
    alive["files"] = False
    sample = watched.sample()
    assert [reading.source for reading in sample.gpus] == ["old"]
    assert "files stopped answering" in sample.notes[0]


def test_without_any_gpu_host_and_a_note_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> list[Reading]:
        raise OSError

    sample = Monitor({"a": nothing}, {"b": nothing}, {"c": nothing}).sample()
    assert sample.gpus == []
    assert "no GPU answers" in sample.notes[0]
    assert sample.host.memory_total_bytes == machine.memory_bytes()
    if sys.platform == "linux":
        assert sample.host.memory_used_bytes
        assert 0 < sample.host.memory_used_bytes < 1.01 * (machine.memory_bytes() or 0)


def test_a_process_finds_its_own_gpu_by_id_and_not_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_id", lambda index: "GPU-b")
    readings = [Reading(0, "H200", "nvml", id="GPU-a"), Reading(1, "H200", "nvml", id="GPU-b")]
    assert read_gpu(0, readings) is readings[1]
    monkeypatch.setattr(machine, "gpu_id", lambda index: None)
    assert read_gpu(0, readings) is None


def test_metrics_hold_what_is_known() -> None:
    reading = Reading(0, "GPU", "nvml", utilisation=0.5, power_watts=0.0, processes=())
    assert as_metrics(reading) == {"gpu_utilisation": 0.5, "gpu_power_watts": 0.0, "gpu_processes": 0.0}
    assert as_metrics(Reading(0, "GPU", "torch")) == {}


def test_numbers_and_sizes() -> None:
    assert [number(value) for value in ("12.5 W", "(800Mhz)", {"value": 3}, True, None, "N/A", float("nan"))] == [
        12.5, 800, 3, None, None, None, None,
    ]  # fmt: skip
    assert size({"value": 2, "unit": "MB"}) == 2 << 20
    assert size("3 GiB") == 3 << 30
    assert size(5, "mb") == 5 << 20
    assert size({"value": 1, "unit": "parsec"}) is None


def test_read_gpus_never_raises() -> None:
    assert isinstance(monitor.read_gpus(), list)
