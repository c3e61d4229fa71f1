"""Run in Triton's interpreter by test_interpreted.py: the kernels of wav2vec 2.0 equal their references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from stapes.kernels.packed_attention import (
    Tile,
    launch_attention,
    packed_attention,
    packed_attention_reference,
    query_blocks,
)
from stapes.kernels.positions import (
    add_positions,
    add_positions_reference,
    position_windows,
    position_windows_reference,
    toeplitz,
)
from stapes.kernels.wave_convolution import (
    ChannelNorm,
    FirstConvolution,
    LayerNorm,
    Windows,
    activate,
    activate_reference,
    first_convolution,
    first_convolution_reference,
)
from stapes.kernels.wave_moments import moments, moments_reference

WINDOWS = [Windows(), Windows(3, 2), Windows(2, 2), Windows(4, 3), Windows(7, 3)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def written(windows: Windows, frames: int) -> int:
    """Windows all of whose frames are there."""
    return (frames - windows.kernel) // windows.stride + 1


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("norm", ["layer", "channel"])
@pytest.mark.parametrize(("frames", "channels"), [(12, 24), (24, 16)])
def test_first_convolution(windows: Windows, norm: str, frames: int, channels: int) -> None:
    gain, shift = random(channels, seed=3), random(channels, seed=4)
    layer_norm = LayerNorm(gain, shift, 1e-5) if norm == "layer" else None
    channel_norm = ChannelNorm(random(2, channels, seed=5), random(2, channels, seed=6)) if norm == "channel" else None
    layer = FirstConvolution(random(10, channels, seed=1), random(channels, seed=2), 5, layer_norm)
    slots = integers([0, 60, 700, 2], [400, 340, 0, 31], [0, 0, 0, 1])
    samples = random(600)
    samples[500:] = float("nan")  # beyond what any slot may hear
    affine = torch.tensor([[0.5, 2.0], [-1.0, 0.1]])
    arguments = (samples, slots, affine, layer, channel_norm, frames, windows, torch.float32)
    found, wanted = first_convolution(*arguments), first_convolution_reference(*arguments)
    count = written(windows, 4 * frames)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found[:count], wanted[:count], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_activate(windows: Windows, norm: bool, after: bool) -> None:
    first, second = (LayerNorm(random(24, seed=seed), random(24, seed=seed + 1), 1e-5) for seed in (1, 3))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, bias = random(42, 24, dtype=dtype), random(24, seed=7)
        found = activate(x, bias, first if norm else None, windows, after=second if after else None)
        wanted = activate_reference(x, bias, first if norm else None, windows, after=second if after else None)
        count = written(windows, 42)
        torch.testing.assert_close(found[:count], wanted[:count], atol=bound, rtol=bound)


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (10, 5), (9, 4)])
def test_moments(size: int, stride: int) -> None:
    samples = 100 + random(3_000)
    recordings = integers([0, 1_700, 1_705, 2_000], [1_700, 5, 290, 0])
    found = moments(samples, recordings, 1_700, size, stride)
    torch.testing.assert_close(found, moments_reference(samples, recordings, 1_700, size, stride), rtol=1e-12, atol=0)


def test_moments_of_many_windows_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from stapes.kernels import wave_moments

    monkeypatch.setattr(wave_moments, "_PART", 256)
    samples, recordings = random(3_000), integers([0, 2_000], [2_000, 900])
    found = moments(samples, recordings, 2_000, 10, 5)
    torch.testing.assert_close(found, moments_reference(samples, recordings, 2_000, 10, 5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "head"), [(2, 16), (3, 24)])
@pytest.mark.parametrize("tile", [None, Tile(64, 16, 4, 1)], ids=str)
def test_attention_stays_within_a_recording(heads: int, head: int, tile: Tile | None) -> None:
    spans, keys = np.array([130, 1, 65]), np.array([129, 1, 64])
    blocks = torch.from_numpy(query_blocks(np.cumsum(spans) - spans, spans, keys).astype(np.int32))
    qkv = random(200, 3 * heads * head)
    qkv[129] = float("nan")  # a row that is no key, of values that nothing may hear
    found = launch_attention(qkv, blocks, heads, tile) if tile else packed_attention(qkv, blocks, heads)
    real = [*range(129), 130, *range(131, 195)]
    torch.testing.assert_close(found[real], packed_attention_reference(qkv, blocks, heads)[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [16, 15])
@pytest.mark.parametrize(("width", "groups", "positions"), [(32, 4, 4), (36, 3, 8)])
def test_positions_are_the_convolution(size: int, width: int, groups: int, positions: int) -> None:
    """Windows, product and GELU together are a grouped convolution with padding, its GELU added."""
    counts, spans = [21, 3], [23, 4]
    numbers = [-(-span // positions) for span in spans]
    starts = [0, spans[0]]
    blocks = integers(
        [start + n * positions for start, number in zip(starts, numbers, strict=True) for n in range(number)],
        [n * positions for number in numbers for n in range(number)],
        [count for count, number in zip(counts, numbers, strict=True) for _ in range(number)],
    )
    places = list(range(spans[0])) + [numbers[0] * positions + n for n in range(spans[1])]
    conv = torch.nn.Conv1d(width, width, size, padding=size // 2, groups=groups)
    x = random(sum(spans), width)
    windows = position_windows(x, blocks, groups, size, positions)
    assert torch.equal(windows, position_windows_reference(x, blocks, groups, size, positions))
    product = torch.bmm(windows, toeplitz(conv.weight.detach(), groups, positions))
    found, reference = x.clone(), x.clone()
    add_positions(found, product, torch.tensor(places, dtype=torch.int32), conv.bias.detach())
    add_positions_reference(reference, product, torch.tensor(places, dtype=torch.int32), conv.bias.detach())
    torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)
    for start, count in zip(starts, counts, strict=True):
        alone = x[start : start + count]
        with torch.no_grad():
            heard = torch.nn.functional.gelu(conv(alone.T[None])[0, :, :count].T)
        torch.testing.assert_close(found[start : start + count], alone + heard, atol=1e-5, rtol=1e-5)
