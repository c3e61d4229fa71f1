"""The plots of a report: matplotlib figures as small inline SVG that follows the page's light or dark theme.

Text stays text. Colours come out as CSS variables of the page (``svg``), and as fixed light ones in ``file``, the
SVG that a reader downloads for a paper. Each system has a colour (after Okabe and Ito's palette), a marker, a line
style and a hatch, and its name beside its line, so that no plot depends on colour.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

MAX_SYSTEMS = 8
"""Most systems in one plot: more could not be told apart. Tables hold all."""

_INK, _MUTED, _GRID, _PAPER = "#010101", "#020202", "#030303", "#040404"
_SERIES = [f"#1000{index:02x}" for index in range(MAX_SYSTEMS)]
# What the placeholders above mean: the page's variable, and the colour in a downloaded file.
_THEME = {
    _INK: ("var(--ink)", "#1c1c1e"),
    _MUTED: ("var(--muted)", "#5b5f66"),
    _GRID: ("var(--rule)", "#dcdfe3"),
    _PAPER: ("var(--paper)", "#ffffff"),
    **{
        placeholder: (f"var(--series-{index})", colour)
        for index, (placeholder, colour) in enumerate(
            zip(
                _SERIES,
                ["#0072b2", "#d55e00", "#00795a", "#b0478a", "#7a5c00", "#3d3d3d", "#4b4ac8", "#9b2226"],
                strict=True,
            )
        )
    },
}
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
_LINES: list[Any] = [
    "-",
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (6, 2, 1, 2)),
    (0, (8, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
    "-",
    "--",
]
_NAME_SIZE = 8.0  # points, of names beside lines and points
_HATCHES = ["", "///", "xx"]

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are names, also with a $ in them
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure, twice: for the page and for a file of its own; ``description`` says in words what it shows."""

    name: str
    title: str
    description: str
    svg: str
    file: str


