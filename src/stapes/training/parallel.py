"""Several processes: what they know of each other, and how a plain network is made to work in all of them.

Parallelism is applied to a finished network from outside, in an order that can be read off `divide` and `parallelize`:
the pipeline's stages, parts of matrices, parts of time, fp8, layers that are computed again, compiled layers; then DDP
or FSDP2. Which process does what never shows in the network's code. `stapes.training.mesh` says what there is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial as partial_function
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stapes.devices.backend import Device, resolve
from stapes.errors import DeviceError, UsageError
from stapes.training.config import ParallelOptions, RunOptions, Strategy
from stapes.training.context_parallel import share_context
from stapes.training.exchange import stay_out_of_graphs
from stapes.training.fp8 import use_fp8
from stapes.training.layout import Layout
from stapes.training.mesh import Mesh, mesh_sizes
from stapes.training.objectives import Losses, Objective, Prepared, StagedObjective
from stapes.training.pipeline import Pipeline, Stage, keep_stage, spread_layers
from stapes.training.tensor_parallel import share_tensors

_MOST_SHAPES = 64
"""Shapes that a layer is compiled for before PyTorch gives up on it; batches have a dozen."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the job."""

    rank: int
    world_size: int
    device: Device
    mesh: Mesh | None = None
    """None: a whole copy in each process, or nothing shared out at all."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """How many processes there are with different utterances; the others share the work on the same ones."""
        return self.world_size if self.mesh is None else self.mesh.sizes.data

    @property
    def data_rank(self) -> int:
        """Which of these this is."""
        return self.rank if self.mesh is None else self.mesh.data_rank

    @property
    def chance_rank(self) -> int:
        """Processes with the same draw the same random numbers: parts of one tensor must drop the same states."""
        return self.rank if self.mesh is None else self.rank // self.mesh.sizes.tp

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes with different utterances, in place."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=None if self.mesh is None else self.mesh.data)
        return tensor

    def sum_all(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place: what all must agree on."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, in order of rank. Plain Python objects of this program only."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Go on when all are here."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def processes(device: str, options: ParallelOptions) -> Iterator[Processes]:
    """Join the processes that torchrun started, or be alone. Raises DeviceError, UsageError."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    wanted = device
    if world_size > 1 and device.partition(":")[0] != "cpu" and torch.cuda.is_available():
        wanted = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    where = resolve(wanted)
    if where.backend != "cpu":
        torch.cuda.set_device(where.torch)
    if world_size == 1 and options.strategy not in ("fsdp", "deepspeed"):
        yield Processes(0, 1, where)
        return
    if world_size == 1:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29555"), ("RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
    # nccl is RCCL on AMD.
    backend = "gloo" if where.backend == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"process {rank} could not join the others ({error}): start them with torchrun") from error
    try:
        yield Processes(rank, world_size, where)
    finally:
        dist.destroy_process_group()


def on_mesh(processes: Processes, options: ParallelOptions) -> Processes:
    """The same processes, each with its place on the mesh that the options ask for. Raises UsageError."""
    sizes = mesh_sizes(options, processes.world_size)
    if not sizes.divides and not sizes.sharded:
        return replace(processes, mesh=None)
    return replace(processes, mesh=Mesh(sizes, "cpu" if processes.device.backend == "cpu" else "cuda"))


def choose_strategy(options: ParallelOptions, world_size: int) -> Strategy:
    """What ``auto`` means for so many processes. Raises UsageError for what they cannot do."""
    if options.strategy == "auto":
        return "ddp" if world_size > 1 else "single"
    if options.strategy == "single" and world_size > 1:
        raise UsageError(f"parallel.strategy is single, but torchrun started {world_size} processes: say ddp or fsdp")
    return "single" if options.strategy == "ddp" and world_size == 1 else options.strategy


def divide(objective: Objective, layers: Sequence[nn.Module], processes: Processes, run: RunOptions) -> Divided:
    """Share the work on one utterance out, in place, and prepare the layers; `check_mesh` has allowed it.

    Of the network, this process then holds what its place on the mesh asks for.
    """
    mesh, network, stages = processes.mesh, objective.network, None
    partial: list[nn.Parameter] = []
    if mesh is not None and mesh.sizes.pp > 1:
        stages = spread_layers(network, mesh.sizes.pp)
        keep_stage(network, stages, mesh.stage)
        layers = [layer for layer, stage in zip(layers, stages, strict=True) if stage == mesh.stage]
    if mesh is not None and mesh.sizes.tp > 1:
        partial = share_tensors(network, layers, mesh.tensor, over_time=mesh.sizes.sp)
    if mesh is not None and mesh.sizes.cp > 1:
        share_context(network, mesh.cp)
    if run.fp8:
        use_fp8(layers)
    for layer in layers:
        if run.checkpoint_layers:  # in place, for a wrapper would give the parameters other names
            layer.forward = partial_function(checkpoint, layer.forward, use_reentrant=False)
        if run.compile:
            layer.compile(dynamic=False)
    if run.compile:
        stay_out_of_graphs()
        torch._dynamo.config.recompile_limit = _MOST_SHAPES
    return Divided(layers, None if mesh is None else Layout(network, mesh, partial))


