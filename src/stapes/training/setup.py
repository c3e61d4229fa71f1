"""A run put together: vocabulary, data, network, objective, optimiser, and where it stood when it stopped."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch

from stapes.data.augment import WaveformAugment
from stapes.data.batching import TrainingData
from stapes.data.crops import Crops
from stapes.data.manifest import Manifest
from stapes.devices.backend import usable_dtypes
from stapes.errors import UsageError
from stapes.progress import Progress
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.checkpoint import Checkpoints
from stapes.training.config import TrainConfig, changes
from stapes.training.corpus import open_manifest
from stapes.training.deepspeed import DeepSpeedOptimizer
from stapes.training.networks import DTYPES, build_network, build_objective, layers_of, measure_corpus
from stapes.training.objectives import Objective, prepare
from stapes.training.optimizer import Optimizer, freeze
from stapes.training.parallel import Processes, choose_strategy, forget_gathered, parallelize, prepare_layers
from stapes.training.recipes import recipe
from stapes.training.settings import apply_mapping
from stapes.training.trainer import Trainer
from stapes.training.vocabulary import encoder_of, open_vocabulary

_SMALLER = 0.75
"""What is left of a batch's seconds after memory ran out."""


def choose_precision(config: TrainConfig, processes: Processes) -> str:
    """What products are computed in. Raises UsageError for what the device cannot do well."""
    uses = usable_dtypes(processes.device)
    wanted = config.run.precision
    if wanted == "auto":
        if processes.device.backend == "cpu":
            return "fp32"
        return "bf16" if uses["bf16"][0] == "native" else "fp16"
    if processes.device.backend == "cpu" and wanted == "fp16":
        raise UsageError("run.precision is fp16, which needs a GPU: on the CPU use fp32, or bf16 to try it out")
    return wanted


def open_run(config: TrainConfig, processes: Processes, progress: Progress, *, resume: bool = False) -> Trainer:
    """Everything that a run needs, ready for `Trainer.run`.

    Raises UsageError for settings that make no sense together and for a folder that holds another run; ModelError,
    DeviceError.
    """
    config.check()
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.run.tf32
    checkpoints = Checkpoints(config.folder, config.checkpoint)
    step = _last_step(checkpoints, config.folder, resume)
    manifest = open_manifest(config, config.data.train)
    tokenizer = open_vocabulary(config, manifest, None if step is None else config.folder / "vocabulary")
    seconds = config.data.batch_seconds * _SMALLER ** _times_out_of_memory(config.folder)
    dev = None
    if config.data.dev:
        dev_manifest = open_manifest(config, config.data.dev)
        dev = _data(config, dev_manifest, tokenizer, processes, max(seconds, float(dev_manifest.durations.max()) + 0.1))
    precision = choose_precision(config, processes)
    strategy = choose_strategy(config.parallel, processes.world_size)
    network, source = build_network(config, tokenizer, config.seed)
    if source is None and step is None:
        measure_corpus(network, manifest)
    freeze(network, config.optimizer)
    objective = build_objective(config, network, source, tokenizer, DTYPES[precision]).to(processes.device.torch)
    layers = layers_of(network)
    prepare_layers(layers, config.run)
    if processes.device.backend != "cpu" and strategy != "fsdp" and step is None:
        seconds = _largest_that_fits(config, manifest, tokenizer, processes, objective, seconds, progress)
    data = _data(config, manifest, tokenizer, processes, seconds, train=True)
    total = config.run.steps or max(1, round((config.run.epochs or 0) * data.steps(0)))
    if strategy == "deepspeed":
        optimizer = DeepSpeedOptimizer(objective, network, config.optimizer, config.parallel, total, processes)
        wrapped = optimizer.engine
    else:
        wrapped = parallelize(
            objective,
            layers,
            processes,
            strategy,
            config.parallel,
            DTYPES[precision],
            drops_layers=objective.drops_layers,
        )
        optimizer = Optimizer(
            network,
            config.optimizer,
            total,
            loss_scaling=precision == "fp16",
            on_swap=partial(forget_gathered, objective),
        )
    trainer = Trainer(config, processes, objective, wrapped, optimizer, data, dev, source, precision, progress)
    if step is not None:
        _restore(trainer, checkpoints, step, progress)
    elif processes.is_first and tokenizer is not None:
        _keep_vocabulary(tokenizer, config.folder / "vocabulary")
    processes.wait()
    left = (total - trainer.step) * float(manifest.durations.sum()) / max(1, data.steps(0))
    progress.add_total(max(0.0, left))
    return trainer


