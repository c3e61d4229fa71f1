"""Where each word of a known text is said: the likeliest path of a CTC model that says exactly this text.

The Viterbi algorithm over the text's tokens with a blank before, between and after them (Graves et al. 2006; Kürzinger
et al. 2020, https://arxiv.org/abs/2007.09127), for a batch of recordings at once; `torchaudio.functional.forced_align`
finds the same for one.

Hours of sound against hours of text fit into memory because no table of all frames and tokens is kept: a first pass
stores the scores of all states only every C frames; the way back computes each stretch of C frames once more, with
its decisions, and only for the 2 C + 2 states from which the known end of the stretch can be reached. With C the cube
root of frames × states this takes (frames × states)^⅔ numbers: some tens of megabytes an hour. The path is exact.

`WILDCARD` in the text stands for speech of any kind: numbers, other scripts, words that were not transcribed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.decoding.ctc import CTCToken
from stapes.decoding.spelling import WILDCARD, SpeltText
from stapes.errors import ModelError, UsageError
from stapes.kernels.ctc_viterbi import trace, viterbi
from stapes.models.ctc_loss import frames_needed
from stapes.transcript import Word

WILDCARD_PENALTY = 0.1
"""What a wildcard costs a frame, as a natural logarithm, beyond the likeliest label. It must cost something, or it
would take frames from the words beside it; 100 frames of blanks may cost it as much as one letter that is not there.
"""

_LEAST = -1e4
"""Stands for impossible labels, so that there is a path through them if there is no other."""
_WHOLE = 1 << 22
"""Decisions (frames × states) of one recording that are kept in one piece: 4 MiB."""


class Alignment(NamedTuple):
    """A text laid over its recording."""

    tokens: list[CTCToken]
    """Each token of the text and its frames; its probability is the mean over them. A wildcard has the id -1."""
    logprob: float
    """Log-probability of the path."""


def align(log_probs: Tensor, lengths: Sequence[int], targets: Sequence[Sequence[int]], blank: int) -> list[Alignment]:
    """Lay each text over its recording.

    log_probs: (batch, frames, vocabulary), of which ``lengths`` frames are real. ``targets``: token ids of each text,
    without blanks, `WILDCARD` among them. Raises UsageError: a text that needs more frames than its recording has
    (one for each token and one between equal neighbours), or ids that the model does not have.
    """
    vocabulary = log_probs.shape[2]
    for row, (length, ids) in enumerate(zip(lengths, targets, strict=True)):
        _check(row, length, ids, vocabulary, blank)
    if not len(targets):
        return []
    emissions = finite_emissions(log_probs, any(WILDCARD in ids for ids in targets))
    states = _States(targets, blank, vocabulary, emissions)
    path = _best_paths(emissions, lengths, states)
    labels = torch.from_numpy(np.take_along_axis(states.host_labels, path, axis=1)).to(log_probs.device)
    scores = emissions[:, : path.shape[1]].gather(2, labels[:, :, None])[:, :, 0].double().cpu().numpy()
    return [
        Alignment(_tokens(path[row, :length], scores[row, :length], ids), float(scores[row, :length].sum()))
        for row, (length, ids) in enumerate(zip(lengths, targets, strict=True))
    ]


def align_words(alignment: Alignment, text: SpeltText, frame_seconds: float, offset: float = 0.0) -> list[Word]:
    """The words of a text that was aligned, in seconds after ``offset``; ``frame_seconds`` is the length of a frame.

    A word's probability is the mean over its tokens, and 0 where a wildcard stood for it: nothing speaks for it but
    its place. Words that share a wildcard share its time by their length.
    """
    out: list[Word] = []
    shares = np.zeros(len(text.ids))
    for word in text.words:
        shares[word.start] += len(word.text) if word.is_wildcard else 0
    done = np.zeros(len(text.ids))
    for word in text.words:
        tokens = alignment.tokens[word.start : word.end]
        start, end, probability = float(tokens[0].start), float(tokens[-1].end), 0.0
        if word.is_wildcard:
            size = (end - start) / shares[word.start]
            start += done[word.start] * size
            end = start + len(word.text) * size
            done[word.start] += len(word.text)
        else:
            probability = sum(token.probability for token in tokens) / len(tokens)
        out.append(Word(word.text, offset + start * frame_seconds, offset + end * frame_seconds, probability))
    return out


def finite_emissions(log_probs: Tensor, with_wildcard: bool) -> Tensor:
    """Log-probabilities as float32 or wider and finite, and where it is needed one more label for the wildcard.

    (…, frames, vocabulary) → (…, frames, labels).
    """
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)).clamp_min(_LEAST)
    if with_wildcard:
        wildcard = log_probs.amax(dim=-1, keepdim=True) - WILDCARD_PENALTY
        log_probs = torch.cat([log_probs, wildcard], dim=-1)
    return log_probs


def check_text(name: str, ids: Sequence[int], vocabulary: int, blank: int) -> None:
    """Raise UsageError where a text has ids that the model does not have."""
    wrong = next((id for id in ids if id != WILDCARD and (not 0 <= id < vocabulary or id == blank)), None)
    if wrong is not None:
        raise UsageError(f"{name} has the token {wrong}: the model has tokens below {vocabulary}, {blank} is blank")


def _check(row: int, length: int, ids: Sequence[int], vocabulary: int, blank: int) -> None:
    needed = frames_needed(ids)
    if length < needed:
        raise UsageError(
            f"text {row} has {len(ids)} tokens and needs {needed} frames, its recording has {length}: "
            "the text is not of this recording, or the recording is cut off"
        )
    check_text(f"text {row}", ids, vocabulary, blank)


def states_of(ids: Sequence[int], blank: int, wildcard: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Labels of a text's states, 2 i + 1 that of token i, and whether each is reached past the blank before it."""
    labels = np.full(2 * len(ids) + 1, blank, dtype=np.int64)
    labels[1::2] = [wildcard if id == WILDCARD else id for id in ids]
    may_skip = np.zeros(labels.shape, dtype=np.bool_)
    may_skip[3::2] = labels[3::2] != labels[1:-2:2]
    return labels, may_skip


