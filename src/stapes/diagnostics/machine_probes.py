"""What the operating system tells of a machine and its GPUs, without any GPU library.

Each probe reads below ``root``, so that tests can give it a made machine, and takes what is missing as unknown.
"""

from __future__ import annotations

import errno
import grp
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

from stapes.devices.kfd import KfdGpu, read_gpus
from stapes.devices.monitor import Monitor
from stapes.devices.readings import Reading
from stapes.diagnostics.facts import DeviceNode, PciGpu, System, ToolOutput

ROOT = Path("/")
_TOOL_SECONDS = 15.0

_VENDORS = {"0x1002": "amd", "0x10de": "nvidia", "0x8086": "intel"}

_VARIABLE = re.compile(
    r"(HSA|HIP|ROCR|ROCM|MIOPEN|HIPBLASLT|ROCBLAS|AMD|PYTORCH|TORCH|CUDA|NVIDIA_VISIBLE|GPU|HCC|ORT|CT2|NCCL|RCCL|"
    r"TRITON|FLASH_ATTENTION|OMP|MKL)_\w+"
)
_GPU_BOOT_OPTION = re.compile(r"nomodeset|amdgpu\.|ttm\.|amd_iommu|iommu=|modprobe\.blacklist=|nouveau\.")

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL")

_PACKAGE = re.compile(
    r"(torch|torchaudio|triton\S*|pytorch-triton\S*|onnxruntime\S*|ctranslate2|faster-whisper|amdsmi|rocm\S*|"
    r"amd-torch\S*|cuda-(python|bindings)|nvidia-cu\S*|flash-attn|bitsandbytes|vllm|numpy|stapes|silero-vad)"
)


def probe_system(environment: Mapping[str, str], root: Path = ROOT) -> System:
    """Kernel, container, memory, caches, drivers and their settings."""
    version = _read(root / "proc/version") or ""
    modules = root / "sys/module"
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stapes"
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    gtt = [_number(path) for path in root.glob("sys/class/drm/card*/device/mem_info_gtt_total")]
    cwsr = _read(modules / "amdgpu/parameters/cwsr_enable")
    balancing = _read(root / "proc/sys/kernel/numa_balancing")
    return System(
        os=_os_name(root),
        kernel=_read(root / "proc/sys/kernel/osrelease") or platform.release(),
        python=platform.python_version(),
        is_wsl="microsoft" in version.lower(),
        container=_container(environment, root),
        memory_bytes=_memory(root),
        shared_memory_bytes=_size(root / "dev/shm"),
        cache_folder=_without_home(cache),
        cache_free_bytes=_free(existing),
        cache_is_writable=os.access(existing, os.W_OK),
        cache_is_temporary=_file_system(existing, root) in {"overlay", "tmpfs", "ramfs"},
        gtt_bytes=max((size for size in gtt if size), default=None),
        kernel_command_line=tuple(
            word for word in (_read(root / "proc/cmdline") or "").split() if _GPU_BOOT_OPTION.match(word)
        ),
        numa_balancing=balancing != "0" if balancing else None,
        user_id=os.getuid(),
        groups=tuple(sorted({os.getgid(), *os.getgroups()})),
        amdgpu_loaded=(modules / "amdgpu").is_dir(),
        amdgpu_version=_read(modules / "amdgpu/version"),
        amdgpu_cwsr=cwsr != "0" if cwsr else None,
        nvidia_version=_read(modules / "nvidia/version"),
        rocm_version=_read(root / "opt/rocm/.info/version"),
    )


