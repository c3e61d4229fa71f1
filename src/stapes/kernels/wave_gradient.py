"""Gradients of the kernels of wav2vec 2.0's front end (`wave_convolution`), so that it can be trained through them.

What follows a convolution's product is undone in one pass over memory: the gradients of a frame in all windows that
see it are added up, GELU and norm are computed again from what the product put out, and the sums over frames that the
gradients of biases and gains are come along as a partial sum of each program. Products are left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stapes.kernels.gelu_dropout import gelu_slope
from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of
from stapes.kernels.wave_convolution import ChannelNorm, FirstConvolution, LayerNorm, Windows, block

if TYPE_CHECKING:
    import triton.language as tl

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class ActivateGradients(NamedTuple):
    """What `activate_backward` finds. The sums are (channels,), float32; gain and shift only with a norm."""

    x: Tensor
    bias: Tensor
    gain: Tensor | None
    shift: Tensor | None


class FirstGradients(NamedTuple):
    """What `first_convolution_backward` finds.

    product: of what the norm sees, with a `ChannelNorm` of what GELU sees, (frames, channels). scale, shift: of each
    recording's `ChannelNorm`, (recordings, channels) float32; of a layer norm's gain and bias (1, channels).
    """

    product: Tensor
    scale: Tensor
    shift: Tensor


def activate_backward(
    x: Tensor, bias: Tensor, norm: LayerNorm | None, windows: Windows, grad: Tensor
) -> ActivateGradients:
    """Gradients of `activate`, without its second norm. grad: of the windows, in x's dtype."""
    return launch_or(
        "activate_backward",
        x.device,
        lambda: _launch_activate(x, bias, norm, windows, grad),
        lambda: activate_backward_reference(x, bias, norm, windows, grad),
    )


def activate_backward_reference(
    x: Tensor, bias: Tensor, norm: LayerNorm | None, windows: Windows, grad: Tensor
) -> ActivateGradients:
    """`activate_backward` in plain PyTorch, in float32."""
    y = x.float() + bias
    of_gelu = fold_windows(grad, windows, len(x))
    of_gain = of_shift = None
    if norm is None:
        of_y = torch.ops.aten.gelu_backward(of_gelu, y)
    else:
        of_y, of_gain, of_shift = _norm_backward(y, norm, of_gelu)
    return ActivateGradients(of_y.to(x.dtype), of_y.sum(0), of_gain, of_shift)


def first_convolution_backward(
    samples: Tensor,
    slots: Tensor,
    layer: FirstConvolution,
    channel_norm: ChannelNorm | None,
    frames: int,
    windows: Windows,
    grad: Tensor,
) -> FirstGradients:
    """Gradients of `first_convolution` behind the convolution itself, whose own are a product (see `FirstGradients`).

    Arguments as there, but that samples are heard as they are, and that every recording has as many slots, in order.
    grad: of the windows. With a `ChannelNorm` its gradients; what it sees is the convolution with its bias.
    """
    return launch_or(
        "first_convolution_backward",
        samples.device,
        lambda: _launch_first(samples, slots, layer, channel_norm, frames, windows, grad),
        lambda: first_convolution_backward_reference(samples, slots, layer, channel_norm, frames, windows, grad),
    )


def first_convolution_backward_reference(
    samples: Tensor,
    slots: Tensor,
    layer: FirstConvolution,
    channel_norm: ChannelNorm | None,
    frames: int,
    windows: Windows,
    grad: Tensor,
) -> FirstGradients:
    """`first_convolution_backward` in plain PyTorch, in float32."""
    x = heard_windows(samples, slots, layer.weight.shape[0], layer.stride, frames) @ layer.weight + layer.bias
    of_gelu = fold_windows(grad, windows, len(x))
    if layer.norm is not None:
        of_x, of_gain, of_shift = _norm_backward(x, layer.norm, of_gelu)
        return FirstGradients(of_x.to(grad.dtype), of_gain[None], of_shift[None])
    assert channel_norm is not None, "a group norm needs its scale and shift"
    x = x.view(len(channel_norm.scale), -1, x.shape[1])
    y = x * channel_norm.scale[:, None] + channel_norm.shift[:, None]
    of_y = torch.ops.aten.gelu_backward(of_gelu.view_as(y), y)
    return FirstGradients(of_y.flatten(0, 1).to(grad.dtype), (of_y * x).sum(1), of_y.sum(1))


