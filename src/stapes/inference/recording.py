"""A recording as a state machine: audio goes in, windows come out, results come back, segments are kept.

This is what both ways through a long recording share; `longform` has the two. One thread feeds a recording, another
takes its windows and brings results; each machine locks itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.vad import Region, SpeechSegmenter
from stapes.audio.windows import PackedWindow, Piece, skipped
from stapes.decoding.align import add_word_times, find_words, split_segments, token_frames
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult
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


class Recording(ABC):
    """What both ways share: the audio at hand, the language, attempts, words, segments.

    clips: the parts to transcribe, in samples; None as an end is the recording's end.
    """

    keeps_open_segment: ClassVar[bool]
    """Whether a segment that a window begins and does not end is kept; else the next window hears it again."""

    language_windows: ClassVar[int]
    """After how many windows the language is decided, however unsure it is."""

    def __init__(self, model: Model, options: TranscribeOptions, clips: Sequence[tuple[int, int | None]]) -> None:
        self.model, self.options = model, options
        self.clips = list(clips)
        self.lock = threading.RLock()
        self.language = options.language
        self.language_probability: float | None = None
        self.segments: list[Segment] = []
        self.length = 0
        self.ended = False
        self.error: Exception | None = None
        self.heard: list[PackedWindow] = []
        self._chunks: deque[np.ndarray] = deque()
        self._offset = 0  # sample of the recording that _chunks begin with
        self._outstanding: set[Window] = set()  # taken and not completed
        self._language_votes: list[dict[str, float]] = []
        self._parked: deque[Window] = deque()
        self._segmenter = SpeechSegmenter() if options.vad else None

    # The feeding thread.

    def feed(self, pcm: np.ndarray, probabilities: np.ndarray | None) -> None:
        """Take the next samples, and the speech probabilities of the frames that they completed."""
        with self.lock:
            self.length += len(pcm)
            if self.error is not None:
                return
            self._chunks.append(pcm)
            if self._segmenter is not None and probabilities is not None:
                self._take_regions(self._segmenter.feed(probabilities))
            self._advance()

    def finish(self, probabilities: np.ndarray | None) -> None:
        """The recording has ended."""
        with self.lock:
            self.ended = True
            if self.error is not None:
                return
            if self._segmenter is not None:
                last = np.zeros(0, np.float32) if probabilities is None else probabilities
                self._take_regions(self._segmenter.feed(last, final=True, samples=self.length))
            self._advance()

    def fail(self, error: Exception, window: Window | None = None) -> None:
        """Give up on what is left, because of an error in handling it or a window of it; keep what there is."""
        with self.lock:
            self.error = self.error or error
            if window is not None:
                self._outstanding.discard(window)
            self._outstanding.difference_update(self._parked)
            self._parked.clear()
            self._chunks.clear()
            self._offset = self.length

    @abstractmethod
    def _take_regions(self, regions: Sequence[Region]) -> None:
        """Take settled regions of speech."""

    @abstractmethod
    def _advance(self) -> None:
        """Make the windows that have become possible and let go of audio that is not needed any more."""

    @property
    def backlog(self) -> int:
        """Samples that wait for the engine: how far the feeding thread is ahead."""
        with self.lock:
            return 0 if self.error is not None else self._waiting()

    @abstractmethod
    def _waiting(self) -> int:
        """Samples that wait for the engine."""

    @property
    def settled(self) -> int:
        """Samples from the start on that are transcribed, or known to hold no speech."""
        with self.lock:
            return min(self.length, self._needed(), *(window.start for window in self._outstanding))

    @abstractmethod
    def _needed(self) -> int:
        """First sample that a window to come may hold."""

    def _clip(self, regions: Sequence[Region]) -> list[tuple[int, Region]]:
        """The parts of regions that lie in clips, each with its clip's index."""
        out = []
        for region in regions:
            for index, (start, end) in enumerate(self.clips):
                low, high = max(region.start, start), region.end if end is None else min(region.end, end)
                if low < high:
                    out.append((index, Region(low, high, region.pause if low == region.start else 0, region.peak)))
        return out

    def _gather(self, packed: PackedWindow) -> np.ndarray:
        if len(self._chunks) > 1:
            joined = np.concatenate(self._chunks)
            self._chunks = deque([joined])
        return packed.gather(self._chunks[0], self._offset)

    def _forget(self, sample: int) -> None:
        """Drop audio before ``sample``."""
        while self._chunks and self._offset + len(self._chunks[0]) <= sample:
            self._offset += len(self._chunks.popleft())
        if self._chunks and sample > self._offset:
            self._chunks[0] = self._chunks[0][sample - self._offset :].copy()
            self._offset = sample

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
    def done(self) -> bool:
        """Whether nothing is left to do."""
        with self.lock:
            return self.ended and not self._outstanding and (self.error is not None or not self._has_more())

    @abstractmethod
    def _has_more(self) -> bool:
        """Whether windows are still to come from what has been fed."""

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
        """A window is done: keep its segments, in recording time."""
        with self.lock:
            self._outstanding.discard(window)
            window.encoded = None
            self.heard.append(window.packed)
            self._keep(window, draft)
            if self.error is None:
                self._advance()

    @abstractmethod
    def _keep(self, window: Window, draft: Draft) -> None:
        """Keep the segments of a window, and go on."""

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

    def sorted_segments(self) -> list[Segment]:
        """Segments by time; windows may have come back in any order."""
        return sorted(self.segments, key=lambda segment: (segment.start, segment.end))

    def skipped(self) -> list[tuple[float, float]]:
        """Where no speech was found, in seconds."""
        pieces = sorted((piece.start, piece.end) for packed in self.heard for piece in packed.pieces)
        heard: list[Piece] = []  # without overlaps: a window may have been heard again from somewhere on
        for start, end in pieces:
            if heard and start <= heard[-1].end:
                heard[-1] = Piece(heard[-1].start, max(heard[-1].end, end))
            else:
                heard.append(Piece(start, end))
        return skipped([PackedWindow(tuple(heard))], self.length / SAMPLE_RATE)


def _last(tokens: Sequence[int], count: int) -> list[int]:
    return list(tokens[-count:]) if count > 0 else []
