"""Run in Triton's interpreter by test_interpreted.py: the kernels of training equal their references, both ways.

Gradients are also what autograd finds for the references of the forward kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stapes.kernels.dropout import Dropout, keep_reference
from stapes.kernels.gelu_dropout import (
    gelu_dropout,
    gelu_dropout_backward,
    gelu_dropout_backward_reference,
    gelu_dropout_reference,
)
from stapes.kernels.join_gradients import join_gradients, join_gradients_reference
from stapes.kernels.residual_norm import (
    Norm,
    Update,
    add_norm,
    add_norm_backward,
    add_norm_backward_reference,
    add_norm_reference,
)
from stapes.kernels.wave_convolution import (
    ChannelNorm,
    FirstConvolution,
    LayerNorm,
    Windows,
    activate_reference,
    first_convolution_reference,
)
from stapes.kernels.wave_gradient import (
    activate_backward,
    activate_backward_reference,
    first_convolution_backward,
    first_convolution_backward_reference,
)

DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)]
SEED = 0x1234_5678_9ABC_DEF1 - 2**62
WINDOWS = [Windows(), Windows(3, 2), Windows(2, 2), Windows(4, 3)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dropout(probability: float) -> Dropout | None:
    return Dropout(probability, torch.tensor([SEED])) if probability else None


def close(found: object, wanted: object, bound: float) -> None:
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


def test_dropout_keeps_its_share_and_rows_differ() -> None:
    kept = keep_reference(Dropout(0.3, torch.tensor([SEED])), 200, 300)
    assert abs(float((kept == 0).float().mean()) - 0.3) < 0.01
    assert abs(float(kept.mean()) - 1) < 0.02
    other = keep_reference(Dropout(0.3, torch.tensor([SEED + 1])), 200, 300)
    for one, two in ((kept[:-1], kept[1:]), (kept[:, :-1], kept[:, 1:]), (kept, other)):
        both = float(((one == 0) & (two == 0)).float().mean())
        assert abs(both - 0.09) < 0.01  # no more often together than by chance


@pytest.mark.parametrize(
    ("dtype", "bound", "probability"), [(*DTYPES[0], 0.0), (*DTYPES[0], 0.2), (*DTYPES[1], 0.2)], ids=str
)
@pytest.mark.parametrize(("added", "normed"), [(True, True), (True, False), (False, True)])
def test_add_norm(dtype: torch.dtype, bound: float, probability: float, added: bool, normed: bool) -> None:
    rows, width = 27, 24  # more rows than a program takes
    x, bias = random(rows, width, dtype=dtype), random(width, seed=2)
    update = Update(random(rows, width, seed=1, dtype=dtype), bias, dropout(probability)) if added else None
    norm = Norm(1 + random(width, seed=3), random(width, seed=4), 1e-5) if normed else None
    total, out = add_norm(x, update, norm)
    close((total, out), add_norm_reference(x, update, norm), bound)
    of_total = random(rows, width, seed=5, dtype=dtype)
    of_norm = random(rows, width, seed=6, dtype=dtype) if normed else None
    for given in (of_total, None) if normed else (of_total,):
        found = add_norm_backward(total, given, of_norm, update, norm)
        close(tuple(found), tuple(add_norm_backward_reference(total, given, of_norm, update, norm)), bound)
        if dtype == torch.float32:
            leaves = {"x": x.clone()}
            if update is not None:
                leaves |= {"update": update.value.clone(), "bias": bias.clone()}
            if norm is not None:
                leaves |= {"gain": norm.gain.clone(), "shift": norm.shift.clone()}
            for leaf in leaves.values():
                leaf.requires_grad_()
            again = add_norm_reference(
                leaves["x"],
                None if update is None else Update(leaves["update"], leaves["bias"], update.dropout),
                None if norm is None else Norm(leaves["gain"], leaves["shift"], norm.eps),
            )
            loss = sum((y * g).sum() for y, g in zip(again, (given, of_norm), strict=True) if g is not None)
            for name, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                close(getattr(found, name), grad, 1e-4)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES, ids=str)
@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_gelu_dropout(dtype: torch.dtype, bound: float, probability: float) -> None:
    x, bias, grad = (random(141, 40, dtype=dtype) * 2, random(40, seed=1), random(141, 40, seed=2, dtype=dtype))
    chance = dropout(probability)
    close(gelu_dropout(x, bias, chance), gelu_dropout_reference(x, bias, chance), bound)
    found = gelu_dropout_backward(x, bias, chance, grad)
    of_x, of_bias = gelu_dropout_backward_reference(x, bias, chance, grad)
    close(found[0], of_x, bound)
    close(found[1], of_bias, bound * 4)
    if dtype == torch.float32:
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        wanted = torch.autograd.grad(gelu_dropout_reference(*leaves, chance), leaves, grad)
        close(found, wanted, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_join_gradients(dtype: torch.dtype) -> None:
    parts = [random(135, 36, seed=seed, dtype=dtype) for seed in range(3)]
    joined, sums = join_gradients(parts[0], parts[1], parts[2])
    wanted, wanted_sums = join_gradients_reference(parts[0], parts[1], parts[2])
    assert torch.equal(joined, wanted)
    close(sums, wanted_sums, 1e-4)


@pytest.mark.parametrize(
    ("windows", "dtype", "bound"), [*((each, *DTYPES[0]) for each in WINDOWS), (WINDOWS[1], *DTYPES[1])], ids=str
)
@pytest.mark.parametrize("normed", [False, True])
def test_activate_backward(windows: Windows, normed: bool, dtype: torch.dtype, bound: float) -> None:
    frames, channels = 30, 24
    norm = LayerNorm(1 + random(channels, seed=1), random(channels, seed=2), 1e-5) if normed else None
    x, bias = random(frames, channels, seed=3, dtype=dtype), random(channels, seed=4)
    grad = random(frames // windows.stride, windows.kernel * channels, seed=5, dtype=dtype)
    grad[(frames - windows.kernel) // windows.stride + 1 :] = 0  # windows that reach beyond the last frame
    found = activate_backward(x, bias, norm, windows, grad)
    wanted = activate_backward_reference(x, bias, norm, windows, grad)
    close(found.x, wanted.x, bound)
    close(tuple(found[1:]) if normed else (found.bias,), tuple(wanted[1:]) if normed else (wanted.bias,), 4 * bound)
    if dtype == torch.float32:
        leaves = [x.clone(), bias.clone(), *((norm.gain.clone(), norm.bias.clone()) if norm else ())]
        for leaf in leaves:
            leaf.requires_grad_()
        again = activate_reference(
            leaves[0], leaves[1], LayerNorm(leaves[2], leaves[3], 1e-5) if norm else None, windows
        )
        for one, two in zip(found, torch.autograd.grad(again, leaves, grad), strict=False):
            close(one, two, 1e-4)


@pytest.mark.parametrize(
    ("windows", "dtype", "bound"), [*((each, *DTYPES[0]) for each in WINDOWS[1:3]), (WINDOWS[1], *DTYPES[1])], ids=str
)
@pytest.mark.parametrize("normed", ["layer", "channel"])
def test_first_convolution_backward(windows: Windows, normed: str, dtype: torch.dtype, bound: float) -> None:
    frames, channels, recordings, span = 12, 24, 2, 2  # frames of a slot, slots of a recording
    gain, shift = 1 + random(recordings, channels, seed=1), random(recordings, channels, seed=2)
    norm = LayerNorm(gain[0], shift[0], 1e-5) if normed == "layer" else None
    channel_norm = None if norm else ChannelNorm(gain, shift)
    layer = FirstConvolution(random(10, channels, seed=3), random(channels, seed=4), 5, norm)
    begun = torch.arange(span).repeat(recordings) * 60
    recording = torch.arange(recordings).repeat_interleave(span)
    slots = torch.stack([recording * 120 + begun, 110 - begun, recording]).int()
    samples, count = random(240, seed=5), recordings * span * frames
    grad = random(count // windows.stride, windows.kernel * channels, seed=6, dtype=dtype)
    grad[(count - windows.kernel) // windows.stride + 1 :] = 0
    arguments = (samples, slots, layer, channel_norm, frames, windows, grad)
    found, wanted = first_convolution_backward(*arguments), first_convolution_backward_reference(*arguments)
    close(found.product, wanted.product, bound)
    close(tuple(found[1:]), tuple(wanted[1:]), 4 * bound)
    if dtype == torch.float32:
        leaves = [leaf.clone().requires_grad_() for leaf in ((gain[0], shift[0]) if norm else (gain, shift))]
        again = first_convolution_reference(
            samples,
            slots,
            torch.tensor([[0.0, 1.0]] * recordings),
            FirstConvolution(layer.weight, layer.bias, 5, LayerNorm(leaves[0], leaves[1], 1e-5) if norm else None),
            None if norm else ChannelNorm(leaves[0], leaves[1]),
            frames,
            windows,
            dtype,
        )
        for one, two in zip(found[1:], torch.autograd.grad(again, leaves, grad), strict=True):
            close(one.view_as(two), two, 1e-4)
