"""What PyTorch makes of this machine: the right build, GPUs it sees, and what came out when each was tried."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stapes.diagnostics.facts import WEAK_GRAPHICS, Facts, Torch, TorchDevice, numbers
from stapes.diagnostics.findings import Finding
from stapes.diagnostics.known_errors import explain

_DRIVER_FOR_CUDA = {13: 580, 12: 525, 11: 450}
"""NVIDIA's oldest driver for each CUDA, by minor version compatibility."""

_REGISTER_HANGS = {"gfx1030", "gfx1032", "gfx1103", "gfx1151"}


def rocm_wheel(architecture: str | None) -> str:
    """How to install PyTorch for an AMD GPU."""
    target = architecture or "gfxNNNN"
    uv = "pip install uv && uv pip install --reinstall-package torch torch --torch-backend=rocm7.2"
    if architecture in {"gfx1031", "gfx1032", "gfx1034", "gfx1103", "gfx1152", "gfx1153"}:  # not in pytorch.org's
        return f"install AMD's wheels for it, `torch[device-{target}]` (rocm.docs.amd.com)"
    return f"{uv}; or AMD's wheels `torch[device-{target}]` (rocm.docs.amd.com)"


def torch_findings(facts: Facts) -> Iterator[Finding]:
    """PyTorch and each of its devices."""
    torch = facts.torch
    if torch is None:
        return
    if torch.version is None:
        known = explain(torch.failure)
        cause = f"{known.cause} ({torch.failure})" if known else f"cannot be used: {torch.failure}"
        yield Finding("problem", "PyTorch", cause, known.fix if known else "install PyTorch anew: see README")
        return
    built = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "the CPU"
    yield Finding("ok", "PyTorch", f"{torch.version}, built for {built}")
    if numbers(torch.version) < (2, 11):
        yield Finding("problem", "PyTorch", f"{torch.version} is too old", "pip install -U 'torch>=2.11'")
    gpus = [device for device in torch.devices if device.backend != "cpu"]
    if not gpus:
        yield from _no_gpu(facts, torch)
    elif torch.failure:
        yield Finding(
            "problem", "PyTorch", f"failed while it looked for GPUs: {torch.failure}", "see the findings above"
        )
    if torch.hip:
        yield from _rocm_versions(facts, torch)
    for device in torch.devices:
        yield from _device(facts, torch, device)


def _no_gpu(facts: Facts, torch: Torch) -> Iterator[Finding]:
    """PyTorch sees no GPU: is there one, and whose fault is it?"""
    amd = [name for name in facts.amd_architectures if name not in WEAK_GRAPHICS]
    unknown_amd = facts.has_amd and not facts.kfd
    if (amd or unknown_amd) and not torch.hip and not (facts.has_nvidia and torch.cuda):
        name = ", ".join(amd) or "an AMD GPU"
        built = "NVIDIA's CUDA" if torch.cuda else "the CPU only"
        yield Finding(
            "problem" if amd else "warning",
            "PyTorch",
            f"{torch.version} is built for {built}, and this machine has {name}: it can never use it",
            rocm_wheel(facts.amd_target),
        )
    elif facts.has_nvidia and not torch.cuda:
        built = "ROCm" if torch.hip else "the CPU only"
        yield Finding(
            "problem",
            "PyTorch",
            f"{torch.version} is built for {built}, and this machine has an NVIDIA GPU: it can never use it",
            "pip install --force-reinstall torch, the build that PyPI has; see README",
        )
    elif (torch.hip and (amd or unknown_amd)) or (torch.cuda and facts.has_nvidia):
        told = torch.failure or torch.said.strip().rpartition("\n")[2] or "it says no more"
        known = explain(torch.failure) or explain(torch.said)
        if torch.cuda:
            wanted = _DRIVER_FOR_CUDA.get((numbers(torch.cuda) or (0,))[0], 0)
            driver = numbers(facts.system.nvidia_version)
            if driver and driver[0] < wanted:
                yield Finding(
                    "problem",
                    "NVIDIA driver",
                    f"{facts.system.nvidia_version} is too old for PyTorch's CUDA {torch.cuda}, which needs {wanted}",
                    "update the driver, or install PyTorch for an older CUDA",
                )
                return
        yield Finding(
            "problem",
            "PyTorch",
            (f"sees no GPU: {known.cause}" if known else "sees no GPU, though one is here") + f" ({told[:200]})",
            known.fix if known else "mend the problems above first; rights, drivers and visibility are the usual ones",
        )


