"""The likeliest path of a CTC model, and the tokens that it says.

Graves et al. 2006 (https://doi.org/10.1145/1143844.1143891): a path has a label in every frame; equal labels in a row
are one token, and blanks are none. The device finds the path of a whole batch (`best_path`, which a captured graph
may hold); one copy brings it to the host, where runs of labels become tokens (`collapse`). A recording that was cut
into windows is put together again by a `Joiner`: whichever way it was cut, the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.transcript import Word


class CTCToken(NamedTuple):
    """A token and the frames in which it is said: from ``start`` up to ``end``."""

    id: int
    start: int
    end: int
    probability: float
    """Mean over its frames."""


def best_path(logits: Tensor) -> Tensor:
    """The likeliest label of every frame and its probability: (batch, frames, vocabulary) → (2, batch, frames) int32.

    Logits or log-probabilities, any floating type. The second half holds the bits of float32 numbers, so that one
    copy carries both: `collapse` takes what `Tensor.cpu` made of it.
    """
    logits = logits.float()
    score, label = logits.max(dim=-1)
    probability = (score - logits.logsumexp(dim=-1)).exp()
    return torch.stack([label.to(torch.int32), probability.view(torch.int32)])


def collapse(
    path: Tensor, ends: Sequence[int], blank: int, starts: Sequence[int] | None = None
) -> list[list[CTCToken]]:
    """The tokens of each row of `best_path`, on the host.

    ``ends`` (and ``starts``, for windows whose outer frames are dropped): the frames of each row that count. Frames
    of the tokens are numbered from ``starts`` on.
    """
    labels, probability = path[0].numpy(), path[1].view(torch.float32).numpy()
    begins = [0] * len(ends) if starts is None else starts
    return [
        _runs(labels[row, begin:end], probability[row, begin:end], blank)
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


def _runs(labels: NDArray[np.int32], probability: NDArray[np.float32], blank: int) -> list[CTCToken]:
    if not len(labels):
        return []
    first = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    end = np.append(first[1:], len(labels))
    mean = np.add.reduceat(probability, first, dtype=np.float64) / (end - first)
    ids = labels[first]
    columns = [column[ids != blank].tolist() for column in (ids, first, end, mean)]
    return [CTCToken(*fields) for fields in zip(*columns, strict=True)]


def greedy(logits: Tensor, lengths: Sequence[int] | Tensor, blank: int) -> list[list[CTCToken]]:
    """The tokens of the likeliest path of each row: logits (batch, frames, vocabulary), real frames (batch,)."""
    ends = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    return collapse(best_path(logits).cpu(), ends, blank)


def token_words(
    tokens: Sequence[CTCToken], tokenizer: CTCTokenizer, frame_seconds: float, offset: float = 0.0
) -> list[Word]:
    """Words and when they are said, in seconds after ``offset``; ``frame_seconds`` is the length of a frame.

    A word's probability is the mean over its tokens.
    """
    words: list[Word] = []
    for text, first, end in tokenizer.words([token.id for token in tokens]):
        said = tokens[first:end]
        probability = sum(token.probability for token in said) / len(said)
        start, stop = offset + said[0].start * frame_seconds, offset + said[-1].end * frame_seconds
        words.append(Word(f" {text}", start, stop, probability))
    return words


class Joiner:
    """Puts the windows of one recording together: they follow each other without a gap or an overlap.

    What it carries over a seam is the last token, while it may go on in the next window.
    """

    def __init__(self) -> None:
        self.frames = 0
        """Frames so far: where the next window begins."""
        self._open: CTCToken | None = None

    def add(self, tokens: Sequence[CTCToken], frames: int) -> list[CTCToken]:
        """Tokens that are complete with this window of so many frames, numbered from the recording's first frame."""
        done: list[CTCToken] = []
        offset = self.frames
        for token in tokens:
            token = token._replace(start=token.start + offset, end=token.end + offset)
            before, self._open = self._open, token
            if before is None:
                continue
            if before.id == token.id and before.end == token.start:  # no blank between them: one token
                size, more = before.end - before.start, token.end - token.start
                mean = (before.probability * size + token.probability * more) / (size + more)
                self._open = CTCToken(token.id, before.start, token.end, mean)
            else:
                done.append(before)
        self.frames += frames
        if self._open is not None and self._open.end < self.frames:
            done.append(self._open)
            self._open = None
        return done

    def finish(self) -> list[CTCToken]:
        """What was still open at the recording's end."""
        last, self._open = self._open, None
        return [] if last is None else [last]
