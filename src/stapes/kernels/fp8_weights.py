"""Weights of linear layers in 8-bit floats, e4m3, with one scale for each output. Plain PyTorch.

They are kept as OCP has the format (``float8_e4m3fn``). The one of gfx942 (``float8_e4m3fnuz``) has the same 256 bytes
stand for half as much, so that there the scales are doubled and nothing is rounded again.
Source: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stapes.kernels.fp8_rows import round_rows_reference

STORED = torch.float8_e4m3fn
"""The kind of 8-bit floats that files have."""

_MINUS_ZERO = 0x80
"""A byte that is -0 in one kind and no number in the other."""


class Fp8Weight(NamedTuple):
    """A weight matrix. values: (outputs, inputs), of either kind of 8-bit floats. scales: (outputs,), float32."""

    values: Tensor
    scales: Tensor


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """A matrix (outputs, inputs) of any float dtype, on its device, each output by its own largest weight."""
    values, scales = round_rows_reference(weight, STORED)
    return Fp8Weight(values, scales[:, 0].contiguous())


def dequantize_fp8(weight: Fp8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix (outputs, inputs) that the numbers stand for: value times scale, in fp32, rounded once."""
    return (weight.values.float() * weight.scales[:, None]).to(dtype)


def of_kind(weight: Fp8Weight, kind: torch.dtype) -> Fp8Weight:
    """The same numbers in another kind of 8-bit floats, from that of files."""
    if weight.values.dtype == kind:
        return weight
    if (weight.values.dtype, kind) != (STORED, torch.float8_e4m3fnuz):
        raise ValueError(f"weights in {weight.values.dtype} cannot be had in {kind}")
    whole = weight.values.view(torch.uint8)
    return Fp8Weight(whole.masked_fill(whole == _MINUS_ZERO, 0).view(kind), 2 * weight.scales)


def concat(parts: list[Fp8Weight]) -> Fp8Weight:
    """Matrices of the same inputs, the outputs of one behind those of another."""
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    return Fp8Weight(values, torch.cat([part.scales for part in parts]))
