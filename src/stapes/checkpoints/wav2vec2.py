"""wav2vec 2.0, HuBERT, XLS-R and MMS in Hugging Face's layout: open, load, change the language, save."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stapes.checkpoints.files import weight_files
from stapes.checkpoints.tensors import open_tensors, read_tensors
from stapes.checkpoints.wav2vec2_names import (
    HEAD,
    MASK_EMBEDDING,
    POSITIONS,
    WEIGHT_NORM,
    config_of,
    fold_weight_norm,
    is_language_weight,
    settings_of,
    split_weight_norm,
    wav2vec2_names,
)
from stapes.devices.memory import trim_heap
from stapes.errors import ModelError, OutputError, UsageError
from stapes.models.wav2vec2 import SAMPLE_RATE, Wav2Vec2, Wav2Vec2Config
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.text.files import read_json

_CLASSES = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert"}
# Everything in a checkpoint whose name begins so must be known; what lies elsewhere served pre-training.
_NETWORK = ("feature_extractor.", "feature_projection.", "encoder.", "adapter.", "lm_head.")
# How a place says which half of a weight norm it holds.
_MAGNITUDE, _DIRECTION = f"{POSITIONS}/magnitude", f"{POSITIONS}/direction"


@dataclass(frozen=True)
class Wav2Vec2Checkpoint:
    """A model on disk, in one language where it has several."""

    name: str
    path: Path
    kind: str
    """``"wav2vec2"`` or ``"hubert"``."""
    config: Wav2Vec2Config
    places: tuple[tuple[str, Path, str], ...]
    """Where each weight is: (our name, file, name in that file)."""
    tokenizer: CTCTokenizer | None = None
    """None where there is no ``vocab.json``, as with models that are only pre-trained."""
    normalize: bool = True
    """Whether the network wants waveforms of zero mean and unit variance."""
    language: str | None = None
    languages: tuple[str, ...] = ()
    """The languages whose adapters are here, sorted."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """``config.json`` as it is, with what only training or ``transformers`` reads."""

    @property
    def folder(self) -> Path:
        """Where the other files of the model are."""
        return self.path if self.path.is_dir() else self.path.parent

    def read(self, *, language_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (our parameter name, tensor on the CPU in the file's dtype), each parameter once.

        ``language_only`` leaves out all but the adapters and the head.
        """
        magnitude = None
        places = [place for place in self.places if is_language_weight(place[0]) or not language_only]
        for name, tensor in read_tensors(places):
            if name == _MAGNITUDE:
                magnitude = tensor
            elif name == _DIRECTION:
                assert magnitude is not None
                yield POSITIONS, fold_weight_norm(magnitude, tensor)
            else:
                yield name, tensor


def has_languages(path: Path) -> bool:
    """Whether the model there has adapters and vocabularies for several languages, though they may not all be here."""
    folder = path if path.is_dir() else path.parent
    if not read_json(folder / "config.json").get("adapter_attn_dim"):
        return False
    vocabulary = folder / "vocab.json"
    nested = vocabulary.exists() and any(isinstance(value, dict) for value in read_json(vocabulary).values())
    return nested or bool(_languages(folder))