@dataclass(frozen=True, slots=True)
class Point:
    """A system's value with its 95 % interval (fractions); ``x`` is what it is plotted over."""

    x: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one system. ``index`` chooses its look and stays the same throughout a report."""

    index: int
    label: str
    points: Sequence[Point | None]


def speed_accuracy(name: str, title: str, systems: Sequence[Series]) -> Plot:
    """WER with its interval over throughput: one point a system, all measured on one machine."""
    with rc_context(_STYLE):
        figure, axes = _figure(4.6, 3.1)
        named: list[tuple[Point, str, int]] = []
        for system in systems:
            for point in filter(None, system.points):
                _errorbar(axes, system.index, [point], [point.x], connect=False, size=8)
                named.append((point, system.label, system.index))
        axes.set_xscale("log")
        xs = [point.x for point, *_ in named]
        axes.set_xlim(min(xs) / 1.8, max(xs) * 1.8)
        axes.xaxis.set_major_formatter(FuncFormatter(_times))
        if max(xs) / min(xs) < 40:
            axes.xaxis.set_minor_formatter(FuncFormatter(_times))
            axes.xaxis.set_minor_locator(_LogSteps())
        _rate_axis(axes, [point for system in systems for point in system.points])
        axes.set_xlabel("throughput: seconds of audio per second, log scale →")
        axes.set_ylabel("WER, 95 % interval")
        _name_points(axes, named)
        description = "; ".join(
            f"{label}: {100 * point.value:.2f} % at {point.x:.3g} times real time" for point, label, _ in named
        )
        return _finish(figure, name, title, f"Word error rate over throughput. {description}.")


def over_bins(name: str, title: str, axis: str, bins: Sequence[str], systems: Sequence[Series]) -> Plot:
    """WER over ordered bins, such as lengths: a line with intervals for each system, named at its end."""
    with rc_context(_STYLE):
        figure, axes = _figure(4.6, 2.9)
        count = len(systems)
        ends: list[tuple[float, float, str, int]] = []
        for place, system in enumerate(systems):
            shift = (place - (count - 1) / 2) * min(0.12, 0.5 / count)
            # A bin without a value parts the line.
            gap = Point(math.nan, math.nan, math.nan, math.nan)
            there = [(x, point) for x, point in enumerate(system.points) if point is not None]
            if there:
                points = [gap if point is None else point for point in system.points]
                _errorbar(axes, system.index, points, [x + shift for x in range(len(points))])
                ends.append((there[-1][0] + shift, there[-1][1].value, system.label, system.index))
        axes.set_xticks(range(len(bins)), [_wrap(label, 9) for label in bins])
        axes.set_xlim(-0.5, len(bins) - 0.5)
        axes.xaxis.grid(visible=False)
        _rate_axis(axes, [point for system in systems for point in system.points])
        axes.set_xlabel(axis)
        axes.set_ylabel("WER")
        _name_ends(axes, ends)
        return _finish(figure, name, title, _spoken(bins, systems))


def over_parts(name: str, title: str, parts: Sequence[str], systems: Sequence[Series]) -> Plot:
    """WER of parts without an order, such as languages: a row for each, a marker and interval for each system."""
    with rc_context(_STYLE):
        figure, axes = _figure(4.6, max(2.2, 0.9 + len(parts) * (0.16 + 0.11 * len(systems)) + 0.17 * len(systems)))
        count = len(systems)
        for place, system in enumerate(systems):
            shift = (place - (count - 1) / 2) * min(0.2, 0.7 / count)
            there = [(y, point) for y, point in enumerate(system.points) if point is not None]
            values = np.array([point.value for _, point in there])
            spread = np.array([[point.value - point.low, point.high - point.value] for _, point in there]).T
            axes.errorbar(
                values,
                [y + shift for y, _ in there],
                xerr=spread if there else None,
                linestyle="none",
                label=_wrap(system.label, 40),
                **_look(system.index),
            )
        axes.set_yticks(range(len(parts)), [_wrap(part, 16) for part in parts])
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.yaxis.grid(visible=False)
        _rate_axis(axes, [point for system in systems for point in system.points], along="x")
        axes.set_xlabel("WER, 95 % interval")
        figure.legend(loc="outside upper left", fontsize=8, handlelength=1.6)
        return _finish(figure, name, title, _spoken(parts, systems))


def stacked_bars(
    name: str, title: str, axis: str, rows: Sequence[tuple[str, Sequence[float]]], kinds: Sequence[str], unit: str = ""
) -> Plot:
    """One bar a system, its parts side by side: each has a hatch, and its value where there is room."""
    with rc_context(_STYLE):
        figure, axes = _figure(4.6, 0.95 + 0.32 * len(rows))
        widest = max((sum(values) for _, values in rows), default=0.0) or 1.0
        for kind, label in enumerate(kinds):
            starts = [sum(values[:kind]) for _, values in rows]
            widths = [values[kind] for _, values in rows]
            bars = axes.barh(range(len(rows)), widths, left=starts, height=0.62, label=label, linewidth=0)
            for bar in bars:
                bar.set(facecolor=_SERIES[kind], hatch=_HATCHES[kind], edgecolor=_PAPER, alpha=0.9)
            for y, (start, width) in enumerate(zip(starts, widths, strict=True)):
                if len(kinds) > 1 and width > 0.09 * widest:
                    box = {"facecolor": _PAPER, "edgecolor": "none", "pad": 1.2}
                    axes.text(
                        start + width / 2, y, f"{width:.3g}{unit}", ha="center", va="center", fontsize=8, bbox=box
                    )
        for y, (_, values) in enumerate(rows):
            axes.text(sum(values) + 0.012 * widest, y, f"{sum(values):.3g}{unit}", va="center", fontweight="bold")
        axes.set_yticks(range(len(rows)), [_wrap(label, 26) for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1.12 * widest)
        axes.yaxis.grid(visible=False)
        axes.set_xlabel(axis)
        if len(kinds) > 1:
            figure.legend(loc="outside upper left", ncols=len(kinds), fontsize=8, handlelength=1.6)
        words = "; ".join(
            f"{label}: " + ", ".join(f"{kind} {value:.3g}{unit}" for kind, value in zip(kinds, values, strict=True))
            for label, values in rows
        )
        return _finish(figure, name, title, f"{words}.")


def over_time(
    name: str,
    title: str,
    axis: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    along: str = "seconds",
) -> Plot:
    """Quantities over seconds: (label, seconds, values) of each line, named in a legend by style and colour."""
    with rc_context(_STYLE):
        figure, axes = _figure(7.2, 2.6)
        for index, (label, seconds, values) in enumerate(lines):
            axes.plot(seconds, values, color=_SERIES[index], linestyle=_LINES[index], linewidth=1.3, label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(along)
        axes.set_ylabel(axis)
        if len(lines) > 1:
            figure.legend(loc="outside upper left", ncols=len(lines), fontsize=8, handlelength=2.6)
        most = "; ".join(f"{label}: at most {max(values, default=0.0):.3g}" for label, _, values in lines)
        return _finish(figure, name, title, f"{axis} over {along}. {most}.")


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of inches, with one pair of axes; a pixel is a point, as in its SVG."""
    figure = Figure(figsize=(width, height), dpi=72, layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    return figure, axes


def _look(index: int) -> dict[str, Any]:
    colour = _SERIES[index]
    return {
        "color": colour,
        "marker": _MARKERS[index],
        "markerfacecolor": _PAPER if index % 2 else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 1.3,
        "elinewidth": 1.0,
        "capsize": 2.5,
        "capthick": 1.0,
    }


def _errorbar(
    axes: Any, index: int, points: Sequence[Point], xs: Sequence[float], connect: bool = True, size: float = 5.5
) -> None:
    values = [point.value for point in points]
    spread = [[max(0.0, p.value - p.low) for p in points], [max(0.0, p.high - p.value) for p in points]]
    line = _LINES[index] if connect else "none"
    axes.errorbar(xs, values, yerr=spread, linestyle=line, markersize=size, **_look(index))


def _rate_axis(axes: Any, points: Sequence[Point | None], along: str = "y") -> None:
    """From 0 to a little above the values: an interval over three words must not flatten all the others."""
    there = [point for point in points if point is not None]
    highest = max((point.value for point in there), default=0.0)
    top = min(max((point.high for point in there), default=0.0), 1.6 * highest)
    top = max(1.08 * highest, 1.04 * top, 0.005)
    getattr(axes, f"set_{along}lim")(0, top)
    chosen = getattr(axes, f"{along}axis")
    chosen.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


def _name_ends(axes: Any, ends: Sequence[tuple[float, float, str, int]]) -> None:
    """Names to the right of the plot, each at the height where its line ends, moved apart where they would touch."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    texts = [_wrap(label, 18) for _, _, label, _ in ends]
    heights = [0.056 * (text.count("\n") + 1) + 0.012 for text in texts]
    places = _apart([(y - bottom) / (top - bottom) for _, y, _, _ in ends], heights)
    for (x, y, _, index), text, place in zip(ends, texts, places, strict=True):
        at = (right + 0.02 * (right - left), bottom + place * (top - bottom))
        _name(axes, text, (x, y), at, "data", "left", index)


def _name_points(axes: Any, named: Sequence[tuple[Point, str, int]]) -> None:
    """Names beside the points of a scatter: each at the nearest place where it covers neither point nor name."""
    axes.figure.draw_without_rendering()  # gives the axes their place
    points, lows, highs = (
        axes.transData.transform([(point.x, getattr(point, name)) for point, *_ in named])
        for name in ("value", "low", "high")
    )
    frame = axes.get_window_extent()
    taken = [(px - 6, py - 6, px + 6, py + 6) for px, py in points]
    taken += [(px - 2, low, px + 2, high) for (px, low), (_, high) in zip(lows, highs, strict=True)]
    for (px, py), (point, label, index) in zip(points, named, strict=True):
        text = _wrap(label, 18)
        lines = text.split("\n")
        # Bold letters of the measuring font are about 0.72 of its size wide.
        width, height = 0.72 * _NAME_SIZE * max(map(len, lines)), 1.25 * _NAME_SIZE * len(lines)

        def box(dx: float, dy: float, px: float = px, py: float = py, width: float = width, height: float = height):
            left = px + dx - (width if dx < 0 else 0)
            return left, py + dy - height / 2, left + width, py + dy + height / 2

        def cost(place: tuple[float, float], box: Any = box) -> float:
            x0, y0, x1, y1 = box(*place)
            outside = x0 < frame.x0 or x1 > frame.x1 + 40 or y0 < frame.y0 or y1 > frame.y1 + 6
            covers = sum(x0 < b[2] and x1 > b[0] and y0 < b[3] and y1 > b[1] for b in taken)
            return 1000 * covers + 500 * outside + math.hypot(*place)

        steps = range(-60, 61, 6)
        dx, dy = min(((side, step) for side in (9, -9, 24, -24) for step in steps), key=cost)
        taken.append(box(dx, dy))
        _name(axes, text, (point.x, point.value), (dx, dy), "offset points", "left" if dx > 0 else "right", index)


def _name(axes: Any, text: str, xy: Any, at: Any, coordinates: str, align: str, index: int) -> None:
    """Write a system's name in its colour, with a thin line to its point."""
    arrow = {"arrowstyle": "-", "color": _SERIES[index], "linewidth": 0.6, "shrinkA": 1, "shrinkB": 5}
    axes.annotate(
        text,
        xy=xy,
        xytext=at,
        textcoords=coordinates,
        ha=align,
        va="center",
        fontsize=_NAME_SIZE,
        color=_SERIES[index],
        fontweight="bold",
        linespacing=1.05,
        annotation_clip=False,
        arrowprops={**arrow, "relpos": (0.0 if align == "left" else 1.0, 0.5)},
    )


def _apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Positions near the wanted ones at which boxes of these heights do not overlap, within 0 to 1 where they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = list(wanted)
    floor = 0.0
    for index in order:
        placed[index] = max(wanted[index], floor + heights[index] / 2)
        floor = placed[index] + heights[index] / 2
    ceiling = max(1.0, sum(heights))
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling - heights[index] / 2)
        ceiling = placed[index] - heights[index] / 2
    return placed


