"""``stapes monitor``: how the GPUs are doing, live; one JSON sample; a CSV log."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, display, to_json
from stapes.errors import OutputError, UsageError

if TYPE_CHECKING:
    from rich.console import Group

    from stapes.devices.monitor import GpuProcess, Reading, Sample

_FIRST_LOOK = 0.2
"""Seconds between the two looks that the processor's utilisation needs."""

_HOST_COLUMNS = ("host_utilisation", "host_memory_used_bytes", "host_memory_total_bytes", "host_load_average")


def monitor(
    *,
    interval: float = 1.0,
    samples: int | None = None,
    log: Annotated[Path | None, Parameter(name="--csv")] = None,
    json: bool = False,
) -> int:
    """Watch the GPUs: memory, utilisation, power, temperature, clocks and processes.

    On a terminal the table is live until Ctrl-C; in a pipe it is printed once. AMD GPUs are read through amd-smi or
    the driver's own files, NVIDIA's through NVML; nothing need be installed.

    For example:

        stapes monitor
        stapes monitor --json
        stapes monitor --csv gpu.csv --interval 5

    Parameters
    ----------
    interval:
        Seconds from one sample to the next.
    samples:
        End after so many samples. Default: until Ctrl-C.
    log:
        Write a log instead: a line for every GPU and sample, each whole whenever you stop. An existing log is
        continued.
    json:
        Print one sample as one JSON object. Bytes, watts, °C and MHz; utilisation is a fraction; null is unknown.
    """
    if not 0.1 <= interval <= 3600:
        raise UsageError(f"--interval is {interval:g}: give 0.1 to 3600 seconds")
    if samples is not None and samples < 1:
        raise UsageError(f"--samples is {samples}: give 1 or more")
    if json and log is not None:
        raise UsageError("--json prints one sample and --csv writes a log: give one of them")
    terminal = Terminal()
    if log is not None:
        with _log_file(log) as file:
            for count, sample in enumerate(_samples(interval, samples), 1):
                if count == 1:
                    for note in sample.notes:
                        terminal.note(note)
                _append(file, sample)
        terminal.note(f"wrote {log}")
        return 0
    if json:
        terminal.out(to_json(asdict(next(_samples(interval, 1)))) + "\n")
    elif terminal.out_is_terminal:
        _live(interval, samples)
    else:
        terminal.out(_as_text(next(_samples(interval, 1))))
    return 0


def _samples(interval: float, count: int | None) -> Iterator[Sample]:
    """A sample every ``interval`` seconds, the first at once; where a source is slower, those that are due fall out."""
    from stapes.devices.monitor import Monitor

    watched = Monitor()
    time.sleep(min(_FIRST_LOOK, interval))
    due, done = time.monotonic(), 0
    while count is None or done < count:
        yield watched.sample()
        done += 1
        due, now = due + interval, time.monotonic()
        if due < now:
            due = now + interval
        if count is None or done < count:
            time.sleep(due - now)


def _live(interval: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=False) as live:
        for sample in _samples(interval, count):
            with shielded():
                live.update(table(sample), refresh=True)


def _as_text(sample: Sample) -> str:
    """The table, wide enough that nothing wraps."""
    from rich.console import Console

    buffer = StringIO()
    Console(file=buffer, width=1000, highlight=False).print(table(sample))
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def table(sample: Sample) -> Group:
    """What is shown of one sample."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("GPU", "name", "memory", "busy", "power", "temp.", "clock", "memory clock", "processes"):
        grid.add_column(heading, justify="left" if heading in ("name", "processes") else "right")
    for reading in sample.gpus:
        grid.add_row(*(Text(display(cell)) for cell in _cells(reading)))
    host = sample.host
    lines = [
        f"processor {_percent(host.utilisation)} busy, load "
        + (f"{host.load_average:.2f}" if host.load_average is not None else "?")
        + f", memory {_of(host.memory_used_bytes, host.memory_total_bytes)}"
    ]
    lines += sample.notes
    source = ", ".join(dict.fromkeys(reading.source for reading in sample.gpus))
    lines.append(f"{sample.time}" + (f", read through {source}" if source else ""))
    texts = [Text(display(line), style="" if place == 0 else "dim") for place, line in enumerate(lines)]
    return Group(*([grid] if sample.gpus else []), *texts)


def _cells(reading: Reading) -> list[str]:
    def shown(value: float | None, unit: str) -> str:
        return "?" if value is None else f"{value:.0f} {unit}"

    programs = reading.processes
    return [
        str(reading.index),
        reading.name or "?",
        _of(reading.memory_used_bytes, reading.memory_total_bytes),
        _percent(reading.utilisation),
        shown(reading.power_watts, "W"),
        shown(reading.temperature_c, "°C"),
        shown(reading.clock_mhz, "MHz"),
        shown(reading.memory_clock_mhz, "MHz"),
        "?"
        if programs is None
        else ", ".join(
            f"{each.name or 'pid'} {each.pid}"
            + (f" ({each.memory_bytes / 2**30:.1f} GiB)" if each.memory_bytes else "")
            for each in programs
        )
        or "none",
    ]


def _program(program: GpuProcess) -> str:
    memory = f" ({program.memory_bytes / 2**30:.1f} GiB)" if program.memory_bytes else ""
    return f"{program.name or 'pid'} {program.pid}{memory}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.0f} %"


def _of(used: int | None, total: int | None) -> str:
    parts = ["?" if value is None else f"{value / 2**30:.1f}" for value in (used, total)]
    return " / ".join(parts) + " GiB"


def _columns() -> list[str]:
    from stapes.devices.monitor import Reading

    gpu = [field.name for field in fields(Reading)]
    return ["time", *("gpu" if name == "index" else name for name in gpu), *_HOST_COLUMNS]


@contextmanager
def _log_file(path: Path) -> Iterator[TextIO]:
    """The log, at its end, its header written. Raises OutputError, UsageError where the file is something else."""
    header = _csv_line(_columns())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            start = file.readline()
            if start and start != header:
                raise UsageError(f"{path} is there and no log of this kind: choose another file for --csv")
            file.seek(0, 2)
            if not start:
                file.write(header)
                file.flush()
            yield file
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place for --csv") from error


def _append(file: TextIO, sample: Sample) -> None:
    """The lines of one sample, whole or not at all."""
    host = asdict(sample.host)
    about_host = [host[name.removeprefix("host_")] for name in _HOST_COLUMNS]
    width = len(_columns()) - 1 - len(about_host)
    lines = ""
    for reading in sample.gpus or [None]:
        values: list[Any] = [""] * width if reading is None else list(asdict(reading).values())
        if reading is not None:
            values[-1] = None if reading.processes is None else len(reading.processes)
        lines += _csv_line([sample.time, *values, *about_host])
    with shielded():
        file.write(lines)
        file.flush()


def _csv_line(values: list[Any]) -> str:
    buffer = StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(["" if value is None else value for value in values])
    return buffer.getvalue()
