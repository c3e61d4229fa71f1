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

# Noises and remarks: <unk>, [NOISE], {breath}, (inaudible). Stars, brackets or braces never hold words that were said.
_REMARKS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\}")
_SPLIT_CLITIC = re.compile(r"(?<=\w) (?='(?:s|t|re|ve|ll|d|m|em)\b)", re.IGNORECASE)  # TED-LIUM writes "it 's"
_APOSTROPHES = str.maketrans({c: "'" for c in "’‘ʼʹʻ＇`´′ʾʿꞌ\u02bd"})
_APOSTROPHE = re.compile(r"(?<![\w'\u0300-\u036f])'+|'+(?![\w'])")  # a quotation mark, not within a word
# Characters that shape letters in these scripts: the rest of category Cf says nothing.
_JOINERS = {"\u200c", "\u200d"}
_TURKIC = {"tr", "az", "tt", "crh", "kk"}
# Marks of the middle of words that Unicode counts as punctuation, by language.
_WITHIN_WORDS = {"ca": "·", "oc": "·", "ar": "", "he": "\u05f3\u05f4", "hy": "", "th": "ฯ", "dv": ""}
_ARABIC = {"ar", "fa", "ur", "ug", "ps", "ckb", "sd"}
_TATWEEL = "\u0640"  # stretches a letter for the eye


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
    text = _REMARKS.sub(" ", unicodedata.normalize("NFKC", text)).translate(_APOSTROPHES)
    kept = _WITHIN_WORDS.get(language, "") + "'"
    if language in _ARABIC:
        text = text.replace(_TATWEEL, "")
    text = "".join(_spoken(character, kept) for character in text)
    return _SPLIT_CLITIC.sub("", _APOSTROPHE.sub(" ", " ".join(text.split())).replace("  ", " "))


def _spoken(character: str, kept: str) -> str:
    if character in kept or character in _JOINERS:
        return character
    category = unicodedata.category(character)
    if category[0] in "LMN":
        return character
    return "" if category in {"Cf", "Cc", "Cs", "Co", "Cn"} and not character.isspace() else " "


def _lower(text: str, language: str) -> str:
    if language in _TURKIC:
        text = text.replace("İ", "i").replace("I", "ı")
    # İ in lower case is two characters elsewhere, of which the dot says nothing.
    return text.replace("İ", "i").lower()


def _upper(text: str, language: str) -> str:
    return (text.replace("i", "İ") if language in _TURKIC else text).upper()
