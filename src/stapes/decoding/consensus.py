"""Which of several sampled texts to believe: the one that the others agree with most.

Minimum Bayes risk under edit distance (Kumar & Byrne 2004, https://aclanthology.org/N04-1022). The likeliest sample is
often a fluent invention; what most samples share was probably said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Insertions, deletions and substitutions between two token sequences."""
    if not a or not b:
        return max(len(a), len(b))
    steps = np.arange(len(b) + 1)
    other = np.asarray(b)
    row = steps.copy()
    for count, token in enumerate(a, 1):
        best = np.empty_like(row)
        best[0] = count
        best[1:] = np.minimum(row[1:] + 1, row[:-1] + (other != token))
        # An insertion costs one a step to the right: a running minimum once the steps are taken off.
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


def disagreement(texts: Sequence[Sequence[int]]) -> list[int]:
    """For each text, its edit distances to all the others together."""
    size = len(texts)
    distances = np.zeros((size, size), dtype=np.int64)
    for i in range(size):
        for j in range(i):
            distances[i, j] = distances[j, i] = edit_distance(texts[i], texts[j])
    return distances.sum(axis=1).tolist()
