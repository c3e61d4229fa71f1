"""Pipeline parallelism: each process has some of the encoder's layers, and hands on what they make of a few rows.

The batch is cut into groups of rows; while one process works on the first group's later layers, the one before it
works on the second group (the 1F1B schedule of `torch.distributed.pipelining`, https://arxiv.org/abs/1806.03377). All
processes read the whole batch, which is small beside the states, so that only states and their gradients are sent.
What is in front of the layers is in the first stage, heads, decoder and loss are in the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stapes.models.wav2vec2 import Wav2Vec2
from stapes.training.mesh import Mesh
from stapes.training.objectives import Evaluated, Losses, Prepared, StagedObjective

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B


def stage_of(name: str, network: nn.Module, stages: Sequence[int]) -> int:
    """Which stage has a parameter; ``stages``: that of each layer."""
    if name.startswith("encoder.layers."):
        return stages[int(name.split(".")[2])]
    last = ["head.", "decoder.", "downsampling."]
    if not isinstance(network, Wav2Vec2) or network.config.pre_norm:
        last.append("encoder.norm.")
    return max(stages) if name.startswith(tuple(last)) else 0


def spread_layers(network: Any, stages: int) -> list[int]:
    """The stage of each layer, so that each has about the same work; what is in front of them counts as some layers."""
    layers = len(network.encoder.layers)
    front = 0.0
    if isinstance(network, Wav2Vec2):
        front = _front_layers(network)
    # The first stage has a layer at least, and so has each behind it.
    first = min(max(1, round((layers + front) / stages - front)), layers - stages + 1)
    rest = layers - first
    return [0] * first + [1 + number * (stages - 1) // rest for number in range(rest)]


def _front_layers(network: Wav2Vec2) -> float:
    """How many layers' products the convolutions in front are; frozen ones have no backward pass."""
    config = network.config
    rate, front, inputs = math.prod(config.conv_strides), 0.0, 1
    for outputs, kernel, stride in zip(config.conv_channels, config.conv_kernels, config.conv_strides, strict=True):
        rate //= stride
        front += rate * inputs * outputs * kernel
        inputs = outputs
    layer = 4 * config.width**2 + 2 * config.width * config.mlp_width
    frozen = not any(parameter.requires_grad for parameter in network.feature_extractor.parameters())
    return front / layer / (3 if frozen else 1)


def keep_stage(network: Any, stages: Sequence[int], stage: int) -> None:
    """Drop the parameters of other stages, in place: their layers hand on what they are given."""
    for name, _ in list(network.named_parameters()):
        if stage_of(name, network, stages) != stage:
            owner, _, attribute = name.rpartition(".")
            network.get_submodule(owner).register_parameter(attribute, None)
    for layer, place in zip(network.encoder.layers, stages, strict=True):
        if place != stage:
            layer.forward = _hand_on


def _hand_on(x: Tensor, *_: object) -> Tensor:
    return x


class Stage(nn.Module):
    """What this process computes. ``prepared`` is the batch that rows are taken from."""

    def __init__(self, objective: StagedObjective, stage: int, stages: int) -> None:
        super().__init__()
        self.objective = objective
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.prepared: Prepared | None = None
        self.found: list[Losses] = []
        """Of each group of rows, in the last stage."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x: what the stage before says to these rows, (rows, positions, width) float32; unused in the first stage.

        Returns the same for the next stage, or the sum of the rows' losses, (1,).
        """
        assert self.prepared is not None
        part = take_rows(self.prepared, rows.tolist())
        x = self._states(x, part)
        if not self.is_last:
            return x
        losses = self.objective.losses_of(self.objective.finish(x, part), part)
        self.found.append(losses._replace(total=losses.total.detach()))
        return losses.total[None]

    def _states(self, x: Tensor, part: Prepared) -> Tensor:
        if self.is_first:
            x = self.objective.enter(part)
        return self.objective.through(x, part).float().contiguous()

    def evaluate(self, x: Tensor, prepared: Prepared) -> Tensor | Evaluated:
        """The same for a whole batch."""
        x = self._states(x, prepared)
        if not self.is_last:
            return x
        return self.objective.evaluated(self.objective.finish(x, prepared), prepared)


