"""``stapes bench``: measure, compare runs of one machine, rebuild RESULTS.md, send results in."""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from cyclopts import App, Parameter

from stapes.cli.bench_adapted import adapted
from stapes.cli.bench_allreduce import allreduce
from stapes.cli.bench_bulk import bulk
from stapes.cli.bench_ctc import ctc
from stapes.cli.bench_kernels import kernels
from stapes.cli.bench_mlperf import mlperf
from stapes.cli.bench_objectives import objectives
from stapes.cli.bench_pretraining import pretraining
from stapes.cli.bench_run import listed, measure, tell
from stapes.cli.bench_serve import serve
from stapes.cli.bench_stream import stream
from stapes.cli.bench_train import train
from stapes.cli.terminal import Terminal, to_json
from stapes.errors import OutputError, UsageError
from stapes.options import Precision, TranscribeOptions

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow

app = App(
    name="bench",
    help_format="markdown",
    help=(
        "Measure speed so that anybody can measure it again.\n\n"
        "Systems run in turn in one process, loaded and warm before the clock; every round, the machine, the commit "
        "and the weights are kept in `results/`.\n\n"
        "Example: stapes bench transcribe --model base --peer faster-whisper"
    ),
)

app.command(adapted)
app.command(allreduce)
app.command(bulk)
app.command(ctc)
app.command(kernels)
app.command(mlperf)
app.command(objectives)
app.command(pretraining)
app.command(serve)
app.command(stream)
app.command(train)

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


