"""What a run will take: operations, memory, steps and time, from the network's sizes without running it.

The network is run once on PyTorch's ``meta`` device, where tensors have shapes and no values: what its products cost
and what the backward pass keeps is counted exactly, for each shape of batch.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stapes.audio.features import HOP
from stapes.devices.backend import Device
from stapes.devices.chips import Chip
from stapes.models.ctc_head import CTC
from stapes.models.hybrid import Hybrid
from stapes.models.low_rank import is_adapter_name
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining
from stapes.models.whisper import Whisper

_USUAL_SHARE = 0.3
"""Of a GPU's peak that training reaches: what time is estimated from."""

_NEGATIVES = 100
"""Of each frame in pre-training; their number costs no product."""


@dataclass(frozen=True)
class Cost:
    """What one batch costs."""

    flops: float
    """Operations of products and convolutions, forwards and backwards."""
    saved_bytes: float
    """What the forward pass keeps for the backward pass, at 4 bytes a number."""
    layer_bytes: float = 0.0
    """The part of it that the layers of encoder and decoder keep, all together."""
    state_bytes: float = 0.0
    """What one layer is given."""


class Costs:
    """Costs of batches of one network, by shape."""

    def __init__(self, network: nn.Module) -> None:
        assert isinstance(network, CTC | Hybrid | Wav2Vec2 | Wav2Vec2Pretraining | Whisper)
        with torch.device("meta"):
            self._network: Any = type(network)(network.config)  # pyright: ignore[reportArgumentType]
        children = {name: list(child.parameters()) for name, child in network.named_children()}
        # One without weights has them in another process, a stage of a pipeline.
        self._frozen = {
            name for name, own in children.items() if own and not any(parameter.requires_grad for parameter in own)
        }
        for name in self._frozen:
            getattr(self._network, name).requires_grad_(False)
        self._is_adapted = any(is_adapter_name(name) for name, _ in network.named_parameters())
        self.of = lru_cache(maxsize=256)(self._of)

    def _of(self, rows: int, samples: int, tokens: int) -> Cost:
        """Of ``rows`` utterances of ``samples`` samples and ``tokens`` target tokens each, padding included."""
        network = self._network.eval()  # what training drops at random is not left out of the count by chance
        lengths = torch.full((rows,), samples, device="meta")
        weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
        saved: dict[int, tuple[Tensor, float, bool]] = {}
        inside, states = [False], [0.0]

        def enter(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inside[0], states[0] = True, 4.0 * given[0].numel()

        def leave(*_: Any) -> None:
            inside[0] = False

        def keep(tensor: Tensor) -> Tensor:
            # Scores of attention, positions × positions, are there without a fused kernel only.
            square = tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2]
            storage = tensor.untyped_storage()._cdata
            if tensor.is_floating_point() and not square and storage not in weights:
                # The tensor too, so that nobody else gets its place.
                saved[storage] = (tensor, 4.0 * tensor.numel(), inside[0])
            return tensor

        hooks = [layer.register_forward_pre_hook(enter) for layer in layers_by_name(network).values()]
        hooks += [layer.register_forward_hook(leave) for layer in layers_by_name(network).values()]
        counter = FlopCounterMode(display=False, depth=2)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if isinstance(network, Wav2Vec2):
                network(torch.empty(rows, samples, device="meta"), lengths)
            elif isinstance(network, Wav2Vec2Pretraining):
                frames = max(1, network.config.network.feature_count(samples))
                mask = torch.ones(rows, frames, dtype=torch.bool, device="meta")
                negatives = torch.zeros(rows, frames, _NEGATIVES, dtype=torch.int64, device="meta")
                network(torch.empty(rows, samples, device="meta"), lengths, mask, negatives)
            elif isinstance(network, Whisper):  # 30 s, however long the utterances
                mel = torch.empty(rows, network.config.mel_bins, 2 * network.config.audio_context, device="meta")
                network(
                    mel, torch.zeros(rows, min(tokens, network.config.text_context), dtype=torch.int64, device="meta")
                )
            else:
                mel = torch.empty(rows, network.config.encoder.mel_bins, -(-samples // HOP), device="meta")
                frames = (lengths + HOP - 1) // HOP
                if isinstance(network, CTC):
                    network(mel, frames)
                else:
                    network(mel, torch.zeros(rows, tokens + 1, dtype=torch.int64, device="meta"), frames)
        counts = counter.get_flop_counts()
        name = type(network).__name__
        forward = sum(counts["Global"].values())
        frozen = sum(sum(counts.get(f"{name}.{child}", {}).values()) for child in self._frozen)
        dropped = 0.0
        if isinstance(network, Wav2Vec2 | Wav2Vec2Pretraining):
            sizes = network.config if isinstance(network, Wav2Vec2) else network.config.network
            layers = (counts.get(f"{name}.encoder.layers.{number}", {}) for number in range(sizes.layers))
            dropped = sizes.layer_drop * sum(sum(layer.values()) for layer in layers)
        # Beside an adapter a matrix has no gradient of its own: backwards it costs what it costs forwards.
        times = 2 if self._is_adapted else 3
        for hook in hooks:
            hook.remove()
        return Cost(
            times * (forward - dropped) - (times - 1) * frozen,
            sum(size for _, size, _ in saved.values()),
            sum(size for _, size, in_layer in saved.values() if in_layer),
            states[0],
        )


def layers_by_name(network: nn.Module) -> dict[str, nn.Module]:
    """The layers of encoder and decoder."""
    return {name: module for name, module in network.named_modules() if _LAYER.fullmatch(name)}


_LAYER = re.compile(r"(.+\.)?(encoder|decoder)\.layers\.\d+")


def parameter_counts(network: nn.Module) -> tuple[int, int]:
    """Parameters in all, and those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in network.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def usual_flops_per_second(device: Device, precision: str, chip: Chip | None = None) -> float:
    """A guess at what the device will reach: a share of a known GPU's peak, or one timed product.

    chip: that the run is planned for, in the place of the device's own.
    """
    chip = chip or device.chip
    peak = chip.peak_tflops.get(precision) if chip is not None else None
    if peak:
        return _USUAL_SHARE * peak * 1e12
    a = torch.ones(512, 512, device=device.torch)
    (a @ a).sum().item()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        (a @ a).sum().item()
        count += 1
    return 0.5 * count * 2 * 512**3 / (time.perf_counter() - start)
