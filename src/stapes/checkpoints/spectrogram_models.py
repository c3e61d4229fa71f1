"""Models over log-mel spectrograms that are trained here, CTC and hybrid, in Hugging Face's layout.

``transformers`` has no such networks, so ``config.json`` names a kind of our own (``stapes-ctc``, ``stapes-hybrid``)
and the sizes in our words; the weights have our names. Tokenizer and preprocessor files are as for other CTC models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stapes.checkpoints.files import weight_files
from stapes.checkpoints.folders import written_whole
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.tensors import open_tensors, read_tensors
from stapes.errors import ModelError
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig, WhisperEncoder, WhisperEncoderConfig
from stapes.models.hybrid import Hybrid, HybridConfig
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.text.files import read_json

Kind = Literal["ctc", "hybrid"]
KINDS: Mapping[str, Kind] = {"stapes-ctc": "ctc", "stapes-hybrid": "hybrid"}
"""``model_type`` of ``config.json`` → the kind of network."""

_ENCODERS = {"conformer": ConformerConfig, "whisper": WhisperEncoderConfig}
_NETWORKS: Mapping[Kind, tuple[type[CTCConfig] | type[HybridConfig], type[CTC] | type[Hybrid]]] = {
    "ctc": (CTCConfig, CTC),
    "hybrid": (HybridConfig, Hybrid),
}


@dataclass(frozen=True)
class SpectrogramCheckpoint:
    """A model on disk."""

    name: str
    path: Path
    config: CTCConfig | HybridConfig
    places: tuple[tuple[str, Path, str], ...]
    """Where each weight is: (our name, file, name in that file)."""
    tokenizer: CTCTokenizer

    @property
    def kind(self) -> Kind:
        """``"ctc"`` or ``"hybrid"``."""
        return "ctc" if isinstance(self.config, CTCConfig) else "hybrid"


def open_spectrogram_model(folder: Path, name: str | None = None, *, has_weights: bool = True) -> SpectrogramCheckpoint:
    """Describe the model in a folder. Raises ModelError for what is missing, damaged or another kind of model.

    has_weights: False for a folder whose weights are in graphs, not to be read.
    """
    source = folder / "config.json"
    settings = read_json(source)
    kind = KINDS.get(str(settings.get("model_type")))
    if kind is None:
        raise ModelError(f"{folder} holds a {settings.get('model_type', 'nameless')!r} model, not one trained here")
    files = weight_files(folder) if has_weights else []
    if has_weights and not files:
        raise ModelError(f"{folder} has no model.safetensors; copy the model's folder again")
    places = []
    for file in files:
        with open_tensors(file) as handle:
            places += [(key, file, key) for key in handle.keys()]  # noqa: SIM118
    config = _config(kind, settings, source)
    tokenizer = CTCTokenizer.from_folder(folder)
    if tokenizer.size > config.vocab_size:
        raise ModelError(
            f"{folder / 'vocab.json'} has {tokenizer.size} tokens but the model {config.vocab_size}: "
            "use the one that belongs to the model"
        )
    return SpectrogramCheckpoint(name or folder.name, folder, config, tuple(places), tokenizer)


def _config(kind: Kind, settings: Mapping[str, Any], source: Path) -> CTCConfig | HybridConfig:
    """The sizes in a ``config.json``. Raises ModelError for those that no network can have."""
    encoder = settings.get("encoder")
    encoder_class = _ENCODERS.get(str(encoder.get("type"))) if isinstance(encoder, dict) else None
    if not isinstance(encoder, dict) or encoder_class is None:
        raise ModelError(f"{source} does not say which encoder the model has; copy the model's folder again")
    inner = encoder_class(**_sizes(encoder, encoder_class, source))
    if inner.width % max(1, inner.heads):
        raise ModelError(f"{source}: the encoder's width is no multiple of its heads; copy the model's folder again")
    if isinstance(inner, ConformerConfig) and inner.subsampling not in (2, 4, 8):
        raise ModelError(f"{source}: the encoder's subsampling is {inner.subsampling}, not 2, 4 or 8")
    config_class = _NETWORKS[kind][0]
    return config_class(encoder=inner, **_sizes(settings, config_class, source))


def _sizes(settings: Mapping[str, Any], config_class: type, source: Path) -> dict[str, Any]:
    """The entries that are fields of ``config_class``, each of its default's type and not negative."""
    out: dict[str, Any] = {}
    for field in fields(config_class):
        if field.name == "encoder" or field.name not in settings:
            continue
        value = settings[field.name]
        wanted = type(field.default) if field.name != "vocab_size" else int
        good = type(value) is wanted or (wanted is float and type(value) is int)
        least = 0 if wanted is float or field.name == "heads" else 1
        if not good or (wanted is not bool and not value >= least) or (wanted is float and value > 1):
            raise ModelError(f"{source}: {field.name} is {value!r}, which cannot be; copy the model's folder again")
        out[field.name] = value
    if config_class in (CTCConfig, HybridConfig) and "vocab_size" not in out:
        raise ModelError(f"{source} does not say how many tokens there are (vocab_size); copy the model's folder again")
    return out


