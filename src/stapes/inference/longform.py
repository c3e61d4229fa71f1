"""Two ways through a long recording.

`PackedRecording` cuts out speech and packs it into windows that know nothing of each other, so that all windows of
all recordings are decoded together. `SequentialRecording` is openai/whisper's walk: a window begins where the text of
the last one ended, and may be told that text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stapes.audio.features import SAMPLE_RATE, WINDOW_SAMPLES
from stapes.audio.vad import Region
from stapes.audio.windows import PackedWindow, Piece, WindowPacker
from stapes.inference.feed import Clips
from stapes.inference.recording import Draft, Model, Recording, Window
from stapes.inference.segments import is_anomalous
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import TIMESTAMP_STEP
from stapes.transcript import Segment

_SEQUENTIAL_GAP = 2 * SAMPLE_RATE
"""Speech with shorter pauses than this is walked through as one."""

_UNHEARD_SECONDS = 2.0
"""A packed window holds speech up to its end; when its text ends this long before, the rest is heard again."""

_LONGEST_SPAN = 180 * SAMPLE_RATE
"""A window is not filled with speech from farther apart: its audio would have to be kept all the while."""

_EDGE_SECONDS = 2.0
"""openai/whisper: a probable hallucination this close to an edge of its window has silence on that side."""

_SHORTEST_WINDOW = SAMPLE_RATE // 10
"""Shorter ones cannot hold a word."""


class PackedRecording(Recording):
    """Speech packed into windows that are decoded in any order."""

    keeps_open_segment = True
    language_windows = 3

    def __init__(self, model: Model, options: TranscribeOptions, clips: Clips) -> None:
        super().__init__(model, options, clips)
        self._packer = WindowPacker()
        self._ready: deque[Window] = deque()
        self._first = True
        self._clip_index = 0

    def _take_regions(self, regions: Sequence[Region]) -> None:
        for index, region in self._clip(regions):
            held = self._packer.position
            far = held is not None and region.start - held > _LONGEST_SPAN
            if far or index != self._clip_index:  # or a short gap between two clips would be heard with them
                self._emit(self._packer.flush())
                self._clip_index = index
            self._emit(self._packer.feed([region]))
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
        if held is not None and self._segmenter.position - held > _LONGEST_SPAN:
            self._emit(self._packer.flush())
        self._forget(self._unpacked())

    def _unpacked(self) -> int:
        """First sample that is not in a window yet and may come into one."""
        assert self._segmenter is not None
        held = self._packer.position
        return self._segmenter.position if held is None else min(held, self._segmenter.position)

    def _needed(self) -> int:
        return min(self._unpacked(), *(window.start for window in self._ready), self.length)

    def _waiting(self) -> int:
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
        return Window(self, PackedWindow(tuple(pieces), window.packed.peak), window.pcm[cut:], window.prompt)


class SequentialRecording(Recording):
    """One window after the other, each beginning where the text of the last one ends."""

    keeps_open_segment = False
    language_windows = 1  # as in openai/whisper; the second window needs the first one's text

    def __init__(self, model: Model, options: TranscribeOptions, clips: Clips) -> None:
        super().__init__(model, options, clips)
        self._spans: deque[tuple[int, int | None]] = deque() if options.vad else deque(self.clips)
        self._open: Region | None = None
        self._seek = self._spans[0][0] if self._spans else 0
        self._text: list[int] = []
        if options.initial_prompt and not options.carry_initial_prompt:
            self._text = model.tokenizer.encode(" " + options.initial_prompt.strip())
        self._since = 0  # tokens of _text before this are not told any more
        self._busy = False
        self._clip_index = 0

    def _take_regions(self, regions: Sequence[Region]) -> None:
        for index, region in self._clip(regions):
            near = self._open is not None and region.start - self._open.end < _SEQUENTIAL_GAP
            if self._open is not None and near and index == self._clip_index:
                self._open = Region(self._open.start, region.end)
            else:
                self._close()
                self._open, self._clip_index = region, index
        assert self._segmenter is not None
        if self._open is not None and (self.ended or self._segmenter.position - self._open.end >= _SEQUENTIAL_GAP):
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._spans.append((self._open.start, self._open.end))
            self._open = None

    def _advance(self) -> None:
        self._forget(self._needed())

    def _needed(self) -> int:
        if self._busy:
            return self._seek
        if (span := self._span()) is not None:
            return span[0]
        if self._segmenter is None:
            return self.length  # every clip is done
        if self._open is not None:
            return min(max(self._open.start, self._seek), self._segmenter.position)
        return self._segmenter.position

    def _waiting(self) -> int:
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
        segments, step = self._walk(window, draft)
        # Never beyond the window, whatever its timestamps say: other speech may begin there.
        step = min(step, window.duration)
        self._seek = window.start + max(_SHORTEST_WINDOW, round(step * SAMPLE_RATE))
        self._add_segments(window, segments)
        for segment in segments:
            self._text += segment.tokens
        attempt = draft.attempt
        if attempt is None:
            return  # silence says nothing about the text before it
        hard = attempt.result.temperature > 0.5 or attempt.failed
        if hard or not self.options.condition_on_previous_text:
            self._since = len(self._text)  # text that was hard to get is no good example

    def _walk(self, window: Window, draft: Draft) -> tuple[list[Segment], float]:
        """The segments to keep of a window, and the second of it where the next one begins."""
        segments, duration = draft.segments, window.duration
        step = duration if draft.done is None or draft.done < TIMESTAMP_STEP else draft.done
        if not self.options.word_timestamps:
            return segments, step
        limit = self.options.hallucination_silence_threshold
        last = next((segment.words[-1].end for segment in reversed(segments) if segment.words), 0.0)
        if draft.done is not None and last > 0:
            step = last if limit is None or duration - last > limit else duration
        return (segments, step) if limit is None else self._skip_hallucinations(window, segments, step, limit)

    def _skip_hallucinations(
        self, window: Window, segments: list[Segment], step: float, limit: float
    ) -> tuple[list[Segment], float]:
        """openai/whisper's rule: probable hallucinations beside long silences are dropped, and the walk goes on there.

        Source: openai/whisper ``transcribe.py``, ``hallucination_silence_threshold``.
        """
        duration, offset = window.duration, window.start / SAMPLE_RATE
        spoken = [segment for segment in segments if segment.words]
        if spoken and is_anomalous(spoken[0]) and spoken[0].start > limit:
            return [], spoken[0].start  # silence before the first words: begin there
        last_end = self._last_speech(window)
        for segment, following in zip(spoken, [*spoken[1:], None], strict=True):
            if is_anomalous(segment):
                next_start = following.start if following else duration
                begins = segment.start
                silence_before = begins - last_end > limit or begins + offset < limit or begins < _EDGE_SECONDS
                silence_after = (
                    next_start - segment.end > limit
                    or (following is not None and is_anomalous(following))
                    or duration - segment.end < _EDGE_SECONDS
                )
                if silence_before and silence_after:
                    rest = self.length / SAMPLE_RATE - offset - segment.end
                    step = duration if self.ended and rest < limit else max(1.0, begins)
                    return segments[: segments.index(segment)], step
            last_end = segment.end
        return segments, step

    def _last_speech(self, window: Window) -> float:
        end = next((segment.words[-1].end for segment in reversed(self.segments) if segment.words), 0.0)
        return min(0.0, end - window.start / SAMPLE_RATE)


def open_recording(model: Model, options: TranscribeOptions, clips: Clips) -> Recording:
    """The state machine of a channel that suits the options."""
    pack = options.vad and not options.condition_on_previous_text
    return (PackedRecording if pack else SequentialRecording)(model, options, clips)


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
