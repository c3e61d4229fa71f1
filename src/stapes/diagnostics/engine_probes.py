"""What PyTorch, ONNX Runtime, Triton and CTranslate2 can really use, each asked in a process of its own.

``python -m stapes.diagnostics.engine_probes torch`` writes records for ``children.run_child``; ``probe_…`` run that
and give the facts. That one engine sees a GPU says nothing of another, so that each is tried by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from stapes.diagnostics.children import ChildResult, emit, run_child
from stapes.diagnostics.facts import CTranslate2, Onnx, OnnxProvider, Parity, Torch, TorchDevice, Triton

_MODULE = "stapes.diagnostics.engine_probes"
# A first start on ROCm compiles and loads for tens of seconds; what takes longer than this hangs.
_TORCH_SECONDS = 240.0
_ENGINE_SECONDS = 60.0


def probe_torch() -> Torch:
    """PyTorch's build, its devices, and each of them tried: memory, attention, parity, graphs."""
    return read_torch(run_child([_MODULE, "torch"], _TORCH_SECONDS))


def probe_onnx(distributions: tuple[str, ...]) -> Onnx:
    """ONNX Runtime's providers, each tried without a fallback."""
    if not distributions:
        return Onnx(failure="not installed")
    return replace(read_onnx(run_child([_MODULE, "onnx"], _ENGINE_SECONDS)), distributions=distributions)


def probe_triton(architectures: tuple[str, ...]) -> Triton:
    """Triton's version, and whether it compiles for these AMD architectures."""
    return read_triton(run_child([_MODULE, "triton", *architectures], _ENGINE_SECONDS))


def probe_ctranslate2() -> CTranslate2:
    """How many GPUs CTranslate2 can use."""
    result = run_child([_MODULE, "ctranslate2"], _ENGINE_SECONDS)
    record = result.records[-1] if result.records else {}
    return CTranslate2(record.get("version"), record.get("gpus"), record.get("failure") or result.failure)


def read_torch(result: ChildResult) -> Torch:
    """The first record is the build, each other one a device; a device that is announced and missing crashed."""
    if not result.records:
        return Torch(failure=result.failure or "said nothing")
    build, *records = result.records
    devices: dict[str, TorchDevice] = {}
    for record in records:
        fields = dict(record)
        fields["parity"] = tuple(Parity(**parity) for parity in fields.get("parity", ()))
        fields["dtypes"] = {name: tuple(use) for name, use in fields.get("dtypes", {}).items()}
        fields["graphs"] = tuple(fields["graphs"]) if fields.get("graphs") else None
        devices[fields["name"]] = TorchDevice(**fields)
    if result.failure is not None and devices:
        last = list(devices)[-1]
        devices[last] = replace(devices[last], failure=result.failure)
    build["architectures"] = tuple(build.get("architectures", ()))
    failure = build.pop("failure", None) or (result.failure if not devices else None)
    return Torch(**build, devices=tuple(devices.values()), said=result.said[:2000], failure=failure)


def read_onnx(result: ChildResult) -> Onnx:
    """The first record is the version, each other one a provider."""
    if not result.records:
        return Onnx(failure=result.failure or "said nothing")
    first, *records = result.records
    providers = {}
    for record in records:
        fields = dict(record)
        fields["session_providers"] = tuple(fields.get("session_providers", ()))
        providers[fields["name"]] = OnnxProvider(**fields)
    if result.failure is not None and providers:  # it was announced before it was tried
        last = list(providers)[-1]
        providers[last] = replace(providers[last], ran=False, failure=result.failure)
    failure = first.get("failure") or (result.failure if not providers else None)
    return Onnx(first.get("version"), (), tuple(providers.values()), failure)


def read_triton(result: ChildResult) -> Triton:
    """The first record is the version, each other one an architecture."""
    if not result.records:
        return Triton(failure=result.failure or "said nothing")
    first, *records = result.records
    compiled = {record["architecture"]: record["failure"] for record in records}
    if result.failure is not None and compiled:
        compiled[list(compiled)[-1]] = result.failure
    return Triton(first.get("version"), compiled, first.get("failure") or (result.failure if not compiled else None))


def _torch() -> None:
    try:
        import torch
    except Exception as error:  # a broken wheel can raise anything
        emit({"failure": _reason(error)})
        return
    from stapes.devices import rocm
    from stapes.devices.backend import resolve

    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take a minute for a second's work
    rocm.apply_defaults()
    build: dict[str, Any] = {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}
    try:
        build |= {"is_available": torch.cuda.is_available(), "device_count": torch.cuda.device_count()}
        build["architectures"] = torch.cuda.get_arch_list()
        if (torch.version.cuda or torch.version.hip) and not build["is_available"]:
            torch.cuda.init()  # says why
    except Exception as error:
        build["failure"] = _reason(error)
    build = {"is_available": False, "device_count": 0} | build
    emit(build)
    names = ["cpu", *(f"cuda:{index}" for index in range(build["device_count"] if build["is_available"] else 0))]
    for name in names:
        # First what it is, so that a crash while it is tried has a name; then what came out.
        found = TorchDevice(name, "cpu" if name == "cpu" else "rocm" if torch.version.hip else "cuda")
        emit(asdict(found))
        try:
            device = resolve(name)
            found = replace(
                found,
                index=device.torch.index,
                label=device.name,
                architecture=device.architecture,
                memory_bytes=device.memory,
            )
            emit(asdict(found))
            found = _tried(found, device)
        except Exception as error:
            found = replace(found, failure=_reason(error))
        emit(asdict(found))


