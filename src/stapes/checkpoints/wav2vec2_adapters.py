"""A language's adapter, in MMS's layout (Pratap et al. 2023, https://arxiv.org/abs/2305.13516), beside its model.

A folder with a few megabytes of its own: ``adapter.LANG.safetensors`` with the adapters of all layers and the head, a
``vocab.json`` with a vocabulary for each language, and links to the weights that all languages share.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from stapes.checkpoints.files import weight_files
from stapes.checkpoints.folders import written_whole
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, adapter_file, open_wav2vec2, write_wav2vec2_settings
from stapes.checkpoints.wav2vec2_names import MASK_EMBEDDING, is_language_weight, wav2vec2_names
from stapes.errors import UsageError
from stapes.models.wav2vec2 import Wav2Vec2Config
from stapes.text.ctc_tokenizer import CTCTokenizer

_STYLE = ("blank", "unknown", "start", "end", "delimiter", "delimiter_text", "lower_case")


def check_code(language: str) -> None:
    """Raise UsageError for what cannot be a part of a file's name."""
    if not re.fullmatch(r"[\w-]+", language):
        raise UsageError(f"model.language is {language!r}: give a code such as swa, of letters, digits, - and _")


def add_vocabulary(base: CTCTokenizer | None, own: CTCTokenizer, language: str) -> CTCTokenizer:
    """The tokenizer of a model's new language, which knows the other languages' vocabularies too.

    Raises UsageError for one whose markers are not those of the model's other vocabularies: they share one file.
    """
    if base is None or not base.vocabularies:
        return replace(own, language=language, vocabularies={language: own.vocabulary})
    for name in _STYLE:
        ours, theirs = getattr(own, name), getattr(base, name)
        if ours != theirs and not (isinstance(ours, str) and ours not in own.vocabulary):
            raise UsageError(
                f"the vocabulary's {name} is {ours!r} and that of the model's languages {theirs!r}: make one of the "
                "training text, --set data.vocabulary=char"
            )
    merged = {**base.vocabularies, language: own.vocabulary}
    return replace(base, vocabulary=own.vocabulary, language=language, vocabularies=merged)


def save_adapter(
    checkpoint: Wav2Vec2Checkpoint,
    config: Wav2Vec2Config,
    weights: Mapping[str, Tensor],
    tokenizer: CTCTokenizer,
    folder: Path,
) -> None:
    """Write the adapter of ``tokenizer``'s language to ``folder``, with all that opening it needs.

    checkpoint: the model that it belongs to; its weights are linked, not copied, and the adapters of its other
    languages copied. weights: by our names; those of the language are taken. Raises OutputError.
    """
    assert tokenizer.language is not None
    names = dict(wav2vec2_names(config, f"{checkpoint.kind}."))
    spoken = {names[name]: tensor.contiguous() for name, tensor in weights.items() if is_language_weight(name)}
    with written_whole(folder) as place:
        save_file(spoken, place / f"adapter.{tokenizer.language}.safetensors", metadata={"format": "pt"})
        for language in checkpoint.languages:
            if language != tokenizer.language:
                file = adapter_file(checkpoint.folder, language)
                shutil.copyfile(file, place / file.name)
        _save_first_language(open_wav2vec2(checkpoint.path), tokenizer.language, place)
        for file in _shared_files(checkpoint):
            (place / file.name).symlink_to(os.path.realpath(file))
        dtype = checkpoint.settings.get("dtype") or checkpoint.settings.get("torch_dtype") or "float32"
        masks = any(name == MASK_EMBEDDING for name, _, _ in checkpoint.places)
        settings = replace(checkpoint, config=config, tokenizer=tokenizer, language=tokenizer.language)
        write_wav2vec2_settings(settings, place, str(dtype), masks=masks)


def _save_first_language(checkpoint: Wav2Vec2Checkpoint, besides: str, folder: Path) -> None:
    """Where a language is in the model's own weights alone, give it a file: in ``folder`` it is not the first."""
    language = checkpoint.language
    if checkpoint.config.adapter_width and language not in (None, besides, *checkpoint.languages):
        names = dict(wav2vec2_names(checkpoint.config, f"{checkpoint.kind}."))
        spoken = {names[name]: tensor.contiguous() for name, tensor in checkpoint.read(language_only=True)}
        save_file(spoken, folder / f"adapter.{language}.safetensors", metadata={"format": "pt"})


def _shared_files(checkpoint: Wav2Vec2Checkpoint) -> list[Path]:
    """The files of the weights of all languages, with the index of those in parts."""
    if checkpoint.path.is_file():
        return [checkpoint.path]
    folder = checkpoint.folder
    indices = list(folder.glob("*.index.json"))
    return [*(weight_files(folder) or weight_files(folder, "pytorch_model", ".bin")), *indices]
