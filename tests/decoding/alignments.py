"""Random recordings and texts, and what an alignment must be."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from stapes.decoding.ctc_align import WILDCARD_PENALTY, Alignment
from stapes.decoding.spelling import WILDCARD


def random_log_probs(seed: int, frames: int, size: int) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.normal(scale=2.0, size=(1, frames, size))).log_softmax(-1)


def needed(ids: list[int]) -> int:
    return len(ids) + sum(a == b for a, b in pairwise(ids))


def best_of_all(log_probs: torch.Tensor, ids: list[int], blank: int) -> float:
    """Log-probability of the likeliest path of all that say the text; WILDCARD is the label behind the others."""
    log_probs = torch.cat([log_probs, log_probs.amax(1, keepdim=True) - WILDCARD_PENALTY], dim=1)
    frames, size = log_probs.shape
    wanted = [size - 1 if id == WILDCARD else id for id in ids]
    best = -math.inf
    for path in product({blank, *wanted}, repeat=frames):
        text = [b for a, b in zip((blank, *path), path, strict=False) if a != b and b != blank]
        if text == wanted:
            best = max(best, sum(log_probs[frame, label].item() for frame, label in enumerate(path)))
    return best


def check_path(found: Alignment, log_probs: torch.Tensor, ids: list[int], blank: int) -> None:
    """Tokens lie in order with a frame or more each, apart where they are equal, and add up to the log-probability."""
    assert [token.id for token in found.tokens] == ids
    total, blanks = 0.0, torch.ones(len(log_probs), dtype=torch.bool)
    for token in found.tokens:
        rows = log_probs[token.start : token.end]
        assert len(rows)
        scores = rows.amax(1) - WILDCARD_PENALTY if token.id == WILDCARD else rows[:, token.id]
        assert token.probability == pytest.approx(float(scores.exp().mean()))
        total += float(scores.sum())
        blanks[token.start : token.end] = False
    for a, b in pairwise(found.tokens):
        assert a.end < b.start if a.id == b.id else a.end <= b.start
    total += float(log_probs[blanks, blank].sum())
    assert found.logprob == pytest.approx(total)
