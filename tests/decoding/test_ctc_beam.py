"""Beam search finds what a search through everything finds, alone or in a batch, in one piece or in several."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.decoding.ctc_beam import BeamState, Fusion, Hypothesis, PrefixBeamSearch
from stapes.decoding.ctc_fusion import Hotwords, TokenNGram, WordNGram
from stapes.decoding.ngram import NGramModel, read_arpa
from stapes.decoding.ngram_estimate import estimate, write_arpa
from stapes.errors import UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer

NEVER = float("-inf")
LETTERS = CTCTokenizer({"<pad>": 0, "|": 1, "A": 2, "B": 3}, unknown=None, start=None, end=None)
PARTS = CTCTokenizer({"▁A": 0, "▁": 1, "B": 2, "<pad>": 3, "A": 4}, unknown=None, start=None, end=None, delimiter="▁")


def random_log_probs(seed: int, frames: int, size: int, rows: int = 1) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.normal(scale=2.0, size=(rows, frames, size))).log_softmax(-1)


def all_texts(log_probs: torch.Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """Log-probability of every text, over all paths."""
    total: defaultdict[tuple[int, ...], float] = defaultdict(float)
    frames, size = log_probs.shape
    for path in product(range(size), repeat=frames):
        text = tuple(b for a, b in zip((blank, *path), path, strict=False) if a != b and b != blank)
        total[text] += math.exp(sum(log_probs[frame, label].item() for frame, label in enumerate(path)))
    return {text: math.log(probability) for text, probability in total.items()}


def literal_search(log_probs: torch.Tensor, blank: int, beam_size: int) -> list[tuple[tuple[int, ...], float]]:
    """Hannun et al. 2014, algorithm 1, without a language model, in logarithms."""
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, NEVER)}
    for frame in log_probs.tolist():
        grown: defaultdict[tuple[int, ...], list[float]] = defaultdict(lambda: [NEVER, NEVER])

        def add(text: tuple[int, ...], which: int, value: float, grown: dict = grown) -> None:
            grown[text][which] = float(np.logaddexp(grown[text][which], value))

        for text, (ends_blank, ends_label) in beam.items():
            both = float(np.logaddexp(ends_blank, ends_label))
            for label, score in enumerate(frame):
                if label == blank:
                    add(text, 0, both + score)
                elif text and label == text[-1]:
                    add(text, 1, ends_label + score)
                    add((*text, label), 1, ends_blank + score)
                else:
                    add((*text, label), 1, both + score)
        best = sorted(grown.items(), key=lambda item: -np.logaddexp(*item[1]))[:beam_size]
        beam = {text: (a, b) for text, (a, b) in best if max(a, b) > NEVER}
    return [(text, float(np.logaddexp(a, b))) for text, (a, b) in beam.items()]


def same(found: list[Hypothesis], expected: list[tuple[tuple[int, ...], float]]) -> None:
    assert [tuple(hypothesis.tokens) for hypothesis in found] == [text for text, _ in expected]
    np.testing.assert_allclose([hypothesis.score for hypothesis in found], [score for _, score in expected], rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(2, 5), st.integers(1, 9))
def test_equal_to_the_published_algorithm(seed: int, frames: int, size: int, beam_size: int) -> None:
    log_probs = random_log_probs(seed, frames, size)
    blank = seed % size
    found = PrefixBeamSearch(blank, beam_size)(log_probs, torch.tensor([frames]), n_best=beam_size)[0]
    same(found, literal_search(log_probs[0], blank, beam_size))


@pytest.mark.parametrize("frames", [1, 3, 6])
def test_a_beam_for_everything_finds_the_exact_probability_of_every_text(frames: int) -> None:
    log_probs = random_log_probs(frames, frames, 3)
    expected = sorted(all_texts(log_probs[0], 1).items(), key=lambda item: -item[1])
    found = PrefixBeamSearch(1, len(expected) + 5)(log_probs, torch.tensor([frames]), n_best=1000)[0]
    same(found, expected)
    assert sum(math.exp(hypothesis.acoustic) for hypothesis in found) == pytest.approx(1.0)


def build(tmp_path: Path, text: list[list[str]], order: int) -> NGramModel:
    write_arpa(estimate(text, order), tmp_path / "model.arpa")
    return read_arpa(tmp_path / "model.arpa")


def words_of(tokenizer: CTCTokenizer, text: tuple[int, ...]) -> list[str]:
    return tokenizer.decode(text).split()


@pytest.mark.parametrize("tokenizer", [LETTERS, PARTS], ids=["letters", "parts of words"])
def test_with_a_language_model_of_words_equal_to_exhaustive_search(tmp_path: Path, tokenizer: CTCTokenizer) -> None:
    model = build(tmp_path, [["a", "ab", "a"], ["ab", "ba"], ["a", "ab"]], 2)
    fusion = WordNGram(model, tokenizer, weight=0.7, word_bonus=0.4, unknown_score=-6.0)
    log_probs = random_log_probs(5, 5, tokenizer.size)
    expected = {}
    for text, acoustic in all_texts(log_probs[0], tokenizer.blank_id).items():
        words = [word.lower() for word in words_of(tokenizer, text)]
        score, context = 0.0, torch.tensor(model.start)
        for word in [*words, "</s>"]:
            one, context = model.score(context, torch.tensor(model.ids([word])[0]))
            score += float(one) if word in model.vocabulary else -6.0
        expected[text] = acoustic + 0.7 * score + 0.4 * len(words)
    check_exhaustive(tokenizer, [fusion], log_probs, expected)


def test_with_a_language_model_of_tokens_equal_to_exhaustive_search(tmp_path: Path) -> None:
    model = build(tmp_path, [["A", "|", "A", "B"], ["B", "A", "|"], ["A", "B", "B", "A"]], 3)
    fusion = TokenNGram(model, LETTERS, weight=0.5, token_bonus=0.3)
    log_probs = random_log_probs(6, 5, LETTERS.size)
    names = ["", "|", "A", "B"]
    expected = {
        text: acoustic + 0.5 * float(model.score_sentences([[names[id] for id in text]])[0]) + 0.3 * len(text)
        for text, acoustic in all_texts(log_probs[0], LETTERS.blank_id).items()
    }
    check_exhaustive(LETTERS, [fusion], log_probs, expected)


def boost(words: list[str], phrases: dict[str, float]) -> float:
    """What hotwords are worth: each whole phrase its letters, phrases inside one another the larger."""
    score, place = 0.0, 0
    while place < len(words):
        fits = [phrase.split() for phrase in phrases if words[place : place + len(phrase.split())] == phrase.split()]
        longest = max(fits, key=len, default=None)
        if longest is None:
            place += 1
        else:
            phrase = " ".join(longest)
            score += phrases[phrase] * sum(map(len, longest))
            place += len(longest)
    return score


@pytest.mark.parametrize(
    "phrases",
    [
        {"AB": 1.5},
        {"A B": 2.0, "BA": 1.0},
        {"A": 0.5, "A B": 0.5, "B B": 1.0},  # a phrase begins another
        {"A B A": 1.0, "B": 1.0},  # a phrase lies inside another
    ],
)
def test_hotwords_gain_only_where_they_are_whole(phrases: dict[str, float]) -> None:
    fusion = Hotwords(phrases, LETTERS)
    log_probs = random_log_probs(7, 6, LETTERS.size)
    expected = {}
    for text, acoustic in all_texts(log_probs[0], LETTERS.blank_id).items():
        words = words_of(LETTERS, text)
        # Phrases that overlap would both count, which `boost` does not.
        if "B B B" not in " ".join(words) and "A B B" not in " ".join(words):
            expected[text] = acoustic + boost(words, phrases)
    check_exhaustive(LETTERS, [fusion], log_probs, expected, every=False)


def check_exhaustive(
    tokenizer: CTCTokenizer,
    fusions: list[Fusion],
    log_probs: torch.Tensor,
    expected: dict[tuple[int, ...], float],
    every: bool = True,
) -> None:
    search = PrefixBeamSearch(tokenizer.blank_id, 3000, fusions=fusions)
    found = search(log_probs, torch.tensor([log_probs.shape[1]]), n_best=3000)[0]
    scores = {tuple(hypothesis.tokens): hypothesis.score for hypothesis in found}
    assert len(scores) == len(found)
    if every:
        assert scores.keys() == expected.keys()
        assert max(expected, key=expected.__getitem__) == tuple(found[0].tokens)
    for text, score in expected.items():
        if tokenizer is not LETTERS or (1, 1) not in pairwise(text):
            assert scores[text] == pytest.approx(score, abs=1e-4), tokenizer.decode(text)


fusion_sets = ["none", "words", "tokens", "hotwords", "all"]


def fusions_for(name: str, tmp_path: Path) -> list[Fusion]:
    words = build(tmp_path, [["A", "AB", "A"], ["AB", "BA"]], 3)
    tokens = build(tmp_path, [["A", "|", "A", "B"], ["B", "A"]], 3)
    each: dict[str, list[Fusion]] = {
        "none": [],
        "words": [WordNGram(words, LETTERS)],
        "tokens": [TokenNGram(tokens, LETTERS)],
        "hotwords": [Hotwords(["AB A", "BB"], LETTERS)],
    }
    return each[name] if name in each else [fusion for fusions in each.values() for fusion in fusions]


@pytest.mark.parametrize("name", fusion_sets)
def test_alone_padded_in_a_batch_or_in_pieces_the_texts_are_the_same(name: str, tmp_path: Path) -> None:
    fusions = fusions_for(name, tmp_path)
    search = PrefixBeamSearch(0, 8, tokens_per_frame=3, fusions=fusions)
    lengths = torch.tensor([23, 0, 9, 17])
    log_probs = random_log_probs(3, 26, 4, rows=4)
    together = search(log_probs, lengths, n_best=4)
    for row, length in enumerate(lengths.tolist()):
        alone = search(log_probs[row : row + 1, :length], torch.tensor([length]), n_best=4)[0]
        assert [h.tokens for h in alone] == [h.tokens for h in together[row]]
        assert [h.score for h in alone] == pytest.approx([h.score for h in together[row]])
    state = search.start(4, log_probs.device, log_probs.dtype)
    done = torch.zeros(4, dtype=torch.int64)
    for sizes in ([1, 0, 3, 2], [12, 0, 0, 9], [0, 0, 0, 0], [10, 0, 6, 6]):  # windows of any length, padded
        window = torch.zeros(4, 13, 4, dtype=log_probs.dtype)
        for row, size in enumerate(sizes):
            window[row, :size] = log_probs[row, done[row] : done[row] + size]
        search.advance(state, window, torch.tensor(sizes))
        state = _replayed(search, state)
        done += torch.tensor(sizes)
    assert torch.equal(done, lengths)
    assert _rounded(search.finish(state, n_best=4)) == _rounded(together)
    assert together[1] == [Hypothesis([], [], together[1][0].score, 0.0)]


def _replayed(search: PrefixBeamSearch, state: BeamState) -> BeamState:
    """The state as a captured graph would hand it on: copied into the tensors of another one."""
    other = search.start(len(state.blank), state.blank.device, state.blank.dtype)
    for to, tensor in zip(other.fields(), state.fields(), strict=True):
        to.copy_(tensor)
    other.history = state.history
    return other


def _rounded(found: list[list[Hypothesis]]) -> list:
    return [[(h.tokens, h.frames, round(h.score, 6)) for h in row] for row in found]


def test_frames_in_which_tokens_appear_grow_and_are_where_they_are_loud() -> None:
    log_probs = torch.full((1, 12, 4), -9.0)
    log_probs[0, :, 0] = 0.0
    for frame, token in ((2, 2), (5, 2), (9, 3)):
        log_probs[0, frame] = torch.tensor([-9.0, -9.0, -9.0, -9.0])
        log_probs[0, frame, token] = 0.0
    ((best,),) = PrefixBeamSearch(0, 4)(log_probs.log_softmax(-1), torch.tensor([12]))
    assert best.tokens == [2, 2, 3]
    assert best.frames == [2, 5, 9]


def test_banned_tokens_are_never_written() -> None:
    log_probs = random_log_probs(1, 12, 5, rows=3)
    found = PrefixBeamSearch(0, 16, banned=[2, 3])(log_probs, torch.tensor([12, 12, 12]), n_best=16)
    assert all({2, 3}.isdisjoint(hypothesis.tokens) for row in found for hypothesis in row)


def test_an_expected_word_and_a_language_model_decide_what_the_sound_leaves_open(tmp_path: Path) -> None:
    even = torch.full((1, 8, 4), -12.0)
    for frame, labels in enumerate([(2,), (0,), (2, 3), (0,), (1,), (2, 3), (0,), (2,)]):
        even[0, frame, list(labels)] = 0.0
    even = even.log_softmax(-1)
    length = torch.tensor([8])

    def text(*fusions: Fusion) -> str:
        return LETTERS.decode(PrefixBeamSearch(0, 16, fusions=fusions)(even, length)[0][0].tokens)

    assert text(Hotwords(["AB", "BA"], LETTERS)) == "AB BA"
    assert text(Hotwords({"AB BA": 1.0, "AA": 0.6}, LETTERS)) == "AB BA"
    assert text(WordNGram(build(tmp_path, [["ab", "aa"], ["ab", "aa"], ["aa", "ba"]], 2), LETTERS)) == "AB AA"


def test_what_cannot_work_is_named(tmp_path: Path) -> None:
    model = build(tmp_path, [["xyz"]], 2)
    with pytest.raises(UsageError, match="knows no word"):
        WordNGram(model, LETTERS)
    with pytest.raises(UsageError, match="knows none"):
        TokenNGram(model, LETTERS)
    with pytest.raises(UsageError, match="'A7'"):
        Hotwords(["A7"], LETTERS)
    with pytest.raises(UsageError, match="no spaces"):
        WordNGram(model, CTCTokenizer({"<pad>": 0, "X": 1}, delimiter=None))
