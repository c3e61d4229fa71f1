"""``stapes bulk``: thousands of hours into a folder, on this machine or on a cluster, as often as it takes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from stapes.bulk.options import JobOptions, LabelOptions
from stapes.cli.background import Background
from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, clock, display, to_json
from stapes.cli.transcribe import ModelOptions, _group
from stapes.errors import StapesError, UsageError

# Precision and Backend: cyclopts looks the types of ModelOptions' fields up in this module.
from stapes.options import Backend, Precision, TranscribeOptions  # noqa: F401

if TYPE_CHECKING:
    from stapes.bulk.convert import Format

app = App(name="bulk", help_format="markdown", usage="Usage: stapes bulk [OPTIONS] INPUT… OUT")

_JOB, _MODEL, _OPTIONS, _LABELS = JobOptions(), ModelOptions(), TranscribeOptions(), LabelOptions()
_OUT = Parameter(name="OUT", help="The folder of a job.")


@app.default
def bulk(
    *inputs: Annotated[
        str,
        Parameter(
            name="INPUT… OUT",
            help=(
                "INPUT: folders, recordings, patterns, manifests (.jsonl with `audio`, lhotse's cuts, .csv, .tsv, "
                "gzipped or not), @list.txt, or URLs of them (s3://, gs://, https://). OUT: the folder of the job."
            ),
        ),
    ],
    job: Annotated[JobOptions, _group("Job", 1)] = _JOB,
    model: Annotated[ModelOptions, _group("Model", 2)] = _MODEL,
    options: Annotated[TranscribeOptions, _group("Transcription", 4)] = _OPTIONS,
    json: bool = False,
) -> int:
    """Transcribe thousands of hours. Nothing is lost and nothing is done twice: the same command goes on.

    OUT/shards holds `shard-N.jsonl.zst`, a row a recording, each with a `.done` that makes it valid. A recording that
    cannot be read is a row with its error; one that ends two decoders, or two workers that do nothing else, is
    quarantined. `stapes.bulk.read("OUT")` reads the rows.

    For example:

        stapes bulk calls/ out --model base                       a folder; run it again to go on
        stapes bulk manifest.jsonl out --model turbo --device cuda:0,cuda:1
        stapes bulk s3://bucket/audio out --model turbo --ray auto
        stapes bulk calls/ out --model base --shard-index 3 --shard-count 16    one of 16 machines
        stapes bulk status out
        stapes bulk labels out train.jsonl.gz --language de       pseudo-labels for training

    Exit code: 0 all done, 1 some recordings failed or the job was stopped, 2 wrong usage or another job's folder, 3 no
    usable device or model, 130 interrupted (the same command goes on).

    Parameters
    ----------
    json:
        Print how the job went as one JSON object.
    """
    if len(inputs) < 2:
        raise UsageError("name inputs and a folder for the results, such as `stapes bulk recordings/ out --model base`")
    if model.model is None:
        raise UsageError("a job belongs to its model: name it, such as --model base")
    terminal, stop = Terminal(), threading.Event()
    work = Background(lambda: _run(terminal, inputs, job, model, options, stop))
    result: dict[str, Any] = {}
    try:
        for each in work:
            result = each
    except (KeyboardInterrupt, StapesError) as error:
        stop.set()
        work.cancel(grace=10.0)
        terminal.end_progress()
        if isinstance(error, KeyboardInterrupt):
            terminal.note("interrupted: what is finished stays, and the same command goes on from there")
        raise
    with shielded():
        if json:
            terminal.out(to_json(result) + "\n")
        else:
            terminal.out(_summary(result))
    return 1 if result["failed"] else 0


def _run(
    terminal: Terminal,
    names: tuple[str, ...],
    job: JobOptions,
    model: ModelOptions,
    options: TranscribeOptions,
    stop: threading.Event,
) -> Generator[dict[str, Any], None, None]:
    from stapes.bulk.job import run_job

    settings = {name: value for name, value in model.settings().items() if name not in ("device", "threads")}
    assert model.model is not None
    with terminal.progress("seconds", "listing the recordings, loading the model …") as progress:
        yield run_job(
            names[:-1],
            names[-1],
            model=model.model,
            options=options,
            job=job,
            device=model.device,
            threads=model.threads,
            settings=settings,
            progress=progress,
            command=["stapes", *sys.argv[1:]],
            is_stopped=stop.is_set,
        )


@app.command
def status(out: Annotated[Path, _OUT], /, *, json: bool = False) -> int:
    """Say how far a job is, while it runs or afterwards: hours, speed, workers, time left, errors by kind.

    For example:

        stapes bulk status out

    Parameters
    ----------
    json:
        Print everything as one JSON object.
    """
    from stapes.bulk.state import look

    found = look(out)
    terminal = Terminal()
    terminal.out(to_json(found) + "\n" if json else _status(found))
    return 0


@app.command
def verify(out: Annotated[Path, _OUT], /, *, json: bool = False) -> int:
    """Check every finished shard: its hash, and that it holds the recordings of the plan, each once.

    For example:

        stapes bulk verify out

    Exit code: 0 all is well, 1 a shard is damaged (delete its .done and run the job again).

    Parameters
    ----------
    json:
        Print one JSON object: checked, damaged.
    """
    from stapes.bulk.store import verify as check

    terminal = Terminal()
    checked, damaged = 0, []
    for shard, problem in check(out):
        checked += 1
        if problem is not None:
            damaged.append({"shard": shard, "problem": problem})
            terminal.failure(problem)
    if json:
        terminal.out(to_json({"checked": checked, "damaged": damaged}) + "\n")
    else:
        terminal.out(f"{checked:,} shards checked, {len(damaged):,} damaged\n")
    return 1 if damaged else 0


@app.command
def summary(out: Annotated[Path, _OUT], folder: Path, /, *, normalizer: str = "auto", json: bool = False) -> int:
    """Write what `stapes compare` reads: result.json and utterances.jsonl, with error rates where texts were given.

    For example:

        stapes bulk summary out results/bulk
        stapes compare results/bulk results/other

    Parameters
    ----------
    folder:
        Folder for the two files.
    normalizer:
        english or basic (Whisper's), none, or auto: English for English, basic for other languages.
    json:
        Print result.json.
    """
    from dataclasses import asdict

    from stapes.bulk.summary import summarize_job

    result = summarize_job(out, folder, normalizer=normalizer)
    terminal = Terminal()
    if json:
        terminal.out(to_json(asdict(result)) + "\n")
    else:
        rate = "no texts to compare with" if result.wer.value is None else f"WER {100 * result.wer.value:.2f} %"
        terminal.out(f"{result.corpus.utterances:,} recordings, {result.corpus.hours:.2f} h, {rate}\nwrote {folder}\n")
    return 0


@app.command
def export(
    out: Annotated[Path, _OUT], folder: Path, /, *, format: Annotated[str, Parameter(alias="-f")], json: bool = False
) -> int:
    """Write the finished shards as Parquet, or a file of text or subtitles for each recording.

    What was exported before is left out: the same command goes on.

    For example:

        stapes bulk export out tables -f parquet
        stapes bulk export out subtitles -f srt

    Parameters
    ----------
    folder:
        Where the files go.
    format:
        parquet (a file a shard), or txt, srt, vtt, tsv, json (a file a recording, in folders as the recordings').
    json:
        Print one JSON object: shards, files.
    """
    from stapes.bulk.convert import export_job

    shards, files = export_job(out, folder, _format(format))
    terminal = Terminal()
    if json:
        terminal.out(to_json({"shards": shards, "files": files}) + "\n")
    else:
        terminal.out(f"{shards:,} shards exported: {files:,} files in {folder}\n")
    return 0


def _format(name: str) -> Format:
    from stapes.bulk.convert import FORMATS

    if name not in FORMATS:
        raise UsageError(f"-f {name!r} is no format to export: say {', '.join(FORMATS)}")
    return name  # pyright: ignore[reportReturnType]


@app.command
def labels(
    out: Annotated[Path, _OUT],
    manifest: Path,
    /,
    *,
    options: Annotated[LabelOptions, Parameter(name="*")] = _LABELS,
    json: bool = False,
) -> int:
    """Make training data of a job: utterances that pass every filter, as lhotse's cuts, and why others did not.

    Segments are joined to utterances of at most --max-seconds. Left out is what is in another language, in either of
    two passes; what repeats itself, is too fast or too slow to have been said, or is a phrase that models write over
    silence; and what the model was not sure of.

    For example:

        stapes bulk recordings/ first --model base                  which language is it?
        stapes bulk recordings/ second --model turbo --language de
        stapes bulk labels second train.jsonl.gz --language de --second-pass first

    Parameters
    ----------
    manifest:
        The cuts, .jsonl or .jsonl.gz; beside it MANIFEST.report.json and MANIFEST.rejected.jsonl.
    json:
        Print the report.
    """
    from stapes.bulk.labels import make_labels

    report = make_labels(out, manifest, options)
    terminal = Terminal()
    if json:
        terminal.out(to_json(report) + "\n")
    else:
        rejected = ", ".join(f"{count['utterances']:,} {reason}" for reason, count in report["rejected"].items())
        terminal.out(
            f"kept {report['kept']['utterances']:,} utterances, {report['kept']['hours']:.2f} h\n"
            + (f"left out: {rejected}\n" if rejected else "")
            + f"wrote {manifest}\n"
        )
    return 0 if report["kept"]["utterances"] else 1


def _summary(result: dict[str, Any]) -> str:
    rate = result["audio_seconds_per_second"]
    lines = [
        f"{result['files_done']:,} recordings, {result['audio_seconds'] / 3600:.2f} h"
        + (f"; now {result['files_now']:,}, at {rate:.1f} × real time" if rate and result["files_now"] else ""),
        *_errors(result),
        f"wrote {result['out']}/shards",
    ]
    return "".join(f"{display(line)}\n" for line in lines)


def _errors(found: dict[str, Any]) -> list[str]:
    if not found["failed"]:
        return []
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found["errors"].items(), key=lambda pair: -pair[1]))
    return [f"{found['failed']:,} failed: {kinds}"]


def _status(found: dict[str, Any]) -> str:
    lines = [
        f"{found['state']}: {found['shards_done']:,} of {found['shards']:,} shards, {found['files_done']:,} of "
        f"{found['files']:,} recordings, {found['audio_seconds'] / 3600:.2f} h",
        *_errors(found),
    ]
    for driver in found["drivers"]:
        rate, left = driver["audio_seconds_per_second"], driver["seconds_left"]
        index, count = driver["part"]
        name = f"part {index} of {count}: " if count > 1 else ""
        speed = f", {rate:.1f} × real time" if rate else ""
        time_left = f", {clock(left)} left" if left and driver["state"] == "running" else ""
        lines.append(
            f"{name}{driver['state']}{speed}{time_left}" + (f": {driver['reason']}" if "reason" in driver else "")
        )
        for worker in driver["workers"] if driver["state"] == "running" else []:
            speed = worker["audio_seconds_per_second"]
            deaths = f", ended {worker['deaths']} times" if worker["deaths"] else ""
            lines.append(
                f"  {worker['name']}: {worker['state']}{f', {speed:.1f} × real time' if speed else ''}{deaths}"
            )
    return "".join(f"{display(line)}\n" for line in lines)