def open_wav2vec2(path: Path, name: str | None = None, language: str | None = None) -> Wav2Vec2Checkpoint:
    """Describe the model in a folder, or in a file of weights with its ``config.json`` beside it.

    ``language`` (as the model spells it: MMS has ``eng``, ``deu``) chooses among adapters and vocabularies; None: the
    one that the model was saved with. Raises ModelError for what is missing, damaged or not supported, UsageError for
    a language that the model does not have.
    """
    folder = path if path.is_dir() else path.parent
    settings = read_json(folder / "config.json")
    kind = settings.get("model_type")
    if kind not in _CLASSES:
        raise ModelError(f"{folder} holds a {kind or 'nameless'!r} model; wav2vec2 and hubert are supported")
    if kind == "hubert":
        settings = settings | {"add_adapter": False}  # transformers builds none for it
    files = [path] if path.is_file() else weight_files(folder) or weight_files(folder, "pytorch_model", ".bin")
    if not files:
        raise ModelError(f"{folder} has no model.safetensors and no pytorch_model.bin; fetch the model again")
    found = _find(files, kind)
    languages = _languages(folder) if settings.get("adapter_attn_dim") else ()
    spoken = language or _default_language(folder)
    if spoken in languages:  # that of the weights themselves may be another: they are not ours to change
        found |= _find([adapter_file(folder, spoken)], kind)
        if "lm_head.weight" in found:
            settings = settings | {"vocab_size": _rows(*found["lm_head.weight"])}
    config = config_of(settings, folder / "config.json", has_head="lm_head.weight" in found)
    tokenizer = _tokenizer(folder, language, languages) if config.vocab_size or language is not None else None
    if tokenizer is not None and config.vocab_size is not None and tokenizer.size > config.vocab_size:
        raise ModelError(
            f"{folder / 'vocab.json'} has {tokenizer.size} tokens but the model {config.vocab_size}: "
            "use the one that belongs to the model"
        )
    return Wav2Vec2Checkpoint(
        name=name or (folder.name if path.is_dir() else path.stem),
        path=path,
        kind=kind,
        config=config,
        places=_places(config, found, path),
        tokenizer=tokenizer,
        normalize=_normalize(folder),
        language=tokenizer.language if tokenizer else None,
        languages=languages,
        settings=settings,
    )


def describe_wav2vec2(folder: Path, name: str | None = None) -> Wav2Vec2Checkpoint:
    """A model whose weights are in a graph, not to be read: as `open_wav2vec2` in its one language."""
    settings = read_json(folder / "config.json")
    return Wav2Vec2Checkpoint(
        name=name or folder.name,
        path=folder,
        kind=str(settings.get("model_type")),
        config=config_of(settings, folder / "config.json", has_head=True),
        places=(),
        tokenizer=CTCTokenizer.from_folder(folder),
        normalize=_normalize(folder),
        settings=settings,
    )


def _tokenizer(folder: Path, language: str | None, languages: tuple[str, ...]) -> CTCTokenizer | None:
    """The tokenizer, if there is one. Raises UsageError for a language that the weights are not there for."""
    tokenizer = CTCTokenizer.from_folder(folder, language) if (folder / "vocab.json").exists() else None
    if language is None or language in languages:
        return tokenizer
    # Without a file of its own it can only be the one that the weights were saved in.
    if tokenizer is not None and CTCTokenizer.from_folder(folder).language == language:
        return tokenizer
    close = difflib.get_close_matches(language, languages, n=3) or languages[:5]
    hint = f"it has {', '.join(close)}" if close else "it has none"
    raise UsageError(f"{folder.name} has no adapter for the language {language!r}: {hint}")


def _find(files: list[Path], kind: str) -> dict[str, tuple[Path, str]]:
    """Hugging Face's name of each weight, without the prefix that models with a head have → file, name in it."""
    found = {}
    for file in files:
        with open_tensors(file) as handle:
            found |= {key.removeprefix(f"{kind}."): (file, key) for key in handle.keys()}  # noqa: SIM118
    return found


def _rows(file: Path, key: str) -> int:
    with open_tensors(file) as handle:
        return handle.get_tensor(key).shape[0]