def _rocm_versions(facts: Facts, torch: Torch) -> Iterator[Finding]:
    host, wheel = numbers(facts.system.rocm_version)[:2], numbers(torch.hip)[:2]
    if host and wheel and host < wheel:
        yield Finding(
            "warning",
            "ROCm",
            f"/opt/rocm is {facts.system.rocm_version}, older than the {torch.hip} that PyTorch was built with: where "
            "its libraries are found first, symbols are missing (faster-whisper #1370)",
            f"update ROCm to {wheel[0]}.{wheel[1]}, or keep /opt/rocm/lib out of LD_LIBRARY_PATH",
        )
    elif facts.system.rocm_version:
        yield Finding("ok", "ROCm", f"{facts.system.rocm_version} in /opt/rocm; PyTorch was built with {torch.hip}")


def _device(facts: Facts, torch: Torch, device: TorchDevice) -> Iterator[Finding]:
    subject = device.name
    if device.failure is not None:
        yield _broken(facts, torch, device)
        return
    if device.backend == "cpu":
        yield from _parity(device)
        return
    size = f", {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else ""
    use = ", ".join(name for name, (how, _) in device.dtypes.items() if how == "native")
    yield Finding("ok", subject, f"{device.label} ({device.architecture}){size}: computes in {use}")
    for name, (how, why) in device.dtypes.items():
        if how != "native":
            yield Finding("note", subject, f"no {name}: {why}" if how == "no" else f"{name} is slow: {why}")
        elif why:
            yield Finding("note", subject, f"{name}: {why}")
    if device.free_bytes is not None and device.memory_bytes and device.free_bytes < 2 << 30:
        yield Finding(
            "warning",
            subject,
            f"{device.free_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.0f} GiB are free",
            "end other programs on the GPU: `stapes monitor` shows them",
        )
    yield _attention(facts, device)
    yield from _parity(device)
    yield from _slow_lstm(facts, device)
    if device.graphs is not None:
        agreed, reason = device.graphs
        yield Finding(
            "ok" if agreed else "warning",
            subject,
            f"graphs: {reason}" + ("" if agreed else "; stapes decodes without graphs, slower"),
            "" if agreed else "update PyTorch and the driver",
        )


def _broken(facts: Facts, torch: Torch, device: TorchDevice) -> Finding:
    """A device that PyTorch lists and that does not work."""
    architecture = device.architecture or ""
    known = explain(device.failure)
    missing = torch.architectures and architecture and not _is_covered(architecture, torch.architectures)
    if missing and device.backend != "cpu":
        built = ", ".join(torch.architectures)
        fix = (
            rocm_wheel(architecture)
            if device.backend == "rocm"
            else "install PyTorch for another CUDA that still has it"
        )
        what = f"{device.label}: PyTorch has no kernels for {architecture} (only {built}): {device.failure}"
        return Finding("problem", device.name, what, fix)
    if known is not None:
        return Finding("problem", device.name, f"{device.label}: {known.cause} ({device.failure})", known.fix)
    fix = "see `dmesg`; update driver and PyTorch; until then use --device cpu"
    if architecture in _REGISTER_HANGS and "crashed" in (device.failure or "") + "no answer":
        fix = (
            "kernels before 6.18.4 save too few registers on this GPU (ROCm/TheRock #2151): update Linux and ROCm, or "
            "boot with amdgpu.cwsr_enable=0"
        )
    return Finding("problem", device.name, f"{device.label} fails: {device.failure}", fix)


