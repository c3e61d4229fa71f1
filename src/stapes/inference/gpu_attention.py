"""Self-attention of whole sequences on a GPU, by kernels that keep nothing for each shape.

PyTorch would give an NVIDIA GPU's to cuDNN, which plans anew (0.1 s) for every shape, in every thread, and never lets
a plan go: texts of all lengths would fill the host's memory (pytorch #104701). AMD's have no such plans.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from stapes.kernels.jit import launch_or
from stapes.kernels.packed_attention import Tile, launch_attention, query_blocks

_TILE = Tile(queries=64, keys=64, warps=4, stages=3)
"""374 TFLOP/s where cuDNN reaches 348 and FlashAttention-2 255 (H200, heads of 64)."""

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""What `torch.nn.attention.sdpa_kernel` may take where PyTorch is to choose. It holds for all threads: `attend` and
`attend_causally`, which several run at once, name theirs instead."""


def attend(qkv: Tensor, batch: int, heads: int) -> Tensor:
    """Without a mask: query, key and value (batch × frames, 3 × width) → (batch × frames, width)."""
    frames, head = len(qkv) // batch, qkv.shape[1] // 3 // heads

    def plain() -> Tensor:
        query, key, value = qkv.view(batch, frames, 3, heads, head).permute(2, 0, 3, 1, 4)
        return _attend(query, key, value, is_causal=False).transpose(1, 2).reshape(len(qkv), -1)

    if not _is_nvidia(qkv) or qkv.dtype == torch.float32 or head != 64:
        return plain()
    blocks = _blocks(batch, frames, qkv.device)
    return launch_or("encoder attention", qkv.device, lambda: launch_attention(qkv, blocks, heads, _TILE), plain)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each place sees itself and those before: (batch, heads, places, head width) of all three and of the result."""
    return _attend(query, key, value, is_causal=True)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    if not _is_nvidia(query):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, compute_log_sumexp=False, is_causal=is_causal
    )
    return found[0]


def _is_nvidia(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None


@cache
def _blocks(batch: int, frames: int, device: torch.device) -> Tensor:
    """Sequences of one length, as `launch_attention` wants to be told of them. Kept for good, a KB for each batch size:
    graphs read them."""
    spans = np.full(batch, frames)
    return torch.from_numpy(query_blocks(np.arange(batch) * frames, spans, spans)).to(device, torch.int32)
