"""Workers as processes of this machine: one a GPU, or one a processor socket."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stapes.bulk.decoders import ending
from stapes.bulk.executor import Assignment, Died, Event, Ready
from stapes.bulk.spec import Spec
from stapes.bulk.worker import Place
from stapes.devices.machine import available_cores
from stapes.errors import UsageError

_LONGEST_PAUSE = 30.0
"""Seconds before a worker that dies again and again without getting ready is begun once more."""

_MOST_ATTEMPTS = 4
"""Times in a row that a worker may die before it is ready."""


class LocalExecutor:
    """Processes of this machine; one that dies is begun again. log: folder for what they say on stderr."""

    def __init__(self, spec: Spec, places: Sequence[Place], log: Path) -> None:
        self._spec, self._log = spec, log
        self._slots = {place.name: _Slot(place) for place in places}

    @property
    def workers(self) -> Sequence[str]:
        """Their names."""
        return list(self._slots)

    def start(self) -> None:
        """Begin all processes."""
        for slot in self._slots.values():
            self._begin(slot)

    def submit(self, worker: str, assignment: Assignment) -> None:
        """Give an assignment to a worker."""
        self._send(worker, assignment)

    def recall(self, worker: str, number: int) -> None:
        """Ask for an assignment back."""
        self._send(worker, number)

    def _send(self, worker: str, message: Any) -> None:
        pipe = self._slots[worker].pipe
        if pipe is not None:
            with contextlib.suppress(OSError):  # it has died: its pipe will say so
                pipe.send(message)

    def events(self, timeout: float) -> Sequence[Event]:
        """What has happened, waiting at most so many seconds for something."""
        now = time.monotonic()
        for slot in self._slots.values():
            if slot.pipe is None and not slot.given_up and slot.begin_at <= now:
                self._begin(slot)
        alive = {slot.pipe: slot for slot in self._slots.values() if slot.pipe is not None}
        if not alive:
            time.sleep(min(timeout, 0.1))
            return []
        found: list[Event] = []
        for pipe in connection.wait(list(alive), timeout):
            found += self._read(alive[pipe])  # pyright: ignore[reportArgumentType]
        return found

    def _read(self, slot: _Slot) -> list[Event]:
        assert slot.pipe is not None
        found: list[Event] = []
        with contextlib.suppress(EOFError, OSError):
            while slot.pipe.poll():
                event = slot.pipe.recv()
                if isinstance(event, Died):
                    slot.last_words = event
                    continue
                if isinstance(event, Ready):
                    slot.attempts = 0
                found.append(event)
            return found
        return [*found, self._bury(slot)]

    def _bury(self, slot: _Slot) -> Died:
        process, pipe = slot.process, slot.pipe
        assert process is not None
        assert pipe is not None
        pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        code = process.wait()
        slot.pipe = slot.process = None
        slot.attempts += 1
        slot.begin_at = time.monotonic() + min(
            _LONGEST_PAUSE, 0.5 * 2 ** (slot.attempts - 2) if slot.attempts > 1 else 0
        )
        died = slot.last_words or Died(slot.place.name, f"{ending(code)}{self._last_line(slot)}")
        slot.given_up = died.hopeless or slot.attempts >= _MOST_ATTEMPTS
        return Died(died.worker, died.reason, hopeless=slot.given_up, exit_code=died.exit_code)

    def _last_line(self, slot: _Slot) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_of(slot).read_bytes()[-2000:].decode("utf-8", "replace").split("\n")
            if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return f"; it said: {last[:300]}"
        return ""

    def _log_of(self, slot: _Slot) -> Path:
        return self._log / f"{slot.place.name.replace('/', '-')}.log"

    def _begin(self, slot: _Slot) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if slot.place.threads is not None:
            environment["OMP_NUM_THREADS"] = str(slot.place.threads)
        with theirs, self._log_of(slot).open("wb") as log:
            slot.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "stapes.bulk.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        slot.pipe = Connection(ours.detach())
        slot.last_words = None
        with contextlib.suppress(OSError):
            slot.pipe.send((slot.place, self._spec))

    def restart(self, worker: str) -> None:
        """End a worker that does nothing any more."""
        process = self._slots[worker].process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End all processes, at once."""
        for slot in self._slots.values():
            slot.given_up = True
            if slot.process is not None:
                slot.process.kill()
        for slot in self._slots.values():
            if slot.process is not None:
                slot.process.wait()
            if slot.pipe is not None:
                slot.pipe.close()
            slot.pipe = slot.process = None


class _Slot:
    """A worker and its successors."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self.last_words: Died | None = None
        self.attempts = 0
        self.begin_at = 0.0
        self.given_up = False


def places(device: str, workers: int | None, threads: int | None) -> list[Place]:
    """Where workers work: one on each GPU named, or on all; on the CPU one a socket, or as many as asked.

    device: ``auto``, ``cpu``, ``cuda``, or GPUs by number separated by commas. threads: of each worker on the CPU; by
    default the cores are shared out. Raises UsageError, DeviceError.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}: give 1 or more")
    devices = gpus(device)
    if devices:
        count = workers or len(devices)
        return [Place(f"gpu-{n}", devices[n % len(devices)], threads, None) for n in range(count)]
    sets = split_cores(sorted(os.sched_getaffinity(0)), workers)
    quota = max(1, available_cores() // len(sets))  # a container's share may be less than its processors
    return [Place(f"cpu-{n}", "cpu", threads or min(len(cores), quota), tuple(cores)) for n, cores in enumerate(sets)]


def gpus(device: str) -> list[str]:
    """GPUs by number; none for the CPU. Raises UsageError, DeviceError."""
    from stapes.devices.backend import gpu_backend, resolve

    names = [name.strip() for name in device.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--device is {device!r}: say auto, cpu, cuda, or GPUs by number: cuda:0,cuda:1")
    if len(names) == 1 and ":" not in names[0]:
        if names[0] != "auto":
            resolve(names[0])
        if names[0] == "cpu" or gpu_backend() is None:
            return []
        import torch

        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    for name in names:
        if resolve(name).backend == "cpu":
            raise UsageError(f"--device is {device!r}: the CPU is not one of several devices")
    return names


def split_cores(cores: Sequence[int], workers: int | None) -> list[list[int]]:
    """The cores of each worker: those of one socket together as far as that goes; one worker a socket by default."""
    sockets: dict[str, list[int]] = {}
    for core in cores:
        sockets.setdefault(_socket(core), []).append(core)
    count = workers or len(sockets)
    in_order = [core for socket in sockets.values() for core in socket]
    if count > len(in_order):
        return [[in_order[n % len(in_order)]] for n in range(count)]
    edges = [round(n * len(in_order) / count) for n in range(count + 1)]
    return [in_order[a:b] for a, b in pairwise(edges)]


def _socket(core: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/physical_package_id").read_text(encoding="ascii")
    except OSError:
        return ""
