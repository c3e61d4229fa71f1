"""Linear layers on packed weights: which is taken for what, and that both compute what the plain one does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.devices.backend import computes_in_bf16
from stapes.inference import cpu, packed
from stapes.inference.cpu import CpuEncoderLayer
from stapes.inference.packed import HalfLinear, OneDnnLinear, can_pack, pack, pack_linear
from stapes.models.whisper import Whisper, WhisperConfig

CONFIG = WhisperConfig(80, 51865, 64, 2, 4, 2, 4, audio_context=40, text_context=24)
needs_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="this PyTorch has no FBGEMM"
)
pytestmark = pytest.mark.skipif(not can_pack(), reason="this PyTorch has no oneDNN")


@pytest.fixture(params=[False, True], ids=["wide", "AVX2"])
def only_avx2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and torch.backends.quantized.engine not in ("x86", "fbgemm"):
        pytest.skip("this PyTorch has no FBGEMM")
    monkeypatch.setattr(packed, "has_only_avx2", lambda: request.param)
    monkeypatch.setattr(cpu, "has_only_avx2", lambda: request.param)
    return request.param


def every_half() -> Tensor:
    """All finite numbers of fp16, the smallest too, (62, 1024)."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return bits[bits.isfinite()].view(62, 1024)


@needs_fbgemm
def test_weights_in_fp16_lose_nothing() -> None:
    weight = every_half()
    layer = HalfLinear(weight, None)
    assert torch.equal(layer(torch.eye(1024)).T, weight.float())


@pytest.mark.parametrize("rows", [1, 3, 200])
@torch.inference_mode()
def test_both_kinds_compute_the_same(rows: int, only_avx2: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 64).half().float(), torch.randn(48)
    x, residual = torch.randn(rows, 64), torch.randn(rows, 48)
    layer = pack_linear(weight, bias, torch.float32)
    assert isinstance(layer, HalfLinear if only_avx2 else OneDnnLinear)
    wanted = F.linear(x, weight, bias)
    assert torch.allclose(layer(x), wanted, atol=1e-4)
    kept = residual.clone()
    assert torch.allclose(layer.add(x, residual), wanted + residual, atol=1e-4)
    assert torch.equal(residual, kept)
    layer.activation = "gelu"
    assert torch.allclose(layer(x), F.gelu(wanted), atol=1e-4)


@pytest.mark.parametrize(
    "odd", [1 + 2**-12, 70_000.0, 2**-26], ids=["more digits", "too large for fp16", "too small for fp16"]
)
def test_weights_that_fp16_cannot_hold_stay_in_fp32(odd: float, only_avx2: bool) -> None:
    weight = torch.zeros(16, 32)
    weight[3, 5] = odd
    layer = pack_linear(weight, None, torch.float32)
    assert isinstance(layer, OneDnnLinear)
    assert layer(torch.eye(32)).T[3, 5] == odd


@pytest.mark.skipif(not computes_in_bf16(), reason="this CPU has no units for bf16")
def test_bf16_is_onednn_everywhere(only_avx2: bool) -> None:
    assert isinstance(pack_linear(torch.zeros(16, 32), None, torch.bfloat16), OneDnnLinear)


@needs_fbgemm
def test_another_engine_for_8_bits_means_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "has_only_avx2", lambda: True)
    assert packed.is_faster_in_half()
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")
    try:
        assert not packed.is_faster_in_half()
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("halves", [True, False], ids=["published in fp16", "in fp32"])
@torch.inference_mode()
def test_the_network_says_the_same(halves: bool, only_avx2: bool) -> None:
    torch.manual_seed(3)
    plain, ours = Whisper(CONFIG), Whisper(CONFIG)
    weights = {name: 0.1 * torch.randn_like(value) for name, value in plain.state_dict().items()}
    if halves:
        weights = {name: value.half().float() for name, value in weights.items()}
    for model in (plain, ours):
        model.load_state_dict(weights)
        model.requires_grad_(False).eval()
    cpu.adapt(pack(ours))
    layers = [module for module in ours.modules() if isinstance(module, packed.PackedLinear)]
    assert {type(layer) for layer in layers} == {HalfLinear if halves and only_avx2 else OneDnnLinear}
    assert all(isinstance(layer, CpuEncoderLayer) and layer.flash == only_avx2 for layer in ours.encoder.layers)
    mel, tokens = torch.randn(2, 80, 80), torch.randint(0, 50_000, (2, 9))
    assert torch.allclose(ours.encoder(mel), plain.encoder(mel), atol=1e-4)
    assert torch.allclose(ours(mel, tokens), plain(mel, tokens), atol=1e-3)
