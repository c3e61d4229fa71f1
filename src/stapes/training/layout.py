"""Where each weight of a network lies: whole in every process, a part in each, or in one stage of a pipeline alone.

Weights, moments and averages are known by name and are whole on the CPU outside of a mesh, so that what one mesh
writes another reads. Everything here that is not about one tensor must be called by all processes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from stapes.training.mesh import Mesh

_MOST_AT_ONCE = 64 << 20
"""Numbers that are summed over processes in one go."""


class Layout:
    """Of the parameters of one network over a mesh; what there is to do to gradients that DDP and FSDP2 leave.

    partial: parameters of which each process of a tensor-parallel group has computed a part of the gradient.
    """

    def __init__(self, network: nn.Module, mesh: Mesh, partial: Iterable[nn.Parameter] = ()) -> None:
        self.mesh = mesh
        numbers = {id(parameter) for parameter in partial}
        self._partial = [name for name, parameter in network.named_parameters() if id(parameter) in numbers]

    @torch.no_grad()
    def finish_gradients(self, named: Mapping[str, Tensor], *, synced: bool) -> None:
        """Sum and average what the backward pass has left. synced: DDP or FSDP2 has done it for data and context."""
        gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        partial = shards([gradients[name] for name in self._partial if name in gradients])
        _sum_over(partial, self.mesh.tensor.get_group())
        sizes = self.mesh.sizes
        if not synced and sizes.data * sizes.cp > 1:
            assert self.mesh.copies is not None
            whole = shards(gradients.values())
            _sum_over(whole, self.mesh.copies)
            torch._foreach_mul_(whole, 1 / (sizes.data * sizes.cp))  # pyright: ignore[reportPrivateImportUsage]

    def norm(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """The length of all gradients together, each weight counted once: the same number in all processes."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        processes = dist.get_world_size()
        by_copies: dict[int, list[Tensor]] = {}
        for gradient, part in zip(gradients, shards(gradients), strict=True):
            holders = _holders(gradient) if isinstance(gradient, DTensor) else 1
            by_copies.setdefault(processes // self.mesh.sizes.pp // holders, []).append(part)
        for copies, parts in by_copies.items():
            norms = torch._foreach_norm(parts)  # pyright: ignore[reportPrivateImportUsage]
            total += torch.stack(norms).double().square().sum() / copies
        dist.all_reduce(total)
        return total.sqrt().float()

    def join(self, own: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """What the stages of a pipeline have, whole tensors on the CPU by name, of all of them."""
        if self.mesh.sizes.pp == 1:
            return dict(own)
        described: list[Any] = [None] * self.mesh.sizes.pp
        mine = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()]
        dist.all_gather_object(described, mine, group=self.mesh.pp)
        joined: dict[str, Tensor] = {}
        for stage, table in enumerate(described):
            source = dist.get_global_rank(self.mesh.pp, stage)
            for name, shape, dtype in table:
                has = stage == self.mesh.stage
                tensor = own[name].to(device) if has else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, source, group=self.mesh.pp)
                joined[name] = tensor.cpu()
        return joined


def _holders(tensor: DTensor) -> int:
    """How many processes hold different parts of it."""
    number = 1
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            number *= tensor.device_mesh.size(dim)
    return number


def _sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each over the processes of the group, in place, many at once."""
    waiting: list[Tensor] = []
    count = 0
    for number, tensor in enumerate(tensors, 1):
        waiting.append(tensor)
        count += tensor.numel()
        if count < _MOST_AT_ONCE and number < len(tensors):
            continue
        flat = _flatten_dense_tensors(waiting)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(waiting, _unflatten_dense_tensors(flat, waiting))  # pyright: ignore[reportPrivateImportUsage]
        waiting, count = [], 0


def shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of tensors that may be shared out; changing it changes them."""
    return [tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """A tensor, which may be shared out over processes, as a plain one on the CPU; all of them must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor on the CPU, as ``parameter`` lies: on its device, and this process's part of it."""
    if not isinstance(parameter, DTensor):
        return tensor.to(parameter.device, copy=True)
    part = _part(tensor, parameter.device_mesh, parameter.placements)
    return DTensor.from_local(
        part.to(parameter.device, copy=True).contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _part(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This process's part. FSDP2 cuts what tensor parallelism has cut before: from the last dimension to the first."""
    for dim in reversed(range(mesh.ndim)):
        along = getattr(placements[dim], "dim", None)
        if along is None:
            continue
        pieces = tensor.chunk(mesh.size(dim), along)
        rank = mesh.get_local_rank(dim)
        tensor = pieces[rank] if rank < len(pieces) else tensor.narrow(along, 0, 0)
    return tensor
