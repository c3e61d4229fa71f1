"""Weights of linear layers in 8 or 4 bits: the formats, how they are made, and how they are undone. Plain PyTorch.

A weight is an integer times the scale of its group: so many inputs of one output. **8 bits**: -127 to 127, groups of
64. On Whisper base this is a third of the divergence that one scale for an output leaves, for 3 % more memory.
**4 bits**: -8 to 7, groups of 32. The scale may be negative, so that the largest weight of a group, of whichever sign,
is -8 and no level is lost (llama.cpp's Q4_0); it is then searched for the least squared error. That errs by 0.089 of
the weights' size; a group of 64 with a scale and an offset, as large in memory, by 0.094; 8 bits by 0.006.

The integers lie as a kernel reads them: group after group of inputs, in it output after output, so that a tile of many
outputs is one run of memory. In 4 bits byte ``i`` of a group of ``g`` inputs holds input ``i`` in its low half and
input ``i + g / 2`` in its high half, each plus 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUPS = {8: 64, 4: 32}
"""Inputs that share a scale, by bits; 32 and 64 can be had with either."""

_SLICE = 1 << 20
"""Weights that are quantised at once: what is computed in fp32 beside the result stays below 30 MB."""

_FACTORS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
"""Scales to try in 4 bits, as parts of the one that just reaches the largest weight."""


class Quantized(NamedTuple):
    """A weight matrix of (outputs, inputs).

    values: int8 (inputs / group, outputs, group), or of 4 bits uint8 (inputs / group, outputs, group / 2). scales: fp16
    (inputs / group, outputs).
    """

    values: Tensor
    scales: Tensor

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 8 if self.values.dtype == torch.int8 else 4

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[2] * 8 // self.bits

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]

    @property
    def inputs(self) -> int:
        return self.scales.shape[0] * self.group

    def of(self, outputs: slice) -> Quantized:
        """Some of the outputs; shares memory."""
        return Quantized(self.values[:, outputs], self.scales[:, outputs])


def quantize_int8(weight: Tensor, group: int = GROUPS[8]) -> Quantized:
    """8 bits of a matrix (outputs, inputs) of any float dtype, on its device. ValueError: groups do not fill a row."""
    return _quantize(weight, 8, group)


def quantize_int4(weight: Tensor, group: int = GROUPS[4]) -> Quantized:
    """4 bits of a matrix (outputs, inputs) of any float dtype, on its device. ValueError: groups do not fill a row."""
    return _quantize(weight, 4, group)


def _quantize(weight: Tensor, bits: int, group: int) -> Quantized:
    outputs, inputs = weight.shape
    if group not in GROUPS.values() or inputs % group:
        raise ValueError(f"{inputs} inputs cannot be quantised in groups of {group}")
    kind = torch.int8 if bits == 8 else torch.uint8
    values = torch.empty(inputs // group, outputs, group * bits // 8, dtype=kind, device=weight.device)
    scales = torch.empty(inputs // group, outputs, dtype=torch.float16, device=weight.device)
    for rows in slices(outputs, inputs, _SLICE):
        part = weight[rows].float().unflatten(1, (-1, group))  # (rows, groups, inputs of a group)
        if bits == 8:
            scale = _usable(part.abs().amax(dim=-1) / 127)
            packed = (part / scale.float()[..., None]).round_().clamp_(-127, 127)
        else:
            scale = _search(part)
            levels = _levels(part, scale.float()).add_(8).to(torch.uint8)
            packed = levels[..., : group // 2] | levels[..., group // 2 :] << 4
        values[:, rows] = packed.transpose(0, 1)
        scales[:, rows] = scale.T
    return Quantized(values, scales)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix (outputs, inputs) that the numbers stand for: integer times scale, in fp32, rounded once."""
    values, scales = quantized
    groups, outputs, _ = values.shape
    whole = torch.empty(outputs, groups, quantized.group, device=values.device)
    turned = whole.transpose(0, 1)
    if quantized.bits == 8:
        turned.copy_(values)
    else:
        half = quantized.group // 2
        torch.sub(values & 15, 8.0, out=turned[..., :half])
        torch.sub(values >> 4, 8.0, out=turned[..., half:])
    turned.mul_(scales[..., None])
    return whole.flatten(1).to(dtype)


def concat(parts: list[Quantized]) -> Quantized:
    """Matrices of the same inputs, bits and group, the outputs of one behind those of another."""
    return Quantized(
        torch.cat([part.values for part in parts], dim=1), torch.cat([part.scales for part in parts], dim=1)
    )


def slices(outputs: int, inputs: int, most: int) -> list[slice]:
    """Outputs in runs of at most ``most`` weights."""
    rows = max(1, most // inputs)
    return [slice(first, first + rows) for first in range(0, outputs, rows)]


def _usable(scale: Tensor) -> Tensor:
    """A scale as it is kept; 1 for weights that are all zero or too small for any."""
    kept = scale.half()
    return torch.where(kept == 0, 1, kept)


def _levels(part: Tensor, scale: Tensor) -> Tensor:
    return (part / scale[..., None]).round_().clamp_(-8, 7)


def _search(part: Tensor) -> Tensor:
    """The scale of each group (…, inputs) with the least squared error that a few starts find."""
    largest = part.gather(-1, part.abs().argmax(dim=-1, keepdim=True))[..., 0]
    best, least = _usable(largest / -8), torch.full_like(largest, float("inf"))
    for factor in _FACTORS:
        start = _usable(largest * (factor / -8))
        levels = _levels(part, start.float())
        # With the levels given, the best scale is their regression on the weights.
        fitted = _usable((part * levels).sum(dim=-1) / levels.square().sum(dim=-1).clamp_(min=1))
        error = _levels(part, fitted.float()).mul_(fitted.float()[..., None]).sub_(part).square_().sum(dim=-1)
        better = error < least
        best, least = torch.where(better, fitted, best), torch.where(better, error, least)
    return best
