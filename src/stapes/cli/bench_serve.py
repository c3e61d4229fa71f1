"""``stapes bench serve``: the server under load."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import listed, measure, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError
from stapes.options import Precision

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow, SystemRow


def serve(
    *,
    model: str | None = None,
    random_weights: str | None = None,
    url: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    batching: str = "dynamic",
    clients: str = "16",
    rates: str = "50%,80%",
    beside: int = 0,
    requests: int = 200,
    target: float = 2.0,
    clip_seconds: float = 3.0,
    long_seconds: float = 600.0,
    max_batch: int | None = None,
    max_wait_ms: float = 50.0,
    decoders: int = 2,
    corpus: str | None = None,
    data: Path | None = None,
    language: str | None = "en",
    rounds: int = 3,
    threads: int | None = None,
    model_dir: str | None = None,
    seed: int = 1,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    quick: bool = False,
    json: bool = False,
) -> int:
    """Measure `stapes serve` under load: throughput, latency, and what dynamic batching brings.

    A server is begun on loopback, or `--url` names one. Clients send recordings as fast as they are answered, or at
    random times (Poisson); with `--beside`, clips of a few seconds while a long recording is on its way.

    For example:

        stapes bench serve --model base
        stapes bench serve --random-weights turbo --precision fp16 --batching dynamic,fixed:8,single --clients 64
        stapes bench serve --model base --clients none --rates none --beside 40
        stapes bench serve --url http://gpu-box:8000 --clients 8,32

    Parameters
    ----------
    model:
        Model to serve. Default: base.
    random_weights:
        In place of a model: a Whisper of this published size that knows nothing. Each window is made to write as many
        tokens as a recording of the corpus that is as long.
    url:
        Measure a server that is there. The variable STAPES_API_KEY holds its key.
    device:
        auto, cpu, cuda (AMD too) or cuda:1.
    precision:
        fp32, fp16, bf16, int8, or auto, what suits the device.
    batching:
        dynamic (the server's own), fixed:8 (the next eight when all eight have ended), single; several, separated by
        commas, are compared on the same engine in turn.
    clients:
        Clients at once, each of which sends its next recording when its last was answered; several numbers separated
        by commas are measured one after another. none: no such load.
    rates:
        Requests a second at random times, or shares of what the last of --clients reached; separated by commas, or
        none.
    beside:
        Clips of --clip-seconds sent while a recording of --long-seconds is on its way; 0: none.
    requests:
        Recordings sent in each round of a load.
    target:
        Seconds in which a request is to be answered: goodput counts those that were.
    clip_seconds:
        Length of the short clips of --beside.
    long_seconds:
        Length of the long recording of --beside.
    max_batch:
        Windows decoded together. Default: as `stapes serve`, or the largest fixed batch, where that is more.
    max_wait_ms:
        As `stapes serve`; a fixed batch that is not full waits so long too.
    decoders:
        As `stapes serve`.
    corpus:
        Manifest with recordings and their text. Default: LibriSpeech's test split where it is, else clips from pip.
    data:
        Folder of corpora.
    language:
        Language spoken.
    rounds:
        How often each load is measured.
    threads:
        CPU threads of the model. Default: PyTorch's choice.
    model_dir:
        Folder where models are looked for.
    seed:
        Of the order of recordings and of random times.
    output_dir:
        Folder for the result and its log.
    quick:
        A trial: a few requests, one round; never tabled.
    json:
        Print the result as one JSON object.
    """
    if sum(each is not None for each in (model, random_weights, url)) > 1:
        raise UsageError("--model, --random-weights and --url: give one of them")
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    try:
        from stapes.benchmarks.serve import ServeBench, ServeSettings
    except ModuleNotFoundError as error:
        raise UsageError(f"serving needs {error.name}: pip install 'stapes[serve]'") from error

    try:
        counts = tuple(int(count) for count in _several("--clients", clients))
    except ValueError:
        raise UsageError(f"--clients is {clients!r}: give numbers separated by commas: 4,16,64") from None
    terminal = Terminal()
    settings = ServeSettings(
        model=random_weights or model or "base",
        random=random_weights is not None,
        url=url,
        key=os.environ.get("STAPES_API_KEY") if url else None,
        device=device,
        precision=precision,
        batching=tuple(listed("--batching", batching)),
        clients=counts,
        rates=_several("--rates", rates),
        beside=min(beside, 4) if quick else beside,
        requests=min(requests, 12) if quick else requests,
        target=target,
        clip_seconds=clip_seconds,
        long_seconds=long_seconds,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        decoders=decoders,
        corpus=corpus,
        data=data,
        language=language,
        threads=threads,
        model_dir=model_dir,
        seed=seed,
    )
    run = ServeBench(settings, terminal.note).run(1 if quick else rounds, ["stapes", *sys.argv[1:]], quick=quick)
    path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _row_lines, json=json)
    return 0


def _several(option: str, text: str) -> tuple[str, ...]:
    return () if text.strip().lower() == "none" else tuple(listed(option, text))


def _row_lines(row: CaseRow) -> str:
    from stapes.benchmarks.results_page import spread

    case = row.case
    heads = {
        "closed": lambda: f"{case['clients']} clients, {case['requests']} requests",
        "open": lambda: f"{case['rate']:g} requests/s at random times, {case['requests']} of them",
        "beside": lambda: f"{case['requests']} clips of {case['clip_seconds']:g} s beside {case['long_seconds']:g} s",
    }
    lines = [f"{heads[case['load']]()}, on {case['device_name']}, {case['precision']}:"]
    ratios = {ratio.place: ratio.times_as_fast for ratio in row.ratios}
    for place, system in enumerate(row.systems):
        lines.append(_system_line(case["load"], case["target"], system))
        if place in ratios and case["load"] == "closed":
            lines.append(
                f"    {row.systems[0].options} is {spread(ratios[place], lambda value: f'{value:.2f}')} × as fast"
            )
    return "\n".join(lines) + "\n"


def _system_line(load: str, target: float, system: SystemRow) -> str:
    figures = system.figures

    def number(name: str) -> str:
        value = figures.get(name)
        return "–" if value is None else f"{value:.3g}"

    line = f"  {system.options or system.system}: "
    if load == "beside":
        line += f"median {number('alone_p50')} s alone, {number('latency_p50')} s beside; 95 % within "
        line += f"{number('alone_p95')} and {number('latency_p95')} s: {number('p95_ratio')} ×"
    else:
        line += f"{number('requests_per_second')} requests/s, {number('sound_per_second')} × real time; "
        line += (
            f"50, 95 and 99 % within {number('latency_p50')}, {number('latency_p95')} and {number('latency_p99')} s; "
        )
        line += f"{number('goodput')} requests/s within {target:g} s"
    wrong = [f"{figures.get(name):g} {name}" for name in ("refused", "failed", "lost") if figures.get(name)]
    if figures.get("other_texts"):
        wrong.append(f"{figures['other_texts']:g} with another text than at first")
    return line + (f"; {', '.join(wrong)}" if wrong else "")
