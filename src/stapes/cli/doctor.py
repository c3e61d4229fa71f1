"""``stapes doctor``: what this machine is, what works, what does not, and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stapes.cli.terminal import Terminal, display, to_json
from stapes.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from stapes.diagnostics.doctor import Report
    from stapes.diagnostics.findings import Finding
    from stapes.diagnostics.trial import Trial

# The worst comes last: that is what a terminal still shows.
_ORDER = ("ok", "note", "warning", "problem")
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(*, transcribe: bool = True, model: str | None = None, audio: Path | None = None, json: bool = False) -> int:
    """Find out what this machine is, what will work on it, what will not, and the fix for each.

    Looks at drivers, rights and settings; asks PyTorch, ONNX Runtime, Triton and CTranslate2, each by itself; then
    transcribes a real clip on every usable device and compares texts and speed. Nothing is changed and nothing is
    sent anywhere. Hung or crashing libraries are part of the report.

    For example:

        stapes doctor
        stapes doctor --no-transcribe
        stapes doctor --json > report.json

    Exit code: 0 something works, 2 wrong usage, 3 nothing can run.

    Parameters
    ----------
    transcribe:
        Transcribe a clip on each device; without, whether a device computes is all that is tried.
    model:
        What to transcribe with. Default: the smallest model that is installed.
    audio:
        A recording of speech to transcribe. Default: a clip of the pytest-audioeval package.
    json:
        Print the report with all facts as one JSON object, without names of the machine or its users.
    """
    if audio is not None and not audio.is_file():
        raise UsageError(f"--audio {audio}: there is no such file")
    # Imported here: `stapes --help` needs none of it.
    from stapes.diagnostics.doctor import examine

    terminal = Terminal()
    with terminal.progress("seconds", "looking …") as progress:
        report = examine(transcribe=transcribe, model=model, audio=audio, progress=progress)
    if json:
        terminal.out(to_json(report.as_dict()) + "\n")
    else:
        terminal.out(_as_text(report, terminal.out_is_terminal))
    return report.exit_code


def _as_text(report: Report, fit_terminal: bool) -> str:
    """The report as wide as the terminal; in a pipe, wide enough that nothing wraps."""
    from io import StringIO

    from rich.console import Console

    buffer = StringIO()
    width = Console().width if fit_terminal else 1000
    console = Console(file=buffer, force_terminal=fit_terminal, width=width, highlight=False)
    console.print(_findings_table(report.findings))
    if report.trials:
        console.print()
        console.print(_trials_table(report.trials))
    console.print()
    console.print(verdict(report), style="bold", markup=False)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def _findings_table(findings: list[Finding]) -> Table:
    from rich.text import Text

    table = _table("", "what", "finding and fix")
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        style = _STYLES[finding.level]
        text = Text(display(finding.what))
        if finding.fix:
            text.append(f"\n→ {display(finding.fix)}", style="bold" if finding.level == "problem" else "")
        table.add_row(Text(finding.level, style=style), Text(display(finding.subject)), text)
    return table


def _trials_table(trials: list[Trial]) -> Table:
    from rich.text import Text

    table = _table("device", "model", "precision", "load", "first", "again", "× real time", "CPU's words", "said")
    for trial in trials:
        cells = [trial.device, trial.model, trial.precision or "?"]
        cells += [_number(value, " s") for value in (trial.load_seconds, trial.first_seconds, trial.second_seconds)]
        speed = trial.audio_seconds / trial.second_seconds if trial.audio_seconds and trial.second_seconds else None
        cells += [_number(speed), _percent(trial.agreement), _percent(trial.correct)]
        table.add_row(*(Text(display(cell)) for cell in cells))
    return table


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in {"", "what"})
    return table


def verdict(report: Report) -> str:
    """One sentence: what works, and how much is left to mend."""
    counts = {level: sum(finding.level == level for finding in report.findings) for level in _ORDER}
    left = [f"{counts[level]} {level}{'s' * (counts[level] > 1)}" for level in ("problem", "warning") if counts[level]]
    rest = f"; {' and '.join(left)} above" if left else ""
    if not report.works:
        return f"Nothing can run here{rest}."
    how = "transcribes" if report.trials else "computes"
    return f"stapes {how} on {', '.join(report.works)}{rest}."


def _number(value: Any, unit: str = "") -> str:
    return "?" if value is None else f"{value:.1f}{unit}"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.0%}"
