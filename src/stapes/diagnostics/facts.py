"""What ``stapes doctor`` knows of a machine, as plain data: probes fill it in, findings are drawn from it.

Everything has a value for "unknown", so that a probe that fails takes nothing else with it; its reason is kept in
``Facts.failures``. Tests build these by hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from stapes.devices.kfd import KfdGpu
from stapes.devices.readings import Reading


@dataclass(frozen=True)
class PciGpu:
    """A display controller or accelerator on the PCI bus. ``driver``: the kernel's, None where none holds it."""

    address: str
    vendor: Literal["amd", "nvidia", "intel", "other"]
    device_id: str
    driver: str | None


@dataclass(frozen=True)
class DeviceNode:
    """A device file that a GPU is used through. ``usable``: this process can open it to read and write.

    ``refusal``: the system's error where it cannot; ``EPERM`` is a container's device rules, ``EACCES`` the file's
    own rights.
    """

    path: str
    usable: bool
    group_id: int
    group: str | None
    mode: str
    refusal: str | None = None


@dataclass(frozen=True)
class ToolOutput:
    """What a vendor's tool printed. ``code``: its exit code, None where it did not start or did not end in time."""

    found: bool
    code: int | None = None
    out: str = ""
    error: str = ""


@dataclass(frozen=True)
class System:
    """The operating system and what it grants. Sizes in bytes; None is unknown."""

    os: str = "Linux"
    kernel: str = ""
    python: str = ""
    is_wsl: bool = False
    container: str | None = None
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None
    cache_folder: str = "~/.cache/stapes"
    cache_free_bytes: int | None = None
    cache_is_writable: bool = True
    cache_is_temporary: bool = False
    gtt_bytes: int | None = None
    """Most of the system's memory that an AMD GPU without its own may use."""
    kernel_command_line: tuple[str, ...] = ()
    numa_balancing: bool | None = None
    user_id: int = 0
    groups: tuple[int, ...] = ()
    amdgpu_loaded: bool = False
    amdgpu_version: str | None = None
    amdgpu_cwsr: bool | None = None
    nvidia_version: str | None = None
    rocm_version: str | None = None
    """Of ROCm in /opt/rocm; wheels mostly bring their own."""


@dataclass(frozen=True)
class Parity:
    """One self-test of ``devices.rocm.check_parity``, with the seconds that a second run took."""

    name: str
    passed: bool
    error: float | None = None
    seconds: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class TorchDevice:
    """What PyTorch says of one device, and what came out when it was tried. ``failure``: why it could not be."""

    name: str
    backend: Literal["rocm", "cuda", "cpu"]
    index: int | None = None
    label: str = ""
    architecture: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    attention: str | None = None
    attention_refused: dict[str, str] = field(default_factory=dict)
    parity: tuple[Parity, ...] = ()
    graphs: tuple[bool, str] | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Torch:
    """PyTorch: its build and what it sees. ``failure``: why it cannot be imported, or how its process ended."""

    version: str | None = None
    hip: str | None = None
    cuda: str | None = None
    is_available: bool = False
    device_count: int = 0
    architectures: tuple[str, ...] = ()
    """That the build has kernels for."""
    devices: tuple[TorchDevice, ...] = ()
    said: str = ""
    """Its warnings while it looked for GPUs."""
    failure: str | None = None


@dataclass(frozen=True)
class OnnxProvider:
    """An execution provider that ONNX Runtime offers, tried with a small model and no fallback."""

    name: str
    ran: bool
    session_providers: tuple[str, ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class Onnx:
    """ONNX Runtime. ``distributions``: pip packages of it that are installed; several overwrite each other."""

    version: str | None = None
    distributions: tuple[str, ...] = ()
    providers: tuple[OnnxProvider, ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class Triton:
    """Triton. ``compiled``: architecture → None where a kernel compiles for it, else why not."""

    version: str | None = None
    compiled: dict[str, str | None] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class CTranslate2:
    """CTranslate2, which faster-whisper runs on. ``gpus``: that it can use."""

    version: str | None = None
    gpus: int | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that is known. ``environment``: only the variables that GPU libraries read."""

    system: System = field(default_factory=System)
    environment: dict[str, str] = field(default_factory=dict)
    pci: tuple[PciGpu, ...] = ()
    kfd: tuple[KfdGpu, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    """/dev/kfd, /dev/dri/renderD*, /dev/dxg, /dev/nvidia* that exist."""
    amd_smi: ToolOutput = field(default_factory=lambda: ToolOutput(False))
    nvidia_smi: ToolOutput = field(default_factory=lambda: ToolOutput(False))
    readings: tuple[Reading, ...] = ()
    """What NVML, amd-smi or the driver's files tell; without the programs that use the GPU."""
    rocm_bootstrap: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    torch: Torch | None = None
    onnx: Onnx | None = None
    triton: Triton | None = None
    ctranslate2: CTranslate2 | None = None
    models: tuple[str, ...] = ()
    """Names of models on this machine, smallest first."""
    failures: dict[str, str] = field(default_factory=dict)
    """Probe → why it told nothing."""

    @property
    def own_pci(self) -> tuple[PciGpu, ...]:
        """GPUs on the bus that are not handed to virtual machines."""
        return tuple(gpu for gpu in self.pci if gpu.driver != "vfio-pci")

    @property
    def has_amd(self) -> bool:
        """Whether an AMD GPU is in the machine, usable or not."""
        seen = bool(self.kfd) or any(gpu.vendor == "amd" for gpu in self.own_pci)
        return seen or any(device.backend == "rocm" for device in self.devices)

    @property
    def has_nvidia(self) -> bool:
        """Whether an NVIDIA GPU is in the machine, usable or not."""
        seen = any(gpu.vendor == "nvidia" for gpu in self.own_pci) or self.system.nvidia_version is not None
        seen = seen or any(node.path.startswith("/dev/nvidia") for node in self.nodes)
        seen = seen or any(reading.source == "nvml" for reading in self.readings)
        return seen or any(device.backend == "cuda" for device in self.devices)

    @property
    def devices(self) -> tuple[TorchDevice, ...]:
        """What PyTorch sees."""
        return self.torch.devices if self.torch is not None else ()

    @property
    def amd_architectures(self) -> tuple[str, ...]:
        """As the kernel says, which no override changes; weak graphics inside processors come last."""
        found = [gpu.architecture for gpu in self.kfd]
        return tuple(dict.fromkeys(sorted(found, key=lambda name: name in WEAK_GRAPHICS)))

    @property
    def amd_target(self) -> str | None:
        """The architecture that one would use; None where it is not known."""
        return self.amd_architectures[0] if self.amd_architectures else None

    def node(self, path: str) -> DeviceNode | None:
        """A device file, where it exists."""
        return next((node for node in self.nodes if node.path == path), None)


WEAK_GRAPHICS = frozenset({"gfx902", "gfx909", "gfx90c", "gfx1033", "gfx1035", "gfx1036", "gfx1037"})
"""Graphics inside processors that ROCm has no kernels for. Left visible, they make some libraries crash."""


def numbers(text: str | None) -> tuple[int, ...]:
    """The leading version number in a text: ``7.2.1-abc`` → (7, 2, 1); () where there is none."""
    found = re.match(r"\D{0,8}(\d+(?:\.\d+)*)", text or "")
    return tuple(int(part) for part in found[1].split(".")) if found else ()