def probe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that GPU libraries read, and no others: a report is meant to be shown around."""
    return {
        name: _without_home(Path(value)) if value.startswith("/") else value
        for name, value in sorted(environment.items())
        if _VARIABLE.fullmatch(name) and not _SECRET.search(name)
    }


def probe_pci(root: Path = ROOT) -> tuple[PciGpu, ...]:
    """Display controllers (class 03) and processing accelerators (class 12) on the PCI bus."""
    found = []
    devices = root / "sys/bus/pci/devices"
    for folder in sorted(devices.iterdir()) if devices.is_dir() else []:
        if (_read(folder / "class") or "")[:4] not in {"0x03", "0x12"}:
            continue
        vendor = _VENDORS.get((_read(folder / "vendor") or "").lower(), "other")
        driver = folder / "driver"
        name = driver.resolve().name if driver.exists() else None
        found.append(PciGpu(folder.name, vendor, _read(folder / "device") or "", name))  # type: ignore[arg-type]
    return tuple(found)


def probe_kfd(root: Path = ROOT) -> tuple[KfdGpu, ...]:
    """The kernel's own list of AMD GPUs."""
    return tuple(read_gpus(root / "sys/class/kfd/kfd/topology/nodes"))


def probe_nodes(root: Path = ROOT) -> tuple[DeviceNode, ...]:
    """The device files of GPUs, who may use them, and whether that is us."""
    device = root / "dev"
    paths = [device / "kfd", *sorted(device.glob("dri/renderD*")), device / "dxg", *sorted(device.glob("nvidia[0-9]*"))]
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        try:
            group = grp.getgrgid(status.st_gid).gr_name
        except KeyError:  # a number of the host's that has no name here
            group = None
        name = "/" + str(path.relative_to(root))
        refusal = _refusal(path)
        found.append(DeviceNode(name, refusal is None, status.st_gid, group, oct(status.st_mode & 0o777)[2:], refusal))
    return tuple(found)


def probe_packages() -> dict[str, str]:
    """Versions of the Python packages that matter to a GPU."""
    found = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _PACKAGE.fullmatch(name):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def probe_readings() -> tuple[Reading, ...]:
    """Names and memory of GPUs, from what `stapes monitor` reads; never through PyTorch, which is asked elsewhere."""
    found = Monitor(fallback={"nothing": list}).gpus()
    return tuple(replace(reading, processes=None) for reading in found)


def probe_rocm_bootstrap() -> str | None:
    """What AMD's rocm-bootstrap detects, where it is installed: a second opinion on the kernel's list."""
    try:
        import rocm_bootstrap  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return str(rocm_bootstrap.detect_gpus())[:500]


def run_tool(words: list[str]) -> ToolOutput:
    """Run a vendor's tool for a short time and keep what it says."""
    path = shutil.which(words[0])
    if path is None:
        return ToolOutput(False)
    try:
        done = subprocess.run(  # noqa: S603
            [path, *words[1:]], capture_output=True, timeout=_TOOL_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return ToolOutput(True, None, "", f"no answer within {_TOOL_SECONDS:.0f} s")
    except OSError as error:
        return ToolOutput(True, None, "", str(error))
    out, error = (text.decode(errors="replace").strip()[:20_000] for text in (done.stdout, done.stderr))
    return ToolOutput(True, done.returncode, out, error)


def _refusal(path: Path) -> str | None:
    """Why a device file cannot be opened. Its rights alone do not tell: a container may forbid it to root too."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return None


def _container(environment: Mapping[str, str], root: Path) -> str | None:
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if environment.get(name):
            return "apptainer"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    found = re.search(r"docker|kubepods|containerd|lxc|podman", _read(root / "proc/1/cgroup") or "")
    return found[0] if found else environment.get("container") or None


def _memory(root: Path) -> int | None:
    limits = [_number(root / "sys/fs/cgroup/memory.max")]
    found = re.search(r"^MemTotal:\s+(\d+)", _read(root / "proc/meminfo") or "", re.MULTILINE)
    limits.append(int(found[1]) * 1024 if found else None)
    return min((limit for limit in limits if limit), default=None)


def _file_system(path: Path, root: Path) -> str | None:
    """The kind of file system that a path is on, from the longest mount point above it."""
    best = ("", None)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4:5]
        if point and rest and path.is_relative_to(point[0]) and len(point[0]) > len(best[0]):
            best = (point[0], rest.split()[0])
    return best[1]


def _os_name(root: Path) -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', _read(root / "etc/os-release") or "", re.MULTILINE)
    return found[1] if found else platform.system()


def _size(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _without_home(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path != home and path.is_relative_to(home) else str(path)


def _number(path: Path) -> int | None:
    text = _read(path) or ""
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
