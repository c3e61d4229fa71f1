"""``stapes bench ctc``: CTC recognition in batches, beside the limits of the device and a peer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import measure, percent, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError
from stapes.options import Precision

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def ctc(
    *,
    model: str | None = None,
    random_weights: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    batch: int = 32,
    seconds: float = 15.0,
    mix: bool = False,
    batches: int | None = None,
    beam: int | None = None,
    lm: Path | None = None,
    peer: str | None = None,
    rounds: int = 5,
    threads: int | None = None,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    quick: bool = False,
    json: bool = False,
) -> int:
    """Time CTC recognition: recordings in the host's memory → text, in batches.

    What is heard is noise. The network is timed alone too, against a large copy and a large matrix product of the
    same run.

    For example:

        stapes bench ctc --random-weights wav2vec2-large --precision bf16 --mix --peer transformers
        stapes bench ctc --model FOLDER --beam 32 --lm lm.arpa

    Parameters
    ----------
    model:
        Folder of a wav2vec 2.0, HuBERT, XLS-R or MMS model that was fine-tuned with CTC.
    random_weights:
        In place of a model: a network of this published size that knows nothing, for timing: wav2vec2-base or
        wav2vec2-large.
    device:
        auto, cpu, cuda (AMD too) or cuda:1.
    precision:
        fp32, fp16, bf16 or auto, what suits the device.
    batch:
        Recordings of a batch.
    seconds:
        Length of each.
    mix:
        Measure a mix of lengths too, as read speech has them: batches of as much sound each.
    batches:
        How many a round has. Default: what takes about 3 s.
    beam:
        Set beam search of this width against the greedy text, too.
    lm:
        Language model (ARPA) for the beam.
    peer:
        A system to measure beside ours: transformers.
    rounds:
        How often each system runs.
    threads:
        CPU threads. Default: PyTorch's choice.
    output_dir:
        Folder for the result and its log.
    quick:
        A trial: few batches, 2 rounds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if (model is None) == (random_weights is None):
        raise UsageError("give one of --model FOLDER and --random-weights wav2vec2-base")
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    if quick:
        batches, rounds = batches or 2, 2
    terminal = Terminal()

    from stapes.benchmarks.ctc import CtcRun
    from stapes.benchmarks.ctc_setup import CtcSettings

    settings = CtcSettings(
        model=str(random_weights or model),
        random=random_weights is not None,
        device=device,
        precision=precision,
        batch=batch,
        seconds=seconds,
        mix=mix,
        batches=batches,
        peer=peer,
        beam=beam,
        language_model=lm,
        threads=threads,
    )
    run = CtcRun(settings, rounds=rounds, command=["stapes", *sys.argv[1:]], quick=quick, log=terminal.note)
    path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _row_lines, json=json)
    return 0


def _row_lines(row: CaseRow) -> str:
    from stapes.benchmarks.results_page import spread

    case, ratios = row.case, {ratio.place: ratio.times_as_fast for ratio in row.ratios}
    lengths = "a mix of lengths" if case["work"] == "mix" else f"{case['seconds']:g} s each"
    lines = [
        f"{case['recordings']} recordings, {lengths}, {case['batches']} batches, {case['sound_seconds']:g} s of sound, "
        f"on {case['device_name']}, {case['precision']}"
    ]
    for place, system in enumerate(row.systems):
        figures = system.figures
        line = f"  {system.system} {system.options}".rstrip() + ": "
        line += f"{figures['times_real_time'] or 0.0:,.0f} × real time, "
        line += f"{percent(figures['of_product'])} of a matrix product's speed, MFU {percent(figures['mfu'])}; "
        line += f"{spread(system.wall_seconds)} s a round"
        if place in ratios:
            line += f"; stapes is {spread(ratios[place], lambda value: f'{value:.2f}')} × as fast"
        lines.append(line)
    if "network_seconds" in row.ours.figures:
        lines += _limits(row.ours.figures)
    return "\n".join(lines) + "\n"


def _limits(figures: dict[str, float | None]) -> list[str]:
    """What part of the device's best the network alone reaches."""

    def value(name: str) -> float:
        return figures.get(name) or 0.0

    product, copy = value("product_operations_per_second") / 1e12, value("copy_bytes_per_second") / 1e9
    lines = [
        f"  a batch alone, samples on the device to logits: {1e3 * value('network_seconds'):.4g} ms, of which "
        f"convolutions {1e3 * value('front_seconds'):.4g} ms",
        f"  {value('network_operations') / 1e12:.4g} TFLOP: {percent(value('network_of_product'))} of a matrix "
        f"product's {product:.4g} TFLOP/s; {value('network_bytes') / 1e9:.4g} GB: "
        f"{percent(value('network_of_copy'))} of a copy's {copy:.4g} GB/s",
    ]
    if "different_texts" in figures:
        lines.append(f"  {percent(value('different_texts'))} of the characters differ from the peer's")
    return lines
