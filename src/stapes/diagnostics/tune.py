"""Tune the matrix products and convolutions that a model really uses, for this GPU, and keep what is faster.

Phases, each in a process of its own (``tune_worker``): time the model as it is; run it once while TunableOp writes down
its products and MIOpen searches for its convolutions; tune the products; time it again. PyTorch's offline tuning and
MIOpen's search are documented in ``torch.cuda.tunable`` and in MIOpen's "Find modes" and "Performance database".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import stapes
from stapes.checkpoints import catalog
from stapes.devices import tuned
from stapes.devices.backend import Device, resolve
from stapes.diagnostics.tune_worker import write_sounds
from stapes.errors import ModelError, StapesError, UsageError

Worker = Callable[[dict[str, Any], Mapping[str, str]], dict[str, Any]]
"""Does one phase with these environment variables added."""

WORTH = 1.01
"""A table is kept where it makes the model this many times as fast; less is noise."""

_SOUNDS = 16
_ON_CPU = (
    "nothing to tune on the CPU: TunableOp and MIOpen are for GPUs; oneDNN chooses by itself, and stapes packs weights "
    "for it when a model is loaded"
)
_ON_NVIDIA = (
    "on NVIDIA, TunableOp knows one solution for each product, the default that cuBLAS chooses, and convolutions are "
    "cuDNN's, which has no database to keep: there is no gain to expect (--keep goes through it all the same)"
)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What to tune. ``audio``: recordings to work on; none: made-up ones. ``keep``: also where it is no faster."""

    model: str
    device: str = "auto"
    precision: str = "auto"
    batch_size: int | None = None
    audio: tuple[str, ...] = ()
    rounds: int = 5
    keep: bool = False
    model_dir: str | None = None
    offline: bool = False


@dataclass(kw_only=True)
class TuneResult:
    """What came of it. Times are seconds of the same work, of each round; empty where nothing was tuned."""

    model: str
    device: str
    backend: str
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    gemms: int = 0
    """Products in the table."""
    changed: int = 0
    """Of them, those for which another solution than the default is faster."""
    folder: str | None = None
    """Where the table is kept; None where it is not."""
    notes: list[str] = field(default_factory=list)

    @property
    def times_as_fast(self) -> float | None:
        """Above 1 the tuned model is faster."""
        return median(self.before) / median(self.after) if self.before and self.after else None


def tune(
    settings: TuneSettings, worker: Worker | None = None, log: Callable[[str], None] = lambda line: None
) -> TuneResult:
    """Tune a model on a GPU; on the CPU, and on NVIDIA unless ``keep``, say that there is nothing to tune.

    Raises DeviceError and ModelError where device or model are not here, UsageError for settings of TunableOp in the
    environment, which would steer every phase, and StapesError where a phase fails.
    """
    worker = worker or run_worker
    device = resolve(settings.device)
    if not 1 <= settings.rounds <= 1000:
        raise UsageError(f"--rounds is {settings.rounds}: give 1 to 1000")
    result = TuneResult(model=settings.model, device=device.name, backend=device.backend)
    if device.backend == "cpu":
        result.notes.append(_ON_CPU)
        return result
    if device.backend == "cuda":
        result.notes.append(_ON_NVIDIA)
        if not settings.keep:
            return result
    mine = sorted(name for name in os.environ if name.startswith("PYTORCH_TUNABLEOP_"))
    if mine:
        raise UsageError(f"{mine[0]} is set: unset it, `stapes tune` steers TunableOp by itself")
    if catalog.find(settings.model, settings.model_dir) is None:
        if settings.offline:
            raise ModelError(f"{settings.model} is not on this machine: `stapes models pull {settings.model}`")
        catalog.pull(settings.model, settings.model_dir)
    with tempfile.TemporaryDirectory(prefix="stapes-tune-") as folder:
        _tune(settings, device, result, Path(folder), worker, log)
    return result


