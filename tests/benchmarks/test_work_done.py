"""The guard: fixed small workloads may not do more than is kept in work.json.

After a change that is meant: ``pytest tests/benchmarks --update-work``, and say in the commit why the counts changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from work import WorkCounter, excess

from stapes.audio.features import log_mel_spectrogram, pad_windows
from stapes.audio.vad import VadState, VoiceActivityDetector
from stapes.benchmarks import train_setup
from stapes.benchmarks.random_weights import random_tokenizer, random_weights
from stapes.benchmarks.train_setup import TrainSettings, open_step
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import load_whisper
from stapes.decoding.rules import Vocabulary
from stapes.devices.backend import resolve
from stapes.inference.engine import DecodeRequest
from stapes.inference.lanes import Lane
from stapes.inference.packed import can_pack
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.wav2vec2 import BASE
from stapes.models.wav2vec2_fused import fuse
from stapes.models.whisper import WhisperConfig

KEPT = Path(__file__).with_name("work.json")
CONFIG = WhisperConfig(80, 51865, 64, 2, 2, 2, 2)
SLOTS = 8
# The CPU's own layers, and the plain ones that run on GPUs (where fp16 has the same operations).
FLAVOURS = {"cpu fp32": torch.float32, "plain bf16": torch.bfloat16}
TORCH = ".".join(torch.__version__.split(".")[:2])


class Engine:
    """A small network, and windows that are noise."""

    def __init__(self, dtype: torch.dtype) -> None:
        checkpoint = WhisperCheckpoint(
            "small", Path("small"), CONFIG, lambda: random_weights(CONFIG, 0, torch.float32), None
        )
        tokenizer = random_tokenizer(CONFIG)
        vocabulary = Vocabulary(
            tokenizer.eot, tokenizer.no_speech, tokenizer.no_timestamps, tokenizer.timestamp_begin, CONFIG.vocab_size
        )
        self.engine = TorchWhisperEngine(
            load_whisper(checkpoint, dtype, torch.device("cpu")),
            vocabulary,
            tokenizer.language_ids,
            tokenizer.sot,
            (tokenizer.eot,),
            ((1, 0),),
            SLOTS,
            1,
        )
        prompt = tokenizer.start_sequence("en", without_timestamps=False)
        # The end is forbidden: every step is done with all slots.
        self.requests = [
            DecodeRequest(prompt=tuple(prompt), sot_index=0, timestamps=True, suppressed=(tokenizer.eot,), key=(i,))
            for i in range(SLOTS)
        ]
        self.pcm = np.random.default_rng(0).normal(0, 0.1, 480_000).astype(np.float32)
        self.encoded = self.engine.encode([self.pcm])
        self.engine.admit(self.requests[:1], self.encoded)  # makes the lane, whose size is no work of a window
        self.empty()

    def empty(self) -> None:
        for lane in self.engine.lanes.values():
            for slot in list(lane.slots):
                self.engine.release(slot)


def work_of_engine(dtype: torch.dtype) -> dict[str, dict[str, int]]:
    own = Engine(dtype)
    engine = own.engine
    slots: list[Any] = []
    return {
        "encode a window": count(lambda: engine.encode([own.pcm])),
        "admit 8 windows": count(lambda: slots.extend(engine.admit(own.requests, own.encoded * SLOTS))),
        "20 steps of 8 slots": count(lambda: engine.step(20)),
        "harvest": count(engine.harvest),
        "release the first of 8": count(lambda: engine.release(slots[0])),
    }


def work_of_audio() -> dict[str, dict[str, int]]:
    pcm = np.random.default_rng(0).normal(0, 0.1, 480_000).astype(np.float32)
    detector = VoiceActivityDetector()
    return {
        "features of a window": count(lambda: log_mel_spectrogram(pad_windows([pcm]))),
        # Not through its worker threads: what is counted is counted in this one.
        "speech detection, 30 s": count(lambda: detector._probabilities([VadState()], [pcm], [True])),
    }


def work_of_training() -> dict[str, dict[str, int]]:
    """A step of each task: the plain network's, and the fused one's, whose kernels are their references here."""
    found = {}
    for task in ("ctc", "pretrain"):
        for fused in (False, True):
            settings = TrainSettings(
                task=task, model="wav2vec2-base", device="cpu", batch=2, seconds=1.0, dropout=0.0, layer_drop=0.0
            )
            step = open_step(settings, resolve("cpu"))
            if fused:
                fuse(step.network.feature_extractor, step.network.encoder)
            step.step()  # makes the optimiser's state
            found[f"{task}{', fused' if fused else ''}"] = count(step.step)
    return found


def count(work: Callable[[], Any]) -> dict[str, int]:
    with WorkCounter() as counter:
        work()
    return counter.counts()


def kept(flavour: str) -> dict[str, dict[str, int]]:
    whole = json.loads(KEPT.read_text())
    if whole["torch"] != TORCH:
        pytest.skip(f"the counts were kept with PyTorch {whole['torch']}; {TORCH} may divide the work otherwise")
    return whole[flavour]


def check(flavour: str, found: dict[str, dict[str, int]], update: bool) -> None:
    if update:
        whole = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        KEPT.write_text(json.dumps({**whole, "torch": TORCH, flavour: found}, indent=1) + "\n")
    before = kept(flavour)
    assert before.keys() == found.keys()
    grown = {name: excess(before[name], counts) for name, counts in found.items()}
    assert not any(grown.values()), {name: lines for name, lines in grown.items() if lines}


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-work", default=False))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_engine_does_no_more_than_it_did(flavour: str, update: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Packed layers in bf16 are for processors that compute in it: plain ones are the same work everywhere.
    monkeypatch.setattr(
        "stapes.inference.torch_whisper.is_worth_packing", lambda device, dtype: dtype == torch.float32 and can_pack()
    )
    # So are oneDNN's attention and products, which processors with AVX2 alone have others for.
    monkeypatch.setattr("stapes.inference.cpu.has_only_avx2", lambda: False)
    monkeypatch.setattr("stapes.inference.packed.is_faster_in_half", lambda: False)
    if flavour == "cpu fp32" and not can_pack():
        pytest.skip("this PyTorch has no packed layers")
    check(flavour, work_of_engine(FLAVOURS[flavour]), update)


def test_features_and_speech_detection_do_no_more_than_they_did(update: bool) -> None:
    check("audio", work_of_audio(), update)


def test_a_training_step_does_no_more_than_it_did(update: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"width": 32, "layers": 2, "heads": 2, "mlp_width": 64, "conv_channels": (16,) * 7, "position_kernel": 16}
    monkeypatch.setattr(train_setup, "PUBLISHED", {"wav2vec2-base": replace(BASE, **sizes, position_groups=4)})
    check("training", work_of_training(), update)


def _copies_the_cache(lane: Lane, blank: torch.Tensor) -> None:
    lane.self_cache = [(keys.clone(), values) for keys, values in lane.self_cache]
    plain_step(lane, blank)


def _adds_one_operation(lane: Lane, blank: torch.Tensor) -> None:
    plain_step(lane, blank + 0.0)


def _projects_what_is_kept_again(lane: Lane, blank: torch.Tensor) -> None:
    lane.model.decoder.memory(torch.zeros(SLOTS, 1500, CONFIG.width, dtype=lane.model.decoder.positions.dtype))
    plain_step(lane, blank)


plain_step = Lane.step


@pytest.mark.parametrize(
    ("slower", "sign"),
    [(_copies_the_cache, "copied_bytes"), (_adds_one_operation, "kernels"), (_projects_what_is_kept_again, "flops")],
)
def test_the_guard_bites(slower: Callable[..., None], sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept("plain bf16")["20 steps of 8 slots"]
    monkeypatch.setattr(Lane, "step", slower)
    found = work_of_engine(torch.bfloat16)["20 steps of 8 slots"]
    assert any(line.startswith(f"{sign} grew") for line in excess(before, found))
