"""Word error rate as Whisper's paper counts it: after Whisper's text normaliser.

English goes through the English normaliser (Radford et al. 2022, appendix C: numerals, contractions, British
spellings), every other language through the basic one. ``english_spelling.json`` is openai/whisper's table of
British and American spellings (MIT licence, in ``english_spelling.LICENSE``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jiwer
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

SPELLING = Path(__file__).parent / "english_spelling.json"


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Substituted, deleted and inserted words of a set of clips, out of ``words`` spoken."""

    errors: int
    words: int

    @property
    def rate(self) -> float:
        """Word error rate in per cent."""
        return 100.0 * self.errors / self.words


@cache
def normaliser(language: str) -> BasicTextNormalizer | EnglishTextNormalizer:
    """Whisper's normaliser for a language code."""
    if language == "en":
        return EnglishTextNormalizer(json.loads(SPELLING.read_text(encoding="utf-8")))
    return BasicTextNormalizer()


def normalise(text: str, language: str) -> str:
    """``text`` as it is compared: lower case, no punctuation, single spaces."""
    return " ".join(normaliser(language)(text).split())


def word_errors(spoken: Sequence[str], written: Sequence[str], language: str) -> WordErrors:
    """Errors over all clips together: a clip counts by its words. Clips with no words spoken count insertions."""
    truth = [normalise(text, language) for text in spoken]
    guess = [normalise(text, language) for text in written]
    output = jiwer.process_words(truth, guess)
    return WordErrors(
        errors=output.substitutions + output.deletions + output.insertions,
        words=output.hits + output.substitutions + output.deletions,
    )
