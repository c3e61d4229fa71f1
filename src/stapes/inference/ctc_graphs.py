"""Networks over packed batches as captured graphs, for batches so small that the host is what they wait for."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stapes.devices.rocm import graphs_agree
from stapes.inference.ctc_packing import Packing, Tables
from stapes.kernels.jit import refusals
from stapes.kernels.wave_convolution import ChannelNorm

log = logging.getLogger(__name__)

_MOST_SLOTS = 4_096
"""80 s of sound: what a graph keeps of memory grows with it, and what it spares does not."""

_MOST_GRAPHS = 32

_SAMPLES = 1 << 16
"""Memory for samples comes in multiples of this."""


@dataclass(frozen=True)
class Norms:
    """How a batch is normalised: of waveforms as in `first_convolution`, and of its outputs where they are."""

    affine: Tensor
    channels: ChannelNorm | None

    def parts(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return (self.affine,) if self.channels is None else (self.affine, self.channels.scale, self.channels.shift)


Network = Callable[[Tensor, Tables, Norms], Tensor]
"""Samples on the device, where they lie, how they are normalised → states."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    samples: Tensor
    out: Tensor


class Graphs:
    """Calls a network; sizes that come a second time are captured, and replayed from then on.

    Not for several threads at once. What it returns holds until the next call.
    """

    def __init__(self, network: Network, device: torch.device, dtype: torch.dtype) -> None:
        self._network, self._device, self._dtype = network, device, dtype
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._captured: OrderedDict[tuple[int, ...], _Captured] = OrderedDict()

    def __call__(self, samples: Tensor, packing: Packing, norms: Norms) -> Tensor:
        """States, (slots, width)."""
        if not self._is_wanted(packing):
            return self._network(samples, packing.tables, norms)
        count = -(-len(samples) // _SAMPLES) * _SAMPLES
        key = packing.slots, len(packing.lengths), count
        self._seen[key] += 1
        if key not in self._captured:
            if self._seen[key] < 2:
                return self._network(samples, packing.tables, norms)
            self._captured[key] = self._capture(samples, count, packing, norms)
            if len(self._captured) > _MOST_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        captured = self._captured[key]
        captured.samples[: len(samples)] = samples
        for target, source in zip(captured.inputs, (packing.flat, *norms.parts()), strict=True):
            target.copy_(source)
        captured.graph.replay()
        return captured.out

    def _is_wanted(self, packing: Packing) -> bool:
        """In float32 products are long; and what a kernel's reference asks of the host cannot be captured."""
        if self._device.type != "cuda" or self._dtype == torch.float32 or packing.slots > _MOST_SLOTS:
            return False
        return self._agree and not any(device == str(self._device) for _, device in refusals)

    @cached_property
    def _agree(self) -> bool:
        agree, why = graphs_agree(self._device)
        if not agree:
            log.warning("no graphs on %s: %s", self._device, why)
        return agree

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def _capture(self, samples: Tensor, count: int, packing: Packing, norms: Norms) -> _Captured:
        """Record the network on memory of its own. It has run in these sizes, so every kernel is there."""
        own = torch.zeros(count, device=self._device)
        inputs = tuple(part.clone() for part in (packing.flat, *norms.parts()))
        affine, *channels = inputs[1:]
        arguments = own, packing.tables_in(inputs[0]), Norms(affine, ChannelNorm(*channels) if channels else None)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # libraries make their workspaces for a stream before the capture
            self._network(*arguments)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            out = self._network(*arguments)
        return _Captured(graph, inputs, own, out)
