"""``stapes bench bulk``: how many files and workers one driver of ``stapes bulk`` can have, and what hours cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stapes.cli.terminal import Terminal, to_json
from stapes.errors import UsageError


def bulk(
    *,
    files: int = 100_000,
    workers: int = 100,
    speed: float | None = None,
    result: Path | None = None,
    file_seconds: float = 10.0,
    shard_hours: float = 1.0,
    deaths_per_hour: float = 0.01,
    price: float | None = None,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Simulate a job: the real plan and the real driver, with workers that only exist on a clock of their own.

    Says what one file costs the driver in time and memory, what comes to its limit first and at how many workers, and
    what 1,000 hours of audio take.

    For example:

        stapes bench bulk --files 10000000 --workers 1000 --result results/2026-…-mlperf-turbo-random.json
        stapes bench bulk --files 100000 --workers 100 --speed 1500 --price 3.5

    Parameters
    ----------
    files:
        Recordings.
    workers:
        Workers, a GPU each.
    speed:
        Seconds of audio that a worker transcribes a second.
    result:
        Take the speed from a result of `stapes bench mlperf`.
    file_seconds:
        Mean length of a recording.
    shard_hours:
        Hours of audio in a shard.
    deaths_per_hour:
        How often a worker dies.
    price:
        Of an hour of a worker, in whatever you pay with.
    seed:
        Of lengths, speeds and deaths.
    json:
        Print one JSON object.
    """
    from stapes.benchmarks.bulk_simulation import Scale, simulate

    if (speed is None) == (result is None):
        raise UsageError("say how fast a worker is: --speed 1500, or --result FILE of `stapes bench mlperf`")
    if min(files, workers) < 1 or file_seconds <= 0 or shard_hours <= 0 or deaths_per_hour < 0:
        raise UsageError(
            "--files, --workers, --file-seconds and --shard-hours must be above 0, --deaths-per-hour not below"
        )
    measured = speed if speed is not None else _speed(result)
    terminal = Terminal()
    scale = Scale(
        files=files,
        workers=workers,
        speed=measured,
        file_seconds=file_seconds,
        shard_seconds=3600 * shard_hours,
        deaths_per_hour=deaths_per_hour,
        seed=seed,
    )
    found = simulate(scale)
    hours = 1000 * 3600 / measured / 3600
    found["speed"] = round(measured, 1)
    found["worker_hours_per_1000_hours"] = round(hours, 4)
    found["price_per_1000_hours"] = None if price is None else round(price * hours, 2)
    terminal.out(to_json(found) + "\n" if json else _said(found))
    return 0


def _speed(result: Path | None) -> float:
    """Seconds of audio a second, of the fastest row of a result. Raises UsageError."""
    import json

    assert result is not None
    try:
        rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
        return max(system["figures"]["sound_seconds_per_second"] for row in rows for system in row["systems"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{result} is no result of `stapes bench mlperf` ({error}): give --speed") from None


def _said(found: dict[str, Any]) -> str:
    price = found["price_per_1000_hours"]
    limits = [f"{name} at {value:,}" for name, value in found["audio_seconds_per_second_at_most"].items()]
    lines = [
        f"{found['files']:,} files, {found['hours']:,.0f} h in {found['shards']:,} shards on {found['workers']:,} "
        f"workers at {found['speed']:,.0f} × real time:",
        f"  {found['simulated_hours']:.3f} h, {100 * found['share_of_ideal']:.1f} % of what they could do; "
        f"{found['deaths']:,} deaths, {100 * found['redone_share']:.2f} % done again",
        f"  planning {found['planning_microseconds_per_file']:.1f} µs a file, "
        f"{_mib(found['planning_peak_rss_bytes'])} at most, {_mib(found['plan_bytes'])} on disk",
        f"  driving {found['driving_microseconds_per_file']:.2f} µs a file, "
        f"{found['driving_milliseconds_per_shard']:.2f} ms a shard, {_mib(found['driving_peak_rss_bytes'])} at most",
        f"  writing {found['writing_milliseconds_per_shard']:.1f} ms a shard",
        f"most seconds of audio a second: {', '.join(limits)}; first {found['first_bottleneck']}, at "
        f"{found['workers_at_most']:,} workers",
        f"all of them take shards of {found['shard_hours_for_all']:g} h at least; drivers (--shard-count): "
        f"{found['drivers_for_all']:,}",
        f"1,000 hours take {found['worker_hours_per_1000_hours']:.3f} hours of a worker"
        + ("" if price is None else f": {price:.2f}"),
    ]
    return "".join(f"{line}\n" for line in lines)


def _mib(size: int | None) -> str:
    return "unknown memory" if size is None else f"{size / (1 << 20):,.0f} MiB"
