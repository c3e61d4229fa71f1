"""The folder of a job: shards that are whole, what they were made with, and who is at work on it.

A shard is ``shards/shard-N.jsonl.zst``, a row a recording in the plan's order, and beside it ``shard-N.done``, which is
written after it and says what it holds. Without its ``.done`` a shard is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stapes.bulk.files import TEMPORARY, decompress, durable, is_locked, locked, quick, sync_folder, write_error
from stapes.bulk.options import Part
from stapes.bulk.plan import Plan, has_plan
from stapes.bulk.spec import Spec
from stapes.errors import UsageError

FORMAT = "stapes-bulk-1"
_RUN, _DEATHS = "run.json", "deaths.jsonl"


@dataclass(slots=True, kw_only=True)
class Counts:
    """What came of recordings."""

    files: int = 0
    failed: int = 0
    quarantined: int = 0
    """Of ``failed``: those that ended a process, twice."""
    damaged: int = 0
    """Transcribed as far as they could be read."""
    seconds: float = 0.0
    """Of audio that was read."""
    errors: dict[str, int] = field(default_factory=dict)
    """Kind → how many."""

    def add_row(self, row: dict[str, Any]) -> None:
        """Count a row."""
        self.files += 1
        self.seconds += row["duration"]
        self.damaged += bool(row.get("damaged"))
        if row["status"] != "ok":
            self.failed += 1
            self.quarantined += row["status"] == "quarantined"
            self.errors[row["kind"]] = self.errors.get(row["kind"], 0) + 1

    def add(self, other: Counts) -> None:
        """Add the counts of another shard."""
        for name in ("files", "failed", "quarantined", "damaged", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, count in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + count

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {name: getattr(self, name) for name in Counts.__slots__} | {"seconds": round(self.seconds, 3)}


class Store:
    """The folder of a job. Made where missing. Raises OutputError."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.shards = self.folder / "shards"

    def make(self) -> None:
        """Make the folders."""
        try:
            for each in (self.shards, self.folder / "log"):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.folder, error) from error

    @contextmanager
    def held(self, part: Part) -> Iterator[None]:
        """Keep other drivers off this part of the work, until the block ends or this process does.

        Raises UsageError where one is at work on any of it.
        """
        busy = f"Another `stapes bulk` is at work in {self.folder}: wait for it, or look with `stapes bulk status`"
        with ExitStack() as stack:
            if part.count == 1:
                stack.enter_context(locked(self._lock(Part()), busy=busy))
            else:
                stack.enter_context(locked(self._lock(Part()), shared=True, busy=busy))
                stack.enter_context(locked(self._lock(part), busy=busy))
                for other in self.folder.glob(".lock-*-of-*"):
                    if not other.name.endswith(f"-of-{part.count}") and is_locked(other):
                        raise UsageError(
                            f"{self.folder} is being worked on in another number of parts ({other.name}): give all "
                            "drivers the same --shard-count"
                        )
            if part.count == 1:
                for left in [*self.folder.glob(TEMPORARY), *self.shards.glob(TEMPORARY)]:
                    left.unlink(missing_ok=True)
            yield

    def _lock(self, part: Part) -> Path:
        return self.folder / f".lock{part.suffix}"

    def is_busy(self, part: Part) -> bool:
        """Whether a driver is at work on this part."""
        return is_locked(self._lock(part))

    def begin(self, spec: Spec, inputs: list[str], command: list[str], *, add: bool) -> None:
        """Take the folder for this job, or see that it is this job's already.

        Raises UsageError: it was begun with another model, other options, or other inputs.
        """
        now = json.loads(json.dumps(spec.configuration()))
        path = self.folder / _RUN
        if not path.exists():
            if next(self.shards.glob("shard-*"), None) is not None:
                raise UsageError(f"{self.folder} holds shards without {_RUN}: choose another folder, or give --force")
            run = {"format": FORMAT, "fingerprint": spec.fingerprint(), "configuration": now, "command": command}
            durable(path, json.dumps(run, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        elif different := differences(self.run()["configuration"], now):
            raise UsageError(
                f"{self.folder} was begun otherwise: {'; '.join(different)}. Say the same again, choose another "
                "folder, or begin anew with --force, which deletes what is there"
            )
        if has_plan(self.folder) and not add:
            known = Plan(self.folder).inputs
            if [name for name in inputs if name not in known]:
                raise UsageError(
                    f"{self.folder} was begun with {' '.join(known[:4])}, now {' '.join(inputs[:4])}: say the same "
                    "again, or add what is new with --add"
                )

    def run(self) -> dict[str, Any]:
        """What the folder was begun with. Raises UsageError."""
        path = self.folder / _RUN
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            if run["format"] != FORMAT:
                raise ValueError(f"its format is {run['format']!r}")
        except FileNotFoundError:
            raise UsageError(f"{self.folder} holds no bulk work: name the OUT of `stapes bulk INPUTS OUT`") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({error}): begin anew with --force") from None
        return run

    def clear(self) -> None:
        """Delete the work that is there. The caller holds the whole of it."""
        try:
            for path in [self.folder / _RUN, *self.folder.glob("plan.*"), self.folder / _DEATHS]:
                path.unlink(missing_ok=True)
            if self.shards.exists():
                shutil.rmtree(self.shards)
        except OSError as error:
            raise write_error(self.folder, error) from error
        self.make()

    # Shards.

    def rows_path(self, shard: int) -> Path:
        """Where a shard's rows are."""
        return self.shards / f"shard-{shard:06d}.jsonl.zst"

    def done_path(self, shard: int) -> Path:
        """What makes a shard valid."""
        return self.shards / f"shard-{shard:06d}.done"

    def commit(self, shard: int, rows: bytes, counts: Counts, facts: dict[str, Any]) -> dict[str, Any]:
        """Write a finished shard; its ``.done``. Raises OutputError, and then the shard is not there."""
        done = {
            "format": FORMAT,
            "shard": shard,
            **counts.to_dict(),
            "bytes": len(rows),
            "sha256": hashlib.sha256(rows).hexdigest(),
            **facts,
        }
        self.forget(shard)
        durable(self.rows_path(shard), rows)
        durable(self.done_path(shard), json.dumps(done, ensure_ascii=False).encode() + b"\n")
        return done

    def forget(self, shard: int) -> None:
        """Take a shard's validity away, before its rows are replaced."""
        path = self.done_path(shard)
        if path.exists():
            try:
                path.unlink()
                sync_folder(path.parent)
            except OSError as error:
                raise write_error(path, error) from error

    def finished(self) -> list[int]:
        """Numbers of the shards that are there, in order."""
        try:
            names = [entry.name for entry in os.scandir(self.shards)]
        except FileNotFoundError:
            return []
        return sorted(int(name[6:-5]) for name in names if name.endswith(".done") and name[6:-5].isdigit())

    def read_done(self, shard: int) -> dict[str, Any]:
        """A shard's ``.done``. Raises UsageError where it is damaged."""
        path = self.done_path(shard)
        try:
            done = json.loads(path.read_text(encoding="utf-8"))
            if done["format"] != FORMAT or done["shard"] != shard:
                raise ValueError("it is of another shard or format")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({error}): delete it and run the same command again") from None
        return done

    def read_rows(self, shard: int) -> list[dict[str, Any]]:
        """A shard's rows, once their hash is the one in its ``.done``. Raises UsageError."""
        done, path = self.read_done(shard), self.rows_path(shard)
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != done["sha256"]:
                raise ValueError("its hash is not the one in its .done")
            rows = [json.loads(line) for line in decompress(data).splitlines()]
            if len(rows) != done["files"]:
                raise ValueError("rows are missing")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} is damaged ({error}): delete {done_name(shard)} beside it and run the same command again"
            ) from None
        return rows

    # Files that ended a worker while it did nothing else.

    def note_death(self, item: str) -> None:
        """Remember that a worker died on this recording alone; the next driver is to know it too."""
        path = self.folder / _DEATHS
        try:
            with path.open("ab") as file:
                file.write(json.dumps({"id": item}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_error(path, error) from error

    def deaths(self) -> dict[str, int]:
        """How many workers have died on each recording alone."""
        found: dict[str, int] = {}
        with suppress(OSError):
            for line in (self.folder / _DEATHS).read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a line that was cut off by a power cut
                    name = json.loads(line)["id"]
                    found[name] = found.get(name, 0) + 1
        return found

    # How far a driver is.

    def write_status(self, part: Part, status: dict[str, Any]) -> None:
        """Say how far this part is."""
        text = json.dumps(status, ensure_ascii=False)
        quick(self.folder / f"status{part.suffix}.json", text.encode("utf-8", "backslashreplace") + b"\n")

    def read_statuses(self) -> list[tuple[Part, dict[str, Any]]]:
        """What drivers said last, each with its part."""
        found: list[tuple[Part, dict[str, Any]]] = []
        for path in sorted(self.folder.glob("status*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                status = json.loads(path.read_text(encoding="utf-8"))
                found.append((Part(*status["part"]), status))
        return found


def done_name(shard: int) -> str:
    """The name of a shard's ``.done``."""
    return f"shard-{shard:06d}.done"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two configurations, in words."""
    out: list[str] = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b)
        elif a != b:
            out.append(f"{key} was {str(a)[:60]}, now {str(b)[:60]}")
    return out


def read(folder: str | Path, shards: Iterable[int] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a job, shard by shard, of those that are finished; a shard at a time is in memory.

    folder: the OUT of ``stapes bulk``. shards: only these. A row has ``id``, ``audio``, ``key`` (of the content, the
    model and the options), ``sha256`` of the content, ``status`` (``ok``, ``failed``, ``quarantined``), ``error`` and
    its ``kind``, and for those that are ok what `Transcript.to_dict` gives. Raises UsageError where a shard is damaged.
    """
    store = Store(folder)
    store.run()
    for shard in store.finished() if shards is None else shards:
        yield from store.read_rows(shard)


def verify(folder: str | Path) -> Iterator[tuple[int, str | None]]:
    """For each finished shard, what is wrong with it, or None: its hash, its rows against the plan, its job.

    Raises UsageError where there is no job.
    """
    store = Store(folder)
    run, plan = store.run(), Plan(store.folder)
    for shard in store.finished():
        try:
            if shard >= len(plan):
                raise UsageError(f"{store.done_path(shard)} is of no shard of the plan")
            if store.read_done(shard)["fingerprint"] != run["fingerprint"]:
                raise UsageError(f"{store.done_path(shard)} was made with another model or other options")
            if [row["id"] for row in store.read_rows(shard)] != [item.id for item in plan.items(shard)]:
                raise UsageError(f"{store.rows_path(shard)} does not hold the recordings of the plan, each once")
        except UsageError as error:
            yield shard, str(error)
        else:
            yield shard, None
