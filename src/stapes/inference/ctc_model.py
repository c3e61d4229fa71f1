"""What the engine asks of a CTC model, and wav2vec 2.0 (HuBERT, XLS-R, MMS) as one."""

from __future__ import annotations

import copy
import difflib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, set_language
from stapes.errors import ModelError, UsageError
from stapes.inference.gpu_lane import upload
from stapes.models.wav2vec2 import GroupNormConvLayer, Statistics, Wav2Vec2
from stapes.models.waveform import Moments, normalization, normalize_waveform, window_moments, zero_padding
from stapes.text.ctc_tokenizer import CTCTokenizer

WINDOW_SECONDS = 30
"""The longest that a network hears at once. Its cost a second grows with it, through attention."""

CONTEXT_SECONDS = 2
"""Of a window inside a recording, so much at each end is heard but not written: frames there know one side only. The
positional convolution of wav2vec 2.0 alone sees 1.28 s to each side."""


class Meter(Protocol):
    """Gathers what must be known of a whole recording to normalise parts of it, in one pass and constant memory."""

    def feed(self, pcm: np.ndarray) -> None:
        """Take the next samples (samples,), float32."""
        ...

    def cut(self) -> None:
        """What comes next is not next to what came last."""
        ...

    def result(self) -> Any:
        """What `CTCModel` wants of each row; None where the model normalises nothing."""
        ...


