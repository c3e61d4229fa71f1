"""Every option of transcription, once: name, default, range and doc.

The command line, Python, HTTP and WebSocket all build this one object. Names and defaults are openai/whisper's
wherever it has the option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from stapes.errors import UsageError

Task = Literal["transcribe", "translate"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4"]
Backend = Literal["auto", "torch", "onnx"]

# openai/whisper transcribe(): punctuation that sticks to the next or to the previous word.
PREPEND_PUNCTUATIONS = "\"'“¿([{-"
APPEND_PUNCTUATIONS = "\"'.。,，!！?？:：”)]}、"


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscribeOptions:
    """How to transcribe."""

    language: str | None = None
    """Language spoken, as a code (de) or a name (German). Detected for each recording when not given. MMS: by its own
    code (deu); the one it was saved with when not given."""

    task: Task = "transcribe"
    """transcribe keeps the language; translate writes English (multilingual models other than turbo)."""

    word_timestamps: bool = False
    """Give the start, end and probability of every word."""

    without_timestamps: bool = False
    """Do not predict segment times: a little faster; a window then becomes one segment."""

    vad: bool = True
    """Find speech first and transcribe only that. Off: openai/whisper's walk through the whole recording."""

    condition_on_previous_text: bool = False
    """Use openai/whisper's sequential algorithm: each window is told the text before it. Slower, one window at a
    time in each recording; more consistent names, more danger of loops."""

    temperature: float = 0.0
    """Temperature of the first attempt: 0 is greedy or beam search, above 0 draws samples."""

    temperature_increment_on_fallback: float | None = 0.2
    """Raise the temperature by this much, up to 1, while an attempt fails a threshold. None or 0: never."""

    beam_size: int = 1
    """Beams at temperature 0; 1 is greedy. CTC models: texts that prefix beam search keeps."""

    best_of: int = 5
    """Candidates drawn at temperatures above 0; of three or more the one is taken that the others agree with most."""

    patience: float = 1.0
    """Beam search goes on until this many times the beam size of candidates have ended."""

    length_penalty: float | None = None
    """Exponent of the length (0 to 1) that candidates' log-probabilities are divided by, to choose the likeliest;
    None: by length itself, and samples are chosen by agreement."""

    initial_prompt: str | None = None
    """Text that the first window is told came before: spelling of names, style."""

    carry_initial_prompt: bool = False
    """Tell the initial prompt to every window, not only to the first."""

    hotwords: str | None = None
    """Words to expect, told to every window. CTC models: words, or phrases separated by commas, that beam search
    favours."""

    lm: str | None = None
    """CTC models: an n-gram language model that beam search listens to, an ARPA file (`stapes lm build`). The beam is
    32 unless --beam-size says otherwise."""

    lm_weight: float = 0.5
    """What the log-probabilities of the language model are multiplied by."""

    n_best: int = 1
    """CTC models: the likeliest texts of each segment, as `alternatives` in JSON, with their scores."""

    compression_ratio_threshold: float | None = 2.4
    """An attempt whose text compresses better than this (it repeats itself) has failed. None: never."""

    logprob_threshold: float | None = -1.0
    """An attempt whose mean token log-probability is below this has failed. None: never."""

    no_speech_threshold: float | None = 0.6
    """A window whose no-speech probability is above this, and whose attempt failed, is silent. None: never."""

    hallucination_silence_threshold: float | None = None
    """With word timestamps, skip silences longer than this many seconds around a likely hallucination."""

    suppress_tokens: str = "-1"
    """Token ids never to write, separated by commas; -1 stands for the model's list of non-speech symbols."""

    clip_timestamps: str = "0"
    """Only these parts: start,end,start,end,… in seconds; the last end is the recording's end."""

    channels: str = "mix"
    """mix: all channels as one; separate: each channel is a speaker; a number: only that channel, counted from 1."""

    prepend_punctuations: str = PREPEND_PUNCTUATIONS
    """With word timestamps, punctuation that belongs to the word after it."""

    append_punctuations: str = APPEND_PUNCTUATIONS
    """With word timestamps, punctuation that belongs to the word before it."""

    seed: int = 0
    """Seed of the samples drawn at temperatures above 0: the same seed gives the same text."""

    batch_size: int | None = None
    """Windows decoded together; None: chosen for the device."""

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.one_of("task", ("transcribe", "translate"))
        check.between("temperature", 0.0, 2.0)
        check.between("temperature_increment_on_fallback", 0.0, 1.0)
        check.between("beam_size", 1, 64)
        check.between("best_of", 1, 64)
        check.between("patience", 0.01, 100.0)
        check.between("length_penalty", 0.0, 1.0)
        check.between("compression_ratio_threshold", 0.0, math.inf)
        check.between("logprob_threshold", -math.inf, 0.0)
        check.between("no_speech_threshold", 0.0, 1.0)
        check.between("hallucination_silence_threshold", 0.0, math.inf)
        check.between("lm_weight", 0.0, 100.0)
        check.between("n_best", 1, 64)
        check.between("batch_size", 1, 4096)
        check.between("seed", 0, 2**63 - 1)
        self.suppressed_ids()
        self.clips()
        if self.channels not in ("mix", "separate") and not (self.channels.isdigit() and int(self.channels) >= 1):
            raise UsageError(f"--channels is {self.channels!r}: say mix, separate, or a channel's number from 1")
        if self.hallucination_silence_threshold is not None and not self.word_timestamps:
            raise UsageError("--hallucination-silence-threshold needs --word-timestamps")

    def temperatures(self) -> tuple[float, ...]:
        """The temperatures to try in turn, the first attempt's first."""
        step = self.temperature_increment_on_fallback
        if not step:
            return (self.temperature,)
        count = max(0, math.floor((1.0 - self.temperature) / step + 1e-6))
        return tuple(round(self.temperature + step * i, 6) for i in range(count + 1))

    def suppressed_ids(self) -> list[int]:
        """``suppress_tokens`` as numbers; -1 stands for the model's own list."""
        try:
            return [int(part) for part in self.suppress_tokens.split(",") if part.strip()]
        except ValueError:
            raise UsageError(
                f"--suppress-tokens is {self.suppress_tokens!r}: give token ids separated by commas: -1 or 50,51"
            ) from None

    def clips(self) -> list[tuple[float, float | None]]:
        """``clip_timestamps`` as (start, end) pairs in seconds; an end of None is the recording's end."""
        text = self.clip_timestamps
        try:
            times = [float(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise UsageError(f"--clip-timestamps is {text!r}: give seconds separated by commas: 0,30,60,90") from None
        if any(not math.isfinite(t) or t < 0 for t in times) or any(a > b for a, b in pairwise(times)):
            raise UsageError(f"--clip-timestamps is {text!r}: times must not be negative and must grow: 0,30,60,90")
        if not times:
            return [(0.0, None)]
        ends: list[float | None] = [*times[1::2]]
        if len(times) % 2:
            ends.append(None)
        return list(zip(times[0::2], ends, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class UtteranceOptions(TranscribeOptions):
    """For recordings that have been cut into utterances before.

    A class, not a value: on the command line a value's other fields do not count beside one that is given.
    """

    vad: bool = False
    """Find where there is speech first, and leave out the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOptions:
    """When a turn begins and ends. Names, meanings and defaults are those of OpenAI's ``server_vad``."""

    threshold: float = 0.5
    """Speech probability from which on a frame of 32 ms is speech."""

    prefix_padding_ms: int = 300
    """Sound that is kept from before the speech."""

    silence_duration_ms: int = 500
    """Silence that ends a turn."""

    manual: bool = False
    """Turns end only where the caller commits them; long ones are still parted at pauses, and silence is skipped."""

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise UsageError(f"threshold is {self.threshold}: give a probability above 0 and at most 1")
        if not 0 <= self.prefix_padding_ms <= 5_000:
            raise UsageError(f"prefix_padding_ms is {self.prefix_padding_ms}: give 0 to 5000")
        if not 64 <= self.silence_duration_ms <= 10_000:
            raise UsageError(f"silence_duration_ms is {self.silence_duration_ms}: give 64 to 10000")


class _Checker:
    def __init__(self, options: TranscribeOptions) -> None:
        self.values = {field.name: getattr(options, field.name) for field in fields(options)}

    def between(self, name: str, low: float, high: float) -> None:
        value = self.values[name]
        if value is not None and not (low <= value <= high):
            bounds = (
                f"between {low:g} and {high:g}"
                if math.isfinite(low) and math.isfinite(high)
                else (f"at least {low:g}" if math.isfinite(low) else f"at most {high:g}")
            )
            raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be {bounds}")

    def one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if self.values[name] not in allowed:
            raise UsageError(f"--{name} is {self.values[name]!r}: say one of {', '.join(allowed)}")
