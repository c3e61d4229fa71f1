"""What is wrong with an utterance: what its audio says, and whether audio and text fit each other."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stapes.audio.containers import ContainerFrames
from stapes.audio.decode import SAMPLE_RATE, open_audio
from stapes.audio.sources import open_reader
from stapes.data.corpora import Row
from stapes.data.manifest import AUDIO_FOLDER
from stapes.data.reading import read_samples
from stapes.data.seeds import key_of
from stapes.errors import AudioError, OutputError, StapesError

REASONS: Mapping[str, str] = {
    "manifest": "the line of the corpus is damaged",
    "missing": "the audio is not there",
    "unreadable": "the audio cannot be read",
    "damaged": "the audio is truncated or damaged",
    "no text": "there is no text",
    "not transcribed": "the corpus marks it as not transcribed",
    "duration": "the audio is not as long as the corpus says",
    "too short": "shorter than --min-seconds",
    "too long": "longer than --max-seconds",
    "silent": "there is no sound",
    "clipped": "much of it is cut off at full scale",
    "vocabulary": "the text has characters outside the vocabulary",
    "text too long": "the text has more tokens than the audio has frames, or is spoken impossibly fast",
    "duplicate": "the same audio is there already",
    "split": "--split leaves it out",
}
"""Why an utterance is rejected, by the code that reports use."""

UNREADABLE = frozenset({"manifest", "missing", "unreadable", "damaged"})
"""Of these, something is broken in the corpus's files; the others are only not wanted."""

_VERSION = 1  # of what is measured: results of another are measured again
_FRAME = SAMPLE_RATE // 10
_FULL_SCALE = 0.999
_EDGE_BYTES = 1 << 20  # a file up to it is fingerprinted whole, a longer one by its beginning, end and size
_FREE_CHARACTERS = 10  # a word by itself may be cut so short that its rate says nothing
_DURATION_SLACK = (0.25, 0.02)  # seconds, and share: encoders pad, and manifests round


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFacts:
    """What was measured of an utterance's audio. All of it is of the utterance alone but ``rate`` and the two after."""

    samples: int = 0
    """At 16 kHz."""
    rate: int = 0
    """Hz, of the file."""
    channels: int = 0
    recording_seconds: float = 0.0
    """Of the whole file."""
    loudest_db: float = -200.0
    """Level of the loudest tenth of a second, dB below full scale (root mean square)."""
    clipped: float = 0.0
    """Share of samples at full scale."""
    digest: str = ""
    """Of the samples, in 16 bits: the same for a lossless copy in another format."""
    damaged: str = ""
    """What the decoder said of damage that it passed over."""
    code: str = ""
    """Set where there are no samples: one of ``REASONS``, ``error`` says more."""
    error: str = ""
    converted: str = ""
    """The 16 kHz copy, from the output folder."""
    converted_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Of the utterance."""
        return self.samples / SAMPLE_RATE

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an utterance is rejected."""

    min_seconds: float = 0.1
    max_seconds: float | None = None
    silence_db: float = -60.0
    max_clipped: float = 0.05
    frame_rate: float = 50.0
    """Frames a second that the model gives: CTC needs one for each token, and one more between two equal ones."""
    max_characters_per_second: float = 30.0
    """Of longer texts; nobody speaks so fast."""
    untranscribed: bool = False
    """There may be no text."""