def _tried(found: TorchDevice, device: Any) -> TorchDevice:
    import torch

    from stapes.devices import rocm
    from stapes.devices.backend import attention_kernels, usable_dtypes

    is_gpu = device.backend != "cpu"
    dtype = torch.float16 if is_gpu else torch.float32
    free = torch.cuda.mem_get_info(device.torch)[0] if is_gpu else None
    square = torch.eye(256, device=device.torch, dtype=dtype)
    if (square @ square).float().sum().item() != 256:
        raise ArithmeticError("a product of two identity matrices is not the identity: the GPU computes wrongly")
    attention = attention_kernels(device.torch, dtype)
    return replace(
        found,
        free_bytes=free,
        dtypes=usable_dtypes(device),
        attention=attention.chosen,
        attention_refused=attention.refused,
        parity=tuple(Parity(**asdict(result)) for result in rocm.check_parity(device.torch)),
        graphs=rocm.graphs_agree(device.torch) if is_gpu else None,
    )


def _onnx() -> None:
    try:
        import numpy as np
        import onnxruntime
    except Exception as error:
        emit({"failure": _reason(error)})
        return
    emit({"version": getattr(onnxruntime, "__version__", None)})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    square = np.eye(64, dtype=np.float32)
    for name in onnxruntime.get_available_providers():
        if name == "AzureExecutionProvider":  # calls a service
            continue
        emit(asdict(OnnxProvider(name, False)))
        try:
            # Without enable_fallback=0 a provider that cannot start is replaced by the CPU, and nothing is raised.
            session = onnxruntime.InferenceSession(
                matmul_model(), sess_options=options, providers=[name], enable_fallback=0
            )
            used = tuple(session.get_providers())
            (out,) = session.run(None, {"a": square, "b": 2 * square})
            ran = used[:1] == (name,) and bool(np.allclose(np.asarray(out), 2 * square))
            failure = None if ran else f"the session runs on {', '.join(used) or 'nothing'} instead"
            emit(asdict(OnnxProvider(name, ran, used, failure)))
        except Exception as error:
            emit(asdict(OnnxProvider(name, False, (), _reason(error))))


def matmul_model(size: int = 64) -> bytes:
    """A model of one matrix product, ``y = a b``: ONNX's protobuf written by hand, without the onnx package."""

    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def number(field: int, value: int) -> bytes:
        return varint(field << 3) + varint(value)

    def block(field: int, value: bytes | str) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return varint(field << 3 | 2) + varint(len(data)) + data

    dimension = block(1, number(1, size))
    matrix = block(1, number(1, 1) + block(2, dimension + dimension))  # fp32 (size, size)

    def value_info(name: str) -> bytes:
        return block(1, name) + block(2, matrix)

    node = block(1, "a") + block(1, "b") + block(2, "y") + block(4, "MatMul")
    graph = block(1, node) + block(2, "product") + block(11, value_info("a")) + block(11, value_info("b"))
    graph += block(12, value_info("y"))
    return number(1, 8) + block(8, number(2, 13)) + block(7, graph)  # IR version 8, operators of version 13


def _triton(architectures: Sequence[str]) -> None:
    try:
        import triton
        import triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except Exception as error:
        emit({"failure": _reason(error)})
        return
    emit({"version": triton.__version__})

    @triton.jit
    def double(values, size: tl.constexpr):
        index = tl.arange(0, size)
        tl.store(values + index, 2 * tl.load(values + index))

    for architecture in architectures:
        emit({"architecture": architecture, "failure": None})
        wave = 64 if architecture.startswith("gfx9") else 32
        try:
            source = ASTSource(fn=double, signature={"values": "*fp32", "size": "constexpr"}, constexprs={"size": 64})
            triton.compile(source, target=GPUTarget("hip", architecture, wave))
        except BaseException as error:  # some targets end in SystemExit or an assertion
            emit({"architecture": architecture, "failure": _reason(error)})


def _ctranslate2() -> None:
    try:
        import ctranslate2  # pyright: ignore[reportMissingImports]

        emit({"version": ctranslate2.__version__, "gpus": ctranslate2.get_cuda_device_count()})
    except Exception as error:
        emit({"failure": _reason(error)})


def _reason(error: BaseException) -> str:
    """An error's text on one line; the first lines matter, traces of C++ follow them."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:3])
    return f"{type(error).__name__}: {text}"[:400]


def main(engine: str, *architectures: str) -> None:
    """Ask one engine, in this process."""
    if engine == "torch":
        _torch()
    elif engine == "onnx":
        _onnx()
    elif engine == "triton":
        _triton(architectures)
    else:
        _ctranslate2()


if __name__ == "__main__":
    main(*sys.argv[1:])