@dataclass(frozen=True)
class Divided:
    """What `divide` has left in this process."""

    layers: Sequence[nn.Module]
    layout: Layout | None
    """Where each weight lies; None: whole, in every process."""


def parallelize(
    objective: Objective,
    layers: Sequence[nn.Module],
    processes: Processes,
    strategy: Strategy,
    dtype: torch.dtype,
    *,
    drops_layers: bool = False,
    groups: int | None = None,
) -> nn.Module:
    """What to call in place of ``objective``, whose parameters are the same or are shared out in place.

    layers: what FSDP2 gathers one by one. dtype: of products. drops_layers: some layers may take no part in a step.
    groups: of rows that a pipeline works on one after the other; None: twice as many as stages.
    """
    mesh = processes.mesh
    root: nn.Module = objective
    if mesh is not None and mesh.sizes.pp > 1:
        assert isinstance(objective, StagedObjective)
        root = Stage(objective, mesh.stage, mesh.sizes.pp)
    if mesh is not None and mesh.shards is not None:
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # autocast decides; angles of positions stay float32
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh.shards, mp_policy=policy)
        fully_shard(root, mesh=mesh.shards, mp_policy=policy)
        register_fsdp_forward_method(root, "evaluate")
    if isinstance(root, Stage):
        assert mesh is not None
        width = root.objective.network.encoder.config.width
        pipeline = Pipeline(root, mesh, processes.device.torch, width, groups or 2 * mesh.sizes.pp)
        objective.evaluate = pipeline.evaluate
        return pipeline
    if strategy == "ddp" and (mesh is None or mesh.sizes.tp == 1) and (mesh is None or mesh.copies is not None):
        with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers, 2.11 has the old name only
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                objective,
                process_group=None if mesh is None else mesh.copies,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=drops_layers,
            )
    return objective


def is_synced(wrapped: nn.Module, processes: Processes) -> bool:
    """Whether the backward pass leaves gradients that are means over data and context: DDP's and FSDP2's are."""
    mesh = processes.mesh
    return mesh is None or mesh.shards is not None or isinstance(wrapped, DistributedDataParallel)


def losses_and_gradients(
    wrapped: nn.Module, prepared: Prepared, scale: Tensor, backward: Callable[[Tensor], None], loss_scale: float | None
) -> Losses:
    """The losses of a batch, and the gradient of their sum times ``scale``, added up in place.

    backward: makes the gradient of a loss, with fp16's ``loss_scale``, which a pipeline applies itself.
    """
    if isinstance(wrapped, Pipeline):
        return wrapped.losses_and_gradients(prepared, scale if loss_scale is None else scale * loss_scale)
    losses: Losses = wrapped(prepared)
    backward(losses.total * scale)
    return losses


@contextmanager
def gradient_sync(wrapped: nn.Module, last: bool) -> Iterator[None]:
    """Sum gradients over the processes in the last batch of a step only."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, FSDPModule):  # a pipeline's stage is told by its schedule
        cast(FSDPModule, wrapped).set_requires_gradient_sync(last)
    elif hasattr(wrapped, "set_gradient_accumulation_boundary"):  # DeepSpeed's engine
        wrapped.set_gradient_accumulation_boundary(last)  # pyright: ignore[reportCallIssue]
    yield


def forget_gathered(wrapped: nn.Module) -> None:
    """Have FSDP2 gather weights anew: after a forward pass it holds whole ones, which changes do not reach."""
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def lost_process(error: RuntimeError, step: int) -> DeviceError | None:
    """The reason for a collective operation's failure in a sentence; None for any other error."""
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset", "Timed out waiting", "timeout", "NCCL", "ncclRemoteError")
    if not dist.is_initialized() or not any(sign in text for sign in signs):
        return None
    return DeviceError(
        f"another process of the job ended or stopped answering at step {step} ({text.splitlines()[0][:200]}): see its "
        "own message above; `--resume` goes on from the last checkpoint"
    )
