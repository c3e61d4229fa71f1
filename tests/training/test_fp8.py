"""fp8: only on GPUs that multiply it and with torchao, and never where a matrix does not fit the kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stapes.devices.backend import Device, resolve
from stapes.devices.chips import ARCHITECTURES
from stapes.errors import DeviceError, UsageError
from stapes.models.wav2vec2 import EncoderLayer, Wav2Vec2Config
from stapes.training.fp8 import check_fp8, use_fp8


def gpu(architecture: str) -> Device:
    backend = "rocm" if architecture.startswith("gfx") else "cuda"
    cpu = resolve("cpu")
    return replace(cpu, backend=backend, architecture=architecture, chip=ARCHITECTURES[architecture])


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx1100", "sm_80"])
def test_a_gpu_without_fp8_is_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(UsageError, match="no fp8"):
        check_fp8(gpu(architecture))
    with pytest.raises(UsageError, match="no CPU"):
        check_fp8(resolve("cpu"))


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    for architecture in ("gfx942", "gfx950", "sm_90"):
        with pytest.raises(DeviceError, match=r"stapes\[fp8\]"):
            check_fp8(gpu(architecture))


def test_matrices_that_fit_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []
    taken: list[str] = []

    def convert(layer: nn.Module, *, module_filter_fn: Any, config: Any) -> None:
        taken.extend(name for name, module in layer.named_modules() if module_filter_fn(module, name))

    def make(**options: Any) -> dict[str, Any]:
        settings.append(options)
        return options

    fake = SimpleNamespace(Float8LinearConfig=make, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=fake))
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    layer = EncoderLayer(Wav2Vec2Config(width=32, heads=4, mlp_width=40))  # 40 is no multiple of 16
    assert use_fp8([layer]) == 4
    assert taken == [f"attention.{name}" for name in ("query", "key", "value", "out")]
    assert settings == [{"pad_inner_dim": True, "emulate": False}]


def test_emulated_it_computes_about_the_same() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'stapes[fp8]'")
    torch.manual_seed(0)
    layer = EncoderLayer(Wav2Vec2Config(width=32, heads=4, mlp_width=64)).eval()
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(3, 7, 32)  # 21 rows: no multiple of 16
    expected = layer(x, None)
    assert use_fp8([layer], emulate=True) == 6
    assert [name for name, _ in layer.named_parameters()] == names
    found = layer(x, None)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
