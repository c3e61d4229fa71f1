"""``stapes quantize --scheme int4`` (``int8-weights``, ``fp8``): weights of a Whisper for GPUs.

What 4 bits cost is measured role by role (the encoder's query projections, its first MLP layers, …): with the weights
of one role in 4 bits and all others as they were, by how much the words' probabilities change, given the words before
them. The roles that most of the change comes from keep 8 bits. Weights lie in the groups of `kernels.quantization`.

With 8-bit floats it is the same, but that such roles stay in fp16, where that changes anything to speak of. Where a GPU
multiplies 8-bit floats, which is in the encoder, the activations are rounded too, row by row: that is measured with the
weights, and words are counted so.
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
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.checkpoints.quantized_folder import WEIGHTS, write_quantized
from stapes.kernels.fp8_rows import round_rows_reference
from stapes.kernels.fp8_weights import STORED, dequantize_fp8, quantize_fp8
from stapes.kernels.quantization import GROUPS, dequantize, quantize_int4, quantize_int8
from stapes.models.whisper import Whisper
from stapes.options import Precision, TranscribeOptions
from stapes.recognizer import Recognizer

PRECISIONS: Mapping[str, Precision] = {"int8-weights": "int8", "int4": "int4", "fp8": "fp8"}
"""Schemes of this file, and what the weights of each are in."""

EMBEDDING = "decoder.embedding"

HARMLESS = 1e-3
"""Divergence, in nats a token, below which no kind of layer is worth 16 bits in place of an 8-bit float. On Whisper
base all kinds but one are below half of it; the embedding, which chooses the words, is at ten times as much."""

_ONCE = TranscribeOptions(vad=False, without_timestamps=True, temperature_increment_on_fallback=None)
"""Likely words are enough."""


@dataclass(frozen=True)
class Passage:
    """A window of sound and what was written for it. ``first``: where the text begins in ``tokens``."""

    mel: Tensor
    tokens: Tensor
    first: int


def role(path: str, precision: Precision = "int4") -> str:
    """What a layer is for, in whichever layer of the stack. In 8-bit floats, layers that are one product are one."""
    name = re.sub(r"\.layers\.\d+\.", ".", path)
    return re.sub(r"^(encoder\.attention)\.(query|key|value)$", r"\1.qkv", name) if precision == "fp8" else name


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


Matrix = nn.Linear | nn.Embedding


@contextmanager
def rounded(layers: Mapping[str, Matrix], precision: Precision) -> Iterator[None]:
    """Layers, by their paths, with weights of so few bits until the block ends."""
    before = {path: layer.weight.data for path, layer in layers.items()}
    hooks = []
    for path, layer in layers.items():
        layer.weight.data = _rounded(layer.weight.data, precision)
        if precision == "fp8" and _is_multiplied_in_fp8(path):
            hooks.append(layer.register_forward_pre_hook(_round_rows))
    try:
        yield
    finally:
        for path, layer in layers.items():
            layer.weight.data = before[path]
        for hook in hooks:
            hook.remove()


def _rounded(weight: Tensor, precision: Precision) -> Tensor:
    if precision == "fp8":
        return dequantize_fp8(quantize_fp8(weight))
    return dequantize(quantize_int8(weight) if precision == "int8" else quantize_int4(weight))


def _is_multiplied_in_fp8(path: str) -> bool:
    return path.startswith("encoder.layers.")


def _round_rows(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a layer hears, as a GPU rounds it on its way into a product of 8-bit floats."""
    x = inputs[0]
    values, scales = round_rows_reference(x.flatten(0, -2), STORED)
    return ((values.float() * scales).view_as(x).to(x.dtype),)


def _fits(module: Matrix, precision: Precision, bits: int) -> bool:
    """Whether a layer can have so many bits."""
    return precision == "fp8" or module.weight.shape[1] % GROUPS[bits] == 0


def measure_roles(network: Whisper, passages: Sequence[Passage], precision: Precision) -> dict[str, float]:
    """Role → the divergence that rounding it alone brings in a precision, the worst first.

    The embedding, which is the output projection too, is judged in 8-bit floats only: elsewhere it has 8 bits anyway.
    """
    bits = _bits(precision)
    roles: dict[str, dict[str, Matrix]] = {}
    for path, module in network.named_modules():
        is_judged = isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and precision == "fp8")
        if is_judged and _fits(module, precision, bits):  # pyright: ignore[reportArgumentType]
            roles.setdefault(role(path, precision), {})[path] = module  # type: ignore[assignment]
    wanted = log_probabilities(network, passages)
    out = {}
    for name, layers in roles.items():
        with rounded(layers, precision):
            out[name] = divergence(wanted, log_probabilities(network, passages))
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _bits(precision: Precision) -> int:
    return 4 if precision == "int4" else 8


def choose_bits(
    network: Whisper, errors: Mapping[str, float], precision: Precision, sensitive: float
) -> dict[str, int]:
    """Path of each matrix → its bits; those that are left out stay in fp16.

    Roles with more than that share of all errors have 8 bits in int4 (and so has the embedding), and stay out in fp8.
    """
    limit = sensitive * (sum(errors.values()) or 1.0)
    out = {}
    for path, module in network.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        suffers = errors.get(role(path, precision), 0.0) > limit
        if precision == "fp8":
            if not suffers or errors[role(path, precision)] <= HARMLESS:
                out[path] = 8
            continue
        wanted = 8 if precision == "int8" or suffers or path == EMBEDDING else 4
        if _fits(module, precision, wanted):
            out[path] = wanted
    return out


def as_on_a_gpu(recognizer: Recognizer, folder: Path) -> None:
    """Have a recogniser of a folder of 8-bit floats, on the CPU, round activations as a GPU does, so that what it
    writes is what that would write."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.stored is not None
    encoder = load_whisper(checkpoint, torch.float32, torch.device("cpu")).encoder
    for path, module in encoder.named_modules(prefix="encoder"):
        if isinstance(module, nn.Linear) and _is_multiplied_in_fp8(path) and checkpoint.stored(path) is not None:
            module.register_forward_pre_hook(_round_rows)
    recognizer.engine.model.encoder = encoder


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

    Returns the error of each role, the roles that kept more bits than were asked for, and the bytes of the weights: as
    they are now, and in fp32.
    """
    precision = PRECISIONS[scheme]
    network = load_whisper(checkpoint, torch.float32, torch.device("cpu"))
    network.decoder.embedding.float()
    note("measuring what fewer bits do to the words' probabilities")
    errors = measure_roles(network, listen(recognizer, clips), precision)
    chosen = choose_bits(network, errors, precision, sensitive)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    write_quantized(checkpoint, folder, precision, chosen)
    kept = {
        role(path, precision)
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and role(path, precision) in errors
        if chosen.get(path, 16) > _bits(precision)
    }
    return errors, tuple(sorted(kept)), (folder / WEIGHTS).stat().st_size, 4 * parameters
