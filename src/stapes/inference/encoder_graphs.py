"""The encoder's work recorded once for each number of windows, and replayed.

A layer is some ten kernels of a tenth of a millisecond, and Python takes longer than that to launch one: 16 ms for the
32 layers of Whisper large, whether they encode one window or eight. A replay takes the host a tenth of one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_OFTEN = 3
"""Encodings of as many windows before they are recorded, unless they are asked for: recording waits for the device."""

FEW = 4
"""Windows up to which the host, and not the device, is what is waited for."""


class EncoderGraphs:
    """``encode`` (batch, bins, frames) → (batch, positions, width), recorded; equal to the bit.

    most: windows at once. priority: of the kernels, as of a stream's; -1 goes before 0. All graphs share their memory:
    they are to run one after the other, on one stream. Where the device refuses to record, ``encode`` itself is called.
    """

    def __init__(self, encode: Callable[[Tensor], Tensor], most: int, priority: int = 0) -> None:
        self._encode, self.most, self._priority = encode, most, priority
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._uses: Counter[int] = Counter()
        self._features: Tensor | None = None
        self._states: Tensor | None = None
        self._refused = False

    def __call__(self, features: Tensor) -> Tensor:
        """States of windows, in memory of their own."""
        count = len(features)
        graph = self._graphs.get(count)
        if graph is None:
            self._uses[count] += 1
            if self._uses[count] < _OFTEN or count > FEW or not self.record(features):
                return self._encode(features)
            graph = self._graphs[count]
        assert self._features is not None
        assert self._states is not None
        self._features[:count] = features
        graph.replay()
        return self._states[:count].clone()

    def record(self, features: Tensor) -> bool:
        """Record the work on as many windows as these. Whether it could be."""
        count = len(features)
        if self._refused or count > self.most:
            return False
        if count in self._graphs:
            return True
        states = self._encode(features)  # compiles kernels, and fetches what they read
        if self._features is None or self._states is None:
            self._features = features.new_zeros(self.most, *features.shape[1:])
            self._states = states.new_zeros(self.most, *states.shape[1:])
        stream = torch.cuda.Stream(features.device, priority=self._priority)
        stream.wait_stream(torch.cuda.current_stream(features.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._states[:count] = self._encode(self._features[:count])
        except RuntimeError as error:  # what cannot be recorded, or has no room, is computed as before
            log.info("the encoder cannot be recorded as a graph: %s", error)
            self._refused = True
            return False
        self._graphs[count] = graph
        return True