def _last_step(checkpoints: Checkpoints, folder: Path, resume: bool) -> int | None:
    """The step to go on from. Raises UsageError where there is a run and nobody said to go on with it."""
    steps = checkpoints.steps()
    if not resume and (steps or (folder / "metrics.jsonl").exists()):
        raise UsageError(f"{folder} holds a run already: --resume goes on with it, or choose another -o")
    return steps[-1] if steps and resume else None


def _times_out_of_memory(folder: Path) -> int:
    path = folder / "out_of_memory"
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _keep_vocabulary(tokenizer: CTCTokenizer, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(folder)


def _data(
    config: TrainConfig,
    manifest: Manifest,
    tokenizer: CTCTokenizer | None,
    processes: Processes,
    seconds: float,
    *,
    train: bool = False,
) -> TrainingData:
    augment, edges = WaveformAugment(config.augment) if train else None, None
    if isinstance(manifest, Crops):
        augment, edges = manifest.cut(augment), manifest.edges
    return TrainingData(
        manifest,
        encoder_of(tokenizer),
        budget_seconds=seconds,
        augment=augment,
        edges=edges,
        world_size=processes.world_size,
        rank=processes.rank,
        seed=config.seed,
        accumulate=config.optimizer.accumulate if train else 1,
        buckets=config.data.buckets,
        max_rows=config.data.max_rows,
        shuffle=train,
        workers=config.data.workers,
        pin_memory=processes.device.backend != "cpu",
    )


def _largest_that_fits(
    config: TrainConfig,
    manifest: Manifest,
    tokenizer: CTCTokenizer | None,
    processes: Processes,
    objective: Objective,
    seconds: float,
    progress: Progress,
) -> float:
    """Try the worst batch before the first step: better now than in an hour. All processes take the same size."""
    while True:
        data = _data(config, manifest, tokenizer, processes, seconds, train=True)
        failed = torch.zeros((), device=processes.device.torch)
        try:
            prepared = prepare(next(data.trial_batches()), processes.device.torch)
            objective.train()(prepared).total.backward()
        except torch.OutOfMemoryError:
            failed += 1
        prepared = None
        objective.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if not bool(processes.sum(failed)):
            return seconds
        seconds *= _SMALLER
        if seconds < float(manifest.durations.max()) / min(config.augment.speeds):
            raise UsageError(
                f"not even one utterance of {manifest.durations.max():.0f} s fits into the memory: set "
                "run.checkpoint_layers=true, or leave long ones out with `stapes prepare --max-seconds`"
            )
        progress.note(f"a batch of {seconds / _SMALLER:.0f} s does not fit into the memory: taking {seconds:.0f} s")


def _restore(trainer: Trainer, checkpoints: Checkpoints, step: int, progress: Progress) -> None:
    """Go on from a checkpoint: weights, optimiser, data. Raises ModelError where it is of another network."""
    state, record = checkpoints.load(step)
    before = apply_mapping(recipe(record["config"]["recipe"]), record["config"], f"step-{step}/run.json")
    different = changes(before, trainer.config)
    if different and trainer.processes.is_first:
        progress.note(f"going on with other settings than before: {', '.join(different)}")
    trainer.optimizer.set_weights(state["network"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.data.load_state_dict(state["data"])
    trainer.bad_steps, trainer.worse = state["bad_steps"], state["worse"]
    trainer.seconds_before = state["seconds"]
    if trainer.processes.is_first:
        checkpoints.forget_after(step)
        progress.note(f"going on from step {step}")
