"""Who is next: the windows that wait for the engine, in two classes of priority.

The rules, which `Mixer` carries out:

- Interactive windows are encoded and get slots before bulk ones. Where both wait for the same thing, every eighth turn
  (`TURNS`) is bulk's, so that it never starves.
- An interactive window that found no slot at one scheduling point takes, at the next, the slot of the bulk window that
  was admitted last, down to bulk's eighth. That window starts again later, once at most: nothing is held in reserve,
  and no result changes, because an attempt depends on nothing but itself.
- Within a class the request with the fewest windows on their way is next: three seconds do not wait behind an hour.
  Ends of live turns come before all other interactive windows, partials after them, but for every eighth turn.
- Windows are encoded at once where a slot may be free for them, and in full batches where all are taken. While
  interactive windows are being written, bulk ones are encoded in half batches, one at a scheduling point: so those take
  about twice as long as alone, and bulk loses next to nothing. While interactive ones wait, the batch is an eighth.
- On an engine whose device works while the host does something else, windows enter slots when the device is done with
  their encoding, so that what is being written does not wait for it. Meanwhile bulk ones gather to a batch, of which
  two at most are on the device.
- On a serial engine, where every window costs time of its own, interactive windows have slots of their own, and while
  any is written, bulk has one scheduling point in eight: a step of its slots, and a part of a window's encoding, which
  goes layer by layer. So an interactive one never waits for a whole window, and pays for no other's steps.
- Bulk windows enter slots a few at a time (`Queues.group_size`), because reading prompts costs nearly as much for one
  as for eight; interactive ones enter at once, and take along those that wait.
- Few wait with their encodings: fewer than two encoder batches of new windows in each class, and those that have been
  in slots before, of which `_RETURNED_WAITING` hold new ones back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stapes.inference.requests import Kind, Request, Task

TURNS = 8
"""One turn in so many is bulk's where interactive windows wait too."""

_RETURNED_WAITING = 32
"""Windows of a class that may wait for another attempt before new ones are held back; each holds MB of encoding."""


@dataclass(eq=False)
class Queue:
    """What waits in one class of priority."""

    requests: list[Request] = field(default_factory=list)
    staged: deque[Task] = field(default_factory=deque)  # to be encoded
    again: deque[Task] = field(default_factory=deque)  # to be encoded another way, for a second look
    fresh: deque[Task] = field(default_factory=deque)  # encoded, for a first attempt
    returned: deque[Task] = field(default_factory=deque)  # encoded, have been in a slot before
    in_slots: int = 0

    @property
    def is_active(self) -> bool:
        """Whether any window is on its way."""
        return bool(self.in_slots or self.staged or self.again or self.fresh or self.returned)

    def ready(self, kind: Kind | None = None) -> Iterator[Task]:
        """What waits for slots (of a kind), first those that have been in one."""
        for task in (*self.returned, *self.fresh):
            if kind is None or task.kind == kind:
                yield task

    def remove(self, gone: set[Task]) -> None:
        """Forget tasks, wherever they wait."""
        for waiting in (self.staged, self.again, self.fresh, self.returned):
            if not gone.isdisjoint(waiting):
                kept = [task for task in waiting if task not in gone]
                waiting.clear()
                waiting.extend(kept)


