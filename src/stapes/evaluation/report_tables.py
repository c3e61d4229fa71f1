"""The tables of a report, as text with a value to sort by: the same in HTML and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stapes.evaluation.report import Set, System
from stapes.evaluation.results import Rate

UNKNOWN = "–"

# How the rows of side-by-side tables are ordered; what is not named here comes last.
_ORDER = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "CPU", "GPU", "ctc", "attention", "hybrid")


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table: ``sort`` orders it (None last), ``note`` is smaller print below, of one or more lines."""

    text: str
    sort: float | str | None = None
    note: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; ``help`` explains it; ``number`` columns are right-aligned."""

    name: str
    help: str = ""
    number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under columns; ``same`` are the columns that would hold the same in every row."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    same: list[tuple[str, str]]
    notes: list[str]


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as per cent: 0.0543 is ``5.4 %``."""
    return UNKNOWN if value is None else f"{100 * value:.{digits}f} %"


def rate(value: Rate) -> str:
    """A rate with its interval: ``5.4 % (4.9–6.0)``."""
    if value.value is None or value.low is None or value.high is None:
        return percent(value.value)
    return f"{percent(value.value)} ({100 * value.low:.1f}–{100 * value.high:.1f})"


def seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 60 else f"{value / 60:.1f} min"


def size(value: float | None) -> str:
    """Bytes as MB or GB (powers of ten)."""
    if value is None:
        return UNKNOWN
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def figures(value: float | None, unit: str = "") -> str:
    """A number with three figures."""
    if value is None:
        return UNKNOWN
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}{unit}"


def p_value(p: float) -> str:
    """``p = 0.03``, or ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2f}" if p >= 0.1 else f"p = {p:.3f}"


def parameters(value: int | None) -> str:
    """A model's size: ``74 M``."""
    return UNKNOWN if value is None else f"{value / 1e9:.2f} B" if value >= 1e9 else f"{value / 1e6:.0f} M"


def cost(value: dict[str, Any] | None) -> str:
    """Training cost as it was recorded, on one line."""
    if not value:
        return UNKNOWN
    words = []
    for name, known in value.items():
        if isinstance(known, (str, int, float)):  # not the command
            shown = size(known) if name.endswith("_bytes") and isinstance(known, (int, float)) else f"{known}"
            words.append(f"{name.removesuffix('_bytes').replace('_', ' ')} {shown}")
    return ", ".join(words) or UNKNOWN


def summary(each: Set) -> Table:
    """Everything about every system in one row; what all share is said once, beside the table."""
    columns = [
        Column("System", number=False),
        Column("Precision", number=False),
        Column("Device", number=False),
        Column("WER", "Word error rate and its 95 % interval"),
        Column("vs baseline", "Difference in WER in points with its 95 % interval, paired; matched-pairs test"),
        Column("CER", "Character error rate and its 95 % interval"),
        Column("Sub.", "Words substituted"),
        Column("Del.", "Words deleted"),
        Column("Ins.", "Words inserted"),
        Column("Failed", "Recordings without a transcript: all of their words count as deleted"),
        Column("Throughput", "Seconds of audio per wall-clock second; RTF, its inverse, is the real-time factor"),
        Column("Latency", "From submission to text: median, and 95th percentile"),
        Column("Memory", "Most resident memory of the process"),
        Column("GPU memory", "Most memory allocated on the GPU"),
        Column("Energy", "As the device reports it"),
        Column("Params", "Parameters of the model"),
        Column("Training cost", number=False),
        Column("Machine", number=False),
        Column("Software", number=False),
    ]
    lowest = min((s.wer.value for s in each.systems if s.wer.value is not None), default=None)
    rows = [_summary_row(each, system, lowest) for system in each.systems]
    # Columns without information go, but those that say what was measured and how well stay in any case.
    keep, same = [0], []
    for place, column in enumerate(columns[1:], 1):
        texts = {(row[place].text, row[place].note) for row in rows}
        fixed = column.name in (
            "WER",
            "CER",
            "Sub.",
            "Del.",
            "Ins.",
            "Failed",
            "RTF",
            "Throughput",
            "Latency",
            "Memory",
        )
        # Which software ran is part of the label where it differs.
        if (len(texts) > 1 and column.name != "Software") or fixed:
            keep.append(place)
        elif len(texts) == 1 and rows[0][place].text != UNKNOWN:
            same.append((column.name, rows[0][place].text))
    notes = []
    if len(each.systems) > 1:
        notes.append(
            f"vs baseline ({each.baseline.label}): difference in WER in percentage points with its 95 % interval "
            f"(paired bootstrap) over the same {each.utterances:,} utterances; p from the matched-pairs "
            "sentence-segment word-error test, adjusted after Holm for the number of comparisons. "
            "★ marks p < 0.05."
        )
    why = dict.fromkeys(f"{system.wer.method}: {system.wer.why}" for system in each.systems)
    notes += [f"Intervals: {reason}." for reason in why]
    if any(system.result.speed.latency_p50 is not None for system in each.systems):
        notes.append(
            "Latency: from handing a recording over to its text. A system that works on several at once, for "
            "throughput, lets each wait for its neighbours."
        )
    return Table("Summary", [columns[k] for k in keep], [[row[k] for k in keep] for row in rows], same, notes)


