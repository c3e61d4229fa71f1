"""Which words a recogniser gets wrong: word alignment, counts of confusions, and differences to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rapidfuzz.distance import Levenshtein

# Counters are cut back to half of this when they pass it: what remains are the frequent words, which is what is shown.
_MAX_DISTINCT = 200_000

# In a difference, runs of right words longer than this are folded, keeping a few on either side.
_FOLD_OVER = 24
_FOLD_KEEP = 8
_MAX_PIECES = 240
_MAX_LETTERS = 60


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an aligned pair: right words, one wrong word, or words left out of the display (``gap``)."""

    kind: Literal["same", "substituted", "deleted", "inserted", "gap"]
    reference: str = ""
    hypothesis: str = ""


@dataclass(slots=True)
class WordErrors:
    """How often each word was taken for another, left out, or added."""

    confusions: Counter[tuple[str, str]] = field(default_factory=Counter)
    deleted: Counter[str] = field(default_factory=Counter)
    inserted: Counter[str] = field(default_factory=Counter)

    def add(self, reference: str, hypothesis: str) -> None:
        """Count the errors of one utterance (normalised texts)."""
        for piece in align(reference.split(), hypothesis.split()):
            match piece.kind:
                case "substituted":
                    self.confusions[piece.reference, piece.hypothesis] += 1
                case "deleted":
                    self.deleted[piece.reference] += 1
                case "inserted":
                    self.inserted[piece.hypothesis] += 1
                case _:
                    pass
        for counter in (self.confusions, self.deleted, self.inserted):
            if len(counter) > _MAX_DISTINCT:
                _keep_frequent(counter, _MAX_DISTINCT // 2)


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Piece]:
    """The words of a pair by least edit distance; neighbouring right words come as one piece, errors one by one."""
    pieces: list[Piece] = []
    for step in Levenshtein.opcodes(reference, hypothesis):
        spoken = reference[step.src_start : step.src_end]
        written = hypothesis[step.dest_start : step.dest_end]
        if step.tag == "equal":
            text = " ".join(spoken)
            pieces.append(Piece("same", text, text))
        elif step.tag == "replace":
            pieces += [Piece("substituted", *pair) for pair in zip(spoken, written, strict=True)]
        elif step.tag == "delete":
            pieces += [Piece("deleted", reference=word) for word in spoken]
        else:
            pieces += [Piece("inserted", hypothesis=word) for word in written]
    return pieces


def difference(reference: str, hypothesis: str) -> list[Piece]:
    """An aligned pair for display: long stretches of right words folded, and cut where it is very long."""
    shown: list[Piece] = []
    for piece in align(reference.split(), hypothesis.split()):
        words = piece.reference.split() if piece.kind == "same" else []
        if len(words) > _FOLD_OVER:
            head, tail = " ".join(words[:_FOLD_KEEP]), " ".join(words[-_FOLD_KEEP:])
            shown.append(Piece("same", head, head))
            shown.append(Piece("gap", f"{len(words) - 2 * _FOLD_KEEP} right words"))
            shown.append(Piece("same", tail, tail))
        else:
            shown.append(Piece(piece.kind, shorten(piece.reference, len(words)), shorten(piece.hypothesis, len(words))))
    if len(shown) > _MAX_PIECES:
        shown = [*shown[:_MAX_PIECES], Piece("gap", "the rest is left out")]
    return shown


def shorten(text: str, words: int = 1) -> str:
    """Text of at most ``words`` words of sixty letters each, with an ellipsis where something is missing."""
    limit = _MAX_LETTERS * max(1, words)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _keep_frequent(counter: Counter, size: int) -> None:
    kept = counter.most_common(size)
    counter.clear()
    counter.update(dict(kept))
