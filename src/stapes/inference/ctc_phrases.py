"""From the tokens of a CTC model to segments that can be read: cut where nothing is said, and not too long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from stapes.decoding.ctc import CTCToken
from stapes.inference.segments import compression_ratio
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.transcript import Segment, Word

PAUSE_SECONDS = 0.6
"""A pause as long as this between words surely parts phrases."""

LONGEST_SECONDS = 12.0
"""A phrase that is longer is cut at its longest pause, though that is short."""

_HELD_SECONDS = 30.0
"""So much speech without a pause is waited for before a phrase is cut."""

_LEAST = 1e-10


class Unit(NamedTuple):
    """A word, or a token where the model marks no words: positions in the sequence of tokens."""

    text: str
    first: int
    last: int


class Phrase(NamedTuple):
    """Tokens that belong together, and the frames of their stretch that are theirs, silence around them included."""

    tokens: list[CTCToken]
    units: list[Unit]
    begin: int
    end: int


class PhraseCutter:
    """Takes the tokens of one stretch as they come; gives out its phrases, in order."""

    def __init__(self, tokenizer: CTCTokenizer, frame_seconds: float) -> None:
        self._tokenizer = tokenizer
        self._pause = PAUSE_SECONDS / frame_seconds
        self._longest = LONGEST_SECONDS / frame_seconds
        self._held = _HELD_SECONDS / frame_seconds
        self._tokens: list[CTCToken] = []
        self._begin = 0

    @property
    def position(self) -> int:
        """No later phrase has frames before this one."""
        return self._begin

    def add(self, tokens: Sequence[CTCToken]) -> list[Phrase]:
        """Take the next tokens, numbered by the frames of the stretch; the phrases that are complete."""
        self._tokens += tokens
        return self._cut(None)

    def finish(self, tokens: Sequence[CTCToken], frames: int) -> list[Phrase]:
        """Take the last tokens: the stretch had so many frames. All phrases that are left."""
        self._tokens += tokens
        return self._cut(frames)

    def _cut(self, frames: int | None) -> list[Phrase]:
        units = units_of(self._tokens, self._tokenizer)
        if not units:
            return []
        gaps = [self._gap(a, b) for a, b in pairwise(units)]
        cuts = [i + 1 for i, gap in enumerate(gaps) if gap >= self._pause]
        open_unit = cuts[-1] if cuts else 0
        if frames is None and open_unit < len(gaps) and self._length(units[open_unit:]) > self._held:
            cuts.append(max(range(open_unit, len(gaps)), key=gaps.__getitem__) + 1)
        parts = [units[a:b] for a, b in zip([0, *cuts], [*cuts, len(units)], strict=True)]
        parts, rest = (parts, []) if frames is not None else (parts[:-1], parts[-1])
        parts = [short for part in parts for short in self._shorten(part)]
        phrases = []
        for part, following in zip(parts, [*parts[1:], rest], strict=False):
            end = frames or 0
            if following:
                end = (self._tokens[part[-1].last - 1].end + self._tokens[following[0].first].start) // 2
            first = part[0].first
            moved = [Unit(unit.text, unit.first - first, unit.last - first) for unit in part]
            phrases.append(Phrase(self._tokens[first : part[-1].last], moved, self._begin, end))
            self._begin = end
        self._tokens = self._tokens[rest[0].first :] if rest else []
        return phrases

    def _gap(self, before: Unit, after: Unit) -> int:
        return self._tokens[after.first].start - self._tokens[before.last - 1].end

    def _length(self, units: Sequence[Unit]) -> int:
        return self._tokens[units[-1].last - 1].end - self._tokens[units[0].first].start

    def _shorten(self, units: list[Unit]) -> list[list[Unit]]:
        """Cut what is too long at its longest pause, of those in its middle half where there are any."""
        length = self._length(units)
        if length <= self._longest or len(units) < 2:
            return [units]
        start = self._tokens[units[0].first].start
        middle = [
            i for i in range(1, len(units)) if 1 <= 4 * (self._tokens[units[i].first].start - start) / length <= 3
        ]
        place = max(middle or range(1, len(units)), key=lambda i: self._gap(units[i - 1], units[i]))
        return [*self._shorten(units[:place]), *self._shorten(units[place:])]


def marks_words(tokenizer: CTCTokenizer) -> bool:
    """Whether the model says where a word ends."""
    return bool(tokenizer.delimiter_text) and any(tokenizer.delimiter_text in piece for piece in tokenizer.pieces)


def units_of(tokens: Sequence[CTCToken], tokenizer: CTCTokenizer) -> list[Unit]:
    """The words, or the tokens that say something where no words are marked."""
    ids = [token.id for token in tokens]
    if marks_words(tokenizer):
        return [Unit(*word) for word in tokenizer.words(ids)]
    return [Unit(text, i, i + 1) for i, id in enumerate(ids) if (text := tokenizer.decode([id]))]


def make_segment(
    tokens: Sequence[CTCToken],
    units: Sequence[Unit],
    space: str,
    frame_seconds: float,
    offset: float,
    *,
    with_words: bool,
) -> Segment:
    """The segment that tokens say, in seconds: frame 0 is at ``offset``. ``space``: what stands between units."""
    text = space + space.join(unit.text for unit in units)
    said = [token.probability for unit in units for token in tokens[unit.first : unit.last]]
    return Segment(
        id=0,
        seek=round(offset * 100),
        start=offset + tokens[units[0].first].start * frame_seconds,
        end=offset + tokens[units[-1].last - 1].end * frame_seconds,
        text=text,
        tokens=[token.id for token in tokens],
        avg_logprob=sum(math.log(max(probability, _LEAST)) for probability in said) / len(said),
        compression_ratio=compression_ratio(text),
        words=[_word(unit, tokens, space, frame_seconds, offset) for unit in units] if with_words else None,
    )


def _word(unit: Unit, tokens: Sequence[CTCToken], space: str, frame_seconds: float, offset: float) -> Word:
    said = tokens[unit.first : unit.last]
    probability = sum(token.probability for token in said) / len(said)
    start, end = offset + said[0].start * frame_seconds, offset + said[-1].end * frame_seconds
    return Word(space + unit.text, start, end, probability)
