"""How transcripts are written for training: by language, so that what sounds the same is spelt the same.

Evaluation compares with Whisper's normalisers, which write numbers as digits and undo spellings; a model that learns
letters from sound needs the words as they are said, so these rules only take away what is not said.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal, get_args

from stapes.errors import UsageError

NormalizeName = Literal["basic", "none"]
CaseName = Literal["auto", "lower", "upper", "keep"]

# Noises and remarks: <unk>, [NOISE], {breath}. Such brackets never hold words that were said.
_REMARKS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\}")
_SPLIT_CLITIC = re.compile(r"(?<=\w) (?='(?:s|t|re|ve|ll|d|m)\b)", re.IGNORECASE)  # TED-LIUM writes "it 's"
_APOSTROPHES = str.maketrans(dict.fromkeys("’‘ʼʽʹʻ＇`´′ʾʿꞌ", "'"))
_QUOTING_APOSTROPHE = re.compile(r"(?<![\w'])'+|'+(?![\w'])")
_LONE_APOSTROPHE = re.compile(r"(?<!\S)'+(?!\S)")
# Where words may begin or end with one: Maltese ta', Italian po', Uzbek bog', the Hawaiian okina.
_EDGE_APOSTROPHES = {"mt", "it", "uz", "haw", "ha"}
# Characters that shape the letters of some scripts: the rest of category Cf says nothing.
_JOINERS = "\u200c\u200d"
# Marks in the middle of words that Unicode counts as punctuation: Catalan's l·l, Hebrew's geresh and gershayim, Thai's
# sign of abbreviation.
_WITHIN_WORDS = {"ca": "·", "oc": "·", "he": "\u05f3\u05f4", "th": "\u0e2f"}
_DOTLESS = {"tr", "az", "crh"}  # I is the capital of ı
_TATWEEL = "\u0640"  # stretches an Arabic letter for the eye
# NFKC takes these vowels of Thai and Lao apart, which no text does.
_WHOLE_VOWELS = (("\u0e4d\u0e32", "\u0e33"), ("\u0ecd\u0eb2", "\u0eb3"))


def normalize_text(text: str, name: str, language: str | None = None, case: str = "auto") -> str:
    """A transcript as it is trained on, words separated by single spaces.

    name: ``none`` only joins white space. ``basic`` also brings characters into one form (NFKC), drops remarks in
        brackets, punctuation, symbols and quotation marks, and keeps apostrophes within words; hyphens and dashes
        separate. Letters, their marks (as Indic scripts, Arabic and Hebrew need them) and digits stay.
    language: a code such as ``tr``, whose own rules apply: dotless ı in Turkish, the middle dot in Catalan.
    case: ``auto`` is lower for ``basic`` and keep for ``none``.

    Raises UsageError for a name or a case that is none.
    """
    if name not in get_args(NormalizeName):
        raise UsageError(f"--normalize is {name!r}: say {' or '.join(get_args(NormalizeName))}")
    if case not in get_args(CaseName):
        raise UsageError(f"--case is {case!r}: say {', '.join(get_args(CaseName))}")
    code = (language or "").lower().replace("_", "-").partition("-")[0]
    if name == "basic":
        text = _basic(text, code)
    if case == "upper":
        text = _upper(text, code)
    elif case == "lower" or (case == "auto" and name == "basic"):
        text = _lower(text, code)
    return " ".join(text.split())


def _basic(text: str, language: str) -> str:
    text = _REMARKS.sub(" ", unicodedata.normalize("NFKC", text)).translate(_APOSTROPHES).replace(_TATWEEL, "")
    for apart, whole in _WHOLE_VOWELS:
        text = text.replace(apart, whole)
    kept = _WITHIN_WORDS.get(language, "") + "'" + _JOINERS
    text = " ".join("".join(_spoken(character, kept) for character in text).split())
    if language in ("", "en"):
        text = _SPLIT_CLITIC.sub("", text)
    return (_LONE_APOSTROPHE if language in _EDGE_APOSTROPHES else _QUOTING_APOSTROPHE).sub(" ", text)


def _spoken(character: str, kept: str) -> str:
    """The character where it belongs to a word, a space where it separates words, nothing where it does neither."""
    category = unicodedata.category(character)
    if character in kept or category[0] in "LMN":
        return character
    return "" if category == "Cf" else " "


def _lower(text: str, language: str) -> str:
    if language in _DOTLESS:
        text = text.replace("I", "ı")
    return text.replace("İ", "i").lower()  # which would be i and a dot above it


def _upper(text: str, language: str) -> str:
    return (text.replace("i", "İ") if language in _DOTLESS else text).upper()
