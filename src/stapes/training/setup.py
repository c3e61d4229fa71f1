"""A run put together: vocabulary, data, network, objective, optimiser, and where it stood when it stopped."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch

from stapes.audio.features import WINDOW_SECONDS
from stapes.data.augment import WaveformAugment
from stapes.data.batching import TrainingData
from stapes.data.crops import Crops
from stapes.data.manifest import Manifest
from stapes.devices.backend import attention_kernels, usable_dtypes
from stapes.errors import UsageError
from stapes.progress import Progress, Silent
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.checkpoint import Checkpoints
from stapes.training.config import TrainConfig, changes
from stapes.training.corpus import leave_out_long, open_manifest
from stapes.training.deepspeed import DeepSpeedOptimizer
from stapes.training.fp8 import check_fp8
from stapes.training.fused import fuse_network
from stapes.training.mesh import mesh_sizes
from stapes.training.mesh_rules import check_mesh
from stapes.training.networks import (
    DTYPES,
    build_network,
    build_objective,
    head_shape,
    layers_of,
    measure_corpus,
    open_labels,
)
from stapes.training.objectives import Objective, prepare
from stapes.training.optimizer import Optimizer, freeze
from stapes.training.parallel import (
    Processes,
    choose_strategy,
    divide,
    forget_gathered,
    is_synced,
    on_mesh,
    parallelize,
)
from stapes.training.recipes import recipe
from stapes.training.settings import apply_mapping
from stapes.training.trainer import Trainer
from stapes.training.vocabulary import encoder_of, open_vocabulary
from stapes.training.whisper_labels import WhisperLabels

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
    processes = on_mesh(processes, config.parallel)
    if config.run.fp8:
        check_fp8(processes.device)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.run.tf32
    # cuDNN builds its attention anew for every shape, and a decoder sees a new one in almost every batch: texts have
    # many lengths. Hybrids began with 2 steps a second on an H200, where CTC on the same encoder made 12.
    torch.backends.cuda.enable_cudnn_sdp(config.objective.kind in ("ctc", "contrastive"))
    checkpoints = Checkpoints(config.folder, config.checkpoint)
    step = _last_step(checkpoints, config.folder, resume)
    manifest = open_manifest(config, config.data.train)
    kept = None if step is None else config.folder / "vocabulary"
    is_whisper = config.objective.kind == "whisper"
    tokenizer = open_labels(config) if is_whisper else open_vocabulary(config, manifest, kept)
    seconds = config.data.batch_seconds * _SMALLER ** _times_out_of_memory(config.folder)
    precision = choose_precision(config, processes)
    strategy = choose_strategy(config.parallel, processes.world_size)
    network, source = build_network(config, tokenizer, config.seed)
    listener = progress if processes.is_first else Silent()
    manifest = leave_out_long(manifest, network, min(config.augment.speeds), listener, config.distill.teacher)
    dev = None
    if config.data.dev:
        dev_manifest = leave_out_long(open_manifest(config, config.data.dev), network, 1.0, listener)
        longest = WINDOW_SECONDS if is_whisper else float(dev_manifest.durations.max()) + 0.1
        dev = _data(config, dev_manifest, tokenizer, processes, max(seconds, longest))
    if source is None and step is None:
        measure_corpus(network, manifest)
    freeze(network, config.optimizer)
    objective = build_objective(config, network, source, tokenizer, DTYPES[precision]).to(processes.device.torch)
    sizes = mesh_sizes(config.parallel, processes.world_size)
    check_mesh(objective, config, sizes)
    fuse_network(network, config.run, processes.device.torch, strategy, divided=sizes.divides)
    _say_attention(objective, processes, precision, progress)
    divided = divide(objective, layers_of(network), processes, config.run)
    if processes.device.backend != "cpu" and processes.mesh is None and step is None:
        seconds = _largest_that_fits(config, manifest, tokenizer, processes, objective, seconds, progress)
    data = _data(config, manifest, tokenizer, processes, seconds, train=True)
    total = config.run.steps or max(1, round((config.run.epochs or 0) * data.steps(0)))
    if strategy == "deepspeed":
        optimizer = DeepSpeedOptimizer(objective, network, config.optimizer, config.parallel, total, processes)
        wrapped = optimizer.engine
    else:
        wrapped = parallelize(
            objective,
            divided.layers,
            processes,
            strategy,
            DTYPES[precision],
            drops_layers=objective.drops_layers,
            groups=config.parallel.groups,
        )
        optimizer = Optimizer(
            network,
            config.optimizer,
            total,
            loss_scaling=precision == "fp16",
            on_swap=partial(forget_gathered, wrapped),
            layout=divided.layout,
            synced=is_synced(wrapped, processes),
        )
    trainer = Trainer(config, processes, objective, wrapped, optimizer, data, dev, source, precision, progress)
    if step is not None:
        _restore(trainer, checkpoints, step, progress)
    elif processes.is_first and tokenizer is not None:
        _keep_vocabulary(tokenizer, config.folder / "vocabulary")
    processes.wait()
    left = (total - trainer.step) * data.epoch_seconds / max(1, data.steps(0))
    progress.add_total(max(0.0, left))
    return trainer


def _say_attention(objective: Objective, processes: Processes, precision: str, progress: Progress) -> None:
    """A word where attention has no fused kernel here, and why: its scores then lie in memory, all of them."""
    heads = head_shape(objective.network)
    if processes.device.backend == "cpu" or heads is None or not processes.is_first:
        return
    kernels = attention_kernels(processes.device.torch, DTYPES[precision], (1, heads[0], 256, heads[1]))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in kernels.refused.items())
    if kernels.chosen == "math":
        progress.note(f"attention runs without a fused kernel, slowly and with much memory ({reasons})")
    elif not {"efficient", "cudnn"} & set(kernels.usable):  # flash takes no mask
        progress.note(f"attention over padded batches runs without a fused kernel, slowly ({reasons})")


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


def _keep_vocabulary(tokenizer: CTCTokenizer | WhisperLabels, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save(folder)


def _data(
    config: TrainConfig,
    manifest: Manifest,
    tokenizer: CTCTokenizer | WhisperLabels | None,
    processes: Processes,
    seconds: float,
    *,
    train: bool = False,
) -> TrainingData:
    augment, edges = WaveformAugment(config.augment) if train else None, None
    if isinstance(manifest, Crops):
        augment, edges = manifest.cut(augment), manifest.edges
    rehearsal = Manifest(*config.data.rehearsal) if train and config.data.rehearsal else None
    return TrainingData(
        manifest,
        encoder_of(tokenizer, train=train),
        budget_seconds=seconds,
        augment=augment,
        edges=edges,
        world_size=processes.data_size,
        rank=processes.data_rank,
        seed=config.seed,
        accumulate=config.optimizer.accumulate if train else 1,
        buckets=config.data.buckets,
        max_rows=config.data.max_rows,
        shuffle=train,
        workers=config.data.workers,
        pin_memory=processes.device.backend != "cpu",
        window_seconds=WINDOW_SECONDS if config.objective.kind == "whisper" else None,
        rehearsal=rehearsal,
        rehearsal_share=config.data.rehearsal_share,
    )


def _largest_that_fits(
    config: TrainConfig,
    manifest: Manifest,
    tokenizer: CTCTokenizer | WhisperLabels | None,
    processes: Processes,
    objective: Objective,
    seconds: float,
    progress: Progress,
) -> float:
    """Try the worst batch before the first step: better now than in an hour. All processes take the same size."""
    longest = float(manifest.durations.max()) / min(config.augment.speeds)
    if config.objective.kind == "whisper":
        longest = WINDOW_SECONDS * (2 if config.data.rehearsal else 1)
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
        if not bool(processes.sum_all(failed)):
            return seconds
        seconds *= _SMALLER
        if seconds < longest:
            raise UsageError(
                f"not even one utterance of {longest:.0f} s fits into the memory: set "
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
    trainer.seconds_before, trainer.audio_seconds = state["seconds"], state.get("audio_seconds", 0.0)
    if trainer.processes.is_first:
        checkpoints.forget_after(step)
        progress.note(f"going on from step {step}")
