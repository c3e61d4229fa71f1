"""A back-off model says what its file says, whoever wrote it, for one hypothesis or many."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.decoding.ngram import read_arpa
from stapes.errors import ModelError

# By hand, with the quirks: text before \data\, spaces around =, missing back-off weights, no <unk>, -inf, and a
# 3-gram (a b c) whose context (a b) is not among the 2-grams.
QUIRKY = """made by hand

\\data\\
ngram 1 = 5
ngram 2=3
ngram 3=2

\\1-grams:
-99\t<s>\t-0.5
-0.8\ta\t-0.3
-0.9 b -0.2
-1.0\tc
-inf\t</s>

\\2-grams:
-0.4\t<s> a\t-0.1
-0.6\tb c
-0.7\tc a\t-0.25

\\3-grams:
-0.2\t<s> a b
-0.3\ta b c

\\end\\
"""


def literal_score(text: str, history: tuple[str, ...], word: str) -> float:
    """Decadic log-probability straight from the lines of an ARPA file."""
    probability: dict[tuple[str, ...], float] = {}
    backoff: dict[tuple[str, ...], float] = {}
    order = 0
    for line in text.splitlines():
        if line.endswith("-grams:"):
            order = int(line[1])
        elif order and line.strip() and not line.startswith("\\"):
            fields = line.split()
            ngram = tuple(fields[1 : order + 1])
            probability[ngram] = max(float(fields[0]), -198.0)
            backoff[ngram] = float(fields[order + 1]) if len(fields) > order + 1 else 0.0
    longest = max(map(len, probability)) - 1

    def score(context: tuple[str, ...]) -> float:
        if (*context, word) in probability:
            return probability[*context, word]
        return backoff.get(context, 0.0) + score(context[1:])

    return score(history[max(0, len(history) - longest) :])


def read(tmp_path: Path, text: str | bytes, name: str = "model.arpa") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def all_histories(words: list[str], longest: int) -> list[tuple[str, ...]]:
    histories = [("<s>",)]
    for history in histories:
        if len(history) <= longest:
            histories += [(*history, word) for word in words]
    return histories


@pytest.mark.parametrize("packed", [False, True])
def test_scores_are_those_of_the_file(tmp_path: Path, packed: bool) -> None:
    path = read(tmp_path, gzip.compress(QUIRKY.encode()) if packed else QUIRKY)
    model = read_arpa(path)
    assert model.order == 3
    assert not model.knows_unknown
    histories = all_histories(["a", "b", "c"], 4)
    contexts = []
    for history in histories:
        context = torch.tensor(model.start)
        for word in model.ids(history[1:]):
            _, context = model.score(context, torch.tensor(word))
        contexts.append(int(context))
    words = ["a", "b", "c", "</s>"]
    scores, _ = model.score(torch.tensor(contexts)[:, None], torch.tensor(model.ids(words))[None, :])
    expected = [[literal_score(QUIRKY, history, word) * math.log(10) for word in words] for history in histories]
    np.testing.assert_allclose(scores.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def test_sentences_score_the_same_alone_and_together(tmp_path: Path) -> None:
    model = read_arpa(read(tmp_path, QUIRKY))
    sentences = [["a", "b", "c"], [], ["c"], ["b", "zebra", "a", "a", "b", "c"]]
    together = model.score_sentences(sentences)
    alone = torch.cat([model.score_sentences([sentence]) for sentence in sentences])
    split = model.score_sentences(sentences, batch=3)
    assert torch.equal(together, alone)
    assert torch.equal(together, split)


def test_an_unknown_word_is_less_likely_than_any_other_where_the_file_does_not_say(tmp_path: Path) -> None:
    model = read_arpa(read(tmp_path, QUIRKY))
    root = torch.tensor(0)
    score, _ = model.score(root, torch.tensor(model.ids(["zebra"])[0]))
    assert float(score) == pytest.approx((-1.0 - 1.0) * math.log(10))


def test_capital_unk_is_the_unknown_word(tmp_path: Path) -> None:
    text = "\\data\\\nngram 1=3\n\n\\1-grams:\n-1.5\t<UNK>\n-0.2\ta\n-0.5\t</s>\n\n\\end\\\n"
    model = read_arpa(read(tmp_path, text))
    assert model.order == 1
    assert model.knows_unknown
    assert model.start == 0
    sentence = model.score_sentences([["zebra", "a"]])
    assert float(sentence[0]) == pytest.approx((-1.5 - 0.2 - 0.5) * math.log(10), rel=1e-6)


def test_words_may_hold_any_byte_but_ascii_white_space(tmp_path: Path) -> None:
    words = ["caf\u00e9", "a\u00a0b", "\u3000", "\udc80x"]
    lines = "".join(f"-{n + 1}\t{word}\n" for n, word in enumerate(words)).encode("utf-8", "surrogateescape")
    model = read_arpa(read(tmp_path, b"\\data\\\nngram 1=4\n\n\\1-grams:\n" + lines + b"\n\\end\\\n"))
    scores, _ = model.score(torch.tensor(0), torch.tensor(model.ids(words)))
    assert scores.tolist() == pytest.approx([-(n + 1) * math.log(10) for n in range(4)], rel=1e-6)


damaged = {
    "no ARPA file": ("hello\n", "no \\data\\"),
    "no counts": ("\\data\\\n\n\\1-grams:\n", "no count"),
    "cut off": (QUIRKY.replace("\\end\\\n", ""), "cut off"),
    "cut off in the middle": (QUIRKY[: QUIRKY.index("-0.7")], "promises 3"),
    "a section is missing": (QUIRKY[: QUIRKY.index("\\3-grams")] + "\\end\\\n", "3-grams are missing"),
    "a word that no 1-gram has": (QUIRKY.replace("b c\n-0.7", "b zebra\n-0.7"), "'zebra'"),
    "no number": (QUIRKY.replace("-0.6", "minus"), "line 17"),
    "too few words": (QUIRKY.replace("a b c", "b"), "no 3-gram"),
    "a probability above one": (QUIRKY.replace("-0.6", "0.6"), "above 1"),
    "not a number": (QUIRKY.replace("-0.6", "nan"), "above 1"),
    "twice": (QUIRKY.replace("c a", "b c"), "twice"),
    "a word twice": (QUIRKY.replace("\tc\n\n", "\tc\n").replace("-1.0\tc", "-1.0\ta"), "different 1-grams"),
}


@pytest.mark.parametrize(("text", "said"), damaged.values(), ids=damaged.keys())
def test_damage_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = read(tmp_path, text)
    with pytest.raises(ModelError) as caught:
        read_arpa(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_arpa(tmp_path / "none.arpa")
    with pytest.raises(ModelError, match="binary"):
        read_arpa(read(tmp_path, b"mmap lm http://kheafield.com/code format version 5\n\0\0"))
    with pytest.raises(ModelError, match="cannot be read"):
        read_arpa(read(tmp_path, gzip.compress(QUIRKY.encode())[:60]))
