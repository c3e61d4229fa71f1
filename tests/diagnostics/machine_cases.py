"""Machines whose drivers, rights, containers or settings are wrong, with what must be said of each."""

from __future__ import annotations

from dataclasses import replace

from machines import (
    CONTAINER,
    GIB,
    LINUX,
    Case,
    amd,
    cuda_torch,
    kfd,
    machine,
    nodes,
    nvidia,
    radeon,
    rocm_torch,
    strix,
)

from stapes.diagnostics.facts import DeviceNode, Facts, PciGpu, ToolOutput


def settings_of(**environment: str) -> Facts:
    return radeon(environment=environment)


MACHINE_CASES = [
    # Overrides of the architecture
    Case(
        "RX 6800 XT with an override that changes nothing",
        amd("gfx1030", "AMD Radeon RX 6800 XT", environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}),
        "warning",
        "HSA_OVERRIDE_GFX_VERSION makes every GPU claim to be gfx1030, which it is anyway",
        "unset HSA_OVERRIDE_GFX_VERSION",
    ),
    Case(
        "RX 6600 with an override of the same family",
        amd("gfx1032", "AMD Radeon RX 6600", environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}),
        "warning",
        "gfx1032 is of the same family",
        r"torch\[device-gfx1032\]",
    ),
    Case(
        "RX 6800 XT that pretends to be an RX 7900",
        amd("gfx1030", "AMD Radeon RX 6800 XT", environment={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),
        "problem",
        "claim to be gfx1100, but gfx1030 is of another family",
        "unset HSA_OVERRIDE_GFX_VERSION",
    ),
    Case(
        "an override that is no version",
        radeon(environment={"HSA_OVERRIDE_GFX_VERSION": "gfx1100"}),
        "problem",
        "'gfx1100', which is no version",
        "unset",
    ),
    Case(
        "an override of the second GPU alone",
        radeon(kfd=(kfd("gfx1100"), kfd("gfx1036", 2)), environment={"HSA_OVERRIDE_GFX_VERSION_1": "11.0.0"}),
        "problem",
        "gfx1036 is of another family",
        "unset HSA_OVERRIDE_GFX_VERSION_1",
    ),
    # Rights and containers
    Case(
        "container without rights to /dev/kfd",
        radeon(system=CONTAINER, nodes=nodes("EACCES", None, 993), torch=rocm_torch()),
        "problem",
        r"/dev/kfd and /dev/dri/renderD128 may not be opened: .*993",
        "--group-add 993",
    ),
    Case(
        "user outside the group render",
        radeon(nodes=nodes("EACCES"), torch=rocm_torch()),
        "problem",
        "may not be opened: it belongs to group render",
        r"usermod -aG render,video",
    ),
    Case(
        "container with its devices mounted as files",
        radeon(system=CONTAINER, nodes=nodes("EPERM"), torch=rocm_torch()),
        "problem",
        "the container's device rules forbid them",
        "--device /dev/kfd --device /dev/dri, not with -v",
    ),
    Case(
        "GPU that has fallen off the bus",
        radeon(nodes=nodes("ENODEV"), torch=rocm_torch()),
        "problem",
        "/dev/kfd .*ENODEV",
        "dmesg",
    ),
    Case(
        "container without devices",
        radeon(system=CONTAINER, nodes=(), torch=rocm_torch()),
        "problem",
        "/dev/kfd not there",
        "--device /dev/kfd --device /dev/dri",
    ),
    Case(
        "container with /dev/kfd alone",
        radeon(system=CONTAINER, nodes=nodes()[:1], torch=rocm_torch()),
        "problem",
        "no /dev/dri/renderD",
        "--device /dev/dri",
    ),
    Case(
        "container with a small /dev/shm",
        radeon(system=replace(CONTAINER, shared_memory_bytes=64 << 20)),
        "warning",
        "64 MiB",
        "--ipc=host or --shm-size",
    ),
    Case(
        "container whose cache goes with it",
        radeon(system=replace(CONTAINER, cache_is_temporary=True)),
        "warning",
        "goes with the container",
        "mount a volume",
    ),
    Case(
        "disk nearly full",
        machine(system=replace(LINUX, cache_free_bytes=200 << 20)),
        "problem",
        "0.2 GiB free",
        "XDG_CACHE_HOME",
    ),
    Case(
        "home that cannot be written to",
        machine(system=replace(LINUX, cache_is_writable=False)),
        "warning",
        "cannot be written to",
        "XDG_CACHE_HOME",
    ),
    # Drivers
    Case(
        "amdgpu not loaded",
        radeon(kfd=(), nodes=(), system=replace(LINUX, amdgpu_loaded=False), torch=rocm_torch()),
        "problem",
        "amdgpu driver is not loaded",
        "modprobe amdgpu",
    ),
    Case(
        "nomodeset",
        radeon(kfd=(), nodes=(), system=replace(LINUX, kernel_command_line=("nomodeset",)), torch=rocm_torch()),
        "problem",
        "nomodeset",
        "take nomodeset out",
    ),
    Case(
        "WSL with PyTorch for ROCm",
        machine(
            system=replace(LINUX, is_wsl=True, kernel="6.6.87.2-microsoft-standard-WSL2", amdgpu_loaded=False),
            nodes=(DeviceNode("/dev/dxg", True, 0, "root", "666"),),
            torch=rocm_torch(),
        ),
        "warning",
        "/dev/dxg, and PyTorch does not see it",
        "libhsa-runtime64",
    ),
    Case(
        "NVIDIA driver updated without a reboot",
        nvidia(
            nvidia_smi=ToolOutput(True, 18, "Failed to initialize NVML: Driver/library version mismatch"),
            torch=cuda_torch(),
        ),
        "problem",
        "old kernel module is still loaded",
        "reboot",
    ),
    Case(
        "NVIDIA driver older than the wheel",
        nvidia(system=replace(LINUX, nvidia_version="550.54.14"), torch=cuda_torch()),
        "problem",
        "550.54.14 is too old for PyTorch's CUDA 13.0, which needs 580",
        "update the driver",
    ),
    Case(
        "container without --gpus",
        nvidia(system=CONTAINER, nodes=(), nvidia_smi=ToolOutput(False), torch=cuda_torch()),
        "problem",
        "no /dev/nvidia0",
        "--gpus all",
    ),
    Case(
        "ROCm older than the wheel",
        radeon(system=replace(LINUX, rocm_version="6.4.1-83")),
        "warning",
        r"/opt/rocm is 6.4.1-83, older than the 7.2",
        "update ROCm to 7.2",
    ),
    Case(
        "Strix Halo on an old kernel",
        strix(system=replace(LINUX, kernel="6.14.0-27-generic")),
        "warning",
        "kernels before 6.18.4",
        "amdgpu.cwsr_enable=0",
    ),
    Case(
        "Strix Halo with the default share of memory",
        strix(system=replace(LINUX, memory_bytes=128 * GIB, gtt_bytes=64 * GIB)),
        "note",
        "64 of the system's 128 GiB",
        "ttm.pages_limit=285212",
    ),
    Case(
        "amd-smi that fails",
        radeon(amd_smi=ToolOutput(True, 255, "\x00\ufffd{]}", "AMDSMI_STATUS_DRIVER_NOT_LOADED")),
        "note",
        "AMDSMI_STATUS_DRIVER_NOT_LOADED",
        "update ROCm",
    ),
    Case(
        "processor's graphics in a container without them",
        machine(pci=(PciGpu("0000:7a:00.0", "amd", "0x164e", "amdgpu"),), system=CONTAINER),
        "warning",
        "in this docker container",
        "--device /dev/kfd",
    ),
    # Settings
    Case("hidden by ROCR", settings_of(ROCR_VISIBLE_DEVICES="-1"), "problem", "hides every GPU", "unset ROCR_VIS"),
    Case("hidden by HIP", settings_of(HIP_VISIBLE_DEVICES=""), "problem", "hides every GPU", "unset HIP_VIS"),
    Case("hidden by CUDA", settings_of(CUDA_VISIBLE_DEVICES=""), "problem", "hides every GPU", "unset CUDA_VIS"),
    Case("beyond the last", settings_of(HIP_VISIBLE_DEVICES="1"), "problem", "there are 1 GPUs", "set it to 0"),
    Case(
        "filtered twice",
        settings_of(ROCR_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0"),
        "note",
        "counted anew",
        "ROCR_VISIBLE_DEVICES alone",
    ),
    Case(
        "expandable segments",
        settings_of(PYTORCH_HIP_ALLOC_CONF="garbage_collection_threshold:0.8,expandable_segments:True"),
        "warning",
        "PYTORCH_HIP_ALLOC_CONF turns on expandable segments",
        "expandable_segments:False",
    ),
    Case("slow find", settings_of(MIOPEN_FIND_MODE="NORMAL"), "warning", "minutes at the first start", "stapes tune"),
    Case("search", settings_of(MIOPEN_FIND_ENFORCE="3"), "warning", "in every run", "after tuning"),
    Case("blocking", settings_of(HIP_LAUNCH_BLOCKING="1"), "warning", "debugging", "unset HIP_LAUNCH_BLOCKING"),
    Case("no DMA", settings_of(HSA_ENABLE_SDMA="0"), "note", "workaround for hanging", "unset"),
    Case("folklore", settings_of(HIPBLASLT_TUNING="1"), "note", "does nothing", "unset HIPBLASLT_TUNING"),
    Case(
        "graphics of the processor beside a card",
        radeon(kfd=(kfd("gfx1036"), kfd("gfx1100", 2))),
        "warning",
        "gfx1036 is visible beside gfx1100",
        "ROCR_VISIBLE_DEVICES=1",
    ),
]
