"""Real jobs on one device and on several: does another GPU give another GPU's worth, and what do processors allow?

    python -m stapes.benchmarks.bulk_run CLIPS --random-weights turbo --devices cuda:0,cuda:1 --hours 100

CLIPS are MP3 recordings of speech; recordings of the lengths that are asked for are joined of them. Every job decodes
them, finds their speech and transcribes them, with a network of a published size that knows nothing and writes as many
tokens for each window as it is told, or with a real model. Jobs run in turn: one device, all of them, one device, …
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapes.audio.decode import open_audio
from stapes.bulk.engine import Opened
from stapes.bulk.job import run_job
from stapes.bulk.options import JobOptions
from stapes.bulk.spec import Spec
from stapes.devices import machine
from stapes.options import TranscribeOptions


def open_random(spec: Spec, device: str, threads: int | None) -> Opened:
    """The engine of a job with random weights: ``settings`` say ``size``, ``tokens``, ``precision`` and ``slots``."""
    from stapes.benchmarks.random_weights import load_random

    settings = spec.settings
    recognizer = load_random(
        settings["size"],
        tokens=settings["tokens"],
        device=device,
        precision=settings["precision"],
        threads=threads,
        batch_size=settings["slots"],
    )
    where = recognizer.device
    facts = {"device": where.name, "model": f"random {settings['size']}", "slots": settings["slots"]}
    return Opened(recognizer, settings["slots"], where.backend != "cpu", facts)


def write_recordings(clips: Path, folder: Path, hours: float, seconds: float, seed: int = 0) -> float:
    """MP3 recordings of about ``seconds`` joined of clips, so many hours in all; their seconds. At most 20 hours are
    written: the rest are links to them, under names of their own."""
    source = random.Random(seed)  # noqa: S311 - a choice of clips
    pieces: list[tuple[bytes, float]] = []
    for path in sorted(clips.rglob("*.mp3")):
        with open_audio(path) as stream:
            length = sum(chunk.shape[1] for chunk in stream) / 16_000
        pieces.append((path.read_bytes(), length))
    if not pieces:
        sys.exit(f"{clips} has no .mp3 files: give a folder of speech in MP3")
    folder.mkdir(parents=True)
    written: list[tuple[Path, float]] = []
    total = 0.0
    while total < 3600 * hours:
        name = folder / f"{len(written):07d}.mp3"
        if total > 20 * 3600:
            original, length = written[source.randrange(len(written))]
            name.symlink_to(original)
        else:
            wanted, length, parts = seconds * source.uniform(0.3, 1.7), 0.0, []
            while length < wanted:
                part, more = source.choice(pieces)
                parts.append(part)
                length += more
            name.write_bytes(b"".join(parts))
        written.append((name, length))
        total += length
    return total


def busy_seconds() -> float:
    """Processor seconds that the whole machine has worked; a job's processes are too many to ask each."""
    user, nice, system = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def measure(inputs: Path, out: Path, arguments: argparse.Namespace, device: str, decoders: int) -> dict[str, Any]:
    """One job, from the first worker that is ready to the last shard written."""
    shutil.rmtree(out, ignore_errors=True)

    def make_spec(model: str, settings: dict[str, Any], progress: Any, **rest: Any) -> Spec:
        engine = "stapes.benchmarks.bulk_run:open_random"
        return Spec(model=model, settings=settings, revision="random", engine=engine, **rest)

    options = TranscribeOptions(language=arguments.language)
    settings: dict[str, Any] = {"precision": arguments.precision}
    if arguments.random_weights:
        from stapes.benchmarks.random_weights import without_judgement

        options = without_judgement(options)
        settings |= {"size": arguments.random_weights, "tokens": arguments.tokens, "slots": arguments.slots}
    before = busy_seconds()
    result = run_job(
        [str(inputs)],
        out,
        model=arguments.random_weights or arguments.model,
        options=options,
        job=JobOptions(decoders=decoders, workers=arguments.workers, shard_hours=arguments.shard_hours),
        device=device,
        threads=arguments.threads,
        settings=settings,
        make_spec=make_spec if arguments.random_weights else None,
    )
    busy = busy_seconds() - before
    wall = result["working_seconds"]
    return {
        "device": device,
        "decoders": decoders,
        "workers": len(result["workers"]),
        "hours": round(result["audio_seconds"] / 3600, 3),
        "failed": result["failed"],
        "damaged": result["damaged"],
        "working_seconds": wall,
        "audio_seconds_per_second": round(result["audio_seconds"] / wall, 1),
        "processor_seconds_per_hour_of_audio": round(3600 * busy / max(1.0, result["audio_seconds"]), 2),
        "of_processors": machine.available_cores(),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clips", type=Path)
    parser.add_argument("--random-weights", default=None, help="a published size, such as turbo")
    parser.add_argument("--model", default="base", help="a real model, where no random one is asked for")
    parser.add_argument("--tokens", type=int, default=92, help="that each window is made to write")
    parser.add_argument("--slots", type=int, default=128, help="windows decoded together")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--language", default="en")
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--workers", type=int, default=None, help="on the CPU")
    parser.add_argument("--threads", type=int, default=None, help="of each worker on the CPU")
    parser.add_argument("--decoders", default="14", help="of each worker, several counts separated by commas")
    parser.add_argument("--hours", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a recording, on average")
    parser.add_argument("--shard-hours", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="write what was found here, as JSON")
    arguments = parser.parse_args(words)
    devices = arguments.devices.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="stapes-bulk-run-") as temporary:
        inputs, out = Path(temporary) / "in", Path(temporary) / "out"
        began = time.perf_counter()
        seconds = write_recordings(arguments.clips, inputs, arguments.hours, arguments.seconds)
        count = sum(1 for _ in inputs.iterdir())
        print(f"{count} recordings, {seconds / 3600:.2f} h, in {time.perf_counter() - began:.0f} s", file=sys.stderr)  # noqa: T201
        for decoders in map(int, arguments.decoders.split(",")):
            for number in range(arguments.rounds):
                for device in [devices[0], arguments.devices] if len(devices) > 1 else devices:
                    row = {"round": number, **measure(inputs, out, arguments, device, decoders)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)  # noqa: T201
    found = {"machine": machine.facts(), "arguments": {k: str(v) for k, v in vars(arguments).items()}, "rows": rows}
    for decoders in dict.fromkeys(row["decoders"] for row in rows):
        rates = [
            [row["audio_seconds_per_second"] for row in rows if row["decoders"] == decoders and row["device"] == device]
            for device in (devices[0], arguments.devices)
        ]
        if len(devices) > 1:
            ratios = [round(many / one, 3) for one, many in zip(*rates, strict=True)]
            found.setdefault("ratios", {})[decoders] = ratios
            print(f"{decoders} decoders each: {len(devices)} devices are {ratios} × one", flush=True)  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
