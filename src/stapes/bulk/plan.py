"""The plan of a job: shards of about the same number of seconds, fixed before the first is begun.

``plan.jsonl.zst`` holds an item a line and a zstd frame a shard, so that one shard is read without the others;
``plan.npy`` says where each frame is; ``plan.json`` comes last and makes the plan valid.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from stapes.bulk.files import compress, decompress, durable, locked, sync_folder, write_error
from stapes.bulk.inputs import Item
from stapes.data.seeds import key_of
from stapes.errors import UsageError

FORMAT = "stapes-bulk-plan-1"
_ITEMS, _INDEX, _PLAN, _LOCK = "plan.jsonl.zst", "plan.npy", "plan.json", ".plan.lock"
_BATCH = 1 << 16  # items whose ids are looked up together
_FIELDS = [("offset", "u8"), ("bytes", "u4"), ("files", "u4"), ("seconds", "f8")]


class Plan:
    """The shards of a job. ``files``, ``seconds``: of each shard, ``(shards,)``. Raises UsageError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _ITEMS
        try:
            facts = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                raise ValueError(f"its format is {facts['format']!r}")
            index = np.load(folder / _INDEX, allow_pickle=False)[: facts["shards"]]
            if len(index) != facts["shards"]:
                raise ValueError(f"{_INDEX} is too short")
        except FileNotFoundError:
            raise UsageError(f"{folder} holds no bulk work: name the OUT of `stapes bulk INPUTS OUT`") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"the plan in {folder} is damaged ({error}): begin again with --force") from None
        self.inputs: list[str] = facts["inputs"]
        self.repeated: int = facts["repeated"]
        """Inputs that were listed again, and left out."""
        self.files, self.seconds = index["files"].astype(np.int64), index["seconds"]
        self._offsets, self._bytes = index["offset"].astype(np.int64), index["bytes"].astype(np.int64)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def end(self) -> int:
        """Bytes of the items' file that belong to the plan."""
        return int(self._offsets[-1] + self._bytes[-1]) if len(self) else 0

    def items(self, shard: int) -> list[Item]:
        """The items of a shard. Raises UsageError where the plan is damaged."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[shard])
                lines = decompress(file.read(self._bytes[shard])).splitlines()
            items = [Item(*json.loads(line)) for line in lines]
            if len(items) != self.files[shard]:
                raise ValueError("items are missing")
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{self._path} is damaged at shard {shard} ({error}): begin again with --force") from None
        return items


def has_plan(folder: Path) -> bool:
    """Whether a whole plan is there."""
    return (folder / _PLAN).exists()


def make_plan(
    folder: Path,
    items: Callable[[], Iterable[Item]],
    inputs: Sequence[str],
    *,
    shard_seconds: float,
    shard_files: int,
    add: bool = False,
    listed: Callable[[int, float], None] = lambda files, seconds: None,
) -> Plan:
    """Make the plan, or read the one that is there; drivers that begin at the same time wait for one of them.

    A shard is closed where the next item would take it beyond ``shard_seconds``, or ``shard_files``. add: append what
    the plan has not. listed: told of files and seconds as they are found. Raises UsageError, OutputError.
    """
    with locked(folder / _LOCK, wait=True):
        before = Plan(folder) if has_plan(folder) else None
        if before is not None and not add:
            return before
        seen = _Seen()
        if before is not None:
            for shard in range(len(before)):
                seen.new([item.id for item in before.items(shard)])
        try:
            writer = _Writer(folder / _ITEMS, before, shard_seconds, shard_files)
            repeated = 0
            with writer:
                for item in _fresh(items(), seen):
                    if item is None:
                        repeated += 1
                        continue
                    writer.add(item)
                    listed(1, item.seconds)
        except OSError as error:
            raise write_error(folder / _ITEMS, error) from error
        index = writer.index()
        if before is None and not len(index):
            raise UsageError(f"{' '.join(inputs)}: no recordings in it")
        _save(folder, index)
        known = [] if before is None else before.inputs
        facts = {
            "format": FORMAT,
            "inputs": [*known, *(name for name in inputs if name not in known)],
            "shards": len(index),
            "files": int(index["files"].sum()),
            "seconds": float(index["seconds"].sum()),
            "repeated": repeated if before is None else before.repeated,
        }
        durable(folder / _PLAN, json.dumps(facts, indent=1).encode() + b"\n")
        return Plan(folder)


def _save(folder: Path, index: np.ndarray) -> None:
    import io

    content = io.BytesIO()
    np.save(content, index, allow_pickle=False)
    durable(folder / _INDEX, content.getvalue())


class _Writer:
    """Appends shards to the items' file; a context manager that syncs it at the end."""

    def __init__(self, path: Path, before: Plan | None, shard_seconds: float, shard_files: int) -> None:
        self._seconds, self._files = shard_seconds, shard_files
        self._table = array("d")
        self._held: list[bytes] = []
        self._sum = 0.0
        self._offset = 0 if before is None else before.end
        self._known = None if before is None else np.load(path.with_name(_INDEX))[: len(before)]
        self._path = path
        self._file = path.open("r+b" if before is not None else "wb")
        self._file.truncate(self._offset)  # what an unfinished attempt left behind
        self._file.seek(self._offset)

    def add(self, item: Item) -> None:
        """Put an item into the shard being filled, or into the next."""
        if self._held and (self._sum + item.seconds > self._seconds or len(self._held) >= self._files):
            self._close_shard()
        line = json.dumps(item.to_list(), ensure_ascii=False, separators=(",", ":"))
        self._held.append(line.encode("utf-8", "surrogatepass"))
        self._sum += item.seconds

    def _close_shard(self) -> None:
        frame = compress(b"\n".join(self._held))
        self._file.write(frame)
        self._table.extend((self._offset, len(frame), len(self._held), self._sum))
        self._offset += len(frame)
        self._held, self._sum = [], 0.0

    def index(self) -> np.ndarray:
        """Where each shard is."""
        columns = np.frombuffer(self._table, np.float64).reshape(-1, len(_FIELDS))
        added = np.zeros(len(columns), _FIELDS)
        for place, (name, _) in enumerate(_FIELDS):
            added[name] = columns[:, place]
        return added if self._known is None else np.concatenate([self._known, added])

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._held:
                    self._close_shard()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if kind is None:
            sync_folder(self._path.parent)


def _fresh(items: Iterable[Item], seen: _Seen) -> Iterator[Item | None]:
    """Each item with an id that has not come before; None for one that has."""
    source = iter(items)
    while batch := list(islice(source, _BATCH)):
        for item, is_new in zip(batch, seen.new([item.id for item in batch]), strict=True):
            yield item if is_new else None


class _Seen:
    """Ids that have come, as 64-bit hashes in sorted runs: 8 bytes each, where a set would take ten times that.

    Runs of like size are merged, so that there are few of them (a log-structured merge tree's way).
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def new(self, ids: Sequence[str]) -> np.ndarray:
        """Which ids are new; they have come from now on. bool ``(ids,)``."""
        keys = np.fromiter(map(key_of, ids), np.uint64, len(ids))
        is_new = np.zeros(len(keys), bool)
        run, first = np.unique(keys, return_index=True)
        is_new[first] = True
        for known in self._runs:
            places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            is_new &= known[places] != keys
        run = np.sort(keys[is_new])
        if len(run):
            while self._runs and len(self._runs[-1]) <= 2 * len(run):
                run = np.sort(np.concatenate([self._runs.pop(), run]))
            self._runs.append(run)
        return is_new
