"""``stapes compare``: results of ``stapes evaluate`` side by side, as one HTML file, as Markdown, or on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, to_json
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.evaluation.report import Comparison


def compare(
    *results: Annotated[
        str, Parameter(name="RESULT", help="Folders that `stapes evaluate` wrote. The first is the baseline.")
    ],
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    markdown: Path | None = None,
    baseline: str | None = None,
    examples: int = 12,
    max_audio: float = 3.0,
    allow_different: bool = False,
    json: bool = False,
) -> int:
    """Compare what was evaluated: accuracy with intervals and significance, speed, memory, and where each one errs.

    For example:

        stapes compare tiny base                     print the comparison as Markdown
        stapes compare results/* -o report.html      one HTML file that works offline

    Parameters
    ----------
    output:
        Write one self-contained HTML file.
    markdown:
        Write the same as Markdown.
    baseline:
        The result that the others are tested against, by its folder or by its name in the report.
    examples:
        How many of the worst recordings, and of those where the systems differ most, are shown.
    max_audio:
        Most megabytes of sound inside the HTML file; 0 leaves the recordings out.
    allow_different:
        Compare results of different manifests or normalisers over what they share; different corpora by themselves.
    json:
        Print one JSON object: the files written and the figures.
    """
    if not results:
        raise UsageError("nothing to compare: name the folders that `stapes evaluate` wrote")
    if not 0 <= examples <= 200:
        raise UsageError(f"--examples is {examples}: give 0 to 200")
    if not 0 <= max_audio <= 100:
        raise UsageError(f"--max-audio is {max_audio}: give 0 to 100 megabytes")
    try:
        from stapes.evaluation import report, report_page
    except ImportError as error:
        raise UsageError(f"comparing needs {error.name}: pip install 'stapes[evaluate]'") from error

    comparison = report.compare(
        results,
        baseline=baseline,
        examples=examples,
        # Only HTML carries sound; base64 makes 4 bytes of 3.
        audio_bytes=int(max_audio * 750_000) if output is not None else 0,
        allow_different=allow_different,
    )
    if output is not None:
        report_page.write_html(comparison, output)
    if markdown is not None:
        report_page.write_markdown(comparison, markdown)
    terminal = Terminal()
    if json:
        files = {"html": output, "markdown": markdown}
        written = {name: str(path) for name, path in files.items() if path is not None}
        terminal.out(to_json({**written, "sets": _figures(comparison)}) + "\n")
    elif output is None and markdown is None:
        terminal.out(report_page.render_markdown(comparison))
    else:
        for path in (output, markdown):
            if path is not None:
                terminal.note(f"wrote {path}")
    return 0


def _figures(comparison: Comparison) -> list[dict[str, Any]]:
    """The summary as JSON: rates are fractions, differences are to the baseline."""
    from dataclasses import asdict

    sets = []
    for each in comparison.sets:
        systems = []
        for system in each.systems:
            found = system.significance
            systems.append(
                {
                    "label": system.label,
                    "folder": str(system.folder),
                    "machine": system.machine,
                    "wer": asdict(system.wer),
                    "cer": asdict(system.cer),
                    "counts": {
                        "words": system.words,
                        "substitutions": system.substitutions,
                        "deletions": system.deletions,
                        "insertions": system.insertions,
                    },
                    "failed": system.failed,
                    "against_baseline": None
                    if found is None
                    else {
                        "wer_difference": found.difference.difference,
                        "low": found.difference.low,
                        "high": found.difference.high,
                        "p": found.p,
                        "utterances": found.utterances,
                    },
                    "speed": asdict(system.result.speed),
                    "memory": asdict(system.result.memory),
                }
            )
        sets.append(
            {
                "corpus": each.corpus,
                "normalizer": each.normalizer,
                "utterances": each.utterances,
                "baseline": each.baseline.label,
                "systems": systems,
            }
        )
    return sets
