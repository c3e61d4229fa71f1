"""Where somebody begins and stops to speak, frame by frame as the sound comes, and where long speech is parted."""

from __future__ import annotations

from dataclasses import dataclass

from stapes.audio.vad import FRAME, SAMPLE_RATE
from stapes.options import TurnOptions

_ONSET_FRAMES = 2
"""Frames of speech in a row that begin a turn: a click is one."""

_HYSTERESIS = 0.15
"""So much below the threshold a frame is silent; as in Silero's own functions."""

_PARTINGS = ((24.0, 0.0), (18.0, 0.06), (12.0, 0.2))
"""Speech that has become so many seconds long is parted at the next pause of so many: a window of the model is 30 s,
and what is heard again and again is to stay short. Always where the sound is now: what was committed lies before."""


@dataclass(frozen=True, slots=True)
class Started:
    """Speech has begun; ``sample`` is where its sound is kept from."""

    sample: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A part of the speech is over: its sound ends at ``sample``. is_pause: the turn is over too."""

    sample: int
    is_pause: bool


class TurnDetector:
    """Takes speech probabilities; says where turns and their parts begin and end. Samples of the session's clock."""

    def __init__(self, options: TurnOptions) -> None:
        self.options = options
        self.samples = 0
        """Whole frames seen."""
        self.is_speaking = False
        self.start = 0
        """Of the part that goes on."""
        self.speech_end = 0
        """Sample after the last frame of speech."""
        self.has_speech = False
        """Whether the part that goes on has any frame of speech."""
        self.peak = 0.0
        """The highest probability in the part that goes on."""
        self._edge = 0  # where the part before ended: nothing is heard twice
        self._onset = 0  # frames of speech in a row, before a turn
        self._silence: int | None = None  # where the silence that goes on began

    @property
    def needed(self) -> int:
        """First sample that may still be needed."""
        if self.is_speaking:
            return self.start
        return max(self._edge, self.samples - self._padding - _ONSET_FRAMES * FRAME)

    @property
    def silence(self) -> float:
        """Seconds of silence just now, within a turn."""
        return 0.0 if self._silence is None else (self.samples - self._silence) / SAMPLE_RATE

    @property
    def _padding(self) -> int:
        return self.options.prefix_padding_ms * SAMPLE_RATE // 1000

    def step(self, probability: float) -> Started | Ended | None:
        """Take one frame."""
        frame = self.samples
        self.samples += FRAME
        is_speech = probability >= self.options.threshold
        if not self.is_speaking:
            self._onset = self._onset + 1 if is_speech else 0
            self.peak = max(self.peak, probability) if self._onset else 0.0
            if self._onset < _ONSET_FRAMES:
                return None
            self.start = max(self._edge, self.samples - _ONSET_FRAMES * FRAME - self._padding)
            self.is_speaking = self.has_speech = True
            self.speech_end, self._silence = self.samples, None
            return Started(self.start)
        if is_speech:
            self._silence, self.speech_end, self.has_speech = None, self.samples, True
            self.peak = max(self.peak, probability)
        elif self._silence is None and probability < max(self.options.threshold - _HYSTERESIS, 0.01):
            self._silence = frame
        if self.silence >= self.options.silence_duration_ms / 1000:
            return self.cut(self.samples)
        length = (self.samples - self.start) / SAMPLE_RATE
        if any(length >= longest and self.silence >= pause for longest, pause in _PARTINGS):
            self._edge = self.start = self.samples
            self.has_speech, self.peak = False, 0.0
            return Ended(self.samples, False)
        return None

    def cut(self, sample: int) -> Ended | None:
        """End the turn that goes on at ``sample``, if there is one; nothing before it will be part of another."""
        self._edge, self._onset = sample, 0
        if not self.is_speaking:
            return None
        self.is_speaking, self._silence = False, None
        return Ended(sample, True)
