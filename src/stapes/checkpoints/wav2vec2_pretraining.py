"""wav2vec 2.0 with what pre-training needs, as ``transformers`` keeps it (``Wav2Vec2ForPreTraining``).

A folder that is written here is opened by ``transformers``, by `open_wav2vec2` (which leaves the quantiser where it
is) for fine-tuning, and by `load_pretraining` to go on with pre-training, on other recordings perhaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stapes.checkpoints.folders import written_whole
from stapes.checkpoints.tensors import open_tensors
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, load_wav2vec2, open_wav2vec2, write_wav2vec2_settings
from stapes.checkpoints.wav2vec2_names import POSITIONS, WEIGHT_NORM, split_weight_norm, wav2vec2_names
from stapes.errors import ModelError
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining, Wav2Vec2PretrainingConfig, initialize_pretraining

_PREFIX = "wav2vec2."
_CODEBOOKS = "quantizer.codebooks"
_NAMES = {
    _CODEBOOKS: "quantizer.codevectors",
    "quantizer.projection.weight": "quantizer.weight_proj.weight",
    "quantizer.projection.bias": "quantizer.weight_proj.bias",
    "state_projection.weight": "project_hid.weight",
    "state_projection.bias": "project_hid.bias",
    "code_projection.weight": "project_q.weight",
    "code_projection.bias": "project_q.bias",
}
"""Our name → Hugging Face's, of what the network alone has not."""

_SETTINGS = [
    ("code_groups", "num_codevector_groups"),
    ("codes", "num_codevectors_per_group"),
    ("code_width", "codevector_dim"),
    ("projection_width", "proj_codevector_dim"),
    ("feature_dropout", "feat_quantizer_dropout"),
    ("logit_temperature", "contrastive_logits_temperature"),
]


@dataclass(frozen=True)
class PretrainingCheckpoint:
    """A model to pre-train, on disk."""

    network: Wav2Vec2Checkpoint
    """The network in it, without a head."""
    weights: Mapping[str, Tensor]
    """By our names: the quantiser and the projections; empty where the model has none."""
    sizes: Mapping[str, Any]
    """Fields of `Wav2Vec2PretrainingConfig` that its ``config.json`` states."""


def open_pretraining(path: Path) -> PretrainingCheckpoint:
    """Describe a model to go on with. One without a quantiser, such as a fine-tuned one, will get a new one.

    Raises ModelError for what is missing, damaged or cannot be pre-trained.
    """
    network = open_wav2vec2(path)
    if network.kind != "wav2vec2" or network.config.downsampling_layers or network.config.adapter_width:
        raise ModelError(
            f"{path} cannot be pre-trained: it is no plain wav2vec 2.0; name one, or start without model.init"
        )
    theirs = {name: ours for ours, name in _NAMES.items()}
    weights: dict[str, Tensor] = {}
    for file in sorted({place[1] for place in network.places}):
        with open_tensors(file) as handle:
            for name in [name for name in handle.keys() if name in theirs]:  # noqa: SIM118
                weights[theirs[name]] = handle.get_tensor(name).float()
    missing = _NAMES.keys() - weights.keys()
    if weights and missing:
        raise ModelError(f"{path} lacks the weights {', '.join(sorted(missing)[:3])}; fetch the model again")
    sizes = {ours: network.settings[theirs] for ours, theirs in _SETTINGS if network.settings.get(theirs) is not None}
    return PretrainingCheckpoint(network, weights, sizes)


def load_pretraining(checkpoint: PretrainingCheckpoint, config: Wav2Vec2PretrainingConfig) -> Wav2Vec2Pretraining:
    """The model in float32 on the CPU, ready to train; ``config`` is one of the checkpoint's sizes.

    A quantiser that is not there is drawn by PyTorch's generator. Raises ModelError where a weight has another shape
    than ``config`` says.
    """
    with torch.device("meta"):
        model = Wav2Vec2Pretraining(config)
    found = load_wav2vec2(
        replace(checkpoint.network, config=replace(config.network, vocab_size=checkpoint.network.config.vocab_size)),
        torch.float32,
        torch.device("cpu"),
        trainable=True,
    )
    if not checkpoint.weights:
        model.to_empty(device="cpu")
        initialize_pretraining(model)
    model.feature_extractor, model.encoder = found.feature_extractor, found.encoder
    if not bool(model.encoder.mask_embedding.any()):
        nn.init.uniform_(model.encoder.mask_embedding)
    for name, tensor in checkpoint.weights.items():
        shape = model.get_parameter(name).shape
        if tensor.numel() != shape.numel() or (name != _CODEBOOKS and tensor.shape != shape):
            raise ModelError(
                f"{checkpoint.network.path}: {name} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}; "
                "fetch the model again"
            )
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.reshape(shape)))
    return model.train().requires_grad_()


def save_pretraining(
    folder: Path,
    config: Wav2Vec2PretrainingConfig,
    weights: Mapping[str, Tensor],
    *,
    normalize: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as ``transformers``' ``Wav2Vec2ForPreTraining``, whole or not at all.

    weights: by our names. normalize: whether it hears waveforms of zero mean and unit variance. settings: the
    ``config.json`` that it began with. Raises OutputError where the folder cannot be written.
    """
    names = dict(wav2vec2_names(config.network, _PREFIX)) | _NAMES
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        tensor = tensor.detach().cpu().contiguous()
        if name == POSITIONS:
            stem = names[name].removesuffix("weight")
            state |= zip((stem + part for part in WEIGHT_NORM[0]), split_weight_norm(tensor), strict=True)
        elif name == _CODEBOOKS:
            state[names[name]] = tensor.flatten(0, 1)[None]
        else:
            state[names[name]] = tensor
    kept = dict(settings or {}) | {theirs: getattr(config, ours) for ours, theirs in _SETTINGS}
    if not kept.get("mask_time_prob"):
        kept.pop("mask_time_prob", None)  # with none, transformers would build no embedding of hidden frames
    checkpoint = Wav2Vec2Checkpoint(
        name=folder.name,
        path=folder,
        kind="wav2vec2",
        config=config.network,
        places=(),
        normalize=normalize,
        settings=kept,
    )
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    with written_whole(folder) as temporary:
        save_file(state, temporary / "model.safetensors", metadata={"format": "pt"})
        write_wav2vec2_settings(checkpoint, temporary, dtype, masks=True, architecture="Wav2Vec2ForPreTraining")
