"""Word error rate as Whisper's paper counts it: after Whisper's text normaliser.

English goes through the English normaliser (Radford et al. 2022, appendix C: numerals, contractions, British
spellings), every other language through the basic one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jiwer

from stapes.evaluation.normalizers import normalize


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Substituted, deleted and inserted words of a set of clips, out of ``words`` spoken."""

    errors: int
    words: int

    @property
    def rate(self) -> float:
        """Word error rate in per cent."""
        return 100.0 * self.errors / self.words


def normalise(text: str, language: str) -> str:
    """``text`` as it is compared: lower case, no punctuation, single spaces."""
    return normalize(text, "english" if language == "en" else "basic")


def word_errors(spoken: Sequence[str], written: Sequence[str], language: str) -> WordErrors:
    """Errors over all clips together: a clip counts by its words. Clips with no words spoken count insertions."""
    truth = [normalise(text, language) for text in spoken]
    guess = [normalise(text, language) for text in written]
    output = jiwer.process_words(truth, guess)
    return WordErrors(
        errors=output.substitutions + output.deletions + output.insertions,
        words=output.hits + output.substitutions + output.deletions,
    )
