"""How far a job is, from its files alone: whoever works on it, or nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stapes.bulk.plan import Plan
from stapes.bulk.store import Counts, Store


def look(folder: str | Path) -> dict[str, Any]:
    """What is finished, by the ``.done`` files, and what each driver said last. Raises UsageError.

    ``state``: ``finished``, ``running`` while a driver holds its lock, else ``stopped``. ``drivers``: as `report`
    writes them; one that was killed is ``stopped`` whatever it said.
    """
    store = Store(folder)
    run, plan = store.run(), Plan(store.folder)
    done = Counts()
    shards = store.finished()
    for shard in shards:
        found = store.read_done(shard)
        done.add(Counts(**{name: found[name] for name in Counts.__slots__}))
    drivers = []
    for part, status in store.read_statuses():
        if status["state"] == "running" and not store.is_busy(part):
            status = {**status, "state": "stopped", "reason": "its driver was killed: the same command goes on"}
        drivers.append(status)
    running = any(status["state"] == "running" for status in drivers)
    return {
        "out": str(store.folder),
        "state": "finished" if len(shards) == len(plan) else "running" if running else "stopped",
        "shards": len(plan),
        "shards_done": len(shards),
        "files": int(plan.files.sum()),
        "files_done": done.files,
        "failed": done.failed,
        "quarantined": done.quarantined,
        "damaged": done.damaged,
        "errors": done.errors,
        "audio_seconds": round(done.seconds, 1),
        "configuration": run["configuration"],
        "drivers": drivers,
    }
