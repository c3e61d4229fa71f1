"""Which runs train wav2vec 2.0 by fused kernels (`stapes.models.wav2vec2_fused`)."""

from __future__ import annotations

import torch
from torch import nn

from stapes.models.wav2vec2 import Wav2Vec2
from stapes.models.wav2vec2_fused import can_fuse, fuse
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining
from stapes.training.config import RunOptions, Strategy


def fuse_network(
    network: nn.Module, run: RunOptions, device: torch.device, strategy: Strategy, *, divided: bool = False
) -> bool:
    """Have the network compute by fused kernels, if it is one that can, on a GPU. Returns whether it does.

    Not where one utterance's work is ``divided`` among processes, whose layers hold parts of weights, nor with
    DeepSpeed, which gathers a weight when its own module is called. Layers that are compiled, or that multiply in fp8,
    stay as they are.
    """
    suits = run.fused and can_fuse(device) and not divided and strategy != "deepspeed"
    if not suits or not isinstance(network, Wav2Vec2 | Wav2Vec2Pretraining):
        return False
    fuse(network.feature_extractor, network.encoder, layers=not (run.compile or run.fp8))
    return True