def _places(
    config: Wav2Vec2Config, found: Mapping[str, tuple[Path, str]], path: Path
) -> tuple[tuple[str, Path, str], ...]:
    """Where each parameter is. Raises ModelError for one that is missing, and for one that the network has not."""
    places, missing = [], []
    unknown = {name for name in found if name.startswith(_NETWORK)}
    for ours, theirs in wav2vec2_names(config, ""):
        parts = {ours: theirs}
        if ours == POSITIONS and theirs not in found:
            stem = theirs.removesuffix("weight")
            magnitude, direction = next((names for names in WEIGHT_NORM if stem + names[0] in found), WEIGHT_NORM[0])
            parts = {_MAGNITUDE: stem + magnitude, _DIRECTION: stem + direction}
        for our_part, name in parts.items():
            if name in found:
                places.append((our_part, *found[name]))
                unknown.discard(name)
            elif ours != MASK_EMBEDDING:
                missing.append(name)
    if missing:
        raise ModelError(f"{path} lacks the weights {', '.join(missing[:3])}; fetch the model again")
    if unknown:
        raise ModelError(
            f"{path} has weights that its config.json does not tell of, {', '.join(sorted(unknown)[:3])}: "
            "it is another kind of model, which is not supported"
        )
    return tuple(places)


def _languages(folder: Path) -> tuple[str, ...]:
    files = [file for file in folder.glob("adapter.*.*") if file.suffix in (".safetensors", ".bin")]
    return tuple(sorted({file.name.removeprefix("adapter.").removesuffix(file.suffix) for file in files}))


def _default_language(folder: Path) -> str:
    """The language that the tokenizer is set to; empty where there are no vocabularies of several."""
    settings = folder / "tokenizer_config.json"
    return str(read_json(settings).get("target_lang") or "") if settings.exists() else ""


def adapter_file(folder: Path, language: str) -> Path:
    """Where a model keeps what it learnt of a language."""
    file = folder / f"adapter.{language}.safetensors"
    return file if file.exists() else file.with_suffix(".bin")


def _normalize(folder: Path) -> bool:
    """Whether waveforms are normalised; ModelError for a model that hears another sample rate."""
    settings: dict[str, Any] = {}
    for file in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        if file.exists():
            values = read_json(file)
            values = values.get("feature_extractor", values)  # transformers 5 keeps it within the processor's file
            settings |= values if isinstance(values, dict) else {}
    rate = settings.get("sampling_rate", SAMPLE_RATE)
    if rate != SAMPLE_RATE:
        raise ModelError(f"{folder} hears audio of {rate} Hz; only models for {SAMPLE_RATE} Hz are supported")
    return bool(settings.get("do_normalize", True))


def load_wav2vec2(
    checkpoint: Wav2Vec2Checkpoint, dtype: torch.dtype, device: torch.device, *, trainable: bool = False
) -> Wav2Vec2:
    """Build the network with its weights in ``dtype`` on ``device``, ready to run, or to train.

    Each weight is converted as it is read, so that the peak is the model itself and one weight more. Raises
    ModelError where a weight has not the shape that the configuration says.
    """
    with torch.device("meta"):
        model = Wav2Vec2(checkpoint.config)
    shapes = _shapes(model)
    for name, tensor in checkpoint.read():
        _check(checkpoint, name, tensor, shapes)
        _assign(model, name, tensor.to(device=device, dtype=dtype, copy=True))
    if model.encoder.mask_embedding.is_meta:
        model.encoder.mask_embedding = nn.Parameter(torch.zeros(checkpoint.config.width, dtype=dtype, device=device))
    trim_heap()
    return model.requires_grad_(trainable).train(trainable)


