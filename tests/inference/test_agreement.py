"""Committed words never change, whatever the hypotheses say; true words are not lost or doubled."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.inference.agreement import Agreement, said_already, spoken
from stapes.transcript import Word

VOCABULARY = [" a", " b", " c", " the", " The,", " cat", " cat.", " Ähre", "。", "中", "文", " \ufffd", " -", ""]
HYPOTHESES = st.lists(st.lists(st.sampled_from(VOCABULARY), max_size=12), max_size=8)


def words(texts) -> list[Word]:
    return [Word(text, 0.3 * i, 0.3 * i + 0.2, 0.9) for i, text in enumerate(texts)]


@settings(max_examples=300, deadline=None)
@given(hypotheses=HYPOTHESES, last=st.lists(st.sampled_from(VOCABULARY), max_size=12), hold=st.integers(0, 3))
def test_committed_words_never_change(hypotheses, last, hold):
    """meetily PR #605: text was made token by token, and half characters were told as U+FFFD."""
    agreement = Agreement(hold)
    told: list[str] = []
    for number, hypothesis in enumerate(hypotheses):
        told += [word.word for word in agreement.hear(words(hypothesis), 0.4 * number)]
        assert [word.word for word in agreement.committed] == told
        assert not any("\ufffd" in word for word in told)
    told += [word.word for word in agreement.settle(words(last))]
    assert [word.word for word in agreement.committed] == told
    assert agreement.text == "".join(told)
    starts = [word.start for word in agreement.committed]
    ends = [word.end for word in agreement.committed]
    assert starts == sorted(starts)
    assert ends == sorted(ends)
    assert all(start <= end for start, end in zip(starts, ends, strict=True))


@settings(max_examples=200, deadline=None)
@given(count=st.integers(0, 40), seed=st.integers(0, 10**6), hold=st.integers(0, 3))
def test_growing_hypotheses_of_one_text_give_that_text(count, seed, hold):
    """Each hypothesis is a beginning of the text, whose last word may be cut: nothing is lost or said twice."""
    draw = random.Random(seed)
    text = [f" w{draw.randrange(6)}" for _ in range(count)]  # few different words: many are the same
    agreement, heard, said = Agreement(hold, 1.0), 0, [(0.0, 0)]
    while heard < count:
        heard = min(count, heard + draw.randrange(1, 5))
        end = said[-1][0] + draw.uniform(0.1, 1.2)
        agreement.hear(words([*text[:heard], *([" cut"] if draw.random() < 0.5 else [])]), end)
        # Nothing that was not said a second of sound before.
        assert len(agreement.committed) <= max(known for at, known in said if at <= max(0.0, end - 1.0))
        said.append((end, heard))
    agreement.settle(words(text))
    assert [word.word for word in agreement.committed] == text


def test_two_that_agree_commit_all_but_what_is_held():
    agreement = Agreement(hold=1, span=1.0)
    assert agreement.hear(words([" Nor", " is"]), 1.0) == []
    assert [word.word for word in agreement.hear(words([" Nor", " is", " Mister"]), 2.0)] == [" Nor", " is"]
    assert [word.word for word in agreement.provisional] == [" Mister"]


def test_words_have_to_stand_for_a_second_however_often_they_are_heard():
    agreement = Agreement(hold=0, span=1.0)
    heard = [(0.4, " what then"), (0.8, " what then"), (1.2, " what bankrupts"), (1.6, " what bankrupts in")]
    assert [len(agreement.hear(words(text.split()), end)) for end, text in heard] == [0, 0, 0, 1]
    assert len(agreement.hear(words(["what", "bankrupts", "in"]), 2.3)) == 1
    assert agreement.text == "whatbankrupts"


def test_a_committed_word_that_is_spelled_otherwise_later_is_not_said_again():
    agreement = Agreement(hold=0, span=1.0)
    agreement.hear(words([" The", " cap", " sat"]), 1.0)
    agreement.hear(words([" The", " cap", " sat", " on"]), 2.0)
    agreement.settle(words([" the", " cat", " sat", " on", " it."]))
    assert agreement.text == " The cap sat on it."
    agreement = Agreement(hold=0, span=1.0)
    agreement.hear(words([" a", " b"]), 1.0)
    agreement.hear(words([" a", " b"]), 2.0)
    agreement.settle(words([" a", " x", " b", " c"]))  # an insertion before a committed word
    assert agreement.text == " a b c"


def test_what_was_said_before_is_found_again_however_it_is_written():
    earlier = ["he", "sat", "down"]
    assert said_already(earlier, []) == 0
    assert said_already(earlier, ["he", "sat", "down", "down"]) == 3
    assert said_already(earlier, ["he", "sits", "down", "on", "it"]) == 3
    assert said_already(earlier, ["and", "he", "sat", "down", "on"]) == 4
    assert said_already(earlier, ["sat", "down", "on", "it"]) == 2
    assert said_already(earlier, ["he", "sat", "it", "was"]) == 3
    assert said_already(earlier, ["he", "sat", "it", "was"], [1, 2]) == 2  # where the others cannot be


def test_exact_times_come_with_the_end():
    agreement = Agreement(hold=0, span=1.0)
    for end in (1.0, 2.0):
        agreement.hear([Word(" one", 0.0, 0.4, 0.5), Word(" two", 0.4, 0.8, 0.5)], end)
    agreement.settle([Word(" One", 0.1, 0.3, 0.9), Word(" two,", 0.5, 0.7, 0.9), Word(" three", 0.7, 1.0, 0.9)])
    assert agreement.text == " one two three"
    assert [(word.start, word.end) for word in agreement.committed] == [(0.1, 0.3), (0.5, 0.7), (0.7, 1.0)]


def test_words_are_compared_by_their_letters():
    assert spoken(" “Hello,”") == spoken("hello") == spoken(" HELLO!")
    assert spoken(" Ａ") == "a"
    assert spoken(" —") == ""