class _States:
    """The texts with blanks around every token. Shorter texts are padded with blanks."""

    def __init__(self, targets: Sequence[Sequence[int]], blank: int, wildcard: int, like: Tensor) -> None:
        counts = [2 * len(ids) + 1 for ids in targets]
        labels = np.full((len(targets), max(counts)), blank, dtype=np.int64)
        skip = np.full(labels.shape, -np.inf)
        for row, ids in enumerate(targets):
            labels[row, : counts[row]], may_skip = states_of(ids, blank, wildcard)
            skip[row, : counts[row]][may_skip] = 0.0
        self.host_labels = labels
        self.ends: NDArray[np.int64] = np.array(counts, dtype=np.int64) - 1
        self.labels = torch.from_numpy(labels).to(like.device)
        self.skip = torch.from_numpy(skip).to(like)


def _best_paths(emissions: Tensor, lengths: Sequence[int], states: _States) -> NDArray[np.int64]:
    """The state of each frame: (batch, frames). Frames beyond a row's length repeat its last state."""
    rows, count = states.labels.shape
    frames = max(lengths)
    path = np.empty((rows, frames), dtype=np.int64)
    stride = max(1, frames if frames * count <= _WHOLE else math.ceil((frames * count) ** (1 / 3)))
    begin = torch.full((rows, count), float("-inf"), dtype=emissions.dtype, device=emissions.device)
    begin[:, 0] = 0.0  # the first frame stays in the first blank or goes on to the first token
    kept = [begin]
    starts = range(0, frames, stride)
    for start in starts[:-1]:
        last, _ = viterbi(kept[-1], emissions, lengths, states.labels, states.skip, range(start, start + stride))
        # Only differences matter; small numbers keep them exact over hours.
        kept.append(last - last.amax(dim=1, keepdim=True))

    end = states.ends
    width = min(count, 2 * stride + 2)  # the last blank and the last token both may be the end
    for start in reversed(starts):
        low = np.maximum(end - width + 1, 0)
        index = torch.from_numpy(low[:, None] + np.arange(width)).to(emissions.device)
        band = [part.gather(1, index) for part in (kept.pop(), states.labels, states.skip)]
        stretch = range(start, min(start + stride, frames))
        last, choices = viterbi(band[0], emissions, lengths, band[1], band[2], stretch, keep=True)
        if start == starts[-1]:
            end = _likelier_end(last.cpu().numpy(), end, low)
        places, before = trace(choices, torch.from_numpy(end - low).to(choices.device)[:, None])
        path[:, stretch.start : stretch.stop] = places[:, :, 0].cpu().numpy() + low[:, None]
        end = before[:, 0].cpu().numpy() + low
    return path


def _likelier_end(scores: NDArray[np.floating], end: NDArray[np.int64], low: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last blank, or the token before it where that is likelier."""
    rows = np.arange(len(end))
    if np.isnan(scores).any():
        raise ModelError("the model's output is not a number: use another precision, or another model")
    token = scores[rows, np.maximum(end - low - 1, 0)]
    return np.where((end > 0) & (token > scores[rows, end - low]), end - 1, end)


def _tokens(path: NDArray[np.int64], scores: NDArray[np.float64], ids: Sequence[int]) -> list[CTCToken]:
    """Each token and its frames, from the states and log-probabilities of one row's frames."""
    if not ids:
        return []
    states = 2 * np.arange(len(ids)) + 1
    start, end = np.searchsorted(path, states, side="left"), np.searchsorted(path, states, side="right")
    edges = np.stack([start, end], axis=1).ravel()
    probability = np.append(np.exp(scores), 0.0)  # an end may lie behind the last frame
    mean = np.add.reduceat(probability, edges)[::2] / (end - start)
    return [CTCToken(*fields) for fields in zip(ids, start.tolist(), end.tolist(), mean.tolist(), strict=True)]
