"""``stapes train --dry-run``: what a run would take, said before it begins."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stapes.data.buckets import BucketSampler
from stapes.data.crops import Crops
from stapes.training.config import TrainConfig
from stapes.training.corpus import open_manifest
from stapes.training.networks import build_network
from stapes.training.optimizer import freeze
from stapes.training.parallel import Processes, choose_strategy
from stapes.training.plan import Costs, memory_bytes, parameter_counts, usual_flops_per_second
from stapes.training.setup import choose_precision
from stapes.training.vocabulary import open_vocabulary

_TOKENS_PER_SECOND = 15
"""Characters in a second of speech, about: for the decoder's share of the operations."""


@dataclass(frozen=True)
class RunPlan:
    """What a run would take. Bytes and seconds are estimates."""

    recipe: str
    parameters: int
    trained_parameters: int
    vocabulary: int
    utterances: int
    hours: float
    device: str
    processes: int
    strategy: str
    precision: str
    shapes: list[tuple[int, float]]
    """Utterances and padded seconds of each shape of batch."""
    padding_share: float
    steps_per_epoch: int
    steps: int
    memory_bytes: float
    """Of one process, for the largest batch, where each holds a whole copy."""
    flops_per_audio_second: float
    seconds: float
    """Of the whole run."""

    def text(self) -> str:
        """For people."""
        shapes = ", ".join(f"{rows} × {seconds:g} s" for rows, seconds in self.shapes)
        minutes = self.seconds / 60
        return "\n".join(
            [
                f"recipe      {self.recipe}: {self.parameters / 1e6:.1f} M parameters, "
                f"{self.trained_parameters / 1e6:.1f} M of them trained, {self.vocabulary} tokens",
                f"data        {self.utterances:,} utterances, {self.hours:.2f} h",
                f"batches     {shapes}: {100 * self.padding_share:.1f} % padding",
                f"steps       {self.steps:,}, {self.steps_per_epoch:,} an epoch",
                f"device      {self.processes} × {self.device}, {self.strategy}, {self.precision}",
                f"memory      about {self.memory_bytes / 2**30:.2f} GiB a process",
                f"operations  {self.flops_per_audio_second / 1e9:.1f} GFLOP for each second of audio",
                f"time        about {f'{minutes:.0f} min' if minutes < 120 else f'{minutes / 60:.1f} h'}",
            ]
        )


def plan_run(config: TrainConfig) -> RunPlan:
    """Plan a run without running it. Raises what `open_run` would."""
    from stapes.devices.backend import resolve

    config.check()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = resolve(config.run.device)
    processes = Processes(0, world_size, device)
    precision, strategy = choose_precision(config, processes), choose_strategy(config.parallel, world_size)
    manifest = open_manifest(config, config.data.train)
    tokenizer = open_vocabulary(config, manifest, None)
    network, _ = build_network(config, tokenizer, config.seed)
    freeze(network, config.optimizer)
    sampler = BucketSampler(
        manifest.durations,
        config.data.batch_seconds,
        world_size,
        seed=config.seed,
        accumulate=config.optimizer.accumulate,
        buckets=config.data.buckets,
        max_rows=config.data.max_rows,
        speeds=config.augment.speeds,
        keys=manifest.keys,
        edges=manifest.edges if isinstance(manifest, Crops) else None,
    )
    per_epoch = sampler.steps(0)
    steps = config.run.steps or max(1, round((config.run.epochs or 0) * per_epoch))
    costs = Costs(network)
    seconds = padded = flops = 0.0
    for _ in range(min(per_epoch * config.optimizer.accumulate, 200)):
        plan = next(sampler)
        rows, samples = len(plan.indices), plan.samples
        flops += costs.of(rows, samples, round(samples / 16_000 * _TOKENS_PER_SECOND)).flops
        padded += rows * samples / 16_000
        seconds += float((manifest.durations[plan.indices] / plan.speeds * plan.weights).sum())
    largest = max(sampler.buckets, key=lambda bucket: bucket.rows * bucket.seconds)
    cost = costs.of(largest.rows, largest.samples, round(largest.seconds * _TOKENS_PER_SECOND))
    every, trained = parameter_counts(network)
    corpus = float(manifest.durations.sum())
    total = flops / max(seconds, 1e-9) * corpus * steps / per_epoch
    return RunPlan(
        recipe=config.recipe,
        parameters=every,
        trained_parameters=trained,
        vocabulary=0 if tokenizer is None else tokenizer.size,
        utterances=len(manifest),
        hours=corpus / 3600,
        device=device.name,
        processes=world_size,
        strategy=strategy,
        precision=precision,
        shapes=[(bucket.rows, bucket.seconds) for bucket in sampler.buckets],
        padding_share=1 - seconds / padded if padded else 0.0,
        steps_per_epoch=per_epoch,
        steps=steps,
        memory_bytes=memory_bytes(
            network,
            cost,
            half=precision != "fp32",
            average=config.optimizer.ema is not None,
            checkpoint_layers=config.run.checkpoint_layers,
        ),
        flops_per_audio_second=flops / max(seconds, 1e-9),
        seconds=total / usual_flops_per_second(device, precision) / world_size,
    )
