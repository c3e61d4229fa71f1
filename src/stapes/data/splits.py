"""Which utterances are for training, which for choosing, which for testing."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import PurePath

from stapes.data.corpora import Row
from stapes.data.seeds import key_of, uniform
from stapes.errors import UsageError

DEFAULT_SPLIT = "train"


def split_rule(text: str | None) -> Callable[[Row], str | None]:
    """A function from a row to its split; None: it is left out.

    text: None keeps what the corpus says, and ``train`` where it says nothing. Otherwise ``NAME=PART,NAME=PART…``,
    of which the first that fits decides: PART is a share such as 0.9 (by speaker where speakers are known, so that none
    is in two splits, and the same in every run), a pattern of file names such as ``0_*``, or ``speaker:PATTERN``.

    Raises UsageError for a text that is no such thing.
    """
    if text is None:
        return lambda row: row.split or DEFAULT_SPLIT
    rules: list[tuple[str, float | str]] = []
    total = 0.0
    for part in text.split(","):
        name, equals, rule = part.strip().partition("=")
        if not equals or not rule or not re.fullmatch(r"[\w.-]+", name):
            raise UsageError(f"--split is {text!r}: say such as train=0.9,dev=0.1 or train=0_*,test=1_*")
        share = _share(rule)
        if share is None:
            rules.append((name, rule))
            continue
        total += share
        if not share > 0 or total > 1 + 1e-9:
            raise UsageError(f"--split is {text!r}: shares are above 0, and 1 together at most")
        rules.append((name, total))
    return lambda row: next((name for name, rule in rules if _fits(row, rule)), None)


def _share(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _fits(row: Row, rule: float | str) -> bool:
    if not isinstance(rule, str):
        return uniform(key_of(row.speaker if row.speaker is not None else row.id)) < rule
    kind, colon, pattern = rule.partition(":")
    if colon and kind == "speaker":
        return fnmatchcase(row.speaker or "", pattern)
    return fnmatchcase(PurePath(row.audio).name, rule)
