"""``stapes train``: from a prepared corpus to a recogniser."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, clock, to_json
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.training.config import TrainConfig
    from stapes.training.trainer import Result

_RECIPES = (
    "ctc, attention, hybrid, wav2vec2, adapter, pretrain, pretrain_large, whisper, whisper_lora, whisper_ctc, distill, "
    "distill_ctc, words or commands."
)

_USELESS_WER = 0.9


def train(
    *recipe: Annotated[str, Parameter(name="RECIPE", help=_RECIPES)],
    train: Annotated[list[str] | None, Parameter(negative="")] = None,
    dev: Annotated[list[str] | None, Parameter(negative="")] = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    config: Path | None = None,
    set: Annotated[list[str] | None, Parameter(negative="")] = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] | None = None,
    parallel: str | None = None,
    gpus: int | None = None,
    gpu_memory: float | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    print_config: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train a recogniser on manifests that `stapes prepare` wrote.

    Examples:

        stapes train ctc --train corpus/train.jsonl.gz --dev corpus/dev.jsonl.gz -o runs/mine
        stapes train whisper_ctc --train … --dev … -o runs/tiny --set model.init=tiny.en
        stapes train whisper_lora --train … --dev … -o runs/mine --set model.init=base
        stapes train ctc --config run.toml --dry-run --gpus 8 --gpu-memory 192
        torchrun --nproc-per-node 8 -m stapes train ctc --config run.toml --parallel dp=2,fsdp=4

    The result is OUTPUT/model, which `stapes transcribe --model OUTPUT/model` opens; it is there from the first
    evaluation on and always the best so far. Ctrl-C keeps a checkpoint; --resume goes on from it, bit for bit as if
    nothing had happened.

    Exit code: 0 done, 1 it could not go on, 2 wrong usage, 3 no usable device or model, 130 interrupted.

    Parameters
    ----------
    train:
        Manifests to train on; short for --set data.train=…
    dev:
        Manifests that choose the best weights; short for --set data.dev=…
    output:
        The run's folder: model/, checkpoints/, metrics.jsonl.
    config:
        A TOML file with settings that differ from the recipe's.
    set:
        One more setting, as section.name=value; may be repeated.
    resume:
        Go on from the last checkpoint in OUTPUT, where there is one.
    strategy:
        Several processes: ddp, fsdp (FSDP2) or deepspeed; auto is ddp.
    parallel:
        The mesh of processes, such as dp=2,fsdp=4: two copies, each shared out over four. dp: copies; fsdp: processes
        that share one; tp: parts of each layer (sp beside it: of what is between its matrices too); cp: parts of long
        recordings; pp: stages of layers.
    gpus:
        With --dry-run: plan for so many GPUs, not for those that are here.
    gpu_memory:
        With --dry-run: plan for GPUs with so many GB of memory, such as 192.
    dry_run:
        Print what the run would take and how it would fit into the GPUs, and do nothing.
    print_config:
        Print every setting with its meaning, as TOML that --config reads.
    json:
        Print the result as one JSON object.
    """
    if len(recipe) != 1:
        raise UsageError("name one recipe, such as `stapes train ctc --train MANIFEST -o DIR`")
    from stapes.training.recipes import recipe as find_recipe
    from stapes.training.settings import apply_assignment, apply_toml, to_toml

    settings = find_recipe(recipe[0])
    if config is not None:
        settings = apply_toml(settings, config)
    for assignment in set or []:
        settings = apply_assignment(settings, assignment)
    settings.data.train = train or settings.data.train
    settings.data.dev = dev or settings.data.dev
    settings.output = str(output) if output is not None else settings.output
    settings.parallel.strategy = strategy or settings.parallel.strategy
    if parallel is not None:
        gpus = _apply_mesh(settings, parallel, gpus)
    if not dry_run and gpu_memory is not None:
        raise UsageError("--gpu-memory is for --dry-run: a run finds out by itself")
    terminal = Terminal()
    if print_config:
        terminal.out(to_toml(settings))
        return 0
    if dry_run:
        return _dry_run(terminal, settings, json, gpus, gpu_memory)
    result = _run(terminal, settings, resume)
    if int(os.environ.get("RANK", "0")) == 0:
        values = {**asdict(result), "model": str(result.model) if result.model else None}
        terminal.out(to_json(values) + "\n" if json else _summary(result, settings))
    return 130 if result.interrupted else 0


def _apply_mesh(settings: TrainConfig, text: str, gpus: int | None) -> int:
    """Have the settings say what ``--parallel`` says. Returns how many processes that is."""
    from stapes.training.mesh import apply_mesh, parse_mesh

    sizes = parse_mesh(text)
    processes = gpus or int(os.environ.get("WORLD_SIZE", "1"))
    if sizes.processes != processes:
        raise UsageError(
            f"--parallel {text} is not {processes}, the number of processes: start {sizes.processes} with torchrun "
            f"--nproc-per-node {sizes.processes}"
        )
    apply_mesh(settings.parallel, sizes)
    return sizes.processes


def _run(terminal: Terminal, settings: TrainConfig, resume: bool) -> Result:
    from stapes.training.parallel import processes
    from stapes.training.setup import open_run

    with (
        processes(settings.run.device, settings.parallel) as joined,
        terminal.progress("seconds", "reading the manifests …") as progress,
        _stoppable() as stop,
    ):
        # One process shows progress; what the others have to say about their own utterances is said by them.
        listener = progress if joined.is_first else _NotesOnly(terminal)
        return open_run(settings, joined, listener, resume=resume).run(stop.is_set)


class _NotesOnly:
    """What a process other than the first says."""

    def __init__(self, terminal: Terminal) -> None:
        self.note = terminal.note

    def add_total(self, seconds: float) -> None:
        """Ignore."""

    def advance(self, seconds: float) -> None:
        """Ignore."""


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks the run to end after its step, the second ends it at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    caught = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in caught}

    def ask(number: int, frame: object) -> None:
        stop.set()
        for each in caught:
            signal.signal(each, before[each])

    for number in caught:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _dry_run(terminal: Terminal, settings: TrainConfig, json: bool, gpus: int | None, gpu_memory: float | None) -> int:
    from stapes.training.dry_run import plan_run

    plan = plan_run(settings, gpus, None if gpu_memory is None else gpu_memory * 2**30)
    terminal.out(to_json(asdict(plan)) + "\n" if json else plan.text() + "\n")
    return 0


def _summary(result: Result, settings: TrainConfig) -> str:
    if result.interrupted:
        return f"interrupted after step {result.steps}: the same command with --resume goes on\n"
    lines: list[Any] = [f"{result.steps} steps in {clock(result.seconds)}"]
    if result.accuracy is not None:
        lines.append(f"dev: contrastive loss {result.loss:.4f}, accuracy {100 * result.accuracy:.2f} %")
    if result.wer is not None and result.cer is not None:
        lines.append(f"dev: WER {100 * result.wer:.2f} %, CER {100 * result.cer:.2f} %")
        if result.wer >= _USELESS_WER:
            lines.append(
                "The model writes next to nothing useful yet: give it more data, more steps (--set run.epochs=…), "
                "or weights to start from (--set model.init=…)"
            )
    if settings.objective.kind == "contrastive":
        lines.append(f"wrote {result.model}: stapes train wav2vec2 --set model.init={result.model}")
    else:
        lines.append(f"wrote {result.model}: stapes transcribe --model {result.model} RECORDING")
    return "\n".join(lines) + "\n"
