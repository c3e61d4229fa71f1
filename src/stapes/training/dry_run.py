"""``stapes train --dry-run``: what a run would take, said before it begins."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from stapes.audio.features import SAMPLE_RATE, WINDOW_SECONDS
from stapes.data.buckets import BucketSampler
from stapes.data.crops import Crops
from stapes.data.windows import share_rows
from stapes.devices.backend import Device
from stapes.devices.chips import CHIPS, Chip
from stapes.models.ctc_head import CTC
from stapes.models.hybrid import Hybrid
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.training.config import ParallelOptions, TrainConfig
from stapes.training.corpus import open_manifest
from stapes.training.mesh import mesh_sizes
from stapes.training.networks import build_network, open_labels
from stapes.training.optimizer import freeze
from stapes.training.parallel import Processes, choose_strategy
from stapes.training.plan import Cost, Costs, parameter_counts, usual_flops_per_second
from stapes.training.planner import Sizes, choose
from stapes.training.setup import choose_precision
from stapes.training.vocabulary import open_vocabulary

_TOKENS_PER_SECOND = 15
"""Characters in a second of speech, about: for the decoder's share of the operations."""

_WHISPER_TOKENS_PER_SECOND = 4
"""Whisper's tokens are parts of words."""


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
    mesh: str
    """What ``--parallel`` would say."""
    checkpoint_layers: bool
    """Whether layers are computed again backwards."""
    batch_parts: int
    """Into which batches are cut; batch_seconds and accumulate are those of the parts."""
    batch_seconds: float
    accumulate: int
    memory_bytes: float
    """Of one process, for the largest batch."""
    gpu_memory_bytes: float | None
    """What each GPU has; None: not known."""
    fits: bool
    reasons: list[str]
    """Why so and not simpler."""
    flops_per_audio_second: float
    seconds: float
    """Of the whole run."""

    def settings(self) -> str:
        """What to start the run with."""
        parts = [f"{self.processes} processes (torchrun), --parallel {self.mesh}"] if self.processes > 1 else []
        parts += ["--set run.checkpoint_layers=true"] if self.checkpoint_layers else []
        if self.batch_parts > 1:
            parts.append(
                f"--set data.batch_seconds={self.batch_seconds:g} --set optimizer.accumulate={self.accumulate}"
            )
        return " ".join(parts) or "as they are"

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
                f"settings    {self.settings()}",
                *(f"            {reason}" for reason in self.reasons),
                f"operations  {self.flops_per_audio_second / 1e9:.1f} GFLOP for each second of audio",
                f"time        about {f'{minutes:.0f} min' if minutes < 120 else f'{minutes / 60:.1f} h'}",
            ]
        )