def build(config: CTCConfig | HybridConfig) -> CTC | Hybrid:
    """The network of these sizes, with the weights that training from nothing starts with."""
    return CTC(config) if isinstance(config, CTCConfig) else Hybrid(config)


def load_spectrogram_model(
    checkpoint: SpectrogramCheckpoint, dtype: torch.dtype, device: torch.device, *, trainable: bool = False
) -> CTC | Hybrid:
    """Build the network with its weights in ``dtype`` on ``device``, ready to run, or to train.

    Raises ModelError where a weight is missing, is too many or has not the shape that the configuration says.
    """
    with torch.device("meta"):
        model = build(checkpoint.config)
    _fill(model, read_tensors(checkpoint.places), checkpoint.path, dtype, device)
    return model.requires_grad_(trainable).train(trainable)


def load_whisper_encoder(checkpoint: WhisperCheckpoint, dropout: float = 0.0) -> WhisperEncoder:
    """The encoder of a Whisper of any format, float32 on the CPU, to train from. Raises ModelError."""
    sizes = checkpoint.config
    config = WhisperEncoderConfig(
        mel_bins=sizes.mel_bins,
        width=sizes.width,
        layers=sizes.encoder_layers,
        heads=sizes.encoder_heads,
        audio_context=sizes.audio_context,
        dropout=dropout,
    )
    model = WhisperEncoder(config)
    weights = (
        (name.removeprefix("encoder."), tensor) for name, tensor in checkpoint.read() if name.startswith("encoder.")
    )
    # Files may leave the positions out, which are the same in all.
    _fill(model, weights, checkpoint.path, torch.float32, torch.device("cpu"), optional={"positions"})
    return model


def _fill(
    model: nn.Module,
    weights: Any,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    optional: frozenset[str] | set[str] = frozenset(),
) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, tensor in weights:
        if tuple(tensor.shape) != shapes.pop(name, None):
            raise ModelError(f"{path}: the weight {name} is not one that config.json tells of; copy the model again")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True)))
    missing = sorted(set(shapes) - optional)
    if missing:
        raise ModelError(f"{path} lacks the weights {', '.join(missing[:3])}; copy the model again")


def save_spectrogram_model(
    folder: Path,
    config: CTCConfig | HybridConfig,
    weights: Mapping[str, Tensor],
    tokenizer: CTCTokenizer,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a model to ``folder``, whole or not at all; its weights in ``dtype``. Raises OutputError."""
    with written_whole(folder) as temporary:
        write_spectrogram_model(temporary, config, weights, tokenizer, dtype)


def write_spectrogram_model(
    folder: Path,
    config: CTCConfig | HybridConfig,
    weights: Mapping[str, Tensor],
    tokenizer: CTCTokenizer,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The files of a model, into a folder that is there."""
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_spectrogram_settings(folder, config, tokenizer, dtype)


def write_spectrogram_settings(
    folder: Path, config: CTCConfig | HybridConfig, tokenizer: CTCTokenizer, dtype: torch.dtype
) -> None:
    """All that a model's folder has beside its weights."""
    kind: Kind = "ctc" if isinstance(config, CTCConfig) else "hybrid"
    encoder = "conformer" if isinstance(config.encoder, ConformerConfig) else "whisper"
    settings = {
        "model_type": next(name for name, each in KINDS.items() if each == kind),
        "architectures": [_NETWORKS[kind][1].__name__],
        "dtype": str(dtype).removeprefix("torch."),
        "pad_token_id": tokenizer.blank_id,
        **asdict(config),
        "encoder": {"type": encoder, **asdict(config.encoder)},
    }
    preprocessor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config.encoder.mel_bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "padding_side": "right",
        "padding_value": 0.0,
    }
    for name, value in (("config.json", settings), ("preprocessor_config.json", preprocessor)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(folder)
