"""What a worker does with its assignments: a recogniser that never runs dry, and rows for each assignment.

All assignments run through one call of ``transcribe_many``: the end of one and the beginning of the next share batches.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from stapes.audio.decode import AudioSource
from stapes.bulk.decoders import Decoders, Source, begin_together
from stapes.bulk.executor import Assignment, Done, Event, Heard, Kept, Progress, Ready, Returned
from stapes.bulk.rows import make_row, pack_rows
from stapes.bulk.spec import Spec
from stapes.options import TranscribeOptions
from stapes.progress import Progress as Listener
from stapes.progress import Silent
from stapes.transcript import Transcript

_BEAT = 0.25
"""Seconds between two reports of how far an assignment is."""

_WINDOW_SECONDS = 30.0


class Transcriber(Protocol):
    """What an engine has to be able to do: `stapes.Recognizer` is one."""

    def transcribe_many(
        self, audio: Iterable[AudioSource], options: TranscribeOptions, *, progress: Listener
    ) -> Iterator[Transcript]:
        """Transcribe recordings together, in any order; ``path`` is the source's name."""
        ...


@dataclass(frozen=True)
class Opened:
    """An engine. ``slots``: windows that it decodes together; ``on_gpu``: whether its process should do little else."""

    transcriber: Transcriber
    slots: int
    on_gpu: bool
    facts: dict[str, Any] = field(default_factory=dict)


def open_engine(spec: Spec, device: str, threads: int | None) -> Opened:
    """Open what ``spec.engine`` names. Raises StapesError."""
    module, _, function = spec.engine.partition(":")
    return getattr(importlib.import_module(module), function)(spec, device, threads)


def open_recognizer(spec: Spec, device: str, threads: int | None) -> Opened:
    """Load the model. Raises ModelError where its files are not those that the job was begun with."""
    import stapes
    from stapes.bulk import model
    from stapes.errors import ModelError

    revision = model.revision(model.locate(spec.model, spec.settings, Silent()))
    if revision != spec.revision:
        raise ModelError(
            f"{spec.model} is another model here ({revision}) than where the job was begun ({spec.revision}): give all "
            "machines the same files"
        )
    options = spec.options
    recognizer = stapes.load(
        spec.model,
        device=device,
        threads=threads,
        task=options.task,
        language=options.language,
        batch_size=options.batch_size,
        **spec.settings,
    )
    if options.language is not None:
        recognizer.check_language(options.language)
    where = recognizer.device
    facts = {"device": where.name, "model": recognizer.name, "slots": recognizer.engine.slots}
    return Opened(recognizer, recognizer.engine.slots, where.backend != "cpu", facts)  # pyright: ignore[reportArgumentType]


