"""Any recording to 16 kHz float32, as a stream: decode (FFmpeg through PyAV), mix, resample (soxr), cut to time.

What is held in memory does not depend on the recording's length: frames are gathered to blocks of ten seconds; each
is cleaned, mixed and resampled, and handed on. How an input is opened safely is in
``sources.py`` and ``containers.py``.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, Protocol

import numpy as np
import soxr

from stapes.audio.containers import ContainerFrames
from stapes.audio.sources import open_reader, printable
from stapes.errors import AudioError, StapesError, UsageError


class DecodedElsewhere(ABC):
    """A recording that another process decodes. ``name``: what messages call it."""

    name: str

    @abstractmethod
    def open(self, start: float, end: float | None, channels: str) -> _Frames:
        """Its frames at 16 kHz, cut and mixed as ``open_audio`` would; again from the beginning at every call.

        Where the frames have an attribute ``speech``, it stands in for a voice activity detector: its ``state()`` and
        ``probabilities(…)`` give the probabilities that came with the samples.
        """


AudioSource = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | np.ndarray | DecodedElsewhere
"""A path (``"-"`` is stdin), a file's content, a binary file object, samples (with their ``sample_rate``), or what
another process decodes."""

SAMPLE_RATE = 16_000
"""Hz of everything that comes out."""

_BLOCK_SECONDS = 10
_BLOCK_VALUES = 1 << 24  # samples × channels of a block at most: 64 MiB of float32, whatever rate and layout claim
_ROLL_SECONDS = 0.25  # read before start and after end, so that the resampler's filter sees what it would in a whole
_ROLL_SAMPLES = 256  # the same for very low rates: the filter's length counts in native samples there
_SEEK_SECONDS = 30.0  # below this, decoding from the start is cheap enough
_MAX_RATE = 6_000_000  # above every real format (DSD512 decodes to 2.8 MHz); keeps soxr's filters small
_MAX_CHANNELS = 64

# Opposite phases. Let P be the power of the mean of C channels and S = Σ p_c / C² the power it would have were the
# channels unrelated. One-sided stereo has P = S exactly, unrelated channels P ≈ S, equal ones P = C·S; for two
# equally loud channels P / S = 1 + correlation. P < S / 10 therefore needs a correlation below −0.9: it is one signal
# with its sign turned, and the mean loses more than 10 dB of it. Regions whose loudest channel is below −50 dBFS are
# not judged (hum, dither).
# Policy: the first such region decides. From its start to the end (or to a change of layout) the channel that is
# loudest in it is taken alone: switching back and forth would change level and room in the middle of words. Regions
# are half a second, counted from where reading starts, so the result never depends on how frames arrive.
_PHASE_REGION_SECONDS = 0.5
_PHASE_POWER_RATIO = 0.1
_PHASE_POWER_FLOOR = 1e-5

_HUGE = 4.0  # float files overshoot full scale now and then; nothing honest does so by 12 dB


class _Frames(Protocol):
    """Decoded audio at its native rate: what files and arrays have in common."""

    name: str
    rate: int
    channels: int
    seconds: float | None
    damaged: bool
    warnings: list[str]

    def seek(self, seconds: float) -> int: ...
    def frames(self) -> Iterator[tuple[int, np.ndarray]]: ...
    def close(self) -> None: ...


class AudioStream:
    """A recording being read: a context manager, and an iterator of float32 ``(channels, samples)`` chunks at 16 kHz.

    Chunks are 10 to 20 seconds (the last may be shorter) and finite everywhere. Reading raises ``AudioError`` for what
    makes the rest unreadable; damage that can be passed over shows in ``damaged`` and ``warnings`` instead.
    Made by ``open_audio``.

    Attributes:
        name: what messages call the input: its path, ``<stdin>``, ``<bytes>``, ``<file>`` or ``<array>``.
        duration: seconds expected of what will be yielded, None where unknown. An estimate, for progress only.
        channels: output channels: 1 for a mix or a single channel, all of them for ``separate``.
        warnings: one sentence each; grows while reading.
        source_rate, source_channels, source_seconds: Hz, channels and length of the recording itself, as its file says.
        speech: what stands in for a voice activity detector, where the source brings one (`DecodedElsewhere`).
    """

    def __init__(
        self, source: _Frames, *, start: float, end: float | None, channels: str, max_seconds: float | None
    ) -> None:
        self.name = source.name
        self.warnings = source.warnings
        self.duration = _expected(source.seconds, start, end)
        self._source = source
        self._mixer = _Mixer(source, channels)
        self.channels = self._mixer.outputs
        self.speech: Any = getattr(source, "speech", None)
        self.source_rate, self.source_channels, self.source_seconds = source.rate, source.channels, source.seconds
        self._start = start
        self._first = round(start * SAMPLE_RATE)
        self._last = None if end is None else round(end * SAMPLE_RATE)
        self._max_seconds = max_seconds
        self._yielded = 0
        self._chunks = self._read()

    @property
    def position(self) -> float:
        """Seconds yielded so far, exactly."""
        return self._yielded / SAMPLE_RATE

    @property
    def damaged(self) -> bool:
        """Whether some of the input was found lost: it is truncated, or corrupt packets were skipped."""
        return self._source.damaged

    def __enter__(self) -> AudioStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        try:
            chunk = next(self._chunks)
        except (StopIteration, StapesError):
            self.close()
            raise
        except Exception as error:  # PyAV and soxr raise many kinds on hostile input; callers meet one
            self.close()
            raise AudioError(f"{self.name} could not be decoded ({printable(str(error))}): convert it again") from error
        self._yielded += chunk.shape[1]
        return chunk

    def close(self) -> None:
        """Release the container and the file. Reading ends here; closing twice is fine."""
        self._chunks.close()
        self._source.close()

    def _read(self) -> Generator[np.ndarray, None, None]:
        """Gather what lies in [first, last) of the 16 kHz clock to chunks."""
        gathered: list[np.ndarray] = []
        held = 0
        at = 0
        for at, samples in self._resampled():
            stop = samples.shape[1] if self._last is None else min(samples.shape[1], self._last - at)
            piece = samples[:, max(0, self._first - at) : max(0, stop)]
            at += samples.shape[1]
            if not piece.shape[1]:
                continue
            gathered.append(piece)
            held += piece.shape[1]
            if held >= _BLOCK_SECONDS * SAMPLE_RATE:
                yield np.concatenate(gathered, axis=1)
                gathered, held = [], 0
        if held:
            yield np.concatenate(gathered, axis=1)
        elif at <= self._first > 0:
            self.warnings.append(f"{self.name} ends before {self._start:g} s, where reading was to start.")

    def _resampled(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (index on the 16 kHz clock, float32 (channels, samples)), from a little before the start."""
        segment: _Segment | None = None
        wanted = self._start - 2 - _ROLL_SAMPLES / self._source.rate  # before every place a segment may begin
        index = self._source.seek(wanted) if wanted > _SEEK_SECONDS else 0
        decoded = 0.0
        origin = 0
        for rate, frame in self._source.frames():
            decoded += frame.shape[1] / rate
            if self._max_seconds is not None and min(decoded, self._budget_end()) > self._max_seconds:
                raise AudioError(f"{self.name} is longer than the {self._max_seconds:g} s allowed: cut it into parts")
            if segment is None or (rate, len(frame)) != (segment.rate, segment.inputs):
                if segment is not None:
                    yield from segment.flush()
                    index, origin = 0, segment.at
                    self._mixer.restart(len(frame))
                segment = _Segment(self.name, rate, len(frame), self._mixer, self._first, self._last, index, origin)
            yield from segment.push(frame)
            if segment.index >= segment.stop:  # past the end asked for: what follows is nobody's business
                break
        if segment is None:
            raise AudioError(f"{self.name} has no audio samples: record or export it again")
        yield from segment.flush()

    def _budget_end(self) -> float:
        return math.inf if self._last is None else self._last / SAMPLE_RATE


