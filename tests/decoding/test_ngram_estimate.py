"""Modified Kneser–Ney: equal to the formulas written out, a probability everywhere, and better than less context."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.cli.main import main
from stapes.decoding import ngram_estimate
from stapes.decoding.ngram import NGramModel, read_arpa
from stapes.decoding.ngram_estimate import Estimate, estimate, read_lines, write_arpa
from stapes.errors import UsageError

TEXT = Path(__file__).parents[3] / "shared" / "data" / "text" / "ljspeech.txt"


def sentences(seed: int, count: int = 150, words: int = 12) -> list[list[str]]:
    """Text with frequent and rare words, so that every count of counts is there."""
    draw = random.Random(seed)
    names = [f"w{n}" for n in range(words)]
    weights = [1 / (n + 1) for n in range(words)]
    return [draw.choices(names, weights, k=draw.randint(1, 7)) for _ in range(count)]


def built(tmp_path: Path, model: Estimate) -> NGramModel:
    write_arpa(model, tmp_path / "model.arpa")
    return read_arpa(tmp_path / "model.arpa")


class Literal:
    """Chen & Goodman's equations (without pruning), with dictionaries and recursion."""

    def __init__(self, text: Sequence[Sequence[str]], order: int) -> None:
        self.order = order
        padded = [["<s>"] * (order - 1) + [*words, "</s>"] for words in text]
        raw = [Counter[tuple[str, ...]]() for _ in range(order + 1)]
        for words in padded:
            for n in range(1, order + 1):
                for end in range(max(order - 1, n - 1), len(words)):
                    raw[n][tuple(words[end - n + 1 : end + 1])] += 1
        self.counts: list[dict[tuple[str, ...], int]] = [{} for _ in range(order + 1)]
        for n in range(1, order + 1):
            for ngram, count in raw[n].items():
                if ngram[:2] == ("<s>", "<s>"):
                    continue
                if n < order and ngram[0] != "<s>":
                    count = len({longer[0] for longer in raw[n + 1] if longer[1:] == ngram})
                self.counts[n][ngram] = count
        self.discounts = [[0.0] * 4 for _ in range(order + 1)]
        for n in range(1, order + 1):
            t = [0] + [sum(c == times for c in self.counts[n].values()) for times in (1, 2, 3, 4)]
            if all(t[1:4]):
                y = t[1] / (t[1] + 2 * t[2])
                self.discounts[n] = [0.0] + [k - (k + 1) * y * t[k + 1] / t[k] for k in (1, 2, 3)]
            if not all(t[1:4]) or not all(0 < d <= k for k, d in enumerate(self.discounts[n][1:], 1)):
                self.discounts[n] = [0.0, 0.5, 1.0, 1.5]
        self.words = {"<unk>", "</s>"} | {word for words in text for word in words}

    def probability(self, history: tuple[str, ...], word: str) -> float:
        n = len(history) + 1
        if n == 0:
            return 1 / len(self.words)
        discounts = self.discounts[n]
        following = {ngram[-1]: c for ngram, c in self.counts[n].items() if ngram[:-1] == history}
        lower = self.probability(history[1:], word) if n > 1 else 1 / len(self.words)
        if not following:
            return lower
        total = sum(following.values())
        own = max(0, following.get(word, 0) - discounts[min(3, following.get(word, 0))])
        gamma = sum(discounts[min(3, count)] for count in following.values()) / total
        return own / total + gamma * lower


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_equations(tmp_path: Path, order: int) -> None:
    text = sentences(order)
    literal = Literal(text, order)
    model = built(tmp_path, estimate(text, order))
    draw = random.Random(0)
    names = sorted(literal.words)
    for _ in range(200):
        history = ["<s>", *draw.choices([n for n in names if n not in ("</s>", "<unk>")], k=draw.randint(0, 4))]
        context = torch.tensor(model.start)
        for word in model.ids(history[1:]):
            context = model.score(context, torch.tensor(word))[1]
        word = draw.choice(names)
        score, _ = model.score(context, torch.tensor(model.vocabulary[word]))
        short = tuple(history[max(0, len(history) - order + 1) :]) if order > 1 else ()
        assert float(score) == pytest.approx(math.log(literal.probability(short, word)), abs=2e-5)


settings = {
    "all n-grams": {},
    "pruned": {"prune": (0, 0, 1)},
    "pruned hard": {"prune": (0, 2)},
    "rare words unknown": {"min_count": 4},
    "both": {"prune": (0, 1, 1, 2), "min_count": 2},
}


