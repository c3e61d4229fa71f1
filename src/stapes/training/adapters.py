"""A new language for wav2vec 2.0, XLS-R or MMS: small networks in each layer and a head are learnt, all else stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, load_wav2vec2, open_wav2vec2
from stapes.checkpoints.wav2vec2_adapters import add_vocabulary, check_code, save_adapter
from stapes.checkpoints.wav2vec2_names import is_language_weight
from stapes.errors import UsageError
from stapes.models.wav2vec2 import EncoderLayer, LanguageAdapter, Wav2Vec2
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.config import ModelOptions


def open_base(path: Path, options: ModelOptions) -> Wav2Vec2Checkpoint:
    """The model that is to learn a language. Raises UsageError for one that cannot have adapters, ModelError."""
    assert options.language is not None
    check_code(options.language)
    checkpoint = open_wav2vec2(path, language=options.adapter_start)
    if not checkpoint.config.pre_norm:
        raise UsageError(
            f"model.init {path.name} has its layer norms behind attention, where nobody uses adapters: take XLS-R, MMS "
            "or a large wav2vec 2.0, or train all of it with the recipe wav2vec2"
        )
    if checkpoint.kind != "wav2vec2":
        raise UsageError(f"model.init {path.name} is a HuBERT, whose file knows no adapters: take XLS-R or MMS")
    return checkpoint


def with_language(tokenizer: CTCTokenizer, path: Path, options: ModelOptions) -> CTCTokenizer:
    """The tokenizer of the language to learn, with the other languages' vocabularies. Raises UsageError, ModelError."""
    assert options.language is not None
    base = open_base(path, options)
    return add_vocabulary(base.tokenizer, tokenizer, options.language)


def build_adapter(path: Path, options: ModelOptions, tokenizer: CTCTokenizer) -> Wav2Vec2:
    """The network on the CPU in float32, of which only adapters and head are trained. Raises ModelError, UsageError.

    New adapters change nothing at first: the network begins as the one that knows no language.
    """
    checkpoint = open_base(path, options)
    inner = replace(
        checkpoint.config,
        hidden_dropout=options.dropout,
        activation_dropout=options.mlp_dropout,
        attention_dropout=options.dropout,
        head_dropout=options.head_dropout,
        layer_drop=options.layer_drop,
    )
    network = load_wav2vec2(replace(checkpoint, config=inner), torch.float32, torch.device("cpu"), trainable=True)
    if inner.adapter_width is None or options.adapter_start is None:
        _start_anew(network, inner.adapter_width or options.adapter_width)
    head = nn.Linear(inner.state_width, tokenizer.size)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    network.set_head(head)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(is_language_weight(name))
    return network


def _start_anew(network: Wav2Vec2, width: int) -> None:
    for layer in network.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        layer.adapter = LanguageAdapter(network.config.width, width)
        nn.init.normal_(layer.adapter.down.weight, std=0.02)
        nn.init.zeros_(layer.adapter.down.bias)
        nn.init.zeros_(layer.adapter.up.weight)
        nn.init.zeros_(layer.adapter.up.bias)
    network.config = replace(network.config, adapter_width=width)


def save_language(
    folder: Path,
    path: Path,
    network: Wav2Vec2,
    weights: Mapping[str, Tensor],
    tokenizer: CTCTokenizer,
    options: ModelOptions,
) -> None:
    """Write what was learnt, beside links to the model at ``path``. Raises OutputError."""
    config = network.config
    base = open_base(path, options)
    kept = {
        name: getattr(base.config, name)
        for name in ("hidden_dropout", "activation_dropout", "attention_dropout", "head_dropout", "layer_drop")
    }
    save_adapter(base, replace(config, **kept), weights, tokenizer, folder)