def heard_windows(samples: Tensor, slots: Tensor, kernel_size: int, stride: int, frames: int) -> Tensor:
    """What the first convolution hears, (frames of all slots, kernel), float32; zeros beyond a recording."""
    origin, limit, _ = slots.long()
    steps = torch.arange(frames, device=samples.device)[:, None] * stride
    steps = steps + torch.arange(kernel_size, device=samples.device)
    place = (origin[:, None, None] + steps).clamp(max=len(samples) - 1)
    beyond = (steps >= limit[:, None, None]).any(2, keepdim=True)
    return samples[place].float().masked_fill(beyond, 0.0).flatten(0, 1)


def fold_windows(grad: Tensor, windows: Windows, frames: int) -> Tensor:
    """The gradients of a frame in all windows that see it, added up: (frames, channels) float32."""
    count, channels = len(grad), grad.shape[1] // windows.kernel
    length = max(frames, (count - 1) * windows.stride + windows.kernel)
    out = grad.new_zeros(length, channels, dtype=torch.float32)
    for place, part in enumerate(grad.float().view(count, windows.kernel, channels).unbind(1)):
        out[place : place + (count - 1) * windows.stride + 1 : windows.stride] += part
    return out[:frames]


def _norm_backward(x: Tensor, norm: LayerNorm, of_gelu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Through GELU and a layer norm: of x, of the gain, of the bias."""
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    scale = (variance + norm.eps).rsqrt()
    hat = (x - mean) * scale
    of_y = torch.ops.aten.gelu_backward(of_gelu, hat * norm.gain + norm.bias)
    of_hat = of_y * norm.gain
    of_x = scale * (of_hat - of_hat.mean(1, keepdim=True) - hat * (of_hat * hat).mean(1, keepdim=True))
    return of_x, (of_y * hat).sum(0), of_y.sum(0)


@kernel
def _fold_windows(
    grad_ptr, frame, inside, channel, windows, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr
):
    """Gradients of frames (frames, channels), float32."""
    grad = tl.zeros((frame.shape[0], channel.shape[0]), tl.float32)
    for back in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):  # pyright: ignore[reportGeneralTypeIssues]
        window = frame // STRIDE - back
        place = frame - window * STRIDE
        seen = inside & (window >= 0) & (window < windows) & (place < KERNEL)
        row = (window.to(tl.int64) * KERNEL + place) * CHANNELS
        grad += tl.load(
            grad_ptr + row[:, None] + channel[None, :], mask=seen[:, None] & (channel < CHANNELS)[None, :], other=0.0
        ).to(tl.float32)
    return grad


@kernel
def _standardize(x, eps, channel, CHANNELS: tl.constexpr):
    """(frames, channels) less each frame's mean, and what makes its deviation 1, (frames,)."""
    mean = tl.sum(x, 1) / CHANNELS
    x = tl.where((channel < CHANNELS)[None, :], x - mean[:, None], 0.0)
    return x, tl.rsqrt(tl.sum(x * x, 1) / CHANNELS + eps)


@kernel
def _of_standardized(hat, of_hat, scale, CHANNELS: tl.constexpr):
    """The gradient before `_standardize`; of_hat: that of hat = x × scale, zeros behind the last channel."""
    mean, share = tl.sum(of_hat, 1) / CHANNELS, tl.sum(of_hat * hat, 1) / CHANNELS
    return scale[:, None] * (of_hat - mean[:, None] - hat * share[:, None])


@kernel
def _activate_backward(
    x_ptr, bias_ptr, gain_ptr, shift_ptr, grad_ptr, of_x_ptr, sums_ptr, frames, windows, eps,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    FRAMES: tl.constexpr, ROUNDS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``sums``: of bias, gain and shift, (programs, 3, channels)."""
    channel = tl.arange(0, BLOCK)
    real = channel < CHANNELS
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0)
    of_bias = tl.zeros((FRAMES, BLOCK), tl.float32)
    of_gain = tl.zeros((FRAMES, BLOCK), tl.float32)
    of_shift = tl.zeros((FRAMES, BLOCK), tl.float32)
    for number in range(tl.minimum(ROUNDS, tl.cdiv(frames - tl.program_id(0) * (ROUNDS * FRAMES), FRAMES))):
        frame = (tl.program_id(0) * ROUNDS + number) * FRAMES + tl.arange(0, FRAMES)
        inside = frame < frames
        place = frame.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        kept = inside[:, None] & real[None, :]
        x = tl.load(x_ptr + place, mask=kept, other=0.0).to(tl.float32) + bias[None, :]
        grad = _fold_windows(grad_ptr, frame, inside, channel, windows, CHANNELS, KERNEL, STRIDE)
        if NORM:
            x, scale = _standardize(x, eps, channel, CHANNELS)
            x = x * scale[:, None]
            gain = tl.load(gain_ptr + channel, mask=real, other=0.0)[None, :]
            grad *= gelu_slope(x * gain + tl.load(shift_ptr + channel, mask=real, other=0.0)[None, :], EXACT)
            of_gain += grad * x
            of_shift += grad
            grad = _of_standardized(x, grad * gain, scale, CHANNELS)
        else:
            grad *= gelu_slope(x, EXACT)
        tl.store(of_x_ptr + place, grad.to(of_x_ptr.dtype.element_ty), mask=kept)
        of_bias += tl.where(kept, grad, 0.0)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * (3 * CHANNELS) + channel
    tl.store(sums, tl.sum(of_bias, 0), mask=real)
    if NORM:
        tl.store(sums + CHANNELS, tl.sum(of_gain, 0), mask=real)
        tl.store(sums + 2 * CHANNELS, tl.sum(of_shift, 0), mask=real)


@kernel
def _first_convolution_backward(
    samples_ptr, slots_ptr, weight_ptr, bias_ptr, gain_ptr, shift_ptr, grad_ptr, of_x_ptr, sums_ptr,
    slots, frames, windows, eps,
    SLOT_FRAMES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, STEP: tl.constexpr,
    LAYER_NORM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, FRAMES: tl.constexpr, ROUNDS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Some frames of one recording, of ``frames`` that each has. ``sums``: (recordings, programs of one, 2, channels).

    The convolution is computed again: ten multiplications cost less than a number read.
    """
    part, recording = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    real = channel < CHANNELS
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0)[None, :]
    row = 0 if LAYER_NORM else recording * CHANNELS
    gain = tl.load(gain_ptr + row + channel, mask=real, other=0.0)[None, :]
    shift = tl.load(shift_ptr + row + channel, mask=real, other=0.0)[None, :]
    of_gain = tl.zeros((FRAMES, BLOCK), tl.float32)
    of_shift = tl.zeros((FRAMES, BLOCK), tl.float32)
    for number in range(tl.minimum(ROUNDS, tl.cdiv(frames - part * (ROUNDS * FRAMES), FRAMES))):
        own = (part * ROUNDS + number) * FRAMES + tl.arange(0, FRAMES)
        inside = own < frames
        frame = recording * frames + own
        slot = frame // SLOT_FRAMES
        begin = (frame % SLOT_FRAMES) * STEP
        origin = tl.load(slots_ptr + slot, mask=inside, other=0)
        limit = tl.load(slots_ptr + slots + slot, mask=inside, other=0)
        whole = inside & (begin + TAPS <= limit)
        x = tl.zeros((FRAMES, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            heard = tl.load(samples_ptr + origin + begin + tap, mask=whole, other=0.0).to(tl.float32)
            x += heard[:, None] * tl.load(weight_ptr + tap * CHANNELS + channel, mask=real, other=0.0)[None, :]
        x += bias
        grad = _fold_windows(grad_ptr, frame, inside, channel, windows, CHANNELS, KERNEL, STRIDE)
        if LAYER_NORM:
            x, scale = _standardize(x, eps, channel, CHANNELS)
            x = x * scale[:, None]
            grad *= gelu_slope(x * gain + shift, EXACT)
            of_gain += grad * x
            of_shift += grad
            grad = _of_standardized(x, grad * gain, scale, CHANNELS)
        else:
            grad *= gelu_slope(x * gain + shift, EXACT)
            of_gain += grad * x
            of_shift += grad
        place = frame.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        kept = inside[:, None] & real[None, :]
        tl.store(of_x_ptr + place, grad.to(of_x_ptr.dtype.element_ty), mask=kept)
    number = recording * tl.num_programs(0) + part
    sums = sums_ptr + number.to(tl.int64) * (2 * CHANNELS) + channel
    tl.store(sums, tl.sum(of_gain, 0), mask=real)
    tl.store(sums + CHANNELS, tl.sum(of_shift, 0), mask=real)


def _launch_activate(
    x: Tensor, bias: Tensor, norm: LayerNorm | None, windows: Windows, grad: Tensor
) -> ActivateGradients:
    frames, channels = x.shape
    of_x = torch.empty_like(x)
    tile, rounds, warps = _tile(target_of(x.device))
    programs = -(-frames // (tile * rounds))
    sums = torch.empty(programs, 3, channels, dtype=torch.float32, device=x.device)
    _activate_backward[(programs,)](
        x,
        bias,
        bias if norm is None else norm.gain,
        bias if norm is None else norm.bias,
        grad,
        of_x,
        sums,
        frames,
        len(grad),
        0.0 if norm is None else norm.eps,
        CHANNELS=channels,
        BLOCK=block(channels),
        NORM=norm is not None,
        KERNEL=windows.kernel,
        STRIDE=windows.stride,
        FRAMES=tile,
        ROUNDS=rounds,
        EXACT=x.dtype == torch.float32,
        num_warps=warps,
    )
    of_gain, of_shift = (None, None) if norm is None else sums[:, 1:].sum(0)
    return ActivateGradients(of_x, sums[:, 0].sum(0), of_gain, of_shift)


def _launch_first(
    samples: Tensor,
    slots: Tensor,
    layer: FirstConvolution,
    channel_norm: ChannelNorm | None,
    frames: int,
    windows: Windows,
    grad: Tensor,
) -> FirstGradients:
    taps, channels = layer.weight.shape
    count = slots.shape[1]
    if layer.norm is not None:
        gain, shift, eps = layer.norm.gain, layer.norm.bias, layer.norm.eps
        recordings = 1  # which frame belongs to which does not matter
    else:
        assert channel_norm is not None, "a group norm needs its scale and shift"
        gain, shift, eps = channel_norm.scale, channel_norm.shift, 0.0
        recordings = len(gain)
    own = count * frames // recordings
    tile, rounds, warps = _tile(target_of(samples.device))
    programs = -(-own // (tile * rounds))
    of_x = torch.empty(count * frames, channels, dtype=grad.dtype, device=grad.device)
    sums = torch.empty(recordings, programs, 2, channels, dtype=torch.float32, device=grad.device)
    _first_convolution_backward[(programs, recordings)](
        samples,
        slots,
        layer.weight,
        layer.bias,
        gain,
        shift,
        grad,
        of_x,
        sums,
        count,
        own,
        len(grad),
        eps,
        SLOT_FRAMES=frames,
        CHANNELS=channels,
        BLOCK=block(channels),
        TAPS=taps,
        STEP=layer.stride,
        LAYER_NORM=layer.norm is not None,
        KERNEL=windows.kernel,
        STRIDE=windows.stride,
        FRAMES=tile,
        ROUNDS=rounds,
        EXACT=grad.dtype == torch.float32,
        num_warps=warps,
    )
    summed = sums.sum(1)
    return FirstGradients(of_x, summed[:, 0], summed[:, 1])


def _tile(target: Target | None) -> tuple[int, int, int]:
    """Frames of a program at a time, how many times, and warps."""
    return (2, 64, 4) if target is not None and target.wave_size == 64 else (4, 32, 8)


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the sizes of all published models."""
    frames, rounds, warps = _tile(target)
    floats = dict.fromkeys(("bias_ptr", "gain_ptr", "shift_ptr", "sums_ptr"), "*fp32")
    for name in _TRITON.values():
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        common = {"CHANNELS": 512, "BLOCK": 512, "FRAMES": frames, "ROUNDS": rounds, "EXACT": name == "fp32"}
        for norm in (False, True):
            yield CompileCase(
                f"first_convolution_backward {'layer' if norm else 'group'} norm",
                name,
                _first_convolution_backward,
                signature=floats
                | {"samples_ptr": "*fp32", "slots_ptr": "*i32", "weight_ptr": "*fp32"}
                | {"grad_ptr": f"*{name}", "of_x_ptr": f"*{name}"}
                | {"slots": "i32", "frames": "i32", "windows": "i32", "eps": "fp32"},
                constants=common
                | {"SLOT_FRAMES": 64, "TAPS": 10, "STEP": 5, "KERNEL": 3, "STRIDE": 2, "LAYER_NORM": norm},
                warps=warps,
                skip=skip,
            )
            for size, stride in ((3, 2), (1, 1)):
                yield CompileCase(
                    f"activate_backward{' norm' if norm else ''}{' last' if size == 1 else ''}",
                    name,
                    _activate_backward,
                    signature=floats
                    | dict.fromkeys(("x_ptr", "grad_ptr", "of_x_ptr"), f"*{name}")
                    | {"frames": "i32", "windows": "i32", "eps": "fp32"},
                    constants=common | {"NORM": norm, "KERNEL": size, "STRIDE": stride},
                    warps=warps,
                    skip=skip,
                )
