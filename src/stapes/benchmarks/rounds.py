"""Systems in turn: the one way in which anything here is timed.

Every system is loaded and warmed before the clock. A round runs each of them once, and the next round the other way
round, so that a change of the machine's clock speed, or what one leaves behind for the next, meets all alike. Ratios
are taken pair by pair, within a round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stapes.benchmarks.records import CaseRow, Ratio, Spread, SystemRow
from stapes.devices import machine


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A system, loaded and warm.

    ``run`` does the work once; it returns when the work is done, GPUs included. ``judge`` says afterwards, outside
    the clock, what came of it; ``prepare`` comes before it, outside the clock too.
    """

    system: str
    version: str | None = None
    options: str = ""
    precision: str | None = None
    run: Callable[[], Any]
    judge: Callable[[Any], Mapping[str, float | None]] = lambda output: {}
    gpu: int | None = None
    prepare: Callable[[], None] = lambda: None

    @property
    def label(self) -> str:
        """As the log calls it."""
        return f"{self.system} ({self.options})" if self.options else self.system


@dataclass(frozen=True)
class Case:
    """A row to measure. ``facts``: what is varied, as JSON. ``open`` loads and warms the systems, ours first.

    A new capability is measured by a file with a function that returns such cases.
    """

    facts: dict[str, Any]
    open: Callable[[], list[Contender]]


def measure_cases(cases: Iterable[Case], rounds: int, log: Callable[[str], None]) -> Iterator[CaseRow]:
    """Measure one case after the other."""
    for case in cases:
        log(" · ".join(f"{name} {value}" for name, value in case.facts.items()))
        yield measure(case, rounds, log)


def measure(case: Case, rounds: int, log: Callable[[str], None]) -> CaseRow:
    """Run the systems of a case in turn, ``rounds`` times."""
    contenders = case.open()
    times: list[list[float]] = [[] for _ in contenders]
    figures: list[dict[str, float | None]] = [{} for _ in contenders]
    for number in range(rounds):
        order = list(enumerate(contenders))
        for place, contender in order if number % 2 == 0 else reversed(order):
            contender.prepare()
            gc.collect()
            machine.reset_peak_memory(contender.gpu)
            meter = machine.EnergyMeter(contender.gpu)
            start = time.perf_counter()
            output = contender.run()
            times[place].append(time.perf_counter() - start)
            figures[place] = {"joules": meter.joules(), **contender.judge(output)}
            if len(contenders) == 1:  # several loaded systems share the process, and often the GPU
                figures[place] |= {
                    "peak_rss_bytes": machine.peak_rss_bytes(),
                    "peak_device_bytes": machine.peak_device_bytes(contender.gpu),
                }
            log(f"round {number + 1}: {contender.label} {times[place][-1]:.3f} s")
    systems = [
        SystemRow(
            system=contender.system,
            version=contender.version,
            options=contender.options,
            precision=contender.precision,
            wall_seconds=Spread.of(seconds),
            figures=found,
        )
        for contender, seconds, found in zip(contenders, times, figures, strict=True)
    ]
    ratios = [
        Ratio(
            peer=peer.label,
            place=place,
            times_as_fast=Spread.of([theirs / ours for ours, theirs in zip(times[0], times[place], strict=True)]),
        )
        for place, peer in enumerate(contenders)
        if place
    ]
    return CaseRow(case=case.facts, systems=systems, ratios=ratios)
