"""When each word was said: cross-attention, dynamic time warping, and the edges of speech in the waveform.

The method is openai/whisper's ``timing.py``. The decoder reads a window's finished text once more; in a few heads
each token attends to the frames in which it is spoken; the cheapest monotonic path through that attention gives
every token its first frame. `token_frames` does this for many windows at once, `find_words` makes words of the
tokens, and `add_word_times` mends them, tightens them on the waveform and gives them to their segments. Functions of
tensors, lists and samples throughout; those that return nothing change the words they are given.

Times are seconds from the start of the window unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stapes.options import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from stapes.text.tokenizers import WhisperTokenizer
from stapes.transcript import Segment, Word

FRAME_SECONDS = 0.02
"""The encoder's output frames: two mel frames of 10 ms."""

_MEDIAN_OF_SEVEN = (
    (0, 5),
    (0, 3),
    (1, 6),
    (2, 4),
    (0, 1),
    (3, 5),
    (2, 6),
    (2, 3),
    (3, 6),
    (4, 5),
    (1, 4),
    (1, 3),
    (3, 4),
)
SENTENCE_END_MARKS = ".。!！?？"

# `snap_to_energy`. Silence is 40 dB below the loudest frame of the two seconds around, since speakers differ, but of
# those 55 dB below the window's loudest at the least, or long pauses would be measured against themselves. Steady
# noise louder than that is silence too: the quietest twentieth of the window and 6 dB more, up to 20 dB below the peak.
LEVEL_FRAME_SECONDS = 0.01
SILENCE_BELOW_PEAK_DB = 40.0
PEAK_FRAMES = 200
QUIETEST_PEAK_DB = 15.0
NOISE_PERCENTILE = 5
NOISE_MARGIN_DB = 6.0
NOISE_BELOW_PEAK_DB = 20.0
# Shorter silences may be the closure of a stop consonant inside a word.
SHORTEST_PAUSE = 0.1
# Farther than this from where attention put the edge, a pause is not that edge's.
EDGE_TOLERANCE = 0.25
# A word's last letters may lie this far in the pause that attention gave to the full stop after it.
EDGE_REACH = 0.7
SHORTEST_WORD = 0.02


@dataclass(slots=True)
class WordTiming:
    """A word, the tokens it is made of, and its place. ``word`` keeps its leading space; empty once merged away."""

    word: str
    tokens: list[int]
    start: float
    end: float
    probability: float


