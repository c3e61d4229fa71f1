"""A model on the straight line between two that share their beginning: so much of what the second one learnt.

Wortsman et al. 2022, Robust fine-tuning of zero-shot models, https://arxiv.org/abs/2109.01903.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.errors import ModelError


def between(before: WhisperCheckpoint, after: WhisperCheckpoint, share: float) -> WhisperCheckpoint:
    """Weights (1 − ``share``) × ``before`` + ``share`` × ``after``, in the dtype of ``after``, as all else.

    Reading it holds one of the two in memory. Raises ModelError for models of other sizes and for quantised ones.
    """
    for each in (before, after):
        if each.stored is not None:
            raise ModelError(f"{each.path} is quantised: name the model that it was made from")
    if before.config != after.config:
        raise ModelError(f"{after.path} is of other sizes than {before.path}: give a model and what was made of it")

    def read() -> Iterator[tuple[str, Tensor]]:
        first = dict(before.read())
        for name, tensor in after.read():
            yield name, first.pop(name).float().lerp(tensor.float(), share).to(tensor.dtype)

    return replace(after, read=read)
