"""A recording that Whisper writes down: what both ways through a long one share; `longform` has the two."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.windows import PackedWindow
from stapes.decoding.align import add_word_times, find_words, split_segments, token_frames
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult
from stapes.inference.feed import AudioFeed, Clips, FeedWindow
from stapes.inference.segments import Attempt, best_attempt, final_tokens, judge, make_segments, slice_segments
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import WhisperTokenizer
from stapes.transcript import Segment

_LANGUAGE_CONFIDENCE = 0.5

_HARDLY_PADDED = 28.0
"""Seconds of sound from which on the padding of a window cannot matter."""

_SURE = -0.6
"""Mean log-probability of the tokens from which on the first look at a padded window is trusted. On speechocean762 with
base, all that the other padding gains, it gains below this."""

_MAX_INITIAL_TIMESTAMP = 50
"""openai/whisper: a window's first timestamp is at most 1 s."""


@dataclass(frozen=True)
class Model:
    """What a state machine must know of the model."""

    tokenizer: WhisperTokenizer
    text_context: int
    suppressed: tuple[int, ...]


@dataclass(eq=False)
class Window:
    """Up to 30 s of a recording on its way through the engine."""

    recording: Recording
    packed: PackedWindow
    pcm: np.ndarray
    prompt: tuple[int, ...] = ()
    encoded: Any = None
    attempts: list[Attempt] = field(default_factory=list)
    again: bool = False
    """This is the second look; it is to be encoded for that."""

    @property
    def start(self) -> int:
        """First sample in the recording."""
        return self.packed.start

    @property
    def sound(self) -> np.ndarray:
        """What the engine encodes."""
        return self.pcm

    @property
    def duration(self) -> float:
        """Seconds of sound."""
        return len(self.pcm) / SAMPLE_RATE

    @property
    def is_padded(self) -> bool:
        """Whether enough follows the sound for its padding to matter."""
        return self.duration < _HARDLY_PADDED


@dataclass
class Draft:
    """The segments of a window before their words are known, in window time."""

    segments: list[Segment]
    done: float | None
    attempt: Attempt | None


