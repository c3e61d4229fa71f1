"""Several processes: what they know of each other, and how a plain network is made to work in all of them.

Parallelism is applied to a finished network from outside, in an order that can be read off `parallelize`: layers that
are computed again, compiled layers, then DDP or FSDP2. Which process does what never shows in the network's code.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from stapes.devices.backend import Device, resolve
from stapes.errors import DeviceError, UsageError
from stapes.training.config import ParallelOptions, RunOptions, Strategy

_MOST_SHAPES = 64
"""Shapes that a layer is compiled for before PyTorch gives up on it; batches have a dozen."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the job."""

    rank: int
    world_size: int
    device: Device

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
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


def choose_strategy(options: ParallelOptions, world_size: int) -> Strategy:
    """What ``auto`` means for so many processes. Raises UsageError for what they cannot do."""
    if options.strategy == "auto":
        return "ddp" if world_size > 1 else "single"
    if options.strategy == "single" and world_size > 1:
        raise UsageError(f"parallel.strategy is single, but torchrun started {world_size} processes: say ddp or fsdp")
    return "single" if options.strategy == "ddp" and world_size == 1 else options.strategy


def prepare_layers(layers: Sequence[nn.Module], run: RunOptions) -> None:
    """Have the layers computed again in the backward pass, and compiled, where the run asks for it."""
    for layer in layers:
        if run.checkpoint_layers:  # in place, for a wrapper would give the parameters other names
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if run.compile:
            layer.compile(dynamic=False)
    if run.compile:
        torch._dynamo.config.recompile_limit = _MOST_SHAPES


def parallelize(
    objective: nn.Module,
    layers: Sequence[nn.Module],
    processes: Processes,
    strategy: Strategy,
    options: ParallelOptions,
    dtype: torch.dtype,
    *,
    drops_layers: bool = False,
) -> nn.Module:
    """What to call in place of ``objective``, whose parameters are the same or are shared out in place.

    layers: what FSDP2 gathers one by one. dtype: of products. drops_layers: some layers may take no part in a step.
    """
    if strategy == "ddp":
        with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers, 2.11 has the old name only
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                objective, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=drops_layers
            )
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # autocast decides; angles of positions stay float32
        )
        kind = "cpu" if processes.device.backend == "cpu" else "cuda"
        shards = options.shards or processes.world_size
        if processes.world_size % shards:
            raise UsageError(f"parallel.shards is {shards}, which does not divide {processes.world_size} processes")
        if shards == processes.world_size:
            mesh = init_device_mesh(kind, (shards,), mesh_dim_names=("fsdp",))
        else:
            mesh = init_device_mesh(kind, (processes.world_size // shards, shards), mesh_dim_names=("dp", "fsdp"))
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(objective, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(objective, "evaluate")
    return objective


@contextmanager
def gradient_sync(wrapped: nn.Module, last: bool) -> Iterator[None]:
    """Sum gradients over the processes in the last batch of a step only."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, FSDPModule):
        cast(FSDPModule, wrapped).set_requires_gradient_sync(last)
    elif hasattr(wrapped, "set_gradient_accumulation_boundary"):  # DeepSpeed's engine
        wrapped.set_gradient_accumulation_boundary(last)  # pyright: ignore[reportCallIssue]
    yield


def forget_gathered(objective: nn.Module) -> None:
    """Have FSDP2 gather weights anew: after a forward pass it holds whole ones, which changes do not reach."""
    for module in objective.modules():
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
