"""What `stapes bench mlperf` is asked to do, and the model that does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stapes.benchmarks.engine_loop import Written, greedy_request, transcribe_windows
from stapes.benchmarks.mlperf_windows import Windows
from stapes.benchmarks.random_weights import load_random
from stapes.devices.backend import Device
from stapes.errors import UsageError
from stapes.inference.engine import DecodeRequest
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.loading import load
from stapes.models.whisper import WhisperConfig
from stapes.options import Precision
from stapes.text.tokenizers import WhisperTokenizer

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_RANDOM_TOKENS, _MOST_TOKENS = 64, 200
_SLOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192)
_WEIGHT_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Of the decoder's weights; in other precisions, the dtype's."""


@dataclass(frozen=True, kw_only=True)
class MlperfSettings:
    """What to measure; None: chosen for the device. ``model``: a name, or with ``random`` a published size."""

    model: str
    random: bool
    tokens: int | None = None
    device: str = "auto"
    precision: Precision = "auto"
    int8_cache: bool = False
    slots: int | None = None
    encoder_batch: int | None = None
    windows: int | None = None
    manifest: str | None = None
    data: Path | None = None
    language: str = "en"
    step_slots: int | None = None
    step_tokens: int = 32
    latency: bool = False
    peer: str | None = None
    peer_batches: Sequence[int] = (16, 32, 64, 128)
    threads: int | None = None
    model_dir: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.peer not in (None, "transformers"):
            raise UsageError(f"--peer {self.peer}: only transformers can be measured beside this recipe")
        bounds: dict[str, tuple[int | None, int]] = {
            "--tokens": (self.tokens, 440),
            "--slots": (self.slots, 4096),
            "--encoder-batch": (self.encoder_batch, 1024),
            "--windows": (self.windows, 1_000_000),
            "--step-slots": (self.step_slots, 4096),
            "--step-tokens": (self.step_tokens, 400),
        }
        for option, (value, most) in bounds.items():
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{option} is {value}: give 1 to {most}")
        if self.slots is not None and self.step_slots is not None and self.step_slots > self.slots:
            raise UsageError(f"--step-slots is {self.step_slots}, but there are {self.slots} slots: give --slots more")

    @property
    def most_tokens(self) -> int:
        """Tokens of a window: with random weights just so many, with real ones at most."""
        return self.tokens or (_RANDOM_TOKENS if self.random else _MOST_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The loaded model and how it is to work.

    ``precision``: of the weights. ``memory_bytes``: of a number of the cached keys and values of a window's states.
    ``request``: for every window. ``endless``: the same, but no window ends by itself.
    """

    engine: TorchWhisperEngine
    tokenizer: WhisperTokenizer
    precision: str
    memory_bytes: int
    slots: int
    encoder_batch: int
    request: DecodeRequest
    endless: DecodeRequest

    @property
    def config(self) -> WhisperConfig:
        """Sizes of the network."""
        return self.engine.model.config

    @property
    def dtype(self) -> str:
        """What is computed in: fp32, fp16, bf16."""
        return DTYPES[self.engine.dtype]

    @property
    def weight_bytes(self) -> float:
        """Of a weight of the decoder."""
        return _WEIGHT_BYTES.get(self.precision, self.engine.dtype.itemsize)

    def transcribe(self, windows: Windows) -> list[Written]:
        """Do the work that is measured."""
        return transcribe_windows(self.engine, self.tokenizer, windows.pcm, self.request, self.encoder_batch)


def open_subject(settings: MlperfSettings, where: Device) -> Subject:
    """Load the model. Raises ModelError, UsageError."""
    slots = settings.slots or 1
    if settings.random:
        recognizer = load_random(
            settings.model,
            tokens=settings.most_tokens,
            device=settings.device,
            precision=settings.precision,
            threads=settings.threads,
            batch_size=slots,
        )
    else:
        recognizer = load(
            settings.model,
            device=settings.device,
            precision=settings.precision,
            threads=settings.threads,
            model_dir=settings.model_dir,
            offline=settings.offline,
            batch_size=slots,
        )
    engine, config = recognizer.engine, recognizer.config
    engine.exact_tokens = settings.most_tokens
    if settings.int8_cache:
        if not isinstance(engine, GpuWhisperEngine):
            raise UsageError("--int8-cache: the CPU has no such cache; drop it or choose a GPU")
        engine.quantize_memory = True
    memory_bytes = 1 if settings.int8_cache else engine.dtype.itemsize
    # Nothing is allocated yet: caches are made when the first window comes.
    engine.slots = settings.slots or _default_slots(where, config, engine.dtype.itemsize, memory_bytes)
    default_batch = 1 if where.backend == "cpu" else 16
    request, endless = (
        greedy_request(recognizer.tokenizer, settings.language, config.vocab_size, endless=endless)
        for endless in (settings.random, True)
    )
    return Subject(
        engine=engine,
        tokenizer=recognizer.tokenizer,
        precision=settings.precision if settings.precision in _WEIGHT_BYTES else DTYPES[engine.dtype],
        memory_bytes=memory_bytes,
        slots=engine.slots,
        encoder_batch=min(settings.encoder_batch or default_batch, engine.slots),
        request=request,
        endless=endless,
    )


def _default_slots(where: Device, config: WhisperConfig, size: int, memory_bytes: int) -> int:
    """As many as seven tenths of a GPU's memory hold beside the weights; 192 at most."""
    if where.memory is None:
        return 4
    states, texts = config.audio_context * memory_bytes, config.text_context * size
    each = config.decoder_layers * 2 * config.width * (states + texts)
    layers = 12 * config.encoder_layers + 16 * config.decoder_layers
    weights = size * (layers * config.width**2 + config.vocab_size * config.width)
    fit = (0.7 * where.memory - weights) // each
    return max((slots for slots in _SLOTS if slots <= fit), default=1)
