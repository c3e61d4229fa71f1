"""A soak: thousands of windows of every sort through one recogniser, which may neither lose a request nor memory.

    python tests/inference/soak.py --windows 20000 --random tiny --device cuda
    python tests/inference/soak.py --windows 20000 --model base --audio ../shared/data/librispeech/audio

Several threads call at once: clips, batches, iterators that are closed half-way, inputs that cannot be read, listeners
that fail; with beams, samples, forced fallback, word times, languages to be detected, other batch sizes. The work is
done in rounds. After each, when all calls are over, what is still in use is noted: memory of the process and of the
device, Python objects, slots. Exit code 1 when any of these has grown after the warm-up or any call went wrong.

Without ``--audio`` recordings are noise in bursts, and every burst counts as speech.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes import FakeDetector

import stapes
from stapes.audio.decode import read_audio
from stapes.benchmarks.random_weights import random_tokenizer, random_weights
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.sizes import published_config
from stapes.devices.backend import choose_dtype, resolve
from stapes.devices.memory import trim_heap
from stapes.errors import AudioError
from stapes.loading import assemble
from stapes.models.whisper import WhisperConfig
from stapes.progress import Silent
from stapes.recognizer import Recognizer
from stapes.transcript import Transcript

RATE = 16000
SMALL = WhisperConfig(80, 51865, 128, 2, 2, 2, 2)
"""What ``--random small`` is: two layers of two heads."""

STALLED_SECONDS = 300.0
"""Without a window for so long, calls wait for ever."""


def load_random(name: str, device: str, precision: Any, slots: int, tokens: int) -> Recognizer:
    """A network that knows nothing, of a published size or the small one; its windows have room for few tokens."""
    config = replace(SMALL if name == "small" else published_config(name), text_context=tokens)
    where = resolve(device)
    dtype = choose_dtype(precision, where)
    checkpoint = WhisperCheckpoint(
        name, Path(f"random-{name}"), config, lambda: random_weights(config, 0, torch.float32), None
    )
    return assemble(name, checkpoint, random_tokenizer(config), where, dtype, slots)


@dataclass
class Audio:
    """Recordings of any length: cut out of real speech, or noise in bursts."""

    samples: np.ndarray
    is_speech: bool

    @staticmethod
    def open(folder: str | None, minutes: float = 10.0) -> Audio:
        if folder is None:
            return Audio(np.random.default_rng(0).normal(0, 0.1, round(minutes * 60 * RATE)).astype(np.float32), False)
        parts: list[np.ndarray] = []
        for path in sorted(p for p in Path(folder).iterdir() if p.suffix in (".mp3", ".wav", ".flac", ".ogg")):
            parts.append(read_audio(path)[0])
            if sum(map(len, parts)) > minutes * 60 * RATE:
                break
        return Audio(np.concatenate(parts), True)

    def make(self, chance: random.Random, seconds: float) -> np.ndarray:
        size = round(seconds * RATE)
        first = chance.randrange(max(1, len(self.samples) - size))
        recording = self.samples[first : first + size]
        if self.is_speech:
            return recording
        recording, position = recording.copy(), 0
        while position < size:
            position += round(chance.uniform(1, 12) * RATE)
            pause = round(chance.uniform(0.1, 3) * RATE)
            recording[position : position + pause] = 0.0
            position += pause
        return recording


class Deaf(Silent):
    """A listener that fails at the first progress it hears of."""

    def advance(self, seconds: float) -> None:
        raise OSError("this listener always fails")


@dataclass
class Watch:
    """Counts what goes through an engine."""

    windows: int = 0
    occupied: int = 0
    latest: float = field(default_factory=time.monotonic)

    def over(self, engine: Any) -> Watch:
        encode, admit, release = engine.encode, engine.admit, engine.release

        def counted_encode(windows: Sequence[np.ndarray], *, again: bool = False) -> list[Any]:
            self.windows += 0 if again else len(windows)
            self.latest = time.monotonic()
            return encode(windows, again=again)

        def counted_admit(requests: Sequence[Any], encoded: Sequence[Any]) -> list[Any]:
            slots = admit(requests, encoded)
            self.occupied += len(slots)
            return slots

        def counted_release(slot: Any) -> None:
            release(slot)
            self.occupied -= 1

        engine.encode, engine.admit, engine.release = counted_encode, counted_admit, counted_release
        return self


class _Heap(ctypes.Structure):
    """glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def heap_in_use() -> int | None:
    """Bytes that the C library has given out and not got back; what grows beside them is holes, or no heap."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Heap
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


@dataclass(frozen=True)
class Rest:
    """What is in use while nothing runs. Bytes; on a device None where there is none."""

    windows: int
    seconds: float
    resident: int
    heap: int | None
    objects: int
    pinned: int | None
    allocated: int | None
    reserved: int | None

    @staticmethod
    def now(windows: int, seconds: float) -> Rest:
        for _ in range(3):
            gc.collect()
        trim_heap()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        return Rest(
            windows=windows,
            seconds=seconds,
            resident=pages * os.sysconf("SC_PAGE_SIZE"),
            heap=heap_in_use(),
            objects=len(gc.get_objects()),
            pinned=torch.cuda.host_memory_stats().get("allocated_bytes.current") if on_device else None,
            allocated=torch.cuda.memory_allocated() if on_device else None,
            reserved=torch.cuda.memory_reserved() if on_device else None,
        )

    def line(self) -> str:
        device = "" if self.allocated is None else " ".join(map(_mb, (self.pinned, self.allocated, self.reserved)))
        rate = self.windows / self.seconds if self.seconds else 0.0
        return f"{self.windows:8} {rate:9.1f} {_mb(self.resident)} {_mb(self.heap)} {self.objects:9} {device}"


HEADER = " windows windows/s    RSS MB   heap MB   objects  pinned MB, device MB allocated, reserved"


def _mb(count: int | None) -> str:
    return "        –" if count is None else f"{count / 1e6:9.1f}"


LIMITS = {
    "resident": (0.04, 24e6),
    "heap": (0.04, 24e6),
    "pinned": (0.05, 64e6),
    "objects": (0.01, 1000),
    "allocated": (0.02, 8e6),
    "reserved": (0.05, 64e6),
}
"""How much more may be in use at the end than after the warm-up: a share of it, and something besides."""


def growth(rests: Sequence[Rest]) -> list[str]:
    """What has grown: the least of the last third beside the least of the first, both after a quarter to warm up.

    The least, because what an allocator keeps for later comes and goes, and a leak only comes.
    """
    rests = rests[len(rests) // 4 :]
    third = max(1, len(rests) // 3)
    grown = []
    for what, (share, besides) in LIMITS.items():
        values = [getattr(rest, what) for rest in rests]
        if None in values:
            continue
        before, after = min(values[:third]), min(values[-third:])
        if after > before * (1 + share) + besides:
            grown.append(f"{what} grew from {before:,.0f} to {after:,.0f}")
    return grown


@dataclass
class Soak:
    """Callers on one recogniser, and what came of their calls."""

    recognizer: Recognizer
    audio: Audio
    watch: Watch
    longest: float = 90.0
    slots: int = 8
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def round(self, windows: int, callers: int, seed: int) -> None:
        """Call until so many windows went through the engine, and all calls are over."""
        goal = self.watch.windows + windows
        threads = [
            threading.Thread(target=self._caller, args=(goal, random.Random(f"{seed} {number}")), daemon=True)
            for number in range(callers)
        ]
        self.watch.latest = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
                if time.monotonic() - self.watch.latest > STALLED_SECONDS:
                    faulthandler.dump_traceback()
                    self.wrong.append(f"no window for {STALLED_SECONDS:.0f} s: calls wait for ever")
                    return
        deadline = time.monotonic() + 5
        while self.watch.occupied and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.watch.occupied:
            self.wrong.append(f"{self.watch.occupied} slots are taken although all calls are over")

    def _caller(self, goal: int, chance: random.Random) -> None:
        while self.watch.windows < goal and not self.wrong:
            try:
                self.outcomes[self._call(chance)] += 1
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _options(self, chance: random.Random) -> dict[str, Any]:
        options: dict[str, Any] = {
            "sample_rate": RATE,
            "language": "en" if chance.random() < 0.7 else None,
            "seed": chance.randrange(1000),
            "priority": chance.choice(["interactive", "bulk"]),
        }
        judged = chance.random() < 0.3  # noise fails every threshold: it is tried at every temperature
        if not judged:
            options |= {"logprob_threshold": None, "temperature_increment_on_fallback": None}
        elif chance.random() < 0.5:
            options |= {"logprob_threshold": 0.0, "temperature_increment_on_fallback": 0.5}
        options |= chance.choice(
            [{}, {}, {"word_timestamps": True}, {"without_timestamps": True}, {"condition_on_previous_text": True}]
        )
        options |= chance.choice(
            [{}, {}, {"beam_size": 2}, {"beam_size": 5}, {"temperature": 0.7, "best_of": 1}, {"best_of": 2}]
        )
        if chance.random() < 0.03:
            options["batch_size"] = chance.randint(1, self.slots)
        return options

    def _call(self, chance: random.Random) -> str:
        """One call of any sort; what sort it was. Raises AssertionError when its answer is not what it must be."""
        options, sort = self._options(chance), chance.random()
        recognizer = self.recognizer
        if sort < 0.4:
            clip = self.audio.make(chance, chance.uniform(0.2, 12))
            _check(recognizer.transcribe(clip, **options), clip)
            return "clips"
        if sort < 0.45:
            try:
                recognizer.transcribe(b"this is no recording", **options)
            except AudioError:
                return "unreadable"
            raise AssertionError("a recording was read that is none")
        recordings = [self.audio.make(chance, chance.uniform(0.5, self.longest)) for _ in range(chance.randint(1, 6))]
        if options.get("condition_on_previous_text"):  # one window after the other
            recordings = [recording[: 20 * RATE] for recording in recordings[:2]]
        if sort < 0.5:
            try:
                list(recognizer.transcribe_many(recordings, progress=Deaf(), **options))
            except OSError:
                return "listeners that fail"
            return "batches"  # all so short that there was no progress to report
        wanted = {len(recording) / RATE: recording for recording in recordings}
        results = recognizer.transcribe_many(recordings, **options)
        if sort < 0.7:
            with closing(results):  # type: ignore[type-var]
                for _ in range(chance.randrange(len(recordings))):
                    found = next(results)
                    _check(found, wanted[found.duration])
            return "cancelled"
        count = 0
        for found in results:
            _check(found, wanted[found.duration])
            count += 1
        assert count == len(recordings), f"{count} answers to {len(recordings)} recordings"
        return "batches"


def _check(found: Transcript, recording: np.ndarray) -> None:
    assert found.error is None, found.error
    assert found.duration == len(recording) / RATE
    assert all(0 <= segment.start <= segment.end <= found.duration + 0.1 for segment in found.segments)


def warm_up(recognizer: Recognizer, audio: Audio) -> None:
    """Meet every kind of slot once, so that what it needs is there before anything is measured."""
    kinds: list[dict[str, Any]] = [
        {},
        {"beam_size": 2},
        {"beam_size": 5},
        {"temperature": 0.7, "best_of": 1},
        {"temperature": 0.7, "best_of": 2},
        {"temperature": 0.7, "best_of": 5},
    ]
    for kind in kinds:
        clips = [audio.make(random.Random(number), 5.0) for number in range(4)]
        options = {"language": "en", "word_timestamps": True, "temperature_increment_on_fallback": None} | kind
        list(recognizer.transcribe_many(clips, sample_rate=RATE, **options))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="a name, folder or file with real weights")
    model.add_argument("--random", default="small", help="random weights of a published size, or small (default)")
    parser.add_argument("--windows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--slots", type=int, default=None, help="windows decoded together")
    parser.add_argument("--tokens", type=int, default=64, help="text context of random weights (default 64)")
    parser.add_argument("--longest", type=float, default=90.0, help="seconds of the longest recording")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--audio", help="a folder of recordings with speech")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)

    on_cpu = resolve(chosen.device).backend == "cpu"
    slots = chosen.slots or (8 if on_cpu else 32)
    if chosen.model is not None:
        recognizer = stapes.load(
            chosen.model, device=chosen.device, precision=chosen.precision, batch_size=slots, offline=True
        )
    else:
        recognizer = load_random(chosen.random, chosen.device, chosen.precision, slots, chosen.tokens)
    audio = Audio.open(chosen.audio)
    if not audio.is_speech:
        recognizer._detector = FakeDetector()  # type: ignore[assignment]
    with recognizer:
        warm_up(recognizer, audio)
        soak = Soak(recognizer, audio, Watch().over(recognizer.engine), chosen.longest, slots)
        rests: list[Rest] = []
        print(HEADER)
        for number in range(chosen.rounds):
            began = time.perf_counter()
            before = soak.watch.windows
            soak.round(-(-chosen.windows // chosen.rounds), chosen.callers, chosen.seed + number)
            rests.append(Rest.now(soak.watch.windows - before, time.perf_counter() - began))
            print(rests[-1].line(), flush=True)
            if soak.wrong:
                break
        print(f"{soak.watch.windows} windows; calls: " + ", ".join(f"{n} {sort}" for sort, n in soak.outcomes.items()))
        for problem in (problems := soak.wrong or growth(rests)):
            print(f"WRONG: {problem}")
        if not problems:
            print("every call was answered, every slot is free, nothing has grown")
        sys.stdout.flush()
        if any("for ever" in problem for problem in problems):
            os._exit(1)
    return 1 if problems else 0


if __name__ == "__main__":
    # glibc gives threads heaps of their own, whose holes grow for hours without any leak: measure with one.
    if "MALLOC_ARENA_MAX" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_ARENA_MAX": "1"})
    sys.exit(main())
