"""Samples are chosen by what they agree on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from stapes.decoding.consensus import disagreement, edit_distance

TEXT = st.lists(st.integers(0, 5), max_size=12)


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT)
def test_edit_distance_is_levenshteins(a: list[int], b: list[int]) -> None:
    assert edit_distance(a, b) == Levenshtein.distance(a, b)


def test_what_most_say_disagrees_least() -> None:
    said, invented = [1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3]
    scores = disagreement([said, [1, 2, 3], invented, [1, 2, 5, 4]])
    assert scores.index(min(scores)) == 0
    assert scores.index(max(scores)) == 2
    assert disagreement([said]) == [0]
