"""Rates, intervals and tests between systems say what the statistics say they do."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import jiwer
import numpy as np
import pytest
from fake_peer import damage, rows

from stapes.errors import UsageError
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.scoring import (
    MIN_SPEAKERS,
    Tally,
    character_errors,
    matched_pairs,
    paired_bootstrap,
    ratio_interval,
    repeated_ngrams,
    word_errors,
)
from stapes.evaluation.snr import RANGE, estimate_snr

_PIECES = """
one oh two twenty three hundred thousand point double and dollars cents £5 $3.50 20% 1960s 274th Mr. won't it's colour
(noise) [x] uh hmm é ø 3,000 per cent minus five six the cause kinda dunno St. ha.ha ¿Qué 日本語 हिन्दी ß
"""
DATA = Path(__file__).parents[3] / "shared" / "data"


def test_counts_of_utterances_add_up_to_jiwer_over_the_whole_set() -> None:
    random_ = random.Random(0)
    spoken = [row.text for row in rows(300)]
    written = [damage(text, random_) for text in spoken]
    for ours, theirs in (
        (word_errors, jiwer.process_words(spoken, written)),
        (character_errors, jiwer.process_characters(spoken, written)),
    ):
        total = [
            sum(counts) for counts in zip(*(ours(a, b) for a, b in zip(spoken, written, strict=True)), strict=True)
        ]
        assert total == [theirs.hits, theirs.substitutions, theirs.deletions, theirs.insertions]


def test_an_empty_reference_counts_every_word_as_inserted() -> None:
    assert word_errors("", "two words") == (0, 0, 0, 2)
    assert word_errors("two words", "") == (0, 0, 2, 0)
    assert word_errors("", "") == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["english", "basic", "basic, by character"])
def test_normalisers_are_those_of_whisper(name: str) -> None:
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer as Packaged

    theirs = {
        "english": EnglishTextNormalizer(Packaged().standardize_spellings.mapping),
        "basic": BasicTextNormalizer(),
        "basic, by character": BasicTextNormalizer(split_letters=True),
    }[name]
    pieces = _PIECES.split()
    random_ = random.Random(0)
    texts = [" ".join(random_.choices(pieces, k=8)) for _ in range(1500)]
    if DATA.is_dir():
        for corpus in ("librispeech", "speechocean762", "commonvoice"):
            with (DATA / corpus / "manifest.jsonl").open(encoding="utf-8") as lines:
                texts += [json.loads(line)["text"] for line in lines][::5]
    different = [text for text in texts if normalize(text, name) != " ".join(theirs(text).split())]
    assert different == []


def test_auto_is_english_for_english_and_characters_where_there_are_no_spaces() -> None:
    assert [choose("auto", language) for language in ("en", None, "de", "ja")] == [
        "english",
        "english",
        "basic",
        "basic, by character",
    ]
    assert normalize(" Any  TEXT, ", "none") == "Any TEXT,"
    with pytest.raises(UsageError, match="--normalizer is 'fancy': say auto, english, basic, none"):
        choose("fancy", "en")


def draw_speakers(random_: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors and words of speakers whose error rates and amounts of speech both differ, by factors of two and more."""
    rates = np.minimum(0.9, 0.06 * np.exp(0.6 * random_.normal(size=count)))
    words = 1 + random_.poisson(240 * np.exp(0.3 * random_.normal(size=count)))
    return random_.binomial(words, rates), words


@pytest.mark.parametrize("speakers", [30, 60])
def test_intervals_cover_the_truth_in_95_percent_of_simulations(speakers: int) -> None:
    # Among 1,500 simulations the binomial standard error of a coverage of 95 % is 0.56 %.
    simulations, covered = 1500, 0
    random_ = np.random.default_rng(7)
    errors, words = draw_speakers(random_, 2_000_000)
    truth = errors.sum() / words.sum()
    for seed in range(simulations):
        low, high = ratio_interval(*draw_speakers(random_, speakers), seed=seed, resamples=1000)
        assert low is not None
        assert high is not None
        covered += low <= truth <= high
    assert 0.93 <= covered / simulations <= 0.97, covered / simulations


def test_few_or_unknown_speakers_give_an_interval_by_utterance_and_the_reason() -> None:
    def tally(speakers: int, unknown: int = 0) -> Tally:
        out = Tally()
        for i in range(10 * speakers):
            out.add(i % 4, 10, f"speaker-{i % speakers}")
        for _ in range(unknown):
            out.add(1, 10)
        return out

    assert tally(MIN_SPEAKERS).interval().method == "bootstrap by speaker"
    few = tally(MIN_SPEAKERS - 1).interval()
    assert few.method == "bootstrap by utterance"
    assert "only 19 speakers" in few.why
    assert "3 utterances are of unknown speakers" in tally(MIN_SPEAKERS, unknown=3).interval().why


