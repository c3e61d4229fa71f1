"""Small wav2vec 2.0 networks, plain and computed by fused kernels, and how far their gradients lie apart."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from stapes.models.wav2vec2 import BASE, LARGE, Wav2Vec2, Wav2Vec2Config, initialize
from stapes.models.wav2vec2_fused import fuse

_SIZES = {"width": 32, "layers": 2, "heads": 2, "mlp_width": 64, "vocab_size": 12, "conv_channels": (24,) * 7}
_QUIET = dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "head_dropout", "layer_drop"), 0.0)
KINDS: dict[str, Wav2Vec2Config] = {
    "base": replace(BASE, **_SIZES, **_QUIET, position_kernel=16, position_groups=4),
    "base, biased": replace(BASE, **_SIZES, **_QUIET, position_kernel=15, position_groups=4, conv_bias=True),
    "large": replace(LARGE, **_SIZES, **_QUIET, position_kernel=16, position_groups=4),
    "large, group norm": replace(LARGE, **_SIZES, **_QUIET, position_kernel=16, position_groups=4, conv_norm="group"),
    "adapters": replace(LARGE, **_SIZES, **_QUIET, position_kernel=16, position_groups=4, adapter_width=6),
}
for _kind, _config in (("base", BASE), ("large", LARGE)):
    KINDS[f"{_kind}, two convolutions"] = replace(
        _config,
        **{**_SIZES, **_QUIET, "conv_channels": (16, 24), "layers": 1},
        conv_kernels=(9, 4),
        conv_strides=(4, 3),
        position_kernel=16,
        position_groups=4,
    )


def pair(kind: str) -> tuple[Wav2Vec2, Wav2Vec2]:
    """The plain network in training mode, and the same fused; every parameter is drawn at random."""
    torch.manual_seed(0)
    plain = Wav2Vec2(KINDS[kind])
    initialize(plain)
    for name, parameter in plain.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.2)
    fused = copy.deepcopy(plain)
    fuse(fused.feature_extractor, fused.encoder)
    return plain.train(), fused.train()


def sound(rows: int, samples: int) -> Tensor:
    """Noise over a loud low tone, which a norm has to take away."""
    generator = torch.Generator().manual_seed(1)
    time = torch.arange(samples) / 16_000
    return 0.3 * torch.randn(rows, samples, generator=generator) + torch.sin(2 * torch.pi * 120 * time) + 0.1


def loss_and_gradients(
    network: Wav2Vec2, waveform: Tensor, lengths: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, Tensor]]:
    """Of a loss that looks at every logit of the real frames; some frames are hidden."""
    network.zero_grad()
    frames = network.config.feature_count(waveform.shape[1])
    hidden = torch.zeros(len(waveform), frames, dtype=torch.bool)
    hidden[:, 3:5] = True
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits, counts = network(waveform, lengths, hidden=hidden)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    real = torch.arange(frames) < counts[:, None]
    loss = (logits.float().log_softmax(-1) * weights * real[..., None]).sum() / real.sum()
    loss.backward()
    found = {name: each.grad.clone() for name, each in network.named_parameters() if each.grad is not None}
    return float(loss.detach()), found


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of each parameter the length of the difference over the length of the gradient."""
    assert found.keys() == wanted.keys()
    longest = max(float(each.norm()) for each in wanted.values())
    return {
        name: float((found[name].float() - each.float()).norm() / each.float().norm().clamp(min=1e-3 * longest))
        for name, each in wanted.items()
    }
