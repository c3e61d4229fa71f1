"""One engine on several devices: the same texts as on one, evenly shared, and none lost with a device."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pooled_engine
import pytest
from fakes import tone, whole

from stapes.errors import DeviceError, ModelError, UsageError
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.pool import PoolDevice, PoolEngine, PoolSlot, PoolSound, choose
from stapes.inference.pool_open import several, threads_of_each
from stapes.loading import load
from stapes.models.whisper import WhisperConfig
from stapes.options import TranscribeOptions

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("checkpoints", "export")]
from borrowed_tokenizer import a_tokenizer
from small_whisper import random_weights, write_huggingface

REQUEST = DecodeRequest(prompt=(1, 2), sot_index=0, timestamps=True)

PATIENCE = 100.0
"""Seconds until a test that waits for another process gives up."""


@pytest.fixture(scope="module", autouse=True)
def findable() -> Iterator[None]:
    """Processes find the engines of these tests, and take one core each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def windows(count: int, seed: int = 0) -> list[np.ndarray]:
    """Short ones: a device that does not read must not stop the one that writes."""
    rng = random.Random(seed)
    return [tone(rng.uniform(0.02, 0.1), rng.random()) for _ in range(count)]


def collect(engine: PoolEngine, slots: Sequence[PoolSlot]) -> dict[PoolSlot, DecodeResult]:
    """The results of all slots."""
    found: dict[PoolSlot, DecodeResult] = {}
    deadline = time.monotonic() + PATIENCE
    while len(found) < len(slots):
        assert time.monotonic() < deadline, "no results come"
        engine.step(1)
        for slot, result in engine.harvest():
            assert slot not in found, "told twice"
            found[slot] = result
    return found


