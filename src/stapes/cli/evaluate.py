"""``stapes evaluate``: error rates, speed and memory of a model on recordings with known words."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stapes.cli.background import Background
from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, to_json
from stapes.cli.transcribe import ModelOptions, _group
from stapes.errors import StapesError, UsageError

# Precision and Backend: cyclopts looks the types of MeasuredModel's inherited fields up in this module.
from stapes.options import Backend, Precision, TranscribeOptions  # noqa: F401

if TYPE_CHECKING:
    from stapes.evaluation.evaluate import Evaluation, Output
    from stapes.evaluation.peers import Peer
    from stapes.evaluation.results import Result
    from stapes.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    """What to evaluate on, and where the figures go."""

    output_dir: Annotated[Path | None, Parameter(alias="-o")] = None
    """Folder for utterances.jsonl and result.json. The same command goes on in it after an interruption."""

    data: Path | None = None
    """Where corpora are found by name. Default: $STAPES_DATA, ./data, ../shared/data."""

    limit: int | None = None
    """Only so many recordings."""

    every: int = 1
    """Only every so many-th recording."""

    normalizer: str = "auto"
    """english or basic (Whisper's), none, or auto: English for English, basic for other languages."""

    snr: bool = False
    """Estimate the signal-to-noise ratio of recordings whose manifest does not give it, for the breakdown."""

    json: bool = False
    """Print the result as one JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel(ModelOptions):
    """How the model runs; which one is the first argument."""

    model: Annotated[str | None, Parameter(show=False)] = None
    """Another way to say MODEL."""


_EVALUATE = EvaluateOptions()
_MODEL = MeasuredModel()
_OPTIONS = TranscribeOptions()


def evaluate(
    *inputs: Annotated[
        str,
        Parameter(
            name="MODEL MANIFEST",
            help=(
                "MODEL: a name, folder, Hugging Face id or .pt file, or a peer where it is installed: "
                "faster-whisper:base?compute_type=int8, transformers:openai/whisper-base, "
                "openai:http://HOST:8000/v1#MODEL. "
                "MANIFEST: JSON lines (audio, text, duration, speaker, lang, split), lhotse's cuts or supervisions, "
                "csv, tsv (Common Voice), or a corpus by name: librispeech:test, asterisk:ru."
            ),
        ),
    ],
    evaluation: Annotated[EvaluateOptions, _group("Evaluation", 1)] = _EVALUATE,
    model: Annotated[MeasuredModel, _group("Model", 2)] = _MODEL,
    options: Annotated[TranscribeOptions, _group("Transcription", 4)] = _OPTIONS,
) -> int:
    """Measure how well and how fast a model writes down recordings whose words are known.

    For example:

        stapes evaluate base librispeech:test -o results/base
        stapes evaluate faster-whisper:base librispeech:test -o results/faster-whisper
        stapes compare results/base results/faster-whisper -o report.html

    The language is each recording's own unless --language gives one. A recording that fails counts as if all of its
    words were left out, is named, and makes the exit code 1.

    Exit code: 0 all done, 1 some recordings failed, 2 wrong usage, 3 no usable device or model, 130 interrupted (the
    same command goes on).
    """
    names = [*([model.model] if model.model else []), *inputs]
    if len(names) != 2:
        raise UsageError("name a model and a manifest, such as `stapes evaluate base librispeech:test -o DIR`")
    if evaluation.output_dir is None:
        raise UsageError("give -o DIR, the folder for the figures: stapes evaluate base librispeech:test -o DIR")
    terminal = Terminal()
    with terminal.progress("seconds", "reading the manifest …"):
        run = _open(names[0], names[1], evaluation, model, options)
    if len(run.waiting) < len(run.corpus.rows):
        terminal.note(
            f"{len(run.corpus.rows) - len(run.waiting)} of {len(run.corpus.rows)} utterances are there already"
        )

    work = Background(lambda: _work(terminal, run, names[0], model, options))
    try:
        for output in work:
            with shielded():
                run.take(output)
                if output.error is not None:
                    terminal.failure(output.error, run.corpus.rows[output.row].audio)
    except (KeyboardInterrupt, StapesError) as error:
        work.cancel()
        terminal.end_progress()
        with shielded():
            run.pause()
        if isinstance(error, KeyboardInterrupt):
            terminal.note("interrupted: the same command goes on from there")
        raise
    with shielded():
        run.pause()
        result = run.finish()
        for note in run.notes:
            terminal.note(note)
        terminal.out(to_json(asdict(result)) + "\n" if evaluation.json else _summary(result, evaluation.output_dir))
    return 1 if result.failed else 0


def _open(
    name: str, manifest: str, evaluation: EvaluateOptions, model: ModelOptions, options: TranscribeOptions
) -> Evaluation:
    # Imported here: `stapes --help` needs none of it.
    from stapes.evaluation.corpora import open_corpus
    from stapes.evaluation.evaluate import Evaluation
    from stapes.evaluation.systems import weights_size

    assert evaluation.output_dir is not None
    corpus = open_corpus(manifest, data=evaluation.data, limit=evaluation.limit, every=evaluation.every)
    asked: dict[str, Any] = {
        "name": name,
        "device": model.device,
        "precision": model.effective_precision(),
        "backend": model.backend,
        "threads": model.threads,
        "bytes": weights_size(name, model.model_dir),
    }
    if model.adapter is not None:
        asked |= {"adapter": model.adapter}
    if model.draft is not None:
        asked |= {"draft": model.draft, "draft_tokens": model.draft_tokens}
    return Evaluation(
        evaluation.output_dir,
        corpus,
        asked,
        options,
        normalizer=evaluation.normalizer,
        measure_snr=evaluation.snr,
        command=["stapes", *sys.argv[1:]],
    )


def _work(
    terminal: Terminal, run: Evaluation, name: str, model: ModelOptions, options: TranscribeOptions
) -> Generator[Output, None, None]:
    with terminal.progress("seconds", "loading the model …") as progress:
        yield from run.outputs(lambda: _load(name, model, options, progress), progress)


def _load(name: str, model: ModelOptions, options: TranscribeOptions, progress: Progress) -> Peer:
    from stapes.evaluation.systems import open_system

    return open_system(name, options, progress=_NotesOnly(progress), **model.settings())


class _NotesOnly:
    """Passes on what is worth knowing; a download's bytes are no seconds of audio."""

    def __init__(self, progress: Progress) -> None:
        self.note = progress.note

    def add_total(self, seconds: float) -> None:
        """Ignore."""

    def advance(self, seconds: float) -> None:
        """Ignore."""


def _summary(result: Result, folder: Path) -> str:
    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.2f} %"

    def rate(name: str, value: float | None, low: float | None, high: float | None) -> str:
        return f"{name} {percent(value)}  (95 %: {percent(low)} to {percent(high)})"

    counts, speed, silence = result.counts, result.speed, result.hallucination.silence_insertions_per_minute
    lines = [
        f"{result.model.name} on {result.corpus.name}: {result.corpus.utterances:,} utterances, "
        f"{60 * result.corpus.hours:.1f} min, {result.corpus.speakers} speakers",
        rate("WER", result.wer.value, result.wer.low, result.wer.high)
        + f"  {counts.words:,} words: {counts.substitutions:,} substituted, {counts.deletions:,} deleted, "
        f"{counts.insertions:,} inserted",
        rate("CER", result.cer.value, result.cer.low, result.cer.high),
        f"{result.wer.method}: {result.wer.why}",
    ]
    if silence is not None:
        lines.append(
            f"{silence:.2f} words a minute where nothing is said ({result.hallucination.silence_minutes:.1f} min)"
        )
    if result.hallucination.repeated_ngram_utterances:
        lines.append(f"{result.hallucination.repeated_ngram_utterances} utterances repeat themselves")
    if speed.throughput is not None and speed.latency_p50 is not None and speed.latency_p95 is not None:
        lines.append(
            f"{speed.throughput:.1f} × real time (RTF {speed.real_time_factor:.3f}), "
            f"latency {speed.latency_p50:.2f} s, 95 % within {speed.latency_p95:.2f} s"
        )
    if result.memory.peak_rss_bytes is not None:
        lines.append(f"{result.memory.peak_rss_bytes / 2**20:,.0f} MiB memory at most")
    if result.failed:
        lines.append(f"{result.failed} failed: all of their words count as deleted")
    return "\n".join([*lines, f"wrote {folder / 'result.json'}"]) + "\n"
