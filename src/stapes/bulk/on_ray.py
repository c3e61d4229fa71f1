"""Workers on a Ray cluster: engines as actors on its GPUs, recordings decoded by tasks on whatever processors are free.

The nodes need this package, and find the recordings under the same paths or URLs. Losing an actor, a node or a decoder
costs what it had in work: the driver gives that out again, and Ray finds another place.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stapes.bulk.decoders import Feed, Lost
from stapes.bulk.engine import ShardWorker, open_engine
from stapes.bulk.executor import Assignment, Died, Done, Event, Ready
from stapes.bulk.spec import Spec
from stapes.errors import AudioError, DeviceError, StapesError, UsageError

_POLL = 2.0
"""Seconds that an actor may keep the driver waiting for events."""

_GATHER = 0.1
"""Seconds in which an actor gathers further events before it answers."""

_GROUP_SECONDS = 60.0
"""Short recordings travel together, some 4 MB at a time: a task for each would cost more than decoding it."""

_STREAMED = 4
"""Pieces of a long recording, of ten seconds each, that may wait in the cluster's memory."""

_LONGEST_PAUSE = 60.0
_MOST_ATTEMPTS = 6


def package() -> Any:
    """Ray. Raises UsageError without it."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("--ray needs Ray: pip install 'stapes[ray]', here and on all nodes") from None
    return ray


class RayExecutor:
    """Actors of a cluster. address: of the cluster; ``auto`` finds the one that this machine is a part of.

    workers: how many; by default one on each GPU of the cluster, or one on each node where there are none. Raises
    UsageError, DeviceError.
    """

    def __init__(self, spec: Spec, address: str, *, device: str, workers: int | None, threads: int | None) -> None:
        self._ray, self._spec, self._threads = package(), spec, threads
        self._connect(address)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        count = round(self._ray.cluster_resources().get("GPU", 0))
        self._on_gpu = device.strip().lower() != "cpu" and count > 0
        if not self._on_gpu and device.strip().lower() not in ("auto", "cpu"):
            raise DeviceError(f"--device {device}: no node of the cluster at {address} has a GPU; use --device cpu")
        names = range(workers or (count if self._on_gpu else len(nodes)))
        self._slots = {f"ray-{number}": _Slot() for number in names}
        remote = self._ray.remote(_Engine)
        processors = 1 if self._on_gpu else max(1, threads or 1)
        self._actor = remote.options(
            num_gpus=1 if self._on_gpu else 0,
            num_cpus=processors,
            max_concurrency=4,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )

    def _connect(self, address: str) -> None:
        ray = self._ray
        if ray.is_initialized():
            return
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise UsageError(f"--ray {address}: there is no cluster ({error}): start one with `ray start`") from None

    @property
    def workers(self) -> Sequence[str]:
        """Their names."""
        return list(self._slots)

    def start(self) -> None:
        """Begin all actors."""
        for name, slot in self._slots.items():
            self._begin(name, slot)

    def _begin(self, name: str, slot: _Slot) -> None:
        device = "cuda:0" if self._on_gpu else "cpu"
        slot.actor = self._actor.remote(name, self._spec, device, self._threads, self._on_gpu)
        slot.poll = slot.actor.events.remote()

    def submit(self, worker: str, assignment: Assignment) -> None:
        """Give an assignment to a worker."""
        self._call(worker, "give", assignment)

    def recall(self, worker: str, number: int) -> None:
        """Ask for an assignment back."""
        self._call(worker, "recall", number)

    def _call(self, worker: str, method: str, argument: Any) -> None:
        actor = self._slots[worker].actor
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):  # it has died: its events will say so
                getattr(actor, method).remote(argument)

    def events(self, timeout: float) -> Sequence[Event]:
        """What has happened, waiting at most so many seconds for something."""
        now = time.monotonic()
        for name, slot in self._slots.items():
            if slot.actor is None and not slot.given_up and slot.begin_at <= now:
                self._begin(name, slot)
        polls = {slot.poll: (name, slot) for name, slot in self._slots.items() if slot.actor is not None}
        if not polls:
            time.sleep(min(timeout, 0.1))
            return []
        self._ray.wait(list(polls), num_returns=1, timeout=timeout)
        answered, _ = self._ray.wait(list(polls), num_returns=len(polls), timeout=0)
        found: list[Event] = []
        for poll in answered:
            name, slot = polls[poll]
            try:
                events: list[Event] = self._ray.get(poll)
                slot.poll = slot.actor.events.remote()
            except self._ray.exceptions.RayError as error:
                found.append(self._bury(name, slot, Died(name, _reason(error))))
                continue
            for event in events:
                if isinstance(event, Ready):
                    slot.attempts = 0
                if isinstance(event, Died):
                    found.append(self._bury(name, slot, event))
                    break
                found.append(event)
        return found

    def _bury(self, name: str, slot: _Slot, died: Died) -> Died:
        actor, slot.actor, slot.poll = slot.actor, None, None
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor)
        slot.attempts += 1
        slot.begin_at = time.monotonic() + min(_LONGEST_PAUSE, 0.5 * 2**slot.attempts)
        slot.given_up = died.hopeless or slot.attempts >= _MOST_ATTEMPTS
        return Died(name, died.reason, hopeless=slot.given_up, exit_code=died.exit_code)

    def restart(self, worker: str) -> None:
        """End a worker that does nothing any more."""
        actor = self._slots[worker].actor
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        """End all actors, at once."""
        for slot in self._slots.values():
            slot.given_up = True
            if slot.actor is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.kill(slot.actor)
            slot.actor = slot.poll = None


class _Slot:
    """A worker and its successors."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.poll: Any = None
        self.attempts = 0
        self.begin_at = 0.0
        self.given_up = False


