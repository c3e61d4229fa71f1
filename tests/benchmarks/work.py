"""Count what PyTorch is asked to do: kernels, floating-point operations, bytes allocated and copied.

Counts are the same on a busy machine and on an idle one, so that a slow-down in structure (one more operation a step,
a cache that is copied) is seen where times only scatter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

_COPIES = ("copy_", "clone", "_to_copy", "cat", "stack", "index_put_", "index", "repeat", "contiguous", "_reshape_copy")


def _packed_linear_flops(x: Any, second: Any, third: Any = None, *_: Any, **__: Any) -> int:
    """Of shapes. The form that adds has what it adds before the weight; the other has its bias, or none, behind it."""
    weight = third if third is not None and len(third) == 2 else second
    return 2 * math.prod(x[:-1]) * weight[0] * weight[1]


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


class WorkCounter(TorchDispatchMode):
    """Counts while it is entered. ``kernels``: operations that are no views, so that each starts a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.allocated_bytes = 0
        self.copied_bytes = 0
        custom: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            custom[torch.ops.mkldnn._linear_pointwise] = _packed_linear_flops
        self._flops = FlopCounterMode(display=False, custom_mapping=custom)

    def __enter__(self) -> WorkCounter:
        self._flops.__enter__()
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self._flops.__exit__(*arguments)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        output = function(*arguments, **named)
        given = {_storage(tensor) for tensor in _tensors((arguments, named))}
        made = [tensor for tensor in _tensors(output) if _storage(tensor) not in given]
        is_in_place = function._schema.is_mutable
        name = function._schema.name.partition("::")[2]
        if made or is_in_place:
            self.kernels[name] += 1
            self.allocated_bytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
            if name in _COPIES:
                moved = made or list(_tensors(output))
                # index_put_ returns the whole; what it writes are its values.
                moved = list(_tensors(arguments[2:3])) if name == "index_put_" else moved
                self.copied_bytes += sum(tensor.numel() * tensor.element_size() for tensor in moved)
        return output

    def counts(self) -> dict[str, int]:
        return {
            "kernels": self.kernels.total(),
            "flops": int(self._flops.get_total_flops()),
            "allocated_bytes": self.allocated_bytes,
            "copied_bytes": self.copied_bytes,
        }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    # Packed weights have no storage that may be looked at.
    return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def excess(kept: dict[str, int], found: dict[str, int]) -> list[str]:
    """What has grown beyond the kept counts (a kernel is one too many, bytes and operations 1 %), or is out of date."""
    out = []
    for what, before in kept.items():
        now = found[what]
        if now > (before if what == "kernels" else 1.01 * before):
            out.append(f"{what} grew from {before:,} to {now:,}")
        elif now < 0.9 * before:
            out.append(f"{what} fell from {before:,} to {now:,}: keep it so: --update-work")
    return out
