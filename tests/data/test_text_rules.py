"""How transcripts are written: what is said stays, in every language; what is not goes."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_data import DATA
from stapes.data.text_rules import normalize_text
from stapes.errors import UsageError


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "“Well,” he said — don’t!  It's 'fine'.", "well he said don't it's fine"),
        ("en", "we 've <unk> got it 's [NOISE] {breath} mother-in-law", "we've got it's mother in law"),
        ("en", "the dogs' café, naïve", "the dogs café naïve"),
        ("de", "Straße – „Größe“", "straße größe"),
        ("tr", "IŞIK İstanbul'da", "ışık istanbul'da"),
        ("en", "İstanbul IN", "istanbul in"),
        ("ca", "Il·lusió · l’home", "il·lusió · l'home"),
        ("fr", "Aujourd’hui, «l’été»…", "aujourd'hui l'été"),
        ("mt", "Iżda ta' dan ' u", "iżda ta' dan u"),
        ("it", "un po' di 'lui'", "un po' di 'lui'"),
        ("el", "ΟΔΟΣ; Τι", "οδος τι"),
        ("hi", "नमस्ते, दुनिया।", "नमस्ते दुनिया"),
        ("ar", "مرحبـــا، كيف حالك؟", "مرحبا كيف حالك"),
        ("fa", "می‌روم.", "می\u200cروم"),
        ("he", "צה״ל, שלום", "צה״ל שלום"),
        ("th", "น้ำ!", "น้ำ"),
        ("ja", "ＡＢＣ、カタカナ。", "abc カタカナ"),
        ("zh", "你好，世界！", "你好 世界"),
        (None, "a\u200bb \ufeffc\u00add", "ab cd"),
    ],
)
def test_basic(language, text, expected):
    found = normalize_text(text, "basic", language)
    assert found == unicodedata.normalize("NFC", found)
    if language == "el":  # Python writes the final sigma as it should be
        expected = "οδος τι".replace("ος", "ος")
    assert found == expected


def test_none_keeps_everything_but_white_space():
    assert normalize_text(" “Well,”\the said. ", "none") == "“Well,” he said."
    assert normalize_text("Well", "none", case="upper") == "WELL"
    assert normalize_text("istanbul", "basic", "tr", "upper") == "İSTANBUL"
    assert normalize_text("Well", "basic", case="keep") == "Well"


@given(st.text(), st.sampled_from(["en", "tr", "mt", "ca", "th", None]))
def test_writing_twice_changes_nothing_more(text, language):
    once = normalize_text(text, "basic", language, "keep")
    assert normalize_text(once, "basic", language, "keep") == once


@pytest.mark.data
def test_no_letter_of_59_languages_is_lost():
    languages = set()
    for line in (DATA / "commonvoice" / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        languages.add(row["lang"])
        text = normalize_text(row["text"], "basic", row["lang"], "keep")

        def letters(text: str) -> list[str]:
            form = unicodedata.normalize("NFKC", text)
            return [c for c in form if unicodedata.category(c)[0] == "L" and c not in "ʼʻʾʿʹـ" and c != "ꞌ"]

        assert letters(text) == letters(row["text"]), row
        assert text, row
        assert not set(text) & set('.,!?;:"()«»“”„…—–-¿¡。、！？、؟،؛'), row
    assert len(languages) == 59


@pytest.mark.parametrize(("name", "case"), [("whisper", "auto"), ("basic", "title")])
def test_unknown_names_are_refused(name, case):
    with pytest.raises(UsageError, match="say"):
        normalize_text("a", name, None, case)
