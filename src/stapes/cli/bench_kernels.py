"""``stapes bench kernels``: our GPU kernels against the memory they move and PyTorch's own operations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.bench_run import listed, measure, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def kernels(
    *,
    device: str = "auto",
    kernels: str | None = None,
    windows: int = 64,
    rounds: int = 30,
    sweep: bool = False,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    quick: bool = False,
    json: bool = False,
) -> int:
    """Time each GPU kernel: bytes per second, part of a copy's bandwidth, beside PyTorch's own operations.

    Every result is compared with the reference's; exit code 1 if any is wrong or does not run.

    For example:

        stapes bench kernels
        stapes bench kernels --kernels log_mel --sweep

    Parameters
    ----------
    device:
        The GPU: auto, cuda (AMD too) or cuda:1.
    kernels:
        Parts of kernels' names separated by commas. Default: all.
    windows:
        Windows of 30 s that go into the kernels for features.
    rounds:
        How often each is timed.
    sweep:
        Try the other tiles of each kernel too.
    output_dir:
        Folder for the result and its log.
    quick:
        A trial: 4 windows, 5 rounds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    if not 1 <= windows <= 1024:
        raise UsageError(f"--windows is {windows}: give 1 to 1024")
    if quick:
        windows, rounds = 4, 5
    terminal = Terminal()

    from stapes.benchmarks.kernels import KernelRun, choose_gpu

    run = KernelRun(
        choose_gpu(device),
        kernels=listed("--kernels", kernels) if kernels is not None else (),
        windows=windows,
        sweep=sweep,
        rounds=rounds,
        command=["stapes", *sys.argv[1:]],
        quick=quick,
        log=terminal.note,
    )
    path = measure(run, output_dir, terminal)
    tell(run.result, path, terminal, _kernel_line, json=json)
    return 1 if any(row.case["problem"] for row in run.result.rows) else 0


def _kernel_line(row: CaseRow) -> str:
    head = f"{row.case['kernel']}, {row.case['shape']} {row.ours.options}".rstrip()
    if not row.ours.wall_seconds.median:
        return f"{head}: FAILED: {row.case['problem']}\n"
    figures, torch_seconds = row.ours.figures, row.systems[1].wall_seconds.median
    line = (
        f"{head}: {1e6 * row.ours.wall_seconds.median:.1f} µs, {figures['gb_s']:.0f} GB/s, "
        f"{100 * (figures['of_copy'] or 0):.0f} % of a copy, "
        f"{row.ratios[0].times_as_fast.median:.1f} × as fast as PyTorch's {1e6 * torch_seconds:.1f} µs, "
        f"difference {figures['greatest_difference']:.1e}"
    )
    return line + (f", WRONG: {row.case['problem']}\n" if row.case["problem"] else "\n")
