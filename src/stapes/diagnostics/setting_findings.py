"""What environment variables do to a GPU: those that hide, pretend, slow down, or do nothing at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stapes.devices.rocm import ALLOCATOR_VARIABLES
from stapes.diagnostics.facts import Facts
from stapes.diagnostics.findings import Finding

_HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")

_DEBUGGING = {
    "AMD_SERIALIZE_KERNEL": "kernels wait for each other",
    "AMD_SERIALIZE_COPY": "copies wait for each other",
    "HIP_LAUNCH_BLOCKING": "every kernel is waited for",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "every tensor is allocated by the driver",
    "AMD_LOG_LEVEL": "every call is logged",
    "MIOPEN_ENABLE_LOGGING": "every convolution is logged",
    "HSA_ENABLE_INTERRUPT": "a processor core spins while it waits",
}
"""Left over from a search for a bug, these make everything slow."""

_USELESS = {
    "HIPBLASLT_TUNING": "no library reads it; `stapes tune`, or HIPBLASLT_TUNING_OVERRIDE_FILE, is what tunes",
    "HCC_AMDGPU_TARGET": "it belongs to a compiler that is gone; builds read PYTORCH_ROCM_ARCH",
}


def setting_findings(facts: Facts) -> Iterator[Finding]:
    """Everything that the environment changes."""
    yield from _overrides(facts)
    yield from _hidden_gpus(facts)
    if facts.has_amd:
        yield from _amd_settings(facts)
    for name, effect in _DEBUGGING.items():
        value = facts.environment.get(name)
        if value not in (None, "", "0") or (name == "HSA_ENABLE_INTERRUPT" and value == "0"):
            yield Finding("warning", name, f"is {value}: {effect}, which is for debugging", f"unset {name}")


def _overrides(facts: Facts) -> Iterator[Finding]:
    """HSA_OVERRIDE_GFX_VERSION, and its form for one GPU, HSA_OVERRIDE_GFX_VERSION_0."""
    for name, value in facts.environment.items():
        found = re.fullmatch(r"HSA_OVERRIDE_GFX_VERSION(?:_(\d+))?", name)
        if not found:
            continue
        version = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value.strip())
        if version is None:
            yield Finding(
                "problem",
                name,
                f"is {value!r}, which is no version such as 10.3.0: ROCm's runtime refuses to start",
                f"unset {name}",
            )
            continue
        major, minor, stepping = (int(part) for part in version.groups())
        pretended = f"gfx{major}{minor:x}{stepping:x}"
        architectures = [gpu.architecture for gpu in facts.kfd]
        if found[1] is not None:
            architectures = architectures[int(found[1]) : int(found[1]) + 1]
        yield from _override(name, pretended, architectures, facts)


def _override(name: str, pretended: str, architectures: list[str], facts: Facts) -> Iterator[Finding]:
    does = f"makes every GPU claim to be {pretended}"
    if not architectures:
        level = "warning" if facts.has_amd else "note"
        yield Finding(level, name, f"{does}; which GPU is here is not known", f"unset {name} and try without")
        return
    foreign = [real for real in dict.fromkeys(architectures) if real[:-1] != pretended[:-1]]
    same = [real for real in dict.fromkeys(architectures) if real == pretended]
    if foreign:
        wanted = facts.amd_target if facts.amd_target in foreign else foreign[0]
        yield Finding(
            "problem",
            name,
            f"{does}, but {' and '.join(foreign)} is of another family: its kernels contain instructions that this GPU "
            "does not have, and crash it or hang the desktop",
            f"unset {name} and install PyTorch for {wanted}: AMD's wheels `torch[device-{wanted}]`",
        )
    elif len(same) == len(dict.fromkeys(architectures)):
        yield Finding(
            "warning",
            name,
            f"{does}, which it is anyway: it does nothing now, and harm after the next change of GPU or wheel",
            f"unset {name}",
        )
    else:
        yield Finding(
            "warning",
            name,
            f"{does}; {', '.join(dict.fromkeys(architectures))} is of the same family, so that it mostly works, "
            "unsupported and with wrong sizes for some kernels",
            f"better: unset {name} and install AMD's wheels for the real one, `torch[device-{architectures[0]}]`",
        )


def _hidden_gpus(facts: Facts) -> Iterator[Finding]:
    """Lists that leave no GPU, or that filter twice."""
    count = {"amd": len(facts.kfd), "nvidia": sum(gpu.vendor == "nvidia" for gpu in facts.pci)}
    if not facts.has_amd and not facts.has_nvidia:
        return
    set_here = {name: facts.environment[name] for name in _HIDING if name in facts.environment}
    for name, value in set_here.items():
        if name != "CUDA_VISIBLE_DEVICES" and not facts.has_amd:
            continue
        known = count["amd"] if facts.has_amd else count["nvidia"]
        indices = [item.strip() for item in value.split(",")]
        # The first entry that means nothing ends the list.
        beyond = indices[0].isdecimal() and known > 0 and int(indices[0]) >= known
        if value.strip() in {"", "-1", "none", "None", "NoDevFiles"} or beyond:
            why = f"is {value!r}, and there are {known} GPUs, counted from 0" if beyond else f"is {value!r}"
            yield Finding("problem", name, f"{why}: it hides every GPU", f"unset {name}, or set it to 0")
    if facts.has_amd and "ROCR_VISIBLE_DEVICES" in set_here and len(set_here) > 1:
        others = " and ".join(name for name in set_here if name != "ROCR_VISIBLE_DEVICES")
        yield Finding(
            "note",
            others,
            "choose among what ROCR_VISIBLE_DEVICES has left, counted anew from 0: two filters, one after the other",
            "set ROCR_VISIBLE_DEVICES alone on Linux (HIP_VISIBLE_DEVICES alone on Windows)",
        )


def _amd_settings(facts: Facts) -> Iterator[Finding]:
    environment = facts.environment
    for name in ALLOCATOR_VARIABLES:
        if re.search(r"expandable_segments\s*:\s*true", environment.get(name, ""), re.IGNORECASE):
            yield Finding(
                "warning",
                name,
                "turns on expandable segments, which hang in the first copy to the GPU on some ROCm versions "
                "(pytorch #192259)",
                f"unset {name}, or set expandable_segments:False",
            )
    mode = environment.get("MIOPEN_FIND_MODE")
    if mode is not None and mode.upper() not in {"FAST", "2"}:
        yield Finding(
            "warning",
            "MIOPEN_FIND_MODE",
            f"is {mode}: MIOpen compiles and times kernels for every new length, minutes at the first start (pytorch "
            "#179795)",
            "unset it: stapes sets FAST; `stapes tune` finds the fastest kernels once, and keeps them",
        )
    enforce = environment.get("MIOPEN_FIND_ENFORCE")
    if enforce is not None and enforce.upper() not in {"NONE", "1", ""}:
        yield Finding(
            "warning",
            "MIOPEN_FIND_ENFORCE",
            f"is {enforce}: MIOpen searches through kernels in every run",
            "unset it after tuning",
        )
    if environment.get("MIOPEN_DISABLE_CACHE") not in (None, "", "0"):
        yield Finding(
            "warning",
            "MIOPEN_DISABLE_CACHE",
            "is set: every process compiles its convolutions anew",
            "unset MIOPEN_DISABLE_CACHE",
        )
    if environment.get("HSA_ENABLE_SDMA") == "0":
        yield Finding(
            "note",
            "HSA_ENABLE_SDMA",
            "is 0: copies to and from the GPU are made by its compute units, slower; it is a workaround for hanging "
            "copies, no tuning",
            "unset it unless copies hang without",
        )
    for name, why in _USELESS.items():
        if name in environment:
            yield Finding("note", name, f"is set and does nothing: {why}", f"unset {name}")
    for name in sorted(set(environment) & {"HSA_XNACK", "GPU_MAX_HW_QUEUES", "ROCBLAS_TENSILE_LIBPATH"}):
        yield Finding("note", name, f"is {environment[name]}: kept as you set it")