def fingerprint(row: Row, convert: str | None) -> str:
    """Changes whenever ``measure`` could say something else: by what is in the file, not by its date.

    Raises OSError where the file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open(row.audio, "rb") as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(_EDGE_BYTES))
        if size > _EDGE_BYTES:
            file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    part = [_VERSION, size, row.start, row.end, row.channel, convert, row.id if convert else None]
    digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def measure(row: Row, convert: str | None, out: Path) -> AudioFacts:
    """Decode an utterance and say what is in it; with ``convert`` (``flac``, ``wav``) also write it at 16 kHz.

    Raises OutputError where the copy cannot be written. What is wrong with the audio is in the facts.
    """
    name = _converted_name(row, convert) if convert else ""
    damage = ""
    try:
        rate, channels, seconds = _probe(row.audio)
        levels = _Levels()
        with _Copy(out / name if name else None, convert) as copy:
            if row.end is not None:  # parts are short, and one recording may have a thousand: no reading up to them
                chunk = read_samples(row.audio, row.start, row.end, row.channel)
                levels.add(chunk)
                copy.write(chunk)
            else:
                channel = "mix" if row.channel is None else str(row.channel + 1)
                with open_audio(row.audio, start=row.start, channels=channel) as stream:
                    for (chunk,) in stream:
                        levels.add(chunk)
                        copy.write(chunk)
                    damage = stream.warnings[-1] if stream.damaged and stream.warnings else ""
    except OutputError:
        raise
    except StapesError as error:
        code = "unreadable" if Path(row.audio).exists() else "missing"
        return AudioFacts(code=code, error=str(error))
    if not levels.samples:
        return AudioFacts(code="unreadable", error=f"{row.audio} has nothing between {row.start:g} s and {row.end} s")
    whole = not row.start and row.end is None
    return AudioFacts(
        samples=levels.samples,
        rate=rate,
        channels=channels,
        recording_seconds=levels.samples / SAMPLE_RATE if whole else max(seconds or 0.0, row.end or 0.0),
        loudest_db=levels.loudest_db,
        clipped=levels.clipped / levels.samples,
        digest=levels.digest.hexdigest(),
        damaged=damage,
        converted=name,
        converted_bytes=(out / name).stat().st_size if name else 0,
    )


def rejected(
    row: Row, text: str, facts: AudioFacts, limits: Limits, tokens: Sequence[int] | str, unknown: str
) -> tuple[str, str] | None:
    """Why an utterance is no good: (code, what exactly), or None.

    text: as it is trained on. tokens: what CTC has to write for it. unknown: characters of it that have no token.
    """
    if facts.code:
        return facts.code, facts.error
    if facts.damaged:
        return "damaged", facts.damaged
    if not text and not limits.untranscribed:
        return "no text", f"nothing of {row.text[:60]!r} is a word" if row.text.strip() else "its text is empty"
    if row.duration is not None:
        slack, share = _DURATION_SLACK
        if abs(facts.seconds - row.duration) > slack + share * row.duration:
            return "duration", f"{facts.seconds:.2f} s of audio, {row.duration:.2f} s in the corpus"
    if facts.seconds < limits.min_seconds:
        return "too short", f"{facts.seconds:.2f} s"
    if limits.max_seconds is not None and facts.seconds > limits.max_seconds:
        return "too long", f"{facts.seconds:.2f} s"
    if facts.loudest_db < limits.silence_db:
        return "silent", f"never louder than {facts.loudest_db:.0f} dB of full scale"
    if facts.clipped > limits.max_clipped:
        return "clipped", f"{100 * facts.clipped:.1f} % of its samples are at full scale"
    if unknown:
        return "vocabulary", f"{' '.join(map(repr, unknown))} in {text[:60]!r}"
    characters = len(text) - _FREE_CHARACTERS
    if characters > limits.max_characters_per_second * facts.seconds:
        return "text too long", f"nobody says {text[:60]!r} ({len(text)} characters) in {facts.seconds:.2f} s"
    needed = ctc_frames(tokens)
    if needed > facts.seconds * limits.frame_rate:
        frames = int(facts.seconds * limits.frame_rate)
        return "text too long", f"{needed} frames needed, {frames} there: {text[:60]!r} in {facts.seconds:.2f} s"
    return None


def ctc_frames(tokens: Sequence[int] | str) -> int:
    """How many frames CTC needs at least to write these: one each, and a blank between two equal ones."""
    return len(tokens) + sum(first == second for first, second in pairwise(tokens))


class _Levels:
    """Sums over a recording, chunk by chunk."""

    def __init__(self) -> None:
        self.samples = 0
        self.clipped = 0
        self.digest = hashlib.blake2b(digest_size=16)
        self._loudest = 0.0
        self._rest = np.zeros(0, np.float32)

    def add(self, chunk: np.ndarray) -> None:
        self.samples += len(chunk)
        self.clipped += int(np.count_nonzero(np.abs(chunk) >= _FULL_SCALE))
        self.digest.update(np.clip(np.rint(chunk * 32767), -32768, 32767).astype("<i2").tobytes())
        joined = np.concatenate([self._rest, chunk])
        whole = len(joined) // _FRAME * _FRAME
        self._rest = joined[whole:]
        if whole:
            powers = np.square(joined[:whole].reshape(-1, _FRAME)).mean(1)
            self._loudest = max(self._loudest, float(powers.max()))

    @property
    def loudest_db(self) -> float:
        loudest = self._loudest
        if self.samples < _FRAME:
            loudest = float(np.square(self._rest).mean())
        return 10 * float(np.log10(max(loudest, 1e-20)))


class _Copy:
    """A 16 kHz mono file of 16 bits that is whole or not there; without a path, nothing."""

    def __init__(self, path: Path | None, convert: str | None) -> None:
        self._path, self._convert = path, convert
        self._file: Any = None

    def __enter__(self) -> _Copy:
        if self._path is not None:
            import soundfile

            self._part = self._path.with_name(f".{self._path.name}.part")
            with self._errors():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                format = {"flac": "FLAC", "wav": "WAV"}[str(self._convert)]
                self._file = soundfile.SoundFile(self._part, "w", SAMPLE_RATE, 1, "PCM_16", format=format)
        return self

    def write(self, chunk: np.ndarray) -> None:
        if self._file is not None:
            with self._errors():
                self._file.write(chunk)

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._file is None or self._path is None:
            return
        try:
            with self._errors():
                self._file.close()
                if kind is None:
                    self._part.replace(self._path)
        finally:
            self._part.unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # soundfile's are RuntimeErrors
            raise OutputError(
                f"{self._path} cannot be written ({error}): free the space or choose another folder"
            ) from error


def _probe(audio: str) -> tuple[int, int, float | None]:
    """(Hz, channels, seconds) of a file."""
    name, reader = open_reader(audio)
    try:
        frames = ContainerFrames(name, reader)
    except StapesError:
        reader.close()
        raise
    except Exception as error:  # PyAV raises many kinds on hostile input
        reader.close()
        raise AudioError(f"{name} could not be decoded ({error}): convert it again") from error
    try:
        return frames.rate, frames.channels, frames.seconds
    finally:
        frames.close()


def _converted_name(row: Row, convert: str) -> str:
    """``audio/3f/ID-3f….flac``: no folder gets too many, and no two ids meet."""
    key = f"{key_of(row.id):016x}"
    readable = re.sub(r"[^\w.-]+", "_", row.id)[-60:].strip("._")
    return f"{AUDIO_FOLDER}/{key[:2]}/{readable}-{key[2:]}.{convert}"
