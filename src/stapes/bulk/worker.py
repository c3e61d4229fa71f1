"""A worker as a process of this machine: it holds a model, takes assignments from a socket and tells what it did.

It ends when the driver does: the socket closes then, however the driver ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from stapes.bulk.decoders import LocalDecoders
from stapes.bulk.engine import ShardWorker, open_engine
from stapes.bulk.executor import Assignment, Died, Event
from stapes.bulk.spec import Spec
from stapes.errors import StapesError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker works. ``cores``: the processors that it keeps to; None: all."""

    name: str
    device: str
    threads: int | None
    cores: tuple[int, ...] | None


class _Wire:
    """Events to the driver, from any thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock, contextlib.suppress(OSError):  # the driver has gone, and this process goes at once
            self._pipe.send(event)


def main() -> None:
    """Entry point: ``python -m stapes.bulk.worker FD``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe = Connection(int(sys.argv[1]))
    place, spec = pipe.recv()
    wire = _Wire(pipe)
    if place.cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, place.cores)
    code = 0
    try:
        worker = _open(place, spec, wire)
        threading.Thread(target=_listen, args=(pipe, worker), daemon=True, name="driver").start()
        wire.emit(worker.ready())
        worker.run()
    except StapesError as error:
        wire.emit(Died(place.name, str(error), hopeless=True, exit_code=error.exit_code))
        code = 1
    except BaseException as error:  # whatever it is, the process is of no use any more
        wire.emit(Died(place.name, f"{type(error).__name__}: {error}"))
        code = 1
    os._exit(code)


def _open(place: Place, spec: Spec, wire: _Wire) -> ShardWorker:
    opened = open_engine(spec, place.device, place.threads)
    decoders = LocalDecoders(spec.decoders, patience=spec.decode_patience, speech=opened.on_gpu and spec.options.vad)
    return ShardWorker(place.name, spec, opened, decoders, wire.emit)


def _listen(pipe: Connection, worker: ShardWorker) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = pipe.recv()
            if isinstance(message, Assignment):
                worker.give(message)
            else:
                worker.recall(message)
    os._exit(0)  # whatever is still at work has no one to work for


if __name__ == "__main__":
    main()
