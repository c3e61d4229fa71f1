"""Alignment of a recording of any length with its text, as the sound comes, in memory that has a limit.

The Viterbi algorithm of `stapes.decoding.ctc_align`. Up to a size that some hours of speech stay below, everything is
held and the path is the likeliest of all, exactly. Beyond, the search is on the frames that are not decided yet and on
a band of states that moves with the likeliest one. From time to time the paths to all states of the band are followed
back. As far as they are the same path, whatever comes later cannot change it: those frames are decided and forgotten.

That path is the likeliest of all that stay in the band, which reaches a thousand tokens to each side: it differs from
the likeliest of all only where text and recording part by more than that. A path that comes near the band's edge is not
believed, its frames are searched again with a band twice as wide. Where the paths do not meet within four times the
frames that are held (half an hour without text), the older half of the path that is the likeliest so far is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.decoding.ctc import CTCToken
from stapes.decoding.ctc_align import Alignment, check_text, finite_emissions, states_of
from stapes.decoding.spelling import WILDCARD
from stapes.errors import ModelError, UsageError
from stapes.kernels.ctc_viterbi import trace, viterbi
from stapes.models.ctc_loss import frames_needed

BAND = 4096
"""States that are followed at once: 2048 tokens."""
SPAN = 24_576
"""Frames that are held before some are decided: eight minutes of 20 ms."""
WHOLE = 1 << 34
"""Frames × states that are searched as a whole: an hour and a quarter of fast speech, two hours of slow."""
WHOLE_FRAMES = 1 << 20
"""Frames that are held at most: almost six hours."""


class StreamAligner:
    """Lays one text over one recording: `feed` it the log-probabilities in order, then `finish`."""

    def __init__(
        self,
        ids: Sequence[int],
        blank: int,
        vocabulary: int,
        *,
        frames: int | None = None,
        band: int = BAND,
        span: int = SPAN,
    ) -> None:
        """``ids``: token ids without blanks, `WILDCARD` among them. ``frames`` of the recording, where they are known.

        Raises UsageError: the model has no such id, or the recording is too short for the text.
        """
        check_text("the text", ids, vocabulary, blank)
        self._ids = list(ids)
        states = 2 * len(self._ids) + 1
        if frames is not None:
            check_frames(ids, frames)
            if frames <= WHOLE_FRAMES and frames * states <= WHOLE:
                band, span = states, frames + 1
        self._band, self._span = max(band, 8), max(span, 2)
        labels, may_skip = states_of(ids, blank, vocabulary)
        # Of what the model says only the labels of the text are kept.
        self._columns, self._labels = np.unique(labels, return_inverse=True)
        self._skip = np.where(may_skip, 0.0, -np.inf).astype(np.float32)
        self._state = 0  # that of the last frame which is decided
        self._parts: list[Tensor] = []
        self._held = 0
        self._decided = 0
        self._limit = self._span
        self._start = np.full(len(self._ids), -1, dtype=np.int64)
        self._end = np.zeros(len(self._ids), dtype=np.int64)
        self._probability = np.zeros(len(self._ids))
        self._logprob = 0.0

    @torch.no_grad()
    def feed(self, log_probs: Tensor) -> None:
        """Hear more: log_probs (frames, vocabulary). Raises ModelError: they are not numbers."""
        columns = torch.from_numpy(self._columns).to(log_probs.device)
        for piece in log_probs.split(max(1, self._span // 2)):
            emissions = finite_emissions(piece, WILDCARD in self._ids)
            self._parts.append(emissions.float().index_select(1, columns))
            self._held += len(piece)
            if self._held >= self._limit:
                self._decide(is_last=False)

    @torch.no_grad()
    def finish(self) -> Alignment:
        """The text's tokens and where they are. Raises UsageError: the recording is too short for the text."""
        check_frames(self._ids, self._decided + self._held)
        if self._held:
            self._decide(is_last=True)
        mean = self._probability / np.maximum(self._end - self._start, 1)
        columns = (self._ids, self._start.tolist(), self._end.tolist(), mean.tolist())
        return Alignment([CTCToken(*fields) for fields in zip(*columns, strict=True)], self._logprob)

    def _decide(self, is_last: bool) -> None:
        """Search the frames that are held; take and forget those that are decided."""
        emissions = torch.cat(self._parts)
        self._parts = [emissions]
        band = self._band
        while (found := _Search(emissions, self._labels, self._skip, self._state, band).run(is_last)) is None:
            band *= 2
        path, agreed = found
        if is_last:
            agreed = len(path)
        elif agreed < len(path) // 4:
            if self._limit < 4 * self._span:
                self._limit += self._span
                return
            agreed = len(path) // 2
        else:
            agreed = min(agreed, len(path) - 1)  # the last frame must be there to end in
        self._take(path[:agreed], emissions[:agreed])
        self._parts = [emissions[agreed:].clone()]
        self._held -= agreed
        self._limit = self._span

    def _take(self, path: NDArray[np.int64], emissions: Tensor) -> None:
        if not len(path):
            return
        labels = torch.from_numpy(self._labels[path]).to(emissions.device)
        scores = emissions.gather(1, labels[:, None])[:, 0].double().cpu().numpy()
        first = np.flatnonzero(np.diff(path, prepend=-1))
        end = np.append(first[1:], len(path))
        sums = np.add.reduceat(np.exp(scores), first)
        is_token = path[first] % 2 == 1
        token = path[first][is_token] // 2
        is_new = self._start[token] < 0  # the others go on from what was decided before
        self._start[token[is_new]] = self._decided + first[is_token][is_new]
        self._end[token] = self._decided + end[is_token]
        self._probability[token] += sums[is_token]
        self._logprob += float(scores.sum())
        self._state = int(path[-1])
        self._decided += len(path)


