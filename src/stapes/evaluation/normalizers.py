"""Text normalisers: what counts as the same word.

``english`` and ``basic`` are those of Whisper's paper (Radford et al. 2022, appendix C): openai/whisper's code and
spelling table, from the package ``whisper-normalizer``. The Open ASR Leaderboard scored English with the former until
April 2026; since then it also joins spelt-out letters and digits and merges spellings of names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, get_args

from stapes.errors import UsageError
from stapes.text.tokenizers import LANGUAGES_WITHOUT_SPACES

NormalizerName = Literal["auto", "english", "basic", "none"]


# The package rewrites these as well; openai/whisper and the leaderboard do not ("cause" is a noun in books).
_ADDITIONS = (r"\bkinda\b", r"\bsorta\b", r"\bdunno\b", r"\bcause\b")


def choose(name: str, language: str | None) -> str:
    """What ``name`` means for a language code: ``english``, ``basic``, ``basic, by character`` or ``none``.

    ``auto`` is English for English and for rows of unknown language, and basic for every other language; where
    it is written without spaces between words, characters are counted, as in Whisper's paper. Raises
    UsageError for a name that is none.
    """
    if name not in get_args(NormalizerName):
        raise UsageError(f"--normalizer is {name!r}: say {', '.join(get_args(NormalizerName))}")
    if name != "auto":
        return name
    if language in (None, "en"):
        return "english"
    return "basic, by character" if language in LANGUAGES_WITHOUT_SPACES else "basic"


def normalize(text: str, name: str) -> str:
    """``text`` as it is compared, single spaces between words. ``name`` is one that ``choose`` gave."""
    return " ".join(_normalizer(name)(text).split())


@cache
def _normalizer(name: str) -> Callable[[str], str]:
    if name == "none":
        return str
    try:
        from whisper_normalizer.basic import BasicTextNormalizer
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError as error:
        raise UsageError(
            f"the {name} normaliser needs whisper-normalizer: pip install 'stapes[evaluate]', or --normalizer none"
        ) from error
    if name == "english":
        english = EnglishTextNormalizer()
        for pattern in _ADDITIONS:
            english.replacers.pop(pattern, None)
        return english
    return BasicTextNormalizer(split_letters=name == "basic, by character")