def _tune(
    settings: TuneSettings, device: Device, result: TuneResult, folder: Path, worker: Worker, log: Callable[[str], None]
) -> None:
    audio = list(settings.audio) or write_sounds(folder, min(_SOUNDS, settings.batch_size or _SOUNDS))
    load = {
        "model": settings.model,
        "device": str(device.torch),
        "precision": settings.precision,
        "batch_size": settings.batch_size,
        "model_dir": settings.model_dir,
        "offline": True,
    }
    measure = {"phase": "measure", "load": load, "audio": audio, "rounds": settings.rounds}
    known = tuned.folder_for(device) / tuned.GEMMS

    log("timing the model as it is")
    before = worker(measure, {"STAPES_TUNED": "0"})
    result.before = before["seconds"]
    log("writing down what it computes" + (", searching for its convolutions" if device.backend == "rocm" else ""))
    worker({"phase": "record", "load": load, "audio": audio}, recording_variables(device, folder))
    untuned = sorted(map(str, folder.glob("untuned*.csv")))
    count = _count_products(untuned)
    if not count:
        result.notes.append("the model used no product that TunableOp knows: this PyTorch, or this precision, has none")
        return
    log(f"tuning {count} products; this takes minutes")
    request = {"phase": "tune", "device": str(device.torch), "untuned": untuned}
    request["known"] = str(known) if known.is_file() else None
    table = worker(request, tuning_variables(folder))
    results, validators = table["results"], table["validators"]
    result.gemms = len(results)
    result.changed = sum(1 for row in results if len(row) > 2 and row[2] != "Default")
    facts = _facts(settings, device, known.parent)
    staged = folder / "staged"
    tuned.write_table(staged, results, validators, facts)
    log("timing the tuned model")
    after = worker(measure, {"STAPES_TUNED": str(staged)})
    result.after = after["seconds"]
    differing = sum(1 for one, other in zip(before["texts"], after["texts"], strict=True) if one != other)
    if differing:
        result.notes.append(
            f"{differing} of {len(after['texts'])} texts came out differently: other kernels round differently; on "
            "recordings of yours (--audio) look whether they are as good"
        )
    if after["table"] is None:
        result.notes.append("PyTorch refused the table that it had just made: nothing was kept")
    elif settings.keep or (result.times_as_fast or 0.0) >= WORTH:
        facts["models"][settings.model] |= {"before": result.before, "after": result.after}
        result.folder = str(tuned.keep(device, results, validators, facts))
    else:
        result.notes.append("no faster than before: the table was not kept (--keep keeps it all the same)")


def recording_variables(device: Device, folder: Path) -> dict[str, str]:
    """For the phase that writes down: TunableOp records and tunes nothing; MIOpen searches what it has not searched."""
    variables = {
        "STAPES_TUNED": "0",
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "0",
        "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "1",
        "PYTORCH_TUNABLEOP_UNTUNED_FILENAME": str(folder / "untuned.csv"),
        "PYTORCH_TUNABLEOP_FILENAME": str(folder / "results.csv"),
    }
    if device.backend == "rocm":
        # 3 is SEARCH: tune what its database lacks. What it finds goes into the database that devices.rocm names.
        variables |= {"MIOPEN_FIND_ENFORCE": "3", "MIOPEN_FIND_MODE": "NORMAL"}
    return variables


def tuning_variables(folder: Path) -> dict[str, str]:
    """For the phase that tunes: 30 ms for each solution."""
    return {
        "STAPES_TUNED": "0",
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "1",
        "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "0",
        "PYTORCH_TUNABLEOP_FILENAME": str(folder / "results.csv"),
        "PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS": "30",
    }


def run_worker(request: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Do one phase in a new process. Raises what it said was wrong; StapesError where it died."""
    done = subprocess.run(
        [sys.executable, "-m", "stapes.diagnostics.tune_worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **variables},
    )
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise StapesError(
            f"the phase {request['phase']!r} of tuning ended with exit code {done.returncode}: {last[:300]}"
        ) from None
    if "error" in answer:
        kinds: dict[int, type[StapesError]] = {2: UsageError, 3: ModelError}
        raise kinds.get(answer.get("exit_code", 1), StapesError)(answer["error"])
    return answer


def _count_products(paths: Sequence[str]) -> int:
    lines: set[str] = set()
    for path in paths:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        lines |= {line for line in text.splitlines() if line.startswith(("Gemm", "ScaledGemm"))}
    return len(lines)


def _facts(settings: TuneSettings, device: Device, folder: Path) -> dict[str, Any]:
    """What is written beside the table; other models that it was tuned for stay."""
    models = tuned.read_facts(folder).get("models")
    return {
        "gpu": device.name,
        "architecture": device.architecture,
        "versions": tuned.versions(),
        "models": {
            **(models if isinstance(models, dict) else {}),
            settings.model: {
                "stapes": stapes.__version__,
                "precision": settings.precision,
                "batch_size": settings.batch_size,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        },
    }


def as_json(result: TuneResult) -> dict[str, Any]:
    """The result with its ratio."""
    return {**asdict(result), "times_as_fast": result.times_as_fast}
