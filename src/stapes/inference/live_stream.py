"""One live session as a state machine: sound goes in, windows come out, what was heard comes back, events are told.

There are no threads here; whoever drives it locks it. Speech is heard in *parts*: a turn is one part unless it is
long. While a part goes on, ever longer windows of it are heard, and words that they agree on are committed.
Once it seems to be over (`_EARLY_SILENCE`), it is heard as for good; if it is over indeed, that is its end. A short
part is heard together with the speech before it, as in a file (`_CONTEXT`). So a session holds one part of sound at
most, what is heard before it, and the parts that wait for their end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.inference.agreement import Agreement, spoken
from stapes.inference.feed import FeedWindow
from stapes.inference.live_events import Committed, Event, Failed, Final, Partial, SpeechStarted, SpeechStopped
from stapes.inference.live_voices import Heard, Stretch, Voice
from stapes.inference.turns import Started, TurnDetector, TurnOptions
from stapes.transcript import Segment, Word

Urgency = Literal["final", "partial"]

_EARLY_SILENCE = 0.25
"""Seconds of silence after which a part may be over. So much of it is heard with the part, whenever that happens: what
is heard for good does not depend on how busy the engine was."""

_TRAILING = round(_EARLY_SILENCE * SAMPLE_RATE)

_ROOM = 4 * SAMPLE_RATE
"""Samples for which there is room in a new array, beside as many as it holds."""

_SHORTEST = 0.6
_SHORTEST_UNKNOWN = 1.5
"""Seconds from which on a part is heard while it goes on; more where its language has to be found out."""

_CONTEXT = 8 * SAMPLE_RATE
"""Samples: a part that is shorter is heard with the speech before it, of so many at most. Readers pause for half a
second in the middle of a sentence, and of its second half alone a model makes another one."""

_CONTEXT_PAUSE = 2.0
"""Seconds: speech before a longer pause is not heard again."""

_LEAD_IN = 0.3
"""So many seconds before its first word, and at most half the pause, begins the speech that is heard again."""

_REMEMBERED_SECONDS = 10.0
_REMEMBERED_CHARACTERS = 240
"""The text before a part is told to the model after a pause of this length at most, and this much of it."""

_REMEMBERED_WORDS = 64
"""More than anybody says in `_CONTEXT`."""

_ATTEMPTS = 2
"""How often the end of a part is tried where the engine fails."""


@dataclass(frozen=True)
class _Context:
    """Speech before a part: its first sample, what was committed of it, and the text before that."""

    start: int
    words: tuple[str, ...]
    before: str


@dataclass(eq=False)
class _Part:
    turn: int
    start: int
    agreement: Agreement
    end: int | None = None
    pcm: np.ndarray | None = None
    earlier: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """The sound before it."""
    context: _Context | None = None
    """What is heard with it; None: not known yet."""
    ends_turn: bool = False
    has_speech: bool = False
    speech_end: int = 0
    peak: float = 0.0
    asked: int = 0
    """Where the last window that was taken ended."""
    heard: int = 0
    """Where the last window that came back ended."""
    on_its_way: bool = False
    """A window for a partial is."""
    final_asked: int = -1
    """Where the speech ended that the last window for good held; -1: there was none."""
    final_heard: int = -1
    result: Heard | None = None
    """Of that window."""
    failures: int = 0
    shown: list[Word] | None = None
    """The last partial."""

    @property
    def is_covered(self) -> bool:
        """Whether a window for good that holds all its speech has been taken."""
        return self.final_asked == self.speech_end


class _Sound:
    """The end of the session's sound that is still needed, in one array. What stands in it is never overwritten."""

    def __init__(self) -> None:
        self.offset = 0
        self._data = np.empty(0, np.float32)
        self._begin = self._end = 0  # of what is needed, in the array

    def append(self, pcm: np.ndarray) -> None:
        if self._end + len(pcm) > len(self._data):
            kept = self._data[self._begin : self._end]
            self._data = np.empty(2 * len(kept) + len(pcm) + _ROOM, np.float32)
            self._data[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        self._data[self._end : self._end + len(pcm)] = pcm
        self._end += len(pcm)

    def slice(self, start: int, end: int) -> np.ndarray:
        """The samples from ``start`` to ``end`` of the session's clock."""
        begin = self._begin - self.offset
        return self._data[max(self._begin, begin + start) : min(self._end, max(self._begin, begin + end))]

    def forget(self, sample: int) -> None:
        """Drop what comes before ``sample``."""
        gone = min(max(0, sample - self.offset), self._end - self._begin)
        self.offset += gone
        self._begin += gone


class LiveStream:
    """The state of a session. ``tell`` gets the events; ``interval``: seconds of sound from one partial to the next."""

    def __init__(self, voice: Voice, options: TurnOptions, tell: Callable[[Event], None]) -> None:
        self.voice, self.interval = voice, 0.3
        self.received = 0
        """Samples fed."""
        self.ended = False
        self._tell = tell
        self._detector = TurnDetector(options)
        self._sound = _Sound()
        self._turn = 0
        self._turn_is_open = False  # with manual turns: something was said since the last commit
        self._part: _Part | None = None  # that goes on
        self._parts: deque[_Part] = deque()  # that are over and wait for their end
        self._before, self._before_end = "", 0
        self._recent: list[Word] = []  # the last committed words that may be heard again
        self._forgotten = 0  # sound before this is not
        self._finals = 0

    @property
    def options(self) -> TurnOptions:
        """When turns begin and end; may be set at any time."""
        return self._detector.options

    @options.setter
    def options(self, options: TurnOptions) -> None:
        self._detector.options = options

    @property
    def waiting(self) -> int:
        """Samples of speech that is over and not transcribed yet."""
        return sum(len(part.pcm) for part in self._parts if part.pcm is not None)

    @property
    def is_busy(self) -> bool:
        """Whether a window is wanted or on its way."""
        parts = [*self._parts, *([self._part] if self._part else [])]
        return self.wanted() is not None or any(p.on_its_way or p.final_asked > p.final_heard for p in parts)

    @property
    def done(self) -> bool:
        """Whether the session has ended and all has been told."""
        return self.ended and not self._parts

    # Sound.

    def feed(self, pcm: np.ndarray, probabilities: np.ndarray) -> None:
        """Take the next samples, and the speech probabilities of the frames that they completed."""
        self.received += len(pcm)
        self._sound.append(pcm)
        for probability in probabilities.tolist():
            self._step(probability)
        self._sound.forget(self._detector.needed - _CONTEXT)

    def commit(self) -> None:
        """End the turn here. A `Final` comes of it in any case: of nothing where nothing is being said."""
        self._end_turn()

    def clear(self) -> None:
        """Forget what was said since the last turn ended. A turn that is cut off so has no end, and the next one has
        another number; with manual turns, which the caller counts too, it begins again."""
        self._detector.cut(self.received)
        if self.options.manual:
            self._parts = deque(part for part in self._parts if part.turn != self._turn)
        elif self._turn_is_open:
            self._turn += 1
        self._part, self._turn_is_open = None, False
        self._forgotten = self.received
        self._sound.forget(self._detector.needed - _CONTEXT)

    def finish(self, probabilities: np.ndarray) -> None:
        """The sound has ended."""
        for probability in probabilities.tolist():
            self._step(probability)
        if self._turn_is_open:
            self._end_turn()
        self.ended = True

    def _end_turn(self) -> None:
        turn = self._turn
        in_speech = self._detector.silence == 0
        ended = self._detector.cut(self.received)
        if ended is not None:
            assert self._part is not None
            if in_speech:  # so is what is left of a frame
                self._part.speech_end = ended.sample
            self._end(ended.sample, is_pause=True)
        if self._turn != turn:
            return
        if self._parts and self._parts[-1].turn == turn:
            self._parts[-1].ends_turn = True
        else:  # nothing was said, or all of it has been told
            self._parts.append(_Part(turn, self.received, Agreement(), self.received, ends_turn=True))
        self._turn += 1
        self._turn_is_open = False
        self._settle()

    def _step(self, probability: float) -> None:
        event = self._detector.step(probability)
        if isinstance(event, Started):
            self._begin(event)
        elif event is not None:
            self._end(min(event.sample, self.received), event.is_pause)
        part, detector = self._part, self._detector
        if part is not None:
            part.has_speech |= detector.has_speech
            part.speech_end, part.peak = detector.speech_end, max(part.peak, detector.peak)

    def _begin(self, event: Started) -> None:
        self._part = self._new_part(self._turn, event.sample)
        self._turn_is_open = True
        if not self.options.manual:
            self._tell(SpeechStarted(self._turn, event.sample / SAMPLE_RATE))

    def _new_part(self, turn: int, sample: int) -> _Part:
        part = _Part(turn, sample, Agreement(self.voice.hold), asked=sample)
        if self.voice.wants_context:
            part.earlier = self._sound.slice(max(self._forgotten, sample - _CONTEXT), sample)
        return part

    def _end(self, sample: int, is_pause: bool) -> None:
        part = self._part
        assert part is not None
        part.speech_end = min(part.speech_end, sample)
        part.end = min(sample, max(part.speech_end, part.start) + _TRAILING)
        part.pcm = self._sound.slice(part.start, part.end) if part.has_speech else None
        part.ends_turn = is_pause and not self.options.manual
        self._parts.append(part)
        if is_pause:
            self._part = None
        else:
            self._part = self._new_part(part.turn, sample)
        if part.ends_turn:
            self._tell(SpeechStopped(self._turn, sample / SAMPLE_RATE))
            self._turn += 1
            self._turn_is_open = False
        self._settle()

    # Windows.

    def wanted(self) -> Urgency | None:
        """Whether a window is to be heard now, and how urgent that is."""
        if self._parts:
            return None if self._parts[0].is_covered else "final"
        part, detector = self._part, self._detector
        if part is None or not part.has_speech or part.failures >= _ATTEMPTS:
            return None
        if detector.silence >= _EARLY_SILENCE:
            return None if part.is_covered else "final"
        length = (detector.samples - part.start) / SAMPLE_RATE
        if part.on_its_way or length < (_SHORTEST_UNKNOWN if self.voice.needs_language else _SHORTEST):
            return None
        return "partial" if detector.samples - part.asked >= self.interval * SAMPLE_RATE else None

    def take(self) -> FeedWindow | None:
        """The window that is wanted, with all the sound there is by now."""
        urgency = self.wanted()
        if urgency is None:
            return None
        part = self._parts[0] if self._parts else self._part
        assert part is not None
        speech_end, is_final = part.speech_end, urgency == "final"
        end = part.end
        if end is None:
            end = min(self._detector.samples, self.received)
            end = min(end, speech_end + _TRAILING) if is_final else end
        pcm = self._sound.slice(part.start, end) if part.pcm is None else part.pcm
        context = self._context_of(part, end)
        earlier = part.earlier[len(part.earlier) - (part.start - context.start) :]
        part.asked = end
        if is_final:
            part.final_asked = speech_end
        else:
            part.on_its_way = True

        def deliver(heard: Heard | Exception) -> None:
            self._hear(part, end, speech_end if is_final else None, heard)

        stretch = Stretch(
            np.concatenate([earlier, pcm]),
            context.start,
            part.peak,
            is_final,
            self._finals == 0,
            context.before,
            earlier=context.words,
            context=len(earlier),
        )
        return self.voice.window(stretch, deliver)

    def _before_part(self, part: _Part) -> str:
        """The text before a part, as far as it is told."""
        return self._before if part.start - self._before_end <= _REMEMBERED_SECONDS * SAMPLE_RATE else ""

    def _alone(self, part: _Part) -> _Context:
        return _Context(part.start, (), self._before_part(part))

    def _context_of(self, part: _Part, end: int) -> _Context:
        """What is heard with a part when it is heard up to ``end``. All that was said before it is known by then."""
        if part.context is None:
            part.context = self._find_context(part)
        return part.context if end - part.start < _CONTEXT else self._alone(part)

    def _find_context(self, part: _Part) -> _Context:
        """The speech before a part: it begins at the longest pause of the first half of what there is."""
        first, before = part.start - len(part.earlier), self._before_part(part)
        words: list[Word] = []
        pauses: list[float] = []  # before each of them
        after = part.start / SAMPLE_RATE
        for i in range(len(self._recent) - 1, -1, -1):
            word = self._recent[i]
            if after - word.end > _CONTEXT_PAUSE or word.start * SAMPLE_RATE < first:
                break
            earliest = self._recent[i - 1].end if i else first / SAMPLE_RATE
            words.insert(0, word)
            pauses.insert(0, max(0.0, word.start - earliest))
            after = word.start
        if not words:
            return self._alone(part)
        half = sum(word.start * SAMPLE_RATE < (first + part.start) / 2 for word in words)
        cut = pauses.index(max(pauses[: max(1, half)]))
        words = words[cut:]
        start = round((words[0].start - min(_LEAD_IN, pauses[cut] / 2)) * SAMPLE_RATE)
        text = "".join(word.word for word in words)
        told = before[: -len(text)] if before.endswith(text) else ""
        return _Context(min(max(start, first), part.start), tuple(spoken(word.word) for word in words), told)

    def lose(self, error: Exception) -> None:
        """Windows that are on their way will not come back."""
        for part in (*self._parts, self._part):
            if part is None:
                continue
            part.on_its_way = False
            if part.final_asked > part.final_heard:
                self._fail(part, error)
        self._settle()

    # What was heard.

    def _hear(self, part: _Part, end: int, speech_end: int | None, heard: Heard | Exception) -> None:
        """A window came back: ``end`` is its last sample, and ``speech_end`` that of its speech if it was for good."""
        if speech_end is None:
            part.on_its_way = False
        if part is not self._part and part not in self._parts:
            return  # it was cleared, or has its end already
        if isinstance(heard, Exception):
            if speech_end is not None:
                self._fail(part, heard)
        elif speech_end is not None and not heard.words and self._context_of(part, end).words:
            # A model at times writes the first sentence of a window alone. By itself the part is not overheard.
            part.context = self._alone(part)
            part.final_asked = part.final_heard
        else:
            if speech_end is not None:
                part.final_heard, part.result = speech_end, heard
            if part is self._part and heard.is_sound and end > part.heard:
                part.heard = end
                self._agree(part, heard.words, end)
        self._settle()

    def _fail(self, part: _Part, error: Exception) -> None:
        part.failures += 1
        part.final_asked = part.final_heard
        if part.end is not None and part.failures >= _ATTEMPTS:
            self._parts.remove(part)
            self._tell(Failed(part.turn, f"this speech could not be transcribed: {error}", part.ends_turn))

    def _agree(self, part: _Part, words: list[Word], end: int) -> None:
        committed = part.agreement.hear(words, end / SAMPLE_RATE)
        if committed:
            self._tell(Committed(part.turn, committed))
        if committed or [word.word for word in part.agreement.provisional] != [w.word for w in part.shown or ()]:
            part.shown = part.agreement.provisional
            self._tell(Partial(part.turn, list(part.shown)))

    def _settle(self) -> None:
        """Tell the ends of parts, in order, as far as they are known."""
        while self._parts:
            part = self._parts[0]
            if part.pcm is None:
                heard = Heard([], None)
            elif part.result is not None and part.final_heard == part.speech_end:
                heard = part.result
            else:
                return
            self._parts.popleft()
            self._close(part, heard)

    def _close(self, part: _Part, heard: Heard) -> None:
        new = part.agreement.settle(heard.words)
        if new:
            self._tell(Committed(part.turn, new))
        text, words = part.agreement.text, part.agreement.committed
        segment = None
        if words:
            empty = Segment(0, round(100 * part.start / SAMPLE_RATE), words[0].start, words[-1].end, text)
            segment = replace(
                heard.segment or empty,
                id=self._finals,
                start=words[0].start,
                end=words[-1].end,
                text=text,
                words=list(words),
            )
            self._finals += 1
            # What the model itself would have written: words that were committed early may lack their punctuation, and
            # a model that is told such a text goes on like it.
            own = "".join(word.word for word in heard.words) or text
            self._before = f"{self._before_part(part)}{own}"[-_REMEMBERED_CHARACTERS:] if heard.is_sound else ""
            self._before_end = part.end or 0
            recent = [*self._recent, *(heard.words or words)]
            self._recent = recent[-_REMEMBERED_WORDS:] if heard.is_sound else []
        if words or part.ends_turn:
            self._tell(Final(part.turn, text, segment, part.ends_turn, self.voice.language))
