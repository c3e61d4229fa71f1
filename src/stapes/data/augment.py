"""Changes to recordings that make a model robust: speed, tempo, pitch, rooms, noise, loudness.

All chance comes from the generator that the caller gives, one for each utterance and epoch (``seeds.generator``).
Resampling is soxr's; tempo is FFmpeg's ``atempo`` (waveform similarity overlap-add), and pitch is both together.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from glob import glob
from pathlib import Path

import av
import av.error
import av.filter
import numpy as np
import soxr

from stapes.audio.decode import SAMPLE_RATE, open_audio, read_audio
from stapes.data.corpora import AUDIO_SUFFIXES
from stapes.data.options import AugmentOptions
from stapes.errors import AudioError, UsageError

_QUIET = 1e-10  # mean square below which there is nothing to scale: −100 dBFS
_CACHE_BYTES = 128 << 20  # of decoded noise that a process keeps; longer files are read in parts, each time
_LONG_SECONDS = 600.0


class WaveformAugment:
    """Applies ``AugmentOptions``: an ``Augment`` for ``TrainingData``.

    Raises UsageError for options that make no sense, and for noises or rooms that are not there or hold no audio.
    """

    def __init__(self, options: AugmentOptions) -> None:
        for name in ("tempo", "pitch", "room", "noise", "gain"):
            if not 0 <= (value := getattr(options, f"{name}_probability")) <= 1:
                raise UsageError(f"{name}_probability is {value}: give a number from 0 to 1")
        for name in ("pitch_semitones", "snr_db", "gain_db"):
            low, high = getattr(options, name)
            if not (math.isfinite(low) and low <= high and math.isfinite(high)):
                raise UsageError(f"{name} is {low} to {high}: give the lower end first")
        tempos = [*options.speeds] if options.tempo_probability else []
        if options.pitch_probability:
            tempos += [2.0 ** (-semitones / 12) for semitones in options.pitch_semitones]
        for tempo in tempos:
            _check_tempo(tempo)
        self.options = options
        self.speeds: Sequence[float] = options.speeds
        self._noises = AudioFiles(options.noises) if options.noises else None
        self._rooms = AudioFiles(options.rooms) if options.rooms else None

    def __call__(self, samples: np.ndarray, speed: float, random: np.random.Generator) -> np.ndarray:
        options = self.options
        # Every number is drawn whatever the others say, so that one option does not change what another does.
        tempo, pitch, room, noise, gain = random.random(5)
        semitones = random.uniform(*options.pitch_semitones)
        snr_db = random.uniform(*options.snr_db)
        gain_db = random.uniform(*options.gain_db)
        places = random.random(6)
        if speed != 1.0:
            change = change_tempo if tempo < options.tempo_probability else change_speed
            samples = change(samples, speed)
        if pitch < options.pitch_probability:
            samples = shift_pitch(samples, semitones)
        if self._rooms is not None and room < options.room_probability:
            samples = add_room(samples, self._rooms.response(*places[:2]))
        if self._noises is not None and noise < options.noise_probability:
            samples = add_noise(samples, self._noises.excerpt(len(samples), *places[2:5]), snr_db)
        if gain < options.gain_probability:
            samples = samples * np.float32(10 ** (gain_db / 20))
        peak = float(np.abs(samples).max(initial=0.0))
        return (samples / np.float32(peak) if peak > 1.0 else samples).astype(np.float32, copy=False)


def change_speed(samples: np.ndarray, speed: float) -> np.ndarray:
    """Play float32 (samples,) faster (``speed`` > 1) or slower: pitch and formants move too."""
    out = soxr.resample(samples, SAMPLE_RATE * speed, SAMPLE_RATE, quality="HQ")
    return _of_length(out, round(len(samples) / speed))


def change_tempo(samples: np.ndarray, tempo: float) -> np.ndarray:
    """Make float32 (samples,) faster (``tempo`` > 1) or slower without moving its pitch. 0.5 to 2."""
    _check_tempo(tempo)
    graph = av.filter.Graph()
    source = graph.add_abuffer(sample_rate=SAMPLE_RATE, format="flt", layout="mono", time_base=None)
    stretch, sink = graph.add("atempo", f"{tempo:.9f}"), graph.add("abuffersink")
    source.link_to(stretch)
    stretch.link_to(sink)
    graph.configure()
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], np.float32), format="flt", layout="mono")
    frame.sample_rate = SAMPLE_RATE
    frame.pts = 0
    graph.push(frame)
    graph.push(None)
    parts = []
    while True:
        try:
            parts.append(graph.pull().to_ndarray().reshape(-1))  # pyright: ignore[reportAttributeAccessIssue]
        except (av.error.EOFError, av.error.BlockingIOError):
            break
    return _of_length(np.concatenate([np.zeros(0, np.float32), *parts]), round(len(samples) / tempo))


def shift_pitch(samples: np.ndarray, semitones: float) -> np.ndarray:
    """Move the pitch of float32 (samples,) by so many semitones; its length stays."""
    ratio = 2.0 ** (semitones / 12)
    return _of_length(change_speed(change_tempo(samples, 1 / ratio), ratio), len(samples))


def add_room(samples: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Put float32 (samples,) into a room: convolution with its impulse ``response``, float32 (samples,).

    The direct sound stays where it was, and the mean power too.
    """
    power = _power(samples)
    direct = int(np.abs(response).argmax())
    size = _fast_size(len(samples) + len(response) - 1)
    spectrum = np.fft.rfft(samples, size) * np.fft.rfft(response, size)
    wet = np.fft.irfft(spectrum, size)[direct : direct + len(samples)].astype(np.float32)
    wet_power = _power(wet)
    return wet * np.float32(math.sqrt(power / wet_power)) if wet_power > _QUIET else samples


