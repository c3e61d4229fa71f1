"""What can be chosen about data. Light to import: command lines and recipes are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stapes.data.text_rules import CaseName, NormalizeName
from stapes.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What is kept of a corpus, and how it is written."""

    split: str | None = None
    """`train=0.9,dev=0.1` (shares, by speaker where known), `train=0_*,test=1_*` (file names), `test=speaker:PATTERN`.
    Default: as the corpus says, and train where it says nothing."""

    normalize: NormalizeName = "basic"
    """basic drops punctuation, symbols and remarks in brackets; none keeps the text."""

    case: CaseName = "auto"
    """lower, upper, keep; auto is lower for basic and keep for none."""

    language: str | None = None
    """Of utterances whose corpus does not say."""

    text_field: str | None = None
    """jsonl and csv: the field that the text is in."""

    untranscribed: bool = False
    """Keep recordings without a text, and take no notice of texts: for pre-training."""

    vocabulary: Path | None = None
    """A model's folder: texts that its vocab.json cannot spell are rejected."""

    min_seconds: float = 0.1
    """Shorter utterances are rejected."""

    max_seconds: float | None = None
    """Longer utterances are rejected."""

    silence_db: float = -60.0
    """Utterances that are nowhere louder (dB of full scale, a tenth of a second) are rejected."""

    max_clipped: float = 0.05
    """Utterances with a larger share of samples at full scale are rejected."""

    frame_rate: float = 50.0
    """Frames a second of the model to come: CTC needs one for each token. Texts that need more are rejected."""

    max_characters_per_second: float = 30.0
    """Texts that would have to be spoken faster are rejected: they belong to other audio."""

    keep_duplicates: bool = False
    """Keep utterances whose audio is there already."""

    convert: Literal["flac", "wav"] | None = None
    """Copy the audio to OUT as 16 kHz mono, which is read fastest. OUT can then be moved to another machine."""

    jobs: int | None = None
    """Processes. Default: all cores."""


@dataclass(frozen=True, kw_only=True)
class AugmentOptions:
    """What may happen to a recording in training. Probabilities are per utterance and epoch."""

    speeds: tuple[float, ...] = (0.9, 1.0, 1.1)
    """Played at one of these speeds (Ko et al. 2015); 1 alone leaves it as it is."""

    tempo_probability: float = 0.0
    """How often only the tempo changes by that factor and the pitch stays."""

    pitch_probability: float = 0.0
    """How often the pitch is shifted."""

    pitch_semitones: tuple[float, float] = (-2.0, 2.0)
    """Range of the shift."""

    rooms: tuple[str, ...] = ()
    """Room impulse responses: files, patterns or folders."""

    room_probability: float = 0.3
    """How often a recording is put into a room."""

    noises: tuple[str, ...] = ()
    """Background noises: files, patterns or folders."""

    noise_probability: float = 0.5
    """How often noise is added."""

    snr_db: tuple[float, float] = (5.0, 25.0)
    """Range of the signal-to-noise ratio, in dB: mean power of the recording to that of the noise."""

    gain_probability: float = 0.5
    """How often the loudness changes."""

    gain_db: tuple[float, float] = (-10.0, 6.0)
    """Range of the change; what would exceed full scale is turned down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PseudoLabelOptions:
    """Which of a teacher's labels are kept, and how they are written."""

    max_wer: float = 0.1
    """The largest word error rate between label and known text; utterances without a text are kept whatever is
    written for them."""

    normalize: NormalizeName = "none"
    """How labels are written: none as the teacher writes, for a student of its kind; basic without punctuation, for
    CTC."""

    case: CaseName = "auto"
    """lower, upper, keep; auto is lower for basic and keep for none."""

    def __post_init__(self) -> None:
        if not self.max_wer >= 0:
            raise UsageError(f"--max-wer is {self.max_wer}: it must be at least 0; 0.1 is one word in ten")