def set_language(model: Wav2Vec2, checkpoint: Wav2Vec2Checkpoint, language: str) -> Wav2Vec2Checkpoint:
    """Give a loaded model the adapters and the head of another language; returns its checkpoint in that language.

    Raises ModelError and UsageError as `open_wav2vec2` does, with the model unchanged.
    """
    other = open_wav2vec2(checkpoint.path, checkpoint.name, language)
    weights = dict(other.read(language_only=True))
    with torch.device("meta"):
        head = nn.Linear(other.config.state_width, weights[f"{HEAD}weight"].shape[0])
    shapes = _shapes(model) | {HEAD + name: tuple(parameter.shape) for name, parameter in head.named_parameters()}
    for name, tensor in weights.items():
        _check(other, name, tensor, shapes)
    parameter = model.encoder.mask_embedding
    assert model.head is not None
    head.requires_grad_(model.head.weight.requires_grad)
    model.set_head(head)
    for name, tensor in weights.items():
        _assign(model, name, tensor.to(device=parameter.device, dtype=parameter.dtype, copy=True))
    return other


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _check(checkpoint: Wav2Vec2Checkpoint, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if tuple(tensor.shape) != shapes[name]:
        raise ModelError(
            f"{checkpoint.path}: {name} has the shape {tuple(tensor.shape)}, expected {shapes[name]}; "
            "fetch the model again"
        )


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(tensor, requires_grad=model.get_parameter(name).requires_grad)
    setattr(model.get_submodule(owner), leaf, parameter)


def save_wav2vec2(checkpoint: Wav2Vec2Checkpoint, folder: Path, model: Wav2Vec2 | None = None) -> None:
    """Write a model to ``folder`` in Hugging Face's layout, whole or not at all.

    ``model``: the network to write in place of the checkpoint's own weights, as after training; its configuration
    counts. Its adapters become those of the checkpoint's language; those of other languages are copied. A model made
    from nothing is saved with a checkpoint that has no ``places``. Raises OutputError where the folder cannot be
    written.
    """
    config = checkpoint.config if model is None else model.config
    weights = checkpoint.read() if model is None else iter(model.state_dict().items())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _save(replace(checkpoint, config=config), weights, temporary)
            temporary.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(temporary, folder)  # noqa: PTH104
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error


def _save(checkpoint: Wav2Vec2Checkpoint, weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    config = checkpoint.config
    # A model without a head is written as the bare network, whose names have no prefix.
    names = dict(wav2vec2_names(config, f"{checkpoint.kind}." if config.vocab_size else ""))
    state: dict[str, Tensor] = {}
    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous()
        if name == POSITIONS:
            stem = names[name].removesuffix("weight")
            state |= zip((stem + part for part in WEIGHT_NORM[0]), split_weight_norm(tensor), strict=True)
        else:
            state[names[name]] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    write_wav2vec2_settings(checkpoint, folder, dtype, masks=names[MASK_EMBEDDING] in state)
    if config.adapter_width and checkpoint.language is not None:
        spoken = {names[name] for name in names if is_language_weight(name)}
        adapter = {name: tensor for name, tensor in state.items() if name in spoken}
        save_file(adapter, folder / f"adapter.{checkpoint.language}.safetensors", metadata={"format": "pt"})
    for language in checkpoint.languages:
        if language != checkpoint.language:
            file = adapter_file(checkpoint.folder, language)
            shutil.copyfile(file, folder / file.name)


def write_wav2vec2_settings(
    checkpoint: Wav2Vec2Checkpoint, folder: Path, dtype: str, *, masks: bool = False, architecture: str | None = None
) -> None:
    """All that a model's folder has beside its weights.

    ``masks``: the embedding of hidden frames is among them. ``architecture``: the class of ``transformers`` that opens
    it; None: that of CTC, or of the bare network.
    """
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    settings = dict(checkpoint.settings) | settings_of(config)
    settings["model_type"] = checkpoint.kind
    usual = _CLASSES[checkpoint.kind] + ("ForCTC" if config.vocab_size else "Model")
    settings["architectures"] = [architecture or usual]
    settings["dtype"] = dtype
    settings.pop("torch_dtype", None)
    if not masks:
        settings |= {"mask_time_prob": 0.0, "mask_feature_prob": 0.0}  # transformers would look for it
    if tokenizer is not None:
        settings["pad_token_id"] = tokenizer.blank_id  # what transformers' CTC loss takes for the blank
        tokenizer.save(folder)
    preprocessor = {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "processor_class": "Wav2Vec2Processor",
        "feature_size": 1,
        "sampling_rate": SAMPLE_RATE,
        "do_normalize": checkpoint.normalize,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": config.conv_norm == "layer",
    }
    for name, value in (("config.json", settings), ("preprocessor_config.json", preprocessor)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