class CTCModel(Protocol):
    """A waveform goes in, logits come out. What is between the two (a mel spectrogram, a GPU's kernels) is its own.

    Padding and neighbours in a batch never change a row.
    """

    lock: threading.Lock
    """To be held while the language is set and the model called, so that several threads may use it in turn."""
    tokenizer: CTCTokenizer
    """Of the language that is set."""
    languages: tuple[str, ...]
    """Those that it has adapters for; empty where it has one only, whichever that is."""
    device: torch.device
    hop: int
    """Samples from the start of a frame of logits to the start of the next."""
    window: int
    """Samples of the longest row, a multiple of the hop."""
    context: int
    """Samples that a frame should hear on each side, a multiple of the hop: windows overlap by twice as many."""

    def frame_count(self, samples: int, /) -> int:
        """Frames of so many samples, exactly. A hop more is one frame more, as soon as there is one."""
        ...

    def meter(self) -> Meter:
        """A new one for a recording (any thread may call this)."""
        ...

    def tokenizer_for(self, language: str | None) -> CTCTokenizer:
        """The vocabulary of a language (any thread may call this). Raises UsageError for one that it does not have."""
        ...

    def set_language(self, language: str | None) -> None:
        """Use the adapter and the vocabulary of this language from now on; None: of the one it was loaded with."""
        ...

    def __call__(
        self, waveform: Tensor, lengths: Tensor, measured: Sequence[Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (batch, frames, vocabulary) and real frames (batch,).

        waveform: (batch, samples), float32, 16 kHz, as recorded, on the device, of which ``lengths`` (batch,) samples,
        on the CPU, are real.
        ``measured``: for rows that are windows, what the meter of each one's recording said. None: rows are recordings.
        """
        ...


class OneLanguage:
    """What a model of one language says to what `CTCModel` asks about languages."""

    tokenizer: CTCTokenizer

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.languages: tuple[str, ...] = ()

    def tokenizer_for(self, language: str | None) -> CTCTokenizer:
        """The one that there is."""
        if language is not None:
            raise UsageError(f"the model knows one language and has no adapter for {language!r}: leave it out")
        return self.tokenizer

    def set_language(self, language: str | None) -> None:
        """Nothing but None can be set."""
        self.tokenizer_for(language)


class Normalization(NamedTuple):
    """How to normalise the parts of a recording."""

    shift: float
    scale: float
    statistics: Statistics | None
    """Of the first convolution's outputs, (1, channels) float64 on the CPU; None where these are not normalised."""


class WaveformMeter:
    """Moments of a recording, as wav2vec 2.0 normalises by them. They add up over the parts that are heard."""

    def __init__(self, normalize: bool, first: GroupNormConvLayer | None) -> None:
        """``normalize`` the waveform; ``first``: the convolution whose outputs are normalised, on the CPU."""
        self._normalize, self._first = normalize, first
        self._samples: Moments | None = None
        self._windows: Moments | None = None
        self._rest = torch.zeros(1, 0)

    def feed(self, pcm: np.ndarray) -> None:
        samples = torch.from_numpy(np.ascontiguousarray(pcm, dtype=np.float32))[None]
        if self._normalize:
            self._samples = _sum(self._samples, window_moments(samples))
        if self._first is not None:
            samples = torch.cat([self._rest, samples], dim=1)
            moments = self._first.moments(samples)
            self._windows = _sum(self._windows, moments)
            self._rest = samples[:, int(moments.count) * self._first.conv.stride[0] :].clone()

    def cut(self) -> None:
        self._rest = torch.zeros(1, 0)

    def result(self) -> Normalization:
        shift, scale = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        if self._samples is not None:
            shift, scale = normalization(self._samples)
        statistics = None
        if self._first is not None and self._windows is not None:
            statistics = self._first.statistics(self._windows.scaled(shift, scale))
        return Normalization(float(shift), float(scale), statistics)


def _sum(a: Moments | None, b: Moments) -> Moments:
    return b if a is None else a + b


Network = Callable[[Tensor, Tensor, Statistics | None], tuple[Tensor, Tensor]]
"""What computes the logits; called as a `Wav2Vec2`, but with lengths on the CPU."""


def plain(network: Wav2Vec2) -> Network:
    """The network itself."""
    return lambda waveform, lengths, statistics: network(waveform, lengths.to(waveform.device), statistics)


class Wav2Vec2CTC:
    """wav2vec 2.0, HuBERT, XLS-R or MMS as a `CTCModel`. Raises ModelError for a checkpoint that writes no text."""

    def __init__(
        self, checkpoint: Wav2Vec2Checkpoint, network: Wav2Vec2, make: Callable[[Wav2Vec2], Network] = plain
    ) -> None:
        """``make``: what runs the network, made anew for each language: the network itself, or a GPU's form of it."""
        if checkpoint.tokenizer is None or network.head is None:
            raise ModelError(
                f"{checkpoint.path} was only pre-trained and writes no text: give a model that was fine-tuned with CTC"
            )
        config = network.config
        self.lock = threading.Lock()
        self.checkpoint = checkpoint
        self.tokenizer = self._tokenizer = checkpoint.tokenizer
        several = checkpoint.languages or self.tokenizer.vocabularies
        self.languages = tuple(sorted({*checkpoint.languages, checkpoint.language or ""} - {""})) if several else ()
        # What runs it may have the weights in its own form: then it is kept for a change of its adapters only.
        self.network = network if self.languages or make is plain else None
        self.device = network.head.weight.device
        self.hop = config.hop * config.downsampling_stride**config.downsampling_layers
        self.window = _multiple(WINDOW_SECONDS, self.hop)
        self.context = _multiple(CONTEXT_SECONDS, self.hop)
        self.frame_count: Callable[[int], int] = config.frame_count
        self._make = make
        self._run = make(network)
        self._loaded = self._language = checkpoint.language
        first = network.feature_extractor.first
        self._first = copy.deepcopy(first).cpu() if isinstance(first, GroupNormConvLayer) else None

    def meter(self) -> WaveformMeter:
        return WaveformMeter(self.checkpoint.normalize, self._first)

    def tokenizer_for(self, language: str | None) -> CTCTokenizer:
        if language is None or language == self._loaded:
            return self._tokenizer
        if language not in self.languages:
            close = difflib.get_close_matches(language, self.languages, n=3) or self.languages[:5]
            hint = f"here are {', '.join(close)}" if close else "it knows one language only, leave --language out"
            raise UsageError(f"{self.checkpoint.name} has no adapter for the language {language!r}: {hint}")
        return self._tokenizer.for_language(language)

    def set_language(self, language: str | None) -> None:
        language = language or self._loaded
        if language is not None and language != self._language:
            assert self.network is not None
            self.checkpoint = set_language(self.network, self.checkpoint, language)
            assert self.checkpoint.tokenizer is not None
            self.tokenizer, self._language = self.checkpoint.tokenizer, language
            self._run = self._make(self.network)

    def __call__(
        self, waveform: Tensor, lengths: Tensor, measured: Sequence[Normalization] | None = None
    ) -> tuple[Tensor, Tensor]:
        statistics = None
        real = lengths.to(waveform.device, non_blocking=True)
        if measured is None:
            if self.checkpoint.normalize:
                waveform = normalize_waveform(waveform, real)
        else:
            rows = np.array([(row.shift, row.scale) for row in measured], dtype=np.float32)
            shift, scale = upload(rows, waveform.device)[:, :, None].unbind(1)
            waveform = zero_padding((waveform + shift) * scale, real)
            found = [row.statistics for row in measured if row.statistics is not None]
            if found:
                mean, variance = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
                statistics = Statistics(upload(mean, waveform.device), upload(variance, waveform.device))
        return self._run(waveform, lengths, statistics)


def _multiple(seconds: int, hop: int) -> int:
    return seconds * 16_000 // hop * hop