def _summary_row(each: Set, system: System, lowest: float | None) -> list[Cell]:
    result = system.result
    model, speed, memory = result.model, result.speed, result.memory
    base = system is each.baseline
    return [
        Cell(system.label, system.label, "baseline" if base and len(each.systems) > 1 else "", strong=True),
        Cell(model.precision or UNKNOWN, model.precision),
        Cell(model.device or UNKNOWN, model.device),
        Cell(percent(system.wer.value), system.wer.value, _interval(system.wer), system.wer.value == lowest),
        _against(system),
        Cell(percent(system.cer.value), system.cer.value, _interval(system.cer)),
        Cell(f"{system.substitutions:,}", system.substitutions),
        Cell(f"{system.deletions:,}", system.deletions),
        Cell(f"{system.insertions:,}", system.insertions),
        Cell(f"{system.failed:,}", system.failed),
        Cell(figures(speed.throughput, "×"), speed.throughput, f"RTF {figures(speed.real_time_factor)}"),
        Cell(
            seconds(speed.latency_p50),
            speed.latency_p50,
            "" if speed.latency_p95 is None else f"95 %: {seconds(speed.latency_p95)}",
        ),
        Cell(size(memory.peak_rss_bytes), memory.peak_rss_bytes),
        Cell(size(memory.peak_device_bytes), memory.peak_device_bytes),
        Cell(figures(result.energy_joules, " J"), result.energy_joules),
        Cell(parameters(model.parameters), model.parameters),
        Cell(cost(model.training_cost), cost(model.training_cost)),
        Cell(system.machine, system.machine),
        Cell(result.system, result.system),
    ]


def _interval(value: Rate) -> str:
    return "" if value.low is None or value.high is None else f"{100 * value.low:.1f}–{100 * value.high:.1f}"


def _against(system: System) -> Cell:
    found = system.significance
    if found is None:
        return Cell(UNKNOWN, 0.0)
    gap = found.difference
    return Cell(
        f"{_signed(gap.difference)}{' ★' if found.significant else ''}",
        gap.difference,
        f"{_signed(gap.low)} to {_signed(gap.high)}\n{p_value(found.p)}",
        found.significant,
    )


def _signed(value: float) -> str:
    text = f"{100 * value:+.2f}"
    return "±0" if float(text) == 0 else text.replace("-", "−")


def breakdown(each: Set, key: str, title: str) -> Table:
    """WER of each system in each bin."""
    first = each.systems[0].breakdown[key]
    what = title.removeprefix("WER by ")
    columns = [Column(what[:1].upper() + what[1:], number=False), Column("Utterances"), Column("Words")]
    columns += [Column(system.label) for system in each.systems]
    rows = []
    for place, name in enumerate(each.bins[key]):
        cells = [Cell(name, place), *(Cell(f"{n:,}", n) for n in (first[name].utterances, first[name].words))]
        for system in each.systems:
            part = system.breakdown[key][name].rate
            cells.append(Cell(percent(part.value), part.value, _interval(part)))
        rows.append(cells)
    return Table(title, columns, rows, [], [])


def changes(each: Set) -> list[Table]:
    """What became of the recordings from the baseline to each other system: by language, and by speaker."""
    columns = [
        Column("System", number=False),
        Column("Where", number=False),
        Column("Utterances"),
        Column("Words"),
        Column("WER before"),
        Column("WER"),
        Column("Errors mended", "Word errors that recordings have fewer of than with the baseline"),
        Column("New errors", "Word errors that recordings have more of: what was forgotten"),
    ]
    rows = []
    for system in each.systems:
        for found in system.changes:
            before, after = (wrong / found.words if found.words else None for wrong in (found.before, found.after))
            rows.append(
                [
                    Cell(system.label, system.label, strong=True),
                    Cell(found.where, found.where),
                    *(Cell(f"{n:,}", n) for n in (found.utterances, found.words)),
                    Cell(percent(before), before),
                    Cell(percent(after), after, strong=found.after < found.before),
                    *(Cell(f"{n:,}", n) for n in (found.mended, found.new)),
                ]
            )
    notes = [f"Before: {each.baseline.label}. Speakers: those who gained most and those who lost most."]
    return [Table("Before and after", columns, rows, [], notes)] if rows else []


