"""``stapes label``: what a teacher writes for a manifest, as a manifest to train a student on."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, display, to_json
from stapes.cli.transcribe import ModelOptions, _group
from stapes.data.options import PseudoLabelOptions
from stapes.errors import UsageError
from stapes.options import UtteranceOptions

_MOST_JOBS = 64
"""Utterances listened to at a time: more than this many threads help nobody."""

_LABELS = PseudoLabelOptions()
_MODEL = ModelOptions()
_OPTIONS = UtteranceOptions()


def label(
    manifest: Annotated[Path, Parameter(help="Cuts, as `stapes prepare` writes them.")],
    out: Annotated[Path, Parameter(help="The labelled manifest: .jsonl or .jsonl.gz.")],
    /,
    *,
    labels: Annotated[PseudoLabelOptions, _group("Labels", 1)] = _LABELS,
    model: Annotated[ModelOptions, _group("Model", 2)] = _MODEL,
    options: Annotated[UtteranceOptions, _group("Transcription", 4)] = _OPTIONS,
    json: bool = False,
) -> int:
    """Have a model write down a manifest's utterances, and keep what agrees with the texts that are known.

    For example:

        stapes label data/train.jsonl.gz data/train-base.jsonl.gz --model base --max-wer 0.1
        stapes train distill --train data/train-base.jsonl.gz --dev data/dev.jsonl.gz -o runs/small
        stapes label data/train.jsonl.gz data/train-ctc.jsonl.gz --model large-v3 --normalize basic

    The same command goes on after an interruption, and with another --max-wer it need not listen again.

    Exit code: 0 done, also where utterances were left out; 1 where some could not be read, or none was kept; 2 wrong
    usage; 3 no usable device or model; 130 interrupted.

    Parameters
    ----------
    json:
        Print the report as one JSON object.
    """
    from stapes.training.pseudo_labels import pseudo_label

    if not model.model:
        raise UsageError("name the teacher: --model large-v3")
    if not manifest.is_file():
        raise UsageError(f"{manifest} is no file: name a manifest that `stapes prepare` wrote")
    terminal = Terminal()
    recognizer = model.load(terminal, language=options.language)
    try:

        def listen(pcm: Any, language: str | None) -> list[tuple[float, float, str]]:
            told = options.language
            if told is None and language is not None and recognizer.family.can_be_told(language):
                told = language
            asked = replace(options, language=told)
            heard = recognizer.transcribe(pcm, asked, sample_rate=16_000, priority="bulk")
            return [(segment.start, segment.end, segment.text) for segment in heard.segments]

        identity = {"teacher": recognizer.name, "options": asdict(options)}
        with terminal.progress("seconds", "reading the manifest …") as progress:
            report = pseudo_label(
                manifest,
                out,
                listen,
                labels,
                identity=identity,
                jobs=min(_MOST_JOBS, max(1, recognizer.engine.slots)),
                progress=progress,
            )
    finally:
        recognizer.close()
    terminal.out(to_json(report) + "\n" if json else _summary(report, out))
    if not report["kept"]:
        terminal.failure("no label was kept: look at the report, or raise --max-wer")
    return 1 if not report["kept"] or "unreadable" in report["dropped"] else 0


def _summary(report: dict[str, Any], out: Path) -> str:
    lines = [f"kept {report['kept']:,} of {report['utterances']:,} utterances, {report['kept_hours']:.2f} h"]
    if report["wer"] is not None:
        lines.append(f"labels and known texts differ by {100 * report['wer']:.1f} % of words, before any was left out")
    if report["dropped"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in report["dropped"].items())
        lines.append(f"left out: {reasons}")
    if report["kept"]:
        lines.append(f"wrote {out}")
    return "".join(f"{display(line)}\n" for line in lines)
