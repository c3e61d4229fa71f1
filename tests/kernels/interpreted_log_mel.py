"""Run in Triton's interpreter by test_interpreted.py: the kernels for features equal their references."""

from __future__ import annotations

import os

import pytest
import torch

from stapes.audio.features import FFT_SIZE, HOP, log_mel_spectrogram, mel_filters
from stapes.kernels import log_mel
from stapes.kernels.log_mel import launch_log_mel, log_mel_reference, prepare_filters
from stapes.kernels.spectrum import launch_frames, spectrum_reference

CPU = torch.device("cpu")
WINDOW = torch.hann_window(FFT_SIZE)
# One tile of each way to multiply; the interpreter is slow for small ones.
MEL_TILES = [
    log_mel.Tile(64, 32, 32, 4, "fp32"),
    log_mel.Tile(64, 32, 32, 4, "bf16x3"),
    log_mel.Tile(32, 64, 16, 4, "bf16x3"),
    log_mel.Tile(16, 16, 16, 1, "lanes", 4),
    log_mel.Tile(32, 16, 16, 1, "pairs", 3),
]


def sounds(samples: int) -> torch.Tensor:
    """Noise that swells over 80 dB, a sweep that ends in silence, silence, and noise as loud as it gets."""
    generator = torch.Generator().manual_seed(1)
    time = torch.arange(samples) / 16_000
    noise = torch.randn(2, samples, generator=generator)
    sweep = 0.3 * torch.sin(2 * torch.pi * (200 + 900 * time) * time)
    sweep[samples // 2 :] = 0.0
    return torch.stack(
        [0.3 * noise[0] * 10 ** (4 * (time / time[-1] - 1)), sweep, torch.zeros(samples), noise[1].clamp(-1, 1)]
    )


def wanted(pcm: torch.Tensor, bins: int) -> torch.Tensor:
    return log_mel_reference(spectrum_reference(pcm, WINDOW, HOP), mel_filters(bins))


def test_this_is_the_interpreter():
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("samples", [201, 1600, 16_000, 16_123])
def test_frames_are_reflected_at_both_ends(samples):
    pcm = sounds(samples)
    padded = torch.nn.functional.pad(pcm, (200, 200), mode="reflect")
    frames = padded.unfold(1, FFT_SIZE, HOP)[:, : samples // HOP] * WINDOW
    assert torch.equal(launch_frames(pcm, WINDOW, HOP), frames)


def test_frames_of_too_little_sound_are_refused_as_by_torch():
    with pytest.raises(ValueError, match="200 samples"):
        launch_frames(sounds(200), WINDOW, HOP)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("tile", MEL_TILES, ids=str)
def test_log_mel(bins, tile):
    pcm = sounds(16_000)
    spectrum = spectrum_reference(pcm, WINDOW, HOP)
    found = launch_log_mel(spectrum, prepare_filters(mel_filters(bins), CPU, tile))
    assert found.shape == (4, bins, 100)
    assert (found - wanted(pcm, bins)).abs().max() < 1e-4
    # Laid out otherwise, and one window alone, it is the same but for the order in which is added.
    alone = launch_log_mel(spectrum[1:2].contiguous(), prepare_filters(mel_filters(bins), CPU, tile))
    assert (alone[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize(("frames", "stride"), [(2, 201), (33, 203), (45, 201), (64, 201), (35, 202)])
def test_rows_that_begin_at_even_and_odd_numbers(frames, stride):
    """Windows begin at either; frames fill their tiles or do not; a stride that is even is laid out anew."""
    generator = torch.Generator().manual_seed(2)
    laid = torch.randn(3, frames * stride + 1, 2, generator=generator)
    # Between the rows lies what must not be used.
    laid[:, :-1].view(3, frames, stride, 2)[:, :, 201:] = float("nan")
    spectrum = torch.view_as_complex(laid)[:, :-1].view(3, frames, stride)[:, :, :201].transpose(1, 2)
    for bins in (40, 100):
        filters = prepare_filters(mel_filters(bins), CPU, log_mel.Tile(32, 16, 16, 1, "pairs", 4))
        assert filters.tile.way == "pairs"
        found = launch_log_mel(spectrum, filters)
        assert (found - log_mel_reference(spectrum, mel_filters(bins))).abs().max() < 1e-4


def test_one_frame():
    spectrum = torch.randn(2, 1, 201, dtype=torch.complex64).transpose(1, 2)
    filters = prepare_filters(mel_filters(80), CPU, log_mel.Tile(32, 16, 16, 1, "pairs", 4))
    assert (launch_log_mel(spectrum, filters) - log_mel_reference(spectrum, mel_filters(80))).abs().max() < 1e-4


@pytest.mark.parametrize("frequencies", [200, 201])
def test_filters_that_use_all_frequencies_are_not_read_by_pairs(frequencies):
    filters = torch.rand(20, frequencies)
    prepared = prepare_filters(filters, CPU, log_mel.Tile(32, 16, 16, 1, "pairs", 4))
    assert (prepared.tile.way, prepared.tile.frames) == ("lanes", 16)
    spectrum = torch.randn(2, 40, frequencies, dtype=torch.complex64).transpose(1, 2)
    assert (launch_log_mel(spectrum, prepared) - log_mel_reference(spectrum, filters)).abs().max() < 1e-4


@pytest.mark.parametrize(("tile_frames", "block"), [(16, 16), (32, 16), (64, 80)])
def test_the_floor_touches_nothing_above_it(tile_frames, block):
    """Blocks with nothing under the floor, with nothing but that, and with some."""
    power = 10 ** (torch.rand(2, 80, 150) * 8 - 4)
    power[:, :, :40] *= 1e-4
    power[:, 32:48] *= 1e-5
    power[0, :, 100:] = 1e-10
    power.clamp_min_(1e-10)
    values = (power.log10() + 4) / 4
    parts = [list(tile.split(block, dim=1)) for tile in power.split(tile_frames, dim=2)]
    extremes = torch.stack(
        [
            torch.stack([torch.stack([part.amin(dim=(1, 2)) for part in tile], dim=1) for tile in parts], dim=1),
            torch.stack([torch.stack([part.amax(dim=(1, 2)) for part in tile], dim=1) for tile in parts], dim=1),
        ]
    )
    found = values.clone()
    log_mel.launch_floor(found, extremes, tile_frames)
    wanted = torch.maximum(values, values.amax(dim=(1, 2), keepdim=True) - 2.0)
    assert (found - wanted).abs().max() < 1e-5
    above = wanted > wanted.amin(dim=(1, 2), keepdim=True) + 1e-4
    assert torch.equal(found[above], values[above])
    assert (wanted > values).any()


@pytest.mark.parametrize("bins", [80, 128])
def test_features_use_the_kernels_and_keep_the_second_look(bins):
    pcm = sounds(16_000)
    found = log_mel_spectrogram(pcm, bins, lengths=[16_000, 8000, 0, 4000])
    plain = wanted(pcm, bins)
    for row, length in enumerate([16_000, 8000, 0, 4000]):
        end = length // HOP + 1
        assert (found[row, :, :end] - plain[row, :, :end]).abs().max() < 1e-4
        assert not found[row, :, end:].any()


def test_the_benchmark_measures_and_compares_every_row(monkeypatch):
    """On the GPU it is the clock that differs."""
    from contextlib import nullcontext

    from stapes.benchmarks import kernel_cases, kernels
    from stapes.devices.backend import Device

    monkeypatch.setattr(kernel_cases, "WINDOW_SAMPLES", 6400)
    monkeypatch.setattr(kernels, "time_in_turn", lambda works, device, rounds: [[2e-3, 1e-3, 3e-3] for _ in works])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    run = kernels.KernelRun(
        Device(CPU, "cpu", "CPU", None), kernels=["log_mel", "frames"], windows=2, rounds=3, command=["stapes"]
    )
    rows = list(run.rows())
    assert {row.case["kernel"] for row in rows} >= {"log_mel", "sound → log_mel"}
    for row in rows:
        assert row.case["problem"] is None
        assert row.ours.figures["gb_s"] == pytest.approx(row.case["bytes"] / 2e-3 / 1e9)
        assert row.ours.figures["of_copy"] == pytest.approx(row.case["bytes"] / (2 << 30))
        assert row.ratios[0].times_as_fast.median == 1.0


def test_the_benchmark_says_which_kernel_is_wrong_and_goes_on(monkeypatch):
    from contextlib import nullcontext

    from stapes.benchmarks import kernels
    from stapes.benchmarks.kernel_cases import KernelCase, Prepared
    from stapes.devices.backend import Device

    def prepared(value: float) -> Prepared:
        def run() -> torch.Tensor:
            if value < 0:
                raise RuntimeError("out of resources\nand more")
            return torch.tensor([value])

        return Prepared(run, lambda: torch.zeros(1), 100, 1e-4)

    values = {"right": 0.0, "wrong": 0.5, "nothing": float("nan"), "refused": -1.0}
    cases = [KernelCase(name, "1", lambda value=value: prepared(value)) for name, value in values.items()]
    monkeypatch.setattr(kernels, "kernel_cases", lambda *_: cases)
    monkeypatch.setattr(kernels, "time_in_turn", lambda works, device, rounds: [[1e-3] for _ in works])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    run = kernels.KernelRun(Device(CPU, "cpu", "CPU", None), rounds=1, command=["stapes"])
    problems = {row.case["kernel"]: row.case["problem"] for row in run.rows()}
    assert problems["right"] is None
    assert "differs by 0.5" in problems["wrong"]
    assert "differs by nan" in problems["nothing"]
    assert problems["refused"] == "RuntimeError: out of resources"
