"""``stapes bench train``: training steps of wav2vec 2.0, beside the limits of the device and a peer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from stapes.cli.bench_run import listed, measure, percent, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def train(
    *,
    task: Literal["ctc", "pretrain"] = "ctc",
    random_weights: str = "wav2vec2-base",
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    batch: int = 32,
    seconds: float | None = None,
    freeze_front_end: bool = True,
    fused: bool = True,
    compile: bool = False,
    dropout: float | None = None,
    layer_drop: float | None = None,
    steps: int | None = None,
    peer: str | None = None,
    peer_batches: str | None = None,
    rounds: int = 5,
    threads: int | None = None,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    quick: bool = False,
    json: bool = False,
) -> int:
    """Time training steps of wav2vec 2.0: the objective and the optimiser of `stapes train`, on noise of one length.

    A step is all of it: the batch from the host's memory, masks, losses, gradients, clipping, AdamW. The floating-point
    operations of the convolutions in front are counted in the share of the device's peak.

    For example:

        stapes bench train --task ctc --random-weights wav2vec2-large --precision bf16 --peer transformers
        stapes bench train --task pretrain --precision bf16 --peer transformers --peer-batches 16,32

    Parameters
    ----------
    task:
        ctc: fine-tuning; pretrain: the contrastive objective.
    random_weights:
        The published size of the network, which knows nothing: wav2vec2-base or wav2vec2-large.
    device:
        auto, cpu, cuda (AMD too) or cuda:1.
    precision:
        fp32, bf16 or auto, what suits the device.
    batch:
        Recordings of a step.
    seconds:
        Length of each. Default: 15 for ctc, 15.6 for pretrain.
    freeze_front_end:
        ctc: the convolutions stay as they are.
    fused:
        Compute by fused kernels, where the device can; without, by PyTorch's own operations.
    compile:
        Compile the layers (torch.compile) in place of their fused kernels.
    dropout:
        Of hidden states and attention, and in fine-tuning of the MLPs. Default: the recipe's.
    layer_drop:
        Probability that a layer is left out of a step, by both systems; what is left out is no part of the MFU.
        Default: the recipe's.
    steps:
        How many a round has. Default: what takes about 3 s.
    peer:
        A system to measure beside ours: transformers.
    peer_batches:
        Sizes of the peer's batches, separated by commas; the fastest counts. Default: ours.
    rounds:
        How often each system runs.
    threads:
        CPU threads. Default: PyTorch's choice.
    output_dir:
        Folder for the result and its log.
    quick:
        A trial: few steps, 2 rounds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    sizes = listed("--peer-batches", peer_batches) if peer_batches is not None else []
    if not all(size.isdecimal() for size in sizes):
        raise UsageError(f"--peer-batches is {peer_batches!r}: give whole numbers separated by commas, such as 16,32")
    if quick:
        steps, rounds = steps or 2, 2
    terminal = Terminal()

    from stapes.benchmarks.train import TrainRun
    from stapes.benchmarks.train_setup import TrainSettings

    settings = TrainSettings(
        task=task,
        model=random_weights,
        device=device,
        precision=precision,
        batch=batch,
        seconds=seconds or {"ctc": 15.0, "pretrain": 15.6}[task],
        freeze_front_end=freeze_front_end,
        fused=fused,
        compile=compile,
        dropout=dropout,
        layer_drop=layer_drop,
        steps=steps,
        peer=peer,
        peer_batches=tuple(map(int, sizes)),
        threads=threads,
    )
    run = TrainRun(settings, rounds=rounds, command=["stapes", *sys.argv[1:]], quick=quick, log=terminal.note)
    path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _row_lines, json=json)
    return 0


def _row_lines(row: CaseRow) -> str:
    from stapes.benchmarks.results_page import spread

    case, ratios = row.case, {ratio.place: ratio.times_as_fast for ratio in row.ratios}
    lines = [
        f"{case['task']}, {case['batch']} × {case['seconds']:g} s a step, on {case['device_name']}, {case['precision']}"
    ]
    for place, system in enumerate(row.systems):
        figures = system.figures
        line = f"  {system.system} {system.options}".rstrip() + ": "
        line += f"{figures['audio_seconds_per_second'] or 0.0:,.0f} audio s/s, "
        line += f"{1e3 * (figures['step_seconds'] or 0.0):.4g} ms a step, MFU {percent(figures['mfu'])}, "
        line += f"{percent(figures['of_product'])} of a matrix product's speed"
        if figures.get("peak_step_bytes") is not None:
            line += f", {(figures['peak_step_bytes'] or 0.0) / 1e9:.4g} GB"
        if place in ratios:
            line += f"; stapes is {spread(ratios[place], lambda value: f'{value:.2f}')} × as fast"
        lines.append(line)
    figures = row.ours.figures
    if figures.get("peer_first_loss") is not None:
        lines.append(
            f"  loss before the first step: {figures['first_loss']:.6g}, the peer's {figures['peer_first_loss']:.6g}"
        )
    return "\n".join(lines) + "\n"
