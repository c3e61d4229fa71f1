"""Providers of ONNX Runtime: the one asked for runs, or an error says why; nothing moves to the CPU unsaid."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stapes.devices.backend import Device
from stapes.diagnostics.engine_probes import matmul_model
from stapes.errors import DeviceError, ModelError
from stapes.inference import onnx_session
from stapes.inference.onnx_session import CPU, CUDA, MIGRAPHX, OPENVINO, Session, choose_provider, judge_placement

AMD = Device(torch.device("cpu"), "rocm", "MI300X", 192 << 30, "gfx942")
NVIDIA = Device(torch.device("cpu"), "cuda", "H200", 141 << 30, "sm_90")
PROCESSOR = Device(torch.device("cpu"), "cpu", "CPU", None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "product.onnx"
    path.write_bytes(matmul_model())
    return path


def offers(monkeypatch: pytest.MonkeyPatch, *providers: str, **more: Any) -> None:
    made = SimpleNamespace(get_available_providers=lambda: list(providers), **more)
    monkeypatch.setattr(onnx_session, "runtime", lambda: made)


def test_each_device_has_its_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, MIGRAPHX, CPU)
    assert choose_provider(AMD) == MIGRAPHX
    assert choose_provider(PROCESSOR) == CPU
    with pytest.raises(DeviceError, match="onnxruntime-gpu"):
        choose_provider(NVIDIA)
    offers(monkeypatch, CUDA, CPU)
    assert choose_provider(NVIDIA) == CUDA
    with pytest.raises(DeviceError, match="onnxruntime-migraphx"):
        choose_provider(AMD)
    offers(monkeypatch, OPENVINO, CPU)
    assert choose_provider(PROCESSOR) == OPENVINO


def test_a_session_computes_on_tensors_in_place(model: Path) -> None:
    session = Session(model, PROCESSOR, CPU)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    (y,) = session({"a": a, "b": b}).values()
    out = torch.empty(64, 64)
    assert session({"a": a.T, "b": b}, {"y": out}) == {}  # not contiguous
    assert torch.allclose(y, a @ b, atol=1e-4)
    assert torch.allclose(out, a.T @ b, atol=1e-4)


def test_a_provider_that_is_not_there_is_an_error(model: Path) -> None:
    with pytest.raises(DeviceError, match="MIGraphX"):
        Session(model, AMD, MIGRAPHX)


def test_a_provider_that_gives_way_to_the_cpu_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What onnxruntime-migraphx does without a GPU: it is offered, does not start, and the CPU runs instead."""

    class Silent:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def get_providers(self) -> list[str]:
            return [CPU]

    real = onnx_session.runtime()
    offers(monkeypatch, MIGRAPHX, CPU, SessionOptions=real.SessionOptions, InferenceSession=Silent)
    with pytest.raises(DeviceError, match="would run on CPUExecutionProvider"):
        Session(model, AMD, choose_provider(AMD))


def test_a_damaged_graph_is_said(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(ModelError, match=r"broken\.onnx"):
        Session(path, PROCESSOR, CPU)


def test_operations_left_to_the_cpu_are_counted() -> None:
    few = {CUDA: {"MatMul": 500}, CPU: {"Shape": 5}}
    assert judge_placement("step.onnx", CUDA, few) == {"Shape": 5}
    assert judge_placement("step.onnx", CUDA, {CUDA: {"MatMul": 3}}) == {}
    many = {CUDA: {"MatMul": 500}, CPU: {"Conv": 4, "Shape": 2}}
    with pytest.raises(DeviceError, match=r"6 of 506 operations .*4 Conv, 2 Shape"):
        judge_placement("step.onnx", CUDA, many)


def test_without_onnx_runtime_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(onnx_session.importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"stapes\[onnx\]"):
        choose_provider(PROCESSOR)


def test_the_real_provider_without_its_gpu_is_an_error(model: Path) -> None:
    """Where onnxruntime-migraphx is installed and AMD's libraries or GPU are not: it offers what it cannot start."""
    if MIGRAPHX not in onnx_session.runtime().get_available_providers() or torch.cuda.is_available():
        pytest.skip("needs onnxruntime-migraphx on a machine without a GPU")
    assert choose_provider(AMD) == MIGRAPHX
    with pytest.raises(DeviceError, match=r"MIGraphX.*--device cpu"):
        Session(model, AMD, MIGRAPHX)
