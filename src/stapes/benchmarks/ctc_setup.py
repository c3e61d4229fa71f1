"""What `stapes bench ctc` is asked to do, the model that does it, and what it hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import torch

from stapes.benchmarks.records import Weights
from stapes.checkpoints.files import sha256
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, load_wav2vec2, open_wav2vec2
from stapes.devices.backend import Device, choose_dtype
from stapes.errors import ModelError, UsageError
from stapes.inference.gpu_ctc import GpuCtcEncoder
from stapes.models.wav2vec2 import BASE, LARGE, SAMPLE_RATE, Wav2Vec2, Wav2Vec2Config, initialize
from stapes.options import Precision
from stapes.text.ctc_tokenizer import CTCTokenizer

PUBLISHED = {"wav2vec2-base": BASE, "wav2vec2-large": LARGE}
"""Sizes that random weights can have."""

_LETTERS = ("<pad>", "<s>", "</s>", "<unk>", "|", *ascii_uppercase, "'")
_BLANKS = 0.75
"""Frames in which a network with random weights is made to write a blank: read speech has about 13 letters a second."""


@dataclass(frozen=True, kw_only=True)
class CtcSettings:
    """What to measure. ``model``: a folder, or with ``random`` a published size."""

    model: str
    random: bool
    device: str = "auto"
    precision: Precision = "auto"
    batch: int = 32
    seconds: float = 15.0
    mix: bool = False
    batches: int | None = None
    peer: str | None = None
    beam: int | None = None
    language_model: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.peer not in (None, "transformers"):
            raise UsageError(f"--peer {self.peer}: only transformers can be measured beside this")
        if self.random and self.model not in PUBLISHED:
            raise UsageError(f"--random-weights is {self.model!r}: choose from {', '.join(PUBLISHED)}")
        if self.precision not in ("auto", "fp32", "fp16", "bf16"):
            raise UsageError(f"--precision is {self.precision}: CTC models run in fp32, fp16 or bf16")
        if not 0.1 <= self.seconds <= 600:
            raise UsageError(f"--seconds is {self.seconds:g}: give 0.1 to 600")
        bounds = {"--batch": (self.batch, 4096), "--batches": (self.batches, 100_000), "--beam": (self.beam, 1024)}
        for option, (value, most) in bounds.items():
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{option} is {value}: give 1 to {most}")
        if self.language_model is not None and self.beam is None:
            raise UsageError("--lm is for the beam: give --beam 32 too")


@dataclass(frozen=True, kw_only=True)
class CtcSubject:
    """The loaded model. ``network``: the reference, whose weights the encoder and the peer have."""

    checkpoint: Wav2Vec2Checkpoint
    network: Wav2Vec2
    encoder: GpuCtcEncoder
    tokenizer: CTCTokenizer
    dtype: torch.dtype

    @property
    def config(self) -> Wav2Vec2Config:
        """Sizes of the network."""
        return self.network.config

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.encoder.device


def open_subject(settings: CtcSettings, where: Device) -> CtcSubject:
    """Load the model. Raises ModelError, UsageError."""
    dtype = choose_dtype(settings.precision, where)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.random:
        checkpoint, network = _random(settings.model, where.torch)
    else:
        checkpoint = open_wav2vec2(Path(settings.model))
        network = load_wav2vec2(checkpoint, torch.float32, where.torch)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or network.head is None:
        raise ModelError(f"{settings.model} writes no text: give a model that was fine-tuned with CTC")
    if network.downsampling is not None:
        raise UsageError(f"{settings.model} downsamples behind its encoder: models that do are not measured here")
    encoder = GpuCtcEncoder(network, dtype)
    return CtcSubject(checkpoint=checkpoint, network=network, encoder=encoder, tokenizer=tokenizer, dtype=dtype)


def describe(settings: CtcSettings) -> Weights:
    """Whose weights run. Raises ModelError for a folder that is not one."""
    if settings.random:
        with torch.device("meta"):
            network = Wav2Vec2(replace(PUBLISHED[settings.model], vocab_size=len(_LETTERS)))
        return Weights(
            name=settings.model, kind="random", parameters=sum(weight.numel() for weight in network.parameters())
        )
    checkpoint = open_wav2vec2(Path(settings.model))
    files = sorted({file for _, file, _ in checkpoint.places})
    return Weights(name=checkpoint.name, kind="real", sha256=sha256(files[0]) if len(files) == 1 else None)


def equal_batches(batch: int, seconds: float, count: int, seed: int = 0) -> list[list[np.ndarray]]:
    """Batches of noise, all of it of one length."""
    samples = round(seconds * SAMPLE_RATE)
    return _noise([[samples] * batch] * count, seed)


def mixed_batches(batch: int, seconds: float, count: int, seed: int = 0) -> list[list[np.ndarray]]:
    """Batches of noise of as much sound each as `equal_batches`, of lengths as read speech has them.

    Lengths are drawn log-normally, 7.4 s on average, 1.3 to 35 s, as LibriSpeech's test-clean has them, and sorted, so
    that batches hold recordings of similar length: who pads has little to pad.
    """
    generator = np.random.default_rng(seed)
    wanted = count * batch * seconds
    lengths = np.exp(generator.normal(np.log(5.9), 0.67, max(1, int(wanted)))).clip(1.3, 35.0)
    lengths = np.sort(lengths[: np.searchsorted(np.cumsum(lengths), wanted) + 1])
    batches: list[list[int]] = [[]]
    for length in lengths:
        if sum(batches[-1]) + length * SAMPLE_RATE > batch * seconds * SAMPLE_RATE and batches[-1]:
            batches.append([])
        batches[-1].append(round(length * SAMPLE_RATE))
    return _noise(batches, seed)


def seconds_of(batches: Sequence[Sequence[np.ndarray]]) -> float:
    """Of sound, in all."""
    return sum(len(recording) for batch in batches for recording in batch) / SAMPLE_RATE


def _noise(batches: Sequence[Sequence[int]], seed: int) -> list[list[np.ndarray]]:
    """Recordings are parts of one long noise: what is heard costs nothing, where it is read from does not matter."""
    generator = np.random.default_rng(seed)
    longest = max(max(batch) for batch in batches)
    sound = generator.standard_normal(longest + 1_000_000, dtype=np.float32) * np.float32(0.05)
    return [
        [
            sound[start : start + size]
            for size, start in zip(batch, generator.integers(0, 1_000_000, len(batch)), strict=True)
        ]
        for batch in batches
    ]


def _random(name: str, device: torch.device) -> tuple[Wav2Vec2Checkpoint, Wav2Vec2]:
    """A network that knows nothing, and writes about as much as one that does."""
    config = replace(PUBLISHED[name], vocab_size=len(_LETTERS))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        network = Wav2Vec2(config)
        initialize(network)
    network.eval().requires_grad_(False)
    tokenizer = CTCTokenizer({token: id for id, token in enumerate(_LETTERS)})
    assert network.head is not None
    heard = torch.from_numpy(equal_batches(1, 10.0, 1)[0][0])[None].to(device)
    with torch.inference_mode():
        logits, _ = network(heard / heard.std())
        markers = [tokenizer.vocabulary[token] for token in _LETTERS[1:4]]
        logits[..., markers] = float("-inf")  # a trained network does not write them
        letters = logits[0].clone()
        letters[:, tokenizer.blank_id] = float("-inf")
        lead = (letters.max(1).values - logits[0, :, tokenizer.blank_id]).quantile(_BLANKS)
    network.head.bias.data[markers] = -1e4
    network.head.bias.data[tokenizer.blank_id] += lead
    checkpoint = Wav2Vec2Checkpoint(
        name=name, path=Path(f"random-{name}"), kind="wav2vec2", config=config, places=(), tokenizer=tokenizer
    )
    return checkpoint, network
