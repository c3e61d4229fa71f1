"""All-reduce between ranks: do the links between GPUs work, and how fast are they?

Over NCCL (which is RCCL on AMD) with a GPU for each rank, or over gloo on the CPU. Bandwidths are defined as in
nccl-tests: ``algorithm = bytes / seconds``, ``bus = algorithm · 2 (n − 1) / n`` for ``n`` ranks; the latter is what the
slowest link carries and may be compared between numbers of ranks. The time is that of the slowest rank.

Every size is checked before it is timed: rank ``r`` gives ``(r + 1) · (i mod 7 + 1)`` at place ``i``, whose sum is
exact in fp32 for some thousand ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import stapes
from stapes.benchmarks.records import CaseRow, Spread, SystemRow, Weights
from stapes.benchmarks.run import Run
from stapes.devices import machine
from stapes.errors import DeviceError, StapesError, UsageError

Collective = Literal["nccl", "gloo"]

SMALLEST = 8
_LARGEST = {"nccl": 16 << 30, "gloo": 256 << 20}
_ROUND_SECONDS = 0.2
_MOST_ITERATIONS = 500
_CHUNK = 1 << 24
"""Elements that are filled and checked at once."""


@dataclass(frozen=True, kw_only=True)
class AllreduceBench:
    """What to measure. ``sizes``: bytes, each a multiple of 4; None: 8 B, four times as much …, as large as fits."""

    backend: Collective
    ranks: int
    sizes: tuple[int, ...] | None = None
    rounds: int = 5
    timeout: float = 60.0
    """Seconds that a rank waits for the others."""

    def __post_init__(self) -> None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else self.ranks
        if self.ranks < 1:
            raise UsageError(f"--ranks is {self.ranks}: give 1 or more")
        if self.backend == "nccl" and local > gpus:
            raise DeviceError(
                f"--backend nccl wants a GPU for each of the {local} ranks, and PyTorch sees {gpus}: "
                "give fewer --ranks, or --backend gloo"
            )
        for size in self.sizes or ():
            if size < 4 or size % 4:
                raise UsageError(f"--sizes has {size} bytes: give multiples of 4, which is one number in fp32")

    @property
    def threads(self) -> int:
        """Of each rank on the CPU."""
        return max(1, machine.available_cores() // self.ranks)


def launched() -> bool:
    """Whether torchrun, or another launcher, has started this process as one rank of many."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_backend() -> Collective:
    """NCCL where PyTorch sees a GPU and was built with it, else gloo."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def choose_ranks(backend: Collective) -> int:
    """The launcher's number; without one a rank for each GPU, or two."""
    if launched():
        return int(os.environ["WORLD_SIZE"])
    return max(1, torch.cuda.device_count()) if backend == "nccl" else 2


