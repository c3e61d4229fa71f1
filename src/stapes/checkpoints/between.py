"""Models between others that share their beginning: so much of what each of them learnt.

One, part of the way: Wortsman et al. 2022, Robust fine-tuning of zero-shot models, https://arxiv.org/abs/2109.01903.
Averages of several: Wortsman et al. 2022, Model soups, https://arxiv.org/abs/2203.05482.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.errors import ModelError


def between(before: WhisperCheckpoint, learnt: Sequence[tuple[WhisperCheckpoint, float]]) -> WhisperCheckpoint:
    """Weights ``before`` + Σ share × (after − ``before``), for each (after, share) of ``learnt``, at least one.

    Their dtype, and all that is not weights, is the first one's. Reading it holds all but one of them in memory.
    Raises ModelError for models of other sizes and for quantised ones.
    """
    models = [after for after, _ in learnt]
    for each in (before, *models):
        if each.stored is not None:
            raise ModelError(f"{each.path} is quantised: name the model that it was made from")
    for each in models:
        if before.config != each.config:
            raise ModelError(f"{each.path} is of other sizes than {before.path}: give a model and what was made of it")

    def read() -> Iterator[tuple[str, Tensor]]:
        start, others = dict(before.read()), [dict(model.read()) for model in models[1:]]
        for name, tensor in models[0].read():
            own = start.pop(name).float()
            made = own.lerp(tensor.float(), learnt[0][1])
            for other, (_, share) in zip(others, learnt[1:], strict=True):
                made += share * (other.pop(name).float() - own)
            yield name, made.to(tensor.dtype)

    languages = {code: token for model in reversed(models) for code, token in model.language_tokens.items()}
    return replace(models[0], read=read, language_tokens=languages)
