"""What processes tell each other in the middle of a network, with its gradient.

Each operation here is linear, and its backward pass is its transpose: what many have read, sends the sum of their
gradients back. So where every process of a group computes a loss, what they minimise together is the sum of these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# torch 2.13 has new names for these two, 2.11 has the old ones only.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        parts = dist.get_world_size(group)
        out = x.new_empty((parts * x.shape[0], *x.shape[1:]))  # gloo knows parts one behind the other only
        _all_gather(out, x.contiguous(), group=group)
        return out.unflatten(0, (parts, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = gradient.new_empty(gradient.shape[1:])
        _reduce_scatter(out, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return out, None


_apply: Any = _Gather.apply


def stay_out_of_graphs() -> None:
    """For layers that are compiled: what is exchanged is called from outside of their graphs."""
    global _apply
    _apply = torch.compiler.disable(_Gather.apply)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Everyone's ``x``, (processes, …)."""
    return _apply(x, group)


def gather_positions(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Everyone's part along a dimension, one behind the other. The parts have the same size."""
    parts = gather(x, group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def with_halo(x: Tensor, left: int, right: int, group: dist.ProcessGroup) -> Tensor:
    """(…, positions) with the last ``left`` positions of the process before and the first ``right`` of the next one.

    Zeros before the first process and behind the last one, which is what a convolution pads with.
    """
    rank, processes, count = dist.get_rank(group), dist.get_world_size(group), x.shape[-1]
    if max(left, right) > count:  # neighbours of neighbours are seen: everything, once
        whole = F.pad(gather_positions(x, x.ndim - 1, group), (left, right))
        return whole[..., rank * count : (rank + 1) * count + left + right]
    edges = gather(torch.cat([x[..., :right], x[..., count - left :]], dim=-1), group)
    before = edges[max(0, rank - 1)][..., right:] * (rank > 0)
    behind = edges[min(processes - 1, rank + 1)][..., :right] * (rank < processes - 1)
    return torch.cat([before, x, behind], dim=-1)
