"""``stapes bench mlperf``: MLPerf's Whisper recipe, beside the limits of the device and a peer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import listed, measure, percent, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError
from stapes.options import Precision

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def mlperf(
    *,
    model: str | None = None,
    random_weights: str | None = None,
    tokens: int | None = None,
    manifest: str | None = None,
    windows: int | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    int8_cache: bool = False,
    slots: int | None = None,
    encoder_batch: int | None = None,
    step_slots: int | None = None,
    step_tokens: int = 32,
    latency: bool = False,
    peer: str | None = None,
    peer_batches: str = "16,32,64,128",
    rounds: int = 3,
    threads: int | None = None,
    data: Path | None = None,
    language: str = "en",
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    model_dir: str | None = None,
    offline: bool = False,
    quick: bool = False,
    json: bool = False,
) -> int:
    """Time MLPerf's Whisper recipe: windows of at most 30 s in the host's memory → text.

    Greedy, without timestamps and fallback. Tokens are those that the decoder writes, prompt and end not counted.
    Encoder and decoder steps are timed alone too, against a large copy and a large matrix product of the same run.

    For example:

        stapes bench mlperf --random-weights large-v3 --precision bf16 --peer transformers --latency
        stapes bench mlperf --model base --manifest librispeech:test

    Parameters
    ----------
    model:
        Name, folder, Hugging Face id or .pt file. Default: base.
    random_weights:
        In place of a model: a network of this published size that knows nothing, for timing.
    tokens:
        Of a window: with random weights just so many (default 64), with real ones at most (default 200).
    manifest:
        Recordings to pack back to back into windows: a manifest, or a corpus by name. Default: windows of noise, 30 s
        each.
    windows:
        How many. Default: with a manifest all it gives, else what takes about 20 s.
    device:
        auto, cpu, cuda (AMD too) or cuda:1.
    precision:
        fp32, fp16, bf16 or auto, what suits the device.
    int8_cache:
        Keep keys and values of the encoder's states in 8 bits.
    slots:
        Windows that are decoded together. Default: what the GPU's memory holds, 192 at most; 4 on the CPU.
    encoder_batch:
        Windows that are encoded together. Default: 16; 1 on the CPU.
    step_slots:
        Windows of the decoder step that is timed alone. Default: 64, or all slots where they are fewer.
    step_tokens:
        Tokens that each window has written when that step is timed.
    latency:
        Time one clip of 10 s alone too, 30 tokens, from samples to text.
    peer:
        A system to measure beside ours: transformers.
    peer_batches:
        Batch sizes that the peer tries; it is timed at the best.
    rounds:
        How often each system runs.
    threads:
        CPU threads. Default: PyTorch's choice.
    data:
        Where corpora are found by name. Default: $STAPES_DATA, ./data, ../shared/data.
    language:
        Of the recordings.
    output_dir:
        Folder for the result and its log.
    model_dir:
        Folder where models are looked for and downloaded to.
    offline:
        Never download.
    quick:
        A trial: few windows, 2 rounds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if model is not None and random_weights is not None:
        raise UsageError("--model and --random-weights: give one of the two")
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    sizes = [_size(text) for text in listed("--peer-batches", peer_batches)]
    if quick:
        windows, rounds = windows or 8, 2
    terminal = Terminal()

    from stapes.benchmarks.mlperf import MlperfRun
    from stapes.benchmarks.mlperf_setup import MlperfSettings

    run = MlperfRun(
        MlperfSettings(
            model=random_weights or model or "base",
            random=random_weights is not None,
            tokens=tokens,
            device=device,
            precision=precision,
            int8_cache=int8_cache,
            slots=slots,
            encoder_batch=encoder_batch,
            windows=windows,
            manifest=manifest,
            data=data,
            language=language,
            step_slots=step_slots,
            step_tokens=step_tokens,
            latency=latency,
            peer=peer,
            peer_batches=tuple(sizes),
            threads=threads,
            model_dir=model_dir,
            offline=offline,
        ),
        rounds=rounds,
        command=["stapes", *sys.argv[1:]],
        quick=quick,
        log=terminal.note,
    )
    path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _row_lines, json=json)
    return 0


def _size(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise UsageError(f"--peer-batches has {text!r}: give whole numbers from 1 to 4096")
    return int(text)


def _row_lines(row: CaseRow) -> str:
    from stapes.benchmarks.results_page import spread

    case, ratios = row.case, {ratio.place: ratio.times_as_fast for ratio in row.ratios}
    is_latency = case["work"] == "latency"
    lines = [_latency_head(row) if is_latency else _windows_head(row)]
    for place, system in enumerate(row.systems):
        figures = system.figures
        line = f"  {system.system} {system.options}".rstrip() + ": "
        if is_latency:
            line += f"{spread(system.wall_seconds, lambda value: f'{1e3 * value:.1f}')} ms"
        else:
            line += (
                f"{_number(figures['windows_per_second'])} windows/s, "
                f"{_number(figures['sound_seconds_per_second'])} s of audio a second, "
                f"{_number(figures['tokens_per_second'])} tokens/s written (prompt and end not counted), "
                f"MFU {percent(figures['mfu'])}; {spread(system.wall_seconds)} s a round"
            )
            if figures["wer"] is not None:
                line += f"; WER {100 * figures['wer']:.2f} %"
        if place in ratios:
            line += f"; stapes is {spread(ratios[place], lambda value: f'{value:.2f}')} × as fast"
        lines.append(line)
    return "\n".join(lines + ([] if is_latency else _limits(row))) + "\n"


def _windows_head(row: CaseRow) -> str:
    case = row.case
    return (
        f"{case['windows']} windows, {case['sound_seconds']:g} s of sound, on {case['device_name']}, "
        f"{case['precision']}, cache {case['cache']}, {case['slots']} slots, {case['encoder_batch']} encoded together"
    )


def _latency_head(row: CaseRow) -> str:
    case = row.case
    return f"one clip of {case['sound_seconds']:g} s alone, {case['tokens']} tokens, from samples to text"


def _limits(row: CaseRow) -> list[str]:
    """What part of the device's best each part of ours reaches, and the memory."""
    figures = row.ours.figures

    def value(name: str) -> float:
        return figures.get(name) or 0.0

    encoder_rate = value("encoder_operations") / value("encoder_network_seconds")
    lines = [
        f"  encoder alone: {1e3 * value('encoder_network_seconds'):.4g} ms a window "
        f"({1e3 * value('encoder_seconds'):.4g} ms from samples), {encoder_rate / 1e12:.4g} TFLOP/s, "
        f"{percent(value('encoder_of_product'))} of a matrix product's "
        f"{value('product_operations_per_second') / 1e12:.4g}",
        f"  decoder step alone, {value('step_windows'):g} windows at {value('step_positions'):g} tokens: "
        f"{1e3 * value('step_seconds'):.4g} ms for {value('step_bytes') / 1e9:.4g} GB, "
        f"{percent(value('step_of_copy'))} of a copy's {value('copy_bytes_per_second') / 1e9:.4g} GB/s",
        f"  share of the time: encoder {percent(value('encoder_share'))}, "
        f"decoder and host {percent(1 - value('encoder_share'))}",
    ]
    if "allocated_bytes" in figures:
        lines.append(
            f"  GPU memory: {value('allocated_bytes') / 1e9:.2f} GB allocated, {value('reserved_bytes') / 1e9:.2f} GB "
            f"reserved by PyTorch at most; {value('driver_bytes') / 1e9:.2f} GB of the whole GPU by the driver"
        )
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
