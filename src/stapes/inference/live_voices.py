"""From a stretch of sound to words, for live sessions: one voice for each kind of model.

A voice makes the window of a stretch; the scheduler takes it through the engine as any other; what was heard goes to
the window's ``deliver``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from stapes.audio.features import SAMPLE_RATE
from stapes.audio.vad import Region
from stapes.audio.windows import PackedWindow, Piece
from stapes.decoding.align import WordTiming, merge_punctuations
from stapes.errors import ModelError, UsageError
from stapes.inference.agreement import said_already, spoken
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.ctc_phrases import make_segment, marks_words, units_of
from stapes.inference.ctc_recording import CTCOutput, CTCSound
from stapes.inference.ctc_search import Found, Search
from stapes.inference.engine import DecodeRequest
from stapes.inference.family import Family
from stapes.inference.feed import AudioFeed, FeedWindow
from stapes.inference.recording import Draft, Model, Recording, Window
from stapes.inference.whisper_family import WhisperFamily
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import LANGUAGES_WITHOUT_SPACES
from stapes.transcript import Segment, Word

_PROMPT_TOKENS = 64
"""Of the text before a stretch, so much is told: a sentence or two."""

_SURE_LANGUAGE = 0.5
_LANGUAGE_VOTES = 3

_FALLBACK_STEP = 0.5
"""Temperatures of the last attempt at a stretch are 0, 0.5 and 1 unless the caller says otherwise: someone waits."""

_ONSET = 0.3
"""Speech begins so long after a stretch does: its padding, by default."""

_TRAILING_SECONDS = 0.4
"""Silence behind a stretch for models that get no padding: without it they lose last words."""


@dataclass(frozen=True)
class Stretch:
    """Sound to be heard. ``start``: its first sample on the session's clock."""

    pcm: np.ndarray
    start: int
    peak: float
    """The highest speech probability in it."""
    is_final: bool
    """Whether to take the trouble that a final text deserves."""
    is_first: bool
    before: str
    """The text before it."""
    context: int = 0
    """Samples that it begins with and that were transcribed before: their words are not told again."""
    earlier: tuple[str, ...] = ()
    """Those words, as `spoken`."""


@dataclass(frozen=True)
class Heard:
    """What a model says to a stretch: words on the session's clock, and the segment that they are of."""

    words: list[Word]
    segment: Segment | None
    is_sound: bool = True
    """Not a loop or a guess."""


Deliver = Callable[[Heard | Exception], None]
"""Called once for each window, in the scheduling thread."""


class Voice(Protocol):
    """Makes windows of one session's stretches."""

    @property
    def hold(self) -> int:
        """Last words of a hypothesis that are too unsure to be committed."""
        ...

    @property
    def wants_context(self) -> bool:
        """Whether short speech is better heard with what was said before it."""
        ...

    @property
    def language(self) -> str | None:
        """Spoken in the session, as far as it is known."""
        ...

    @property
    def needs_language(self) -> bool:
        """Whether the language has to be found out yet."""
        ...

    def window(self, stretch: Stretch, deliver: Deliver) -> FeedWindow:
        """The window of a stretch. ``deliver`` gets what was heard, or the error."""
        ...


def open_voice(family: Family, options: TranscribeOptions, returned: Callable[[FeedWindow], None]) -> Voice:
    """The voice of a session. ``options`` were checked. ``returned`` is called, in the scheduling thread, with windows
    whose language has become known: they are to be taken again. Raises UsageError for options that a session cannot
    follow."""
    plain = TranscribeOptions()
    for name in ("clip_timestamps", "channels", "vad", "n_best"):
        if getattr(options, name) != getattr(plain, name):
            raise UsageError(f"--{name.replace('_', '-')} does not work with live sound: leave it out")
    if isinstance(family, CTCFamily):
        return CTCVoice(family, options)
    if isinstance(family, WhisperFamily):
        model = Model(family.tokenizer, family.config.text_context, family.suppressed(options))
        return WhisperVoice(model, options, returned)
    raise UsageError(f"{family.name} cannot listen to live sound: use a Whisper or a CTC model")


class _WindowFeed(AudioFeed):
    """A feed that is given whole windows: those of one session."""

    def _take_regions(self, regions: Sequence[Region]) -> None:
        """There are none."""

    def _advance(self) -> None:
        """There is nothing to cut."""

    def _waiting(self) -> int:
        return 0

    def _needed(self) -> int:
        return 0

    def _has_more(self) -> bool:
        return False

    def take(self) -> Any:
        return None

    def _next(self) -> Any:
        return None

    def _keep(self, window: Any, draft: Any) -> None:
        """The session keeps what was heard."""

    def fail(self, error: Exception, window: Any = None) -> None:
        if window is not None:
            window.encoded = None
            window.deliver(error)

    def complete(self, window: Any, draft: Any) -> None:
        window.encoded = None
        window.deliver(self._heard(window, draft))

    def _heard(self, window: Any, draft: Any) -> Heard:
        raise NotImplementedError