class Pipeline(nn.Module):
    """All stages: what stands in for an objective.

    groups: of rows, at least as many as stages; more of them leave less time idle.
    """

    def __init__(self, stage: Stage, mesh: Mesh, device: torch.device, width: int, groups: int) -> None:
        super().__init__()
        self.stage, self.mesh, self.device, self.width = stage, mesh, device, width
        self.groups = max(groups, mesh.sizes.pp)
        self._schedules: dict[tuple[int, int], Schedule1F1B] = {}
        self._scale: Tensor | float = 1.0

    def losses_and_gradients(self, prepared: Prepared, scale: Tensor) -> Losses:
        """The losses of a batch, in all stages, and the gradient of their sum times ``scale``, added up in place."""
        stage, rows = self.stage, len(prepared.batch)
        size = -(-rows // self.groups)
        filled = fill_up(prepared, size * self.groups)
        stage.prepared, stage.found, self._scale = filled, [], scale
        schedule = self._schedule(size, self.stage.objective.positions(prepared.batch.waveforms.shape[1]))
        numbers = torch.arange(len(filled.batch))
        first = (filled.batch.weights,) if stage.is_first else ()
        target = {"target": numbers, "losses": []} if stage.is_last else {}
        schedule.step(*first, rows=numbers, **target)
        said = torch.zeros(1 + size * self.groups, device=self.device)
        if stage.is_last:
            said[0] = torch.stack([each.total for each in stage.found]).sum()
            said[1:] = torch.cat([each.rows for each in stage.found])
        stage.prepared, stage.found = None, []
        dist.broadcast(said, self._rank(self.mesh.sizes.pp - 1), group=self.mesh.pp)
        return Losses(said[0], said[1 : 1 + rows], stage.objective.impossible(prepared))

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Evaluated:
        """What the objective finds in evaluation, in all stages."""
        stage, group = self.stage, self.mesh.pp
        positions = stage.objective.positions(prepared.batch.waveforms.shape[1])
        x = torch.empty((len(prepared.batch), positions, self.width), device=self.device)
        if not stage.is_first:
            dist.recv(x, self._rank(self.mesh.stage - 1), group=group)
        found = stage.evaluate(x, prepared)
        said: list[Any] = [None]
        if isinstance(found, Tensor):
            dist.send(found.contiguous(), self._rank(self.mesh.stage + 1), group=group)
        else:
            losses = found.losses
            said = [found._replace(losses=losses._replace(total=losses.total.cpu(), rows=losses.rows.cpu()))]
        dist.broadcast_object_list(said, self._rank(self.mesh.sizes.pp - 1), group=group)
        return said[0]

    def _rank(self, stage: int) -> int:
        return dist.get_global_rank(self.mesh.pp, stage)

    def _schedule(self, rows: int, positions: int) -> Schedule1F1B:
        """The schedule for batches of one shape: buffers have to be of the right size."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # imports the compiler: seconds

        known = self._schedules.get((rows, positions))
        if known is None:
            states = torch.empty((rows, positions, self.width), device="meta", requires_grad=True)
            stage = PipelineStage(
                self.stage,
                self.mesh.stage,
                self.mesh.sizes.pp,
                self.device,
                input_args=torch.empty(rows, device="meta") if self.stage.is_first else states,
                output_args=torch.empty(1, device="meta", requires_grad=True) if self.stage.is_last else states,
                group=self.mesh.pp,
            )
            known = Schedule1F1B(stage, self.groups, loss_fn=self._loss, scale_grads=False)
            self._schedules[rows, positions] = known
        return known

    def _loss(self, total: Tensor, _: Tensor) -> Tensor:
        return total.sum() * self._scale


def take_rows(prepared: Prepared, rows: Sequence[int]) -> Prepared:
    """Some rows of a batch."""
    batch = prepared.batch.rows(rows[0], rows[-1] + 1)
    chosen = slice(rows[0], rows[-1] + 1)
    return Prepared(batch, prepared.samples[chosen], prepared.targets[chosen])


def fill_up(prepared: Prepared, rows: int) -> Prepared:
    """The batch with copies of its first row behind it, which count nowhere."""
    missing = rows - len(prepared.batch)
    if not missing:
        return prepared
    numbers = torch.tensor([*range(len(prepared.batch)), *[0] * missing], device=prepared.batch.weights.device)
    changed: dict[str, Any] = {}
    for field in fields(prepared.batch):
        value = getattr(prepared.batch, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = value[numbers]
        elif isinstance(value, tuple) and field.name != "skipped":
            changed[field.name] = (*value, *value[:1] * missing)
    changed["weights"][len(prepared.batch) :] = 0
    return Prepared(
        replace(prepared.batch, **changed),
        (*prepared.samples, *prepared.samples[:1] * missing),
        (*prepared.targets, *prepared.targets[:1] * missing),
    )
