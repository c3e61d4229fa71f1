"""One phase of tuning, in a process of its own: libraries read their settings once, when they first run.

``python -m stapes.diagnostics.tune_worker`` reads one JSON object from stdin and prints one as its last line. Phases:
``measure`` times the work, ``record`` does it once so that TunableOp writes down every product it meets (and MIOpen
searches for every convolution), ``tune`` tunes what was written down.
"""

from __future__ import annotations

import json
import math
import sys
import time
import wave
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from stapes.errors import StapesError

_RATE = 16_000
SECONDS = 30.0


@cache
def _voice() -> np.ndarray:
    """float32 with a voice's pitch, formants and syllables."""
    time_ = np.arange(round(SECONDS * _RATE), dtype=np.float32) / _RATE
    pitch = 110 * 2 ** (0.3 * np.sin(2 * math.pi * 0.4 * time_))
    phase = 2 * math.pi * np.cumsum(pitch, dtype=np.float64) / _RATE
    centre = 500 + 300 * np.sin(2 * math.pi * 2.3 * time_)
    sound = np.zeros_like(time_)
    for harmonic in range(1, 11):
        sound += (np.sin(harmonic * phase) * np.exp(-(((harmonic * pitch - centre) / 700) ** 2))).astype(np.float32)
    sound *= np.clip(np.sin(2 * math.pi * 3.7 * time_) + 0.3, 0, None)
    return sound / np.abs(sound).max()


def speech_like(seed: int) -> np.ndarray:
    """One window of int16 samples at 16 kHz that a model works on as on speech; each seed another.

    What is tuned depends on shapes, which depend on how many windows there are and not on what they say.
    """
    random = np.random.default_rng(seed)
    voice = np.roll(_voice(), round(seed * 1.7 * _RATE))
    return (16_000 * voice + 50 * random.standard_normal(len(voice))).astype(np.int16)


def write_sounds(folder: Path, count: int) -> list[str]:
    """``count`` made recordings of one window each."""
    paths = []
    for number in range(count):
        path = folder / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(_RATE)
            file.writeframes(speech_like(number).tobytes())
        paths.append(str(path))
    return paths


def groups(paths: Sequence[str], batch: int) -> list[list[str]]:
    """One recording, two, four, …, a full batch: products have as many rows as windows that run together."""
    sizes = [2**power for power in range(20) if 2**power < batch] + [batch]
    return [[paths[place % len(paths)] for place in range(size)] for size in sizes]


def work(recognizer: Any, paths: Sequence[str], batch: int) -> list[str]:
    """Transcribe in groups of every size; the texts. Raises StapesError where a recording cannot be read."""
    from stapes.options import TranscribeOptions

    options = TranscribeOptions(
        vad=False,
        without_timestamps=True,
        temperature_increment_on_fallback=None,
        logprob_threshold=None,
        no_speech_threshold=None,
        compression_ratio_threshold=None,
    )
    texts = []
    for group in groups(paths, batch):
        found = {}
        for transcript in recognizer.transcribe_many(group, options):
            if transcript.error is not None:
                raise StapesError(f"{transcript.path}: {transcript.error}")
            found[transcript.path] = transcript.text
        texts += [found[path] for path in group if path in found]
    return texts


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Do one phase."""
    if request["phase"] == "tune":
        return _tune(request)
    import torch

    import stapes
    from stapes.devices import tuned
    from stapes.devices.backend import resolve

    settings = request["load"]
    recognizer = stapes.load(**settings)
    device = resolve(settings["device"])
    batch = recognizer.engine.slots
    if request["phase"] == "record":
        torch.backends.cudnn.benchmark = device.backend == "rocm"  # lets MIOpen search
        work(recognizer, request["audio"], batch)
        return {"batch": batch}
    seconds: list[float] = []
    texts: list[str] = []
    for number in range(request["rounds"] + 1):
        begun = time.perf_counter()
        texts = work(recognizer, request["audio"], batch)
        if device.torch.type == "cuda":
            torch.cuda.synchronize()
        if number:  # the first makes everything warm
            seconds.append(time.perf_counter() - begun)
    table = tuned.activate(device)
    return {"seconds": seconds, "texts": texts, "batch": batch, "table": str(table) if table else None}


def _tune(request: dict[str, Any]) -> dict[str, Any]:
    """Tune the products of the files; the whole table, what was known before included."""
    import torch
    from torch.cuda import tunable

    torch.cuda.set_device(torch.device(request["device"]))
    if request["known"] is not None:
        tunable.read_file(request["known"])
    for path in request["untuned"]:
        tunable.tune_gemm_in_file(path)
    torch.cuda.synchronize()
    results: Any = tunable.get_results()
    validators: Any = tunable.get_validators()
    return {"results": [list(row) for row in results], "validators": [list(row) for row in validators]}


def main() -> int:
    """Answer one request."""
    try:
        answer = run(json.load(sys.stdin))
    except StapesError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
