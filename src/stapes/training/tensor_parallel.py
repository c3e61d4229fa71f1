"""Tensor parallelism: each process has a part of the heads and of the inner widths of a layer's MLPs.

As Megatron does it (https://arxiv.org/abs/1909.08053), through PyTorch's DTensor: the first matrix is cut by columns,
the second by rows, and what the parts give is added up. With sequence parallelism (https://arxiv.org/abs/2205.05198)
the states between the matrices are cut as well, over time: norms, dropouts and convolutions are done for a part of
the positions, and the sum is given out in parts. What is not cut, such as the Conformer's convolutions, positions and
heads, has its weights whole in each process.

Dropout: without sequence parallelism the processes of a group draw the same random numbers, for they drop the same
states; heads, and inner widths, of different processes then drop the same ones, each still at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from stapes.data.seeds import mix
from stapes.models import wav2vec2
from stapes.models.conformer import ConformerLayer
from stapes.models.ctc_head import MaskedEncoderLayer
from stapes.training.span import Span, beside_of_part, convolutions, look_at, with_neighbours

LAYERS = (wav2vec2.EncoderLayer, ConformerLayer, MaskedEncoderLayer)
"""What can be cut."""


def share_tensors(
    network: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, *, over_time: bool
) -> list[nn.Parameter]:
    """Cut the encoder's ``layers`` over ``mesh`` (one dimension), in place.

    over_time: with sequence parallelism. Returns the parameters of which each process then computes a part of the
    gradient only, to be summed over the group.
    """
    for layer in layers:
        parallelize_module(layer, mesh, _plan(layer, over_time=over_time))
        attention: Any = layer.attention
        attention.heads //= mesh.size()
    if not over_time:
        return []
    _share_time(network.encoder, layers, mesh)
    return [each for layer in layers for each in layer.parameters() if not isinstance(each, DTensor)]


def _plan(layer: nn.Module, *, over_time: bool) -> dict[str, ParallelStyle]:
    """How each part of a layer is cut. Between the parts, states are cut over time or the same in all processes."""
    between = Shard(1) if over_time else Replicate()

    def matrices(*names: str) -> dict[str, ParallelStyle]:
        *first, last = names
        by_rows = RowwiseParallel(output_layouts=between)
        return {**{name: ColwiseParallel() for name in first}, last: by_rows}

    def read(*others: None) -> ParallelStyle:
        return PrepareModuleInput(
            input_layouts=(between, *others), desired_input_layouts=(Replicate(), *others), use_local_output=False
        )

    normed = PrepareModuleOutput(output_layouts=between, desired_output_layouts=Replicate(), use_local_output=False)
    attention = ("attention.query", "attention.key", "attention.value", "attention.out")
    if isinstance(layer, wav2vec2.EncoderLayer):
        return {"attention": read(None), **matrices(*attention), "mlp": read(), **matrices("mlp.up", "mlp.down")}
    if isinstance(layer, ConformerLayer):
        plan: dict[str, ParallelStyle] = {"attention.norm": normed, **matrices(*attention)}
        for mlp in ("first_mlp", "second_mlp"):
            plan |= {f"{mlp}.norm": normed, **matrices(f"{mlp}.up", f"{mlp}.down")}
        return plan
    assert isinstance(layer, MaskedEncoderLayer)
    return {"attention_norm": normed, **matrices(*attention), "mlp_norm": normed, **matrices("mlp.up", "mlp.down")}


def _share_time(encoder: Any, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Have the layers work on parts of the time. Before and behind them everything is whole, in all processes."""
    group = mesh.get_group()
    span = Span(group)
    plain = encoder.through
    for layer in layers:
        attention: Any = layer.attention
        look_at(attention, lambda x: x[:, :, : span.total])
        for conv in convolutions(layer):
            with_neighbours(conv, group)

    def through(x: Tensor, *beside: Any) -> Tensor:
        span.begin(x.shape[1])
        padded = F.pad(x, (0, 0, 0, span.padded - span.total))
        part = DTensor.from_local(padded, mesh, (Replicate(),), run_check=False).redistribute(mesh, (Shard(1),))
        given = beside_of_part(encoder, span, beside, len(x), x.device, cut_places=False)
        with _OwnChance(x.device, span.rank):
            out = plain(part.to_local(), *given)
        whole = DTensor.from_local(out, mesh, (Shard(1),), run_check=False).redistribute(mesh, (Replicate(),))
        return whole.to_local()[:, : span.total]

    encoder.through = through


class _OwnChance:
    """Parts of the time drop different states: other random numbers in each process, on the GPU, until the block ends.

    The host's generator, which layers are left out by, stays the same in all.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            seed = int(torch.randint(1 << 62, ()))
            self.before = torch.cuda.get_rng_state(self.device)
            torch.cuda.manual_seed(mix(seed, self.rank) >> 1)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.before, self.device)
