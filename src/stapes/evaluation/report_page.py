"""A comparison as one self-contained HTML page and as Markdown, from the same tables.

Whatever comes from results is text: Jinja escapes it in HTML (``autoescape``), ``markdown_text`` in Markdown. The page
loads nothing: styles, script, plots and sound are inside, and its content security policy forbids all else.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import stapes
from stapes.errors import OutputError
from stapes.evaluation import report_tables as tables
from stapes.evaluation.report import Comparison, Set, System
from stapes.evaluation.report_plots import (
    MAX_SYSTEMS,
    Plot,
    Point,
    Series,
    over_bins,
    over_parts,
    speed_accuracy,
    stacked_bars,
)
from stapes.evaluation.report_words import Piece, shorten

TEMPLATES = Path(__file__).parent / "templates"

_BREAKDOWNS = {"duration": "length in seconds", "snr": "signal-to-noise ratio in dB", "language": "language"}
_MOST_WORDS = 10
_MOST_LANGUAGES = 16


@dataclass(frozen=True, slots=True)
class Section:
    """One set with its tables and plots, ready for the templates."""

    set: Set
    id: str
    summary: tables.Table
    views: list[tables.Table]
    breakdowns: list[tables.Table]
    hallucination: tables.Table
    plots: dict[str, list[Plot]]
    words: list[tuple[System, list[tuple[str, list[tuple[str, int]]]]]]


def write_html(comparison: Comparison, path: Path) -> None:
    """Write the report as HTML: whole or not at all. Raises OutputError."""
    write_whole(path, render_html(comparison))


def write_markdown(comparison: Comparison, path: Path) -> None:
    """Write the report as Markdown: whole or not at all. Raises OutputError."""
    write_whole(path, render_markdown(comparison))


def render_html(comparison: Comparison) -> str:
    """The report as one HTML document."""
    environment = _environment(autoescape=True)
    environment.filters |= {"pieces": _pieces_html, "base64": _base64}
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    sections = [_section(each, f"s{place + 1}", plots=True) for place, each in enumerate(comparison.sets)]
    return environment.get_template("report.html").render(
        **_facts(comparison, sections),
        style=Markup(style),  # noqa: S704 - our own files
        script=Markup(script),  # noqa: S704
        script_hash=f"sha256-{digest}",
    )


def render_markdown(comparison: Comparison) -> str:
    """The report as Markdown; the plots are its tables."""
    environment = _environment(autoescape=False)
    environment.filters |= {"md": markdown_text, "pieces": _pieces_markdown}
    sections = [_section(each, f"s{place + 1}", plots=False) for place, each in enumerate(comparison.sets)]
    text = environment.get_template("report.md").render(**_facts(comparison, sections))
    return re.sub(r"\n{3,}", "\n\n", text)


def markdown_text(text: object) -> str:
    """Text that Markdown shows as it is: on one line, no markup, no HTML."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", line)


def _environment(autoescape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,  # noqa: S701 - Markdown escapes by a filter of its own
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": tables.percent,
        "rate": tables.rate,
        "shorten": shorten,
        "seconds": tables.seconds,
    }
    return environment


def _facts(comparison: Comparison, sections: list[Section]) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "sections": sections,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": stapes.__version__,
        "machines": {letter: tables.machine_facts(facts) for letter, facts in comparison.machines.items()},
        "title": "Speech recognition compared: " + ", ".join(dict.fromkeys(each.corpus for each in comparison.sets)),
    }


def _section(each: Set, name: str, plots: bool) -> Section:
    return Section(
        set=each,
        id=name,
        summary=tables.summary(each),
        views=tables.views(each),
        breakdowns=[
            *(tables.breakdown(each, key, f"WER by {title}") for key, title in _BREAKDOWNS.items() if each.bins[key]),
            *tables.changes(each),
        ],
        hallucination=tables.hallucination(each),
        plots=_plots(each, name) if plots else {},
        words=[(system, _words(system)) for system in each.systems],
    )


def _words(system: System) -> list[tuple[str, list[tuple[str, int]]]]:
    def top(counter: Counter[Any], text: Any) -> list[tuple[str, int]]:
        ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        return [(text(key), count) for key, count in ordered[:_MOST_WORDS]]

    def pair(key: tuple[str, str]) -> str:
        return f"{shorten(key[0])} → {shorten(key[1])}"

    return [
        ("Confused (spoken → written)", top(system.errors.confusions, pair)),
        ("Left out", top(system.errors.deleted, shorten)),
        ("Added", top(system.errors.inserted, shorten)),
    ]


