"""The tokens of CTC models: what transformers reads and writes, and what it gets wrong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Wav2Vec2CTCTokenizer

from stapes.errors import ModelError, UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer

MARKERS = ["<pad>", "<s>", "</s>", "<unk>", "|"]
CAPITALS = {token: id for id, token in enumerate([*MARKERS, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"])}
SUBWORDS = {token: id for id, token in enumerate([*MARKERS, *"abcdefghinrst", "in", "ing", "ter", "|the", "sch"])}


def write(folder: Path, vocabulary: dict, **settings: Any) -> Path:
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Wav2Vec2CTCTokenizer]:
    """With and without do_lower_case."""
    file = write(tmp_path_factory.mktemp("theirs"), CAPITALS) / "vocab.json"
    return {lower: Wav2Vec2CTCTokenizer(str(file), do_lower_case=lower) for lower in (False, True)}


WORDS = st.lists(st.text("ABCXYZ'", min_size=1, max_size=6), max_size=6).map(" ".join)


class TestAsTransformers:
    @given(WORDS, st.booleans())
    @settings(max_examples=50, deadline=None)
    def test_text_to_tokens_and_back(self, theirs, text, lower_case):
        tokenizer = CTCTokenizer(CAPITALS, lower_case=lower_case)
        written = text.lower() if lower_case else text
        ids = tokenizer.encode(written)
        assert ids == theirs[lower_case](written).input_ids
        assert tokenizer.decode(ids) == theirs[lower_case].decode(ids, group_tokens=False) == written

    @pytest.mark.parametrize("lower_case", [False, True])
    def test_characters_without_a_token(self, theirs, lower_case):
        tokenizer = CTCTokenizer(CAPITALS, lower_case=lower_case)
        assert tokenizer.encode("A4 É") == theirs[lower_case]("A4 É").input_ids

    def test_what_we_save(self, tmp_path):
        tokenizer = CTCTokenizer(CAPITALS, lower_case=True, delimiter_text="_")
        tokenizer.save(tmp_path)
        loaded = Wav2Vec2CTCTokenizer.from_pretrained(tmp_path)
        assert loaded.get_vocab() == CAPITALS
        assert (loaded.pad_token_id, loaded.unk_token_id, loaded.word_delimiter_token_id) == (0, 3, 4)
        ids = tokenizer.encode("to be")
        assert loaded.decode(ids) == tokenizer.decode(ids) == "to_be"
        assert CTCTokenizer.from_folder(tmp_path) == tokenizer

    def test_markers_that_the_vocabulary_has_not_are_not_added(self, tmp_path):
        vocabulary = {"_": 0, " ": 1, "a": 2, "b": 3}
        tokenizer = CTCTokenizer(vocabulary, blank="_", delimiter=" ")
        tokenizer.save(tmp_path)
        loaded = Wav2Vec2CTCTokenizer.from_pretrained(tmp_path)
        assert len(loaded) == 4
        assert loaded("a b").input_ids == tokenizer.encode("a b") == [2, 1, 3]

    def test_what_it_saves(self, theirs, tmp_path):
        theirs[True].save_pretrained(tmp_path)
        assert CTCTokenizer.from_folder(tmp_path) == CTCTokenizer(CAPITALS, lower_case=True)


class TestText:
    def test_letters_in_the_other_case_are_spelt_with_what_there_is(self):
        assert CTCTokenizer(CAPITALS).encode("Groß") == [CAPITALS[letter] for letter in "GROSS"]
        assert CTCTokenizer(SUBWORDS).encode("RING") == CTCTokenizer(SUBWORDS).encode("r") + [
            SUBWORDS[letter] for letter in "ing"
        ]

    def test_any_white_space_is_one_mark(self):
        tokenizer = CTCTokenizer(CAPITALS)
        assert tokenizer.encode("  A \n\t B ") == tokenizer.encode("A B") == [5, 4, 6]

    def test_text_that_looks_like_a_marker_is_no_marker(self):
        assert set(CTCTokenizer(CAPITALS).encode("<s>")) == {CAPITALS["<unk>"], CAPITALS["S"]}

    def test_what_cannot_be_spelt_is_told(self):
        tokenizer = CTCTokenizer(CAPITALS, unknown=None)
        assert tokenizer.can_spell("it's")
        assert not tokenizer.can_spell("route 66")
        with pytest.raises(UsageError, match="cannot spell '6' in 'route 66'"):
            tokenizer.encode("route 66")

    def test_languages_without_spaces(self):
        tokenizer = CTCTokenizer({"[PAD]": 0, "今": 1, "日": 2}, blank="[PAD]", unknown=None, delimiter=None)
        assert tokenizer.encode("今 日") == [1, 2]
        assert tokenizer.decode([1, 2]) == "今日"
        assert [word.text for word in tokenizer.words([1, 2])] == ["今日"]

    def test_markers_and_ids_beyond_the_vocabulary_are_nothing(self):
        assert CTCTokenizer(CAPITALS).decode([0, 1, 5, 3, 0, 900, 6, 2]) == "AB"

    def test_parts_of_words_longest_first(self):
        tokenizer = CTCTokenizer(SUBWORDS)
        ids = tokenizer.encode("schinter the ring")
        tokens = {id: token for token, id in SUBWORDS.items()}
        assert [tokens[id] for id in ids] == ["sch", "in", "ter", "|the", "|", "r", "ing"]
        assert tokenizer.decode(ids) == "schinter the ring"
        assert tokenizer.words(ids) == [("schinter", 0, 3), ("the", 3, 4), ("ring", 5, 7)]

    @given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([CAPITALS, SUBWORDS]))
    def test_words_are_the_text_and_lie_where_they_say(self, ids, vocabulary):
        tokenizer = CTCTokenizer(vocabulary)
        words = tokenizer.words(ids)
        assert [word.text for word in words] == tokenizer.decode(ids).split()
        for word in words:
            assert tokenizer.decode(ids[word.start : word.end]) == word.text
            assert tokenizer.decode([ids[word.start]])
            assert tokenizer.decode([ids[word.end - 1]])
        assert all(first.end <= second.start for first, second in itertools.pairwise(words))


class TestFiles:
    def test_markers_as_older_files_have_them(self, tmp_path):
        vocabulary = {"[PAD]": 7, "[UNK]": 1, "#": 0, "x": 2}
        write(tmp_path, vocabulary, pad_token={"content": "[PAD]", "lstrip": True}, word_delimiter_token="#")
        (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "[UNK]", "pad_token": "<pad>"}')
        tokenizer = CTCTokenizer.from_folder(tmp_path)
        assert (tokenizer.blank_id, tokenizer.unknown_id, tokenizer.delimiter_id) == (7, 1, 0)
        assert tokenizer.size == 8
        assert tokenizer.encode("x y") == [2, 0, 1]

    def test_a_vocabulary_for_each_language(self, tmp_path):
        german, french = dict(CAPITALS), {"<pad>": 0, "é": 1}
        folder = write(tmp_path, {"deu": german, "fra": french}, target_lang="fra")
        tokenizer = CTCTokenizer.from_folder(folder)
        assert (tokenizer.language, tokenizer.vocabulary) == ("fra", french)
        assert tokenizer.for_language("deu") == CTCTokenizer.from_folder(folder, "deu")
        with pytest.raises(UsageError, match="did you mean deu"):
            tokenizer.for_language("de")
        with pytest.raises(UsageError, match="it knows 2, such as deu, fra"):
            CTCTokenizer.from_folder(folder, "xyz")
        tokenizer.for_language("deu").save(tmp_path)
        assert CTCTokenizer.from_folder(tmp_path).language == "deu"
        assert Wav2Vec2CTCTokenizer.from_pretrained(tmp_path)("ABE").input_ids == [5, 6, 9]

    @pytest.mark.parametrize(
        ("vocabulary", "settings", "message"),
        [
            ({"a": 0}, {}, "no '<pad>'"),
            ({"<pad>": "0"}, {}, "damaged"),
            ({"<pad>": -1}, {}, "damaged"),
            ({"deu": {"<pad>": 0}, "fra": 3}, {}, "damaged"),
            ({"../deu": {"<pad>": 0}}, {}, "damaged"),
            ({}, {}, "damaged"),
            (CAPITALS, {"pad_token": 5}, "damaged"),
            (CAPITALS, {"pad_token": None}, "names no pad_token"),
            (CAPITALS, {"tokenizer_class": "Wav2Vec2PhonemeCTCTokenizer"}, "Phoneme"),
        ],
    )
    def test_damaged_or_other_tokenizers(self, tmp_path, vocabulary, settings, message):
        with pytest.raises(ModelError, match=message):
            CTCTokenizer.from_folder(write(tmp_path, vocabulary, **settings))

    def test_no_file_and_no_json(self, tmp_path):
        with pytest.raises(ModelError, match=r"vocab\.json is missing"):
            CTCTokenizer.from_folder(tmp_path)
        (tmp_path / "vocab.json").write_text("{")
        with pytest.raises(ModelError, match="cannot be read"):
            CTCTokenizer.from_folder(tmp_path)
