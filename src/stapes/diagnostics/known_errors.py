"""Error texts of GPU libraries, with their causes and fixes: each from a thread where users lost hours to it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """An error that we recognise. ``pattern``: found anywhere in its text."""

    pattern: re.Pattern[str]
    cause: str
    fix: str


def _known(pattern: str, cause: str, fix: str) -> KnownError:
    return KnownError(re.compile(pattern, re.IGNORECASE), cause, fix)


KNOWN_ERRORS = (
    _known(
        r"undefined symbol: (hsa_|hip|rocprofiler|amd_)|hsa_amd_enable_logging",
        "the ROCm libraries of this machine are older than those the package was built with (faster-whisper #1370)",
        "update ROCm to the version in the package's name or newer, or take LD_LIBRARY_PATH=/opt/rocm/lib out of the "
        "environment so that the package's own libraries are found",
    ),
    _known(
        r"invalid device function|no kernel image|NoBinaryForGpu|ErrorInvalidKernelFile|shared object initialization",
        "the package has no kernels for this GPU's architecture (whisperX #566)",
        "install a PyTorch that was built for it: its architectures are listed under PyTorch in this report",
    ),
    _known(
        r"miopenStatusUnknownError|MIOpen Error",
        "MIOpen failed in an operation that it should have (pytorch #189618)",
        "set torch.backends.cudnn.enabled = False for models with LSTMs, so that PyTorch's own kernels run; stapes' "
        "models have none",
    ),
    _known(
        r"hiprand",
        "MIOpen wants to compile dropout at run time and ROCm's headers are not here (pyannote #1995)",
        "install ROCm's development package, or set dropout to 0 when only transcribing",
    ),
    _known(
        r"libmigraphx|libamdhip64\.so|libhiprtc|libMIOpen|librocblas",
        "the package needs a ROCm installed on the system, of its own version, and does not find it",
        "install ROCm (with migraphx for ONNX Runtime) system-wide and let LD_LIBRARY_PATH contain /opt/rocm/lib",
    ),
    _known(
        r"libcublas|libcudnn|libcudart|libcufft|libnvinfer",
        "the package needs NVIDIA's CUDA libraries and does not find them",
        "install NVIDIA's runtime wheels of the same CUDA version, or a package that brings them",
    ),
    _known(
        r"libcuda\.so|Found no NVIDIA driver|CUDA_ERROR_NO_DEVICE|no CUDA-capable device",
        "the package was built for NVIDIA GPUs, and there is no NVIDIA driver here",
        "on an AMD GPU install the package's ROCm build; on NVIDIA install the driver or start the container with "
        "--gpus all",
    ),
    _known(
        r"driver.{0,40}(too old|insufficient)|forward compatibility|unsupported PTX|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "NVIDIA's driver is older than the CUDA that the package was built with",
        "update the driver, or install PyTorch for an older CUDA",
    ),
    _known(
        r"Driver/library version mismatch",
        "NVIDIA's driver was updated and its old kernel module is still loaded",
        "reboot (or unload and load the nvidia module)",
    ),
    _known(
        r"(kfd|renderD\d+).{0,80}(permission denied|not permitted)|(unable|failed) to open /dev/kfd|hsa_init failed",
        "this user may not open /dev/kfd or /dev/dri/renderD…",
        "join the groups that own them: sudo usermod -aG render,video $USER, then log in again",
    ),
    _known(
        r"GPU Hang|HW Exception|MES failed|queue eviction",
        "the GPU hung: on gfx1030, gfx1032, gfx1103 and gfx1151 older kernels save too few registers when they switch "
        "(ROCm/TheRock #2151)",
        "use Linux 6.18.4 or newer with ROCm 7.2 or newer; until then boot with amdgpu.cwsr_enable=0",
    ),
    _known(
        r"Memory access fault by GPU|page not present",
        "a GPU kernel touched memory that is not its own: most often kernels for another architecture "
        "(HSA_OVERRIDE_GFX_VERSION), or a bug of a library for this GPU",
        "unset HSA_OVERRIDE_GFX_VERSION; update ROCm and PyTorch",
    ),
    _known(
        r"out of memory|OutOfMemory|HIP_ERROR_OutOfMemory",
        "there was not enough free GPU memory",
        "end other programs on the GPU (`stapes monitor` shows them), or take a smaller model or --max-vram",
    ),
    _known(
        r"GLIBC(XX)?_\d",
        "the package was built for a newer Linux than this one",
        "use a newer distribution or a container, or an older version of the package",
    ),
    _known(
        r"SIGILL|illegal instruction",
        "the package uses instructions that this processor does not have",
        "install a build for older processors",
    ),
    _known(
        r"numpy\.core\.multiarray failed|compiled using NumPy 1|_ARRAY_API",
        "the package was built for NumPy 1 and NumPy 2 is installed",
        "update the package, or pip install 'numpy<2'",
    ),
    _known(
        r"not linked with support for hip",
        "the device was called 'hip': PyTorch calls AMD's GPUs 'cuda' too",
        "write device='cuda' in Python; stapes takes --device rocm or hip as well",
    ),
)


def explain(text: str | None) -> KnownError | None:
    """The first known error that a text contains."""
    return next((known for known in KNOWN_ERRORS if text and known.pattern.search(text)), None)