@app.command
def transcribe(
    *,
    model: str = "base",
    random_weights: str | None = None,
    tokens: int = 92,
    lengths: str = "30s,5min,1h",
    devices: str = "auto",
    precisions: str = "auto",
    batch_sizes: str = "8",
    peer: tuple[str, ...] = (),
    rounds: int = 5,
    threads: int | None = None,
    corpus: str | None = None,
    data: Path | None = None,
    language: str = "en",
    beam_size: int = 1,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    model_dir: str | None = None,
    offline: bool = False,
    quick: bool = False,
    json: bool = False,
) -> int:
    """Time transcription for every combination of length, device, precision and batch size.

    Greedy, without timestamps, speech detected first, the language given. Peers run the same model in the same
    number format with the same threads and batch size, unless their options say otherwise.

    For example:

        stapes bench transcribe --quick
        stapes bench transcribe --peer faster-whisper --peer transformers
        stapes bench transcribe --random-weights large-v3 --devices cuda,cpu

    Parameters
    ----------
    model:
        Name, folder, Hugging Face id or .pt file.
    random_weights:
        In place of a model: a network of this published size that knows nothing, for timing.
    tokens:
        With random weights, the tokens that every window is made to write; base writes 92 for 30 s of LibriSpeech.
    lengths:
        Of the recordings, separated by commas, such as 30s,5min,1h.
    devices:
        Separated by commas: cpu, cuda, cuda:1. cuda means AMD GPUs too.
    precisions:
        Separated by commas: fp32, fp16, bf16, int8, or auto, what suits the device.
    batch_sizes:
        Windows decoded together, separated by commas.
    peer:
        A system to measure beside ours, again for more: faster-whisper, transformers, whisper.cpp, openai-whisper,
        each with ?OPTION=VALUE if wanted, such as ?compute_type=int8; ?model=base where it cannot open our MODEL.
    rounds:
        How often each system runs.
    threads:
        CPU threads of every system. Default: PyTorch's choice.
    corpus:
        Clips that the recordings are joined of: a manifest, or a corpus by name. Default: librispeech:test where it
        is on disk, else the clips of the pip package pytest-audioeval.
    data:
        Where corpora are found by name. Default: $STAPES_DATA, ./data, ../shared/data.
    language:
        Of the clips.
    beam_size:
        Beams; 1 is greedy.
    output_dir:
        Folder for the result and its log.
    model_dir:
        Folder where models are looked for and downloaded to.
    offline:
        Never download.
    quick:
        A trial: 10 s of audio, 2 rounds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if quick:
        lengths, rounds = "10s", 2
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    seconds = [_seconds(text) for text in listed("--lengths", lengths)]
    sizes = [_size(text) for text in listed("--batch-sizes", batch_sizes)]
    terminal = Terminal()

    # Imported here: `stapes --help` needs none of it.
    from stapes.benchmarks.audio import find_clips, join
    from stapes.benchmarks.run import Run
    from stapes.benchmarks.transcribe import TranscribeBench

    clips = find_clips(corpus, data)
    with tempfile.TemporaryDirectory() as folder:
        bench = TranscribeBench(
            model=random_weights or model,
            recordings=[join(clips, length, Path(folder) / f"{length:g}.wav") for length in seconds],
            warm_up=join(clips, min(60.0, max(seconds)), Path(folder) / "warm-up.wav"),
            devices=tuple(listed("--devices", devices)),
            precisions=cast("tuple[Precision, ...]", tuple(listed("--precisions", precisions))),
            batch_sizes=tuple(sizes),
            peers=peer,
            options=TranscribeOptions(language=language, beam_size=beam_size, without_timestamps=True),
            threads=threads,
            random_tokens=tokens if random_weights else None,
            model_dir=model_dir,
            offline=offline,
        )
        run = Run(
            "transcribe",
            bench.cases(),
            rounds=rounds,
            weights=bench.weights(),
            audio={"corpus": clips.name, "sha256": clips.sha256(), "language": language, "seconds": seconds},
            command=["stapes", *sys.argv[1:]],
            quick=quick,
            log=terminal.note,
        )
        path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _line, json=json)
    return 0


def _line(row: CaseRow) -> str:
    from stapes.benchmarks.results_page import spread

    case = row.case
    head = f"{case['audio_seconds']:g} s on {case['device_name']}, {case['precision']}, batch {case['batch_size']}"
    ratios = {ratio.place: ratio.times_as_fast for ratio in row.ratios}
    lines = []
    for place, system in enumerate(row.systems):
        wer = system.figures.get("wer")
        line = f"  {system.system} {system.options}".rstrip() + f": {spread(system.wall_seconds)} s"
        line += f", {case['audio_seconds'] / system.wall_seconds.median:.1f} × real time"
        line += "" if wer is None else f", WER {100 * wer:.2f} %"
        counts = {what: system.figures.get(what) for what in ("windows", "tokens")}
        work = [f"{count:.0f} {what}" for what, count in counts.items() if count is not None]
        line += f" ({', '.join(work)})" if work else ""
        if place in ratios:
            line += f"; stapes is {spread(ratios[place], lambda value: f'{value:.2f}')} × as fast"
        lines.append(line)
    return "\n".join([head, *lines]) + "\n"


@app.command
def compare(
    before: Annotated[str, Parameter(name="BEFORE")],
    after: Annotated[str, Parameter(name="AFTER")],
    /,
    *,
    json: bool = False,
) -> int:
    """Compare our times in two runs of one machine; of two machines it is refused.

    Example:

        stapes bench compare results/2026-01-01-….json results/2026-02-01-….json

    Parameters
    ----------
    before:
        The earlier result.
    after:
        The later result.
    json:
        Print the changes as JSON.
    """
    from stapes.benchmarks.records import compare_runs, read_bench
    from stapes.benchmarks.results_page import spread

    changes = compare_runs(read_bench(before), read_bench(after))
    terminal = Terminal()
    if json:
        terminal.out(to_json({"changes": [asdict(change) for change in changes]}) + "\n")
        return 0
    for change in changes:
        case = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in change.case.values())
        terminal.out(
            f"{case}: {spread(change.before)} → {spread(change.after)} s, {change.times_as_fast:.2f} × as fast\n"
        )
    return 0


@app.command
def results(
    *,
    folder: Path = Path("results"),
    output: Annotated[Path, Parameter(alias="-o")] = Path("RESULTS.md"),
    check: bool = False,
    json: bool = False,
) -> int:
    """Rebuild RESULTS.md from the results in a folder.

    Example:

        stapes bench results

    Parameters
    ----------
    folder:
        Where the results are.
    output:
        The page to write.
    check:
        Write nothing: exit code 1 if the page is not what the results give.
    json:
        Print what was read and written as JSON.
    """
    from stapes.benchmarks.results_page import MADE_BY, load_results, render

    found = load_results(folder)
    page = render(found)
    terminal = Terminal()
    before = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    if before and MADE_BY not in before:
        raise UsageError(f"{output} was not made by this command and is left alone: give another file with -o")
    is_current = before == page
    if check and not is_current:
        terminal.failure(f"{output} is not what {folder} gives: run `stapes bench results`")
    if not check and not is_current:
        try:
            output.write_text(page, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{output}: cannot be written ({error.strerror}); choose another place") from error
    if json:
        terminal.out(
            to_json({"results": [name for name, _ in found], "page": str(output), "current": is_current}) + "\n"
        )
    else:
        terminal.out(
            f"{output}: {len(found)} runs, {'current' if is_current else 'out of date' if check else 'written'}\n"
        )
    return 1 if check and not is_current else 0


@app.command
def submit(
    *sources: Annotated[str, Parameter(name="RESULT", help="Result files, or folders of them. Default: results.")],
    output: Annotated[Path, Parameter(alias="-o")] = Path("stapes-bench.zip"),
    json: bool = False,
) -> int:
    """Pack what was measured on this machine into one file that can be sent to the project.

    It holds the results, their logs, what the machine is and the versions of what is installed. Paths, names of users
    and computers, and addresses are taken out; look into it before you send it.

    Example:

        stapes bench submit results -o my-gpu.zip

    Parameters
    ----------
    output:
        The file to write.
    json:
        Print what is in it as JSON.
    """
    from stapes.benchmarks.submit import pack

    names = pack(sources or ("results",), output)
    terminal = Terminal()
    if json:
        terminal.out(to_json({"file": str(output), "contents": names}) + "\n")
    else:
        listed = "".join(f"  {name}\n" for name in names)
        terminal.out(f"{output} holds\n{listed}Attach it to an issue of the project, titled with your GPU.\n")
    return 0


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h)", text)
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1.0 <= value <= 24 * 3600:
        raise UsageError(f"--lengths has {text!r}: give lengths from 1s to 24h, such as 30s,5min,1h")
    return value


def _size(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise UsageError(f"--batch-sizes has {text!r}: give whole numbers from 1 to 4096")
    return int(text)
