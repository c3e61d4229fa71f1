"""The driver alone, with workers that do what a test says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stapes.benchmarks.bulk_simulation import Scale, SimulatedExecutor, simulate
from stapes.bulk.decoders import Outcome
from stapes.bulk.driver import Driver, TooManyErrors
from stapes.bulk.executor import Assignment, Died, Done, Event, Kept, Progress, Ready, Returned
from stapes.bulk.inputs import Item
from stapes.bulk.local import split_cores
from stapes.bulk.options import Part
from stapes.bulk.plan import Plan, make_plan
from stapes.bulk.rows import make_row, pack_rows
from stapes.bulk.spec import Spec
from stapes.bulk.store import Store, read, verify
from stapes.options import TranscribeOptions
from stapes.transcript import Transcript

SPEC = Spec(model="m", revision="r", options=TranscribeOptions(), settings={})


def job(folder: Path, files: int, *, per_shard: int = 4, seconds: float = 10.0) -> tuple[Store, Plan]:
    store = Store(folder)
    store.make()
    items = [Item(f"{n:03d}.wav", f"{n:03d}.wav", seconds) for n in range(files)]
    store.begin(SPEC, ["in"], [], add=False)
    return store, make_plan(folder, lambda: items, ["in"], shard_seconds=1e9, shard_files=per_shard)


def rows_for(items: Sequence[Item], failing: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    rows = []
    for item in items:
        error = f"{item.audio} is no audio" if item.id in failing else None
        outcome = Outcome(sha256=item.id, error=error, kind="audio" if error else None)
        rows.append(make_row(item, SPEC, outcome, Transcript(duration=item.seconds, error=error, model="m")))
    return rows


class Script:
    """Workers that do one assignment at a time, in turn. ``deadly``: recordings that end a worker; it does not say
    which one it had begun with. ``failing``: recordings with an error. ``lazy``: workers that never do anything."""

    def __init__(self, workers: int, *, deadly: Sequence[str] = (), failing: Sequence[str] = (), lazy: int = 0) -> None:
        self.workers = [f"w{n}" for n in range(workers)]
        self.deadly, self.failing = set(deadly), frozenset(failing)
        self.lazy = set(self.workers[:lazy])
        self.queues: dict[str, list[Assignment]] = {name: [] for name in self.workers}
        self.found: list[Event] = []
        self.given: list[tuple[str, ...]] = []
        self.deaths = 0
        self.turn = 0

    def start(self) -> None:
        self.found += [Ready(name, 2, 25.0, {}) for name in self.workers]

    def submit(self, worker: str, assignment: Assignment) -> None:
        self.queues[worker].append(assignment)
        self.given.append(tuple(item.id for item in assignment.items))

    def recall(self, worker: str, number: int) -> None:
        queue = self.queues[worker]
        found = next((each for each in queue[1:] if each.number == number), None)
        if found is None:
            self.found.append(Kept(worker, number))
        else:
            queue.remove(found)
            self.found.append(Returned(worker, number))

    def restart(self, worker: str) -> None:
        raise AssertionError("nothing hangs here")

    def events(self, timeout: float) -> Sequence[Event]:
        for _ in self.workers:
            self.turn += 1
            name = self.workers[self.turn % len(self.workers)]
            if self.queues[name] and name not in self.lazy:
                self._work(name)
                break
        found, self.found = self.found, []
        return found

    def _work(self, name: str) -> None:
        assignment = self.queues[name][0]
        ids = [item.id for item in assignment.items]
        deadly = next((place for place, id in enumerate(ids) if id in self.deadly), None)
        if deadly is not None:
            self.queues[name].clear()
            self.deaths += 1
            ended = [(place, 10.0, None) for place in range(max(0, deadly - 1))]
            self.found += [Progress(name, assignment.number, deadly + 1, ended), Died(name, "killed by SIGKILL")]
            self.found.append(Ready(name, 2, 25.0, {}))
            return
        self.queues[name].pop(0)
        self.found.append(Done(name, assignment.number, *pack_rows(rows_for(assignment.items, self.failing))))

    def close(self) -> None:
        pass


def drive(store: Store, plan: Plan, script: Script, **settings: Any) -> Driver:
    driver = Driver(store, plan, SPEC, script, part=Part(), **{"max_errors": 1.0, **settings})
    driver.run()
    return driver


def ids(store: Store) -> list[str]:
    return [row["id"] for row in read(store.folder)]


def test_only_the_recording_that_kills_alone_is_quarantined(tmp_path: Path) -> None:
    store, plan = job(tmp_path, 12)
    script = Script(2, deadly=["005.wav"])
    drive(store, plan, script)
    assert ids(store) == [f"{n:03d}.wav" for n in range(12)]
    assert [row["id"] for row in read(tmp_path) if row["status"] == "quarantined"] == ["005.wav"]
    # Twice among others, twice with nothing else.
    assert script.deaths == 4
    assert script.given.count(("005.wav",)) == 2
    assert store.deaths() == {"005.wav": 2}
    assert all(problem is None for _, problem in verify(tmp_path))


def test_two_deadly_recordings_in_one_shard_are_both_found(tmp_path: Path) -> None:
    store, plan = job(tmp_path, 8, per_shard=8)
    drive(store, plan, Script(1, deadly=["002.wav", "006.wav"]))
    bad = [row["id"] for row in read(tmp_path) if row["status"] != "ok"]
    assert bad == ["002.wav", "006.wav"]
    assert ids(store) == [f"{n:03d}.wav" for n in range(8)]


def test_a_worker_that_does_nothing_is_relieved_of_what_it_has_not_begun(tmp_path: Path) -> None:
    store, plan = job(tmp_path, 16)
    script = Script(2, lazy=1)
    driver = Driver(
        store, plan, SPEC, script, part=Part(), max_errors=1.0, is_stopped=lambda: len(store.finished()) == 3
    )
    driver.run()
    assert len(store.finished()) == 3  # of four: it keeps the first that it was given
    assert len(script.queues["w0"]) == 1


def test_errors_beyond_the_share_stop_the_job_before_their_shard_is_written(tmp_path: Path) -> None:
    store, plan = job(tmp_path, 400, per_shard=40)
    failing = [f"{n:03d}.wav" for n in range(200, 400)]
    with pytest.raises(TooManyErrors, match="is no audio"):
        drive(store, plan, Script(1, failing=failing), max_errors=0.05)
    assert 5 <= len(store.finished()) < 10
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


def test_retrying_does_only_what_failed(tmp_path: Path) -> None:
    store, plan = job(tmp_path, 12)
    drive(store, plan, Script(1, failing=["001.wav", "009.wav", "010.wav"]))
    untouched = store.rows_path(1).read_bytes()
    script = Script(1)
    driver = drive(store, plan, script, retry_failed=True)
    assert sorted(script.given) == [("001.wav",), ("009.wav", "010.wav")]
    assert {row["status"] for row in read(tmp_path)} == {"ok"}
    assert ids(store) == [f"{n:03d}.wav" for n in range(12)]
    assert store.rows_path(1).read_bytes() == untouched
    assert driver.report.done.failed == 0


def test_status_counts_what_is_done_and_left(tmp_path: Path) -> None:
    store, plan = job(tmp_path, 12, seconds=3600.0)
    driver = drive(store, plan, Script(3, failing=["000.wav"]))
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "finished"
    assert (status["files_done"], status["shards_done"], status["failed"]) == (12, 3, 1)
    assert status["errors"] == {"audio": 1}
    assert status["audio_seconds"] == 11 * 3600
    assert driver.report.left() == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_every_shard_is_written_once(tmp_path: Path, seed: int) -> None:
    store, plan = job(tmp_path, 300, per_shard=5, seconds=60.0)
    scale = Scale(files=300, workers=7, speed=5.0, deaths_per_hour=20.0, seed=seed)
    executor = SimulatedExecutor(scale)
    written: Counter[int] = Counter()
    commit = store.commit

    def counted(shard: int, *rest: Any) -> Any:
        written[shard] += 1
        return commit(shard, *rest)

    store.commit = counted  # type: ignore[method-assign]
    driver = Driver(store, plan, SPEC, executor, part=Part(), max_errors=1.0, clock=executor.clock)
    driver.run()
    assert executor.deaths > 5
    assert written == Counter(range(60))


def test_a_simulation_says_where_the_limit_is(tmp_path: Path) -> None:
    found = simulate(Scale(files=3000, workers=20, speed=100.0, shard_seconds=60.0, writes=2), tmp_path)
    assert found["files"] == 3000
    assert found["first_bottleneck"] in found["audio_seconds_per_second_at_most"]
    assert 0.5 < found["share_of_ideal"] <= 1.2  # on the simulated clock
    assert not list(tmp_path.iterdir())


def test_cores_are_shared_out_without_overlap() -> None:
    cores = list(range(10))
    parts = split_cores(cores, 3)
    assert sorted(core for part in parts for core in part) == cores
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert split_cores([0, 1], 4) == [[0], [1], [0], [1]]
