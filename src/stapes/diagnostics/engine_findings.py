"""What ONNX Runtime, Triton and CTranslate2 make of this machine: that PyTorch sees a GPU says nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

from stapes.diagnostics.facts import WEAK_GRAPHICS, Facts, numbers
from stapes.diagnostics.findings import Finding
from stapes.diagnostics.known_errors import explain

_CT2_ARCHITECTURES = ("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201")
_MIGRAPHX_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx110", "gfx115", "gfx120")


def engine_findings(facts: Facts) -> Iterator[Finding]:
    """Every engine by itself."""
    yield from _onnx(facts)
    yield from _triton(facts)
    yield from _ctranslate2(facts)
    if facts.has_amd and not facts.has_nvidia and {"cuda-python", "cuda-bindings"} & facts.packages.keys():
        yield Finding(
            "note",
            "cuda-python",
            "is installed without an NVIDIA driver: libraries that only look whether it can be imported crash when "
            "they use it (NeMo #15905)",
            "pip uninstall cuda-python cuda-bindings",
        )


def _onnx(facts: Facts) -> Iterator[Finding]:
    onnx = facts.onnx
    if onnx is None or (onnx.version is None and not onnx.distributions):
        return
    subject, flavours = "ONNX Runtime", onnx.distributions
    if len(flavours) > 1:
        keep = "onnxruntime-migraphx" if facts.has_amd else "onnxruntime-gpu" if facts.has_nvidia else "onnxruntime"
        yield Finding(
            "problem",
            subject,
            f"{' and '.join(flavours)} are installed together: they share one folder, and the last one installed has "
            "overwritten part of the other",
            f"pip uninstall -y {' '.join(flavours)} && pip install {keep}",
        )
    if onnx.version is None:
        known = explain(onnx.failure)
        what = f"cannot be used: {onnx.failure}"
        yield Finding("warning", subject, what, known.fix if known else f"reinstall {' '.join(flavours)}")
        return
    ran = [provider.name for provider in onnx.providers if provider.ran]
    yield Finding("ok", subject, f"{onnx.version}: a model ran on {', '.join(ran) or 'nothing'}")
    for provider in onnx.providers:
        if not provider.ran:
            yield from _provider(facts, provider.name, provider.failure or "no reason given")
    on_gpu = [name for name in ran if name != "CPUExecutionProvider"]
    if facts.has_amd and not on_gpu and not facts.has_nvidia:
        yield from _onnx_for_amd(facts)
    elif facts.has_nvidia and not on_gpu and flavours == ("onnxruntime",):
        yield Finding(
            "note",
            subject,
            "this is the CPU's flavour; stapes' PyTorch models do not need it",
            "for ONNX models on the GPU: pip uninstall -y onnxruntime && pip install onnxruntime-gpu",
        )


def _provider(facts: Facts, name: str, failure: str) -> Iterator[Finding]:
    """A provider that ONNX Runtime offers and that does not work."""
    if name == "TensorrtExecutionProvider":  # offered by every GPU build, whether TensorRT is there or not
        yield Finding(
            "note", name, f"is offered and does not start: {failure[:200]}", "pip install tensorrt, if wanted"
        )
        return
    known = explain(failure)
    cause = known.cause if known else "it does not start"
    wrong_vendor = name == "CUDAExecutionProvider" and facts.has_amd and not facts.has_nvidia
    fix = known.fix if known else "install the flavour and version that fit the driver"
    if wrong_vendor:
        cause = "this is NVIDIA's flavour on an AMD machine"
        fix = "pip uninstall -y onnxruntime-gpu && pip install onnxruntime-migraphx"
    elif name == "ROCMExecutionProvider":
        fix = (
            "it was removed in ONNX Runtime 1.23: pip uninstall -y onnxruntime-rocm && pip install onnxruntime-migraphx"
        )
    elif name == "MIGraphXExecutionProvider" and known is None:
        fix = "install ROCm's migraphx package of the same ROCm version, and check `migraphx-driver --version`"
    yield Finding(
        "problem",
        name,
        f"is offered, and sessions fall back to the CPU without an error: {cause} ({failure[:200]})",
        fix,
    )


def _onnx_for_amd(facts: Facts) -> Iterator[Finding]:
    target = facts.amd_target
    flavours = facts.onnx.distributions if facts.onnx else ()
    if target is None or target in WEAK_GRAPHICS:
        return
    if not target.startswith(_MIGRAPHX_ARCHITECTURES):
        yield Finding(
            "note",
            "ONNX Runtime",
            f"AMD lists no ONNX Runtime for {target}: ONNX models run on the CPU, PyTorch's do not",
        )
    elif "onnxruntime-migraphx" not in flavours:
        yield Finding(
            "note",
            "ONNX Runtime",
            f"{', '.join(flavours)} has no provider for AMD GPUs; stapes' PyTorch models do not need it",
            "for ONNX models on the GPU: pip uninstall -y "
            + " ".join(flavours)
            + " && pip install onnxruntime-migraphx "
            "(needs ROCm's migraphx; only with fixed lengths, each new shape compiles again)",
        )


def _triton(facts: Facts) -> Iterator[Finding]:
    triton = facts.triton
    gpus = [device for device in facts.devices if device.backend != "cpu"]
    if triton is None:
        return
    if triton.version is None:
        if gpus:
            what = "is missing" if "No module" in (triton.failure or "") else f"cannot be used: {triton.failure}"
            yield Finding(
                "warning",
                "Triton",
                f"{what}: stapes' own kernels run as plain PyTorch, slower",
                "it comes with PyTorch's GPU wheels on Linux: install PyTorch anew",
            )
        return
    refused = {name: reason for name, reason in triton.compiled.items() if reason is not None}
    compiles = [name for name in triton.compiled if name not in refused]
    yield Finding("ok", "Triton", triton.version + (f", compiles for {', '.join(compiles)}" if compiles else ""))
    for architecture, reason in refused.items():
        if architecture in WEAK_GRAPHICS:
            continue
        old = architecture.startswith("gfx10") and numbers(triton.version) >= (3, 9)
        yield Finding(
            "warning",
            "Triton",
            f"{triton.version} refuses {architecture}: stapes' own kernels run as plain PyTorch, slower"
            + (f" ({reason[:160]})" if not old else ", as it does for all of RDNA 1 and 2 since 3.9"),
            "use PyTorch 2.14 or older, which brings Triton 3.8" if old else "update PyTorch",
        )


def _ctranslate2(facts: Facts) -> Iterator[Finding]:
    engine = facts.ctranslate2
    if engine is None or "ctranslate2" not in facts.packages:
        return
    subject = "CTranslate2"
    if engine.version is None:
        known = explain(engine.failure)
        what = f"cannot be used: {engine.failure}" + (f": {known.cause}" if known else "")
        yield Finding("warning", subject, what, known.fix if known else "pip install --force-reinstall ctranslate2")
        return
    target = facts.amd_target
    if engine.gpus:
        yield Finding("ok", subject, f"{engine.version} can use {engine.gpus} GPU{'s' * (engine.gpus > 1)}")
        if target == "gfx1201":
            yield Finding(
                "note",
                subject,
                "crashes on gfx1201 in some versions (CTranslate2 #2021)",
                "if it does: export CT2_CUDA_ALLOCATOR=cub_caching",
            )
        return
    yield Finding("ok", subject, f"{engine.version} works on the CPU")
    if facts.has_amd and not facts.has_nvidia and target not in WEAK_GRAPHICS:
        fits = target is None or target in _CT2_ARCHITECTURES
        yield Finding(
            "note",
            subject,
            "sees no GPU, whatever PyTorch sees: pip's package is built for CUDA, and faster-whisper crashes with "
            "device='cuda' (WhisperLive #520)",
            "use stapes' own models, which need no CTranslate2"
            + (", or the ROCm wheel of CTranslate2's release page" if fits else f"; it has no kernels for {target}"),
        )