class _Engine:
    """The actor: a `ShardWorker` in a thread, and its events for whoever asks."""

    def __init__(self, name: str, spec: Spec, device: str, threads: int | None, on_gpu: bool) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._worker: ShardWorker | None = None
        arguments = (name, spec, device, threads, on_gpu)
        threading.Thread(target=self._run, args=arguments, daemon=True, name="engine").start()

    def _run(self, name: str, spec: Spec, device: str, threads: int | None, on_gpu: bool) -> None:
        try:
            opened = open_engine(spec, device, threads)
            decoders = RayDecoders(
                spec.decoders,
                patience=spec.decode_patience,
                speech=opened.on_gpu and spec.options.vad,
                processors=1.0 if on_gpu else 0.0,
            )
            self._worker = ShardWorker(name, spec, opened, decoders, self._events.put)
            self._events.put(self._worker.ready())
            self._worker.run()
        except StapesError as error:
            self._events.put(Died(name, str(error), hopeless=True, exit_code=error.exit_code))
        except BaseException as error:  # whatever it is, the actor is of no use any more
            self._events.put(Died(name, f"{type(error).__name__}: {error}"))

    def give(self, assignment: Assignment) -> None:
        """Take an assignment. The driver gives none before it has heard that the worker is ready."""
        assert self._worker is not None
        self._worker.give(assignment)

    def recall(self, number: int) -> None:
        """Give an assignment back, unless it was begun."""
        assert self._worker is not None
        self._worker.recall(number)

    def events(self) -> list[Event]:
        """What has happened since the last call; waits a while for something."""
        found: list[Event] = []
        deadline = time.monotonic() + _POLL
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                found.append(event)
                # What somebody waits for goes at once.
                soon = 0.0 if isinstance(event, Done | Ready | Died) else _GATHER
                deadline = min(deadline, time.monotonic() + soon)
        return found


def _decode_group(requests: Sequence[dict[str, Any]], speech: bool) -> list[list[np.ndarray]]:
    """The task: all messages of a few short recordings, as bytes (n,) each."""
    decoder = _decoder(speech)
    return [[_as_array(message) for message in decoder.answer(request)] for request in requests]


def _decode_stream(request: dict[str, Any], speech: bool) -> Iterator[np.ndarray]:
    """The task for a long recording: its messages one after another."""
    for message in _decoder(speech).answer(request):  # Ray sends into the generator, which a `map` would not take
        yield _as_array(message)


def _as_array(message: bytes) -> np.ndarray:
    return np.frombuffer(message, np.uint8)  # what Ray hands on without a copy


_kept: dict[bool, Any] = {}


def _decoder(speech: bool) -> Any:
    """The decoder of this process, which lives from task to task."""
    if speech not in _kept:
        from stapes.bulk.decode_worker import Decoder

        _kept[speech] = Decoder(speech=speech)
    return _kept[speech]


