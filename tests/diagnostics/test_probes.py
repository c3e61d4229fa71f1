"""Probes: what they read from a made machine, from libraries that crash or fall back, and from garbage."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from stapes.diagnostics import children, machine_probes
from stapes.diagnostics.children import ChildResult, read_result, run_child
from stapes.diagnostics.engine_probes import (
    matmul_model,
    probe_ctranslate2,
    probe_onnx,
    probe_torch,
    probe_triton,
    read_onnx,
    read_torch,
    read_triton,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# The operating system


def test_a_made_machine(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/version": "Linux version 6.14.0-27-generic (buildd@host) (gcc)\n",
            "proc/sys/kernel/osrelease": "6.14.0-27-generic\n",
            "proc/cmdline": "root=UUID=secret quiet nomodeset amdgpu.cwsr_enable=0 ttm.pages_limit=1\n",
            "proc/meminfo": "MemFree: 1 kB\nMemTotal:       131072000 kB\n",
            "proc/sys/kernel/numa_balancing": "1\n",
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
            "sys/module/amdgpu/version": "6.12.12\n",
            "sys/module/amdgpu/parameters/cwsr_enable": "0\n",
            "sys/class/drm/card0/device/mem_info_gtt_total": "68719476736\n",
            "opt/rocm/.info/version": "6.4.1-83\n",
        },
    )
    system = machine_probes.probe_system({}, root)
    assert (system.os, system.kernel) == ("Ubuntu 24.04.3 LTS", "6.14.0-27-generic")
    assert system.kernel_command_line == ("nomodeset", "amdgpu.cwsr_enable=0", "ttm.pages_limit=1")
    assert system.memory_bytes == 131072000 * 1024
    assert (system.amdgpu_loaded, system.amdgpu_version, system.amdgpu_cwsr) == (True, "6.12.12", False)
    assert (system.gtt_bytes, system.rocm_version, system.numa_balancing) == (64 << 30, "6.4.1-83", True)
    assert (system.is_wsl, system.container, system.nvidia_version) == (False, None, None)


def test_an_empty_machine(tmp_path: Path) -> None:
    system = machine_probes.probe_system({}, tmp_path)
    assert system.kernel
    assert (system.memory_bytes, system.amdgpu_loaded, system.container) == (None, False, None)
    assert machine_probes.probe_pci(tmp_path) == machine_probes.probe_kfd(tmp_path) == ()
    assert machine_probes.probe_nodes(tmp_path) == ()


@pytest.mark.parametrize(
    ("files", "environment", "kind"),
    [
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"proc/1/cgroup": "12:cpu:/kubepods/besteffort/pod1"}, {}, "kubepods"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_CONTAINER": "/images/rocm.sif"}, "apptainer"),
        ({"proc/1/cgroup": "0::/init.scope"}, {}, None),
    ],
)
def test_containers(tmp_path: Path, files: dict[str, str], environment: dict[str, str], kind: str | None) -> None:
    assert machine_probes.probe_system(environment, write(tmp_path, files)).container == kind


def test_a_cache_on_the_container_s_own_disk_is_temporary(tmp_path: Path) -> None:
    mounts = f"1 0 0:1 / / rw - overlay overlay rw\n2 1 8:1 / {tmp_path}/volume rw - ext4 /dev/sda rw\ngarbage\n"
    write(tmp_path, {"proc/self/mountinfo": mounts, "volume/stapes/x": ""})
    for folder, temporary in ((tmp_path / "volume", False), (tmp_path, True)):
        system = machine_probes.probe_system({"XDG_CACHE_HOME": str(folder)}, tmp_path)
        assert system.cache_is_temporary is temporary


def test_wsl(tmp_path: Path) -> None:
    write(tmp_path, {"proc/version": "Linux version 6.6.87.2-microsoft-standard-WSL2"})
    assert machine_probes.probe_system({}, tmp_path).is_wsl


def test_pci(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices/"
    card, accelerator, network = (f"{devices}0000:0{number}:00.0/" for number in (1, 2, 3))
    write(
        tmp_path,
        {
            card + "class": "0x030000",
            card + "vendor": "0x1002",
            card + "device": "0x744c",
            accelerator + "class": "0x120000",
            accelerator + "vendor": "0x10de",
            network + "class": "0x020000",
            network + "vendor": "0x8086",
            f"{devices}0000:04:00.0/class": "\x00",
            "sys/bus/pci/drivers/amdgpu/bind": "",
        },
    )
    (tmp_path / card / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers/amdgpu")
    first, second = machine_probes.probe_pci(tmp_path)
    assert (first.vendor, first.device_id, first.driver) == ("amd", "0x744c", "amdgpu")
    assert (second.vendor, second.driver) == ("nvidia", None)


def test_device_files_and_the_right_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"dev/kfd": "", "dev/dri/renderD128": "", "dev/dri/card0": "", "dev/nvidia0": "", "dev/null": ""})
    refused, opened = tmp_path / "dev/kfd", os.open

    def open_but_one(path: Path, flags: int) -> int:
        if path == refused:  # root too, in a container whose rules forbid it
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return opened(path, flags)

    monkeypatch.setattr(os, "open", open_but_one)
    nodes = {node.path: node for node in machine_probes.probe_nodes(tmp_path)}
    monkeypatch.undo()
    assert set(nodes) == {"/dev/kfd", "/dev/dri/renderD128", "/dev/nvidia0"}
    assert (nodes["/dev/kfd"].usable, nodes["/dev/kfd"].refusal) == (False, "EPERM")
    assert nodes["/dev/dri/renderD128"].usable
    assert nodes["/dev/kfd"].group_id == refused.stat().st_gid


def test_only_gpu_variables_are_reported() -> None:
    environment = {
        "HSA_OVERRIDE_GFX_VERSION": "10.3.0",
        "MIOPEN_USER_DB_PATH": str(Path.home() / "miopen"),
        "CUDA_VISIBLE_DEVICES": "",
        "AMD_API_KEY": "x",
        "HF_TOKEN": "x",
        "USER": "someone",
        "PATH": "/usr/bin",
    }
    assert machine_probes.probe_environment(environment) == {
        "CUDA_VISIBLE_DEVICES": "",
        "HSA_OVERRIDE_GFX_VERSION": "10.3.0",
        "MIOPEN_USER_DB_PATH": "~/miopen",
    }


def test_tools_that_are_absent_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in {
        "good-smi": "echo MI300X",
        "bad-smi": "printf '\\377\\376'; echo broken >&2; exit 3",
        "slow-smi": "exec sleep 60",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "no-smi").write_text("\x7fELF of another machine")
    (tmp_path / "no-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine_probes, "_TOOL_SECONDS", 0.3)
    assert machine_probes.run_tool(["absent-smi"]).found is False
    good, bad, slow, no = (machine_probes.run_tool([f"{name}-smi"]) for name in ("good", "bad", "slow", "no"))
    assert (good.code, good.out) == (0, "MI300X")
    assert (bad.code, bad.error) == (3, "broken")
    assert (slow.code, "no answer" in slow.error) == (None, True)
    assert (no.found, no.code) == (True, None)


def test_packages_of_this_environment() -> None:
    packages = machine_probes.probe_packages()
    assert packages["torch"]
    assert "pytest" not in packages


# Processes of their own


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, timeout: float = 20) -> ChildResult:
    (tmp_path / "made_child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return run_child(["made_child"], timeout)


def test_what_a_child_wrote_before_it_crashed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys\nfrom stapes.diagnostics.children import emit\nprint('EP Error: noise on stdout')\n"
        "emit({'a': 1})\nprint('HW Exception by GPU node-1', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 11)\n"
    )
    result = child(tmp_path, monkeypatch, code)
    assert result.records == [{"a": 1}]
    assert result.failure == "crashed (SIGSEGV): HW Exception by GPU node-1"


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = child(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n", timeout=0.5)
    assert (result.records, result.failure) == ([], "no answer within 0 s")
    assert not children._running


def test_a_child_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = child(tmp_path, monkeypatch, "raise OSError('libamd_smi.so')\n")
    assert result.failure == "ended with exit code 1: OSError: libamd_smi.so"


def test_garbage_from_a_child() -> None:
    result = read_result('\x1e{"a": 1}\n\x1enot json\n\x1e[1]\n\x00\n\x1e{"cut', "", 0, 1)
    assert (result.records, result.failure) == ([{"a": 1}], None)
    for read in (read_torch, read_onnx, read_triton):
        assert read(ChildResult([], "", None)).failure == "said nothing"


# Engines


def test_pytorch_here() -> None:
    found = probe_torch()
    assert found.failure is None
    assert found.version
    processor = found.devices[0]
    assert (processor.name, processor.failure) == ("cpu", None)
    assert processor.parity
    assert all(result.passed for result in processor.parity)
    assert processor.attention


def test_a_crash_is_the_failure_of_the_device_that_was_tried() -> None:
    records = [
        {
            "version": "2.13.0+rocm7.2",
            "hip": "7.2",
            "is_available": True,
            "device_count": 2,
            "architectures": ["gfx1151"],
        },
        {"name": "cpu", "backend": "cpu"},
        {"name": "cuda:0", "backend": "rocm"},
        {"name": "cuda:0", "backend": "rocm", "label": "Radeon 8060S", "architecture": "gfx1151"},
    ]
    found = read_torch(ChildResult(records, "", "crashed (SIGSEGV)"))
    processor, gpu = found.devices
    assert (processor.failure, gpu.failure, gpu.label) == (None, "crashed (SIGSEGV)", "Radeon 8060S")
    assert found.failure is None


def test_a_pytorch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('undefined symbol: hsa_amd_enable_logging')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe_torch()
    assert found.version is None
    assert "hsa_amd_enable_logging" in (found.failure or "")


def test_onnx_runtime_here() -> None:
    pytest.importorskip("onnxruntime")
    found = probe_onnx(("onnxruntime",))
    assert [provider.name for provider in found.providers if provider.ran] == ["CPUExecutionProvider"]
    assert found.failure is None


FALLING_BACK = """
import numpy as np
__version__ = "1.27.1"
class SessionOptions: ...
def get_available_providers():
    return ["MIGraphXExecutionProvider", "ROCMExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]
class InferenceSession:
    def __init__(self, model, sess_options, providers, enable_fallback):
        assert enable_fallback == 0 and len(providers) == 1
        print("*************** EP Error ***************")
        if providers == ["ROCMExecutionProvider"]:
            raise RuntimeError("libmigraphx_c.so.3: cannot open shared object file\\nand more")
    def get_providers(self):
        return ["CPUExecutionProvider"]
    def run(self, outputs, inputs):
        return [inputs["a"] @ inputs["b"]]
"""


def test_a_session_that_fell_back_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text(FALLING_BACK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    migraphx, rocm, processor = probe_onnx(("onnxruntime-migraphx",)).providers
    assert (migraphx.ran, migraphx.session_providers) == (False, ("CPUExecutionProvider",))
    assert migraphx.failure == "the session runs on CPUExecutionProvider instead"
    assert (rocm.ran, "libmigraphx_c.so.3" in (rocm.failure or "")) == (False, True)
    assert processor.ran


def test_the_model_is_what_onnx_reads() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(matmul_model(8), providers=["CPUExecutionProvider"])
    assert [tensor.shape for tensor in session.get_inputs()] == [[8, 8], [8, 8]]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_triton_is_asked_for_each_architecture() -> None:
    pytest.importorskip("triton")
    found = probe_triton(("gfx1100", "gfx1399"))
    assert found.version
    assert found.compiled["gfx1100"] is None
    assert found.compiled["gfx1399"]


def test_ctranslate2_that_raises_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ctranslate2.py").write_text("raise KeyError('libamd_smi.so')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe_ctranslate2()
    assert (found.version, found.failure) == (None, "KeyError: 'libamd_smi.so'")
