"""What was compiled, as cells of a table and as a page that keeps one section for each version of Triton."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stapes.kernels.compile import Outcome
from stapes.kernels.targets import TARGETS

HEADINGS = ("target", "kernel", "dtype", "registers", "spills", "LDS", "matrix instructions", "result")

_INTRODUCTION = """# Kernels, compiled for every GPU

Written by `stapes kernels compile --table FILE`, on any machine: no GPU is needed to compile. Registers are those of
one lane (on CDNA with the accumulation registers); LDS, on NVIDIA shared memory, is that of one block. What is compiled
is not thereby fast, nor was it run: see RESULTS.md for what was.
"""
_SECTION = re.compile(r"^## Triton (\S+)$", re.MULTILINE)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """One row under `HEADINGS`."""
    name = (outcome.target, outcome.kernel, outcome.dtype)
    facts = outcome.facts
    if facts is None:
        return *name, "", "", "", "", _result(outcome)
    if facts.spills is None:
        spills, registers = "unknown", "unknown"
    else:
        unit = "" if TARGETS[outcome.target].is_amd else " B"
        spills = f"{facts.spills}{unit}" + (f" + {facts.scalar_spills}" if facts.scalar_spills else "")
        registers = str(facts.registers)
    lds = f"{facts.lds_bytes / 1024:.3g} KiB" if facts.lds_bytes >= 1024 else f"{facts.lds_bytes} B"
    matrix = next((f"{name} ×{count}" for name, count in facts.matrix.items()), "–")
    return *name, registers, spills, lds, matrix, _result(outcome)


def totals(outcomes: Sequence[Outcome]) -> str:
    """In one line: how many compiled, failed, are left to the reference."""
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    skipped = sum(outcome.skipped is not None for outcome in outcomes)
    cached = sum(outcome.is_cached for outcome in outcomes)
    passed = len(outcomes) - failed - skipped
    return f"{passed} passed ({cached} unchanged since they were compiled), {failed} failed, {skipped} not compiled"


def update_page(page: str, version: str, outcomes: Sequence[Outcome]) -> str:
    """The page with the section of this version of Triton written anew; those of others stay."""
    parts = _SECTION.split(page)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, outcomes)]
    sections[version] = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    newest_first = sorted(sections, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    return _INTRODUCTION + "".join(f"\n## Triton {name}\n\n{sections[name].strip()}\n" for name in newest_first)


def _result(outcome: Outcome) -> str:
    if outcome.skipped:
        return f"not compiled: {outcome.skipped}"
    if outcome.problems:
        return f"FAILED: {'; '.join(outcome.problems)}"
    return "ok" if outcome.facts else "ok, says the record"
