"""The engine process: it holds the models, runs calls in threads of their own, and tells the web process of them.

It is begun with the number of a socket. All work comes over it as messages (`wire`), and when it closes the process
ends. What a kind of call does is in a module of its own, named in `KINDS`; its ``run(call, recognizer, message)`` gets
a `WorkerCall`.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import stapes
from stapes.devices.backend import resolve
from stapes.errors import CancelledError, StapesError, UsageError
from stapes.options import TranscribeOptions
from stapes.progress import Cancellation
from stapes.recognizer import Recognizer
from stapes.serving.settings import SWITCH_SECONDS, USUAL_BATCH
from stapes.serving.watched import Gate, Meter, MeteredEngine
from stapes.serving.wire import Message, Wire

KINDS = {"transcribe": "stapes.serving.transcribing", "live": "stapes.serving.live"}
"""Kinds of calls that need a model, and the modules that run them."""

Load = Callable[[str, dict[str, Any]], Recognizer]
MakeGate = Callable[[int, float], Gate]

_STATS_SECONDS = 0.5


class WorkerCall:
    """A call as the engine process sees it."""

    def __init__(self, wire: Wire, number: int, gate: Gate) -> None:
        self.number, self.gate = number, gate
        self.cancellation = Cancellation()
        """Cancelled when the web process wants no more of this."""
        self._wire = wire
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Tell the web process something; from any thread, without waiting."""
        self._wire.post({**message, "call": self.number}, payload)

    def receive(self, timeout: float | None = None) -> Message | None:
        """What the web process says next; None when there is nothing more. Raises queue.Empty after ``timeout``
        seconds, CancelledError when the call was cancelled."""
        message = self._inbox.get(timeout=timeout)
        if self.cancellation.is_cancelled:
            raise CancelledError("the client has left this call")
        return message

    def deliver(self, message: Message | None) -> None:
        """Put something into the inbox; None ends it."""
        self._inbox.put(message)

    def cancel(self) -> None:
        """Give it up."""
        self.cancellation.cancel()
        self._inbox.put(None)