def add_noise(samples: np.ndarray, noise: np.ndarray, snr_db: float) -> np.ndarray:
    """Add ``noise``, as long as float32 (samples,), at a ratio of their mean powers. Silence takes no noise."""
    signal_power, noise_power = _power(samples), _power(noise)
    if signal_power < _QUIET or noise_power < _QUIET:
        return samples
    scale = math.sqrt(signal_power / noise_power) * 10 ** (-snr_db / 20)
    return samples + noise * np.float32(scale)


class AudioFiles:
    """Noises or room responses: files, patterns such as ``rooms/*.flac``, and all audio in folders, by their names.

    What was read is kept up to 128 MiB a process. Raises UsageError where there is none, AudioError (when it is asked
    for) for one that cannot be read.
    """

    def __init__(self, places: Sequence[str | Path]) -> None:
        self.paths: list[Path] = []
        for place in map(Path, places):
            if place.is_dir():
                found = sorted(path for path in place.rglob("*") if path.suffix.lower() in AUDIO_SUFFIXES)
            elif place.exists():
                found = [place]
            else:
                found = sorted(map(Path, glob(str(place), recursive=True)))  # noqa: PTH207  # it may be absolute
            if not found:
                raise UsageError(f"{place}: no audio there; name files, a pattern or a folder of wav or flac files")
            self.paths += found
        self._cache: OrderedDict[Path, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._seconds: dict[Path, float | None] = {}

    def excerpt(self, count: int, which: float, where: float, channel: float) -> np.ndarray:
        """``count`` samples of one of the files, float32 (count,); chances are numbers in [0, 1).

        A shorter file is repeated.
        """
        path = self.paths[int(which * len(self.paths))]
        seconds = self._duration(path)
        if seconds is not None and seconds > _LONG_SECONDS:
            start = where * max(0.0, seconds - count / SAMPLE_RATE - 1)
            audio = read_audio(path, start=start, end=start + count / SAMPLE_RATE, channels="separate")
            start = 0
        else:
            audio = self._read(path)
            start = int(where * max(1, audio.shape[1] - count + 1 if audio.shape[1] >= count else audio.shape[1]))
        one = audio[int(channel * len(audio))]
        if not len(one):
            raise AudioError(f"{path} has no audio samples: take it out of the noises")
        return one[start : start + count] if start + count <= len(one) else np.resize(np.roll(one, -start), count)

    def response(self, which: float, channel: float) -> np.ndarray:
        """One channel of one of the files, float32 (samples,)."""
        audio = self._read(self.paths[int(which * len(self.paths))])
        return audio[int(channel * len(audio))]

    def _duration(self, path: Path) -> float | None:
        if path not in self._seconds:
            with open_audio(path) as stream:
                self._seconds[path] = stream.duration
        return self._seconds[path]

    def _read(self, path: Path) -> np.ndarray:
        if path in self._cache:
            self._cache.move_to_end(path)
            return self._cache[path]
        audio = read_audio(path, channels="separate")
        self._cache[path] = audio
        self._bytes += audio.nbytes
        while self._bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._bytes -= self._cache.popitem(last=False)[1].nbytes
        return audio


def _check_tempo(tempo: float) -> None:
    if not 0.5 <= tempo <= 2.0:
        raise UsageError(f"a tempo of {tempo:g} cannot be made well: choose 0.5 to 2, and at most 12 semitones")


def _power(samples: np.ndarray) -> float:
    """Mean square, summed in float64."""
    return float(np.mean(np.square(samples, dtype=np.float64))) if len(samples) else 0.0


def _of_length(samples: np.ndarray, count: int) -> np.ndarray:
    """Cut, or filled up with zeros; filters end a few samples early or late."""
    samples = samples[:count]
    return np.pad(samples, (0, count - len(samples))).astype(np.float32, copy=False)


def _fast_size(size: int) -> int:
    """The next size that a Fourier transform does fast: 2, 3 or 5 times a power of two, at least ``size``."""
    return min(factor << max(0, math.ceil(math.log2(size / factor))) for factor in (1, 3, 5) if size >= 1)
