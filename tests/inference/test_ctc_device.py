"""CTC models as recognisers on a GPU itself. Skipped where PyTorch sees none."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

import stapes
from ctc_models import babble, save, save_languages
from stapes.inference import ctc_recording

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SECOND = 16_000


SIZES: dict[str, Any] = {"width": 64, "conv_channels": (64,) * 7, "mlp_width": 128}


def clips() -> list[np.ndarray]:
    lengths = np.random.default_rng(0).uniform(0.3, 6, 16)
    return [babble(length, seed) for seed, length in enumerate(lengths)]


def texts(folder: Path, device: str, sounds: list[np.ndarray], **options: Any) -> list[str]:
    with stapes.load(folder, device=device, precision="fp32") as recognizer:
        alone = [recognizer.transcribe(sound, sample_rate=SECOND, vad=False, **options) for sound in sounds]
        together = list(recognizer.transcribe_many(sounds, sample_rate=SECOND, vad=False, **options))
    together.sort(key=lambda transcript: transcript.duration)
    assert_alike([each.text for each in sorted(alone, key=lambda each: each.duration)], [t.text for t in together])
    return [transcript.text for transcript in alone]


def assert_alike(texts: list[str], others: list[str]) -> None:
    """The same but for frames in which two letters are equally likely up to rounding."""
    same = total = 0
    for text, other in zip(texts, others, strict=True):
        same += sum(block.size for block in SequenceMatcher(None, text, other, autojunk=False).get_matching_blocks())
        total += max(len(text), len(other))
    assert total > 50
    assert same >= 0.99 * total


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_texts_are_those_of_the_cpu_alone_and_together(tmp_path: Path, norm: str) -> None:
    save(tmp_path / "model", norm, **SIZES)
    assert_alike(*(texts(tmp_path / "model", device, clips()) for device in ("cuda", "cpu")))


def test_beam_search_has_the_texts_of_the_cpu(tmp_path: Path) -> None:
    save(tmp_path / "model", "layer", **SIZES)
    settings: dict[str, Any] = {"beam_size": 8, "hotwords": "BAD, CAB"}
    assert_alike(*(texts(tmp_path / "model", device, clips()[:6], **settings) for device in ("cuda", "cpu")))


def test_a_long_recording_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_recording, "HELD", 40 * SECOND)
    save(tmp_path / "model", "group", **SIZES)
    assert_alike(*(texts(tmp_path / "model", device, [babble(90)]) for device in ("cuda", "cpu")))


def test_languages_take_turns_while_threads_call(tmp_path: Path) -> None:
    save_languages(tmp_path / "mms")
    sound = babble(2)
    with stapes.load(tmp_path / "mms", device="cuda", precision="fp32") as recognizer:

        def run(language: str) -> str:
            return recognizer.transcribe(sound, sample_rate=SECOND, vad=False, language=language).text

        expected = {language: run(language) for language in ("eng", "deu")}
        assert expected["eng"] != expected["deu"]
        found: list[tuple[str, str]] = []
        languages = ["eng", "deu"] * 8
        threads = [Thread(target=lambda name=name: found.append((name, run(name)))) for name in languages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == len(languages)
    assert all(text == expected[language] for language, text in found)