@dataclass(eq=False)
class _WhisperWindow(Window):
    deliver: Deliver = field(kw_only=True)
    stretch: Stretch = field(kw_only=True)


class _WhisperFeed(_WindowFeed, Recording):
    """What `Recording` knows of attempts and words, for the stretches of a session."""

    keeps_open_segment = True
    language_windows = _LANGUAGE_VOTES

    def __init__(self, voice: WhisperVoice, options: TranscribeOptions) -> None:
        super().__init__(voice.model, options, ())
        self._voice = voice

    @property
    def needs_language(self) -> bool:
        return self._voice.needs_language

    def vote(self, window: Any, probabilities: dict[str, float]) -> bool:
        self._voice.vote(probabilities)
        self._voice.returned(window)
        return True

    def request(self, window: Any) -> DecodeRequest:
        self.language = self._voice.language  # another window may have told it while this one was on its way
        return super().request(window)

    def _heard(self, window: Any, draft: Draft) -> Heard:
        if draft.attempt is None or not draft.segments:
            return Heard([], None)
        offset = window.start / SAMPLE_RATE
        words: list[Word] = []
        for segment in draft.segments:
            words += self._near_words(segment) if segment.words is None else segment.words
        for word in words:
            word.start, word.end = word.start + offset, word.end + offset
        first, last = draft.segments[0], draft.segments[-1]
        text = "".join(segment.text for segment in draft.segments)
        tokens = [token for segment in draft.segments for token in segment.tokens]
        begin = (window.start + window.stretch.context) / SAMPLE_RATE
        if window.stretch.earlier:
            words = self._new(words, window.stretch.earlier, begin)
            text = "".join(word.word for word in words)
            tokens = self.model.tokenizer.encode(text)
            if not words:
                return Heard([], None, not draft.attempt.failed)
        whole = replace(
            first,
            seek=round(begin * 100),
            start=words[0].start if words else first.start + offset,
            end=words[-1].end if words else last.end + offset,
            text=text,
            tokens=tokens,
            words=words,
        )
        return Heard(words, whole, not draft.attempt.failed)

    def _new(self, words: list[Word], earlier: Sequence[str], begin: float) -> list[Word]:
        """The words from ``begin`` on, where the model may write those before otherwise than the first time.

        The silence between belongs to the word before it or to the one behind it, as it comes: so times tell only where
        the border cannot be, and what is written where it is.
        """
        places = None
        if self.options.word_timestamps:
            starts, ends = [0.0, *(word.start for word in words)], [*(word.end for word in words), math.inf]
            edges = zip(starts, ends, strict=True)
            places = [i for i, (last, end) in enumerate(edges) if last <= begin + _ONSET and end > begin]
        return words[said_already(earlier, [spoken(word.word) for word in words], places) :]

    def _near_words(self, segment: Segment) -> list[Word]:
        """The words of a segment, its time shared out among them by their letters: reading it again costs more."""
        tokenizer = self.model.tokenizer
        text = [token for token in segment.tokens if token < tokenizer.eot]
        split, tokens = tokenizer.split_to_words(text, self.language)
        total = sum(map(len, split)) or 1
        timings, at = [], segment.start
        for word, ids in zip(split, tokens, strict=True):
            end = at + (segment.end - segment.start) * len(word) / total
            timings.append(WordTiming(word, ids, at, end, float(np.exp(segment.avg_logprob))))
            at = end
        merge_punctuations(timings, self.options.prepend_punctuations, self.options.append_punctuations)
        return [Word(each.word, each.start, each.end, each.probability) for each in timings if each.word]


