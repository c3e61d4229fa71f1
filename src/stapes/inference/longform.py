"""Long recordings as state machines: audio goes in, windows come out, results come back, segments are kept.

Two ways to walk through a recording. `PackedRecording` cuts out speech and packs it into windows that know nothing
of each other, so that all windows of all recordings are decoded together. `SequentialRecording` is openai/whisper's
walk: a window begins where the last one's text ended, and may be told that text.

One thread feeds a recording, another takes its windows and brings results; each machine locks itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stapes.audio.features import SAMPLE_RATE, WINDOW_SAMPLES
from stapes.audio.vad import Region, SpeechSegmenter
from stapes.audio.windows import PackedWindow, Piece, WindowPacker, skipped
from stapes.decoding.align import add_word_times, find_words, split_segments, token_frames
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult
from stapes.inference.segments import (
    TIMESTAMP_STEP,
    Attempt,
    best_attempt,
    final_tokens,
    is_anomalous,
    judge,
    make_segments,
    slice_segments,
)
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import WhisperTokenizer
from stapes.transcript import Segment

_LANGUAGE_CONFIDENCE = 0.5
_LANGUAGE_WINDOWS = 3
_SEQUENTIAL_GAP = 2 * SAMPLE_RATE
_UNHEARD_SECONDS = 2.0
"""A packed window holds speech up to its end; when its text ends this long before, the rest is heard again."""
_SHORTEST_WINDOW = SAMPLE_RATE // 10
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

    @property
    def start(self) -> int:
        """First sample in the recording."""
        return self.packed.start

    @property
    def duration(self) -> float:
        """Seconds of sound."""
        return len(self.pcm) / SAMPLE_RATE


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

    def __init__(self, model: Model, options: TranscribeOptions, clips: Sequence[tuple[int, int | None]]) -> None:
        self.model, self.options = model, options
        self.clips = list(clips)
        self.lock = threading.RLock()
        self.language = options.language
        self.language_probability: float | None = None
        self.segments: list[Segment] = []
        self.length = 0
        self.ended = False
        self.heard: list[PackedWindow] = []
        self._chunks: deque[np.ndarray] = deque()
        self._offset = 0  # sample of the recording that _chunks begin with
        self._outstanding = 0
        self._language_votes: list[dict[str, float]] = []
        self._parked: deque[Window] = deque()
        self._segmenter = SpeechSegmenter() if options.vad else None

    # The feeding thread.

    def feed(self, pcm: np.ndarray, probabilities: np.ndarray | None) -> None:
        """Take the next samples, and the speech probabilities of the frames that they completed."""
        with self.lock:
            self._chunks.append(pcm)
            self.length += len(pcm)
            if self._segmenter is not None and probabilities is not None:
                self._take_regions(self._segmenter.feed(probabilities))
            self._advance()

    def finish(self, probabilities: np.ndarray | None) -> None:
        """The recording has ended."""
        with self.lock:
            self.ended = True
            if self._segmenter is not None and probabilities is not None:
                self._take_regions(self._segmenter.feed(probabilities, final=True, samples=self.length))
            self._advance()

    @abstractmethod
    def _take_regions(self, regions: Sequence[Region]) -> None:
        """Take settled regions of speech."""

    @abstractmethod
    def _advance(self) -> None:
        """Make the windows that have become possible and let go of audio that is not needed any more."""

    @property
    @abstractmethod
    def backlog(self) -> int:
        """Samples held: how far the feeding thread is ahead."""

    def _clip(self, regions: Sequence[Region]) -> list[Region]:
        """The parts of regions that lie in the clips."""
        out = []
        for region in regions:
            for start, end in self.clips:
                low, high = max(region.start, start), region.end if end is None else min(region.end, end)
                if low < high:
                    out.append(Region(low, high, region.pause if low == region.start else 0))
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
            if self.language is not None and self._parked:
                return self._parked.popleft()
            waiting = self.language is None and self._outstanding > len(self._parked)
            window = None if waiting else self._next()
            if window is not None:
                self._outstanding += 1
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
            return self.ended and self._outstanding == 0 and not self._has_more()

    @abstractmethod
    def _has_more(self) -> bool:
        """Whether windows are still to come from what has been fed."""

    def vote(self, window: Window, probabilities: dict[str, float]) -> bool:
        """Note which language a window is in. False: not sure yet, the window is kept until others were heard."""
        with self.lock:
            self._language_votes.append(probabilities)
            self._parked.append(window)
            if self._mean_votes()[1] < _LANGUAGE_CONFIDENCE and len(self._language_votes) < _LANGUAGE_WINDOWS:
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
        """What a window is told before it starts: hotwords, the initial prompt, the text before it."""
        options, tokenizer = self.options, self.model.tokenizer
        room = self.model.text_context // 2 - 1
        fixed: list[int] = []
        if options.hotwords:
            fixed += tokenizer.encode(" " + options.hotwords.strip())
        if options.initial_prompt and (initial or options.carry_initial_prompt):
            fixed += tokenizer.encode(" " + options.initial_prompt.strip())
        fixed = fixed[:room]
        rest = list(previous)[-(room - len(fixed)) :] if room > len(fixed) else []
        return (tokenizer.sot_prev, *fixed, *rest) if fixed or rest else ()

    def judge(self, window: Window, result: DecodeResult) -> Draft | None:
        """Take the result of an attempt. None: it failed, and the window is to be tried again."""
        window.attempts.append(judge(result, self.model.tokenizer, self.options))
        if window.attempts[-1].failed and len(window.attempts) < len(self.options.temperatures()):
            return None
        attempt = best_attempt(window.attempts)
        if attempt.silent:
            return Draft([], None, None)
        tokenizer = self.model.tokenizer
        tokens = final_tokens(attempt)
        slices, done = slice_segments(
            tokens, tokenizer.timestamp_begin, window.duration, keep_open=isinstance(self, PackedRecording)
        )
        seek = round(window.start * 100 / SAMPLE_RATE)
        return Draft(make_segments(slices, attempt, tokenizer, seek), done, attempt)

    def words_wanted(self, draft: Draft) -> tuple[list[int], list[int]] | None:
        """The prompt and the text to align, when words are asked for and there are any."""
        text = [token for segment in draft.segments for token in segment.tokens if token < self.model.tokenizer.eot]
        if not self.options.word_timestamps or not text:
            return None
        tokenizer = self.model.tokenizer
        return tokenizer.start_sequence(self.language, self.options.task, without_timestamps=True), text

    def add_words(self, window: Window, draft: Draft, prompt: Sequence[int], alignment: Alignment) -> None:
        """Give the segments of a draft their words, in window time."""
        tokenizer, options = self.model.tokenizer, self.options
        words, word_tokens = split_segments(tokenizer, draft.segments, self.language)
        mel_frames = min(3000, max(2, round(window.duration * 100)))
        (frames,) = token_frames([alignment.scores], [mel_frames], prefix_length=len(prompt) - 1)
        previous = self.segments[-1].end - window.start / SAMPLE_RATE if self.segments else 0.0
        add_word_times(
            draft.segments,
            find_words(words, word_tokens, frames, alignment.probabilities),
            window.pcm,
            eot=tokenizer.eot,
            prepended=options.prepend_punctuations,
            appended=options.append_punctuations,
            last_speech=min(0.0, previous),
        )

    def complete(self, window: Window, draft: Draft) -> None:
        """A window is done: keep its segments, in recording time."""
        with self.lock:
            self._outstanding -= 1
            window.encoded = None
            self.heard.append(window.packed)
            self._keep(window, draft)
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
            self.segments.append(segment)

    def skipped(self) -> list[tuple[float, float]]:
        """Where no speech was found, in seconds."""
        windows = sorted(self.heard, key=lambda packed: packed.start)
        return skipped(windows, self.length / SAMPLE_RATE)


class PackedRecording(Recording):
    """Speech packed into windows that are decoded in any order."""

    def __init__(self, model: Model, options: TranscribeOptions, clips: Sequence[tuple[int, int | None]]) -> None:
        super().__init__(model, options, clips)
        self._packer = WindowPacker()
        self._ready: deque[Window] = deque()
        self._first = True

    def _take_regions(self, regions: Sequence[Region]) -> None:
        self._emit(self._packer.feed(self._clip(regions)))
        if self.ended:
            self._emit(self._packer.flush())

    def _emit(self, windows: Sequence[PackedWindow]) -> None:
        for packed in windows:
            if packed.length >= _SHORTEST_WINDOW:
                self._ready.append(Window(self, packed, self._gather(packed), self._prompt()))

    def _prompt(self) -> tuple[int, ...]:
        initial, self._first = self._first, False
        return self.prompt_tokens((), initial=initial)

    def _advance(self) -> None:
        assert self._segmenter is not None
        held = self._packer.position
        self._forget(self._segmenter.position if held is None else min(held, self._segmenter.position))

    @property
    def backlog(self) -> int:
        """Samples in windows that wait for the engine."""
        with self.lock:
            return sum(len(window.pcm) for window in self._ready)

    def _next(self) -> Window | None:
        return self._ready.popleft() if self._ready else None

    def _has_more(self) -> bool:
        return bool(self._ready or self._parked)

    def _keep(self, window: Window, draft: Draft) -> None:
        rest = self._unheard(window, draft)
        if rest is not None:
            self._ready.appendleft(rest)
        segments = draft.segments
        limit = self.options.hallucination_silence_threshold
        if limit is not None:
            segments = [s for i, s in enumerate(segments) if not _is_island(segments, i, window.duration, limit)]
        self._add_segments(window, segments)

    def _unheard(self, window: Window, draft: Draft) -> Window | None:
        """The end of a window whose text stops early, as a window of its own: batching must not lose speech."""
        if draft.done is None or draft.attempt is None or not draft.segments:
            return None
        if window.duration - draft.done < _UNHEARD_SECONDS or draft.done < _UNHEARD_SECONDS:
            return None
        cut = round(draft.done * SAMPLE_RATE)
        pieces, position = [], 0
        for piece in window.packed.pieces:
            size = piece.end - piece.start
            if position + size > cut:
                pieces.append(Piece(max(piece.start, piece.start + cut - position), piece.end))
            position += size
        return Window(self, PackedWindow(tuple(pieces)), window.pcm[cut:], window.prompt)

    def sorted_segments(self) -> list[Segment]:
        """Segments by time; windows may have come back in any order."""
        return sorted(self.segments, key=lambda segment: (segment.start, segment.end))


class SequentialRecording(Recording):
    """One window after the other, each beginning where the text of the last one ends."""

    def __init__(self, model: Model, options: TranscribeOptions, clips: Sequence[tuple[int, int | None]]) -> None:
        super().__init__(model, options, clips)
        self._spans: deque[tuple[int, int | None]] = deque() if options.vad else deque(self.clips)
        self._open: Region | None = None
        self._seek = self._spans[0][0] if self._spans else 0
        self._text: list[int] = []
        if options.initial_prompt and not options.carry_initial_prompt:
            self._text = model.tokenizer.encode(" " + options.initial_prompt.strip())
        self._since = 0  # tokens of _text before this are not told any more
        self._busy = False

    def _take_regions(self, regions: Sequence[Region]) -> None:
        for region in self._clip(regions):
            if self._open is not None and region.start - self._open.end < _SEQUENTIAL_GAP:
                self._open = Region(self._open.start, region.end)
            else:
                self._close()
                self._open = region
        assert self._segmenter is not None
        if self._open is not None and (self.ended or self._segmenter.position - self._open.end >= _SEQUENTIAL_GAP):
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._spans.append((self._open.start, self._open.end))
            self._open = None

    def _advance(self) -> None:
        if self._segmenter is None:
            self._forget(self._seek)
            return
        keep = self._segmenter.position
        if self._open is not None:
            keep = min(keep, self._open.start)
        if self._spans:
            keep = min(keep, max(self._spans[0][0], self._seek))
        if self._busy:
            keep = min(keep, self._seek)
        self._forget(max(keep, 0))

    @property
    def backlog(self) -> int:
        """Samples beyond the window that comes next."""
        with self.lock:
            return self._offset + sum(map(len, self._chunks)) - max(self._seek, self._offset)

    def _span(self) -> tuple[int, int, bool] | None:
        """Where the walk is: start, the end that is known, and whether that end is final."""
        while self._spans:
            start, end = self._spans[0]
            limit = self.length if end is None else min(end, self.length)
            final = self.ended or (end is not None and end <= self.length)
            if final and max(start, self._seek) + _SHORTEST_WINDOW > limit:
                self._spans.popleft()
                continue
            return max(start, self._seek), limit, final
        if self._open is not None:
            # A region that goes on: what is settled of it may be walked already.
            start = max(self._open.start, self._seek)
            return (start, self._open.end, False) if start < self._open.end else None
        return None

    def _next(self) -> Window | None:
        if self._busy:
            return None
        span = self._span()
        if span is None:
            return None
        start, end, final = span
        if end - start < WINDOW_SAMPLES and not final:
            return None
        self._seek, self._busy = start, True
        packed = PackedWindow((Piece(start, min(end, start + WINDOW_SAMPLES)),))
        return Window(self, packed, self._gather(packed), self.prompt_tokens(self._text[self._since :], initial=False))

    def _has_more(self) -> bool:
        return bool(self._parked) or self._busy or self._span() is not None

    def _keep(self, window: Window, draft: Draft) -> None:
        self._busy = False
        step = window.duration if draft.done is None or draft.done < TIMESTAMP_STEP else draft.done
        segments = draft.segments
        if self.options.word_timestamps and segments and draft.done is not None:
            ends = [segment.words[-1].end for segment in segments if segment.words]
            if ends and ends[-1] > 0:
                step = min(window.duration, ends[-1])
        limit = self.options.hallucination_silence_threshold
        if limit is not None:
            kept, step = self._skip_hallucinations(window, segments, step, limit)
            segments = kept
        self._seek = window.start + max(_SHORTEST_WINDOW, round(step * SAMPLE_RATE))
        self._add_segments(window, segments)
        for segment in segments:
            self._text += segment.tokens
        attempt = draft.attempt
        hard = attempt is not None and (attempt.result.temperature > 0.5 or attempt.failed)
        if hard or not self.options.condition_on_previous_text:
            self._since = len(self._text)  # text that was hard to get is no good example

    def _skip_hallucinations(
        self, window: Window, segments: list[Segment], step: float, limit: float
    ) -> tuple[list[Segment], float]:
        """openai/whisper's rule: probable hallucinations beside long silences are dropped and walked over."""
        first = next((segment for segment in segments if segment.words), None)
        if first is not None and is_anomalous(first) and first.start > limit:
            return [], first.start  # silence before the first words: begin there
        for i, segment in enumerate(segments):
            if _is_island(segments, i, window.duration, limit):
                return segments[:i], max(segment.start, TIMESTAMP_STEP * 5)
        return segments, step

    def sorted_segments(self) -> list[Segment]:
        """Segments by time."""
        return self.segments


def _is_island(segments: Sequence[Segment], index: int, duration: float, limit: float) -> bool:
    """Whether a segment is a probable hallucination with silence, or another of its kind, on both sides."""
    if not is_anomalous(segments[index]):
        return False
    here = segments[index]
    before = here.start - (segments[index - 1].end if index else 0.0)
    after = (segments[index + 1].start if index + 1 < len(segments) else duration) - here.end
    odd_before = index > 0 and is_anomalous(segments[index - 1])
    odd_after = index + 1 < len(segments) and is_anomalous(segments[index + 1])
    return (before > limit or odd_before) and (after > limit or odd_after)
