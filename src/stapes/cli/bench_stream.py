"""``stapes bench stream``: live sessions side by side, at the pace of speech."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import listed, measure, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError
from stapes.options import Precision, TurnOptions

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def stream(
    *,
    model: str | None = None,
    random_weights: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    streams: str = "1,4",
    search: bool = False,
    target: float = 0.5,
    seconds: float = 60.0,
    silence_duration_ms: int = 500,
    slots: int | None = None,
    corpus: str | None = None,
    data: Path | None = None,
    language: str | None = "en",
    rounds: int = 1,
    threads: int | None = None,
    model_dir: str | None = None,
    offline: bool = False,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    quick: bool = False,
    json: bool = False,
) -> int:
    """Measure live captions: clients that speak real recordings, 100 ms at a time, all at once.

    Time to the first words, from each word's end to its commit, and to the final text; words taken back; word errors
    beside those of the same recordings as files.

    For example:

        stapes bench stream --model base --streams 1,4
        stapes bench stream --random-weights turbo --precision fp16 --streams 64 --search

    Parameters
    ----------
    model:
        Model to measure. Default: base.
    random_weights:
        In place of a model: a Whisper of this published size that knows nothing. It works as if it did, and what it
        is taken to say is the recordings' text.
    device:
        auto, cpu, cuda (AMD too) or cuda:1.
    precision:
        fp32, fp16, bf16, int8, or auto, what suits the device.
    streams:
        Clients at once; several numbers separated by commas are measured one after another.
    search:
        Go on from the last number to the most streams that keep to the target.
    target:
        Seconds in which 95 % of final texts are to be there once a turn is over.
    seconds:
        How long each client speaks, at least.
    silence_duration_ms:
        Silence that ends a turn.
    slots:
        Windows decoded together. Default: what suits the device.
    corpus:
        Manifest with recordings and their text. Default: LibriSpeech's test split where it is, else clips from pip.
    data:
        Folder of corpora.
    language:
        Language spoken.
    rounds:
        How often each number is measured.
    threads:
        CPU threads of the model. Default: PyTorch's choice.
    model_dir:
        Folder where models are looked for.
    offline:
        Never download.
    output_dir:
        Folder for the result and its log.
    quick:
        A trial: a few seconds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if model is not None and random_weights is not None:
        raise UsageError("--model and --random-weights: give one of them")
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    try:
        counts = tuple(int(count) for count in listed("--streams", streams))
    except ValueError:
        raise UsageError(f"--streams is {streams!r}: give numbers separated by commas: 1,4,16") from None
    terminal = Terminal()

    from stapes.benchmarks.stream import StreamBench, StreamSettings

    settings = StreamSettings(
        model=random_weights or model or "base",
        random=random_weights is not None,
        device=device,
        precision=precision,
        streams=counts,
        seconds=min(seconds, 6.0) if quick else seconds,
        target=target,
        search=search,
        turns=TurnOptions(silence_duration_ms=silence_duration_ms),
        slots=slots,
        corpus=corpus,
        data=data,
        language=language,
        threads=threads,
        model_dir=model_dir,
        offline=offline,
    )
    run = StreamBench(settings, terminal.note).run(rounds, ["stapes", *sys.argv[1:]], quick=quick)
    path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _row_lines, json=json)
    return 0


def _row_lines(row: CaseRow) -> str:
    case, figures = row.case, row.ours.figures

    def both(name: str) -> str:
        middle, high = figures[f"{name}_p50"], figures[f"{name}_p95"]
        return "–" if middle is None or high is None else f"{middle:.2f} / {high:.2f} s"

    lines = [
        f"{case['streams']} streams of {case['seconds']:g} s, on {case['device_name']}, {case['precision']} "
        "(median / 95 %):",
        f"  first words {both('first_words')}; word's end to commit {both('words')}",
        f"  final text after the last word {both('final_after_speech')}, after the turn was over "
        f"{both('final_after_stop')}"
        + ("" if figures["within_target"] else f": more than the target of {case['target']:g} s"),
        f"  committed words changed: {figures['committed_changed'] or 0:g} of {figures['words'] or 0:g}; provisional "
        f"ones taken back: {figures['revised_per_word'] or 0:.2f} a word; a partial every "
        f"{figures['partial_interval'] or 0:.2f} s",
    ]
    if figures.get("wer") is not None:
        wer, of_files = figures["wer"] or 0.0, figures["file_wer"] or 0.0
        lines.append(f"  WER {100 * wer:.2f} %; of the same recordings as files {100 * of_files:.2f} %")
    if figures["failed"]:
        lines.append(f"  parts that failed: {figures['failed']:g}")
    if (figures["sent_late"] or 0.0) > 0.1:
        lines.append(f"  the clients were up to {figures['sent_late'] or 0.0:.2f} s late: figures are too high")
    return "\n".join(lines) + "\n"