def dynamic_time_warping(costs: Sequence[NDArray[np.floating]]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Cheapest monotonic path through each cost matrix, from its first cell to its last.

    ``costs``: matrices ``(tokens, frames)`` of any sizes. Returns for each the rows and the columns of its path, both
    ``(path length,)``. A step goes down, right or both; ties are broken as openai/whisper does, and sums are kept in
    float32 as there, so that the paths are the same. Raises ValueError for an empty matrix and for costs not finite.

    All matrices advance together, one anti-diagonal at a time: the cells of a diagonal depend on the two diagonals
    before it only. The work is in five numpy calls a diagonal, whatever the number of matrices.
    """
    if not costs:
        return []
    if any(min(cost.shape) == 0 for cost in costs):
        raise ValueError("dynamic_time_warping needs at least one token and one frame in every matrix")
    if not all(np.isfinite(cost).all() for cost in costs):
        raise ValueError("dynamic_time_warping needs finite costs")
    batch = len(costs)
    rows = max(cost.shape[0] for cost in costs) + 1
    columns = max(cost.shape[1] for cost in costs) + 1
    diagonals = rows + columns - 1

    # skewed[i + j, b, i] is the cost of cell (i - 1, j - 1); row and column 0 are the border, and infinite.
    # Padding lies beyond every cell of a smaller matrix, and cells look back only: it cannot change a path.
    skewed = np.full((diagonals, batch, rows), np.inf, dtype=np.float32)
    diagonal_stride, _, row_stride = skewed.strides
    for b, cost in enumerate(costs):
        cells = np.lib.stride_tricks.as_strided(
            skewed[2:, b, 1:], cost.shape, (diagonal_stride + row_stride, diagonal_stride)
        )
        cells[...] = cost
    skewed, total = skewed.reshape(diagonals, -1), np.full((diagonals, batch * rows), np.inf, dtype=np.float32)
    total[0, ::rows] = 0
    # One row of numbers for all matrices: what comes over from the matrix before meets an infinite border.
    least, differ = np.empty(batch * rows - 1, dtype=np.float32), np.empty(batch * rows - 1, dtype=bool)
    steps = zip(total[:-2, :-1], total[1:-1, :-1], total[1:-1, 1:], total[2:, 1:], skewed[2:, 1:], strict=True)
    for from_both, from_down, from_right, best, cost in steps:
        np.minimum(from_both, from_down, out=least)
        np.not_equal(from_both, from_down, out=differ)
        # Not the minimum where the first two tie: openai/whisper then goes right, and so do we.
        best[:] = from_right
        np.minimum(least, from_right, out=best, where=differ)
        best += cost
    total = total.reshape(diagonals, batch, rows)
    from_both, from_down, from_right = total[:-2, :, :-1], total[1:-1, :, :-1], total[1:-1, :, 1:]
    both = from_both < np.minimum(from_down, from_right)  # the path came to (i, j) from (i - 1, j - 1)
    down = from_down < np.minimum(from_both, from_right)  # … from (i - 1, j); otherwise from (i, j - 1)
    return [_backtrace(both[:, b], down[:, b], *cost.shape) for b, cost in enumerate(costs)]


def _backtrace(
    both: NDArray[np.bool_], down: NDArray[np.bool_], i: int, j: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Follow the steps back from cell ``(i, j)``, counted from 1. ``both`` and ``down`` are ``[i + j - 2, i - 1]``."""
    rows: list[int] = []
    columns: list[int] = []
    while i > 0 and j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        if both[i + j - 2, i - 1]:
            i, j = i - 1, j - 1
        elif down[i + j - 2, i - 1]:
            i -= 1
        else:
            j -= 1
    return np.array(rows[::-1], dtype=np.intp), np.array(columns[::-1], dtype=np.intp)


def median_filter(values: Tensor) -> Tensor:
    """Median of each value and the three on either side along the last axis, edges reflected.

    ``values``: ``(…, frames)``; returned unchanged where there are three frames or fewer, as openai/whisper does.
    """
    frames = values.shape[-1]
    if frames <= 3:
        return values
    padded = F.pad(values.reshape(1, -1, frames), (3, 3), mode="reflect")
    shifted = [padded[..., k : k + frames] for k in range(7)]
    # Thirteen exchanges bring the median of seven to the middle (N. Devillard, "Fast median search", 1998):
    # on whole tensors several times faster than sorting every window.
    for a, b in _MEDIAN_OF_SEVEN:
        shifted[a], shifted[b] = torch.minimum(shifted[a], shifted[b]), torch.maximum(shifted[a], shifted[b])
    return shifted[3].reshape(values.shape)


def alignment_cost(attention: Tensor, num_frames: int) -> Tensor:
    """Cost ``(tokens, frames)`` of saying each token in each frame, float32 on the attention's device.

    ``attention``: cross-attention scores before the softmax, ``(heads, tokens, frames)``, of the model's alignment
    heads. Logarithms of probabilities do as well: the softmax, taken here over the valid frames alone, is the same.
    ``num_frames``: mel frames (10 ms) of audio in the window; what lies after is padding.

    Each frame's weight is measured against the other tokens' (mean 0, deviation 1 over tokens), smoothed by a
    median over 7 frames, and averaged over heads.
    """
    weights = attention[..., : max(1, num_frames // 2)].float().softmax(dim=-1)
    weights = weights - weights.mean(dim=-2, keepdim=True)
    deviation = weights.square().mean(dim=-2, keepdim=True).sqrt()
    # A frame that all tokens weigh alike says nothing; openai/whisper divides by zero there.
    weights = weights / deviation.clamp_min(torch.finfo(torch.float32).tiny)
    return -median_filter(weights).mean(dim=0)


def token_frames(
    attentions: Sequence[Tensor], num_frames: Sequence[int], *, prefix_length: int
) -> list[NDArray[np.intp]]:
    """First encoder frame (20 ms) of every token, for many windows at once.

    ``attentions``: for each window ``(heads, tokens, frames)`` as in `alignment_cost`, of a decoder that was given
    ``[*start sequence, no_timestamps, *text, eot]``. ``prefix_length``: length of the start sequence, without
    no_timestamps. ``num_frames``: mel frames of each window.

    The row of one token is where the *next* is heard, so rows from no_timestamps to the last but one give
    ``(len(text) + 1,)`` frames: where each text token begins, and where the last ends.
    """
    costs = [
        alignment_cost(attention, frames)[prefix_length:-1].cpu().numpy()
        for attention, frames in zip(attentions, num_frames, strict=True)
    ]
    frames = []
    for rows, columns in dynamic_time_warping(costs):
        frames.append(columns[np.diff(rows, prepend=-1).astype(bool)])
    return frames


def split_segments(
    tokenizer: WhisperTokenizer, segments: Sequence[Segment], language: str | None
) -> tuple[list[str], list[list[int]]]:
    """Words of the segments' text and the tokens of each, in order; no word spans two segments."""
    words: list[str] = []
    word_tokens: list[list[int]] = []
    for segment in segments:
        text = [token for token in segment.tokens if token < tokenizer.eot]
        split = tokenizer.split_to_words(text, language)
        words += split[0]
        word_tokens += split[1]
    return words, word_tokens


def find_words(
    words: Sequence[str],
    word_tokens: Sequence[list[int]],
    frames: NDArray[np.intp],
    token_probabilities: Sequence[float] | NDArray[np.floating],
) -> list[WordTiming]:
    """Words with their times and mean token probabilities.

    ``words`` and ``word_tokens``: from `split_segments` or the tokenizer's ``split_to_words``. ``frames``:
    ``(tokens + 1,)`` from `token_frames`. ``token_probabilities``: ``(tokens,)``.
    Raises ValueError where the counts differ.
    """
    probabilities = np.asarray(token_probabilities, dtype=np.float64)
    edges = np.cumsum([0, *(len(tokens) for tokens in word_tokens)])
    if len(frames) != edges[-1] + 1 or len(probabilities) != edges[-1]:
        raise ValueError(f"{edges[-1]} tokens need {edges[-1] + 1} frames and {edges[-1]} probabilities")
    times = (frames * FRAME_SECONDS).tolist()
    return [
        WordTiming(word, list(tokens), times[i], times[j], float(probabilities[i:j].mean()))
        for word, tokens, i, j in zip(words, word_tokens, edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def median_duration(words: Sequence[WordTiming]) -> float:
    """Median duration of the words in seconds, 0.7 at most; 0 where there is none of any duration."""
    durations = [word.end - word.start for word in words if word.end != word.start]
    return min(0.7, float(np.median(durations))) if durations else 0.0


def limit_durations(words: Sequence[WordTiming], longest: float) -> None:
    """Cut words beside the end of a sentence to ``longest`` seconds: they have swallowed the pause (in place).

    To be called before `merge_punctuations`, while the marks that end sentences are words by themselves.
    """
    for previous, word in pairwise(words):
        if word.end - word.start > longest > 0:
            if word.word in SENTENCE_END_MARKS:
                word.end = word.start + longest
            elif previous.word in SENTENCE_END_MARKS:
                word.start = word.end - longest


def merge_punctuations(words: Sequence[WordTiming], prepended: str, appended: str) -> None:
    """Join opening marks to the word after them and closing marks to the word before (in place).

    A word merged away stays in the list with no text and no tokens. The times of a word are those of its letters.
    """
    following = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        mark = words[i]
        if mark.word.startswith(" ") and mark.word.strip() in prepended:
            words[following].word = mark.word + words[following].word
            words[following].tokens = mark.tokens + words[following].tokens
            mark.word, mark.tokens = "", []
        else:
            following = i
    previous = 0
    for i in range(1, len(words)):
        mark = words[i]
        if not words[previous].word.endswith(" ") and mark.word in appended:
            words[previous].word += mark.word
            words[previous].tokens = words[previous].tokens + mark.tokens
            mark.word, mark.tokens = "", []
        else:
            previous = i


def speech_frames(pcm: NDArray[np.floating], sample_rate: int) -> NDArray[np.bool_]:
    """Which frames of 10 ms are not silence: ``(samples * 100 // sample_rate,)``. See SILENCE_BELOW_PEAK_DB."""
    length = round(sample_rate * LEVEL_FRAME_SECONDS)
    frames = np.asarray(pcm[: len(pcm) // length * length], dtype=np.float32).reshape(-1, length)
    if not len(frames):
        return np.zeros(0, dtype=bool)
    level = 10 * np.log10(np.square(frames).mean(axis=1) + 1e-10)
    peak = F.max_pool1d(torch.from_numpy(level)[None], 2 * PEAK_FRAMES + 1, stride=1, padding=PEAK_FRAMES)[0].numpy()
    peak = np.maximum(peak, level.max() - QUIETEST_PEAK_DB)
    noise = np.minimum(np.percentile(level, NOISE_PERCENTILE) + NOISE_MARGIN_DB, peak - NOISE_BELOW_PEAK_DB)
    return level >= np.maximum(peak - SILENCE_BELOW_PEAK_DB, noise)


def snap_to_energy(words: Sequence[WordTiming], pcm: NDArray[np.floating], sample_rate: int) -> None:
    """Move the edges of words beside a pause to where the sound ends and begins (in place).

    ``pcm``: ``(samples,)``, the window the words are of. Attention divides all time among tokens, so that a pause
    belongs to some word or mark and the edge may lie anywhere in it. Between two words the longest silence is taken
    that reaches into the time from EDGE_TOLERANCE before the end of the one to EDGE_TOLERANCE after the start of the
    other: the one then ends where the silence begins, the other begins where it ends. Words without a silence between
    them keep their edges. Order is kept, no word grows into another, and none is cut shorter than SHORTEST_WORD.
    """
    speech = speech_frames(pcm, sample_rate)
    duration = len(speech) * LEVEL_FRAME_SECONDS
    turns = np.flatnonzero(np.diff(~speech, prepend=False, append=False)) * LEVEL_FRAME_SECONDS
    pauses = list(zip(turns[::2].tolist(), turns[1::2].tolist(), strict=True))
    spoken = [word for word in words if word.word]
    first = 0
    for before, after in zip([None, *spoken], [*spoken, None], strict=True):
        end = before.end if before else 0.0
        start = after.start if after else duration
        low = max(before.start, end - EDGE_TOLERANCE) if before else max(0.0, start - EDGE_REACH)
        high = min(after.end, start + EDGE_TOLERANCE) if after else min(duration, end + EDGE_REACH)
        while first < len(pauses) and pauses[first][1] <= low:
            first += 1
        longest, pause = 0.0, None
        for begin, finish in pauses[first:]:
            if begin >= high:
                break
            overlap = min(finish, high) - max(begin, low)
            is_pause = finish - begin >= SHORTEST_PAUSE or (begin <= end and finish >= start)
            if is_pause and overlap > longest:
                longest, pause = overlap, (begin, finish)
        if pause is None:
            continue
        if before and before.start + SHORTEST_WORD <= pause[0] <= end + EDGE_REACH:
            before.end = min(pause[0], after.end) if after else pause[0]
        if after and start - EDGE_REACH <= pause[1] <= after.end - SHORTEST_WORD:
            after.start = max(pause[1], before.end) if before else pause[1]
        elif before and after:
            before.end = min(before.end, after.start)


def group_by_segment(words: Sequence[WordTiming], token_counts: Sequence[int]) -> list[list[WordTiming]]:
    """Words of each segment, given how many text tokens each segment has. A word goes where its first token is."""
    edges = np.cumsum(token_counts)
    groups: list[list[WordTiming]] = [[] for _ in token_counts]
    position = 0
    for word in words:
        groups[min(int(np.searchsorted(edges, position, side="right")), len(groups) - 1)].append(word)
        position += len(word.tokens)
    return groups


def assign_words(
    segments: Sequence[Segment],
    groups: Sequence[Sequence[WordTiming]],
    *,
    median: float,
    offset: float = 0.0,
    last_speech: float = 0.0,
) -> float:
    """Fill ``segment.words``, and let every segment begin and end with its words.

    ``groups``: the words of each segment. ``median``: their `median_duration`. ``offset``: where the window begins on
    the segments' clock; ``last_speech``: where the speech before these segments ended, on that clock. Returns that
    of the last segment. After openai/whisper: a first word longer than is likely after a pause is cut at its start,
    and a first or last word that runs more than half a second past the segment's own timestamp is cut there.
    """
    longest = 2 * median
    for segment, group in zip(segments, groups, strict=True):
        words = [Word(w.word, w.start + offset, w.end + offset, w.probability) for w in group if w.word]
        segment.words = words
        if not words:
            continue
        first, last = words[0], words[-1]
        second = words[1] if len(words) > 1 else None
        is_long = first.end - first.start > longest or (second and second.end - first.start > 2 * longest)
        if first.end - last_speech > 4 * median and is_long:
            if second and second.end - second.start > longest:
                first.end = second.start = second.end - longest
            first.start = max(first.start, first.end - longest)

        if first.start + 0.5 < segment.start < first.end:
            first.start = max(first.start, min(first.end - median, segment.start))
        if last.start < segment.end < last.end - 0.5:
            last.end = min(last.end, max(last.start + median, segment.end))
        segment.start, segment.end = first.start, last.end
        last_speech = segment.end
    return last_speech


def add_word_times(
    segments: Sequence[Segment],
    words: Sequence[WordTiming],
    pcm: NDArray[np.floating] | None,
    *,
    eot: int,
    sample_rate: int = 16000,
    prepended: str = PREPEND_PUNCTUATIONS,
    appended: str = APPEND_PUNCTUATIONS,
    offset: float = 0.0,
    last_speech: float = 0.0,
) -> float:
    """Give one window's segments their words: the whole way from `find_words` on.

    ``words``: of all the segments, in order, as `split_segments` cut them; changed in place. ``pcm``: the window's
    samples ``(samples,)``, or None to leave edges where attention put them. ``eot``: the tokenizer's. ``offset``
    and ``last_speech``, and what is returned: as in `assign_words`.
    """
    if not segments:
        return last_speech
    groups = group_by_segment(words, [sum(token < eot for token in segment.tokens) for segment in segments])
    median = median_duration(words)
    limit_durations(words, 2 * median)
    for group in groups:
        merge_punctuations(group, prepended, appended)
    if pcm is not None:
        snap_to_energy(words, pcm, sample_rate)
    return assign_words(segments, groups, median=median, offset=offset, last_speech=last_speech)
