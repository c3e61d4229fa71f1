"""CTC models on several devices in one call: the texts of one device, shared, and none lost with a device."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from ctc_models import LETTERS, babble, save, save_languages
from ctc_models import load as load_alone
from stapes.checkpoints.spectrogram_models import save_spectrogram_model
from stapes.errors import UsageError
from stapes.inference.ctc_recording import CTCOutput, CTCSound
from stapes.inference.engine import DecodeRequest
from stapes.inference.pool_worker import packed, unpacked
from stapes.loading import load
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig
from stapes.recognizer import Recognizer
from stapes.text.ctc_tokenizer import CTCTokenizer

SECOND = 16_000
CLIPS = [babble(seconds, seed) for seed, seconds in enumerate((3.0, 41.0, 1.3, 2.0, 5.0, 0.02))]
"""One of them is several windows, normalised by what the whole of it is like; one has no frame."""


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    """Processes find all that they need, and take one core each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def texts(recognizer: Recognizer, **options: Any) -> dict[float, str]:
    """Duration → text and times of each clip."""
    found = recognizer.transcribe_many(CLIPS, sample_rate=SECOND, vad=False, word_timestamps=True, **options)
    return {round(each.duration, 2): describe(each) for each in found}


def describe(transcript: Any) -> str:
    assert transcript.error is None
    return repr(
        [(word.word, word.start, word.end) for segment in transcript.segments for word in segment.words or ()]
        + [[each.text for each in segment.alternatives or ()] for segment in transcript.segments]
    )


def share_evenly(engine: Any) -> None:
    """Windows that are given away at once, so that nothing depends on which device is faster."""
    before = list(engine.shares.values())
    sounds = [CTCSound(babble(0.2 + 0.01 * number), 0, 1, None, None, False) for number in range(40)]
    slots = engine.admit([DecodeRequest(prompt=(), sot_index=0, timestamps=False)] * 40, engine.encode(sounds))
    found: dict[Any, CTCOutput] = {}
    deadline = time.monotonic() + 100
    while len(found) < len(slots):
        assert time.monotonic() < deadline, "no results come"
        engine.step(1)
        found |= dict(engine.harvest())
    assert all(isinstance(output, CTCOutput) for output in found.values())
    shares = [now - then for now, then in zip(engine.shares.values(), before, strict=True)]
    assert sum(shares) == pytest.approx(sum(len(sound.pcm) for sound in sounds) / SECOND)
    assert min(shares) > 0.9 * max(shares)
    for slot in slots:
        engine.release(slot)


def test_two_devices_write_what_one_writes_and_lose_nothing_with_one_of_them(tmp_path: Path) -> None:
    save(tmp_path / "model", "group")
    with load_alone(tmp_path / "model") as one:
        wanted, searched = texts(one), texts(one, beam_size=4, n_best=2, hotwords="ABBA")
        parameters = one.family.parameters
    with load(tmp_path / "model", device="cpu,cpu", precision="fp32", threads=2) as recognizer:
        engine: Any = recognizer.engine
        assert recognizer.device.name == "2 × CPU"
        assert recognizer.family.parameters == parameters
        assert texts(recognizer) == wanted
        assert all(share > 0 for share in engine.shares.values())
        share_evenly(engine)
        assert texts(recognizer, beam_size=4, n_best=2, hotwords="ABBA") == searched
        session = recognizer.stream()
        session.feed(CLIPS[0])
        session.finish()
        with pytest.raises(UsageError, match="aligning a text runs on one device"):
            recognizer.align(CLIPS[0], "A", sample_rate=SECOND)

        # A device that stands still and then dies has written none of its windows: they all come all the same.
        second = engine.devices[1]
        os.kill(second.process.pid, signal.SIGSTOP)
        before = second.seconds
        # One that does not read may stop those that send, until it is dead.
        Timer(1.0, os.kill, (second.process.pid, signal.SIGKILL)).start()
        assert texts(recognizer) == wanted
        assert second.lost
        assert second.seconds == before
        assert texts(recognizer) == wanted
    assert all(device.process.poll() is not None for device in engine.devices)


def test_each_device_speaks_the_language_that_is_asked_for(tmp_path: Path) -> None:
    save_languages(tmp_path / "model")
    with load_alone(tmp_path / "model") as one:
        wanted = {language: texts(one, language=language) for language in ("eng", "deu")}
    assert wanted["eng"] != wanted["deu"]
    with load(tmp_path / "model", device="cpu,cpu", precision="fp32", threads=2) as recognizer:
        assert {language: texts(recognizer, language=language) for language in ("deu", "eng")} == wanted
        with pytest.raises(UsageError, match="no adapter"):
            recognizer.transcribe(CLIPS[0], sample_rate=SECOND, language="fra")


def test_models_over_spectrograms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = CTCConfig(encoder=ConformerConfig(width=16, layers=1, heads=2), vocab_size=len(LETTERS))
    save_spectrogram_model(tmp_path / "model", sizes, CTC(sizes).state_dict(), CTCTokenizer(LETTERS))
    with load_alone(tmp_path / "model") as one:
        wanted = texts(one)
    with load(tmp_path / "model", device="cpu,cpu", precision="fp32", threads=2) as recognizer:
        assert texts(recognizer) == wanted


def test_tensors_travel_as_bytes() -> None:
    output = CTCOutput([], torch.ones(2, 3), True)
    assert isinstance(packed(output), bytes)
    again = unpacked(packed(output))
    assert torch.equal(again.emissions, torch.ones(2, 3))
    sound = unpacked(packed(CTCSound(CLIPS[2], 0, 4, None, "deu", True)))
    assert (sound.last, sound.language, len(sound.pcm)) == (4, "deu", len(CLIPS[2]))
    assert packed(CLIPS[2]) is CLIPS[2]
