"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): a few numbers beside a large matrix, learnt in its place.

A linear layer's matrix W stays as it is; what is learnt is a product B A of two thin ones, and the layer computes
W x + scale · B (A x). B begins as zeros, so that an adapted network begins as the network it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DOWN, UP = "lora_a", "lora_b"
"""What the two thin matrices are called in a layer: (rank, inputs), which is applied first, and (outputs, rank)."""


class LowRankLinear(nn.Linear):
    """A linear layer with an adapter beside its matrix, which keeps its name and its values.

    Args:
        linear: the layer that is adapted; its parameters are taken over and no longer trained.
        rank: width of the thin matrices.
        alpha: the adapter's product is multiplied with alpha / rank.
        dropout: of what the adapter sees, in training.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        self.requires_grad_(False)
        self.scale, self.dropout = alpha / rank, dropout
        weight = linear.weight
        self.lora_a = nn.Parameter(weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(weight.new_zeros(linear.out_features, rank))
        if not weight.is_meta:
            nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as nn.Linear begins, and peft's adapters

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        seen = F.dropout(x, self.dropout) if self.dropout and self.training else x
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(seen, self.lora_a), self.lora_b)


def add_low_rank(
    network: nn.Module, is_target: Callable[[str], bool], rank: int, alpha: float, dropout: float = 0.0
) -> list[str]:
    """Put adapters beside the linear layers whose path ``is_target`` names, and stop training everything else.

    Returns the paths, in the network's order.
    """
    network.requires_grad_(False)
    paths = [path for path, module in network.named_modules() if isinstance(module, nn.Linear) and is_target(path)]
    for path in paths:
        parent, _, name = path.rpartition(".")
        linear = network.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        setattr(network.get_submodule(parent), name, LowRankLinear(linear, rank, alpha, dropout))
    return paths


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.rpartition(".")[2] in (DOWN, UP)


def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The matrix that does what ``weight`` and its adapter do together, in the dtype of ``weight``."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
