"""Small random CTC models in Hugging Face's layout, and sound that makes them say something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import stapes
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, save_wav2vec2
from stapes.checkpoints.wav2vec2_names import is_language_weight
from stapes.decoding.ctc import CTCToken, greedy
from stapes.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from stapes.models.waveform import normalize_waveform
from stapes.recognizer import Recognizer
from stapes.text.ctc_tokenizer import CTCTokenizer

LETTERS = {token: id for id, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"])}
_SIZES: dict[str, Any] = {
    "width": 32,
    "layers": 2,
    "heads": 4,
    "mlp_width": 48,
    "conv_channels": (16,) * 7,
    "position_kernel": 16,
    "position_groups": 4,
}
_LARGE = {"conv_norm": "layer", "conv_bias": True, "pre_norm": True}


def config(norm: str = "layer", **changes: Any) -> Wav2Vec2Config:
    """Of a large model with layer norms, or of a base model with a group norm."""
    return Wav2Vec2Config(**({"vocab_size": len(LETTERS), **_SIZES, **(_LARGE if norm == "layer" else {})} | changes))


def network(sizes: Wav2Vec2Config, seed: int = 0, *, attends: bool = True) -> Wav2Vec2:
    """A network whose every parameter is drawn at random. ``attends``: False lets no frame look at those far away."""
    generator = torch.Generator().manual_seed(seed)
    model = Wav2Vec2(sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.2, generator=generator)
        for module in model.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight, generator=generator)
        for layer in [] if attends else model.encoder.layers:
            nn.init.zeros_(layer.attention.out.weight)
        assert model.head is not None
        model.head.weight.normal_(0.0, 1.0, generator=generator)
        model.head.bias[0] += 2.0  # blanks
        model.head.bias[1:4] -= 100.0  # markers
        model.head.bias[4] += 2.0  # marks between words
    return model.eval().requires_grad_(False)


def save(
    folder: Path, norm: str = "layer", *, normalize: bool = True, attends: bool = True, **changes: Any
) -> Wav2Vec2:
    """Write such a model; the network."""
    sizes = config(norm, **changes)
    model = network(sizes, attends=attends)
    checkpoint = Wav2Vec2Checkpoint(
        name=folder.name,
        path=folder,
        kind="wav2vec2",
        config=sizes,
        places=(),
        tokenizer=CTCTokenizer(LETTERS),
        normalize=normalize,
    )
    save_wav2vec2(checkpoint, folder, model)
    return model


VOCABULARIES = {"eng": LETTERS, "deu": {token: id for id, token in enumerate([*list(LETTERS)[:5], *"QRSTUVWXYZÄÖ"])}}


def save_languages(folder: Path) -> dict[str, Wav2Vec2]:
    """Write a model with adapters for two languages; the network in each. It was saved in the first one."""
    models: dict[str, Wav2Vec2] = {}
    for language, vocabulary in VOCABULARIES.items():
        sizes = config("layer", adapter_width=4, vocab_size=len(vocabulary))
        model = network(sizes, seed=len(models))
        spoken = models.setdefault("eng", model).state_dict()
        shared = {name: tensor for name, tensor in spoken.items() if not is_language_weight(name)}
        model.load_state_dict(shared, strict=False)
        models[language] = model
        tokenizer = CTCTokenizer(vocabulary, language=language, vocabularies=VOCABULARIES)
        place = folder if language == "eng" else folder.with_name(f"{folder.name}-{language}")
        checkpoint = Wav2Vec2Checkpoint(
            folder.name, place, "wav2vec2", sizes, (), tokenizer, language=language, languages=(language,)
        )
        save_wav2vec2(checkpoint, place, model)
        file = f"adapter.{language}.safetensors"
        (place / file).rename(folder / file)
    return models


def babble(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose colour and loudness change ten times a second, with an offset: a letter here and there."""
    rng = np.random.default_rng(seed)
    samples = round(seconds * 16_000)
    out = np.zeros(samples, np.float32)
    for start in range(0, samples, 1600):
        time = np.arange(min(1600, samples - start)) / 16_000
        pitch, loudness = rng.uniform(100, 3000), rng.uniform(0.01, 0.3)
        piece = np.sin(2 * np.pi * pitch * time) + 0.5 * rng.standard_normal(len(time))
        out[start : start + len(time)] = loudness * piece
    return out + np.float32(0.05)


@torch.inference_mode()
def whole(model: Wav2Vec2, pcm: np.ndarray, normalize: bool = True) -> torch.Tensor:
    """Logits of a whole recording, the plain way: (frames, vocabulary)."""
    waveform = torch.from_numpy(pcm)[None]
    return model(normalize_waveform(waveform) if normalize else waveform)[0][0]


def said(logits: torch.Tensor) -> list[CTCToken]:
    """The tokens of logits (frames, vocabulary)."""
    return greedy(logits[None], [len(logits)], 0)[0]


def text_of(tokens: Sequence[CTCToken], vocabulary: Mapping[str, int] = LETTERS) -> str:
    """What tokens say."""
    return " ".join(CTCTokenizer(vocabulary).decode([token.id for token in tokens]).split())


def load(folder: Path, **options: Any) -> Recognizer:
    """The recogniser of a folder, on the CPU."""
    return stapes.load(folder, device="cpu", precision="fp32", **options)
