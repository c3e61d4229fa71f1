"""The tokens of a CTC model: characters or parts of words from ``vocab.json``, a blank, a mark between words.

The files are those of Hugging Face's Wav2Vec2CTCTokenizer. A checkpoint of MMS holds a vocabulary for each language.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stapes.errors import ModelError, UsageError
from stapes.text.files import read_json

Vocabulary = Mapping[str, int]


class CTCWord(NamedTuple):
    """A word and where its tokens are: from ``start`` up to ``end``, as positions in the sequence."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class CTCTokenizer:
    """Text to token ids and back, for one language. Stateless: one object serves all threads."""

    vocabulary: Vocabulary
    """Token to id."""
    blank: str = "<pad>"
    """What the network says where it says nothing, or between two equal tokens: Hugging Face's pad token."""
    unknown: str | None = "<unk>"
    start: str | None = "<s>"
    end: str | None = "</s>"
    delimiter: str | None = "|"
    """Stands between words; None: the model writes none."""
    delimiter_text: str = " "
    lower_case: bool = False
    """The vocabulary is in capitals, the text that is written is not."""
    language: str | None = None
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    """Those of all languages, of which ``vocabulary`` is one; empty where there is but one."""

    def __post_init__(self) -> None:
        if self.blank not in self.vocabulary:
            raise ModelError(
                f"The vocabulary has no {self.blank!r}, the blank that CTC needs: use the model's own tokenizer"
            )

    @classmethod
    def from_folder(cls, folder: Path, language: str | None = None) -> CTCTokenizer:
        """Read ``vocab.json`` and, where they are there, ``tokenizer_config.json`` and ``special_tokens_map.json``.

        Raises ModelError for files that are missing or damaged or that are not of a CTC model, UsageError for a
        ``language`` that the model does not know.
        """
        vocabulary = read_json(folder / "vocab.json")
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            settings |= read_json(folder / name) if (folder / name).exists() else {}
        kind = settings.get("tokenizer_class", "Wav2Vec2CTCTokenizer")
        if kind not in ("Wav2Vec2CTCTokenizer", "Wav2Vec2Tokenizer"):
            raise ModelError(f"{folder} has a {kind}; only Wav2Vec2CTCTokenizer, which writes text, can be used")
        tokens: dict[str, Any] = {}
        for ours, theirs in _TOKENS.items():
            if theirs in settings:
                value = settings[theirs]
                tokens[ours] = value.get("content") if isinstance(value, dict) else value
        wrong = not all(isinstance(value, str | None) for value in tokens.values())
        nested = any(isinstance(value, dict) for value in vocabulary.values())
        wrong = wrong or (nested and any(Path(name).name != name for name in vocabulary))  # they name files
        if wrong or not all(map(_is_vocabulary, vocabulary.values() if nested else [vocabulary])):
            raise ModelError(f"{folder / 'vocab.json'} or what lies beside it is damaged; fetch the model again")
        text = settings.get("replace_word_delimiter_char")
        tokens["delimiter_text"] = text if isinstance(text, str) else " "
        if tokens.get("blank", "") is None:
            raise ModelError(f"{folder / 'tokenizer_config.json'} names no pad_token, the blank that CTC needs")
        tokens["lower_case"] = bool(settings.get("do_lower_case", False))
        try:
            if not nested:
                if language is not None:
                    raise UsageError(f"{folder.name} has one vocabulary and knows no languages: name none")
                return cls(vocabulary, **tokens)
            chosen = str(language or settings.get("target_lang") or next(iter(vocabulary)))
            return cls(_of_language(vocabulary, chosen), language=chosen, vocabularies=vocabulary, **tokens)
        except ModelError as error:
            raise ModelError(f"{folder / 'vocab.json'}: {error}") from None

    def for_language(self, language: str) -> CTCTokenizer:
        """The tokenizer of another language of the same model. Raises UsageError for one it does not know."""
        return replace(self, vocabulary=_of_language(self.vocabularies, language), language=language)

    def save(self, folder: Path) -> None:
        """Write ``vocab.json`` and ``tokenizer_config.json`` as ``transformers`` reads them."""
        settings: dict[str, Any] = {
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
            "processor_class": "Wav2Vec2Processor",
            "do_lower_case": self.lower_case,
            "replace_word_delimiter_char": self.delimiter_text,
            "target_lang": self.language,
        }
        for ours, theirs in _TOKENS.items():
            token = getattr(self, ours)
            settings[theirs] = token if token in self.vocabulary else None  # transformers would add it
        for name, value in (("vocab.json", self.vocabularies or self.vocabulary), ("tokenizer_config.json", settings)):
            (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @property
    def blank_id(self) -> int:
        """Id of the blank."""
        return self.vocabulary[self.blank]

    @property
    def delimiter_id(self) -> int | None:
        """Id of the mark between words; None where the vocabulary has none."""
        return None if self.delimiter is None else self.vocabulary.get(self.delimiter)

    @property
    def unknown_id(self) -> int | None:
        """Id of what stands for a character without a token; None where the vocabulary has none."""
        return None if self.unknown is None else self.vocabulary.get(self.unknown)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """What each token adds to the text, by id: nothing for markers, a space for the mark between words."""
        pieces = [""] * self.size
        for token, id in self._spellings.items():
            text = token.replace(self.delimiter, self.delimiter_text) if self.delimiter else token
            pieces[id] = text.lower() if self.lower_case else text
        return tuple(pieces)

    @cached_property
    def _spellings(self) -> dict[str, int]:
        """The tokens that are text. Text that looks like a marker is spelt like any other."""
        markers = {self.blank, self.unknown, self.start, self.end}
        return {token: id for token, id in self.vocabulary.items() if token and token not in markers}

    @property
    def _space(self) -> str:
        """How white space is spelt: not at all where the vocabulary has nothing for it."""
        if self.delimiter and self.delimiter in self.vocabulary:
            return self.delimiter
        return " " if " " in self.vocabulary else ""

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._spellings), default=0)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, the longest token first wherever several fit.

        Any white space is a single mark between words. A letter that has no token is written in the other case where
        that has one, and is the unknown token otherwise. Raises UsageError where there is no such token either.
        """
        ids = []
        for character, id in self._tokens(text):
            if id is None:
                id = self.unknown_id
            if id is None:
                raise UsageError(
                    f"The model's vocabulary cannot spell {character!r} in {text[:60]!r}: remove it or write it out"
                )
            ids.append(id)
        return ids

    def can_spell(self, text: str) -> bool:
        """Whether every character has a token, in this case or the other."""
        return all(id is not None for _, id in self._tokens(text))

    def _tokens(self, text: str) -> Iterator[tuple[str, int | None]]:
        if self.lower_case:
            text = text.upper()
        spellings = self._spellings
        text = self._space.join(text.split())
        start = 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((size for size in sizes if text[start : start + size] in spellings), 0)
            if size:
                yield text[start : start + size], spellings[text[start : start + size]]
            else:
                size, character = 1, text[start]
                variants = (character.upper(), character.lower())  # ß becomes SS
                known = next((v for v in variants if all(c in spellings for c in v)), None)
                yield from ((c, spellings[c]) for c in known) if known else [(character, None)]
            start += size

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens, that is of a sequence from which repetitions and blanks are already gone.

        Markers, and ids beyond the vocabulary, are nothing.
        """
        return "".join(self._piece(id) for id in ids).strip()

    def words(self, ids: Sequence[int]) -> list[CTCWord]:
        """The words of a sequence of tokens (without repetitions and blanks) and where each is in it."""
        words: list[CTCWord] = []
        text, start, end = "", 0, 0
        for position, id in enumerate(ids):
            piece = self._piece(id)
            for n, part in enumerate(piece.split(self.delimiter_text) if self.delimiter_text else [piece]):
                if n and text:  # a mark between words stands before this part
                    words.append(CTCWord(text, start, end))
                    text = ""
                if part:
                    start = start if text else position
                    text, end = text + part, position + 1
        return [*words, CTCWord(text, start, end)] if text else words

    def _piece(self, id: int) -> str:
        return self.pieces[id] if 0 <= id < len(self.pieces) else ""


# Our field and the entry of tokenizer_config.json.
_TOKENS = {
    "blank": "pad_token",
    "unknown": "unk_token",
    "start": "bos_token",
    "end": "eos_token",
    "delimiter": "word_delimiter_token",
}


def _of_language(vocabularies: Mapping[str, Vocabulary], language: str) -> Vocabulary:
    if language in vocabularies:
        return vocabularies[language]
    close = difflib.get_close_matches(language, list(vocabularies), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it knows {len(vocabularies)}, such as "
    some = "" if close else ", ".join(list(vocabularies)[:5])
    raise UsageError(f"The model has no vocabulary for the language {language!r}: {hint}{some}")


def _is_vocabulary(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(type(id) is int and id >= 0 for id in value.values())
