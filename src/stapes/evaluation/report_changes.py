"""What became of each recording from one model to the next: errors that are gone, and errors that are new.

A model that was tuned to one kind of speech may have forgotten another. The rate of a whole set hides it where as much
was gained, so recordings are looked at one by one, and counted by language and by speaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_SPEAKERS = 5
"""Speakers that are shown of those who gained most, and of those who lost most."""

_MOST_LANGUAGES = 16


@dataclass(frozen=True, slots=True)
class Change:
    """Recordings of one kind, before (the baseline) and after."""

    where: str
    """``all``, or a language or a speaker by name."""
    utterances: int
    words: int
    before: int
    """Word errors."""
    after: int
    mended: int
    """Word errors that recordings have fewer of, in those that got better."""
    new: int
    """Word errors that recordings have more of, in those that got worse: what was forgotten."""


def find_changes(
    before: np.ndarray,
    after: np.ndarray,
    words: np.ndarray,
    languages: Sequence[str | None],
    speakers: Sequence[str | None],
) -> list[Change]:
    """All recordings, each language where there are several, and the speakers who gained and who lost most.

    before, after, words: word errors and words of each recording, (recordings,).
    """
    out = [_change("all", before, after, words)]
    by_language = _groups("language", languages, before, after, words)
    if len(by_language) > 1:
        out += sorted(by_language, key=lambda each: -each.words)[:_MOST_LANGUAGES]
    by_speaker = sorted(_groups("speaker", speakers, before, after, words), key=lambda each: each.after - each.before)
    if len(by_speaker) > 1:
        lost = [each for each in by_speaker[: -_MOST_SPEAKERS - 1 : -1] if each.after > each.before]
        gained = [each for each in by_speaker[:_MOST_SPEAKERS] if each.after < each.before]
        out += lost + gained
    return out


def _groups(
    kind: str, names: Sequence[str | None], before: np.ndarray, after: np.ndarray, words: np.ndarray
) -> list[Change]:
    members: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        if name is not None:
            members.setdefault(name, []).append(place)
    return [_change(f"{kind} {name}", before[at], after[at], words[at]) for name, at in members.items()]


def _change(where: str, before: np.ndarray, after: np.ndarray, words: np.ndarray) -> Change:
    more = after - before
    return Change(
        where,
        len(words),
        int(words.sum()),
        int(before.sum()),
        int(after.sum()),
        mended=int(-more[more < 0].sum()),
        new=int(more[more > 0].sum()),
    )