class _Segment:
    """A stretch of one rate and layout: cut to blocks, mixed, resampled, placed on the 16 kHz clock.

    ``origin`` is where native sample 0 lies on the 16 kHz clock, ``index`` the native sample that comes next.
    """

    def __init__(
        self, name: str, rate: int, inputs: int, mixer: _Mixer, first: int, last: int | None, index: int, origin: int
    ) -> None:
        if not 1 <= rate <= _MAX_RATE:
            raise AudioError(f"{name} claims a sample rate of {rate} Hz: its header is damaged; convert it again")
        self.rate, self.inputs, self.index = rate, inputs, index
        self._mixer, self._origin = mixer, origin
        roll = max(round(_ROLL_SECONDS * rate), _ROLL_SAMPLES)
        # Resampling starts where both clocks have a sample, so that the output is the one of a whole decode.
        step = rate // math.gcd(rate, SAMPLE_RATE)
        self._skip = max(0, ((first - origin) * rate // SAMPLE_RATE - roll) // step * step)
        self.stop = math.inf if last is None else -((origin - last) * rate // SAMPLE_RATE) + roll
        self.at = origin + self._skip * SAMPLE_RATE // rate
        self.region = max(1, round(_PHASE_REGION_SECONDS * rate))
        most = max(1, min(_BLOCK_SECONDS * rate, _BLOCK_VALUES // inputs))
        self._block = max(1, most // self.region) * self.region if most >= self.region else most
        self._held: list[np.ndarray] = []
        self._count = 0
        self._resampler = None
        if rate != SAMPLE_RATE:
            self._resampler = soxr.ResampleStream(rate, SAMPLE_RATE, mixer.outputs, dtype="float32", quality="HQ")

    def push(self, frame: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Take a native frame (inputs, samples); yield (index, samples) of the blocks it completes."""
        drop = min(max(0, self._skip - self.index), frame.shape[1])
        self.index += frame.shape[1]
        self._held.append(frame[:, drop:])
        self._count += frame.shape[1] - drop
        if self._count < self._block:
            return
        samples = np.concatenate(self._held, axis=1)
        whole = self._count // self._block * self._block
        for begin in range(0, whole, self._block):
            yield from self._resample(samples[:, begin : begin + self._block], last=False)
        self._held, self._count = [samples[:, whole:].copy()], self._count - whole

    def flush(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield what is left at the end of the stretch."""
        if self.index <= self._skip:
            self.at = self._origin + self.index * SAMPLE_RATE // self.rate
            return
        yield from self._resample(np.concatenate(self._held, axis=1), last=True)

    def _resample(self, block: np.ndarray, *, last: bool) -> Iterator[tuple[int, np.ndarray]]:
        samples = self._mixer.mix(block, self.region, self.at / SAMPLE_RATE)
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(np.ascontiguousarray(samples.T), last=last).T
        at = self.at
        self.at += samples.shape[1]
        yield at, samples


class _Mixer:
    """Native channels to output channels: values cleaned, then mixed, separated or one chosen."""

    def __init__(self, source: _Frames, channels: str) -> None:
        self._name, self._warnings, self._select = source.name, source.warnings, channels
        self.outputs = source.channels if channels == "separate" else 1
        self._loudest: int | None = None  # the channel taken alone since phases were found to cancel
        self._scale = 1.0
        self._warned: set[str] = set()
        if channels.isdecimal() and int(channels) > source.channels:
            has = "1 channel" if source.channels == 1 else f"{source.channels} channels"
            raise AudioError(f"{self._name} has {has}: there is no channel {channels}; choose a lower number")
        self.restart(source.channels)

    def restart(self, inputs: int) -> None:
        """The layout is now ``inputs`` channels."""
        if inputs > _MAX_CHANNELS:
            raise AudioError(f"{self._name} claims {inputs} channels: at most {_MAX_CHANNELS} can be read")
        self._loudest = None

    def mix(self, block: np.ndarray, region: int, seconds: float) -> np.ndarray:
        """(inputs, samples) at ``seconds`` of the output to (outputs, samples)."""
        block = self._clean(block)
        if self._select == "separate":
            return self._fit(block)
        if self._select != "mix":
            return block[min(int(self._select), len(block)) - 1][None]
        if len(block) == 1:
            return block
        if self._loudest is not None:
            return block[self._loudest][None]
        mean = block.mean(axis=0)
        edges = np.arange(0, block.shape[1], region)
        if not len(edges):
            return mean[None]
        power = np.add.reduceat(np.square(block), edges, axis=1)
        unrelated = power.sum(axis=0) / len(block) ** 2
        audible = power.max(axis=0) > _PHASE_POWER_FLOOR * np.diff(edges, append=block.shape[1])
        cancels = (np.add.reduceat(np.square(mean), edges) < _PHASE_POWER_RATIO * unrelated) & audible
        if cancels.any():
            worst = int(np.argmax(cancels))
            self._loudest = int(np.argmax(power[:, worst]))
            mean[edges[worst] :] = block[self._loudest, edges[worst] :]
            at = seconds + worst * _PHASE_REGION_SECONDS
            self._warn(
                f"the channels of {self._name} cancel each other (opposite phase): from {at:.1f} s on, channel "
                f"{self._loudest + 1} is used alone."
            )
        return mean[None]

    def _fit(self, block: np.ndarray) -> np.ndarray:
        """As many channels as there were at first, should the layout change on the way."""
        if len(block) == self.outputs:
            return block
        self._warn(f"{self._name} changes its number of channels: missing ones are silent, further ones left out.")
        fitted = np.zeros((self.outputs, block.shape[1]), np.float32)
        fitted[: len(block)] = block[: self.outputs]
        return fitted

    def _clean(self, block: np.ndarray) -> np.ndarray:
        """Finite samples around full scale. Only float formats can need it; for others this costs one maximum."""
        if self._scale != 1.0:
            block = block * np.float32(self._scale)
        peak = max(float(block.max(initial=0.0)), -float(block.min(initial=0.0)))
        if peak <= _HUGE:  # false for NaN, which max() hands through
            return block
        finite = np.isfinite(block)
        if not finite.all():
            block = np.where(finite, block, np.float32(0))
            self._warn(f"{self._name} holds values that are not numbers (NaN or infinite): they are read as silence.")
        level = np.abs(block)
        if self._scale == 1.0 and np.median(level) > 1.0 and level.max(initial=0.0) <= 32768:
            self._scale = 1 / 32768
            self._warn(f"{self._name} holds floats scaled as 16-bit integers: they are divided by 32768.")
            return block * np.float32(self._scale)
        if level.max(initial=0.0) > _HUGE:
            block = np.clip(block, -1, 1)
            self._warn(f"{self._name} holds values far beyond full scale: they are clipped.")
        return block

    def _warn(self, sentence: str) -> None:
        kind = sentence[-30:]
        if kind not in self._warned:
            self._warned.add(kind)
            self._warnings.append(sentence)


class _ArrayFrames:
    """Samples in memory as frames: (samples,), (channels, samples) or (samples, channels); integers are scaled."""

    def __init__(self, array: np.ndarray, rate: int) -> None:
        self.name, self.rate = "<array>", rate
        self.damaged = False
        self.warnings: list[str] = []
        if array.ndim not in (1, 2) or array.dtype.kind not in "fiu":
            raise AudioError(
                f"<array> is {array.ndim}-dimensional {array.dtype}: give (samples,) or (channels, samples) of numbers"
            )
        array = np.atleast_2d(array)
        if array.shape[1] <= 32 < array.shape[0] or (array.shape[1] <= 32 and array.shape[0] > array.shape[1]):
            array = array.T
        if not array.size:
            raise AudioError("<array> has no audio samples: give at least one")
        self._array, self._begin = array, 0
        self.channels = len(array)
        self.seconds = array.shape[1] / rate

    def seek(self, seconds: float) -> int:
        """Begin at ``seconds``; returns the sample's index."""
        self._begin = min(int(seconds * self.rate), self._array.shape[1] - 1)
        return self._begin

    def frames(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (rate, float32 (channels, samples)) of one second each."""
        kind, half = self._array.dtype.kind, 2.0 ** (8 * self._array.dtype.itemsize - 1)
        for begin in range(self._begin, self._array.shape[1], self.rate):
            samples = self._array[:, begin : begin + self.rate]
            if kind != "f":
                samples = (samples.astype(np.float64) - (half if kind == "u" else 0)) / half
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is cleaned with the rest
                yield self.rate, samples.astype(np.float32)

    def close(self) -> None:
        """Nothing to release."""


def open_audio(
    source: AudioSource,
    *,
    sample_rate: int | None = None,
    start: float = 0.0,
    end: float | None = None,
    channels: str = "mix",
    max_seconds: float | None = None,
) -> AudioStream:
    """Open a recording for reading as 16 kHz float32.

    Args:
        source: a path (``"-"`` is stdin), a file's content, a binary file object (read from where it stands, and left
            open), or an array: ``(samples,)``, ``(channels, samples)`` or, with at most 32 channels,
            ``(samples, channels)``; integers are scaled by their range.
        sample_rate: Hz; required for arrays and only for them.
        start, end: seconds to read from and to, exact to the sample; ``end`` None is the end of the recording.
        channels: ``"mix"``, ``"separate"``, or a channel's number from 1. A mix is the mean; where channels cancel
            each other, the louder one is taken from there on and a warning says so.
        max_seconds: most seconds to decode (before ``end``).

    Raises:
        AudioError: it cannot be read as audio, or, while reading, it is longer than ``max_seconds``.
        UsageError: arguments that make no sense.
    """
    is_array = isinstance(source, np.ndarray)
    if is_array != (sample_rate is not None):
        raise UsageError("sample_rate is needed for arrays, and only for them: files say their own")
    if not (math.isfinite(start) and start >= 0) or (end is not None and not (math.isfinite(end) and end >= start)):
        raise UsageError(f"start {start} and end {end}: give seconds with 0 ≤ start ≤ end")
    if channels not in ("mix", "separate") and not (channels.isdecimal() and int(channels) >= 1):
        raise UsageError(f"channels is {channels!r}: say mix, separate, or a channel's number from 1")
    frames: _Frames
    if isinstance(source, np.ndarray):
        if sample_rate is None or not 1 <= sample_rate <= _MAX_RATE:
            raise UsageError(f"sample_rate is {sample_rate}: give the array's rate in Hz")
        frames = _ArrayFrames(source, round(sample_rate))
    elif isinstance(source, DecodedElsewhere):
        frames = source.open(start, end, channels)
        start, end, channels = 0.0, None, "separate"
    else:
        name, reader = open_reader(source)
        try:
            frames = ContainerFrames(name, reader)
        except StapesError:
            reader.close()
            raise
        except Exception as error:  # PyAV raises many kinds on hostile input; callers meet one
            reader.close()
            raise AudioError(f"{name} could not be decoded ({printable(str(error))}): convert it again") from error
    try:
        return AudioStream(frames, start=start, end=end, channels=channels, max_seconds=max_seconds)
    except StapesError:
        frames.close()
        raise


def read_audio(
    source: AudioSource,
    *,
    sample_rate: int | None = None,
    start: float = 0.0,
    end: float | None = None,
    channels: str = "mix",
    max_seconds: float | None = None,
) -> np.ndarray:
    """The whole of ``open_audio``'s stream as one float32 array ``(channels, samples)`` at 16 kHz; same arguments."""
    with open_audio(
        source, sample_rate=sample_rate, start=start, end=end, channels=channels, max_seconds=max_seconds
    ) as stream:
        return np.concatenate([np.zeros((stream.channels, 0), np.float32), *stream], axis=1)


def _expected(seconds: float | None, start: float, end: float | None) -> float | None:
    if seconds is None:
        return None if end is None else end - start
    return max(0.0, min(seconds, math.inf if end is None else end) - start)