def steps(engine: PoolEngine) -> None:
    """Until something is raised."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        engine.step(1)


def check(engine: PoolEngine, pcm: Sequence[np.ndarray], slots: Sequence[PoolSlot]) -> None:
    found = collect(engine, slots)
    assert [found[slot] for slot in slots] == [whole(each, REQUEST) for each in pcm]


def test_three_devices_share_evenly_and_lose_nothing_when_two_of_them_die() -> None:
    engine = PoolEngine([(name, pooled_engine.open_one) for name in ("cpu", "cpu", "cpu")])
    try:
        assert engine.slots == 3 * 64
        # Given away at once, nothing depends on which is faster.
        pcm = windows(60)
        slots = engine.admit([REQUEST] * 60, engine.encode(pcm))
        check(engine, pcm, slots)
        shares = list(engine.shares.values())
        assert sum(shares) == pytest.approx(sum(len(each) for each in pcm) / 16_000)
        assert min(shares) > 0.9 * max(shares)

        # Asked together, answered in order.
        languages = engine.detect_language(engine.encode(pcm[:7]))
        assert [each["en"] for each in languages] == pytest.approx([float(each[0]) for each in pcm[:7]])

        # Text that was taken is aligned although its device has died in between.
        first = engine.devices[0]
        assert any(slot.device is first for slot in slots)
        first.process.kill()
        first.process.wait()
        texts = [[1, 2, 3]] * len(slots)
        aligned = engine.align(slots, [(1, 2)] * len(slots), texts)
        assert [len(each.probabilities) for each in aligned] == [3] * len(slots)
        assert first.lost
        assert all(slot.device is not first for slot in slots)
        assert engine.harvest() == []  # what was written again is not told again
        for slot in slots:
            engine.release(slot)

        # A device that stands still and then dies has written none of its windows: they all come all the same.
        second = engine.devices[1]
        os.kill(second.process.pid, signal.SIGSTOP)
        pcm = windows(12, seed=1)
        slots = engine.admit([REQUEST] * 12, engine.encode(pcm))
        assert any(slot.device is second for slot in slots)
        os.kill(second.process.pid, signal.SIGKILL)
        check(engine, pcm, slots)
        assert engine.slots == 64
        for slot in slots:
            engine.release(slot)

        third = engine.devices[2]
        third.process.kill()
        third.process.wait()
        engine.admit([REQUEST], engine.encode(pcm[:1]))
        with pytest.raises(DeviceError, match="the processes of all devices have ended"):
            steps(engine)
    finally:
        engine.close()
    assert all(device.process.poll() is not None for device in engine.devices)


@pytest.mark.parametrize(("opener", "error"), [(pooled_engine.open_none, ModelError), (pooled_engine.die, DeviceError)])
def test_what_keeps_a_device_from_starting_is_said(opener: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"no such model|exit code 3"):
        PoolEngine([("cpu", opener)])


def test_an_error_of_an_engine_is_its_callers() -> None:
    engine = PoolEngine([("cpu", pooled_engine.open_broken)])
    engine.admit([REQUEST], engine.encode(windows(1)))
    with pytest.raises(ValueError, match="the engine is broken"):
        steps(engine)
    engine.close()


def test_equal_devices_share_evenly_whatever_the_lengths() -> None:
    rng = random.Random(2)
    nothing: Any = None
    devices = [PoolDevice(f"cuda:{index}", nothing, nothing) for index in range(4)]
    ends = {id(device): 0.0 for device in devices}
    now = 0.0
    for number in range(400):
        sound = PoolSound(number, np.zeros(round(16_000 * rng.uniform(0.5, 30)), np.float32), False)
        device = choose(devices)
        device.slots[number] = PoolSlot(number, sound, REQUEST, device)
        # Each takes a second for a second; a new window comes when the first of them has room for a third.
        while min(len(each.slots) for each in devices) >= 2:
            busy = min(devices, key=lambda each: ends[id(each)] + next(iter(each.slots.values())).sound.seconds)
            done = busy.slots.pop(next(iter(busy.slots)))
            ends[id(busy)] += done.sound.seconds
            busy.seconds += done.sound.seconds
            now = max(now, ends[id(busy)])
    shares = [device.seconds for device in devices]
    assert min(shares) > 0.9 * max(shares)


def test_recordings_are_shared_by_devices_and_outlive_one(tmp_path: Path) -> None:
    config = WhisperConfig(80, 51865, 32, 1, 2, 1, 2, text_context=24)
    folder = write_huggingface(tmp_path / "small", random_weights(config=config), config=config)
    (folder / "tokenizer.json").symlink_to(a_tokenizer())
    options = TranscribeOptions(language="en", vad=False, temperature_increment_on_fallback=None)
    clips = [tone(1.0, level) for level in (0.1, 0.2, 0.3, 0.4)]
    with load(folder, device="cpu,cpu", threads=2) as recognizer:
        assert recognizer.device.name == "2 × CPU"
        engine: Any = recognizer.engine
        first = list(recognizer.transcribe_many(clips, options, sample_rate=16_000))
        assert [each.error for each in first] == [None] * 4
        assert all(share > 0 for share in engine.shares.values())
        engine.devices[1].process.kill()
        engine.devices[1].process.wait()
        again = list(recognizer.transcribe_many(clips, options, sample_rate=16_000))
        assert [each.error for each in again] == [None] * 4
        assert sum(engine.shares.values()) == pytest.approx(8.0)
    assert all(device.process.poll() is not None for device in engine.devices)


def test_names_of_several_devices() -> None:
    assert several("cuda") == several("cuda:1") == several("auto") == ()
    assert several("cuda:0,cuda:1") == ("cuda:0", "cuda:1")
    assert several("cpu, cpu") == ("cpu", "cpu")
    with pytest.raises(UsageError, match="one name is empty"):
        several("cpu,")
    assert threads_of_each(("cpu", "cpu"), 8) == 4
    assert threads_of_each(("cpu",) * 64, 8) == 1
    assert threads_of_each(("cuda:0", "cuda:1"), None) is None
