"""A job from end to end: what `stapes bulk` runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stapes.bulk.driver import Driver
from stapes.bulk.executor import Executor
from stapes.bulk.files import zstandard
from stapes.bulk.inputs import URL, list_inputs
from stapes.bulk.local import LocalExecutor, places
from stapes.bulk.options import JobOptions
from stapes.bulk.plan import make_plan
from stapes.bulk.report import Report
from stapes.bulk.spec import Spec
from stapes.bulk.store import Store
from stapes.errors import UsageError
from stapes.options import TranscribeOptions
from stapes.progress import Progress, Silent

_TELL_FILES = 100_000


def run_job(
    inputs: Sequence[str],
    out: str | Path,
    *,
    model: str,
    options: TranscribeOptions | None = None,
    job: JobOptions | None = None,
    device: str = "auto",
    threads: int | None = None,
    settings: dict[str, Any] | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    is_stopped: Callable[[], bool] = lambda: False,
    make_spec: Callable[..., Spec] | None = None,
) -> dict[str, Any]:
    """Transcribe everything in the inputs into the folder ``out``, or go on with that; how it went, as JSON.

    settings: further arguments of `stapes.load`. is_stopped: asked now and then whether to stop. What is finished
    stays, however this ends. Raises UsageError for inputs or options that are wrong or are not those that the folder
    was begun with; ModelError, DeviceError, OutputError; TooManyErrors where more fails than ``job.max_errors``;
    WorkersLost where no worker can go on.
    """
    job, options, progress, settings = (
        job or JobOptions(),
        options or TranscribeOptions(),
        progress or Silent(),
        settings or {},
    )
    zstandard()
    if URL.match(str(out)):
        raise UsageError(f"{out} is a URL: name a folder here or on a shared file system, and copy it when it is done")
    if job.part.count > 1 and (job.force or job.add):
        raise UsageError("--force and --add change the whole plan: give them without --shard-count")
    if make_spec is None:
        from stapes.bulk.model import open_spec as make_spec  # it takes PyTorch to import
    spec = make_spec(
        model,
        settings,
        progress,
        options=options,
        decoders=job.decoders or 1,
        decode_patience=job.decode_seconds,
        max_seconds=job.max_seconds,
    )
    store = Store(out)
    store.make()
    with store.held(job.part):
        if job.force:
            store.clear()
        absolute = [_absolute(name) for name in inputs]
        store.begin(spec, absolute, list(command), add=job.add)
        plan = make_plan(
            store.folder,
            lambda: list_inputs(inputs),
            absolute,
            shard_seconds=3600 * job.shard_hours,
            shard_files=job.shard_files,
            add=job.add,
            listed=_Listed(progress),
        )
        if plan.repeated:
            progress.note(f"{plan.repeated:,} recordings are listed more than once: each is transcribed once")
        executor = _executor(spec, job, device, threads, store)
        report = Report(plan, job.part, executor.workers, listener=progress)
        driver = Driver(
            store,
            plan,
            spec,
            executor,
            part=job.part,
            max_errors=job.max_errors,
            retry_failed=job.retry_failed,
            report=report,
            is_stopped=is_stopped,
        )
        driver.run()
        return {"out": str(store.folder), **report.to_dict("stopped" if is_stopped() else "finished")}


class _Listed:
    """Says how many recordings were found, now and then."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._files = progress, 0

    def __call__(self, files: int, seconds: float) -> None:
        self._files += files
        if self._files % _TELL_FILES == 0:
            self._progress.note(f"{self._files:,} recordings listed")


def _absolute(name: str) -> str:
    """An input as it is called whatever folder the command runs in."""
    if name.startswith("@"):
        return f"@{_absolute(name[1:])}"
    return name if URL.match(name) else os.path.abspath(name)  # noqa: PTH100 - keeps links


def _executor(spec: Spec, job: JobOptions, device: str, threads: int | None, store: Store) -> Executor:
    if job.ray is not None:
        from stapes.bulk.on_ray import RayExecutor

        spec = replace(spec, decoders=job.decoders or 4)
        return RayExecutor(spec, job.ray, device=device, workers=job.workers, threads=threads)
    found = places(device, job.workers, threads)
    decoders = job.decoders or decoders_of_each(len(found), on_gpu=found[0].device != "cpu")
    return LocalExecutor(replace(spec, decoders=decoders), found, store.folder / "log")


def decoders_of_each(workers: int, *, on_gpu: bool) -> int:
    """How many decoders each worker has: beside a GPU most processors are theirs, beside a CPU engine few."""
    from stapes.devices.machine import available_cores

    share = available_cores() / workers
    return max(2, min(16, round(share - 2))) if on_gpu else max(1, min(4, round(share / 4)))