class Queues:
    """Both classes, and whose turn it is."""

    def __init__(self) -> None:
        self.interactive, self.bulk = Queue(), Queue()
        self.slots = 0
        """How many the engine has: a request that may have as many needs no watching."""

        self.is_encoded: Callable[[Task], bool] = lambda task: True
        """Whether the device is done with what was put before it, so that nothing waits when it enters a slot."""

        self.points = 0
        """Scheduling points so far."""

        self.is_bulks_turn = False
        """The bulk windows that are to be encoded go before interactive ones: it is their turn."""

        self._partials_passed = 0  # windows that were taken before live partials
        self._encodes_passed = 0  # turns of interactive windows while bulk ones waited
        self._slots_passed = 0  # interactive windows that got slots while bulk ones waited

    def __iter__(self) -> Iterator[Queue]:
        return iter((self.interactive, self.bulk))

    def of(self, request: Request) -> Queue:
        """The class of a request."""
        return self.interactive if request.priority == "interactive" else self.bulk

    @property
    def requests(self) -> list[Request]:
        """All that are not over."""
        return [*self.interactive.requests, *self.bulk.requests]

    def ready(self) -> list[Task]:
        """All that wait for slots."""
        return [task for queue in self for task in queue.ready()]

    def take(self, queue: Queue, batch: int) -> Task | None:
        """The next window of a class, of the request of the first rank that has the fewest on their way."""
        ranks = {request: request.rank for request in queue.requests}
        requests = sorted(queue.requests, key=lambda request: (ranks[request], len(request.tasks)))
        if self._partials_passed >= TURNS - 1:
            requests.sort(key=lambda request: ranks[request] <= 0)
        for request in requests:
            if self._is_limited(request) and len(request.tasks) >= (request.batch_size or 0) + batch:
                continue
            window = request.take()
            if window is not None:
                if max(ranks.values()) > 0:
                    self._partials_passed = 0 if ranks[request] > 0 else self._partials_passed + 1
                task = Task(window, request)
                request.tasks.add(task)
                return task
        return None

    @property
    def is_bulk_held_back(self) -> bool:
        """Whether this scheduling point is for the interactive windows alone that are being written, where an engine
        serves them apart."""
        return self.interactive.in_slots > 0 and self.points % TURNS > 0

    def wants_more(self, queue: Queue) -> bool:
        """Whether more windows of a class may be encoded, to wait beside those that are."""
        return len(queue.returned) < _RETURNED_WAITING

    def next_to_encode(self, batch: int) -> list[Task]:
        """The windows to encode together now, of those that are staged; none when it is better to wait."""
        interactive, bulk = self._is_due(self.interactive, batch), self._is_due(self.bulk, batch)
        if interactive and not (bulk and self._encodes_passed >= TURNS - 1):
            self._encodes_passed += bulk
            queue, most = self.interactive, batch
        elif bulk:
            self.is_bulks_turn = interactive
            if not interactive and batch == 1 and self.is_bulk_held_back:
                return []
            self._encodes_passed = 0
            share = TURNS if interactive else 2 if self.interactive.is_active else 1
            queue, most = self.bulk, max(1, batch // share)
        else:
            return []
        return [queue.staged.popleft() for _ in range(min(most, len(queue.staged)))]

    @property
    def is_bulk_on_device(self) -> bool:
        """Whether bulk windows are being encoded, which others would wait for."""
        return not all(map(self.is_encoded, self.bulk.fresh))

    def waiting(self, queue: Queue) -> int:
        """New windows of a class that wait for nothing but a slot."""
        return sum(map(self.is_encoded, self._within_limits(queue.fresh)))

    def _is_due(self, queue: Queue, batch: int) -> bool:
        # Those that are to be tried again wait for slots of another kind: they must not keep new ones from theirs.
        encoded = [self.is_encoded(task) for task in self._within_limits(queue.fresh)]
        waiting = sum(encoded)
        on_device = len(encoded) - waiting
        if waiting >= batch or on_device > batch or not self.wants_more(queue):
            return False
        # Encoded ones that wait have found no slot, and those on the device come first: there is time for a full batch.
        is_early = waiting or (on_device and queue is self.bulk)
        return len(queue.staged) >= (batch if is_early else 1)

    def group_size(self, kind: Kind, batch: int) -> int:
        """How many bulk windows of a kind are to enter slots together: an eighth of the slots, an encoder batch."""
        return max(1, min(batch, self._rows(kind) // TURNS))

    def turn(self) -> list[Task]:
        """When it is bulk's turn to get a slot: its windows, of which the first that can enter is to do so."""
        if self._slots_passed < TURNS - 1:
            return []
        return list(self._within_limits(self.bulk.ready()))

    def turn_taken(self) -> None:
        """Bulk has had its turn."""
        self._slots_passed -= TURNS - 1

    def next_to_enter(self, kind: Kind, room: int, batch: int, *, is_idle: bool) -> list[Task]:
        """The windows of a kind that get its free slots, so many. is_idle: there is nothing in any slot."""
        first = list(self._within_limits(self.interactive.ready(kind)))
        then = list(self._within_limits(self.bulk.ready(kind)))
        if not is_idle:
            then = list(filter(self.is_encoded, then))
        if not first and not is_idle and room < min(self.group_size(kind, batch), len(then)):
            return []
        group = [*first, *then][:room]
        entering = set(group)
        if all(task in entering for task in self._within_limits(self.bulk.ready())):
            self._slots_passed = 0  # none waits
        else:
            self._slots_passed += min(len(first), room)
        return group

    def _rows(self, kind: Kind) -> int:
        return max(1, self.slots // kind[0])

    def to_preempt(self, slots: Mapping[Any, Task]) -> list[Any]:
        """The slots that bulk windows are to leave; to be asked when all that could has been admitted."""
        waiting: defaultdict[Kind, list[Task]] = defaultdict(list)
        for task in self._within_limits(self.interactive.ready()):
            waiting[task.kind].append(task)
        leaving: dict[Any, None] = {}
        for kind, tasks in waiting.items():
            entitled = sum(task.passed_over for task in tasks)
            for task in tasks:
                task.passed_over = True
            rivals = {slot: task for slot, task in slots.items() if task.kind == kind}
            if len(rivals) < self._rows(kind):  # it is not their lane that is full, but the memory of all
                rivals = dict(slots)
            of_bulk = [slot for slot, task in rivals.items() if self.of(task.owner) is self.bulk]
            spare = len(of_bulk) - len(rivals) // TURNS
            # Those admitted last have the least to write again.
            victims = (slot for slot in reversed(of_bulk) if not slots[slot].preempted and slot not in leaving)
            leaving |= dict.fromkeys(islice(victims, max(0, min(entitled, spare))))
        return list(leaving)

    def _is_limited(self, request: Request) -> bool:
        return request.batch_size is not None and request.batch_size < self.slots

    def _within_limits(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Those that their requests' batch sizes let into slots."""
        taken: defaultdict[tuple[Request, Kind], int] = defaultdict(int)
        for task in tasks:
            if self._is_limited(task.owner):
                key = task.owner, task.kind
                taken[key] += 1
                if taken[key] > task.owner.room(task.kind):
                    continue
            yield task
