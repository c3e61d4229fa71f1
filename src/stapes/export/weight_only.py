"""``stapes quantize --scheme int4`` (and ``int8-weights``): weights of a Whisper for GPUs, activations as they are.

What 4 bits cost is measured role by role (the encoder's query projections, its first MLP layers, …): with the weights
of one role in 4 bits and all others as they were, by how much the words' probabilities change, given the words before
them. The roles that most of the change comes from keep 8 bits. Weights lie in the groups of `kernels.quantization`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stapes.audio.features import SAMPLE_RATE, WINDOW_SAMPLES, log_mel_spectrogram, pad_windows
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import load_whisper
from stapes.checkpoints.quantized_folder import WEIGHTS, write_quantized
from stapes.kernels.quantization import GROUPS, dequantize, quantize_int4, quantize_int8
from stapes.models.whisper import Whisper
from stapes.options import Precision, TranscribeOptions
from stapes.recognizer import Recognizer

BITS: Mapping[str, int] = {"int8-weights": 8, "int4": 4}
"""Schemes of this file, and the fewest bits that a weight has in each."""

EMBEDDING = "decoder.embedding"

_ONCE = TranscribeOptions(vad=False, without_timestamps=True, temperature_increment_on_fallback=None)
"""Likely words are enough."""


@dataclass(frozen=True)
class Passage:
    """A window of sound and what was written for it. ``first``: where the text begins in ``tokens``."""

    mel: Tensor
    tokens: Tensor
    first: int


def role(path: str) -> str:
    """What a layer is for, in whichever layer of the stack."""
    return re.sub(r"\.layers\.\d+\.", ".", path)


def listen(recognizer: Recognizer, clips: Sequence[np.ndarray]) -> list[Passage]:
    """Windows of 16 kHz clips (up to 30 s of each) with the model's own words."""
    tokenizer, config = recognizer.tokenizer, recognizer.config
    out = []
    for pcm in clips:
        window = pcm[:WINDOW_SAMPLES]
        transcript = recognizer.transcribe(window, _ONCE, sample_rate=SAMPLE_RATE)
        language = transcript.language if tokenizer.is_multilingual else None
        start = tokenizer.start_sequence(language, "transcribe", without_timestamps=True)
        text = [token for segment in transcript.segments for token in segment.tokens if token < tokenizer.eot]
        tokens = [*start, *text[: config.text_context - len(start)]]
        mel = log_mel_spectrogram(pad_windows([window]), config.mel_bins)[..., : 2 * config.audio_context]
        out.append(Passage(mel, torch.tensor([tokens]), len(start) - 1))
    return out


@torch.inference_mode()
def log_probabilities(network: Whisper, passages: Sequence[Passage]) -> list[Tensor]:
    """Of what follows each token from the last of the prompt on: (tokens, vocabulary) for each passage."""
    return [network(each.mel, each.tokens)[0, each.first :].float().log_softmax(dim=-1) for each in passages]


def divergence(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """Mean Kullback-Leibler divergence of a token, in nats."""
    parts = [(a.exp() * (a - b)).sum(dim=-1) for a, b in zip(wanted, got, strict=True)]
    return float(torch.cat(parts).mean())


@contextmanager
def rounded(layers: Sequence[nn.Linear], bits: int) -> Iterator[None]:
    """Layers with weights of so many bits, until the block ends."""
    before = [layer.weight.data for layer in layers]
    for layer in layers:
        made = quantize_int8(layer.weight.data) if bits == 8 else quantize_int4(layer.weight.data)
        layer.weight.data = dequantize(made)
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.weight.data = weight


def measure_roles(network: Whisper, passages: Sequence[Passage], bits: int) -> dict[str, float]:
    """Role → the divergence that its weights alone bring in so many bits, the worst first."""
    roles: dict[str, list[nn.Linear]] = {}
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUPS[bits] == 0:
            roles.setdefault(role(path), []).append(module)
    wanted = log_probabilities(network, passages)
    out = {}
    for name, layers in roles.items():
        with rounded(layers, bits):
            out[name] = divergence(wanted, log_probabilities(network, passages))
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def choose_bits(network: Whisper, errors: Mapping[str, float], bits: int, sensitive: float) -> dict[str, int]:
    """Path of each matrix → its bits: 8 for the embedding, and for roles with more than that share of all errors."""
    total = sum(errors.values()) or 1.0
    out = {}
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear):
            wanted = 8 if errors.get(role(path), 0.0) > sensitive * total else bits
            if module.in_features % GROUPS[wanted] == 0:
                out[path] = wanted
    if network.config.width % GROUPS[8] == 0:
        out[EMBEDDING] = 8
    return out


def write_weights(
    checkpoint: WhisperCheckpoint,
    recognizer: Recognizer,
    clips: Sequence[np.ndarray],
    folder: Path,
    scheme: str,
    sensitive: float,
    note: Callable[[str], None],
) -> tuple[dict[str, float], tuple[str, ...], int, int]:
    """Write a model's weights into an empty folder.

    Returns the error of each role, the roles that kept 8 bits although fewer were asked for, and the bytes of the
    weights: as they are now, and in fp32.
    """
    bits = BITS[scheme]
    network = load_whisper(checkpoint, torch.float32, torch.device("cpu"))
    network.decoder.embedding.float()
    note("measuring what fewer bits do to the words' probabilities")
    errors = measure_roles(network, listen(recognizer, clips), bits)
    chosen = choose_bits(network, errors, bits, sensitive if bits < 8 else 1.0)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    precision: Precision = "int8" if bits == 8 else "int4"
    write_quantized(checkpoint, folder, precision, chosen)
    kept = sorted({role(path) for path, each in chosen.items() if each > bits and path != EMBEDDING})
    return errors, tuple(kept), (folder / WEIGHTS).stat().st_size, 4 * parameters