def _times(value: float, _: int) -> str:
    """The label of a throughput: ``0.5×``, ``2,000×``."""
    return f"{value:,.10g}×"


class _LogSteps(MaxNLocator):
    """Ticks at 2 and 5 of each decade, beside those at 1."""

    def tick_values(self, vmin: float, vmax: float) -> list[float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        decades = range(math.floor(math.log10(vmin)), math.ceil(math.log10(vmax)) + 1)
        return [step * 10.0**decade for decade in decades for step in (2, 5) if vmin <= step * 10.0**decade <= vmax]


def _spoken(bins: Sequence[str], systems: Sequence[Series]) -> str:
    """A plot of rates in words, for those who cannot see it."""
    lines = []
    for system in systems:
        values = [
            f"{label} {100 * point.value:.1f} %"
            for label, point in zip(bins, system.points, strict=True)
            if point is not None
        ]
        lines.append(f"{system.label}: {', '.join(values)}")
    return "Word error rate. " + "; ".join(lines) + "."


def _wrap(label: str, width: int) -> str:
    """Up to two lines of about ``width`` letters; control characters, which XML cannot hold, become spaces."""
    clean = " ".join("".join(letter if letter.isprintable() else " " for letter in label).split())
    lines = textwrap.wrap(clean, width, break_long_words=True)
    return "\n".join(lines if len(lines) <= 2 else [lines[0], lines[1][: width - 1] + "…"])


def _finish(figure: Figure, name: str, title: str, description: str) -> Plot:
    """Save a figure and make the SVG fit to live inside a page."""
    buffer = io.StringIO()
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": name}):
        warnings.simplefilter("ignore")  # letters that the measuring font lacks: the reader's fonts have them
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: 'DejaVu Sans'", "font-family: system-ui, sans-serif")
    svg = svg.replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    # Names inside are made the figure's own, for a page has many; those that nothing refers to are dropped.
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
    known = {either or other for either, other in used}
    svg = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in known else "", svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    # The style sheet of a file would hold for the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    page = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2).replace("<svg ", '<svg role="img" ', 1)
    return Plot(name, title, description, _coloured(page, 0), _coloured(svg, 1))


def _coloured(svg: str, which: int) -> str:
    return re.sub("|".join(_THEME), lambda match: _THEME[match[0]][which], svg)
