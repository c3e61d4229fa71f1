"""Whisper's byte-level BPE: text to token ids and back, its special tokens, its languages and its words.

Encoding runs on the ``tokenizers`` library from a model's own ``tokenizer.json``. Decoding is done here, on bytes:
a token is a run of bytes, not of characters, and only the bytes tell exactly where a character, and with it a
word, may end. The rules are openai/whisper's ``tokenizer.py``.
"""

from __future__ import annotations

import codecs
import difflib
import json
import string
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from stapes.errors import ModelError, UsageError

LANGUAGES: dict[str, str] = {
    "en": "english",
    "zh": "chinese",
    "de": "german",
    "es": "spanish",
    "ru": "russian",
    "ko": "korean",
    "fr": "french",
    "ja": "japanese",
    "pt": "portuguese",
    "tr": "turkish",
    "pl": "polish",
    "ca": "catalan",
    "nl": "dutch",
    "ar": "arabic",
    "sv": "swedish",
    "it": "italian",
    "id": "indonesian",
    "hi": "hindi",
    "fi": "finnish",
    "vi": "vietnamese",
    "he": "hebrew",
    "uk": "ukrainian",
    "el": "greek",
    "ms": "malay",
    "cs": "czech",
    "ro": "romanian",
    "da": "danish",
    "hu": "hungarian",
    "ta": "tamil",
    "no": "norwegian",
    "th": "thai",
    "ur": "urdu",
    "hr": "croatian",
    "bg": "bulgarian",
    "lt": "lithuanian",
    "la": "latin",
    "mi": "maori",
    "ml": "malayalam",
    "cy": "welsh",
    "sk": "slovak",
    "te": "telugu",
    "fa": "persian",
    "lv": "latvian",
    "bn": "bengali",
    "sr": "serbian",
    "az": "azerbaijani",
    "sl": "slovenian",
    "kn": "kannada",
    "et": "estonian",
    "mk": "macedonian",
    "br": "breton",
    "eu": "basque",
    "is": "icelandic",
    "hy": "armenian",
    "ne": "nepali",
    "mn": "mongolian",
    "bs": "bosnian",
    "kk": "kazakh",
    "sq": "albanian",
    "sw": "swahili",
    "gl": "galician",
    "mr": "marathi",
    "pa": "punjabi",
    "si": "sinhala",
    "km": "khmer",
    "sn": "shona",
    "yo": "yoruba",
    "so": "somali",
    "af": "afrikaans",
    "oc": "occitan",
    "ka": "georgian",
    "be": "belarusian",
    "tg": "tajik",
    "sd": "sindhi",
    "gu": "gujarati",
    "am": "amharic",
    "yi": "yiddish",
    "lo": "lao",
    "uz": "uzbek",
    "fo": "faroese",
    "ht": "haitian creole",
    "ps": "pashto",
    "tk": "turkmen",
    "nn": "nynorsk",
    "mt": "maltese",
    "sa": "sanskrit",
    "lb": "luxembourgish",
    "my": "myanmar",
    "bo": "tibetan",
    "tl": "tagalog",
    "mg": "malagasy",
    "as": "assamese",
    "tt": "tatar",
    "haw": "hawaiian",
    "ln": "lingala",
    "ha": "hausa",
    "ba": "bashkir",
    "jw": "javanese",
    "su": "sundanese",
    "yue": "cantonese",
}
"""Code to English name, in the order of their tokens. The first 99 are in every multilingual model; Cantonese came
with large-v3."""

LANGUAGE_ALIASES: dict[str, str] = {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
}
"""Further English names that openai/whisper understands."""

LANGUAGES_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})

TIMESTAMP_COUNT = 1501
TIMESTAMP_STEP = 0.02
"""Timestamp tokens mark 0.00, 0.02 … 30.00 seconds from the start of the window."""

_CODES = {name: code for code, name in LANGUAGES.items()} | LANGUAGE_ALIASES | {code: code for code in LANGUAGES}

# Special tokens by our name; the first spelling that the file has counts. <|nocaptions|> is the older <|nospeech|>.
_SPECIAL_TOKENS = {
    "eot": ("<|endoftext|>",),
    "sot": ("<|startoftranscript|>",),
    "translate": ("<|translate|>",),
    "transcribe": ("<|transcribe|>",),
    "sot_lm": ("<|startoflm|>",),
    "sot_prev": ("<|startofprev|>",),
    "no_speech": ("<|nospeech|>", "<|nocaptions|>"),
    "no_timestamps": ("<|notimestamps|>",),
}

# openai/whisper's list of what annotators write for sounds that are not speech: brackets, speaker marks, music.
_NON_SPEECH_SYMBOLS = (
    """" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』 """
    """<< >> <<< >>> -- --- -( -[ (' (" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"""
)
_MUSICAL_SYMBOLS = "♩♪♫♬♭♮♯"


