"""From the tokens of a window to segments: the rules of openai/whisper's ``transcribe``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from stapes.decoding.loops import without_loop
from stapes.inference.engine import DecodeResult
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import TIMESTAMP_STEP, WhisperTokenizer
from stapes.transcript import Segment

_DOUBTFUL = 0.75
"""How much of the log-probability threshold is asked of a window that may hold no speech."""


def compression_ratio(text: str) -> float:
    """Bytes of the text over bytes of the compressed text: repetition shows as a high ratio."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


@dataclass(frozen=True)
class Attempt:
    """A result with its text, judged."""

    result: DecodeResult
    text: str
    compression_ratio: float
    silent: bool
    repetitive: bool
    failed: bool


def judge(
    result: DecodeResult, tokenizer: WhisperTokenizer, options: TranscribeOptions, speech_peak: float = 1.0
) -> Attempt:
    """Hold a result against the thresholds of the options.

    An attempt fails when it loops, repeats itself or is unlikely. One where the model sees no speech is silence, and
    no failure, if it is unlikely too. It need not be as unlikely where the model is surer of the silence than the
    detector was of speech: ``speech_peak`` is the highest speech probability that it gave in the window. Clatter that
    is taken for speech barely passes the detector's threshold, and models write "Thank you." about it at −0.8 to −1.
    """
    text = tokenizer.decode(result.tokens)
    ratio = compression_ratio(text)
    unlikely = options.logprob_threshold is not None and result.avg_logprob < options.logprob_threshold
    no_speech = options.no_speech_threshold is not None and result.no_speech_prob > options.no_speech_threshold
    if options.logprob_threshold is None:
        silent = no_speech
    else:
        limit = options.logprob_threshold * (_DOUBTFUL if result.no_speech_prob > speech_peak else 1)
        silent = no_speech and result.avg_logprob < limit
    repetitive = options.compression_ratio_threshold is not None and ratio > options.compression_ratio_threshold
    repetitive = repetitive or result.looped
    return Attempt(result, text, ratio, silent, repetitive, (repetitive or unlikely) and not silent)


def best_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """The last attempt when it passed; when all failed, the likeliest of those that do not repeat themselves."""
    if not attempts[-1].failed:
        return attempts[-1]
    sound = [attempt for attempt in attempts if not attempt.repetitive]
    return max(sound or attempts, key=lambda attempt: attempt.result.avg_logprob)


@dataclass(frozen=True)
class Slice:
    """Tokens of one segment, with its times in seconds from the start of the window."""

    start: float
    end: float
    tokens: list[int]


def slice_segments(
    tokens: Sequence[int], timestamp_begin: int, duration: float, *, keep_open: bool
) -> tuple[list[Slice], float | None]:
    """Cut a window's tokens at its timestamps.

    duration: seconds of sound in the window. keep_open: a last segment without an end is kept and lasts to the end
    of the window; otherwise, as in openai/whisper, it is left for the next window, which then begins where it begins.

    Returns the segments, and the second up to which the window is transcribed. None: all of it. A text that ends with
    a single timestamp says that no speech follows; openai/whisper believes it and goes on after the window. With
    ``keep_open`` the second is that timestamp: the window was packed full of speech, and its rest can be heard again.
    """
    slices: list[Slice] = []
    times = [token >= timestamp_begin for token in tokens]
    ends_once = len(tokens) >= 2 and not times[-2] and times[-1]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]

    def second(token: int) -> float:
        return (token - timestamp_begin) * TIMESTAMP_STEP

    if not cuts:
        stamps = [token for token, is_time in zip(tokens, times, strict=True) if is_time]
        start = second(stamps[0]) if times and times[0] else 0.0
        closed = ends_once and len(stamps) > 1
        end = second(stamps[-1]) if closed else duration
        if any(not is_time for is_time in times):
            slices.append(_slice(start, end, duration, tokens))
        if keep_open:
            return slices, end if closed else None
        return slices, None if ends_once else duration

    if ends_once:
        cuts.append(len(tokens))
    first = 0
    for cut in cuts:
        part = tokens[first:cut]
        slices.append(_slice(second(part[0]), second(part[-1]), duration, part))
        first = cut
    done = second(tokens[first - 1])
    rest = tokens[first:]
    if keep_open and any(not is_time for is_time in times[first:]):
        slices.append(_slice(second(rest[0]), duration, duration, rest))
        return slices, None
    return slices, None if ends_once and not keep_open else done


def _slice(start: float, end: float, duration: float, tokens: Sequence[int]) -> Slice:
    start = min(max(0.0, start), duration)
    return Slice(start, min(max(start, end), duration), list(tokens))


def make_segments(slices: Sequence[Slice], attempt: Attempt, tokenizer: WhisperTokenizer, seek: int) -> list[Segment]:
    """Segments in window time from the slices of an attempt, without those that say nothing."""
    segments = []
    for part in slices:
        text = tokenizer.decode(part.tokens)
        if not text.strip() or part.start == part.end:
            continue
        segments.append(
            Segment(
                id=0,
                seek=seek,
                start=part.start,
                end=part.end,
                text=text,
                tokens=part.tokens,
                temperature=attempt.result.temperature,
                avg_logprob=attempt.result.avg_logprob,
                compression_ratio=attempt.compression_ratio,
                no_speech_prob=attempt.result.no_speech_prob,
            )
        )
    return segments


def final_tokens(attempt: Attempt) -> list[int]:
    """The tokens of the chosen attempt; a loop that no temperature could avoid is cut to its first round."""
    return without_loop(attempt.result.tokens) if attempt.result.looped else attempt.result.tokens


def is_anomalous(segment: Segment) -> bool:
    """Whether a segment's words are so unlikely, short or long that they were probably never said.

    Source: openai/whisper ``transcribe.py``, ``is_segment_anomaly``.
    """
    words = [word for word in segment.words or [] if word.word.strip(" \"'“¿([{-.。,，!！?？:：”)]}、")][:8]
    if not words:
        return False
    score = 0.0
    for word in words:
        length = word.end - word.start
        score += (word.probability < 0.15) + max(0.0, 0.133 - length) * 15 + max(0.0, length - 2.0)
    return score >= 3 or score + 0.01 >= len(words)
