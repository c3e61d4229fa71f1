"""Small random networks in the shapes of the published ones, and the same as ``transformers`` builds them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import HubertConfig, HubertForCTC, Wav2Vec2ForCTC
from transformers import Wav2Vec2Config as TheirConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [24, 24, 24, 24, 24, 24, 24],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_LARGE = {"feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("wav2vec2", {}),
    "base-biased": ("wav2vec2", {"conv_bias": True, "num_conv_pos_embeddings": 15}),
    "large": ("wav2vec2", _LARGE),
    "large-group": ("wav2vec2", {"do_stable_layer_norm": True}),
    "hubert-base": ("hubert", {}),
    "hubert-large": ("hubert", _LARGE),
    "distilhubert": ("hubert", {"feat_proj_layer_norm": False}),
    "mms": ("wav2vec2", {**_LARGE, "adapter_attn_dim": 6}),
    "downsampled": ("wav2vec2", {**_LARGE, "add_adapter": True, "output_hidden_size": 20, "num_adapter_layers": 2}),
    "odd-sizes": ("wav2vec2", {"conv_dim": [16, 24], "conv_kernel": [9, 4], "conv_stride": [4, 3]}),
}
"""Name → Hugging Face's ``model_type`` and settings."""

Theirs = Wav2Vec2ForCTC | HubertForCTC


def theirs(kind: str, seed: int = 0, **settings: Any) -> Theirs:
    """A network of ``transformers`` whose every parameter, biases and norms too, is drawn at random."""
    torch.manual_seed(seed)
    model_type, special = KINDS[kind]
    sizes = {**_SIZES, **special, **settings}
    model = HubertForCTC(HubertConfig(**sizes)) if model_type == "hubert" else Wav2Vec2ForCTC(TheirConfig(**sizes))
    for name, parameter in model.named_parameters():
        scale = "norm.weight" in name or name.endswith("original0")
        torch.nn.init.normal_(parameter, mean=1.0 if scale else 0.0, std=0.2)
    return model.eval()


def speech_like(samples: int, seed: int = 0) -> torch.Tensor:
    """A waveform whose low tones outweigh its noise by far, as those of voices do, and that has an offset."""
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.arange(samples) / 16_000
    tones = sum(torch.sin(2 * torch.pi * pitch * seconds + pitch) / pitch for pitch in (90, 180, 410, 1300))
    loudness = 1 + torch.sin(2 * torch.pi * 3 * seconds)
    return 30 * loudness * torch.as_tensor(tones) + 0.02 * torch.randn(samples, generator=generator) + 0.1