class Recording(AudioFeed):
    """What both ways of Whisper share: the language, attempts, words, segments."""

    keeps_open_segment: ClassVar[bool]
    """Whether a segment that a window begins and does not end is kept; else the next window hears it again."""

    language_windows: ClassVar[int]
    """After how many windows the language is decided, however unsure it is."""

    def __init__(self, model: Model, options: TranscribeOptions, clips: Clips) -> None:
        super().__init__(clips, vad=options.vad)
        self.model, self.options = model, options
        self.language = options.language
        self._language_votes: list[dict[str, float]] = []
        self._parked: deque[Window] = deque()

    def fail(self, error: Exception, window: FeedWindow | None = None) -> None:
        with self.lock:
            super().fail(error, window)
            self._outstanding.difference_update(self._parked)
            self._parked.clear()

    # The scheduling thread.

    def take(self) -> Window | None:
        """The next window, when there is one and the language is known or this window may tell it."""
        with self.lock:
            if self.error is not None:
                return None
            if self.language is not None and self._parked:
                return self._parked.popleft()
            waiting = self.language is None and len(self._outstanding) > len(self._parked)
            window = None if waiting else self._next()
            if window is not None:
                self._outstanding.add(window)
            elif self.language is None and self._parked and not waiting and self.ended:
                self._decide_language()
                return self._parked.popleft()
            return window

    @abstractmethod
    def _next(self) -> Window | None:
        """The next window, when there is one."""

    @property
    def needs_language(self) -> bool:
        return self.language is None

    def vote(self, window: Window, probabilities: dict[str, float]) -> bool:
        """Note which language a window is in. False: not sure yet, the window is kept until others were heard."""
        with self.lock:
            self._language_votes.append(probabilities)
            self._parked.append(window)
            if self._mean_votes()[1] < _LANGUAGE_CONFIDENCE and len(self._language_votes) < self.language_windows:
                return False
            self._decide_language()
            return True

    def _mean_votes(self) -> tuple[str, float]:
        votes = self._language_votes
        mean = {code: sum(vote[code] for vote in votes) / len(votes) for code in votes[0]}
        code = max(mean, key=mean.__getitem__)
        return code, mean[code]

    def _decide_language(self) -> None:
        self.language, self.language_probability = self._mean_votes()

    def request(self, window: Window) -> DecodeRequest:
        """The next attempt at a window."""
        options, tokenizer = self.options, self.model.tokenizer
        temperature = options.temperatures()[len(window.attempts)]
        timestamps = not options.without_timestamps
        start = tokenizer.start_sequence(self.language, options.task, without_timestamps=options.without_timestamps)
        prompt = (*window.prompt, *start)
        return DecodeRequest(
            prompt=prompt,
            sot_index=len(window.prompt),
            timestamps=timestamps,
            max_initial_timestamp=_MAX_INITIAL_TIMESTAMP if timestamps else -1,
            temperature=temperature,
            beam_size=options.beam_size if temperature == 0 else 1,
            best_of=options.best_of if temperature > 0 else 1,
            patience=options.patience,
            length_penalty=options.length_penalty,
            suppressed=self.model.suppressed,
            key=(options.seed, window.start, len(window.attempts)),
            stop_loops=options.compression_ratio_threshold is not None,
        )

    def prompt_tokens(self, previous: Sequence[int], *, initial: bool) -> tuple[int, ...]:
        """What a window is told before it starts: hotwords, the initial prompt, the text before it.

        As in openai/whisper, half of the text context is room for it, and of a prompt too long its end counts.
        """
        options, tokenizer = self.options, self.model.tokenizer
        told: list[int] = []
        room = self.model.text_context // 2 - 1
        if options.hotwords:
            told += tokenizer.encode(" " + options.hotwords.strip())[:room]
        if options.initial_prompt and (initial or options.carry_initial_prompt):
            told += _last(tokenizer.encode(" " + options.initial_prompt.strip()), room - len(told))
        told += _last(previous, room - len(told))
        return (tokenizer.sot_prev, *told) if told else ()

    def judge(self, window: Window, result: DecodeResult) -> Draft | None:
        """Take the result of an attempt. None: it failed, and the window is to be tried again."""
        self.drafted, self.agreed = self.drafted + result.drafted, self.agreed + result.agreed
        window.attempts.append(judge(result, self.model.tokenizer, self.options, window.packed.peak))
        if self._is_unsure(window):
            window.attempts.clear()
            window.encoded, window.again = None, True
            return None
        if window.attempts[-1].failed and len(window.attempts) < len(self.options.temperatures()):
            return None
        attempt = best_attempt(window.attempts)
        if attempt.silent:
            return Draft([], None, None)
        tokenizer = self.model.tokenizer
        tokens = final_tokens(attempt)
        slices, done = slice_segments(
            tokens, tokenizer.timestamp_begin, window.duration, keep_open=self.keeps_open_segment
        )
        seek = round(window.start * 100 / SAMPLE_RATE)
        return Draft(make_segments(slices, attempt, tokenizer, seek), done, attempt)

    def _is_unsure(self, window: Window) -> bool:
        """Whether to forget the first look at a window and take a second one, with its padding filled otherwise.

        The silence that pads a short window is what most often misleads Whisper on noisy speech, while on clear
        speech it serves best. Which of the two it is, the first look's own likelihood tells.
        """
        if window.again or not window.is_padded or len(self.options.temperatures()) < 2:
            return False
        attempt = window.attempts[-1]
        return not attempt.silent and (attempt.failed or attempt.result.avg_logprob < _SURE)

    def words_wanted(self, window: Window, draft: Draft) -> tuple[list[int], list[int]] | None:
        """The prompt and the text to align, when words are asked for and there are any.

        Where silence was cut out of a window, the times of its segments come from its words too: Whisper lets a
        segment last into the silence behind it, and behind a joint that is another part of the recording.
        """
        text = [token for segment in draft.segments for token in segment.tokens if token < self.model.tokenizer.eot]
        if not text or not (self.options.word_timestamps or len(window.packed.pieces) > 1):
            return None
        tokenizer = self.model.tokenizer
        return tokenizer.start_sequence(self.language, self.options.task, without_timestamps=True), text

    def add_words(self, window: Window, draft: Draft, prompt: Sequence[int], alignment: Alignment) -> None:
        """Give the segments of a draft their words, in window time."""
        tokenizer, options = self.model.tokenizer, self.options
        words, word_tokens = split_segments(tokenizer, draft.segments, self.language)
        mel_frames = min(3000, max(2, round(window.duration * 100)))
        (frames,) = token_frames([alignment.scores], [mel_frames], prefix_length=len(prompt) - 1)
        add_word_times(
            draft.segments,
            find_words(words, word_tokens, frames, alignment.probabilities),
            window.pcm,
            eot=tokenizer.eot,
            prepended=options.prepend_punctuations,
            appended=options.append_punctuations,
            last_speech=self._last_speech(window),
        )

    def _last_speech(self, window: Window) -> float:
        """Where the speech before a window ended, in window time; its beginning where that is not known."""
        return 0.0

    def complete(self, window: Window, draft: Draft) -> None:
        with self.lock:
            self.heard.extend(window.packed.pieces)
            super().complete(window, draft)

    def _add_segments(self, window: Window, segments: Sequence[Segment]) -> None:
        to_recording = window.packed.span_to_recording
        for segment in segments:
            segment.start, segment.end = to_recording(segment.start, segment.end)
            for word in segment.words or []:
                word.start, word.end = to_recording(word.start, word.end)
            if segment.words:
                segment.start, segment.end = segment.words[0].start, segment.words[-1].end
            if not self.options.word_timestamps:
                segment.words = None
            self.segments.append(segment)


def _last(tokens: Sequence[int], count: int) -> list[int]:
    return list(tokens[-count:]) if count > 0 else []