class RayDecoders:
    """Tasks of the cluster, at most so many at a time; a process of Ray that dies costs the recordings in its task."""

    group_seconds = _GROUP_SECONDS

    def __init__(self, count: int, *, patience: float, speech: bool, processors: float) -> None:
        self.speech = speech
        self._ray, self._patience = package(), patience
        self._free = threading.Semaphore(count)
        options = {"num_cpus": processors, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._group = self._ray.remote(_decode_group).options(**options)
        self._stream = self._ray.remote(_decode_stream).options(
            **options, num_returns="streaming", _generator_backpressure_num_objects=_STREAMED
        )

    def begin(self, requests: Sequence[dict[str, Any]], *, wait: bool) -> Sequence[Feed] | None:
        """Begin with recordings."""
        if not self._free.acquire(blocking=wait):
            return None
        try:
            seconds = sum(request["expected"] for request in requests)
            if len(requests) > 1 or seconds <= self.group_seconds:
                reference = self._group.remote(list(requests), self.speech)
                group = _Group(self._ray, reference, self._patience + seconds, self._free.release)
                return [_GroupFeed(group, place) for place in range(len(requests))]
            stream = self._stream.remote(requests[0], self.speech)
            return [_StreamFeed(self._ray, stream, self._patience, self._free.release)]
        except self._ray.exceptions.RayError as error:
            self._free.release()
            raise AudioError(f"no decoder could be started ({_reason(error)}): run the same command again") from None

    def close(self) -> None:
        """Tasks end with the actor that began them."""


class _Group:
    """The answer for several recordings, fetched by whoever reads the first of them."""

    def __init__(self, ray: Any, reference: Any, patience: float, release: Callable[[], None]) -> None:
        self._ray, self._reference, self._patience, self._release = ray, reference, patience, release
        self._lock = threading.Lock()
        self._messages: list[list[np.ndarray]] | None = None
        self._lost: Lost | None = None

    def messages(self, place: int) -> list[np.ndarray]:
        """Those of one recording. Raises Lost."""
        with self._lock:
            if self._reference is not None:
                self._fetch()
            if self._lost is not None:
                raise self._lost
            assert self._messages is not None
            return self._messages[place]

    def _fetch(self) -> None:
        ray = self._ray
        try:
            self._messages = ray.get(self._reference, timeout=self._patience)
        except ray.exceptions.GetTimeoutError:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(self._reference, force=True)
            self._lost = Lost("decoder hung", f"kept its decoder busy for {self._patience:g} s")
        except ray.exceptions.RayError as error:
            self._lost = Lost("decoder died", f"ended its decoder ({_reason(error)})")
        finally:
            self._reference = None
            self._release()


class _GroupFeed:
    """One recording of a group."""

    def __init__(self, group: _Group, place: int) -> None:
        self._group, self._place = group, place
        self._messages: Iterator[np.ndarray] | None = None

    def get(self) -> memoryview:
        """The next message. Raises Lost."""
        if self._messages is None:
            self._messages = iter(self._group.messages(self._place))
        return next(self._messages).data

    def close(self) -> None:
        """There is nothing to end: the others of the group may be wanted."""


class _StreamFeed:
    """A long recording."""

    def __init__(self, ray: Any, stream: Any, patience: float, release: Callable[[], None]) -> None:
        self._ray, self._stream, self._patience, self._release = ray, stream, patience, release
        self._is_open = True

    def get(self) -> memoryview:
        """The next message. Raises Lost."""
        ray = self._ray
        try:
            ready, _ = ray.wait([self._stream], timeout=self._patience)
            if not ready:
                raise Lost("decoder hung", f"kept its decoder busy for {self._patience:g} s without a sample")
            return ray.get(next(self._stream)).data
        except ray.exceptions.RayError as error:
            raise Lost("decoder died", f"ended its decoder ({_reason(error)})") from None

    def close(self) -> None:
        """No more is wanted."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(self._ray.exceptions.RayError, TypeError, ValueError):
                self._ray.cancel(self._stream, force=True)
            self._release()


def _reason(error: Exception) -> str:
    """The kind of an error of Ray and what it says first; of a task that raised, what it raised."""
    error = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
