"""The rules for many rows at once are openai/whisper's rules for each."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openai_decoding import forbid
from stapes.decoding.rules import RuleState, Vocabulary, apply_rules

VOCABULARY = Vocabulary(end=12, no_speech=15, no_timestamps=16, timestamp_begin=17, size=17 + 9)
BLANK = (3, 12)

tokens = st.one_of(st.integers(0, 11), st.integers(17, VOCABULARY.size - 1), st.integers(0, VOCABULARY.size - 1))


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], bool, int, list[int], list[float]]:
    written = draw(st.lists(tokens, max_size=7))
    if draw(st.booleans()):  # as a decoder would write them: times never run backwards
        stamps = iter(sorted(token for token in written if token >= 17))
        written = [next(stamps) if token >= 17 else token for token in written]
    spread = draw(st.sampled_from([1.0, 8.0]))
    numbers = st.floats(-spread, spread, width=32)
    logits = draw(st.lists(numbers, min_size=VOCABULARY.size, max_size=VOCABULARY.size))
    suppressed = draw(st.lists(st.integers(0, VOCABULARY.size - 1), max_size=4, unique=True))
    return written, draw(st.booleans()), draw(st.integers(-1, 10)), suppressed, logits


@settings(max_examples=300, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=5))
@example([([0, 24], True, 0, [24], [0.0] * 25 + [1.336596631984488e-11])])  # one time is left, hardly the likelier
def test_rows_of_a_batch_follow_the_rules_each_by_itself(batch: list[tuple]) -> None:
    state = RuleState.empty(len(batch), torch.device("cpu"))
    suppressed = torch.zeros(len(batch), VOCABULARY.size)
    for row, (written, timestamps, max_initial, forbidden, _) in enumerate(batch):
        state.reset(row, timestamps, max_initial)
        one = RuleState(*(field[row : row + 1] for field in state.fields()))
        for token in written:
            one.append(torch.tensor([token]), VOCABULARY)
        suppressed[row, forbidden] = -torch.inf
    blank = torch.zeros(VOCABULARY.size)
    blank[list(BLANK)] = -torch.inf
    logits = torch.tensor([row[4] for row in batch])

    found = apply_rules(logits.clone(), state, suppressed, blank, VOCABULARY)

    for row, (written, timestamps, max_initial, forbidden, _) in enumerate(batch):
        expected = forbid(
            logits[row],
            written,
            VOCABULARY,
            timestamps=timestamps,
            max_initial=max_initial,
            suppressed=forbidden,
            blank=BLANK,
        )
        # Where times and text are nearer than rounding, it decides whether times forbid the text.
        allowed = logits[row].masked_fill(found[row].isinf() & expected.isinf(), -torch.inf)
        times_win = allowed[17:].logsumexp(dim=-1) - allowed[:17].max()
        first = 17 if times_win.abs() <= 1e-5 else 0
        torch.testing.assert_close(found[row, first:], expected[first:], rtol=0, atol=0)


def test_reset_and_reorder_move_what_was_written() -> None:
    state = RuleState.empty(3, torch.device("cpu"))
    state.reset(slice(0, 3), True, 5)
    state.append(torch.tensor([17, 18, 19]), VOCABULARY)
    state.append(torch.tensor([1, 2, 3]), VOCABULARY)
    state.reorder(torch.tensor([2, 2, 0]))
    assert state.last.tolist() == [3, 3, 1]
    assert state.before_last.tolist() == [19, 19, 17]
    assert state.last_timestamp.tolist() == [19, 19, 17]
    state.reset(1, False, -1)
    assert state.count.tolist() == [2, 0, 2]
    assert state.last.tolist() == [3, -1, 1]
    assert state.timestamps.tolist() == [True, False, True]
