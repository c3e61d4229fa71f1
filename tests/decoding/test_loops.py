"""What people say twice is kept; what a model says over and over is seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapes.decoding.loops import repeated_tail, repeats, without_loop

REFRAIN = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]

natural = {
    "no no no no": [1, 2] * 4,
    "ha ten times": [5] * 10,
    "a telephone number": [1, 2, 2, 2, 2, 3, 3, 3, 1, 1, 1],
    "twelve zeros": [9, *[0] * 12],
    "a refrain of four lines sung twice": [*range(100, 140), *range(100, 140)],
    "a line sung four times": REFRAIN * 4,
    "very, very, very … (eight times)": [7, 8] * 8,
    "nothing": [],
    "one word": [4],
}
loops = {
    "a word": [3, *[7] * 16],
    "two words": [1, 2, 3, *[8, 9] * 10],
    "a sentence": [1, 2, *REFRAIN * 5],
    "a long sentence": [5, *list(range(32)) * 5],
    "in the middle of a round": [*REFRAIN * 5, *REFRAIN[:5]],
}


@pytest.mark.parametrize("tokens", natural.values(), ids=natural.keys())
def test_natural_repetition_is_no_loop(tokens: list[int]) -> None:
    assert not repeats(tokens)
    assert without_loop(tokens) == tokens


@pytest.mark.parametrize("tokens", loops.values(), ids=loops.keys())
def test_loops_are_seen_and_cut_to_their_first_round(tokens: list[int]) -> None:
    assert repeats(tokens)
    period, times = repeated_tail(tokens)
    kept = without_loop(tokens)
    assert kept == tokens[: len(kept)]
    assert len(kept) == len(tokens) - period * (times - 1)


def test_a_loop_that_is_over_is_history() -> None:
    assert not repeats([*REFRAIN * 6, 90, 91, 92])


small = st.integers(0, 2)


@given(
    st.one_of(
        st.lists(small, max_size=120),
        st.builds(
            lambda head, part, inner, times, tail: [*head, *(part + inner * 5) * times, *tail],
            st.lists(small, max_size=8),
            st.lists(small, max_size=6),
            st.lists(small, max_size=4),
            st.integers(0, 20),
            st.lists(small, max_size=3),
        ),
    )
)
def test_cutting_ends_every_loop_and_keeps_the_beginning(tokens: list[int]) -> None:
    kept = without_loop(tokens)
    assert kept == tokens[: len(kept)]
    assert not repeats(kept)
    assert without_loop(kept) == kept
    assert bool(tokens) == bool(kept)