def hallucination(each: Set) -> Table:
    """Words that nobody said."""
    columns = [
        Column("System", number=False),
        Column("Inserted", "Inserted words per 100 words spoken"),
        Column("On silence", "Words per minute written where nothing is said"),
        Column("Loops", "Utterances in which an n-gram is said over and over, and not in the reference"),
    ]
    rows = []
    for system in each.systems:
        found = system.result.hallucination
        inserted = system.insertions / system.words if system.words else None
        silence = found.silence_insertions_per_minute
        rows.append(
            [
                Cell(system.label, system.label, strong=True),
                Cell(percent(inserted, 2), inserted),
                Cell(
                    figures(silence, " / min"),
                    silence,
                    f"{found.silence_minutes:.1f} min" if silence is not None else "",
                ),
                Cell(f"{found.repeated_ngram_utterances:,}", found.repeated_ngram_utterances),
            ]
        )
    return Table("Words that nobody said", columns, rows, [], [])


def views(each: Set) -> list[Table]:
    """The tables that the field quotes, where the results hold at least two of their rows."""
    return [
        *_view(each, "Precision", _precision, lambda s: (s.result.system, s.result.model.name, s.result.model.device)),
        *_view(each, "Device", _device, lambda s: (s.result.system, s.result.model.name)),
        *_view(each, "Objective", _objective, lambda _: ()),
    ]


def _view(
    each: Set, name: str, varied: Callable[[System], str | None], fixed: Callable[[System], tuple[str | None, ...]]
) -> list[Table]:
    """Systems that differ in one thing, next to each other; ratios are to the first of each, on one machine only."""
    groups: dict[Any, list[System]] = {}
    for system in each.systems:
        if varied(system) is not None:
            groups.setdefault(fixed(system), []).append(system)
    groups = {key: members for key, members in groups.items() if len({varied(each) for each in members}) > 1}
    if not groups:
        return []
    columns = [Column("Model", number=False), Column(name, number=False)]
    columns += [Column(each) for each in ("WER", "RTF", "Throughput", "Speed", "Memory", "GPU memory")]
    columns += [Column("Training cost", number=False), Column("Machine", number=False)]
    rows = []
    for members in groups.values():
        members.sort(key=lambda system: _ORDER.index(varied(system)) if varied(system) in _ORDER else len(_ORDER))
        first = members[0]
        for system in members:
            result = system.result
            ran = "" if name == "Precision" or not result.model.precision else f" {result.model.precision}"
            mine, its = result.speed.throughput, first.result.speed.throughput
            ratio = mine / its if mine and its and system.machine == first.machine else None
            rows.append(
                [
                    Cell(f"{result.system} {result.model.name}{ran}", result.model.name),
                    Cell(str(varied(system)), str(varied(system)), strong=True),
                    Cell(percent(system.wer.value), system.wer.value, _interval(system.wer)),
                    Cell(figures(result.speed.real_time_factor), result.speed.real_time_factor),
                    Cell(figures(mine, "×"), mine),
                    Cell("1 ×" if system is first else figures(ratio, " ×"), ratio),
                    Cell(size(result.memory.peak_rss_bytes), result.memory.peak_rss_bytes),
                    Cell(size(result.memory.peak_device_bytes), result.memory.peak_device_bytes),
                    Cell(cost(result.model.training_cost), cost(result.model.training_cost)),
                    Cell(system.machine, system.machine),
                ]
            )
    empty = [k for k in range(len(columns)) if k > 1 and all(row[k].text == UNKNOWN for row in rows)]
    if len({row[-1].text for row in rows}) == 1:
        empty.append(len(columns) - 1)
    title = {"Precision": "Precisions", "Device": "CPU and GPU", "Objective": "CTC, attention and hybrid"}[name]
    note = "Speed is relative to the first row of the same model, and only where both ran on one machine."
    keep = [k for k in range(len(columns)) if k not in empty]
    return [Table(title, [columns[k] for k in keep], [[row[k] for k in keep] for row in rows], [], [note])]


def _precision(system: System) -> str | None:
    return system.result.model.precision


def _device(system: System) -> str | None:
    device = system.result.model.device
    return None if device is None else "CPU" if device.lower().startswith("cpu") else "GPU"


def _objective(system: System) -> str | None:
    """What the model was trained with, where the result says so: it is never guessed from a name."""
    for facts in (system.result.options, system.result.model.training_cost or {}):
        if str(facts.get("objective")).lower() in ("ctc", "attention", "hybrid"):
            return str(facts["objective"]).lower()
    return None


def machine_facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """A machine's facts as names and texts; what is unknown is left out."""
    out = []
    for name, value in facts.items():
        if value in (None, "", [], {}):
            continue
        out.append((name.removesuffix("_bytes").replace("_", " "), _fact(name, value)))
    return out


def _fact(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return size(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(key, item)}" for key, item in value.items() if item is not None)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(_fact(name, item) for item in value)
    return str(value)
