"""Figures that the field keeps quoting, with where they come from and how far anybody has verified them.

None of them is ours. They stand in RESULTS.md beside what we measured, never in place of it.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOG = (
    "Blog post, known to us second-hand: we could not retrieve the page, and the figures reach us without audio, "
    "software versions or number of rounds. Not verified."
)


@dataclass(frozen=True, kw_only=True)
class WhisperTimes:
    """Seconds to transcribe 30 s, 5 min and 1 h; None where nothing was published."""

    hardware: str
    device: str
    """The name PyTorch gives the device, or a part of it: tells which of our rows fills the blank beside this one."""
    model: str
    seconds: tuple[float | None, float | None, float | None]
    source: str


WHISPER = (
    WhisperTimes(
        hardware="Radeon RX 6800 XT",
        device="RX 6800 XT",
        model="medium",
        seconds=(3.5, 35.7, 732.0),
        source=f"{BLOG} From 5 min to 1 h the audio is 12 times as long and the time 20.5 times: something other than "
        "transcription is in the last figure.",
    ),
    WhisperTimes(
        hardware="CPU beside the RX 6800 XT",
        device="",
        model="medium",
        seconds=(8.2, 82.1, 1684.0),
        source=f"{BLOG} Published beside the RX 6800 XT's.",
    ),
    WhisperTimes(
        hardware="Instinct MI100",
        device="MI100",
        model="not told to us",
        seconds=(None, None, 180.0),
        source=f"{BLOG} Quoted as “1 h in 3 min”.",
    ),
    WhisperTimes(
        hardware="Xeon Gold 6248R",
        device="6248R",
        model="not told to us",
        seconds=(None, None, 1680.0),
        source=f"{BLOG} Quoted as “28 min” for 1 h; 1684 s, the figure of the unnamed CPU, is 28 min too, so that the "
        "two may be one measurement.",
    ),
)


WANTED = ("Instinct MI300X",)
"""Hardware without a published row that should have one of ours."""


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Row:
    """Word error rate (fraction) and real-time factor (wall seconds per second of audio)."""

    model: str
    hardware: str
    device: str
    wer: float
    real_time_factor: float
    source: str


_SLOW = (
    "Implausibly slow: 8 and 4 times real time, where the Open ASR Leaderboard has 686 and 509 times for the same "
    "architectures on an A100 in batches of 64. A single clip a call, loading or warming up may be in it (our guess)."
)
WAV2VEC2 = (
    Wav2Vec2Row(
        model="wav2vec2-base",
        hardware="Instinct MI300X",
        device="MI300X",
        wer=0.038,
        real_time_factor=0.12,
        source=f"{BLOG} {_SLOW}",
    ),
    Wav2Vec2Row(
        model="wav2vec2-large",
        hardware="Instinct MI300X",
        device="MI300X",
        wer=0.021,
        real_time_factor=0.28,
        source=f"{BLOG} {_SLOW}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ObjectiveRow:
    """A recogniser trained with CTC or with attention: word error rate (fraction), hours and GB of the training."""

    objective: str
    wer: float
    hours: float
    gigabytes: float
    source: str


OBJECTIVES = (
    ObjectiveRow(
        objective="ctc",
        wer=0.085,
        hours=6.0,
        gigabytes=8.0,
        source=f"{BLOG} Corpus, size of the network and GPU are not known to us.",
    ),
    ObjectiveRow(
        objective="attention",
        wer=0.062,
        hours=12.0,
        gigabytes=16.0,
        source=f"{BLOG} Corpus, size of the network and GPU are not known to us.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class WindowsPerSecond:
    """Windows of at most 30 s that one accelerator transcribes in a second."""

    hardware: str
    model: str
    how: str
    windows_per_second: float
    source: str


MLPERF = (
    WindowsPerSecond(
        hardware="H200 SXM",
        model="large-v3",
        how="TensorRT-LLM, fp16, batch 256",
        windows_per_second=67.9,
        source="MLPerf Inference v5.1, Offline, HPE's submission: 542.9 samples/s on eight of them, divided by eight; "
        "read from the results that MLCommons publishes (inference_results_v5.1). Real speech of about 23 s a window, "
        "real weights, texts end when they do: another amount of work than a fixed number of tokens.",
    ),
)

MLPERF_WANTED = (
    ("H200", "large-v3", "bf16", ""),
    ("H200", "large-v3", "bf16, int8 cache", " --int8-cache"),
    ("H200", "turbo", "bf16", ""),
    ("Instinct MI300X", "large-v3", "bf16", ""),
    ("Radeon RX 7900 XTX", "turbo", "bf16", ""),
)
"""What ought to be measured: a part of the device's name, model, precision, and the option of the command."""

CTC_WANTED = (
    ("H200", "wav2vec2-large"),
    ("H200", "wav2vec2-base"),
    ("Instinct MI300X", "wav2vec2-large"),
    ("Radeon RX 7900 XTX", "wav2vec2-base"),
)
"""What ought to be measured: a part of the device's name, and the model."""
