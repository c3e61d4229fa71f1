"""How a run fits into given GPUs: which mesh, how large a batch, layers computed again or not; and why no simpler way.

What a process holds is estimated from what was counted on the ``meta`` device (`stapes.training.plan.Costs`):

    weights, gradients, AdamW's two means (and a moving average), 4 bytes a number each
    what the forward pass keeps of the largest batch
    with FSDP2, besides, the weights of what is being computed, whole

Of all that fit, the fastest is taken, by what the ways below are guessed to cost; among equals the simplest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from stapes.training.mesh import MeshSizes
from stapes.training.plan import Cost, layers_by_name, parameter_counts

_RESERVE = 1.5 * 2**30
"""Bytes that a driver, the libraries' workspaces and NCCL take."""

_USABLE = 0.9
"""Of the rest: what is freed is not always where it is needed."""

_UNCUT = 10 / 34
"""Of what a layer keeps, the part that tensor parallelism leaves whole without sequence parallelism (Korthikanti et al.
2022, https://arxiv.org/abs/2205.05198, equation 2, without the scores that fused attention does not keep)."""

_AGAIN, _GATHERING, _SMALLER, _TENSOR, _CONTEXT = 4 / 3, 1.03, 1.05, 1.08, 1.1
"""Times that a step takes, guessed: with layers computed again, with FSDP2, for each halving of the batch, for each
doubling of tp, of cp."""

_IN_A_MACHINE = 8
"""GPUs whose links are fast enough for tp."""


@dataclass(frozen=True)
class Need:
    """What one way of running needs."""

    sizes: MeshSizes
    checkpoint_layers: bool
    parts: int
    """Into which a batch is cut, to be added up by optimizer.accumulate."""
    weights: float
    """Bytes of one process for weights, gradients and the optimiser."""
    kept: float
    """For what is kept of the largest batch."""
    slowdown: float
    """Against whole copies that keep everything."""

    @property
    def bytes(self) -> float:
        """In all."""
        return self.weights + self.kept

    def text(self) -> str:
        """For people."""
        again = ", layers computed again" if self.checkpoint_layers else ""
        again += f", batches in {self.parts} parts" if self.parts > 1 else ""
        return (
            f"{self.sizes.text()}{again}: {self.bytes / 2**30:.1f} GiB a process, {self.weights / 2**30:.1f} for "
            f"weights and optimiser, {self.kept / 2**30:.1f} for the largest batch"
        )


@dataclass(frozen=True)
class Choice:
    """What was found."""

    need: Need
    fits: bool
    reasons: list[str]


class Sizes:
    """Of one network and its largest batch, for `needs`."""

    def __init__(self, network: nn.Module, cost: Cost, *, half: bool, average: bool) -> None:
        every, trained = parameter_counts(network)
        layers = list(layers_by_name(network).values())
        inside = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
        self.layers = max(1, len(layers))
        width = 2.0 if half else 4.0
        self.product_bytes = width
        share = trained / max(1, every)
        self.layer_weights = inside * (4.0 + 4.0 * (3 + average) * share)
        self.other_weights = (every - inside) * (4.0 + 4.0 * (3 + average) * share)
        self.inside, self.outside = inside, every - inside
        self.layer_kept = cost.layer_bytes * width / 4
        self.other_kept = (cost.saved_bytes - cost.layer_bytes) * width / 4
        self.states = cost.state_bytes * width / 4
        attention = getattr(layers[0], "attention", None) if layers else None
        self.heads: int = 0 if attention is None else attention.heads

    def need(
        self, sizes: MeshSizes, *, checkpoint_layers: bool = False, parts: int = 1, groups: int | None = None
    ) -> Need:
        """What one process needs, the one that needs most."""
        shards = sizes.fsdp * sizes.cp if sizes.sharded else 1
        layer_weights = self.layer_weights / sizes.tp / sizes.pp
        weights = (layer_weights + self.other_weights) / shards
        if sizes.sharded:  # two layers and what is around the layers are there whole
            whole = 2 * self.inside / self.layers / sizes.tp + self.outside
            weights += whole * self.product_bytes + 4.0 * self.inside / self.layers / sizes.tp
        uncut = 1 / sizes.tp if sizes.sp else _UNCUT + (1 - _UNCUT) / sizes.tp
        kept = self.layer_kept * uncut / sizes.pp
        if checkpoint_layers:
            kept = self.layers / sizes.pp * self.states / (sizes.tp if sizes.sp else 1) + kept * sizes.pp / self.layers
        waiting = 1.0 if sizes.pp == 1 else sizes.pp / max(groups or 2 * sizes.pp, sizes.pp)
        kept = (kept + self.other_kept) / sizes.cp / parts * waiting
        slowdown = (_AGAIN if checkpoint_layers else 1.0) * (_GATHERING if sizes.sharded else 1.0)
        slowdown *= _TENSOR ** math.log2(sizes.tp) * _CONTEXT ** math.log2(sizes.cp) * _SMALLER ** math.log2(parts)
        if sizes.pp > 1:
            slowdown *= 1 + (sizes.pp - 1) / max(groups or 2 * sizes.pp, sizes.pp)
        return Need(sizes, checkpoint_layers, parts, weights, kept, slowdown)


