"""Text as a CTC model would write it: for language models, and for alignment with what was said."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.text.subtitles import break_points

Units = Literal["words", "tokens"]

WILDCARD = -1
"""Stands in a sequence of token ids for speech of any kind (`stapes.decoding.ctc_align`)."""

_VARIANTS = {"’": "'", "‘": "'", "ʼ": "'", "`": "'", "´": "'"}
_SAID = frozenset("@#%&*°")
"""Marks that are read aloud, beside signs of currency and mathematics."""
_NOT_SPOKEN = re.compile(r"\[[^\[\]]{1,200}\]")


class Speller:
    """Rewrites text with the characters that one model has."""

    def __init__(self, tokenizer: CTCTokenizer) -> None:
        self.tokenizer = tokenizer
        self.can_spell = cache(tokenizer.can_spell)

    def clean(self, text: str) -> str:
        """The text without what the model cannot write. A dash that it cannot write parts words."""
        return "".join(map(self._clean_character, text))

    def _clean_character(self, character: str) -> str:
        if character.isspace() or self.can_spell(character):
            return character
        variant = _VARIANTS.get(character, "")
        if variant and self.can_spell(variant):
            return variant
        return " " if unicodedata.category(character) == "Pd" or character == "/" else ""

    def cannot_say(self, text: str) -> bool:
        """Whether something that is read aloud (a digit, a sign, a letter of another script) has no token."""
        return any(
            not self._clean_character(character).strip()
            and (unicodedata.category(character) in ("Sc", "Sm") or character.isalnum() or character in _SAID)
            for character in text
            if not character.isspace()
        )


def token_names(tokenizer: CTCTokenizer) -> list[str]:
    """What a language model of tokens calls each of them, by id: its own text, white space written as ``▁``."""
    names = [""] * tokenizer.size
    for token, id in tokenizer.vocabulary.items():
        names[id] = re.sub(r"\s", "▁", token)
    return names


def as_written(lines: Iterable[str], tokenizer: CTCTokenizer, units: Units) -> Iterator[list[str]]:
    """Sentences as the model would write them: as words, or as names of its tokens. Empty ones are left out."""
    speller = Speller(tokenizer)
    names = token_names(tokenizer)
    for line in lines:
        text = speller.clean(line).strip()
        if text:
            ids = tokenizer.encode(text)
            yield tokenizer.decode(ids).split() if units == "words" else [names[id] for id in ids]


class SpeltWord(NamedTuple):
    """A word, with the white space before it, and where its tokens are: from ``start`` up to ``end``."""

    text: str
    start: int
    end: int
    is_wildcard: bool
    """It shares a wildcard, which may stand for several words in a row."""


@dataclass(frozen=True)
class SpeltText:
    """A text as token ids, `WILDCARD` among them, and its words. Every word has at least one token."""

    ids: list[int]
    words: list[SpeltWord]


def spell(text: str, tokenizer: CTCTokenizer, *, open_ends: bool = False) -> SpeltText:
    """Token ids of a text to be aligned with its recording.

    A word with something in it that is read aloud but has no token (a number, an e-mail address, another script), and
    text in square brackets, which is often not spoken, become wildcards; neighbours share one. Other marks that have
    no token are left out, and a word of nothing but such marks is written with the word before it. ``open_ends``:
    the recording may hold other speech before and after the text. In scripts without spaces every character is a word.
    """
    text = "".join(f" {word}" for word in text.split())
    speller = Speller(tokenizer)
    brackets = [match.span() for match in _NOT_SPOKEN.finditer(text)]
    delimiter, delimiter_id = tokenizer.delimiter, tokenizer.delimiter_id
    if delimiter_id is None:
        delimiter, delimiter_id = " ", tokenizer.vocabulary.get(" ")
    ids: list[int] = [WILDCARD] if open_ends else []
    words: list[SpeltWord] = []
    silent = ""
    place = 0
    for piece in break_points(text):
        begin, place = place, place + len(piece)
        word = piece.strip()
        spoken = speller.clean(word).strip()
        if speller.cannot_say(word) or any(a < place and b > begin for a, b in brackets):
            if not ids or ids[-1] != WILDCARD:
                ids.append(WILDCARD)
            words.append(SpeltWord(silent + piece, len(ids) - 1, len(ids), True))
        elif not spoken:
            if words:
                words[-1] = words[-1]._replace(text=words[-1].text + piece)
            else:
                silent += piece
            continue
        else:
            new = _encode(spoken, piece[0].isspace(), tokenizer, delimiter, delimiter_id)
            if new[0] == delimiter_id and (not ids or ids[-1] == WILDCARD):
                del new[0]
            start = len(ids) + (new[0] == delimiter_id)
            ids += new
            words.append(SpeltWord(silent + piece, start, len(ids), False))
        silent = ""
    if open_ends and ids[-1] != WILDCARD:
        ids.append(WILDCARD)
    return SpeltText(ids, words)


def _encode(
    spoken: str, begins_word: bool, tokenizer: CTCTokenizer, delimiter: str | None, delimiter_id: int | None
) -> list[int]:
    """Ids of a word, the mark before it included: it may be part of the word's first token."""
    if delimiter_id is None or not delimiter or not begins_word:
        return tokenizer.encode(spoken)
    if delimiter.isspace():  # encoding drops white space at the beginning
        return [delimiter_id, *tokenizer.encode(spoken)]
    return tokenizer.encode(delimiter + spoken)
