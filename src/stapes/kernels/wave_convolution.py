"""The parts of wav2vec 2.0's front end that no matrix product does: first convolution, norms, GELU.

A batch is one long sequence of frames, the recordings behind each other, so that a convolution is one product of its
weights with windows of frames, whatever the lengths are. These kernels write such windows: a frame that two windows see
is written twice, and the product is a plain one (775 TFLOP/s in bf16 on an H200), for which neither cuDNN nor MIOpen
has to find or compile a kernel for every new length.

Time is told in slots, a frame of the last convolution each: ``hop`` samples, and a fixed number of frames of every
convolution before. `first_convolution` is told of every slot where its samples are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class LayerNorm:
    """Over the channels: gain and bias (channels,), float32."""

    gain: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True)
class ChannelNorm:
    """A scale and a shift for each recording and channel, (recordings, channels), float32."""

    scale: Tensor
    shift: Tensor


@dataclass(frozen=True)
class Windows:
    """What the next convolution sees: ``kernel`` frames, from every ``stride``-th on. The default is each frame."""

    kernel: int = 1
    stride: int = 1


@dataclass(frozen=True)
class FirstConvolution:
    """weight: (kernel, channels), bias: (channels,), float32."""

    weight: Tensor
    bias: Tensor
    stride: int
    norm: LayerNorm | None
    """None: a group norm, whose `ChannelNorm` comes with the batch."""

    @cached_property
    def total(self) -> Tensor:
        """What each channel makes of a constant 1: (channels,)."""
        return self.weight.sum(0)


def first_convolution(
    samples: Tensor,
    slots: Tensor,
    affine: Tensor,
    layer: FirstConvolution,
    channel_norm: ChannelNorm | None,
    frames: int,
    windows: Windows,
    dtype: torch.dtype,
) -> Tensor:
    """Convolution, norm and GELU of ``frames`` frames in each slot.

    samples: (count,), float32. slots: (3, slots), int32: where a slot's first sample is, how many samples from there
    on belong to its recording (a frame that reaches beyond hears zeros), and which recording that is. affine
    (recordings, 2), float32: a sample x is heard as (x + first) × second. Returns (windows, kernel × channels), the
    frames of a window side by side; in the last windows, frames that would lie beyond the last slot are not written.
    """
    return launch_or(
        "first_convolution",
        samples.device,
        lambda: _launch_first(samples, slots, affine, layer, channel_norm, frames, windows, dtype),
        lambda: first_convolution_reference(samples, slots, affine, layer, channel_norm, frames, windows, dtype),
    )


def first_convolution_reference(
    samples: Tensor,
    slots: Tensor,
    affine: Tensor,
    layer: FirstConvolution,
    channel_norm: ChannelNorm | None,
    frames: int,
    windows: Windows,
    dtype: torch.dtype,
) -> Tensor:
    """`first_convolution` in plain PyTorch; what it does not write is 0 here."""
    origin, limit, recording = slots.long()
    kernel_size, channels = layer.weight.shape
    steps = torch.arange(frames, device=samples.device)[:, None] * layer.stride
    steps = steps + torch.arange(kernel_size, device=samples.device)
    place = (origin[:, None, None] + steps).clamp(max=len(samples) - 1)
    heard = samples[place].float().masked_fill((steps >= limit[:, None, None]).any(2, keepdim=True), 0.0)
    shift, scale = affine[recording].unbind(1)
    heard = (heard + shift[:, None, None]) * scale[:, None, None]
    x = heard @ layer.weight + layer.bias  # (slots, frames, channels)
    if layer.norm is not None:
        x = F.layer_norm(x, (channels,), layer.norm.gain, layer.norm.bias, layer.norm.eps)
    elif channel_norm is not None:
        x = x * channel_norm.scale[recording][:, None] + channel_norm.shift[recording][:, None]
    return _unfold(F.gelu(x).to(dtype).flatten(0, 1), windows)


def activate(
    x: Tensor, bias: Tensor, norm: LayerNorm | None, windows: Windows, *, after: LayerNorm | None = None
) -> Tensor:
    """What follows the product of a convolution: bias, layer norm, GELU, and ``after`` that another layer norm.

    x: (frames, channels). bias: (channels,), float32. Returns windows as `first_convolution` does, in x's dtype.
    """
    return launch_or(
        "activate",
        x.device,
        lambda: _launch_activate(x, bias, norm, windows, after),
        lambda: activate_reference(x, bias, norm, windows, after=after),
    )


def activate_reference(
    x: Tensor, bias: Tensor, norm: LayerNorm | None, windows: Windows, *, after: LayerNorm | None = None
) -> Tensor:
    """`activate` in plain PyTorch; what it does not write is 0 here."""
    y = x.float() + bias
    if norm is not None:
        y = F.layer_norm(y, bias.shape, norm.gain, norm.bias, norm.eps)
    y = F.gelu(y)
    if after is not None:
        y = F.layer_norm(y, bias.shape, after.gain, after.bias, after.eps)
    return _unfold(y.to(x.dtype), windows)


def _unfold(frames: Tensor, windows: Windows) -> Tensor:
    count = len(frames) // windows.stride
    padded = F.pad(frames, (0, 0, 0, max(0, windows.kernel - windows.stride)))
    return padded.unfold(0, windows.kernel, windows.stride)[:count].transpose(1, 2).flatten(1)


@kernel
def gelu(x, EXACT: tl.constexpr):
    """GELU; not exact, by a polynomial for the normal distribution within ±4: off by 0.0002 at most.

    The usual tanh form is off by 0.0005, and takes two of the special operations of which a GPU does few at a time.
    """
    if EXACT:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    near = tl.minimum(tl.maximum(x, -4.0), 4.0)
    square = near * near
    y = 2.2588183e-08 * square - 1.5888258e-06
    y = y * square + 4.7763858e-05
    y = y * square - 8.1218718e-04
    y = y * square + 8.7636895e-03
    y = y * square - 6.4554409e-02
    y = y * square + 3.9787026e-01
    return x * (0.5 + near * y)


@kernel
def _layer_norm(x, gain_ptr, bias_ptr, eps, channel, CHANNELS: tl.constexpr):
    """x: (frames, block of channels), zeros behind the last channel."""
    real = channel < CHANNELS
    mean = tl.sum(x, 1) / CHANNELS
    x = tl.where(real[None, :], x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / CHANNELS + eps)
    gain = tl.load(gain_ptr + channel, mask=real, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0)
    return x * scale[:, None] * gain[None, :] + bias[None, :]


@kernel
def _store_windows(
    out_ptr, y, frame, inside, channel, windows, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr
):
    """Each frame into every window that sees it."""
    for back in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):  # pyright: ignore[reportGeneralTypeIssues]
        window = frame // STRIDE - back
        place = frame - window * STRIDE
        kept = inside & (window >= 0) & (window < windows) & (place < KERNEL)
        row = (window.to(tl.int64) * KERNEL + place) * CHANNELS
        tl.store(
            out_ptr + row[:, None] + channel[None, :],
            y.to(out_ptr.dtype.element_ty),
            mask=kept[:, None] & (channel < CHANNELS)[None, :],
        )


@kernel
def _first_convolution(
    samples_ptr, slots_ptr, affine_ptr, weight_ptr, total_ptr, bias_ptr, gain_ptr, shift_ptr, out_ptr,
    slots, windows, eps,
    SLOT_FRAMES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, STEP: tl.constexpr,
    LAYER_NORM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, FRAMES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Some frames of one slot, all channels; sums in float32."""
    pieces: tl.constexpr = (SLOT_FRAMES + FRAMES - 1) // FRAMES  # pyright: ignore[reportAssignmentType]
    slot = tl.program_id(0) // pieces
    frame = (tl.program_id(0) % pieces) * FRAMES + tl.arange(0, FRAMES)
    channel = tl.arange(0, BLOCK)
    real = channel < CHANNELS
    origin = tl.load(slots_ptr + slot)
    limit = tl.load(slots_ptr + slots + slot)
    recording = tl.load(slots_ptr + 2 * slots + slot)
    first_sample = samples_ptr + origin + frame * STEP
    whole = frame * STEP + TAPS <= limit
    x = tl.zeros((FRAMES, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        heard = tl.load(first_sample + tap, mask=whole, other=0.0).to(tl.float32)
        x += heard[:, None] * tl.load(weight_ptr + tap * CHANNELS + channel, mask=real, other=0.0)[None, :]
    # (sample + offset) × factor, behind the sums: one operation in place of one for each tap.
    offset, factor = tl.load(affine_ptr + 2 * recording), tl.load(affine_ptr + 2 * recording + 1)
    constant = offset * factor * tl.load(total_ptr + channel, mask=real, other=0.0)
    x = x * factor + (constant + tl.load(bias_ptr + channel, mask=real, other=0.0))[None, :]
    if LAYER_NORM:
        x = _layer_norm(x, gain_ptr, shift_ptr, eps, channel, CHANNELS)
    else:
        gain = tl.load(gain_ptr + recording * CHANNELS + channel, mask=real, other=0.0)
        x = x * gain[None, :] + tl.load(shift_ptr + recording * CHANNELS + channel, mask=real, other=0.0)[None, :]
    number = slot * SLOT_FRAMES + frame
    _store_windows(out_ptr, gelu(x, EXACT), number, frame < SLOT_FRAMES, channel, windows, CHANNELS, KERNEL, STRIDE)


@kernel
def _activate(
    x_ptr, bias_ptr, gain_ptr, shift_ptr, after_gain_ptr, after_shift_ptr, out_ptr, frames, windows, eps, after_eps,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, FRAMES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    frame = tl.program_id(0) * FRAMES + tl.arange(0, FRAMES)
    channel = tl.arange(0, BLOCK)
    real = channel < CHANNELS
    inside = frame < frames
    place = frame.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + channel, mask=real, other=0.0)[None, :]
    if NORM:
        x = _layer_norm(x, gain_ptr, shift_ptr, eps, channel, CHANNELS)
    x = gelu(x, EXACT)
    if AFTER:
        x = _layer_norm(x, after_gain_ptr, after_shift_ptr, after_eps, channel, CHANNELS)
    _store_windows(out_ptr, x, frame, inside, channel, windows, CHANNELS, KERNEL, STRIDE)


def _launch_first(
    samples: Tensor,
    slots: Tensor,
    affine: Tensor,
    layer: FirstConvolution,
    channel_norm: ChannelNorm | None,
    frames: int,
    windows: Windows,
    dtype: torch.dtype,
) -> Tensor:
    taps, channels = layer.weight.shape
    count = slots.shape[1]
    out = torch.empty(count * frames // windows.stride, windows.kernel * channels, dtype=dtype, device=samples.device)
    tile, warps = _first_tile(target_of(samples.device))
    if layer.norm is not None:
        gain, shift, eps = layer.norm.gain, layer.norm.bias, layer.norm.eps
    else:
        assert channel_norm is not None, "a group norm needs its scale and shift"
        gain, shift, eps = channel_norm.scale, channel_norm.shift, 0.0
    _first_convolution[(count * -(-frames // tile),)](
        samples,
        slots,
        affine,
        layer.weight,
        layer.total,
        layer.bias,
        gain,
        shift,
        out,
        count,
        len(out),
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
        EXACT=dtype == torch.float32,
        num_warps=warps,
    )
    return out


def _launch_activate(
    x: Tensor, bias: Tensor, norm: LayerNorm | None, windows: Windows, after: LayerNorm | None
) -> Tensor:
    frames, channels = x.shape
    out = x.new_empty(frames // windows.stride, windows.kernel * channels)
    tile, warps = _activate_tile(target_of(x.device))
    first, second = norm or LayerNorm(bias, bias, 0.0), after or LayerNorm(bias, bias, 0.0)
    _activate[(-(-frames // tile),)](
        x,
        bias,
        first.gain,
        first.bias,
        second.gain,
        second.bias,
        out,
        frames,
        len(out),
        first.eps,
        second.eps,
        CHANNELS=channels,
        BLOCK=block(channels),
        NORM=norm is not None,
        AFTER=after is not None,
        KERNEL=windows.kernel,
        STRIDE=windows.stride,
        FRAMES=tile,
        EXACT=x.dtype == torch.float32,
        num_warps=warps,
    )
    return out


def block(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << (count - 1).bit_length()


def _first_tile(target: Target | None) -> tuple[int, int]:
    """Frames of a program, and warps. AMD's follow from what the compiler says."""
    if target is None or not target.is_amd:
        return 16, 4
    return (8, 8) if target.wave_size == 32 else (4, 4)


def _activate_tile(target: Target | None) -> tuple[int, int]:
    """Frames of a program, and warps."""
    return 8, 8 if target is not None and target.is_amd and target.wave_size == 32 else 4


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the sizes of all published models."""
    pointers = ("gain_ptr", "shift_ptr")
    numbers = {"slots": "i32", "windows": "i32", "eps": "fp32"}
    tile, warps = _first_tile(target)
    for name in _TRITON.values():
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        common = {"CHANNELS": 512, "BLOCK": 512, "EXACT": name == "fp32"}
        for norm in (False, True):
            yield CompileCase(
                f"first_convolution {'layer' if norm else 'group'} norm",
                name,
                _first_convolution,
                signature={
                    "samples_ptr": "*fp32",
                    "slots_ptr": "*i32",
                    **dict.fromkeys(("affine_ptr", "weight_ptr", "total_ptr", "bias_ptr", *pointers), "*fp32"),
                    "out_ptr": f"*{name}",
                    **numbers,
                },
                constants=common
                | {"SLOT_FRAMES": 64, "TAPS": 10, "STEP": 5, "KERNEL": 3, "STRIDE": 2, "FRAMES": tile}
                | {"LAYER_NORM": norm},
                warps=warps,
                skip=skip,
            )
        frames, activate_warps = _activate_tile(target)
        for label, norm, after, size, stride in (
            ("", False, False, 3, 2),
            (" norm", True, False, 3, 2),
            (" last", False, True, 1, 1),
            (" norm last", True, True, 1, 1),
        ):
            yield CompileCase(
                f"activate{label}",
                name,
                _activate,
                signature={
                    "x_ptr": f"*{name}",
                    "bias_ptr": "*fp32",
                    **dict.fromkeys((*pointers, "after_gain_ptr", "after_shift_ptr"), "*fp32"),
                    "out_ptr": f"*{name}",
                    "frames": "i32",
                    "windows": "i32",
                    "eps": "fp32",
                    "after_eps": "fp32",
                },
                constants=common | {"NORM": norm, "AFTER": after, "KERNEL": size, "STRIDE": stride, "FRAMES": frames},
                warps=activate_warps,
                skip=skip,
            )
