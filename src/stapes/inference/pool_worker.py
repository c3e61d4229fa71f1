"""The process of one device of a `pool.PoolEngine`: it has an engine, and does with it what it is sent.

It is begun with the number of a socket (`main`). The first message is a callable that opens the engine; the process
ends when the socket is closed.
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from stapes.inference.ctc_recording import CTCOutput, CTCSound
from stapes.inference.engine import DecodeRequest, Engine
from stapes.inference.torch_ctc import TorchCTCEngine


class Facts(NamedTuple):
    """What the parent has to know of an engine."""

    slots: int
    encoder_batch: int
    dtype: str


@dataclass(eq=False)
class Sound:
    """A window that is known by a number. ``encoded``: what the engine made of it, once it has."""

    number: int
    window: np.ndarray | CTCSound
    again: bool
    encoded: Any = None


@dataclass(eq=False)
class Job:
    """An attempt at a window. ``slot``: where it is written, None before it has entered one."""

    number: int
    sound: Sound
    request: DecodeRequest
    slot: Any = None
    ended: bool = False


def packed(thing: Any) -> Any:
    """What a process is sent of a window, or of a text. That of a CTC model has tensors, for which PyTorch would have
    the processes share memory; they are sent as bytes."""
    if isinstance(thing, CTCOutput) and thing.emissions is not None:
        thing = thing._replace(emissions=thing.emissions.cpu())
    return pickle.dumps(thing) if isinstance(thing, CTCOutput | CTCSound) else thing


def unpacked(thing: Any) -> Any:
    """What was `packed`."""
    return pickle.loads(thing) if isinstance(thing, bytes) else thing  # noqa: S301 - our own


class Worker:
    """Encodes windows in batches, writes text for them in slots, and tells of those that have ended."""

    def __init__(self, engine: Engine, send: Callable[[tuple[Any, ...]], None]) -> None:
        self.engine, self._send = engine, send
        self._keeps_slots = not isinstance(engine, TorchCTCEngine)  # nobody asks about the text of one that has ended
        self._sounds: dict[int, Sound] = {}
        self._jobs: dict[int, Job] = {}
        self._waiting: list[Job] = []
        self._written: dict[Any, Job] = {}
        self._alignments: list[tuple[int, list[int], list[Any], list[Any]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do before the next message."""
        return bool(self._waiting or self._alignments or any(not job.ended for job in self._written.values()))

    def handle(self, kind: str, *values: Any) -> None:
        """Do what a message says, or note that it is to be done."""
        getattr(self, f"_on_{kind}")(*values)

    def _on_sound(self, number: int, window: Any, again: bool) -> None:
        self._sounds[number] = Sound(number, unpacked(window), again)

    def _on_forget(self, number: int) -> None:
        self._sounds.pop(number, None)

    def _on_job(self, number: int, sound: int, request: DecodeRequest) -> None:
        job = self._jobs[number] = Job(number, self._sounds[sound], request)
        self._waiting.append(job)

    def _on_language(self, question: int, sounds: Sequence[int]) -> None:
        heard = [self._sounds[number] for number in sounds]
        self._encode(heard)
        self._send(("answer", question, self.engine.detect_language([sound.encoded for sound in heard])))

    def _on_align(self, question: int, jobs: list[int], prompts: list[Any], texts: list[Any]) -> None:
        self._alignments.append((question, jobs, prompts, texts))

    def _on_release(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is None:
            return
        if job.slot is None:
            self._waiting.remove(job)
        elif self._keeps_slots or not job.ended:
            del self._written[job.slot]
            self.engine.release(job.slot)

    def _on_resize(self, slots: int) -> None:
        """Have so many slots: nothing is in any."""
        self.engine.clear()
        self.engine.slots = slots  # type: ignore[attr-defined]

    def work(self) -> None:
        """Write a few tokens in every slot; before that encode what waits, and let it enter free slots."""
        self._fill()
        if any(not job.ended for job in self._written.values()):
            self.engine.step(self.engine.steps_per_look)
        for slot, result in self.engine.harvest():
            job = self._written.get(slot)  # none: it was released since the device wrote it
            if job is not None and not job.ended:
                job.ended = True
                self._send(("ended", job.number, packed(result)))
                if not self._keeps_slots:
                    del self._written[slot]
                    self.engine.release(slot)
        self._align()

    def _fill(self) -> None:
        # A batch of windows is encoded ahead of the slots, so that one is there as soon as a slot is free.
        first = self._waiting[: self.engine.encoder_batch]
        self._encode([job.sound for job in first])
        while self._waiting and self._waiting[0].sound.encoded is not None:
            request = self._waiting[0].request
            kind = request.candidates, request.is_beam
            room = self.engine.free_slots(request)
            group: list[Job] = []
            for job in self._waiting[:room]:
                if job.sound.encoded is None or (job.request.candidates, job.request.is_beam) != kind:
                    break
                group.append(job)
            if not group:
                return
            slots = self.engine.admit([job.request for job in group], [job.sound.encoded for job in group])
            del self._waiting[: len(group)]
            for job, slot in zip(group, slots, strict=True):
                job.slot = slot
                self._written[slot] = job

    def _encode(self, sounds: Sequence[Sound]) -> None:
        batch = self.engine.encoder_batch
        for again in (False, True):
            new = [sound for sound in dict.fromkeys(sounds) if sound.encoded is None and sound.again == again]
            for first in range(0, len(new), batch):
                part = new[first : first + batch]
                for sound, encoded in zip(part, self._encoded(part, again), strict=True):
                    sound.encoded = encoded

    def _encoded(self, sounds: Sequence[Sound], again: bool) -> list[Any]:
        """Encode together; where memory does not suffice, by halves."""
        try:
            return self.engine.encode([sound.window for sound in sounds], again=again)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            if len(sounds) == 1:
                raise
        half = len(sounds) // 2
        return [*self._encoded(sounds[:half], again), *self._encoded(sounds[half:], again)]

    def _align(self) -> None:
        """Answer what was asked about texts whose windows have ended."""
        left = []
        for question, numbers, prompts, texts in self._alignments:
            jobs = [self._jobs[number] for number in numbers]
            if all(job.ended for job in jobs):
                found = self.engine.align([job.slot for job in jobs], prompts, texts)
                answer = [(each.scores.float().cpu().numpy(), each.probabilities) for each in found]
                self._send(("answer", question, answer))
            else:
                left.append((question, numbers, prompts, texts))
        self._alignments = left


def serve(connection: Connection) -> None:
    """Open an engine and work with it until the other side closes the connection."""
    opener: Callable[[], Engine] = connection.recv()
    try:
        engine: Any = opener()
    except Exception as error:
        connection.send(("failed", portable(error)))
        return
    connection.send(("ready", Facts(engine.slots, engine.encoder_batch, str(engine.dtype).removeprefix("torch."))))
    # Messages are taken as they come, so that the other side never waits for an engine that is at work.
    inbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    worker = Worker(engine, connection.send)
    while True:
        try:
            message = inbox.get(block=not worker.is_busy)
        except queue.Empty:
            message = ()
        try:
            if message is None:
                return
            if message:
                worker.handle(*message)
            else:
                worker.work()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            connection.send(("failed", portable(error)))
            return


def _read(connection: Connection, inbox: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)


def portable(error: Exception) -> Exception:
    """An error that can be sent to another process; where it cannot itself, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """All that the process does."""
    with Connection(int(sys.argv[1])) as connection, suppress(BrokenPipeError, ConnectionResetError, EOFError):
        serve(connection)