def test_intervals_hold_the_value_are_reproducible_and_do_without_spread_or_words() -> None:
    tally = Tally()
    random_ = random.Random(0)
    for _ in range(500):
        words = random_.randint(1, 30)
        tally.add(min(words, int(random_.expovariate(0.5))), words)
    first, again = tally.interval(seed=3), tally.interval(seed=3)
    assert first == again
    assert first.low is not None
    assert first.value is not None
    assert first.high is not None
    assert 0 < first.low < first.value < first.high < 1
    perfect = Tally()
    for _ in range(30):
        perfect.add(0, 10)
    assert (perfect.interval().low, perfect.interval().high) == (0.0, 0.0)
    silent = Tally()
    silent.add(2, 0)
    assert (silent.interval().value, silent.interval().low) == (None, None)


def test_intervals_of_few_utterances_stay_among_their_rates() -> None:
    low, high = ratio_interval(np.array([0, 0, 3, 0, 1, 0]), np.array([4, 6, 9, 5, 4, 4]))
    assert low is not None
    assert high is not None
    assert 0 <= low < 4 / 32 < high <= 3 / 9
    assert ratio_interval(np.array([1]), np.array([5])) == (None, None)


def test_matched_pairs_is_the_test_by_hand_and_finds_only_what_is_there() -> None:
    differences = np.array([1, 0, 2, 0, 0, 1, -1, 3, 0, 1])
    found = matched_pairs(differences + 5, np.full(10, 5))
    z = differences.mean() / (differences.std(ddof=1) / math.sqrt(10))
    assert found.difference == pytest.approx(0.7)
    assert found.z == pytest.approx(z)
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)))
    same = matched_pairs([3, 1, 2], [3, 1, 2])
    assert (same.difference, same.z, same.p) == (0.0, 0.0, 1.0)
    with pytest.raises(UsageError, match="cannot be paired"):
        matched_pairs([1], [1, 2])


def test_paired_tests_reject_equal_systems_in_five_percent_of_simulations() -> None:
    # 600 simulations: standard error 0.9 %.
    random_ = np.random.default_rng(0)
    words = np.full(200, 10)
    rejected = np.zeros(2)
    for seed in range(600):
        hard = random_.beta(1, 12, size=200)
        a, b = random_.binomial(words, hard), random_.binomial(words, hard)
        bootstrap = paired_bootstrap(a, b, words, seed=seed, resamples=400)
        rejected += [matched_pairs(a, b).p < 0.05, not bootstrap.low <= 0 <= bootstrap.high]
    assert (np.abs(rejected / 600 - 0.05) < 0.03).all(), rejected / 600


def test_paired_bootstrap_sees_through_the_hardness_of_utterances_and_knows_speakers() -> None:
    random_ = np.random.default_rng(0)
    words = np.full(400, 20)
    hard = random_.beta(1, 5, size=400)
    a = random_.binomial(words, hard)
    b = np.maximum(0, a - (random_.random(400) < 0.3))
    found = paired_bootstrap(a, b, words, [f"speaker-{i % 40}" for i in range(400)])
    assert found.method == "bootstrap by speaker"
    assert 0 < found.low < found.difference < found.high
    assert found.p < 0.01
    assert found.difference == pytest.approx((a.sum() - b.sum()) / words.sum())
    assert paired_bootstrap(a, b, words, ["one"] * 400).method == "bootstrap by utterance"


@pytest.mark.parametrize(
    ("reference", "hypothesis", "count"),
    [
        ("a b c d", "a b c d", 0),
        ("thank you", "thank you very much " * 3, 5),
        ("go go go go go go", "go go go go go go", 0),
        ("row the boat row the boat row", "row the boat row the boat row", 0),
        ("日 本 語", " ".join("これはこれはこれはこれはこれは"), 3),
    ],
)
def test_loops_are_counted_where_nobody_said_them(reference: str, hypothesis: str, count: int) -> None:
    assert repeated_ngrams(reference, " ".join(hypothesis.split())) == count


@pytest.mark.parametrize("snr", [0, 5, 10, 20, 30])
def test_snr_of_bursts_in_noise_is_found_within_two_decibels(snr: float) -> None:
    random_ = np.random.default_rng(0)
    time = np.arange(16_000 * 6) / 16_000
    voice = np.sin(2 * np.pi * 180 * time) * (np.sin(2 * np.pi * 0.8 * time) > -0.2)
    noise = random_.normal(size=len(time))
    noise *= math.sqrt(np.mean(voice[voice != 0] ** 2)) / 10 ** (snr / 20)
    estimate = estimate_snr((0.1 * (voice + noise)).astype(np.float32))
    assert estimate == pytest.approx(snr, abs=2.0)


def test_snr_of_silence_is_unknown_and_of_noise_is_lowest() -> None:
    assert estimate_snr(np.zeros(16_000, np.float32)) is None
    assert estimate_snr(np.ones(100, np.float32)) is None
    assert estimate_snr(np.random.default_rng(0).normal(size=32_000).astype(np.float32)) == RANGE[0]
