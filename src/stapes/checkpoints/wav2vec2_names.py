"""wav2vec 2.0 and HuBERT in Hugging Face's terms: the names of their weights and of their settings, both ways."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stapes.errors import ModelError
from stapes.models.wav2vec2 import Wav2Vec2Config

POSITIONS = "encoder.positions.conv.weight"
"""Stored as a direction and a magnitude (weight norm): see `fold_weight_norm`."""
MASK_EMBEDDING = "encoder.mask_embedding"
"""Left out of files of models that were trained without masks."""
HEAD = "head."

# The direction's magnitude and the direction: as published, and as PyTorch's newer parametrization stores them.
WEIGHT_NORM = (("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1"))

# Our setting and Hugging Face's, where they mean the same.
_SETTINGS = [
    ("width", "hidden_size"),
    ("layers", "num_hidden_layers"),
    ("heads", "num_attention_heads"),
    ("mlp_width", "intermediate_size"),
    ("vocab_size", "vocab_size"),
    ("conv_channels", "conv_dim"),
    ("conv_kernels", "conv_kernel"),
    ("conv_strides", "conv_stride"),
    ("conv_bias", "conv_bias"),
    ("conv_norm", "feat_extract_norm"),
    ("projection_norm", "feat_proj_layer_norm"),
    ("position_kernel", "num_conv_pos_embeddings"),
    ("position_groups", "num_conv_pos_embedding_groups"),
    ("pre_norm", "do_stable_layer_norm"),
    ("norm_epsilon", "layer_norm_eps"),
    ("adapter_width", "adapter_attn_dim"),
    ("downsampling_layers", "num_adapter_layers"),
    ("downsampling_kernel", "adapter_kernel_size"),
    ("downsampling_stride", "adapter_stride"),
    ("downsampling_width", "output_hidden_size"),
    ("hidden_dropout", "hidden_dropout"),
    ("activation_dropout", "activation_dropout"),
    ("attention_dropout", "attention_dropout"),
    ("projection_dropout", "feat_proj_dropout"),
    ("head_dropout", "final_dropout"),
    ("layer_drop", "layerdrop"),
]
# What transformers assumes of a model that has them and does not say how many.
_DOWNSAMPLING_LAYERS = 3
# What the network takes for granted.
_FIXED = {"hidden_act": "gelu", "feat_extract_activation": "gelu", "conv_pos_batch_norm": False}

_LINEAR = [("weight", "weight"), ("bias", "bias")]
_LAYER = [
    ("attention_norm", "layer_norm"),
    ("attention.query", "attention.q_proj"),
    ("attention.key", "attention.k_proj"),
    ("attention.value", "attention.v_proj"),
    ("attention.out", "attention.out_proj"),
    ("mlp_norm", "final_layer_norm"),
    ("mlp.up", "feed_forward.intermediate_dense"),
    ("mlp.down", "feed_forward.output_dense"),
]
_ADAPTER = [
    ("adapter.norm", "adapter_layer.norm"),
    ("adapter.down", "adapter_layer.linear_1"),
    ("adapter.up", "adapter_layer.linear_2"),
]


def wav2vec2_names(config: Wav2Vec2Config, base: str) -> list[tuple[str, str]]:
    """Every parameter as (our name, Hugging Face's), the head last; ``base`` is ``"wav2vec2."`` or ``"hubert."``.

    That of the positional weight is the name it would have without weight norm.
    """
    rows = [(MASK_EMBEDDING, f"{base}masked_spec_embed")]
    modules = [
        ("encoder.projection.linear", "feature_projection.projection"),
        ("encoder.positions.conv", "encoder.pos_conv_embed.conv"),
        ("encoder.norm", "encoder.layer_norm"),
    ]
    if config.projection_norm:
        modules.append(("encoder.projection.norm", "feature_projection.layer_norm"))
    for i in range(len(config.conv_channels)):
        ours = f"feature_extractor.{f'layers.{i - 1}' if i else 'first'}"
        theirs = f"feature_extractor.conv_layers.{i}"
        rows += _under(f"{ours}.conv", f"{base}{theirs}.conv", _LINEAR[: 1 + config.conv_bias])
        if config.conv_norm == "layer" or i == 0:
            modules.append((f"{ours}.norm", f"{theirs}.layer_norm"))
    for i in range(config.layers):
        layer = _LAYER + (_ADAPTER if config.adapter_width else [])
        modules += _under(f"encoder.layers.{i}", f"encoder.layers.{i}", layer)
    if config.downsampling_layers and config.state_width != config.width:
        modules += [("downsampling.projection", "adapter.proj"), ("downsampling.norm", "adapter.proj_layer_norm")]
    for i in range(config.downsampling_layers):
        modules.append((f"downsampling.layers.{i}", f"adapter.layers.{i}.conv"))
    for ours, theirs in modules:
        rows += _under(ours, base + theirs, _LINEAR)
    return rows + (_under("head", "lm_head", _LINEAR) if config.vocab_size else [])


def is_language_weight(name: str) -> bool:
    """Whether the parameter (by our name) is one that MMS keeps for each language."""
    return ".adapter." in name or name.startswith(HEAD)


def is_language_alone(names: Iterable[str]) -> bool:
    """Whether parameters are a language's, its adapters among them, and no others."""
    every = list(names)
    return all(map(is_language_weight, every)) and any(".adapter." in name for name in every)


def _under(ours: str, theirs: str, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{ours}.{a}", f"{theirs}.{b}") for a, b in rows]


def fold_weight_norm(magnitude: Tensor, direction: Tensor) -> Tensor:
    """The weight (outputs, inputs, kernel) that weight norm stands for: a norm for each position of the kernel."""
    wide = direction.float()
    norm = wide.norm(dim=(0, 1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide * (magnitude.float() / norm)).to(direction.dtype)


def split_weight_norm(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(magnitude, direction) of a weight: the other way round. Where it is zero the direction is any but zero."""
    magnitude = weight.float().norm(dim=(0, 1), keepdim=True).to(weight.dtype)
    return magnitude, torch.where(magnitude == 0, torch.ones_like(weight), weight)


def config_of(settings: Mapping[str, Any], source: Path, *, has_head: bool) -> Wav2Vec2Config:
    """The network that a ``config.json`` describes. Raises ModelError for one that is damaged or not supported."""
    for name, value in _FIXED.items():
        if settings.get(name, value) != value:
            raise ModelError(
                f"{source}: {name} is {settings[name]!r}, but only {value!r} is supported; use another model"
            )
    values: dict[str, Any] = {}
    for ours, theirs in _SETTINGS:
        if settings.get(theirs) is not None:
            value = settings[theirs]
            values[ours] = tuple(value) if isinstance(value, list) else value
    if not has_head:
        values["vocab_size"] = None
    elif "vocab_size" not in values:
        raise ModelError(f"{source} does not say how many tokens there are (vocab_size); fetch the model again")
    if not settings.get("add_adapter"):
        values = {name: value for name, value in values.items() if not name.startswith("downsampling")}
    elif "downsampling_layers" not in values:
        values["downsampling_layers"] = _DOWNSAMPLING_LAYERS
    config = Wav2Vec2Config(**values)
    problem = _problem(config)
    if problem:
        raise ModelError(f"{source}: {problem}; fetch the model again, or use another one")
    return config


def _problem(config: Wav2Vec2Config) -> str | None:
    """Why a network cannot have these sizes, if it cannot."""
    sizes = ["width", "layers", "heads", "mlp_width", "position_kernel", "position_groups"]
    sizes += ["downsampling_kernel", "downsampling_stride"]
    optional = ("vocab_size", "adapter_width", "downsampling_width")
    sizes += [name for name in optional if getattr(config, name) is not None]
    for name in sizes:
        if type(getattr(config, name)) is not int or getattr(config, name) < 1:
            return f"{dict(_SETTINGS)[name]} is {getattr(config, name)!r}, not a positive whole number"
    if type(config.downsampling_layers) is not int or config.downsampling_layers < 0:
        return f"num_adapter_layers is {config.downsampling_layers!r}, not a whole number"
    convolutions = (config.conv_channels, config.conv_kernels, config.conv_strides)
    if not all(isinstance(c, tuple) and all(type(n) is int and n > 0 for n in c) for c in convolutions):
        return "conv_dim, conv_kernel and conv_stride are not lists of positive whole numbers"
    if len({len(c) for c in convolutions}) != 1 or not config.conv_channels:
        return "conv_dim, conv_kernel and conv_stride are not of one length"
    for name in ("conv_bias", "projection_norm", "pre_norm"):
        if type(getattr(config, name)) is not bool:
            return f"{dict(_SETTINGS)[name]} is {getattr(config, name)!r}, not true or false"
    if config.conv_norm not in ("group", "layer"):
        return f"feat_extract_norm is {config.conv_norm!r}, not 'group' or 'layer'"
    if config.width % config.heads or config.width % config.position_groups:
        return "the width is no multiple of the heads or of the groups of the positional convolution"
    if config.adapter_width and not config.pre_norm:
        return "it has adapters for languages but no do_stable_layer_norm, without which nobody uses them"
    dropouts = [getattr(config, name) for name, _ in _SETTINGS if "drop" in name]
    if not all(type(rate) in (int, float) and math.isfinite(rate) and 0 <= rate < 1 for rate in dropouts):
        return "a dropout is not a number from 0 up to 1"
    if type(config.norm_epsilon) not in (int, float) or not config.norm_epsilon > 0:
        return f"layer_norm_eps is {config.norm_epsilon!r}, not a positive number"
    return None


def settings_of(config: Wav2Vec2Config) -> dict[str, Any]:
    """The entries of ``config.json`` that describe the network."""
    out: dict[str, Any] = {}
    for ours, theirs in _SETTINGS:
        value = getattr(config, ours)
        if value is not None:
            out[theirs] = list(value) if isinstance(value, tuple) else value
    out["num_feat_extract_layers"] = len(config.conv_channels)
    out["add_adapter"] = config.downsampling_layers > 0
    out["output_hidden_size"] = config.state_width
    out["num_adapter_layers"] = config.downsampling_layers or _DOWNSAMPLING_LAYERS
    return out | _FIXED