@pytest.mark.parametrize("options", settings.values(), ids=settings.keys())
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_sum_to_one_after_every_context(tmp_path: Path, options: dict, order: int) -> None:
    model = built(tmp_path, estimate(sentences(7, 300, 40), order, **options))
    predicted = torch.tensor([id for word, id in model.vocabulary.items() if word != "<s>"])
    contexts = torch.arange(len(model.backoff))
    scores, _ = model.score(contexts[:, None], predicted[None, :])
    np.testing.assert_allclose(scores.double().exp().sum(dim=1).numpy(), 1.0, atol=2e-5)


def test_pruned_n_grams_are_gone_and_nothing_that_others_need_is(tmp_path: Path) -> None:
    text = sentences(3, 300, 40)
    whole, pruned = estimate(text, 4), estimate(text, 4, prune=(0, 0, 1))
    sizes = [[len(ngrams.rows) for ngrams in model.orders] for model in (whole, pruned)]
    assert sizes[1][:2] == sizes[0][:2]
    assert 0 < sizes[1][2] < sizes[0][2]
    assert 0 < sizes[1][3] < sizes[0][3]
    for shorter, longer in zip(pruned.orders, pruned.orders[1:], strict=False):
        listed = set(map(tuple, shorter.rows.tolist()))
        assert all(tuple(row[:-1]) in listed and tuple(row[1:]) in listed for row in longer.rows.tolist())


def test_text_in_blocks_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    text = sentences(11)
    whole = estimate(text, 3)
    monkeypatch.setattr(ngram_estimate, "_BLOCK", 50)
    parts = estimate(iter(text), 3)
    assert parts.words == whole.words
    for a, b in zip(whole.orders, parts.orders, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.logprob, b.logprob)
        np.testing.assert_array_equal(a.backoff, b.backoff)


def test_one_sentence_is_enough(tmp_path: Path) -> None:
    found = estimate([["hello"]], 3)
    assert found.fallbacks == [1, 2, 3]
    model = built(tmp_path, found)
    known, unknown = model.score_sentences([["hello"], ["goodbye"]]).tolist()
    assert known > unknown > -20


def test_markers_in_the_text_are_what_they_mean(tmp_path: Path) -> None:
    with_markers = estimate([["<s>", "a", "<unk>", "b", "</s>"], ["</s>"]], 2)
    assert with_markers.sentences == 1
    assert with_markers.words == ["<unk>", "<s>", "</s>", "a", "b"]
    model = built(tmp_path, with_markers)
    assert model.score_sentences([["a", "zebra", "b"]]) > model.score_sentences([["a", "b", "zebra"]])


@pytest.mark.skipif(not TEXT.exists(), reason="needs ../shared/data/text")
@pytest.mark.data
def test_more_context_predicts_real_text_better(tmp_path: Path) -> None:
    lines = [line.lower().split() for line in read_lines([TEXT])][::3]
    train, test = lines[100:], lines[:100]
    tokens = sum(len(words) + 1 for words in test)
    perplexity = [
        float((-built(tmp_path, estimate(train, order, min_count=2)).score_sentences(test).sum() / tokens).exp())
        for order in (1, 2, 3)
    ]
    assert perplexity[0] > 1.5 * perplexity[1]
    assert perplexity[1] > perplexity[2]
    assert 50 < perplexity[2] < 400


def test_wrong_numbers_and_empty_texts_are_named() -> None:
    for options, said in (
        ({"order": 0}, "--order"),
        ({"prune": (1,)}, "--prune"),
        ({"prune": (0, 2, 1)}, "--prune"),
        ({"min_count": 0}, "--min-count"),
    ):
        with pytest.raises(UsageError, match=said):
            estimate([["a"]], **options)
    with pytest.raises(UsageError, match="no words"):
        estimate([[], ["<s>"]])


def test_the_command_builds_what_a_model_would_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["<pad>", "<unk>", "|", "'", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(tokens)}))
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress("It’s well-known, (isn't it?)\nYes!\n\n".encode()))
    text, out = str(tmp_path / "text.txt.gz"), str(tmp_path / "out" / "words.arpa.gz")
    assert main(["lm", "build", text, "-o", out, "--model", str(tmp_path), "--order", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["sentences"], said["words"]) == (2, 6)
    model = read_arpa(out)
    assert set(model.vocabulary) == {"<unk>", "<s>", "</s>", "IT'S", "WELL", "KNOWN", "ISN'T", "IT", "YES"}

    assert main(["lm", "build", text, "-o", out, "--model", str(tmp_path), "--units", "tokens"]) == 0
    assert {"|", "'", "K", "<s>"} <= set(read_arpa(out).vocabulary)
    assert main(["lm", "build", text, "-o", out, "--units", "tokens"]) == 2
    assert main(["lm", "build", text, "-o", out, "--prune", "0,x"]) == 2
    assert main(["lm", "build", str(tmp_path / "none.txt"), "-o", out]) == 2
    assert main(["lm", "build", text, "-o", str(tmp_path / "vocab.json" / "x.arpa")]) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["words.arpa.gz"]
