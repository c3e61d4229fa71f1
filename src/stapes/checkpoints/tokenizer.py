"""The tokenizer of a model: its own, or for a bare ``.pt`` file that of a model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.errors import ModelError
from stapes.text.tokenizers import WhisperTokenizer


def open_tokenizer(checkpoint: WhisperCheckpoint, model_dir: str | Path | None = None) -> WhisperTokenizer:
    """Load the tokenizer. Raises ModelError where there is none that fits."""
    return find_tokenizer(checkpoint, model_dir)[1]


def find_tokenizer(checkpoint: WhisperCheckpoint, model_dir: str | Path | None = None) -> tuple[Path, WhisperTokenizer]:
    """The file of the tokenizer, and what is in it. Raises ModelError where there is none that fits."""
    file, tokenizer = _find(checkpoint, model_dir)
    tokenizer.reused = dict(checkpoint.language_tokens)
    return file, tokenizer


def _find(checkpoint: WhisperCheckpoint, model_dir: str | Path | None) -> tuple[Path, WhisperTokenizer]:
    """Its own, or one that is lent.

    openai/whisper's ``.pt`` files come without one. English-only models, those with 99 languages and those with 100
    each share theirs, so any model of the same kind on this machine can lend it.
    """
    vocab_size = checkpoint.config.vocab_size
    if checkpoint.tokenizer is not None and checkpoint.path.is_dir():
        return checkpoint.tokenizer, WhisperTokenizer.from_file(checkpoint.tokenizer, vocab_size=vocab_size)
    if checkpoint.tokenizer is not None:  # beside a .pt, where it may belong to another one
        tokenizer = WhisperTokenizer.from_file(checkpoint.tokenizer, vocab_size=vocab_size)
        if not _fits(tokenizer, checkpoint):
            raise ModelError(f"{checkpoint.tokenizer} belongs to another model than {checkpoint.path}: remove it")
        return checkpoint.tokenizer, tokenizer
    for file in _tokenizers(checkpoint.config.languages, model_dir):
        tokenizer = WhisperTokenizer.from_file(file, vocab_size=vocab_size)
        if _fits(tokenizer, checkpoint):
            return file, tokenizer
    alike = [name for name, known in catalog.KNOWN.items() if known.languages == checkpoint.config.languages]
    remedy = f", or `stapes models pull {alike[0]}`, which has the same" if alike else ""
    raise ModelError(f"{checkpoint.path} comes without a tokenizer.json: put its own beside it{remedy}")


def _tokenizers(languages: int, model_dir: str | Path | None) -> Iterator[Path]:
    for name, known in catalog.KNOWN.items():
        location = catalog.find(name, model_dir) if known.languages == languages else None
        if location is not None and (location.path / "tokenizer.json").is_file():
            yield location.path / "tokenizer.json"


def _fits(tokenizer: WhisperTokenizer, checkpoint: WhisperCheckpoint) -> bool:
    return (len(tokenizer.language_ids) or 1) == checkpoint.config.languages
