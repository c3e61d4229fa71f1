"""The CTC encoder for GPUs computes what the model computes, however a batch is put together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from small_wav2vec2 import speech_like
from stapes.inference import gpu_ctc
from stapes.inference.ctc_packing import unpack
from stapes.inference.gpu_ctc import GpuCtcEncoder
from stapes.kernels.jit import is_interpreted
from stapes.models.wav2vec2 import GroupNormConvLayer, Wav2Vec2, Wav2Vec2Config
from stapes.models.waveform import normalize_waveform

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu")
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 1e-4
GROUP = Wav2Vec2Config(32, 3, 4, 64, 12, (24,) * 7, position_kernel=16, position_groups=4)
LAYER = replace(GROUP, conv_bias=True, conv_norm="layer", pre_norm=True)
KINDS = {
    "base": GROUP,
    "base-biased": replace(GROUP, conv_bias=True, position_kernel=15),
    "large": LAYER,
    "large-group": replace(GROUP, pre_norm=True),
    "distilhubert": replace(GROUP, projection_norm=False),
    "mms": replace(LAYER, adapter_width=6),
    "mms-post": replace(GROUP, adapter_width=6),
    "downsampled": replace(LAYER, downsampling_layers=2, downsampling_width=20),
    "odd-sizes": replace(GROUP, conv_channels=(16, 24), conv_kernels=(9, 4), conv_strides=(4, 3)),
    "wide-windows": replace(LAYER, conv_channels=(16, 24), conv_kernels=(9, 7), conv_strides=(4, 3)),
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32, which cuDNN may use unasked, the model itself is off by 1e-3."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def make(config: Wav2Vec2Config, seed: int = 0) -> Wav2Vec2:
    """Every parameter is drawn at random, biases and norms too."""
    torch.manual_seed(seed)
    model = Wav2Vec2(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.2)
    return model.eval().to(DEVICE)


def padded(rows: list[torch.Tensor], extra: int = 0, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    batch = torch.full((len(rows), int(lengths.max()) + extra), fill)
    for row, waveform in zip(batch, rows, strict=True):
        row[: len(waveform)] = waveform
    return batch.to(DEVICE), lengths.to(DEVICE)


def same(model: Wav2Vec2, found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert found[0].shape == wanted[0].shape
    assert found[1].tolist() == wanted[1].tolist()
    for row, count in enumerate(wanted[1].tolist()):
        torch.testing.assert_close(found[0][row, :count], wanted[0][row, :count], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_the_model(kind: str) -> None:
    """Padded with what must not be heard, of lengths that differ, one of them too short for a frame."""
    model = make(KINDS[kind])
    draw = random.Random(kind)
    rows = [speech_like(draw.randint(400, 9_000), seed) for seed in range(3)]
    rows += [torch.randn(401), torch.randn(model.config.receptive_field - 1), torch.randn(5_000)]
    batch, lengths = padded(rows, extra=700, fill=float("nan"))
    encoder = GpuCtcEncoder(model, torch.float32)
    wanted = model(batch, lengths)
    assert wanted[0][0, : wanted[1][0]].std() > 0.1
    found = encoder(batch, lengths)
    assert found[0].isfinite().all()
    same(model, found, wanted)
    same(model, encoder(batch, lengths.tolist()), wanted)
    whole = torch.randn(2, 4_000, device=DEVICE)
    same(model, encoder(whole), model(whole))
    short = torch.randn(1, 100, device=DEVICE)
    assert encoder(short)[0].shape == model(short)[0].shape


@pytest.mark.parametrize("kind", ["base", "large"])
def test_neighbours_and_their_order_change_nothing(kind: str) -> None:
    model = make(KINDS[kind])
    encoder = GpuCtcEncoder(model, torch.float32)
    rows = [speech_like(size, size) for size in (5_000, 3_333, 8_001, 400)]
    together, counts = encoder(*padded(rows))
    backwards, _ = encoder(*padded(rows[::-1], extra=2_000))
    for row, (waveform, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        alone, _ = encoder(waveform[None].to(DEVICE))
        torch.testing.assert_close(alone[0, :count], together[row, :count], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(backwards[-1 - row, :count], together[row, :count], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["base", "large"])
def test_a_long_batch_is_computed_piece_by_piece(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(KINDS[kind])
    batch, lengths = padded([speech_like(9_000, 1), speech_like(7_001, 2), speech_like(20_000, 3)])
    encoder = GpuCtcEncoder(model, torch.float32)
    wanted = encoder(batch, lengths)
    monkeypatch.setattr(gpu_ctc, "_CHUNK", 16)
    same(model, encoder(batch, lengths), wanted)


@torch.inference_mode()
def test_windows_of_a_recording_are_normalised_as_the_whole() -> None:
    model = make(GROUP)
    layer = model.feature_extractor.first
    assert isinstance(layer, GroupNormConvLayer)
    whole = speech_like(20_000, 4)[None].to(DEVICE)
    statistics = layer.statistics(layer.moments(whole))
    window = whole[:, 3_200:9_600]
    encoder = GpuCtcEncoder(model, torch.float32)
    same(model, encoder(window, None, statistics), model(window, None, statistics))
    assert (encoder(window)[0] - encoder(window, None, statistics)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["base", "large"])
@torch.inference_mode()
def test_waveforms_are_normalised_on_the_way(kind: str) -> None:
    """Recordings one behind the other, as they come from the host, in place of a padded batch."""
    model = make(KINDS[kind])
    rows = [7 * speech_like(size, size) + 3 for size in (5_000, 3_333, 8_001)]
    encoder = GpuCtcEncoder(model, torch.float32)
    samples = torch.cat(rows).to(DEVICE)
    packing = encoder.pack([len(row) for row in rows])
    logits = encoder.packed_logits(samples, packing, None, encoder.normalization(samples, packing))
    batch, lengths = padded(rows)
    wanted = model(normalize_waveform(batch, lengths), lengths)
    found = unpack(logits, packing, wanted[0].shape[1])
    for row, count in enumerate(wanted[1].tolist()):
        torch.testing.assert_close(found[row, :count], wanted[0][row, :count], atol=1e-4, rtol=1e-4)


def test_half_precision_is_near() -> None:
    """As near as the model itself in half precision."""
    for kind in ("base", "large"):
        model = make(KINDS[kind])
        batch, lengths = padded([speech_like(9_000, 1), speech_like(7_001, 2)])
        with torch.inference_mode():
            wanted, counts = model(batch, lengths)
            found, _ = GpuCtcEncoder(model, torch.bfloat16)(batch, lengths)
            half, _ = make(KINDS[kind]).bfloat16()(batch, lengths)
        real = torch.arange(wanted.shape[1], device=DEVICE) < counts[:, None]
        error, usual = ((each.float() - wanted)[real].square().mean().sqrt() for each in (found, half))
        assert found.dtype == torch.bfloat16
        assert error < 1.5 * usual + 1e-3


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are captured on a GPU")
@pytest.mark.parametrize("kind", ["base", "large"])
def test_a_captured_graph_hears_what_it_is_given(kind: str) -> None:
    """Batches of one size, one after the other: the third of them is replayed."""
    model = make(KINDS[kind])
    encoder = GpuCtcEncoder(model, torch.float16)
    for seed in range(4):
        batch, lengths = padded([speech_like(9_000 - 40 * seed, seed), speech_like(7_000 + 30 * seed, seed)])
        found, counts = encoder(batch, lengths)
        wanted, _ = GpuCtcEncoder(model, torch.float16)(batch, lengths)
        for row, count in enumerate(counts.tolist()):
            torch.testing.assert_close(found[row, :count], wanted[row, :count], atol=1e-3, rtol=1e-3)
    assert encoder._graphs._captured
