"""What every model format is turned into: one description, and tensors by our names, one at a time.

Weights are never held twice. A reader yields a tensor, the loader converts it to the dtype and the device it will
run in, and both forget the original before the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from stapes.errors import ModelError
from stapes.kernels.fp8_weights import Fp8Weight
from stapes.kernels.quantization import Quantized
from stapes.models.whisper import WhisperConfig
from stapes.options import Precision

EMBEDDING = "decoder.embedding.weight"
"""The largest weight of all. Readers yield it first, while little else is in memory."""

# Parameter names, one row each: ours, Hugging Face's, openai/whisper's. A layer's rows are relative to the layer.
_TOP_LEVEL = [
    (EMBEDDING, "model.decoder.embed_tokens.weight", "decoder.token_embedding.weight"),
    ("encoder.conv1.weight", "model.encoder.conv1.weight", "encoder.conv1.weight"),
    ("encoder.conv1.bias", "model.encoder.conv1.bias", "encoder.conv1.bias"),
    ("encoder.conv2.weight", "model.encoder.conv2.weight", "encoder.conv2.weight"),
    ("encoder.conv2.bias", "model.encoder.conv2.bias", "encoder.conv2.bias"),
    ("encoder.positions", "model.encoder.embed_positions.weight", "encoder.positional_embedding"),
    ("encoder.norm.weight", "model.encoder.layer_norm.weight", "encoder.ln_post.weight"),
    ("encoder.norm.bias", "model.encoder.layer_norm.bias", "encoder.ln_post.bias"),
    ("decoder.positions", "model.decoder.embed_positions.weight", "decoder.positional_embedding"),
    ("decoder.norm.weight", "model.decoder.layer_norm.weight", "decoder.ln.weight"),
    ("decoder.norm.bias", "model.decoder.layer_norm.bias", "decoder.ln.bias"),
]
_ATTENTION = [
    ("query.weight", "q_proj.weight", "query.weight"),
    ("query.bias", "q_proj.bias", "query.bias"),
    ("key.weight", "k_proj.weight", "key.weight"),
    ("value.weight", "v_proj.weight", "value.weight"),
    ("value.bias", "v_proj.bias", "value.bias"),
    ("out.weight", "out_proj.weight", "out.weight"),
    ("out.bias", "out_proj.bias", "out.bias"),
]
_MLP = [
    ("mlp.up.weight", "fc1.weight", "mlp.0.weight"),
    ("mlp.up.bias", "fc1.bias", "mlp.0.bias"),
    ("mlp.down.weight", "fc2.weight", "mlp.2.weight"),
    ("mlp.down.bias", "fc2.bias", "mlp.2.bias"),
]


def _norm(ours: str, huggingface: str, openai: str) -> list[tuple[str, str, str]]:
    return [(f"{ours}.{part}", f"{huggingface}.{part}", f"{openai}.{part}") for part in ("weight", "bias")]


def _under(ours: str, huggingface: str, openai: str, rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [(f"{ours}.{a}", f"{huggingface}.{b}", f"{openai}.{c}") for a, b, c in rows]


_ENCODER_LAYER = [
    *_norm("attention_norm", "self_attn_layer_norm", "attn_ln"),
    *_under("attention", "self_attn", "attn", _ATTENTION),
    *_norm("mlp_norm", "final_layer_norm", "mlp_ln"),
    *_MLP,
]
_DECODER_LAYER = [
    *_ENCODER_LAYER,
    *_norm("cross_attention_norm", "encoder_attn_layer_norm", "cross_attn_ln"),
    *_under("cross_attention", "encoder_attn", "cross_attn", _ATTENTION),
]


def whisper_names(config: WhisperConfig) -> list[tuple[str, str, str]]:
    """Every parameter of a Whisper as (our name, Hugging Face's, openai/whisper's)."""
    rows = list(_TOP_LEVEL)
    for i in range(config.encoder_layers):
        rows += _under(f"encoder.layers.{i}", f"model.encoder.layers.{i}", f"encoder.blocks.{i}", _ENCODER_LAYER)
    for i in range(config.decoder_layers):
        rows += _under(f"decoder.layers.{i}", f"model.decoder.layers.{i}", f"decoder.blocks.{i}", _DECODER_LAYER)
    return rows


def whisper_config(source: Path, **sizes: Any) -> WhisperConfig:
    """The sizes that ``source`` states, checked. Raises ModelError where one is missing or cannot be."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ModelError(
                f"{source} does not say how large the model is ({name} is {size!r}); fetch the model again"
            )
    config = WhisperConfig(**sizes)
    if config.width % config.encoder_heads or config.width % config.decoder_heads:
        raise ModelError(f"{source} is damaged: its width is no multiple of its heads; fetch the model again")
    return config


def pairs(heads: object) -> tuple[tuple[int, int], ...] | None:
    """A list of (layer, head) lists, as JSON has them; None where it is anything else, or empty."""
    if not isinstance(heads, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in heads):
        return None
    return tuple((layer, head) for layer, head in heads) or None


@dataclass(frozen=True)
class WhisperCheckpoint:
    """A Whisper on disk.

    ``read`` yields (our parameter name, tensor on the CPU in the file's dtype), each parameter once, the
    token embedding first.
    ``alignment_heads`` are (decoder layer, head) pairs whose cross-attention follows the speech; None: not known.
    ``suppress_tokens`` and ``begin_suppress_tokens`` are None where the format does not carry them.
    ``scheme``, ``stored``: how it was quantised, and the path of a module → its weight, quantised; None: it was not.
    """

    name: str
    path: Path
    config: WhisperConfig
    read: Callable[[], Iterator[tuple[str, Tensor]]]
    tokenizer: Path | None
    alignment_heads: tuple[tuple[int, int], ...] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    language_tokens: Mapping[str, str] = field(default_factory=dict)
    """Languages that have no token and were taught by that of another: code → that one's code."""
    scheme: Precision | None = None
    stored: Callable[[str], Quantized | Fp8Weight | None] | None = None
