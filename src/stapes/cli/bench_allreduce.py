"""``stapes bench allreduce``: do the links between GPUs work, and what do they carry?"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from stapes.cli.bench_run import listed, measure, tell
from stapes.cli.terminal import Terminal
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.benchmarks.records import CaseRow


def allreduce(
    *,
    ranks: int | None = None,
    backend: Literal["auto", "nccl", "gloo"] = "auto",
    sizes: str | None = None,
    rounds: int = 5,
    timeout: float = 60.0,
    output_dir: Annotated[Path, Parameter(alias="-o")] = Path("results"),
    quick: bool = False,
    json: bool = False,
) -> int:
    """Check and time all-reduce between GPUs: whether their links work, and what they carry.

    Every result is compared with the sum it must be; exit code 1 if any is wrong. By itself the command starts the
    ranks on this machine; under torchrun it is one of them, on as many machines as you like.

    For example:

        stapes bench allreduce
        stapes bench allreduce --ranks 4 --backend gloo --quick
        torchrun --nproc-per-node 8 -m stapes bench allreduce

    Parameters
    ----------
    ranks:
        Processes. Default: one for each GPU; 2 with gloo.
    backend:
        nccl (RCCL on AMD) between GPUs, gloo between CPUs; auto takes nccl where there is a GPU.
    sizes:
        Of the buffers, separated by commas, such as 8B,64KiB,1GiB. Default: 8 B, four times as much, …, as large as
        fits.
    rounds:
        How often each size is timed.
    timeout:
        Seconds after which ranks that wait for another give up.
    output_dir:
        Folder for the result and its log.
    quick:
        A trial: up to 1 MiB, 2 rounds; never tabled.
    json:
        Print the result as one JSON object.
    """
    if not 1 <= rounds <= 1000:
        raise UsageError(f"--rounds is {rounds}: give 1 to 1000")
    if not 1 <= timeout <= 3600:
        raise UsageError(f"--timeout is {timeout:g}: give 1 to 3600 seconds")
    if quick:
        sizes, rounds = sizes or "8B,1KiB,64KiB,1MiB", 2
    chosen = None if sizes is None else tuple(_bytes(text) for text in listed("--sizes", sizes))
    terminal = Terminal()

    from stapes.benchmarks import allreduce as bench

    where = bench.choose_backend() if backend == "auto" else backend
    count = bench.choose_ranks(where) if ranks is None else ranks
    if bench.launched() and count != bench.choose_ranks(where):
        raise UsageError(f"--ranks is {count}, but the launcher started {bench.choose_ranks(where)}: leave --ranks out")
    is_first = not bench.launched() or os.environ["RANK"] == "0"
    run = bench.AllreduceRun(
        bench.AllreduceBench(backend=where, ranks=count, sizes=chosen, rounds=rounds, timeout=timeout),
        command=["stapes", *sys.argv[1:]],
        quick=quick,
        log=terminal.note if is_first else lambda line: None,
    )
    if bench.launched():
        run.result.notes.append("under a launcher, which started every rank with this command")
    try:
        if not is_first:
            for _ in run.rows():
                pass
            return 0
        path = measure(run, output_dir, terminal)
    finally:
        run.close()
    tell(run.result, path, terminal, _size_line, json=json)
    wrong = [row.case["bytes"] for row in run.result.rows if row.ours.figures["wrong_elements"]]
    if wrong:
        terminal.failure(
            f"all-reduce gave wrong sums at {', '.join(map(_in_bytes, wrong))}: do not train on these links; "
            "check the cabling, the driver and the versions of NCCL or RCCL"
        )
    return 1 if wrong else 0


def _size_line(row: CaseRow) -> str:
    figures, seconds = row.ours.figures, row.ours.wall_seconds
    check = "right" if not figures["wrong_elements"] else f"WRONG at {figures['wrong_elements']:.0f} places"
    return (
        f"{_in_bytes(row.case['bytes']):>9}  {1e6 * seconds.median:>11.1f} µs  "
        f"algorithm {figures['algorithm_gb_s']:>9.3g} GB/s  bus {figures['bus_gb_s']:>9.3g} GB/s  {check}\n"
    )


def _in_bytes(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):g} {unit}"
    return f"{size} B"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?)?B?", text, re.IGNORECASE)
    powers = {"": 0, "k": 10, "m": 20, "g": 30}
    value = float(found[1]) * 2 ** powers[(found[2] or "")[:1].lower()] if found else 0.0
    if not 4 <= value <= 2**42 or value % 4:
        raise UsageError(f"--sizes has {text!r}: give multiples of 4 bytes, such as 8B,64KiB,1GiB")
    return int(value)