class _Heard(Silent):
    """Counts the seconds that a recogniser reports."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        """So much more is done."""
        self.seconds += seconds


@dataclass(eq=False)
class _Running:
    """An assignment in work."""

    assignment: Assignment
    begun: int = 0
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    news: list[tuple[int, float, str | None]] = field(default_factory=list)
    told: int = 0


class ShardWorker:
    """Runs assignments; ``give``, ``recall`` and ``stop`` may be called from any thread, ``run`` does the work."""

    def __init__(
        self, name: str, spec: Spec, opened: Opened, decoders: Decoders, emit: Callable[[Event], None]
    ) -> None:
        self.name, self._spec, self._decoders, self._emit = name, spec, decoders, emit
        self._opened = opened
        self._changed = threading.Condition()
        self._waiting: deque[Assignment] = deque()
        self._running: dict[int, _Running] = {}
        self._again: deque[tuple[_Running, int]] = deque()  # items whose decoder was lost once
        self._lost_once: set[tuple[int, int]] = set()
        self._sources: dict[str, tuple[_Running, int, Source]] = {}
        self._ahead: deque[list[Source]] = deque()  # begun, not handed to the recogniser yet
        self._current: Iterator[tuple[_Running, int]] = iter(())
        self._stopped = False
        self._heard = _Heard()

    def ready(self) -> Ready:
        """What to tell the driver first."""
        slots = self._opened.slots
        return Ready(self.name, 2 * slots + 8, 4 * slots * _WINDOW_SECONDS, self._opened.facts)

    def give(self, assignment: Assignment) -> None:
        """Take an assignment, to be done after those that are there."""
        with self._changed:
            self._waiting.append(assignment)
            self._changed.notify_all()

    def recall(self, number: int) -> None:
        """Give an assignment back, unless it was begun."""
        with self._changed:
            found = next((each for each in self._waiting if each.number == number), None)
            if found is not None:
                self._waiting.remove(found)
        self._emit(Kept(self.name, number) if found is None else Returned(self.name, number))

    def stop(self) -> None:
        """Come to an end once what is in work is done."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """Work until stopped. Raises what the engine raises: it is of no use then."""
        beat = threading.Thread(target=self._beat, daemon=True, name="beat")
        beat.start()
        results = self._opened.transcriber.transcribe_many(self._inputs(), self._spec.options, progress=self._heard)
        for transcript in results:
            self._take(transcript)

    # What the recogniser reads, in threads of its own, one at a time.

    def _inputs(self) -> Iterator[Source]:
        while True:
            for group in self._ahead:
                if group[0].feed is None and not begin_together(group):
                    break
            while len(self._ahead) < self._spec.decoders:
                group = self._next_group(wait=not self._ahead)
                if not group:
                    break
                self._ahead.append(group)
                if not begin_together(group):
                    break
            if not self._ahead:
                return
            yield from self._ahead.popleft()

    def _next_group(self, *, wait: bool) -> list[Source]:
        """Sources that are begun together; none where there are none (yet), or no more."""
        first = self._next_source(wait=wait)
        group = [] if first is None else [first]
        seconds = 0.0 if first is None else first.item.seconds
        # One that its decoder was lost on is tried by itself.
        while group and seconds < self._decoders.group_seconds and not group[0].retried:
            more = self._next_source(wait=False, again=False)
            if more is None:
                break
            group.append(more)
            seconds += more.item.seconds
        return group

    def _next_source(self, *, wait: bool, again: bool = True) -> Source | None:
        """The next item's source; None where there is none (yet), or no more. again: or one that is tried again."""
        with self._changed:
            while True:
                if self._again and again:
                    running, place = self._again.popleft()
                    return self._source(running, place)
                if (found := next(self._current, None)) is not None:
                    running, place = found
                    running.begun = place + 1
                    return self._source(running, place)
                if self._waiting:
                    running = _Running(self._waiting.popleft())
                    self._running[running.assignment.number] = running
                    self._current = ((running, place) for place in range(len(running.assignment.items)))
                    continue
                if not wait or (self._stopped and not self._running):
                    return None
                self._changed.wait()

    def _source(self, running: _Running, place: int) -> Source:
        item, options = running.assignment.items[place], self._spec.options
        clips = options.clips()
        end = clips[-1][1]
        ends = [each for each in (item.end, None if end is None else item.start + end) if each is not None]
        request = {
            "audio": item.audio,
            "start": item.start + clips[0][0],
            "end": min(ends, default=None),
            "channels": options.channels if item.channel is None else str(item.channel + 1),
            "max_seconds": self._spec.max_seconds,
            "expected": item.seconds,
        }
        name = f"{running.assignment.number}:{place}"
        retried = (running.assignment.number, place) in self._lost_once
        source = Source(name, item, request, self._decoders, retried=retried)
        self._sources[name] = running, place, source
        return source

    # What it gives.

    def _take(self, transcript: Transcript) -> None:
        with self._changed:
            running, place, source = self._sources.pop(transcript.path or "")
            outcome = source.outcome
            key = (running.assignment.number, place)
            if outcome.lost and key not in self._lost_once:  # perhaps it was not the recording's fault
                self._lost_once.add(key)
                self._again.append((running, place))
                self._changed.notify_all()
                return
            self._lost_once.discard(key)
            row = make_row(source.item, self._spec, outcome, transcript)
            running.rows[place] = row
            running.news.append((place, row["duration"], row.get("kind")))
            if len(running.rows) < len(running.assignment.items):
                return
            del self._running[running.assignment.number]
            self._changed.notify_all()
        self._tell(running)
        rows, counts = pack_rows([running.rows[place] for place in range(len(running.rows))])
        self._emit(Done(self.name, running.assignment.number, rows, counts))

    def _beat(self) -> None:
        told = 0.0
        while True:
            time.sleep(_BEAT)
            if self._heard.seconds != told:
                told = self._heard.seconds
                self._emit(Heard(self.name, round(told, 3)))
            with self._changed:
                running = list(self._running.values())
            for each in running:
                self._tell(each)

    def _tell(self, running: _Running) -> None:
        with self._changed:
            if not running.news and running.told == running.begun:
                return
            news, running.news, running.told = running.news, [], running.begun
            progress = Progress(self.name, running.assignment.number, running.begun, news)
        self._emit(progress)