class AllreduceRun(Run):
    """The run and its file. Under a launcher this process is one rank of it, and only rank 0 has rows."""

    def __init__(
        self,
        bench: AllreduceBench,
        *,
        command: Sequence[str],
        quick: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(
            "allreduce",
            (),
            rounds=bench.rounds,
            weights=Weights(name=f"{bench.backend}-{bench.ranks}-ranks", kind="none"),
            audio={},
            command=command,
            quick=quick,
            log=log,
        )
        self._bench = bench
        self._ranks: Ranks | None = None

    def rows(self) -> Iterator[CaseRow]:
        """Measure; a row for each size as soon as it is there."""
        bench = self._bench
        for note in self.result.notes:
            self._log(note)
        if launched():
            rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
            found = measure(bench, rank, local, "env://")
        else:
            self._ranks = Ranks(bench)
            found = self._ranks.results()
        for one in found:
            row = as_row(bench, one)
            figures = row.ours.figures
            self._log(
                f"{one['bytes']} B: {1e6 * row.ours.wall_seconds.median:.1f} us, "
                f"bus {figures['bus_gb_s']:.3g} GB/s, {figures['wrong_elements']:.0f} wrong"
            )
            self.result.rows.append(row)
            yield row

    def close(self) -> None:
        """End ranks that still run."""
        if self._ranks is not None:
            self._ranks.close()


def bus_factor(ranks: int) -> float:
    """What each link carries of an all-reduce, in times of its size."""
    return 2 * (ranks - 1) / ranks


def as_row(bench: AllreduceBench, found: dict[str, Any]) -> CaseRow:
    """The record of one size. ``found``: its ``bytes``, ``seconds`` of each round, ``wrong`` places, and how."""
    spread = Spread.of(found["seconds"])
    algorithm = found["bytes"] / spread.median / 1e9
    return CaseRow(
        case={
            "bytes": found["bytes"],
            "ranks": bench.ranks,
            "backend": bench.backend,
            "device": "cuda" if bench.backend == "nccl" else "cpu",
            "device_name": found["device"],
            "precision": "fp32",
            "iterations": found["iterations"],
            "threads": bench.threads,
        },
        systems=[
            SystemRow(
                system="stapes",
                version=stapes.__version__,
                options=found["library"],
                precision="fp32",
                wall_seconds=spread,
                figures={
                    "algorithm_gb_s": algorithm,
                    "bus_gb_s": algorithm * bus_factor(bench.ranks),
                    "wrong_elements": float(found["wrong"]),
                },
            )
        ],
    )


def measure(bench: AllreduceBench, rank: int, local_rank: int, where: str) -> Iterator[dict[str, Any]]:
    """Be one rank: meet the others at ``where``, then check and time every size. Rank 0 yields what was found."""
    is_gpu = bench.backend == "nccl"
    device = torch.device("cuda", local_rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(bench.threads)
    dist.init_process_group(
        bench.backend,
        init_method=where,
        rank=rank,
        world_size=bench.ranks,
        timeout=timedelta(seconds=bench.timeout),
        device_id=device if is_gpu else None,
    )
    try:
        facts = {"device": torch.cuda.get_device_name(device) if is_gpu else "CPU", "library": _library(bench.backend)}
        for size in bench.sizes or _sizes(bench, device):
            found = _measure_size(bench, rank, device, size)
            if rank == 0:
                yield {"bytes": size, **found, **facts}
    finally:
        dist.destroy_process_group()


def _library(backend: Collective) -> str:
    if backend == "gloo":
        return "gloo"
    from torch.cuda import nccl

    name = "RCCL" if torch.version.hip else "NCCL"
    return f"{name} {'.'.join(map(str, nccl.version()))}"


def _sizes(bench: AllreduceBench, device: torch.device) -> list[int]:
    """8 B, four times as much, …, and at last the largest power of two that a third of every rank's memory holds."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = (machine.memory_bytes() or 2 << 30) // (4 * bench.ranks)
    room = torch.tensor(min(free // 3, _LARGEST[bench.backend]), dtype=torch.int64, device=device)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    largest = 1 << (int(room.item()).bit_length() - 1)
    sizes = []
    size = SMALLEST
    while size < largest:
        sizes.append(size)
        size *= 4
    return [*sizes, largest]


def _measure_size(bench: AllreduceBench, rank: int, device: torch.device, size: int) -> dict[str, Any]:
    buffer = torch.empty(size // 4, dtype=torch.float32, device=device)
    _fill(buffer, rank + 1)
    dist.all_reduce(buffer)
    wrong = _count_wrong(buffer, bench.ranks * (bench.ranks + 1) // 2)
    total_wrong = torch.tensor(wrong, dtype=torch.int64, device=device)
    dist.all_reduce(total_wrong)
    _time(buffer, 2)  # the first transfers of a size set up its algorithm
    iterations = max(1, min(_MOST_ITERATIONS, int(_ROUND_SECONDS / _time(buffer, 3))))
    seconds = []
    for _ in range(bench.rounds):
        _fill(buffer, rank + 1)  # sums of sums would reach infinity
        seconds.append(_time(buffer, iterations))
    return {"seconds": seconds, "wrong": int(total_wrong.item()), "iterations": iterations}


def _time(buffer: torch.Tensor, iterations: int) -> float:
    """Seconds of one all-reduce on the slowest rank; the same number on every rank."""
    dist.barrier()
    _synchronize(buffer.device)
    start = time.perf_counter()
    for _ in range(iterations):
        dist.all_reduce(buffer)
    _synchronize(buffer.device)
    seconds = torch.tensor((time.perf_counter() - start) / iterations, dtype=torch.float64, device=buffer.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return max(float(seconds.item()), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pattern(start: int, stop: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(start, stop, device=device) % 7 + 1).to(torch.float32)


def _fill(buffer: torch.Tensor, factor: int) -> None:
    for start in range(0, len(buffer), _CHUNK):
        part = buffer[start : start + _CHUNK]
        torch.mul(_pattern(start, start + len(part), buffer.device), factor, out=part)


def _count_wrong(buffer: torch.Tensor, factor: int) -> int:
    """Places where the sum is not exactly what it must be."""
    wrong = 0
    for start in range(0, len(buffer), _CHUNK):
        part = buffer[start : start + _CHUNK]
        wrong += int((part != _pattern(start, start + len(part), buffer.device) * factor).sum().item())
    return wrong


class Ranks:
    """Processes of this machine, one a rank. When one dies, the others are ended and it is said which and how."""

    def __init__(self, bench: AllreduceBench, target: Callable[..., None] | None = None) -> None:
        self._bench = bench
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stapes-ranks-")))
        context = mp.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(bench.ranks):
            ours, theirs = context.Pipe(duplex=False)
            # A file to meet at needs no free port.
            arguments = (bench, rank, f"file://{folder}/meet", theirs)
            process = context.Process(target=target or _be_rank, args=arguments, daemon=True, name=f"rank {rank}")
            with _without_interrupts():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def results(self) -> Iterator[dict[str, Any]]:
        """What rank 0 finds, until all ranks have ended. Raises StapesError for a rank that died."""
        open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        messages: dict[int, str] = {}
        try:
            while open_pipes:
                for pipe in wait(list(open_pipes)):
                    assert isinstance(pipe, Connection)
                    rank = open_pipes[pipe]
                    try:
                        kind, value = pipe.recv()
                    except (EOFError, OSError):
                        del open_pipes[pipe]
                        self._processes[rank].join(10)
                        if self._processes[rank].exitcode != 0:
                            raise self._death(rank, messages) from None
                        continue
                    if kind == "found":
                        yield value
                    else:
                        messages[rank] = value
        finally:
            self.close()

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes:
            with suppress(OSError, ValueError):
                if process.is_alive():
                    process.terminate()
                    process.join(2)
                if process.is_alive():
                    process.kill()
        self._stack.close()

    def _death(self, rank: int, messages: dict[int, str]) -> StapesError:
        # When one rank goes, the others complain of the connection; whoever was killed, or spoke first, is the cause.
        time.sleep(0.2)
        codes = {number: process.exitcode for number, process in enumerate(self._processes)}
        killed = [number for number, code in codes.items() if code is not None and code < 0]
        rank = killed[0] if killed else next(iter(messages), rank)
        code = codes[rank]
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
        else:
            how = f"failed: {messages[rank]}" if rank in messages else f"ended with exit code {code}"
        hint = "NCCL_DEBUG=INFO tells more" if self._bench.backend == "nccl" else "try fewer --ranks or smaller --sizes"
        return DeviceError(f"all-reduce over {self._bench.backend}: rank {rank} of {self._bench.ranks} {how}; {hint}")


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes begun in this block never see Ctrl-C, which a terminal sends to all: their parent ends them."""
    resource_tracker.ensure_running()  # starting it lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_rank(bench: AllreduceBench, rank: int, where: str, pipe: Connection) -> None:
    """The life of one process."""
    if bench.backend == "gloo" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's own name may lead nowhere in a container
    try:
        for found in measure(bench, rank, rank, where):
            pipe.send(("found", found))
    except Exception as error:
        with suppress(OSError):
            pipe.send(("error", " ".join(f"{type(error).__name__}: {error}".split())[:300]))
        raise SystemExit(1) from None