@dataclass
class _Loaded:
    """A model and who uses it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    recognizer: Recognizer | None = None
    users: int = 0
    used: float = 0.0


class Models:
    """The models of this process: loaded when first asked for, let go after ``idle_timeout`` seconds without use."""

    def __init__(self, settings: dict[str, Any], meter: Meter, load: Load) -> None:
        self._settings, self._meter, self._load = settings, meter, load
        self._lock = threading.Lock()
        self._models: dict[str, _Loaded] = {}

    @contextmanager
    def using(self, name: str) -> Iterator[Recognizer]:
        """A model, which is not let go until the block ends."""
        with self._lock:
            loaded = self._models.setdefault(name, _Loaded())
            loaded.users += 1
        try:
            with loaded.lock:
                if loaded.recognizer is None:
                    recognizer = self._load(name, self._settings)
                    recognizer.warm_up()
                    _settle()
                    loaded.recognizer = metered(recognizer, self._meter)
            yield loaded.recognizer
        finally:
            with self._lock:
                loaded.users -= 1
                loaded.used = time.monotonic()

    @contextmanager
    def borrowed(self) -> Iterator[Recognizer | None]:
        """Some model that is there, without counting as its use; None where there is none."""
        with self._lock:
            loaded = next((each for each in self._models.values() if each.recognizer is not None), None)
            if loaded is not None:
                loaded.users += 1
        try:
            yield None if loaded is None else loaded.recognizer
        finally:
            with self._lock:
                if loaded is not None:
                    loaded.users -= 1

    def loaded(self) -> dict[str, dict[str, Any]]:
        """The models that are there, and what is worth knowing of each."""
        with self._lock:
            there = [(name, each.recognizer) for name, each in self._models.items() if each.recognizer is not None]
        return {name: _facts(recognizer) for name, recognizer in there}

    def let_go_of_idle(self) -> None:
        """Close what nobody has used for long."""
        limit = self._settings["idle_timeout"]
        if not limit:
            return
        with self._lock:
            idle = [
                name
                for name, each in self._models.items()
                if each.recognizer is not None and not each.users and time.monotonic() - each.used > limit
            ]
            gone = [self._models.pop(name).recognizer for name in idle]
        for recognizer in gone:
            assert recognizer is not None
            recognizer.close()
        if gone:
            gc.unfreeze()
            _settle()


def _settle() -> None:
    """What is there now will stay: the garbage collector, which holds up all threads, need not look at it again."""
    gc.collect()
    gc.freeze()


def load_model(name: str, settings: dict[str, Any]) -> Recognizer:
    """Load a model that is on this machine."""
    return stapes.load(
        name,
        device=settings["device"],
        precision=settings["precision"],
        max_vram=settings["max_vram"],
        threads=settings["threads"],
        model_dir=settings["model_dir"],
        batch_size=settings["max_batch"] or (None if resolve(settings["device"]).backend == "cpu" else USUAL_BATCH),
        offline=True,  # a request never downloads
        adapter=settings["adapters"].get(name),
    )


def metered(recognizer: Recognizer, meter: Meter) -> Recognizer:
    """The same model, whose engine is counted at work."""
    family = recognizer.family
    family.engine = MeteredEngine(family.engine, meter)
    return Recognizer(family, recognizer.device)


def _facts(recognizer: Recognizer) -> dict[str, Any]:
    return {
        "parameters": recognizer.family.parameters,
        "multilingual": bool(getattr(recognizer.tokenizer, "is_multilingual", False)),
        "device": str(recognizer.device.torch),
        "max_batch": recognizer.engine.slots,
    }


class Worker:
    """The process: takes messages, runs calls."""

    def __init__(self, wire: Wire, settings: dict[str, Any], load: Load, make_gate: MakeGate) -> None:
        self._wire, self._settings = wire, settings
        self._meter = Meter()
        self._models = Models(settings, self._meter, load)
        self._gate = make_gate(settings["max_batch"] or USUAL_BATCH, settings["max_wait_ms"] / 1000)
        self._calls: dict[int, WorkerCall] = {}

    def run(self) -> None:
        """Until the web process closes the socket."""
        threading.Thread(target=self._preload, name="stapes-preload", daemon=True).start()
        threading.Thread(target=self._report, name="stapes-stats", daemon=True).start()
        while (received := self._wire.receive()) is not None:
            message, payload = received
            number = message["call"]
            call = self._calls.get(number)
            if message["type"] == "open":
                call = self._calls[number] = WorkerCall(self._wire, number, self._gate)
                threading.Thread(target=self._serve, args=(call, message), name=f"call-{number}", daemon=True).start()
            elif call is None:
                continue  # it is over already
            elif message["type"] == "cancel":
                call.cancel()
            elif message["type"] == "end":
                call.deliver(None)
            else:
                call.deliver((message, payload))

    def _serve(self, call: WorkerCall, message: dict[str, Any]) -> None:
        end: dict[str, Any] = {"type": "end"}
        try:
            if message["kind"] == "canary":
                self._canary()
            else:
                module = importlib.import_module(KINDS[message["kind"]])
                with self._models.using(message["model"]) as recognizer:
                    module.run(call, recognizer, message)
        except CancelledError:
            pass
        except StapesError as error:
            end = {"type": "failed", "status": error.http_status, "message": str(error)}
        except Exception as error:  # its client must hear of it, and no other call must suffer
            traceback.print_exc()
            end = {"type": "failed", "status": 500, "message": f"The engine failed ({type(error).__name__})"}
        del self._calls[call.number]
        call.send(end)

    def _preload(self) -> None:
        for name in self._settings["preload"]:
            try:
                with self._models.using(name):
                    pass
            except Exception as error:  # whatever it is, the process is of no use without it
                self._wire.post({"type": "fatal", "message": str(error) or type(error).__name__})
                return
        self._wire.post({"type": "ready", "models": self._models.loaded()})

    def _canary(self) -> None:
        """Transcribe a second of silence, without looking for speech in it: the device has to work for it."""
        with self._models.borrowed() as recognizer:
            if recognizer is None:
                return
            options = TranscribeOptions(vad=False, temperature_increment_on_fallback=None)
            recognizer.transcribe(np.zeros(16_000, np.float32), options, sample_rate=16_000)

    def _report(self) -> None:
        before: dict[str, Any] = {}
        while True:
            now = {"type": "stats", "models": self._models.loaded(), **self._meter.to_dict()}
            if now != before:
                self._wire.post(now)
                before = now
            time.sleep(_STATS_SECONDS)
            self._models.let_go_of_idle()


def main(load: Load = load_model, make_gate: MakeGate = Gate) -> None:
    """Entry point: ``python -m stapes.serving.engine_worker FD``.

    For measuring: load models otherwise (from a name and the settings), and let requests begin otherwise.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the web process decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.setswitchinterval(SWITCH_SECONDS)
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    first = wire.receive()
    if first is None:
        return
    message, _ = first
    if message.get("type") != "start":
        raise UsageError("the engine process is begun by `stapes serve`, not by hand")
    Worker(wire, message["settings"], load, make_gate).run()
    os._exit(0)  # whatever is still at work has no one to work for


if __name__ == "__main__":
    from stapes.serving import engine_worker  # the modules of the calls know it, and what it raises, by this name

    engine_worker.main()