def language_code(code_or_name: str) -> str:
    """Whisper's code of a language given by code or English name, in any case: ``"German"`` gives ``"de"``.

    Raises UsageError, with close matches, for one that no Whisper model knows.
    """
    wanted = code_or_name.strip().lower()
    if wanted in _CODES:
        return _CODES[wanted]
    close = difflib.get_close_matches(wanted, list(_CODES), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "give a code such as en, or an English name."
    raise UsageError(f"Language {code_or_name!r} is not one that Whisper knows: {hint}")


def language_label(code_or_name: str | None) -> str | None:
    """Whisper's code of a language where it has one, else what was said: other models spell languages otherwise."""
    if code_or_name is None:
        return None
    try:
        return language_code(code_or_name)
    except UsageError:
        return code_or_name.strip()


class WhisperTokenizer:
    """The tokenizer of one Whisper model. Stateless after loading: one object serves all threads and languages.

    Ids are plain ints. Below ``eot`` they are text; from ``timestamp_begin`` on they are times, ``TIMESTAMP_STEP``
    seconds apart; between the two are the markers.
    """

    eot: int
    sot: int
    translate: int
    transcribe: int
    sot_lm: int
    sot_prev: int
    no_speech: int
    no_timestamps: int

    def __init__(self, definition: dict[str, Any], *, vocab_size: int) -> None:
        """Take a parsed ``tokenizer.json``; see `from_file`. Raises ModelError where it is not Whisper's."""
        added = {token["content"]: token["id"] for token in definition["added_tokens"]}
        vocabulary: dict[str, int] = definition["model"]["vocab"]
        ids = vocabulary | added
        for name, spellings in _SPECIAL_TOKENS.items():
            spelling = next((s for s in spellings if s in ids), None)
            if spelling is None:
                raise ModelError(f"It has no {spellings[0]} token, so it is not Whisper's: use the model's own file.")
            setattr(self, name, ids[spelling])
        self.timestamp_begin = self.no_timestamps + 1
        """Id of ``<|0.00|>``. Many tokenizer.json files end before the timestamps, whose ids follow all the same."""
        if self.timestamp_begin + TIMESTAMP_COUNT > vocab_size:
            raise ModelError(
                f"The tokenizer needs {self.timestamp_begin + TIMESTAMP_COUNT} tokens but the model has {vocab_size}: "
                "use the tokenizer.json that belongs to the model."
            )
        self.vocab_size = vocab_size
        # English-only models keep GPT-2's vocabulary, which is one token shorter. (vocab_size may be padded.)
        self.is_multilingual = self.eot >= 50257
        tokens = {code: ids[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in ids}
        self.language_ids: dict[str, int] = tokens if self.is_multilingual else {}
        """Language code to token id; empty for English-only models, which never use theirs."""
        self.reused: dict[str, str] = {}
        """Languages without a token, and the language whose token a model learnt each by."""

        self._markers = {id: token for token, id in ids.items() if id >= self.eot}
        self._bytes = _token_bytes(vocabulary, self.eot)
        # Without its added tokens the encoder cannot turn text that looks like a marker into one.
        plain = definition | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._encoder = Tokenizer.from_str(json.dumps(plain))

    @classmethod
    def from_file(cls, path: str | Path, *, vocab_size: int) -> WhisperTokenizer:
        """Load ``tokenizer.json``. ``vocab_size`` is the model's number of output tokens.

        Raises ModelError when the file is missing or damaged, or is not of a Whisper model of that size.
        """
        try:
            definition = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(definition, vocab_size=vocab_size)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        except OSError as error:
            raise ModelError(
                f"{path}: the tokenizer cannot be read ({error.strerror}); fetch the model again."
            ) from None
        except Exception as error:  # the tokenizers library raises bare Exception for what it cannot use
            raise ModelError(f"{path}: not a usable tokenizer.json ({error}); fetch the model again.") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, all below ``eot``: what looks like a marker (``<|endoftext|>``) is encoded as text."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not whole UTF-8 characters, as at a cut, become U+FFFD.

        With ``skip_special_tokens=False`` markers and timestamps are written out, as ``<|0.00|>``.
        """
        return b"".join(
            self._bytes[id] if id < self.eot else self._marker(id).encode()
            for id in ids
            if id < self.eot or not skip_special_tokens
        ).decode("utf-8", errors="replace")

    def writes_as(self, other: WhisperTokenizer) -> bool:
        """Whether every id means the same in both."""
        names = [*_SPECIAL_TOKENS, "timestamp_begin", "vocab_size", "language_ids", "_bytes"]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def timestamp(self, id: int) -> float:
        """Seconds from the start of the window that a timestamp token (``id >= timestamp_begin``) stands for."""
        return (id - self.timestamp_begin) * TIMESTAMP_STEP

    def known_code(self, code_or_name: str) -> str:
        """Whisper's code of a language, or of the one whose token it was taught by. Raises UsageError."""
        return language_code(self.reused.get(code_or_name.strip(), code_or_name))

    def language_id(self, code_or_name: str) -> int:
        """Token id of a language, given as a code or an English name.

        Raises UsageError for a language that Whisper or this model does not know. English-only models know
        ``en``; its id is of no use to them.
        """
        code = self.known_code(code_or_name)
        if not self.is_multilingual:
            if code != "en":
                raise UsageError(
                    f"This model knows English only, not {LANGUAGES[code]}: use a model whose name does not end in .en."
                )
            return self.sot + 1
        if code not in self.language_ids:
            raise UsageError(f"This model does not know {LANGUAGES[code]} ({code}): use large-v3 or turbo.")
        return self.language_ids[code]

    def start_sequence(
        self, language: str | None, task: Literal["transcribe", "translate"] = "transcribe", *, without_timestamps: bool
    ) -> list[int]:
        """The tokens that tell the decoder what to do: start, language, task and whether to leave out times.

        English-only models have neither languages nor tasks: theirs is the start alone. Raises UsageError for a
        language this model does not know, no language where one is needed, and translation by an English-only model.
        """
        sequence = [self.sot]
        if self.is_multilingual:
            if language is None:
                raise UsageError("A multilingual model must be told the language: give one or detect it first.")
            sequence += [self.language_id(language), self.translate if task == "translate" else self.transcribe]
        else:
            if language is not None:
                self.language_id(language)
            if task == "translate":
                raise UsageError("An English-only model cannot translate: use a multilingual model.")
        return [*sequence, self.no_timestamps] if without_timestamps else sequence

    def non_speech_tokens(self) -> list[int]:
        """Ids that a transcript of speech has no use for, sorted: openai/whisper's list for ``suppress_tokens=-1``.

        Brackets, speaker marks, musical notes, and hyphens and quotes that begin a word; then the markers that are
        only ever given, never predicted.
        """
        return list(self._non_speech_tokens)

    @cached_property
    def _non_speech_tokens(self) -> list[int]:
        ids = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in _NON_SPEECH_SYMBOLS.split():
            ids.update(tokens[0] for tokens in (self.encode(symbol), self.encode(" " + symbol)) if len(tokens) == 1)
        for symbol in _MUSICAL_SYMBOLS:
            # Where these are several tokens the first is shared by U+2640 to U+267F only, all dispensable.
            ids.update((self.encode(symbol)[0], self.encode(" " + symbol)[0]))
        markers = {self.transcribe, self.translate, self.sot, self.sot_prev, self.sot_lm, self.no_speech}
        return sorted(ids | markers)

    def split_to_words(self, ids: Sequence[int], language: str | None = None) -> tuple[list[str], list[list[int]]]:
        """Cut tokens into words: texts, and the tokens of each. Joined, they are the decoded text and ``ids`` again.

        A word begins at a space or is punctuation; in languages written without spaces (``language`` is a code)
        it is the shortest run of tokens that holds whole characters. Markers and timestamps are words by themselves.
        """
        pieces, piece_tokens = self._split_to_characters(ids)
        if language in LANGUAGES_WITHOUT_SPACES:
            return pieces, piece_tokens
        words: list[str] = []
        word_tokens: list[list[int]] = []
        after_marker = True
        for piece, tokens in zip(pieces, piece_tokens, strict=True):
            is_marker = tokens[0] >= self.eot
            is_punctuation = piece.strip() in string.punctuation
            if is_marker or after_marker or is_punctuation or piece.startswith(" "):
                words.append(piece)
                word_tokens.append(tokens)
            else:
                words[-1] += piece
                word_tokens[-1] = word_tokens[-1] + tokens
            after_marker = is_marker
        return words, word_tokens

    def _split_to_characters(self, ids: Sequence[int]) -> tuple[list[str], list[list[int]]]:
        """Cut after every token that ends where a character ends."""
        pieces: list[str] = []
        piece_tokens: list[list[int]] = []
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = ""
        pending: list[int] = []

        def cut(piece: str, tokens: list[int]) -> None:
            pieces.append(piece)
            piece_tokens.append(tokens)

        for id in ids:
            if id >= self.eot:
                if pending:
                    cut(text + decoder.decode(b"", final=True), pending)
                    text, pending = "", []
                cut(self._marker(id), [id])
                continue
            text += decoder.decode(self._bytes[id])
            pending.append(id)
            if not decoder.getstate()[0]:
                cut(text, pending)
                text, pending = "", []
        if pending:
            cut(text + decoder.decode(b"", final=True), pending)
        return pieces, piece_tokens

    def _marker(self, id: int) -> str:
        """How a marker or timestamp is written; nothing for ids of padding beyond the vocabulary."""
        if self.timestamp_begin <= id < self.timestamp_begin + TIMESTAMP_COUNT:
            return f"<|{self.timestamp(id):.2f}|>"
        return self._markers.get(id, "")


def _token_bytes(vocabulary: dict[str, int], count: int) -> list[bytes]:
    """Bytes of each text token: undoes GPT-2's ``bytes_to_unicode``, which writes every byte as a printable letter."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokens = [b""] * count
    for token, id in vocabulary.items():
        if id < count:
            tokens[id] = bytes(byte_of[letter] for letter in token)
    return tokens
