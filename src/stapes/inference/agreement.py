"""Which words of successive hypotheses are sure: those that all of them agree on while 1.5 s of sound came.

LocalAgreement-2 (Liu et al. 2020, https://arxiv.org/abs/2005.11185; Macháček et al. 2023,
https://arxiv.org/abs/2307.14743) asks that two in a row agree. Where they come several times a second, two in a row say
the same wrong word too often. On 141 words of LibriSpeech with tiny.en, a hypothesis every 0.5 s, of the words that two
in a row agreed on 3 were not those of the final hypothesis, of those that stood for a second 2, for 1.5 s none.

A word that was committed never changes. A later hypothesis may all the same spell it differently, or leave it out: it
is then laid beside the committed words with the fewest edits, and only what comes after them counts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import lru_cache

from stapes.transcript import Word

_BROKEN = "\ufffd"
"""What stands for bytes that are no whole character: a hypothesis that was cut in the middle of one."""

_BAND = 12
"""Words by which a hypothesis may be ahead of the committed words, or behind them."""


@lru_cache(maxsize=4096)  # the same words come again with every hypothesis
def spoken(word: str) -> str:
    """What is compared of a word: its letters and digits, without case, marks of punctuation and spaces."""
    folded = unicodedata.normalize("NFKC", word).casefold()
    return "".join(character for character in folded if unicodedata.category(character)[0] not in "PZCS")


class Agreement:
    """The words of one stretch of speech, as successive hypotheses of all of it come in.

    hold: the last words of a hypothesis are not committed, so many of them: what follows may still change them. span:
    seconds of sound that words have to stand for; two hypotheses have to agree in any case.
    """

    def __init__(self, hold: int = 1, span: float = 1.5) -> None:
        self.committed: list[Word] = []
        self.provisional: list[Word] = []
        """What the last hypothesis says after the committed words."""
        self._hold, self._span = hold, span
        self._committed_keys: list[str] = []
        self._past: list[tuple[float, list[str]]] = []  # ends of hypotheses, and what they say after committed words

    def hear(self, words: Sequence[Word], end: float) -> list[Word]:
        """Take the next hypothesis, of sound that ends at ``end`` (seconds); the words that are committed by it."""
        words = _whole(words)
        keys = [spoken(word.word) for word in words]
        place = self._place(keys)
        words, keys = words[place:], keys[place:]
        # The hypotheses of the last ``span``, and the one before them, which all have to agree.
        old = next((i for i in range(len(self._past) - 1, -1, -1) if self._past[i][0] <= end - self._span), None)
        count = 0
        if old is not None:
            self._past = self._past[old:]
            agreed = min(_common(keys, others) for _, others in self._past)
            count = max(0, min(agreed, len(keys) - self._hold))
        self._past = [(at, others[count:]) for at, others in self._past] + [(end, keys[count:])]
        self.provisional = words[count:]
        return self._commit(words[:count])

    def settle(self, words: Sequence[Word]) -> list[Word]:
        """Take the last hypothesis: all its words are committed, those that are new are returned.

        Committed words take over its times where it has them too.
        """
        words = [word for word in words if _BROKEN not in word.word]
        keys = [spoken(word.word) for word in words]
        place = self._place(keys)
        self._take_times(words[:place], keys[:place])
        self.provisional, self._past = [], []
        return self._commit(words[place:])

    @property
    def text(self) -> str:
        """The committed words."""
        return "".join(word.word for word in self.committed)

    def _commit(self, words: Sequence[Word]) -> list[Word]:
        new = []
        for word in words:
            after = self.committed[-1].end if self.committed else word.start
            start = max(word.start, after)
            word = replace(word, start=start, end=max(word.end, start))
            new.append(word)
            self.committed.append(word)
            self._committed_keys.append(spoken(word.word))
        return new

    def _take_times(self, words: Sequence[Word], keys: Sequence[str]) -> None:
        """Let committed words have the times that the last hypothesis gives the same words, in order all the same."""
        matcher = SequenceMatcher(None, self._committed_keys, keys, autojunk=False)
        for block in matcher.get_matching_blocks():
            for i in range(block.size):
                old, new = self.committed[block.a + i], words[block.b + i]
                self.committed[block.a + i] = Word(old.word, new.start, new.end, new.probability)
        end = 0.0
        for i, word in enumerate(self.committed):
            start = max(word.start, end)
            end = max(word.end, start)
            self.committed[i] = replace(word, start=start, end=end)

    def _place(self, keys: Sequence[str]) -> int:
        return said_already(self._committed_keys, keys)


def said_already(done: Sequence[str], keys: Sequence[str], places: Collection[int] | None = None) -> int:
    """How many words of a hypothesis say what was said before: those that ``done`` needs the fewest edits to become.

    Both as `spoken`. places: only so many may be the answer, unless it is sure.
    """
    done = list(done)
    if list(keys[: len(done)]) == done:
        return len(done)
    if len(keys) < len(done) - _BAND:
        return len(keys)
    # Edit distance of all of it to every beginning of the hypothesis, near the diagonal.
    far = len(done) + len(keys) + 1
    costs = [j if j <= _BAND else far for j in range(len(keys) + 1)]
    for i, word in enumerate(done, 1):
        before, costs = costs, [far] * (len(keys) + 1)
        for j in range(max(0, i - _BAND), min(len(keys), i + _BAND) + 1):
            best = before[j] + 1
            if j:
                best = min(best, costs[j - 1] + 1, before[j - 1] + (keys[j - 1] != word))
            costs[j] = best

    def rank(j: int) -> tuple[int, bool, int]:
        return costs[j], not (j and keys[j - 1] == done[-1]), abs(j - len(done))

    return min(places or range(len(keys) + 1), key=rank)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many words both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _whole(words: Sequence[Word]) -> list[Word]:
    """The words before the first that is not whole."""
    broken = next((i for i, word in enumerate(words) if _BROKEN in word.word), len(words))
    return list(words[:broken])
