# pyright: reportIncompatibleMethodOverride=false
"""Fused kernels with their gradients, as functions that autograd knows: what `wav2vec2_fused` is made of.

Each keeps what its backward pass cannot compute again cheaply, and no more. Weights come in the dtype in which they
are trained and are rounded to that of the activations here; their gradients are float32 sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stapes.kernels.dropout import Dropout
from stapes.kernels.gelu_dropout import gelu_dropout, gelu_dropout_backward
from stapes.kernels.join_gradients import join_gradients
from stapes.kernels.positions import position_windows, toeplitz
from stapes.kernels.residual_norm import Norm, Update, add_norm, add_norm_backward
from stapes.kernels.wave_convolution import (
    ChannelNorm,
    FirstConvolution,
    LayerNorm,
    Windows,
    activate,
    first_convolution,
)
from stapes.kernels.wave_gradient import activate_backward, first_convolution_backward, heard_windows

PARTS = 8
"""Sums over the frames of a long batch are made in so many parts, side by side: the matrix that comes out of them is
small, and a GPU would else be idle for the most part. Frames are a multiple of it."""

POSITIONS = 8
"""Neighbouring positions that are one row of the positional convolution's product."""


class AddNorm(torch.autograd.Function):
    """`stapes.kernels.residual_norm.add_norm`: (residual sum, its norm or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        gain: Tensor | None,
        shift: Tensor | None,
        eps: float,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor | None]:
        update = None if value is None or bias is None else Update(value, bias, dropout)
        norm = None if gain is None or shift is None else Norm(gain, shift, eps)
        total, out = add_norm(x, update, norm)
        seed = None if dropout is None else dropout.seed
        ctx.save_for_backward(None if norm is None else total, bias, gain, shift, seed)
        ctx.eps, ctx.probability = eps, 0.0 if dropout is None else dropout.probability
        ctx.set_materialize_grads(False)
        # Without an update x is its own sum: whoever goes on from it has its gradient added in the same pass.
        return (total if update is not None else x.view_as(x)), out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor | None, of_norm: Tensor | None) -> tuple[Tensor | None, ...]:
        total, bias, gain, shift, seed = ctx.saved_tensors
        norm = None if gain is None else Norm(gain, shift, ctx.eps)
        given = of_norm if of_norm is not None else of_total
        if given is None:
            return (None,) * 7
        update = None
        if bias is not None:
            update = Update(given, bias, None if seed is None else Dropout(ctx.probability, seed))
        found = add_norm_backward(total, _dense(of_total), _dense(of_norm), update, norm)
        return found.x, found.update, found.bias, found.gain, found.shift, None, None


class GeluDropout(torch.autograd.Function):
    """`stapes.kernels.gelu_dropout.gelu_dropout`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, dropout: Dropout | None) -> Tensor:
        ctx.save_for_backward(x, bias, None if dropout is None else dropout.seed)
        ctx.probability = 0.0 if dropout is None else dropout.probability
        return gelu_dropout(x, bias, dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, seed = ctx.saved_tensors
        dropout = None if seed is None else Dropout(ctx.probability, seed)
        return *gelu_dropout_backward(x, bias, dropout, grad.contiguous()), None


class QueryKeyValue(torch.autograd.Function):
    """Queries, keys and values by one product: x (batch, frames, width) → three of (batch, heads, frames, width/heads).

    weight: (3 × width, width), bias: (3 × width,). The fourth result is x, for the residual sum: a gradient that comes
    back on it is added by the product that makes the others.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        parts = F.linear(x, rounded, bias.to(x.dtype)).unflatten(-1, (3, heads, -1)).unbind(2)
        return *(part.transpose(1, 2) for part in parts), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, width = x.shape[0] * x.shape[1], x.shape[2]
        query, key, value = (
            x.new_zeros(rows, width) if grad is None else grad.transpose(1, 2).reshape(rows, width).contiguous()
            for grad in grads[:3]
        )
        joined, of_bias = join_gradients(query, key, value)
        of_x = _added(grads[3], joined, weight).view_as(x)
        return of_x, (joined.t() @ x.flatten(0, 1)).to(ctx.dtype), of_bias, None


class Product(torch.autograd.Function):
    """``x @ weight.T`` without a bias, and x, for the residual sum: see `QueryKeyValue`. x: (rows, inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        return x @ rounded.t(), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if grad is None:
            return of_sum, None
        return _added(of_sum, grad, weight), (grad.t() @ x).to(ctx.dtype)


class FirstWindows(torch.autograd.Function):
    """The first convolution with its norm and GELU, as the second one's windows: see `first_convolution`.

    Every recording has as many slots, a multiple of `PARTS`. With a group norm gain and shift are those of its
    `ChannelNorm`, (recordings, channels); with a layer norm (channels,).
    """

    @staticmethod
    def forward(
        ctx: Any,
        samples: Tensor,
        slots: Tensor,
        recordings: int,
        weight: Tensor,
        bias: Tensor,
        gain: Tensor,
        shift: Tensor,
        eps: float,
        stride: int,
        frames: int,
        windows: Windows,
        dtype: torch.dtype,
    ) -> Tensor:
        """weight: (kernel, channels)."""
        ctx.save_for_backward(samples, slots, weight, bias, gain, shift)
        ctx.shape = (recordings, eps, stride, frames, windows)
        layer, channel_norm = _first(weight, bias, gain, shift, eps, stride)
        affine = torch.stack([samples.new_zeros(recordings), samples.new_ones(recordings)], 1)
        out = first_convolution(samples, slots, affine, layer, channel_norm, frames, windows, dtype)
        return clear_tail(out, windows, slots.shape[1] * frames)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        samples, slots, weight, bias, gain, shift = ctx.saved_tensors
        recordings, eps, stride, frames, windows = ctx.shape
        layer, channel_norm = _first(weight, bias, gain, shift, eps, stride)
        grads = first_convolution_backward(samples, slots, layer, channel_norm, frames, windows, grad.contiguous())
        heard = heard_windows(samples, slots, len(weight), stride, frames)
        if channel_norm is None:
            sums = _products(grads.product, heard, PARTS).sum(0)
            of_weight, of_bias = sums[:-1], sums[-1]
            of_gain, of_shift = grads.scale.sum(0), grads.shift.sum(0)
        else:
            sums = _products(grads.product, heard, recordings * PARTS).unflatten(0, (recordings, PARTS)).sum(1)
            of_weight = (sums[:, :-1] * gain[:, None]).sum(0)
            of_bias = (grads.shift * gain).sum(0)
            of_gain, of_shift = grads.scale, grads.shift
        return None, None, None, of_weight, of_bias, of_gain, of_shift, None, None, None, None, None


class Activate(torch.autograd.Function):
    """What follows the product of a convolution: bias, layer norm, GELU, and the next one's windows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, gain: Tensor | None, shift: Tensor | None, eps: float, windows: Windows
    ) -> Tensor:
        ctx.save_for_backward(x, bias, gain, shift)
        ctx.shape = (eps, windows)
        norm = None if gain is None or shift is None else LayerNorm(gain, shift, eps)
        return clear_tail(activate(x, bias, norm, windows), windows, len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, gain, shift = ctx.saved_tensors
        eps, windows = ctx.shape
        norm = None if gain is None else LayerNorm(gain, shift, eps)
        return *activate_backward(x, bias, norm, windows, grad.contiguous()), None, None


class LongProduct(torch.autograd.Function):
    """``x @ weight.T`` for many rows, a multiple of `PARTS`: the gradient of the weight is summed up in parts.

    x: (rows, inputs), weight: (outputs, inputs).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        return x @ rounded.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            parts = grad.unflatten(0, (PARTS, -1)).transpose(1, 2) @ x.unflatten(0, (PARTS, -1))
            of_weight = parts.sum(0, dtype=torch.float32)
        return grad @ weight if ctx.needs_input_grad[0] else None, of_weight


class PositionProduct(torch.autograd.Function):
    """The wide grouped convolution over each row of a batch, without its bias: see `stapes.kernels.positions`.

    x: (batch, frames, width). weight: (width, width / groups, kernel). blocks: see `position_blocks`. What a row puts
    out beyond its real frames means nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, blocks: Tensor, groups: int) -> Tensor:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded, blocks)
        ctx.groups = groups
        return _convolved(x, rounded, blocks, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, blocks = ctx.saved_tensors
        groups, (width, inputs, size) = ctx.groups, weight.shape
        grad = grad.contiguous()
        # Of x: the convolution of the gradient with the weights turned round, in time and between its channels. An even
        # kernel looks one frame further back than ahead; turned round it is the other way, which a zero makes up for.
        turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2)
        turned = F.pad(turned, (1 - size % 2, 0))
        of_x = _convolved(grad, turned, blocks, groups)
        # Of the weights: windows times gradients, of which those of one tap lie on a diagonal.
        windows = position_windows(x.flatten(0, 1), blocks, groups, size, POSITIONS)
        padded = F.pad(grad, (0, 0, 0, -grad.shape[1] % POSITIONS))
        own = padded.view(-1, POSITIONS, groups, inputs).permute(2, 0, 1, 3).flatten(2)
        shape = (size + POSITIONS - 1, inputs, POSITIONS, inputs)
        products = (windows.transpose(1, 2) @ own).unflatten(1, shape[:2]).unflatten(3, shape[2:])
        frame, channel, place, output = products.stride()[1:]
        diagonals = products.as_strided(
            (groups, size, inputs, inputs, POSITIONS), (products.stride(0), frame, channel, output, frame + place)
        )
        of_weight = diagonals.sum(4, dtype=torch.float32)  # (groups, kernel, inputs, outputs)
        return of_x, of_weight.permute(0, 3, 2, 1).reshape(width, inputs, size), None, None


def position_blocks(rows: int, frames: int, counts: Tensor | None, device: torch.device) -> Tensor:
    """Where `PositionProduct` finds its windows, (3, blocks) int32: see `position_windows`."""
    place = torch.arange(0, frames, POSITIONS, device=device).expand(rows, -1)
    row = torch.arange(rows, device=device)[:, None]
    count = torch.full_like(place, frames) if counts is None else counts[:, None].expand_as(place)
    return torch.stack([row * frames + place, place, count]).flatten(1).int()


def clear_tail(windows_of: Tensor, windows: Windows, frames: int) -> Tensor:
    """Zeros in the last windows, parts of which no kernel writes: they reach beyond the last frame."""
    whole = max(0, (frames - windows.kernel) // windows.stride + 1)
    windows_of[whole:] = 0
    return windows_of


def _convolved(x: Tensor, weight: Tensor, blocks: Tensor, groups: int) -> Tensor:
    rows, frames, width = x.shape
    windows = position_windows(x.flatten(0, 1), blocks, groups, weight.shape[2], POSITIONS)
    product = windows @ toeplitz(weight, groups, POSITIONS)  # (groups, blocks, positions × width / groups)
    by_row = product.view(groups, rows, -1, width // groups)[:, :, :frames]
    return by_row.permute(1, 2, 0, 3).reshape(rows, frames, width)


def _first(
    weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float, stride: int
) -> tuple[FirstConvolution, ChannelNorm | None]:
    is_layer = gain.ndim == 1
    layer = FirstConvolution(weight, bias, stride, LayerNorm(gain, shift, eps) if is_layer else None)
    return layer, None if is_layer else ChannelNorm(gain, shift)


def _products(grad: Tensor, heard: Tensor, parts: int) -> Tensor:
    """Each tap's samples times gradients, and last their sum: (parts, kernel + 1, channels) float32.

    grad: (frames, channels). heard: (frames, kernel), float32. In half precision samples are the sum of two rounded
    numbers: neighbouring samples of speech are nearly alike, and a convolution lives on their differences.
    """
    heard = F.pad(heard, (0, 1), value=1.0)
    taps = heard.shape[1]
    if grad.dtype != torch.float32:
        rounded = heard.to(grad.dtype)
        heard = torch.cat([rounded, (heard - rounded.float()).to(grad.dtype)], 1)
    found = heard.unflatten(0, (parts, -1)).transpose(1, 2) @ grad.unflatten(0, (parts, -1))
    found = found.float()
    return found if found.shape[1] == taps else found[:, :taps] + found[:, taps:]


def _added(to: Tensor | None, grad: Tensor, weight: Tensor) -> Tensor:
    """``grad @ weight``, and what it is added to in the same pass."""
    return grad @ weight if to is None else torch.addmm(to.reshape(len(grad), -1), grad, weight)


def _dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()
