"""A language of tones, made in a moment: each letter is a pitch, and a small network learns it in a few steps."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np

from stapes.progress import Silent
from stapes.training.config import TrainConfig
from stapes.training.parallel import Processes, processes
from stapes.training.recipes import words
from stapes.training.setup import open_run
from stapes.training.trainer import Result, Trainer

PITCHES = {"a": 400.0, "b": 900.0, "c": 1700.0}


def tones(text: str, seed: int = 0) -> np.ndarray:
    """Samples of a text: a tenth of a second a letter, the last third of it silent, and silence for a space."""
    random = np.random.default_rng(seed)
    seconds = np.arange(1600) / 16_000
    loudness = np.where(seconds < 0.07, 0.3, 0.0)
    parts = [loudness * np.sin(2 * np.pi * PITCHES[c] * seconds) if c in PITCHES else 0 * seconds for c in text]
    return (np.concatenate(parts) + 0.003 * random.standard_normal(1600 * len(parts))).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray) -> None:
    """16 bits, 16 kHz, mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def cut(path: Path, text: str, seconds: float) -> str:
    """A line of a manifest."""
    recording = {
        "id": path.stem,
        "sources": [{"type": "file", "channels": [0], "source": str(path)}],
        "sampling_rate": 16_000,
        "num_samples": round(seconds * 16_000),
        "duration": seconds,
    }
    said = {"id": path.stem, "recording_id": path.stem, "start": 0.0, "duration": seconds, "channel": 0, "text": text}
    whole = {"id": path.stem, "start": 0.0, "duration": seconds, "channel": 0, "type": "MonoCut"}
    return json.dumps({**whole, "supervisions": [said], "recording": recording})


def write_corpus(folder: Path, count: int = 24, seed: int = 0) -> Path:
    """Utterances of 6 to 14 letters and their manifest."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        length = int(random.integers(6, 15))
        text = "".join(random.choice(list("abc  "), length)).strip()
        text = " ".join(text.split()) or "a"
        path = folder / f"{seed}-{number}.wav"
        samples = tones(f" {text} ", number)
        write_wav(path, samples)
        lines.append(cut(path, text, len(samples) / 16_000))
    manifest = folder / f"manifest-{seed}.jsonl"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def small_config(folder: Path, manifest: Path, dev: Path | None = None, steps: int = 8) -> TrainConfig:
    """A run of a few steps on a very small network."""
    config = words()
    config.output = str(folder)
    config.data.train, config.data.dev = [str(manifest)], [str(dev)] if dev is not None else []
    config.data.batch_seconds, config.data.workers, config.data.buckets = 8.0, 0, 2
    config.data.vocabulary, config.model.dropout = "char", 0.1
    config.model.normalize_recordings = False
    model = config.model
    model.mel_bins, model.width, model.layers, model.heads, model.mlp_width = 32, 48, 1, 4, 96
    model.conv_kernel, model.subsampling_channels, model.subsampling = 7, 16, 4
    config.masks.time_masks, config.masks.time_width, config.masks.frequency_width = 2, 5, 4
    config.run.epochs, config.run.steps, config.run.evaluate_every = None, steps, 1000
    config.run.log_every, config.run.tensorboard, config.run.device = 2, False, "cpu"
    return config


def opened(config: TrainConfig, *, resume: bool = False, alone: Processes | None = None) -> Trainer:
    """The run of a configuration, in this process."""
    if alone is None:
        with processes("cpu", config.parallel) as alone:
            return open_run(config, alone, Silent(), resume=resume)
    return open_run(config, alone, Silent(), resume=resume)


def trained(config: TrainConfig, *, resume: bool = False) -> tuple[Trainer, Result]:
    """A run, made."""
    trainer = opened(config, resume=resume)
    return trainer, trainer.run()