def _plots(each: Set, prefix: str) -> dict[str, list[Plot]]:
    """The figures of a set by where they belong on the page."""
    # Looks are the report's where they can be, so that a system looks the same in every set.
    systems = each.systems[:MAX_SYSTEMS]
    fits = all(system.index < MAX_SYSTEMS for system in systems)
    looks = {id(system): system.index if fits else place for place, system in enumerate(systems)}
    names = dict(zip(map(id, systems), _without_common_end([system.label for system in systems]), strict=True))
    plots: dict[str, list[Plot]] = {"speed": [], "bins": [], "errors": [], "memory": []}
    by_machine: dict[str, list[Series]] = {}
    for system in systems:
        throughput, rate = system.result.speed.throughput, system.wer
        if throughput and rate.value is not None:
            point = Point(throughput, rate.value, *_limits(rate))
            by_machine.setdefault(system.machine, []).append(Series(looks[id(system)], names[id(system)], [point]))
    several = len({system.machine for system in each.systems}) > 1
    for letter, series in by_machine.items():
        title = "Speed and accuracy" + (f" on machine {letter}" if several else "")
        plots["speed"].append(speed_accuracy(f"{prefix}-speed-{letter}", title, series))
    for key, title in _BREAKDOWNS.items():
        bins = each.bins[key]
        if len(bins) < 2:
            continue
        if key == "language":
            by_words = {name: systems[0].breakdown[key][name].words for name in bins}
            bins = sorted(bins, key=lambda name: -by_words[name])[:_MOST_LANGUAGES]
        series = []
        for system in systems:
            points = []
            for x, name in enumerate(bins):
                rate = system.breakdown[key][name].rate
                points.append(None if rate.value is None else Point(x, rate.value, *_limits(rate)))
            series.append(Series(looks[id(system)], names[id(system)], points))
        draw = f"{prefix}-{key}"
        if key == "language":
            plots["bins"].append(over_parts(draw, f"WER by {title}", bins, series))
        else:
            plots["bins"].append(over_bins(draw, f"WER by {title}", title, bins, series))
    rows = [
        (names[id(s)], [100 * count / s.words for count in (s.substitutions, s.deletions, s.insertions)])
        for s in systems
        if s.words
    ]
    if rows:
        kinds = ["substituted", "deleted", "inserted"]
        plots["errors"].append(
            stacked_bars(f"{prefix}-errors", "Kinds of errors", "errors per 100 words spoken", rows, kinds)
        )
    for name, title, bytes_of in (
        ("host", "Peak memory of the process", lambda s: s.result.memory.peak_rss_bytes),
        ("device", "Peak memory on the GPU", lambda s: s.result.memory.peak_device_bytes),
    ):
        known = [(s, bytes_of(s)) for s in systems if bytes_of(s)]
        if known:
            rows = [(names[id(s)] + (f" (machine {s.machine})" if several else ""), [size / 1e9]) for s, size in known]
            plots["memory"].append(stacked_bars(f"{prefix}-memory-{name}", title, "GB", rows, ["peak"], " GB"))
    return plots


def _without_common_end(labels: list[str]) -> list[str]:
    """Labels less the words that all of them end with: in one plot these only take room."""
    words = [label.split() for label in labels]
    while len(words) > 1 and all(len(each) > 1 for each in words) and len({each[-1] for each in words}) == 1:
        words = [each[:-1] for each in words]
    return [" ".join(each) for each in words]


def _limits(rate: Any) -> tuple[float, float]:
    """An interval's ends; where there is none, the value itself."""
    return (rate.value if rate.low is None else rate.low), (rate.value if rate.high is None else rate.high)


def _pieces_html(pieces: Sequence[Piece]) -> Markup:
    out = []
    for piece in pieces:
        match piece.kind:
            case "same":
                out.append(Markup("{}").format(piece.reference))
            case "substituted":
                pair = Markup('<span class="swap"><del>{}</del> <ins>{}</ins></span>')
                out.append(pair.format(piece.reference, piece.hypothesis))
            case "deleted":
                out.append(Markup("<del>{}</del>").format(piece.reference))
            case "inserted":
                out.append(Markup("<ins>{}</ins>").format(piece.hypothesis))
            case "gap":
                out.append(Markup('<span class="gap">[… {} …]</span>').format(piece.reference))
    return Markup(" ").join(out)


def _pieces_markdown(pieces: Sequence[Piece]) -> str:
    out = []
    for piece in pieces:
        reference, hypothesis = markdown_text(piece.reference), markdown_text(piece.hypothesis)
        if piece.kind == "same":
            out.append(reference)
        elif piece.kind == "gap":
            out.append(f"\\[… {reference} …\\]")
        else:
            out.append(" ".join([f"~~{reference}~~"] * bool(reference) + [f"**{hypothesis}**"] * bool(hypothesis)))
    return " ".join(out)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")


def write_whole(path: Path, text: str) -> None:
    """Write a page whole or not at all. Raises OutputError."""
    partial = path.parent / f".stapes-{secrets.token_hex(6)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Results may hold halves of surrogate pairs, which no file can.
            partial.write_bytes(text.encode("utf-8", "replace"))
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{path}: cannot be written ({reason}); choose another place with -o") from error
