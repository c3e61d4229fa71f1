"""Vocabularies from texts: characters and learnt parts, spelt and read back, as transformers reads them too."""

from __future__ import annotations

import pytest

from stapes.data.vocabulary import build_vocabulary
from stapes.errors import UsageError

TEXTS = [f"the {adjective} {noun} was seen near the {place}" for adjective in ("quiet", "quick", "queer")
         for noun in ("painter", "walker", "baker") for place in ("station", "nation", "ration")]  # fmt: skip


@pytest.mark.parametrize(("kind", "size", "share"), [("char", None, 1), ("bpe", 60, 0.5), ("unigram", 60, 0.95)])
def test_every_text_is_spelt_and_read_back(kind, size, share):
    tokenizer = build_vocabulary(TEXTS, kind, size)
    assert tokenizer.blank_id == 0
    assert list(tokenizer.vocabulary)[:5] == ["<pad>", "<s>", "</s>", "<unk>", "|"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.unknown_id not in ids
        assert tokenizer.decode(ids) == text
    assert build_vocabulary(reversed(TEXTS), kind, size).vocabulary == tokenizer.vocabulary
    if kind != "char":
        assert tokenizer.size <= 60
        characters = build_vocabulary(TEXTS)
        assert sum(len(tokenizer.encode(t)) for t in TEXTS) < share * sum(len(characters.encode(t)) for t in TEXTS)


def test_transformers_reads_the_same(tmp_path):
    from transformers import Wav2Vec2CTCTokenizer

    tokenizer = build_vocabulary(TEXTS, "bpe", 60)
    tokenizer.save(tmp_path)
    theirs = Wav2Vec2CTCTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:5]:
        assert theirs.decode(tokenizer.encode(text), group_tokens=False) == text


def test_rare_characters_can_be_left_out_and_scripts_without_spaces_need_no_mark():
    tokenizer = build_vocabulary([*TEXTS, "ž"], min_count=2)
    assert tokenizer.encode("ž") == [tokenizer.unknown_id]
    assert "|" not in build_vocabulary(["你好", "世界"]).vocabulary


@pytest.mark.parametrize(
    ("texts", "kind", "size", "words"),
    [
        ([], "char", None, "no texts"),
        (TEXTS, "bpe", 10, "no room"),
        (TEXTS, "word", None, "char, bpe, unigram"),
        (["a | b"], "char", None, "marks spaces"),
    ],
)
def test_what_makes_no_sense_is_refused(texts, kind, size, words):
    with pytest.raises(UsageError, match=words):
        build_vocabulary(texts, kind, size)