def choose(
    sizes: Sizes,
    processes: int,
    memory: float | None,
    *,
    wanted: MeshSizes | None,
    checkpoint_layers: bool,
    divides: bool,
    rows: int,
    groups: int | None = None,
) -> Choice:
    """The fastest way that fits into ``memory`` bytes of each of ``processes`` GPUs.

    memory: None where nobody knows it; the simplest way is taken then. wanted: a mesh that is asked for; None: any.
    checkpoint_layers: that layers are computed again is asked for. divides: whether objective and network can be
    shared out by tp and cp. rows: of the largest batch; it can be cut into so many parts at most.
    """
    usable = math.inf if memory is None else _USABLE * (memory - _RESERVE)
    ways = [] if wanted is None else [wanted]
    ways = ways or list(_meshes(processes, sizes.heads if divides else 0))
    again = [True] if checkpoint_layers else [False, True]
    cuts = [parts for parts in (1, 2, 4, 8) if parts <= rows]
    needs = [
        sizes.need(way, checkpoint_layers=each, parts=parts, groups=groups)
        for way in ways
        for each in again
        for parts in cuts
    ]
    needs.sort(key=lambda need: need.slowdown)  # stable: the simplest of equals comes first
    fitting = [need for need in needs if need.bytes <= usable]
    if memory is None:
        return Choice(needs[0], True, ["the memory is not known: --gpu-memory says how much there is"])
    room = f"{usable / 2**30:.0f} of {memory / 2**30:.0f} GiB can be used"
    if not fitting:
        least = min(needs, key=lambda need: need.bytes)
        hint = "use more GPUs" if least.weights > usable else "leave out long utterances, or use more GPUs"
        return Choice(least, False, [f"nothing fits, {room}; the least is {least.text()}: {hint}"])
    best = fitting[0]
    reasons = [f"{need.text()}: too much, {room}" for need in needs[: needs.index(best)]][-3:]
    return Choice(best, True, [*reasons, f"{best.text()}: fits, {room}"])


def _meshes(processes: int, heads: int) -> Iterator[MeshSizes]:
    """From simple to complicated."""
    for tp, cp in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)):
        if processes % (tp * cp) or (tp * cp > 1 and (not heads or heads % tp)) or tp > _IN_A_MACHINE:
            continue
        data = processes // tp // cp
        yield MeshSizes(dp=data, tp=tp, cp=cp, sp=tp > 1)
        shards = 2
        while shards <= data:
            if data % shards == 0:
                yield MeshSizes(data // shards, shards, tp, cp, sp=tp > 1, sharded=True)
            shards *= 2
        if data > 1 and data & (data - 1):
            yield MeshSizes(1, data, tp, cp, sp=tp > 1, sharded=True)