def _is_covered(architecture: str, built: tuple[str, ...]) -> bool:
    """Whether a build has kernels for an architecture: exactly on AMD; on NVIDIA of the same major version, or PTX."""
    if architecture.startswith("gfx"):
        return any(name.partition(":")[0] == architecture for name in built)
    found = re.fullmatch(r"sm_(\d+)", architecture)
    if found is None:
        return True
    number = int(found[1])
    for name in built:
        kind, _, digits = name.partition("_")
        other = int(re.sub(r"\D", "", digits) or 0)
        if (kind == "sm" and other // 10 == number // 10 and other <= number) or (
            kind == "compute" and other <= number
        ):
            return True
    return False


def _attention(facts: Facts, device: TorchDevice) -> Finding:
    if device.attention != "math":
        return Finding("ok", device.name, f"attention runs on PyTorch's {device.attention} kernel")
    reason = next((text for name, text in device.attention_refused.items() if name in {"flash", "efficient"}), "")
    what = "attention falls to PyTorch's `math`, which holds all scores in memory: 10 times slower on long windows"
    architecture = device.architecture or ""
    if device.backend == "rocm" and architecture.startswith(("gfx11", "gfx12", "gfx9")):
        variable = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
        fix = f"export {variable}=1 before starting"
        if facts.environment.get(variable) == "1":
            fix = "install a newer PyTorch for ROCm: this one has no AOTriton kernels for this GPU"
    elif device.backend == "rocm":
        fix = f"nothing yet: AOTriton has no kernels for {architecture}"
    else:
        fix = "install a newer PyTorch for CUDA"
    return Finding("warning", device.name, f"{what} ({reason[:160]})" if reason else what, fix)


def _parity(device: TorchDevice) -> Iterator[Finding]:
    failed = [result for result in device.parity if not result.passed]
    for result in failed:
        known = explain(result.failure)
        lstm = result.name == "LSTM"
        if result.failure:
            what = (
                f"{result.name} fails: {known.cause} ({result.failure})"
                if known
                else f"{result.name}: {result.failure}"
            )
        else:
            what = f"{result.name} is wrong: off by {result.error:.1e} of the largest value" + (
                " (pytorch #177834)" if lstm and device.backend == "rocm" else ""
            )
        fix = known.fix if known and result.failure else "update PyTorch and the driver"
        if not result.failure and device.backend == "rocm":
            fix = (
                "set torch.backends.cudnn.enabled = False for models with LSTMs, or use ROCm 10 or newer; stapes' "
                "Whisper has none"
                if lstm
                else "set torch.backends.cudnn.enabled = False (PyTorch's own convolutions), and report it to AMD"
            )
        # Whisper needs its convolutions; an LSTM only matters to other models.
        yield Finding("warning" if lstm else "problem", device.name, what, fix)
    if device.parity and not failed:
        worst = max(result.error or 0.0 for result in device.parity)
        label = "self-tests" if device.backend == "cpu" else "LSTM and convolutions"
        yield Finding("ok", device.name, f"{label} agree with fp64 to {worst:.0e}")


def _slow_lstm(facts: Facts, device: TorchDevice) -> Iterator[Finding]:
    took = {each.name: result.seconds for each in facts.devices for result in each.parity if result.name == "LSTM"}
    here, processor = took.get(device.name), took.get("cpu")
    if here and processor and here > 3 * processor:
        yield Finding(
            "note",
            device.name,
            f"an LSTM takes {here * 1000:.0f} ms, and {processor * 1000:.0f} on the CPU (legacy-rocm-build #4677); "
            "stapes' Whisper has none",
            "run models with LSTMs on the CPU, or with torch.backends.cudnn.enabled = False",
        )