def check_frames(ids: Sequence[int], frames: int) -> None:
    """Raise UsageError where a recording of so many frames is too short for its text."""
    needed = frames_needed(ids)
    if frames < needed:
        raise UsageError(_misfit(f"the text needs {needed} frames, its recording has {frames}"))


def _misfit(what: str) -> str:
    return f"{what}: the text is not of this recording, or the recording is cut off"


class _Search:
    """The likeliest path of some frames that follow one in the first of these states."""

    def __init__(
        self, emissions: Tensor, labels: NDArray[np.int64], skips: NDArray[np.float32], first: int, band: int
    ) -> None:
        """emissions: (frames, labels). ``first``: the state before them; ``band``: states that are followed."""
        self._labels = torch.from_numpy(labels[first:]).to(emissions.device)[None]
        self._skips = torch.from_numpy(skips[first:]).to(emissions.device)[None]
        self._emissions = emissions[None]
        self._first, self._count = first, len(labels) - first
        self._width = min(band, self._count)
        self._frames = len(emissions)
        # The fewest numbers are kept: scores of every stride-th frame, and decisions of one stretch, as `align` does.
        stride = math.ceil((self._frames * self._width) ** (1 / 3))
        self._stride = stride if self._width == self._count else max(8, min(stride, self._width // 8))

    def run(self, is_last: bool) -> tuple[NDArray[np.int64], int] | None:
        """The state of each frame, and in how many frames from the beginning the paths to all states agree.

        ``is_last``: the text ends with these frames. None: the path came near the edge of the band.
        """
        width, count = self._width, self._count
        starts = range(0, self._frames, self._stride)
        scores = torch.full((1, width), float("-inf"), device=self._emissions.device)
        scores[0, 0] = 0.0
        low, best = 0, 0  # the band's first state, and the likeliest of the band
        kept: list[tuple[int, int, Tensor]] = []
        for start in starts:
            move = min(max(0, best - width // 2), count - low - width)
            begin = torch.full_like(scores, float("-inf"))
            begin[:, : width - move] = scores[:, move:]
            low += move
            kept.append((start, low, begin))
            scores, _ = self._stretch(start, low, begin)
            value, best = (each.item() for each in scores[0].max(dim=0))
            if not math.isfinite(value):
                raise ModelError("the model's output is not a number: use another precision, or another model")
            best = int(best)
            scores = scores - value  # only differences matter; small numbers keep them exact
        ends = scores[0].cpu().numpy()
        if not is_last:
            others = np.flatnonzero(ends > -np.inf)
            return self._back(kept, low + best, low + others[others >= best - width // 2])
        if low + width < count:
            return None
        place = width - 2 if width > 1 and ends[-2] > ends[-1] else width - 1
        if ends[place] == -np.inf:
            if width < count:
                return None
            raise UsageError(_misfit("the text's end does not fit into the recording's last frames"))
        return self._back(kept, low + place, np.array([low + place]))

    def _stretch(self, start: int, low: int, begin: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
        """Scores after a stretch from those before it, of states from ``low`` on; and decisions."""
        some = slice(low, low + begin.shape[1])
        stretch = range(start, min(start + self._stride, self._frames))
        return viterbi(
            begin, self._emissions, [self._frames], self._labels[:, some], self._skips[:, some], stretch, keep
        )

    def _back(
        self, kept: list[tuple[int, int, Tensor]], place: int, others: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int] | None:
        """Follow the path to the state ``place`` back, and those to ``others`` until they meet."""
        margin = self._width // 8
        path = np.empty(self._frames, dtype=np.int64)
        agreed = self._frames if len(others) == 1 else 0
        while kept:
            start, low, begin = kept.pop()
            # Only states from which these can be reached.
            least = max(low, min(place, int(others[0])) - 2 * self._stride)
            most = max(place, int(others[-1])) + 1
            _, choices = self._stretch(start, least, begin[:, least - low : most - low], keep=True)
            ours, before = trace(choices, self._places([place], least))
            found = ours[0, :, 0].cpu().numpy().astype(np.int64) + least
            path[start : start + len(found)] = found
            place = int(before[0, 0]) + least
            if agreed:
                others = np.array([place])
            else:
                _, all_before = trace(choices, self._places(others, least), keep=False)
                others = np.unique(all_before.cpu().numpy().astype(np.int64)) + least
                agreed = start if len(others) == 1 else 0
            above = low + self._width - margin
            if (low and found.min() < low + margin) or (low + self._width < self._count and found.max() >= above):
                return None
        return path + self._first, agreed

    def _places(self, states: Sequence[int] | NDArray[np.int64], least: int) -> Tensor:
        return torch.from_numpy(np.asarray(states, dtype=np.int32) - np.int32(least)).to(self._emissions.device)[None]
