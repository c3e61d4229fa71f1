"""The run's tokens: made from the training text, or those of a folder; and how texts are written with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast, get_args

from stapes.data.batching import TextEncoder, UtteranceEncoder
from stapes.data.manifest import Manifest
from stapes.data.vocabulary import VocabularyKind, build_vocabulary
from stapes.errors import UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.adapters import with_language
from stapes.training.config import TrainConfig
from stapes.training.networks import find_source
from stapes.training.whisper_labels import WhisperLabels

_MOST_WORDS = 2000


def open_vocabulary(config: TrainConfig, manifest: Manifest, kept: Path | None) -> CTCTokenizer | None:
    """The tokenizer of a run that was begun before (``kept``), of a folder, or of the training text.

    None where nothing is written. Raises UsageError for one that cannot be made, or that a decoder cannot use.
    """
    if config.objective.kind == "contrastive":
        return None
    if kept is not None:
        return CTCTokenizer.from_folder(kept)
    tokenizer = _open(config, manifest)
    if config.model.language is None:
        return tokenizer
    assert config.model.init is not None
    return with_language(tokenizer, find_source(config.model.init).path, config.model)


def _open(config: TrainConfig, manifest: Manifest) -> CTCTokenizer:
    wanted = config.data.vocabulary
    if wanted == "teacher":
        if config.distill.teacher is None:
            raise UsageError("data.vocabulary is teacher and there is none: --set distill.teacher=runs/hybrid/model")
        return CTCTokenizer.from_folder(find_source(config.distill.teacher).path)
    if wanted == "words":
        return word_vocabulary(manifest)
    if wanted in get_args(VocabularyKind):
        return build_vocabulary(manifest, cast(VocabularyKind, wanted), config.data.vocabulary_size)
    if not Path(wanted).is_dir():
        kinds = ", ".join(get_args(VocabularyKind))
        raise UsageError(f"data.vocabulary is {wanted!r}: say {kinds}, words, teacher, or a folder with a vocab.json")
    tokenizer = CTCTokenizer.from_folder(Path(wanted))
    if config.objective.kind != "ctc" and not {tokenizer.start, tokenizer.end} <= set(tokenizer.vocabulary):
        raise UsageError(f"{wanted} has no start and end token, which a decoder needs: say char or bpe")
    return tokenizer


def word_vocabulary(manifest: Manifest) -> CTCTokenizer:
    """Every word of the texts as one token, behind the characters that spell any other.

    The mark between words is part of the token, so that it cannot be forgotten between two of them. Raises UsageError
    for texts with more words than that makes sense for.
    """
    spelt = build_vocabulary(manifest, "char")
    words = Counter(word for utterance in manifest for word in utterance.text.split())
    if len(words) > _MOST_WORDS:
        raise UsageError(f"data.vocabulary is words, and the texts have {len(words):,} different ones: say bpe or char")
    delimiter = spelt.delimiter or "|"
    tokens = [*spelt.vocabulary, *([] if delimiter in spelt.vocabulary else [delimiter])]
    tokens += [f"{delimiter}{word}" for word in sorted(words)]
    return CTCTokenizer({token: id for id, token in enumerate(tokens)}, delimiter=delimiter)


def encoder_of(tokenizer: CTCTokenizer | WhisperLabels | None, *, train: bool = True) -> TextEncoder | UtteranceEncoder:
    """How texts are written with a vocabulary: by words where these are tokens. train: for training, not for dev."""
    if tokenizer is None:
        return NoText()
    if isinstance(tokenizer, WhisperLabels):
        return tokenizer if train else tokenizer.for_dev()
    mark = tokenizer.delimiter or ""
    has_words = any(len(token) > 1 and token.startswith(mark) for token in tokenizer.vocabulary) if mark else False
    return WordEncoder(tokenizer) if has_words and mark in tokenizer.vocabulary else tokenizer


class NoText:
    """Takes no notice of texts."""

    def encode(self, text: str) -> list[int]:
        """No token."""
        return []


class WordEncoder:
    """Writes a text word by word, each with the mark between words before it; words without a token are spelt."""

    def __init__(self, tokenizer: CTCTokenizer) -> None:
        self._tokenizer = tokenizer
        self._mark = tokenizer.delimiter or ""

    def encode(self, text: str) -> list[int]:
        """Token ids. Raises UsageError for a character that has no token."""
        ids: list[int] = []
        for word in text.split():
            whole = self._tokenizer.vocabulary.get(self._mark + word)
            if whole is not None:
                ids.append(whole)
            else:
                ids += [self._tokenizer.vocabulary[self._mark], *self._tokenizer.encode(word)]
        return ids
