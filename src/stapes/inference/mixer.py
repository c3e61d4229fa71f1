"""The windows of all requests on one engine, mixed.

At every *scheduling point* (`Mixer.point`) requests that were cancelled leave, waiting windows are encoded and put into
free slots, all slots write a few tokens, and windows that have ended go home or come back for their next attempt.
Nothing waits while the engine could work. Who is next is decided in `queues`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from stapes.inference.engine import AsyncEngine, Engine, SerialEngine
from stapes.inference.feed import FeedWindow
from stapes.inference.queues import Queue, Queues
from stapes.inference.requests import Request, Task
from stapes.inference.words import Draft, WordFinder

Result = TypeVar("Result")

_PARKED = 32
"""Windows that may keep their encodings until others have told the language; more are encoded again."""

_STUCK = 100
"""Scheduling points with nothing in slots at which the engine may refuse every window that waits."""


class Mixer:
    """Drives an engine through the windows of requests; all in one thread.

    steps: tokens written in each slot from one scheduling point to the next. resize: makes the engine's slots anew, so
    many; called while no window is in any. slots: how many the engine has.
    """

    def __init__(self, engine: Engine, steps: int, slots: int, resize: Callable[[int], None] | None) -> None:
        self.engine, self.steps = engine, steps
        self.queues = Queues()
        self.queues.slots = slots
        self.slots: dict[Any, Task] = {}
        self.urgent = False
        """Another thread wants the next scheduling point soon."""

        self._resize, self._default_slots = resize, slots
        self._draining = False  # nothing may enter slots, so that there can be more of them
        self._in_doubt = False  # an operation on slots has failed: they must be made anew
        self._parked: dict[FeedWindow, Request] = {}  # encoded, until the language is known
        self._stuck = 0
        self._enqueues: bool = engine.enqueues
        self._is_serial: bool = getattr(engine, "is_serial", False)
        apart = getattr(engine, "finds_words_apart", False)
        self._async = cast("AsyncEngine", engine) if apart else None
        self.words = None
        if self._async is not None:
            self.words = WordFinder(self._async)
            self.queues.is_encoded = self._is_encoded

    @property
    def requests(self) -> list[Request]:
        """All that are not over."""
        return self.queues.requests

    def add(self, request: Request) -> None:
        """Take up a request."""
        self.queues.of(request).requests.append(request)

    def drop(self, request: Request, error: BaseException | None = None) -> None:
        """End a request now, and free all it holds."""
        if request.ended:
            return
        queue = self.queues.of(request)
        queue.requests.remove(request)
        for slot in [slot for slot, task in self.slots.items() if task.owner is request]:
            self._free(slot)
        queue.remove(request.tasks)
        for task in request.tasks:
            task.window.encoded = None
        request.tasks.clear()
        for window in [window for window, owner in self._parked.items() if owner is request]:
            del self._parked[window]
            window.encoded = None
        request.ingest.abandon()
        request.end(error)

    def point(self) -> bool:
        """One scheduling point. Whether there was anything to do."""
        self.urgent = False
        self.queues.points += 1
        for request in self.requests:
            if request.cancelled:
                self.drop(request)
        self._fit()
        worked = self._look_again()
        worked |= self._admit()
        if self._enqueues and self.slots:
            # First the step: the device encodes behind it, while we look at what it wrote.
            worked |= self._step()
            worked |= self._fill()
            worked |= self._preempt()
        else:
            worked |= self._fill()
            worked |= self._preempt()
            worked |= bool(self.slots) and self._step()
        if self.slots:
            self._harvest()
        worked |= self._complete_found()
        self._deliver()
        self._check_stuck(worked)
        return worked

    def _fit(self) -> None:
        """Make the engine have as many slots as the request that asks for the most; others are kept to fewer.

        Never fewer than at first: new slots are new caches and, on a GPU, newly captured steps. It needs a moment with
        nothing in slots. To have fewer slots, it is waited for; to have more, it is brought about: no window enters
        any more until all have left.
        """
        requests = self.requests
        if self._resize is None or not requests:
            return
        wanted = max(self._default_slots, *(request.batch_size or 0 for request in requests))
        self._draining = bool(self.slots) and wanted > self.queues.slots
        if not self.slots and (wanted != self.queues.slots or self._in_doubt):
            self._resize(wanted)
            self.queues.slots, self._in_doubt = wanted, False

    # Encoding.

    def _fill(self) -> bool:
        """Encode as long as there is, or will soon be, room: windows in slots wait for it, empty slots cost more.

        Where interactive windows are being written, they wait for one batch of bulk ones at a time.
        """
        interactive, worked = self.queues.interactive, False
        while True:
            for queue in self.queues:
                self._stage(queue)
            batch = self.queues.next_to_encode(self.engine.encoder_batch)
            if not batch:
                return self._admit() or worked  # some may have been encoded before, when their language was not known
            is_bulk, worked = batch[0].owner.priority == "bulk", True
            if is_bulk and self._is_serial and len(batch) == 1 and not self.queues.is_bulks_turn:
                if not self._encode_parts(batch[0]):
                    self.queues.bulk.staged.appendleft(batch[0])
            else:
                self._apart(batch, self._encode)
            self._admit()
            if self.urgent or (is_bulk and interactive.is_active):
                return worked

    def _stage(self, queue: Queue) -> None:
        """Take the windows that could be encoded next, a batch at most."""
        batch = self.engine.encoder_batch
        if queue is self.queues.bulk and self.words is not None and self.words.is_behind:
            return
        while self.queues.wants_more(queue) and len(queue.staged) < batch and self.queues.waiting(queue) < batch:
            task = self.queues.take(queue, batch)
            if task is None:
                return
            self._parked.pop(task.window, None)
            if task.window.encoded is not None:  # its language was not known; now it is
                self._enqueue(task)
            else:
                queue.staged.append(task)

    def _encode(self, tasks: Sequence[Task]) -> None:
        sounds = [task.window.sound for task in tasks]
        interactive = tasks[0].owner.priority == "interactive"
        if self._async is not None and interactive and self.queues.is_bulk_on_device:
            self._take_in(tasks, self._async.encode(sounds, urgent=True))
        else:
            self._take_in(tasks, self.engine.encode(sounds))

    def _is_encoded(self, task: Task) -> bool:
        assert self._async is not None
        return self._async.is_encoded(task.window.encoded)

    def _encode_parts(self, task: Task, *, again: bool = False) -> bool:
        """Go on with encoding a bulk window: by one part while interactive ones are on their way, else until somebody
        wants the engine. Whether it is over."""
        engine = cast("SerialEngine", self.engine)
        try:
            parts = task.parts = task.parts or engine.encode_in_parts(task.window.sound, again=again)
            while (encoded := next(parts)) is None:
                if self.urgent or self.queues.interactive.is_active:
                    return False
            task.parts = None
            self._take_in([task], [encoded])
        except Exception as error:
            self.drop(task.owner, error)
        return True

    def _take_in(self, tasks: Sequence[Task], encodings: Sequence[Any]) -> None:
        """Windows are encoded: let them wait for slots, or ask their language first."""
        for task, encoded in zip(tasks, encodings, strict=True):
            task.window.encoded = encoded
        unknown = [task for task in tasks if task.window.recording.needs_language]
        for task in tasks:
            if task not in unknown:
                self._enqueue(task)
        if unknown:
            self._apart(unknown, self._ask_language)

    def _ask_language(self, tasks: Sequence[Task]) -> None:
        votes = self.engine.detect_language([task.window.encoded for task in tasks])
        for task, vote in zip(tasks, votes, strict=True):
            task.window.recording.vote(task.window, vote)
            task.owner.tasks.discard(task)
            if len(self._parked) >= _PARKED:
                self._parked = {each: owner for each, owner in self._parked.items() if each.recording.error is None}
            if len(self._parked) >= _PARKED:
                task.window.encoded = None
            self._parked[task.window] = task.owner
            task.owner.touch()

    def _enqueue(self, task: Task) -> None:
        """Put an encoded window where it waits for a slot."""
        try:
            attempt = task.window.recording.request(task.window)
            is_apart = self._is_serial and task.owner.priority == "interactive"
            task.attempt = replace(attempt, urgent=True) if is_apart else attempt
        except Exception as error:
            self._lose(task, error)
        else:
            queue = self.queues.of(task.owner)
            (queue.returned if task.returned else queue.fresh).append(task)

    def _look_again(self) -> bool:
        """Encode once more what gets a second look: these windows go first, so that their recordings can end."""
        worked, size = False, self.engine.encoder_batch
        for queue in self.queues:
            is_bulk = queue is self.queues.bulk
            while queue.again and not (is_bulk and size == 1 and self.queues.is_bulk_held_back):
                batch = [queue.again.popleft() for _ in range(min(size, len(queue.again)))]
                worked = True
                if is_bulk and self._is_serial and len(batch) == 1:
                    if not self._encode_parts(batch[0], again=True):
                        queue.again.appendleft(batch[0])
                        break
                else:
                    self._apart(batch, self._encode_again)
                if is_bulk and self.queues.interactive.is_active:
                    break
        return worked

    def _encode_again(self, tasks: Sequence[Task]) -> None:
        self._take_in(tasks, self.engine.encode([task.window.sound for task in tasks], again=True))

    # Slots.

    def _admit(self) -> bool:
        """Put encoded windows into free slots, together with others of the same kind."""
        if self._draining:
            return False
        admitted = self._admit_in_turn()
        for kind, attempt in {task.kind: task.attempt for task in self.queues.ready()}.items():
            assert attempt is not None
            room, batch = self.engine.free_slots(attempt), self.engine.encoder_batch
            group = self.queues.next_to_enter(kind, room, batch, is_idle=not self.slots) if room > 0 else []
            if group:
                self._admit_group(group)
                admitted = True
        return admitted

    def _admit_in_turn(self) -> bool:
        """Give bulk its share of the slots that have become free."""
        admitted = False
        for task in self.queues.turn():
            assert task.attempt is not None
            if self.engine.free_slots(task.attempt) > 0:
                self.queues.turn_taken()
                self._admit_group([task])
                admitted = True
                if not self.queues.turn():
                    break
        return admitted

    def _admit_group(self, group: Sequence[Task]) -> None:
        for queue in self.queues:
            queue.remove(set(group))
        self._apart(group, self._enter)

    def _enter(self, tasks: Sequence[Task]) -> None:
        attempts = [task.attempt for task in tasks if task.attempt is not None]
        slots = self.engine.admit(attempts, [task.window.encoded for task in tasks])
        for slot, task in zip(slots, tasks, strict=True):
            self.slots[slot] = task
            task.owner.occupied[task.kind] += 1
            self.queues.of(task.owner).in_slots += 1

    def _preempt(self) -> bool:
        """Let interactive windows that wait for the second time have slots of bulk ones."""
        leaving = [] if self._draining else self.queues.to_preempt(self.slots)
        for slot in leaving:
            task = self._free(slot)
            task.preempted = task.returned = True
            self.queues.bulk.returned.appendleft(task)
        return bool(leaving) and self._admit()

    def _free(self, slot: Any) -> Task:
        task = self.slots.pop(slot)
        task.owner.occupied[task.kind] -= 1
        self.queues.of(task.owner).in_slots -= 1
        try:
            self.engine.release(slot)
        except Exception:
            self._in_doubt = True  # nobody is hurt yet; a slot may be lost until all are made anew
        return task

    # Writing.

    def _guard(self, operation: Callable[[], Result]) -> Result | None:
        """Do something with all slots; if it fails, no one knows what they hold now."""
        try:
            return operation()
        except Exception as error:
            self._in_doubt = True
            for request in self.requests:
                if request.tasks:
                    self.drop(request, error)
            return None

    def _step(self) -> bool:
        if self._is_serial and self.queues.is_bulk_held_back:
            engine = cast("SerialEngine", self.engine)
            self._guard(lambda: engine.step(self.steps, urgent=True))
        else:
            self._guard(lambda: self.engine.step(self.steps))
        return True

    def _harvest(self) -> None:
        """Take what has ended."""
        harvested = self._guard(self.engine.harvest) or []
        ready: list[tuple[Any, Task, Any]] = []
        wanted: list[tuple[Any, Task, Any, Any, Any]] = []
        touched: dict[Request, None] = {}
        for slot, result in harvested:
            task = self.slots.get(slot)
            if task is None:
                continue
            touched[task.owner] = None
            window = task.window
            try:
                draft = window.recording.judge(window, result)
                words = None if draft is None else window.recording.words_wanted(window, draft)
            except Exception as error:
                self._free(slot)
                self._lose(task, error)
                continue
            if draft is None:
                self._free(slot)
                self._return(task)
            elif words is None:
                ready.append((slot, task, draft))
            else:
                wanted.append((slot, task, draft, *words))
        for slot, task, draft in [*ready, *self._add_words(wanted)]:
            if not task.owner.ended:
                self._free(slot)
                self._complete(task, draft)
        for request in touched:
            self._report(request)

    def _complete(self, task: Task, draft: Any) -> None:
        """A window is done."""
        try:
            task.window.recording.complete(task.window, draft)
        except Exception as error:
            self._lose(task, error)
        else:
            task.owner.tasks.discard(task)

    def _complete_found(self) -> bool:
        """Complete the windows whose words were found apart; whether there were any."""
        found = self.words.take() if self.words is not None else []
        touched: dict[Request, None] = {}
        for each, error in found:
            task = each.task
            if task.owner.ended:
                continue
            touched[task.owner] = None
            if error is None:
                self._complete(task, each.draft)
            else:
                self._lose(task, error)
        for request in touched:
            self._report(request)
        return bool(found)

    def _add_words(self, wanted: Sequence[tuple[Any, Task, Any, Any, Any]]) -> list[tuple[Any, Task, Any]]:
        """Give drafts their words; those that got them at once."""
        if not wanted:
            return []
        slots, prompts, texts = [each[0] for each in wanted], [each[3] for each in wanted], [each[4] for each in wanted]
        try:
            if self.words is None:
                alignments = self.engine.align(slots, prompts, texts)
            else:
                assert self._async is not None
                alignments = self._async.align_ahead(slots, prompts, texts)
        except Exception as error:
            if len(wanted) > 1:
                return [found for each in wanted if not each[1].owner.ended for found in self._add_words([each])]
            self.drop(wanted[0][1].owner, error)
            return []
        if self.words is not None:
            for slot in slots:
                self._free(slot)
            found = zip(wanted, alignments, strict=True)
            self.words.find([Draft(task, draft, prompt, ahead) for (_, task, draft, prompt, _), ahead in found])
            return []
        ready = []
        for (slot, task, draft, prompt, _), alignment in zip(wanted, alignments, strict=True):
            try:
                task.window.recording.add_words(task.window, draft, prompt, alignment)
            except Exception as error:
                self._free(slot)
                self._lose(task, error)
            else:
                ready.append((slot, task, draft))
        return ready

    def _return(self, task: Task) -> None:
        """Let a window wait for its next attempt, or for a second look at it."""
        task.returned, task.passed_over = True, False
        if task.window.encoded is None:
            self.queues.of(task.owner).again.append(task)
        else:
            self._enqueue(task)

    # Ends.

    def _report(self, request: Request) -> None:
        """Windows of a request have ended: tell its progress, and look for what follows them."""
        request.touch()
        try:
            request.ingest.completed()
        except Exception as error:  # of whoever listens to the progress
            self.drop(request, error)

    def _deliver(self) -> None:
        """Hand jobs that are done to their callers, and end the requests that have no more."""
        for request in self.requests:
            try:
                while jobs := request.finished():
                    request.deliver(jobs)
            except BaseException as error:  # what the caller's iterator of inputs raised is the caller's
                self.drop(request, error)
            else:
                if request.ingest.over and not request.tasks:
                    self.drop(request)

    def _lose(self, task: Task, error: Exception) -> None:
        """An error in handling a window is its recording's end, and no other's."""
        task.owner.tasks.discard(task)
        task.window.encoded = None
        task.window.recording.fail(error, task.window)
        task.owner.touch()

    def _apart(self, tasks: Sequence[Task], operation: Callable[[Sequence[Task]], None]) -> None:
        """Do something with windows together; where that fails, with halves of them.

        So an error that lies with one window is its request's alone, and a shortage of memory may pass.
        """
        living = [task for task in tasks if not task.owner.ended]
        if not living:
            return
        try:
            operation(living)
            return
        except Exception as error:
            if len(living) == 1:
                self.drop(living[0].owner, error)
                return
        half = len(living) // 2
        self._apart(living[:half], operation)
        self._apart(living[half:], operation)

    def _check_stuck(self, worked: bool) -> None:
        """Windows that no slot can take although all are empty must not wait for ever."""
        waiting = self.queues.ready()
        self._stuck = self._stuck + 1 if waiting and not worked else 0
        if self._stuck > _STUCK:
            self._stuck, self._in_doubt = 0, True
            for request in {task.owner for task in waiting}:
                self.drop(request, RuntimeError("the engine has no room for a window although nothing is in its slots"))