def plan_run(config: TrainConfig, gpus: int | None = None, gpu_memory: float | None = None) -> RunPlan:
    """Plan a run without running it: for this machine, or for ``gpus`` GPUs with ``gpu_memory`` bytes each.

    A mesh and a precision that the settings name are taken; what they leave open is chosen so that it fits. Raises what
    `open_run` would.
    """
    from stapes.devices.backend import resolve

    config.check()
    device = resolve(config.run.device)
    world_size = gpus or _present(config.run.device, device)
    chip = None if gpu_memory is None else chip_with(gpu_memory)
    memory = gpu_memory if gpu_memory is not None else device.memory
    precision = choose_precision(config, Processes(0, world_size, device))
    name = device.name
    if gpu_memory is not None:
        name = f"GPU with {gpu_memory / 2**30:g} GB" if chip is None else chip.names[0]
        if config.run.precision == "auto":
            precision = "bf16" if chip is None or "bf16" in chip.peak_tflops else "fp16"
    manifest = open_manifest(config, config.data.train)
    is_whisper = config.objective.kind == "whisper"
    tokenizer = open_labels(config) if is_whisper else open_vocabulary(config, manifest, None)
    network, _ = build_network(config, tokenizer, config.seed)
    freeze(network, config.optimizer)

    budget, rehearsed = config.data.batch_seconds, 1.0
    # Of Whisper's texts, which are not padded to 30 s as the audio is, one that few are longer than.
    written = round(_WHISPER_TOKENS_PER_SECOND * float(np.quantile(manifest.durations, 0.95))) + 4
    if is_whisper:
        share = config.data.rehearsal_share if config.data.rehearsal else 0.0
        own, others = share_rows(budget, WINDOW_SECONDS, config.data.max_rows, share)
        budget, rehearsed = float(own * WINDOW_SECONDS), (own + others) / own

    def cost_of(rows: int, samples: int) -> Cost:
        tokens = written if is_whisper else round(samples / SAMPLE_RATE * _TOKENS_PER_SECOND)
        return costs.of(round(rows * rehearsed), samples, tokens)

    def sampler_for(data: int) -> BucketSampler:
        return BucketSampler(
            np.full(len(manifest), WINDOW_SECONDS) if is_whisper else manifest.durations,
            budget,
            data,
            seed=config.seed,
            accumulate=config.optimizer.accumulate,
            buckets=config.data.buckets,
            max_rows=config.data.max_rows,
            speeds=(1.0,) if is_whisper else config.augment.speeds,
            keys=manifest.keys,
            edges=manifest.edges if isinstance(manifest, Crops) else None,
        )

    costs = Costs(network)
    largest = max(sampler_for(1).buckets, key=lambda bucket: bucket.rows * bucket.seconds)
    cost = cost_of(largest.rows, largest.samples)
    choice = choose(
        Sizes(network, cost, half=precision != "fp32", average=config.optimizer.ema is not None),
        world_size,
        memory,
        wanted=mesh_sizes(config.parallel, world_size) if _names_mesh(config.parallel) else None,
        checkpoint_layers=config.run.checkpoint_layers,
        divides=isinstance(network, CTC | Hybrid | Wav2Vec2),
        rows=int(config.data.batch_seconds / max(bucket.seconds for bucket in sampler_for(1).buckets)),
        groups=config.parallel.groups,
    )
    sizes = choice.need.sizes
    sampler = sampler_for(sizes.data)
    per_epoch = sampler.steps(0)
    steps = config.run.steps or max(1, round((config.run.epochs or 0) * per_epoch))
    seconds = padded = flops = 0.0
    for _ in range(min(per_epoch * config.optimizer.accumulate, 200)):
        plan = next(sampler)
        rows, samples = len(plan.indices), plan.samples
        flops += cost_of(rows, samples).flops
        padded += rows * samples / SAMPLE_RATE
        seconds += float((manifest.durations[plan.indices] / plan.speeds * plan.weights).sum())
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
        device=name,
        processes=world_size,
        strategy=choose_strategy(config.parallel, world_size) if not sizes.sharded else "fsdp",
        precision=precision,
        shapes=[(bucket.rows, bucket.seconds) for bucket in sampler.buckets],
        padding_share=1 - seconds / padded if padded else 0.0,
        steps_per_epoch=per_epoch,
        steps=steps,
        mesh=sizes.text(),
        checkpoint_layers=choice.need.checkpoint_layers,
        batch_parts=choice.need.parts,
        batch_seconds=config.data.batch_seconds / choice.need.parts,
        accumulate=config.optimizer.accumulate * choice.need.parts,
        memory_bytes=choice.need.bytes,
        gpu_memory_bytes=memory,
        fits=choice.fits,
        reasons=[*choice.reasons, *_on_precision(precision, chip or device.chip)],
        flops_per_audio_second=flops / max(seconds, 1e-9),
        seconds=total * choice.need.slowdown / usual_flops_per_second(device, precision, chip) / world_size,
    )


def _present(wanted: str, device: Device) -> int:
    """Processes that torchrun started, or the GPUs of this machine, unless one of them is ``wanted``."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return 1 if device.backend == "cpu" or ":" in wanted else torch.cuda.device_count()


def _names_mesh(options: ParallelOptions) -> bool:
    return options.strategy != "auto" or options.tp * options.cp * options.pp > 1


def _on_precision(precision: str, chip: Chip | None) -> list[str]:
    """Why this precision, and what else there is."""
    if chip is None:
        return []
    said = []
    if precision == "bf16":
        said.append("bf16: the GPU multiplies it, and its range needs no loss scaling")
    elif precision == "fp16":
        said.append("fp16 with loss scaling: the GPU has no bf16 arithmetic")
    if chip.fp8 is not None and precision in ("bf16", "fp16"):
        said.append(f"the GPU multiplies fp8 ({chip.fp8}) too: run.fp8=true, with torchao")
    return said


def chip_with(memory: float) -> Chip | None:
    """The slowest GPU we know with so much memory, in bytes: what a plan for ``--gpu-memory`` is about."""
    found = [chip for chip in CHIPS if chip.memory_gb and abs(chip.memory_gb * 2**30 - memory) < 0.02 * memory]
    return min(found, key=lambda chip: chip.peak_tflops.get("fp16", math.inf), default=None)
