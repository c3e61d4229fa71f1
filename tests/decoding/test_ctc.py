"""Runs of labels become tokens, and how a recording was cut or batched changes nothing."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stapes.decoding.ctc import CTCToken, Joiner, best_path, collapse, greedy, token_words
from stapes.text.ctc_tokenizer import CTCTokenizer

BLANK = 2


def logits_for(labels: list[int], seed: int = 0) -> torch.Tensor:
    """Random scores whose likeliest labels are these: (1, frames, 4)."""
    scores = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed))
    scores[torch.arange(len(labels)), torch.tensor(labels, dtype=torch.int64)] += 20
    return scores[None]


labels = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(labels)
def test_tokens_are_the_runs_between_blanks(path: list[int]) -> None:
    (tokens,) = greedy(logits_for(path), [len(path)], BLANK)
    assert [token.id for token in tokens] == [label for label, _ in groupby(path) if label != BLANK]
    said = [BLANK] * len(path)
    for token in tokens:
        said[token.start : token.end] = [token.id] * (token.end - token.start)
        assert 0.9 < token.probability <= 1
    assert said == path


@given(labels, st.lists(st.integers(1, 5), max_size=8))
def test_a_recording_cut_anywhere_says_the_same(path: list[int], sizes: list[int]) -> None:
    logits = logits_for(path)
    (whole,) = greedy(logits, [len(path)], BLANK)
    joiner = Joiner()
    joined: list[CTCToken] = []
    for window in logits[0].split([*_sizes(sizes, len(path))]):
        joined += joiner.add(greedy(window[None], [len(window)], BLANK)[0] if len(window) else [], len(window))
    joined += joiner.finish()
    assert [token[:3] for token in joined] == [token[:3] for token in whole]
    assert [token.probability for token in joined] == pytest.approx([token.probability for token in whole])


def _sizes(sizes: list[int], total: int) -> list[int]:
    cuts = np.minimum(np.cumsum([0, *sizes]), total).tolist()
    return np.diff([*cuts, total]).tolist()


@given(st.lists(labels, min_size=1, max_size=4), st.integers(0, 3))
def test_padding_and_neighbours_change_nothing(paths: list[list[int]], start: int) -> None:
    width = max(map(len, paths)) + 3
    batch = torch.stack([logits_for(path + [1] * (width - len(path)))[0] for path in paths])
    ends = [len(path) for path in paths]
    starts = [min(start, end) for end in ends]
    together = collapse(best_path(batch).cpu(), ends, BLANK, starts)
    for row, tokens in enumerate(together):
        alone = greedy(batch[row : row + 1, starts[row] : ends[row]], [ends[row] - starts[row]], BLANK)[0]
        assert tokens == alone


def test_a_token_is_handed_over_as_soon_as_a_blank_ends_it() -> None:
    joiner = Joiner()
    assert joiner.add([CTCToken(0, 0, 2, 0.5)], 2) == []
    assert joiner.add([CTCToken(0, 0, 1, 0.8)], 2) == [CTCToken(0, 0, 3, pytest.approx(0.6))]
    assert joiner.add([], 2) == []
    assert joiner.add([CTCToken(0, 0, 2, 1.0)], 2) == []
    assert joiner.finish() == [CTCToken(0, 6, 8, 1.0)]
    assert joiner.finish() == []


def test_logits_and_log_probabilities_of_any_type_mean_the_same() -> None:
    logits = logits_for([0, 0, 2, 1, 3, 2])
    expected = greedy(logits, [6], BLANK)
    for same in (logits.log_softmax(-1), logits.double(), logits + 100):
        (tokens,) = greedy(same, torch.tensor([6]), BLANK)
        assert [token[:3] for token in tokens] == [token[:3] for token in expected[0]]
        assert [token.probability for token in tokens] == pytest.approx([t.probability for t in expected[0]], rel=1e-4)


def test_words_begin_and_end_with_their_tokens() -> None:
    tokenizer = CTCTokenizer({"<pad>": 0, "|": 1, "A": 2, "B": 3}, lower_case=True)
    path = [0, 2, 2, 0, 3, 1, 1, 0, 3, 0, 1]
    tokens = [CTCToken(2, 1, 3, 0.5), CTCToken(3, 4, 5, 1.0), CTCToken(1, 5, 7, 0.1), CTCToken(3, 8, 9, 0.25)]
    tokens.append(CTCToken(1, 10, 11, 0.1))
    assert [token[:3] for token in greedy(logits_for(path), [11], 0)[0]] == [token[:3] for token in tokens]
    words = token_words(tokens, tokenizer, 0.02, offset=5.0)
    assert [(word.word, word.probability) for word in words] == [(" ab", 0.75), (" b", 0.25)]
    assert [(word.start, word.end) for word in words] == [pytest.approx((5.02, 5.1)), pytest.approx((5.16, 5.18))]
    assert token_words([], tokenizer, 0.02) == []
