"""One engine on several devices: a process for each (`pool_worker`), which windows are sent to.

What a CTC model says to a window is all there is to know of it: `PoolCTCEngine` searches here.

A window goes to the device with the fewest seconds of sound outstanding. It stays known here until its text has been
taken, so that the windows of a device that dies are run again on the others; an attempt depends on nothing but itself,
so the texts are the same.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import numpy as np
import torch

from stapes.audio.features import SAMPLE_RATE
from stapes.errors import DeviceError
from stapes.inference.ctc_recording import CTCSound
from stapes.inference.ctc_search import search_together
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult, Engine
from stapes.inference.pool_worker import Facts, packed, unpacked

_LOG = logging.getLogger(__name__)

_LOOK_SECONDS = 0.01
"""How long a step waits for a text to end, before the scheduler may look for other things to do."""

_PATIENCE_SECONDS = 5.0
"""How long a process may take to end by itself."""


@dataclass(eq=False)
class PoolSound:
    """A window, and the device that has it, if any."""

    number: int
    window: np.ndarray | CTCSound
    again: bool
    device: PoolDevice | None = None

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.window.pcm if isinstance(self.window, CTCSound) else self.window) / SAMPLE_RATE


@dataclass(eq=False)
class PoolSlot:
    """An attempt at a window."""

    number: int
    sound: PoolSound
    request: DecodeRequest
    device: PoolDevice
    told: bool = False
    """The scheduler has had its result."""

    @property
    def kind(self) -> tuple[int, bool]:
        """Windows of one kind share a lane of slots."""
        return self.request.candidates, self.request.is_beam


@dataclass(eq=False)
class PoolDevice:
    """One device: its process, and what it is at. ``seconds``: sound whose texts it has written."""

    name: str
    process: subprocess.Popen[bytes]
    connection: Connection
    facts: Facts | None = None
    slots: dict[int, PoolSlot] = field(default_factory=dict)
    seconds: float = 0.0
    lost: bool = False

    @property
    def outstanding(self) -> float:
        """Seconds of sound that it has yet to write a text for."""
        return sum(slot.sound.seconds for slot in self.slots.values() if not slot.told)


class PoolEngine:
    """Implements ``engine.Engine``.

    openers: device → a callable that opens an engine there; it is called in the process of the device, so it must be
    one that can be pickled. Raises what an opener raises, DeviceError where a process ends before its engine is there.
    """

    steps_per_look = 1
    enqueues = True
    _aligns_there: ClassVar[bool] = True
    """Devices may be asked about texts that they have written."""

    def __init__(self, openers: Sequence[tuple[str, Callable[[], Engine]]]) -> None:
        self.devices: list[PoolDevice] = []
        self._numbers = count()
        self._harvested: list[tuple[PoolSlot, DecodeResult]] = []
        self._answers: dict[int, Any] = {}
        # Filled by the garbage collector, in any thread and in the middle of anything.
        self._forgotten: deque[tuple[PoolDevice, int]] = deque()
        self._end = weakref.finalize(self, _close, self.devices)
        try:
            for name, opener in openers:
                self.devices.append(_begin(name, opener))
            for device in self.devices:
                device.facts = _ready(device)
        except BaseException:
            self.close()
            raise
        facts = [device.facts for device in self.devices if device.facts is not None]
        self._rows = min(fact.slots for fact in facts)
        self._batch = min(fact.encoder_batch for fact in facts)
        self.dtype: torch.dtype = getattr(torch, facts[0].dtype)

    # What the scheduler asks.

    @property
    def slots(self) -> int:
        """Windows decoded together, on all devices that are left."""
        return self._rows * len(self._living())

    @slots.setter
    def slots(self, slots: int) -> None:
        living = self._living()
        self._rows = max(1, -(-slots // max(1, len(living))))
        self._batch = self._batch_of(self._rows)
        for device in living:
            self._send(device, "resize", self._rows)

    @property
    def encoder_batch(self) -> int:
        """Windows that are best handed over together."""
        return self._batch * max(1, len(self._living()))

    def _batch_of(self, rows: int) -> int:
        """Windows that a device with so many slots encodes together."""
        return self._batch

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of sound that each device has written texts for; devices of one name are numbered."""
        names = [device.name for device in self.devices]
        labels = [f"{name}#{index}" if names.count(name) > 1 else name for index, name in enumerate(names)]
        return dict(zip(labels, (device.seconds for device in self.devices), strict=True))

    def encode(self, windows: Sequence[np.ndarray | CTCSound], *, again: bool = False) -> list[PoolSound]:
        """Windows that a device encodes once they have been given to it."""
        return [PoolSound(next(self._numbers), window, again) for window in windows]

    def detect_language(self, encoded: Sequence[PoolSound]) -> list[dict[str, float]]:
        """As `Engine.detect_language`, on all devices at once."""
        return self._ask(list(encoded), self._place, lambda group: ("language", [sound.number for sound in group]))

    def free_slots(self, request: DecodeRequest) -> int:
        """Windows that a device would take now: one batch more than it has slots, which it encodes meanwhile."""
        kind = request.candidates, request.is_beam
        rows = max(1, self._rows // request.candidates) + self._batch
        taken = sum(slot.kind == kind for device in self._living() for slot in device.slots.values())
        return max(0, rows * len(self._living()) - taken)

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[PoolSound]) -> list[PoolSlot]:
        """Give windows to devices."""
        out = []
        for request, sound in zip(requests, encoded, strict=True):
            slot = PoolSlot(next(self._numbers), sound, request, self._place(sound))
            self._assign(slot)
            out.append(slot)
        return out

    def step(self, count: int) -> None:
        """Wait a moment for a text to end; the devices write by themselves."""
        if not self._harvested:
            self._receive(_LOOK_SECONDS)

    def harvest(self) -> list[tuple[PoolSlot, DecodeResult]]:
        """The texts that have ended."""
        self._receive(0.0)
        found, self._harvested = self._harvested, []
        return found

    def align(
        self, slots: Sequence[PoolSlot], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        """As `Engine.align`, on all devices at once. A text whose device has died is written again before."""
        wanted = dict(zip(slots, zip(prompts, texts, strict=True), strict=True))
        found = self._ask(
            list(slots),
            lambda slot: slot.device,
            lambda group: (
                "align",
                [slot.number for slot in group],
                [wanted[slot][0] for slot in group],
                [wanted[slot][1] for slot in group],
            ),
        )
        return [Alignment(torch.from_numpy(scores), probabilities) for scores, probabilities in found]

    def release(self, slot: PoolSlot) -> None:
        """Free a slot, ended or not."""
        if slot.device.slots.pop(slot.number, None) is not None:
            self._send(slot.device, "release", slot.number)

    def clear(self) -> None:
        """Let go of all caches."""
        for device in self._living():
            self._send(device, "resize", self._rows)

    def close(self) -> None:
        """End all processes."""
        self._end()

    # Devices.

    def _living(self) -> list[PoolDevice]:
        return [device for device in self.devices if not device.lost]

    def _place(self, sound: PoolSound) -> PoolDevice:
        """The device of a window: the one that has encoded it, or else the one with the least to do."""
        if sound.device is None or sound.device.lost:
            device = choose(self._living())
            sound.device = device
            self._send(device, "sound", sound.number, packed(sound.window), sound.again)
            weakref.finalize(sound, self._forgotten.append, (device, sound.number)).atexit = False
        return sound.device

    def _assign(self, slot: PoolSlot) -> None:
        slot.device.slots[slot.number] = slot
        self._send(slot.device, "job", slot.number, slot.sound.number, slot.request)

    def _send(self, device: PoolDevice, *message: Any) -> None:
        """Send a message; one that is lost with its device is made up for when that is noticed."""
        try:
            device.connection.send(message)
        except OSError:
            _LOG.debug("%s takes no messages any more", device.name)

    def _receive(self, seconds: float) -> None:
        """Take what the devices send, waiting so long for the first message."""
        living = {device.connection: device for device in self._living()}
        if not living:
            raise DeviceError(
                f"--device {','.join(device.name for device in self.devices)}: the processes of all devices have ended"
            )
        while self._forgotten:
            device, number = self._forgotten.popleft()
            if not device.lost:
                self._send(device, "forget", number)
        lost = []
        for connection in wait(list(living), seconds):
            assert isinstance(connection, Connection)
            try:
                while True:
                    self._take(living[connection], *connection.recv())
                    if not connection.poll():
                        break
            except (EOFError, OSError):
                lost.append(living[connection])
        for device in lost:
            self._lose(device)

    def _take(self, device: PoolDevice, kind: str, *values: Any) -> None:
        if kind == "failed":
            raise values[0]
        if kind == "answer":
            self._answers[values[0]] = values[1]
            return
        number, result = values
        slot = device.slots.get(number)
        if slot is not None and not slot.told:  # one that was released meanwhile is nobody's
            slot.told = True
            device.seconds += slot.sound.seconds
            self._harvested.append((slot, unpacked(result)))

    def _lose(self, device: PoolDevice) -> None:
        """A process has ended: run its windows on the others."""
        device.lost = True
        device.connection.close()
        code = device.process.wait()
        slots = list(device.slots.values())
        device.slots.clear()
        _LOG.warning(
            "%s: its process has ended (exit code %s); its %d windows are run again elsewhere",
            device.name,
            code,
            sum(not slot.told for slot in slots),
        )
        if not self._living():
            return  # the next look says so
        for slot in slots:
            if self._aligns_there or not slot.told:
                slot.device = self._place(slot.sound)
                self._assign(slot)

    def _ask(
        self, things: list[Any], place: Callable[[Any], PoolDevice], message: Callable[[list[Any]], tuple[Any, ...]]
    ) -> list[Any]:
        """Ask the devices that things are on, and wait for all answers; again where a device dies meanwhile."""
        answers: dict[Any, Any] = {}
        asked: dict[int, tuple[PoolDevice, list[Any]]] = {}
        while len(answers) < len(things):
            pending = {thing for device, group in asked.values() if not device.lost for thing in group}
            groups: dict[PoolDevice, list[Any]] = {}
            for thing in things:
                if thing not in answers and thing not in pending:
                    groups.setdefault(place(thing), []).append(thing)
            for device, group in groups.items():
                question = next(self._numbers)
                kind, *values = message(group)
                asked[question] = device, group
                self._send(device, kind, question, *values)
            self._receive(_LOOK_SECONDS)
            for question in [question for question in asked if question in self._answers]:
                answers |= dict(zip(asked.pop(question)[1], self._answers.pop(question), strict=True))
        return [answers[thing] for thing in things]


class PoolCTCEngine(PoolEngine):
    """A `PoolEngine` of CTC models, for what `TorchCTCEngine` is on one device."""

    _aligns_there = False

    def _batch_of(self, rows: int) -> int:
        return rows

    def detect_language(self, encoded: Sequence[PoolSound]) -> list[dict[str, float]]:
        """Not asked: the language of a CTC model is known or does not matter."""
        raise NotImplementedError

    def align(self, slots: Sequence[Any], prompts: Sequence[Any], texts: Sequence[Any]) -> list[Any]:
        """As `TorchCTCEngine.align`, in this process."""
        return search_together(prompts, texts)


def choose(devices: Sequence[PoolDevice]) -> PoolDevice:
    """The device that a window goes to: with the fewest seconds outstanding; of several, the one that has done least.

    Raises DeviceError where none is left.
    """
    if not devices:
        raise DeviceError("the processes of all devices have ended: look for the reason in what they printed")
    return min(devices, key=lambda device: (device.outstanding, device.seconds))


def _begin(name: str, opener: Callable[[], Engine]) -> PoolDevice:
    here, there = Pipe()
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", "from stapes.inference.pool_worker import main; main()", str(there.fileno())],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt at the terminal is this process's business
    )
    there.close()
    here.send(opener)
    return PoolDevice(name, process, here)


def _ready(device: PoolDevice) -> Facts:
    try:
        kind, value = device.connection.recv()
    except EOFError:
        code = device.process.wait()
        raise DeviceError(
            f"--device {device.name}: its process ended (exit code {code}) before the model was loaded: try it alone"
        ) from None
    if kind == "failed":
        raise value
    return value


def _close(devices: list[PoolDevice]) -> None:
    for device in devices:
        device.lost = True
        device.connection.close()
    for device in devices:
        try:
            device.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:  # in the middle of something long
            device.process.kill()
            device.process.wait()