class WhisperVoice:
    """The voice of a Whisper.

    Hypotheses on the way are greedy, without second looks or word times. The last one of a stretch is made as that of
    a file is, with its exact word times.
    """

    wants_context = True

    def __init__(self, model: Model, options: TranscribeOptions, returned: Callable[[FeedWindow], None]) -> None:
        self.model, self.returned = model, returned
        self._language = options.language
        self._known = options.language is not None
        self._votes: list[dict[str, float]] = []
        self._before: tuple[str, list[int]] = "", []  # what was told last, and its tokens
        step = options.temperature_increment_on_fallback
        plain = TranscribeOptions().temperature_increment_on_fallback
        final = replace(
            options,
            vad=False,
            word_timestamps=True,
            temperature_increment_on_fallback=_FALLBACK_STEP if step == plain else step,
        )
        quick = replace(final, word_timestamps=False, temperature_increment_on_fallback=None, beam_size=1)
        self.final, self.quick = _WhisperFeed(self, final), _WhisperFeed(self, quick)

    @property
    def hold(self) -> int:
        return 3 if self._language in LANGUAGES_WITHOUT_SPACES else 1

    @property
    def language(self) -> str | None:
        return self._language

    @property
    def needs_language(self) -> bool:
        return not self._known

    def vote(self, probabilities: dict[str, float]) -> None:
        """Note which language a stretch seems to be in. Until it is sure, each is taken for what all are together."""
        self._votes.append(probabilities)
        mean = {code: sum(vote[code] for vote in self._votes) / len(self._votes) for code in probabilities}
        code = max(mean, key=mean.__getitem__)
        self._language = code
        if mean[code] >= _SURE_LANGUAGE or len(self._votes) >= _LANGUAGE_VOTES:
            self._known = True
            self._votes.clear()

    def window(self, stretch: Stretch, deliver: Deliver) -> FeedWindow:
        feed = self.final if stretch.is_final else self.quick
        if stretch.before != self._before[0]:
            self._before = stretch.before, self.model.tokenizer.encode(stretch.before)[-_PROMPT_TOKENS:]
        before = self._before[1]
        packed = PackedWindow((Piece(stretch.start, stretch.start + len(stretch.pcm)),), stretch.peak)
        prompt = feed.prompt_tokens(before, initial=stretch.is_first)
        return _WhisperWindow(feed, packed, stretch.pcm, prompt, deliver=deliver, stretch=stretch)


@dataclass(eq=False)
class _CTCWindow:
    recording: _CTCFeed
    start: int
    sound: CTCSound
    deliver: Deliver
    encoded: Any = None


@dataclass
class _CTCDraft:
    output: CTCOutput
    found: Found | None = None


_REQUEST = DecodeRequest(prompt=(), sot_index=0, timestamps=False)


class _CTCFeed(_WindowFeed):
    def __init__(self, family: CTCFamily, options: TranscribeOptions, *, is_final: bool) -> None:
        super().__init__((), vad=False)
        self.adapter = options.language if family.model.languages else None
        self.tokenizer = family.model.tokenizer_for(self.adapter)
        self.language = options.language or self.tokenizer.language
        self.search: Search | None = family.search(options, self.adapter) if is_final else None
        self._frame_seconds = family.model.hop / SAMPLE_RATE
        self._space = " " if marks_words(self.tokenizer) else ""

    def request(self, window: Any) -> DecodeRequest:
        return _REQUEST

    def judge(self, window: Any, result: CTCOutput) -> _CTCDraft:
        if not result.is_number:
            raise ModelError("the model's output is not a number: use another --precision, or another model")
        return _CTCDraft(result)

    def words_wanted(self, window: Any, draft: _CTCDraft) -> tuple[Any, Any] | None:
        emissions = draft.output.emissions
        return None if self.search is None or emissions is None else (self.search, [emissions])

    def add_words(self, window: Any, draft: _CTCDraft, prompt: Any, alignment: list[Found]) -> None:
        draft.found = alignment[0]

    def _heard(self, window: _CTCWindow, draft: _CTCDraft) -> Heard:
        tokens = draft.output.tokens if draft.found is None else draft.found.tokens
        units = units_of(tokens, self.tokenizer)
        if not units:
            return Heard([], None)
        offset = window.start / SAMPLE_RATE
        segment = make_segment(tokens, units, self._space, self._frame_seconds, offset, with_words=True)
        return Heard(list(segment.words or []), segment)


class CTCVoice:
    """The voice of a CTC model. All hypotheses are greedy; the last one of a stretch is searched for where options ask
    for it (a beam, a language model, expected words). Their look-ahead is what has come of the stretch."""

    needs_language = False
    wants_context = False

    def __init__(self, family: CTCFamily, options: TranscribeOptions) -> None:
        self._model = family.model
        self._final = _CTCFeed(family, options, is_final=True)
        self._quick = _CTCFeed(family, options, is_final=False)
        self.hold = 1 if marks_words(self._final.tokenizer) else 3

    @property
    def language(self) -> str | None:
        return self._final.language

    def window(self, stretch: Stretch, deliver: Deliver) -> FeedWindow:
        feed = self._final if stretch.is_final else self._quick
        trailing = min(round(_TRAILING_SECONDS * SAMPLE_RATE), self._model.window - len(stretch.pcm))
        pcm = np.pad(stretch.pcm, (0, max(0, trailing)))
        frames = self._model.frame_count(len(pcm))
        sound = CTCSound(pcm, 0, frames, None, feed.adapter, feed.search is not None)
        return _CTCWindow(feed, stretch.start, sound, deliver)
