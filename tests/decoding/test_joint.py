"""Joint decoding: CTC's prefix probabilities are sums over all texts, and the search finds what enumeration finds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from stapes.decoding.joint import CTCPrefixScorer, PrefixState, joint_search
from stapes.models.conformer import ConformerConfig
from stapes.models.hybrid import Hybrid, HybridConfig

VOCABULARY, BLANK, START, END = 6, 0, 1, 2
LETTERS = (3, 4, 5)


def emissions(frames: int, seed: int = 0, sharp: float = 2.0) -> Tensor:
    torch.manual_seed(seed)
    logits = sharp * torch.randn(1, frames, VOCABULARY)
    logits[..., [START, END]] = -30.0
    return logits.log_softmax(-1)


def texts(log_probs: Tensor) -> dict[tuple[int, ...], float]:
    """Each text and its probability, by going through every path."""
    found: dict[tuple[int, ...], float] = {}
    rows = log_probs[0].double().exp().tolist()
    for path in itertools.product((BLANK, *LETTERS), repeat=len(rows)):
        probability = math.prod(row[label] for row, label in zip(rows, path, strict=True))
        text = tuple(label for label, _ in itertools.groupby(path) if label != BLANK)
        found[text] = found.get(text, 0.0) + probability
    return found


def test_prefix_probabilities_are_sums_over_all_texts_that_begin_so() -> None:
    log_probs = emissions(6)
    all_texts = texts(log_probs)
    scorer = CTCPrefixScorer(torch.cat([log_probs, torch.zeros(1, 2, VOCABULARY)], 1), torch.tensor([6]), BLANK)
    row = torch.tensor([0])
    for prefix in [(3,), (3, 3), (4, 5), (3, 4, 3), (5, 5, 5)]:
        state, last = scorer.start(), torch.tensor([-1])
        for token in prefix:
            score, grown = scorer.extend(state, last, torch.tensor([[token]]), row)
            state, last = PrefixState(grown.token[:, 0], grown.blank[:, 0]), torch.tensor([token])
        expected = sum(p for text, p in all_texts.items() if text[: len(prefix)] == prefix)
        assert float(score.exp()) == pytest.approx(expected, rel=1e-6, abs=1e-15)
        assert float(scorer.finish(state).exp()) == pytest.approx(all_texts.get(prefix, 0.0), rel=1e-6, abs=1e-15)


def test_long_recordings_lose_no_precision() -> None:
    """The recursion, frame by frame, over 3,000 frames."""
    log_probs = emissions(3000, sharp=4.0)
    scorer = CTCPrefixScorer(log_probs, torch.tensor([3000]), BLANK)
    state, last = scorer.start(), torch.tensor([-1])
    x = log_probs[0].double()
    token, blank = torch.full((3000,), -math.inf, dtype=torch.float64), x[:, BLANK].cumsum(0)
    previous = -1
    for letter in (3, 4, 4, 5):
        new_token, new_blank = torch.empty_like(token), torch.empty_like(blank)
        n = b = torch.tensor(-math.inf, dtype=torch.float64)
        for t in range(3000):
            if t == 0:
                ready = torch.tensor(0.0 if previous < 0 else -math.inf, dtype=torch.float64)
            else:
                ready = blank[t - 1] if letter == previous else torch.logaddexp(token[t - 1], blank[t - 1])
            n, b = torch.logaddexp(n, ready) + x[t, letter], torch.logaddexp(n, b) + x[t, BLANK]
            new_token[t], new_blank[t] = n, b
        token, blank, previous = new_token, new_blank, letter
        _, grown = scorer.extend(state, last, torch.tensor([[letter]]), torch.tensor([0]))
        state, last = PrefixState(grown.token[:, 0], grown.blank[:, 0]), torch.tensor([letter])
    torch.testing.assert_close(state.token[0], token, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(state.blank[0], blank, rtol=1e-9, atol=1e-6)


@pytest.fixture(scope="module")
def model() -> Hybrid:
    encoder = ConformerConfig(20, 24, 1, 4, 32, 7, 4, 8, dropout=0.0)
    torch.manual_seed(3)
    network = Hybrid(HybridConfig(encoder, VOCABULARY, 1, 4, 32, decoder_dropout=0.0))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network.eval()


def score(model: Hybrid, states: Tensor, text: tuple[int, ...], weight: float, all_texts: dict) -> float:
    """What joint decoding maximises, for one text, in one teacher-forced pass."""
    with torch.no_grad():
        logits, _ = model.decoder(torch.tensor([[START, *text]]), states, None)
    said = logits[0].double().log_softmax(-1)
    attention = sum(float(said[n, token]) for n, token in enumerate((*text, END)))
    return (1 - weight) * attention + weight * math.log(max(1e-300, all_texts.get(text, 0.0)))


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_wide_beam_finds_the_likeliest_text(model: Hybrid, weight: float, seed: int) -> None:
    torch.manual_seed(seed)
    states, log_probs = torch.randn(1, 4, 24), emissions(4, seed)
    all_texts = texts(log_probs)
    candidates = [text for size in range(5) for text in itertools.product(LETTERS, repeat=size)]
    expected = max(candidates, key=lambda text: score(model, states, text, weight, all_texts))
    found = joint_search(
        model.decoder,
        states,
        torch.tensor([4]),
        START,
        END,
        log_probs=log_probs if weight else None,
        ctc_weight=weight,
        beam=81,
    )
    assert tuple(found[0]) == expected


def test_one_beam_without_ctc_is_greedy_and_rows_do_not_meddle(model: Hybrid) -> None:
    torch.manual_seed(5)
    states, counts = torch.randn(3, 20, 24), torch.tensor([20, 7, 13])
    states[1, 7:], states[2, 13:] = 9.0, -9.0
    log_probs = torch.randn(3, 20, VOCABULARY).log_softmax(-1)
    together = joint_search(model.decoder, states, counts, START, END, log_probs=log_probs, beam=3)
    for row, count in enumerate(counts.tolist()):
        alone = joint_search(
            model.decoder,
            states[row : row + 1, :count],
            counts[row : row + 1],
            START,
            END,
            log_probs=log_probs[row : row + 1, :count],
            beam=3,
        )
        assert alone == [together[row]]
