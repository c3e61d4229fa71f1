"""The path is the likeliest of all that say the text, however long, batched or full of gaps the text is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from alignments import best_of_all, check_path, needed, random_log_probs
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.decoding import ctc_align
from stapes.decoding.ctc_align import Alignment, align, align_words
from stapes.decoding.spelling import WILDCARD, spell
from stapes.errors import ModelError, UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer

cases = st.tuples(
    st.integers(0, 10**6), st.integers(0, 6), st.lists(st.sampled_from([WILDCARD, 0, 2]), max_size=4)
).filter(lambda case: needed(case[2]) <= case[1])


@settings(max_examples=60, deadline=None)
@given(cases)
def test_no_path_is_likelier(case: tuple[int, int, list[int]]) -> None:
    seed, frames, ids = case
    log_probs = random_log_probs(seed, frames, 3)
    (found,) = align(log_probs, [frames], [ids], blank=1)
    check_path(found, log_probs[0], ids, blank=1)
    assert found.logprob == pytest.approx(best_of_all(log_probs[0], ids, 1))


def random_text(seed: int, frames: int) -> list[int]:
    draw = np.random.default_rng(seed)
    ids = draw.choice([WILDCARD, 1, 2, 3, 4], size=int(draw.integers(0, max(1, frames // 2)))).tolist()
    while needed(ids) > frames:
        ids.pop()
    return ids


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 90), min_size=1, max_size=4))
def test_in_pieces_and_in_a_batch_the_path_is_the_same(seed: int, lengths: list[int]) -> None:
    texts = [random_text(seed + row, length) for row, length in enumerate(lengths)]
    log_probs = torch.cat([random_log_probs(seed + row, max(lengths) + 2, 5) for row in range(len(lengths))])
    with pytest.MonkeyPatch.context() as patch:
        whole = align(log_probs, lengths, texts, blank=0)
        patch.setattr(ctc_align, "_WHOLE", 0)
        pieces = align(log_probs, lengths, texts, blank=0)
    for row, length in enumerate(lengths):
        check_path(whole[row], log_probs[row, :length], texts[row], blank=0)
        alone = align(log_probs[row : row + 1, :length], [length], [texts[row]], blank=0)[0]
        assert alone == whole[row]
        assert pieces[row].logprob == pytest.approx(whole[row].logprob)
        check_path(pieces[row], log_probs[row, :length], texts[row], blank=0)
        if WILDCARD not in texts[row]:  # where a wildcard ends may be a matter of rounding
            assert pieces[row].tokens == whole[row].tokens


def test_single_precision_finds_the_path_of_double_precision_however_large_the_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctc_align, "_WHOLE", 0)
    single = (random_log_probs(3, 60, 5) - 1000.0).float().repeat(1, 50, 1)  # in the end sums are three million
    text = [1, 3, 3, 2, 4] * 50
    (found,) = align(single, [3000], [text], blank=0)
    (exact,) = align(single.double(), [3000], [text], blank=0)
    assert [token[:3] for token in found.tokens] == [token[:3] for token in exact.tokens]


def test_impossible_labels_still_leave_a_path_and_nan_is_named() -> None:
    log_probs = random_log_probs(0, 8, 4)
    log_probs[0, :, 2] = -math.inf
    (found,) = align(log_probs, [8], [[3, 2, 3]], blank=0)
    assert [token.id for token in found.tokens] == [3, 2, 3]
    assert found.tokens[1].probability == 0.0
    log_probs[0, 4, 0] = math.nan
    with pytest.raises(ModelError, match="not a number"):
        align(log_probs, [8], [[3, 2, 3]], blank=0)


def test_what_does_not_fit_is_named() -> None:
    log_probs = random_log_probs(0, 5, 4)
    with pytest.raises(UsageError, match="text 1 has 3 tokens and needs 4 frames, its recording has 3"):
        align(log_probs.repeat(2, 1, 1), [5, 3], [[1, 2, 2], [1, 2, 2]], blank=0)
    for wrong in (0, 4, -2):
        with pytest.raises(UsageError, match=f"token {wrong}"):
            align(log_probs, [5], [[wrong]], blank=0)
    assert align(log_probs[:0], [], [], blank=0) == []
    assert align(log_probs, [0], [[]], blank=0) == [Alignment([], 0.0)]


LETTERS = CTCTokenizer(
    {"<pad>": 0, "<unk>": 1, "|": 2, "'": 3, **{c: 4 + n for n, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}}
)
PARTS = CTCTokenizer({"<pad>": 0, "▁": 1, "▁go": 2, "g": 3, "o": 4, "n": 5, "▁on": 6}, unknown=None, delimiter="▁")
CHINESE = CTCTokenizer({"<pad>": 0, "你": 1, "好": 2, "吗": 3}, unknown=None, delimiter=None)


def spelt(text: str, tokenizer: CTCTokenizer, **options: bool) -> tuple[str, list[str]]:
    names = {id: token for token, id in tokenizer.vocabulary.items()} | {WILDCARD: "*"}
    found = spell(text, tokenizer, **options)
    assert "".join(word.text for word in found.words).split() == text.split()
    words = ["".join(names[id] for id in found.ids[word.start : word.end]) for word in found.words]
    return "".join(names[id] for id in found.ids), words


@pytest.mark.parametrize(
    ("text", "tokenizer", "ids", "words"),
    [
        ("Hello, it’s me!", LETTERS, "HELLO|IT'S|ME", ["HELLO", "IT'S", "ME"]),
        ("well-known — or so", LETTERS, "WELL|KNOWN|OR|SO", ["WELL|KNOWN", "OR", "SO"]),
        ("in 1984 $5 he", LETTERS, "IN*HE", ["IN", "*", "*", "HE"]),
        ("a@b.com yes 3rd", LETTERS, "*YES*", ["*", "YES", "*"]),
        ("hi [door slams] you [sic", LETTERS, "HI*YOU|SIC", ["HI", "*", "*", "YOU", "SIC"]),
        ("… — yes", LETTERS, "YES", ["YES"]),
        ("Привет you", LETTERS, "*YOU", ["*", "YOU"]),
        ("go on gono ongo", PARTS, "▁go▁on▁gono▁ongo", ["▁go", "▁on", "▁gono", "▁ongo"]),
        ("nog go", PARTS, "nog▁go", ["nog", "▁go"]),
        ("你好吗? 吗。", CHINESE, "你好吗吗", ["你", "好", "吗", "吗"]),
        ("", LETTERS, "", []),
    ],
)
def test_texts_are_spelt_with_wildcards_for_what_cannot_be(
    text: str, tokenizer: CTCTokenizer, ids: str, words: list[str]
) -> None:
    assert spelt(text, tokenizer) == (ids, words)


def test_open_ends_leave_room_around_the_text() -> None:
    assert spelt("hello you", LETTERS, open_ends=True) == ("*HELLO|YOU*", ["HELLO", "YOU"])
    assert spelt("7 you 8", LETTERS, open_ends=True) == ("*YOU*", ["*", "YOU", "*"])
    assert spelt("", LETTERS, open_ends=True) == ("*", [])


def said(text: str) -> torch.Tensor:
    """What a good model says of this: each letter is a frame, ``.`` a blank; (1, frames, vocabulary)."""
    log_probs = torch.full((1, len(text), LETTERS.size), -9.0)
    for frame, letter in enumerate(text):
        log_probs[0, frame, LETTERS.blank_id if letter == "." else LETTERS.vocabulary[letter]] = 0.0
    return log_probs.log_softmax(-1)


def test_a_wildcard_covers_what_was_said_and_no_word_beside_it() -> None:
    sound = "..I.N..|N.IN.E.TE.EN...F.O.R.TY|..H.E...|..S.A.ID.."
    text = spell("In 1940 he said", LETTERS)
    (alignment,) = align(said(sound), [len(sound)], [text.ids], LETTERS.blank_id)
    words = align_words(alignment, text, frame_seconds=1.0, offset=100.0)
    assert [word.word for word in words] == [" In", " 1940", " he", " said"]
    spans = [(round(word.start - 100), round(word.end - 100)) for word in words]
    assert [sound[start:end] for start, end in (spans[0], *spans[2:])] == ["I.N", "H.E", "S.A.ID"]
    assert sound[slice(*spans[1])].strip(".|") == "N.IN.E.TE.EN...F.O.R.TY"
    assert words[1].probability == 0.0
    assert min(word.probability for word in (words[0], *words[2:])) > 0.9


def test_words_not_spoken_take_a_moment_and_the_others_keep_their_place() -> None:
    sound = "..H.I...|..Y.O.U.."
    text = spell("Hi [laughs out loud] you", LETTERS)
    (alignment,) = align(said(sound), [len(sound)], [text.ids], LETTERS.blank_id)
    words = align_words(alignment, text, frame_seconds=1.0)
    assert sound[round(words[0].start) : round(words[0].end)] == "H.I"
    assert sound[round(words[-1].start) : round(words[-1].end)] == "Y.O.U"
    assert [word.start for word in words] == sorted(word.start for word in words)
    assert words[3].end - words[1].start <= 3
    assert words[1].end == pytest.approx(words[2].start)


def test_speech_around_the_text_is_left_to_open_ends() -> None:
    sound = "A.N.D.|S.O.|..H.E.L.L.O.|.Y.O.U..|.B.Y.E"
    text = spell("hello you", LETTERS, open_ends=True)
    (alignment,) = align(said(sound), [len(sound)], [text.ids], LETTERS.blank_id)
    words = align_words(alignment, text, frame_seconds=1.0)
    assert [sound[round(word.start) : round(word.end)] for word in words] == ["H.E.L.L.O", "Y.O.U"]
