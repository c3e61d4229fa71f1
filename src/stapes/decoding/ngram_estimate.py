"""n-gram language models from text: interpolated modified Kneser–Ney smoothing, written as ARPA.

Chen & Goodman 1998 (https://nrs.harvard.edu/urn-3:HUL.InstRepos:25104739), with what KenLM's lmplz settles (Heafield et
al. 2013, https://aclanthology.org/P13-2121): sentences begin with as many ``<s>`` as a context holds, n-grams that
begin with ``<s>`` keep their own count where others are counted by the words before them, and the unknown word has
its share of the uniform distribution in which the recursion ends.

Only n-grams of the highest order are counted; the tables of the lower ones follow from that table. Text is counted in
blocks whose tables are merged as they grow, so that memory holds the different n-grams and never the text.
"""

from __future__ import annotations

import gzip
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stapes.decoding.ngram import END, NEVER, START, UNKNOWN
from stapes.errors import UsageError
from stapes.text.files import whole_file

_BLOCK = 1 << 22
"""Words counted at a time."""
_UNKNOWN_ID, _START_ID, _END_ID = range(3)
_FALLBACK = (0.5, 1.0, 1.5)
"""Discounts where the text has too few n-grams to estimate them from; lmplz's ``--discount_fallback``."""
_MARKERS = {START, END}

Rows = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Table(NamedTuple):
    """Different n-grams in lexicographic order, (n-grams, order), and how often each was seen."""

    rows: Rows
    counts: Ints


@dataclass(frozen=True)
class NGrams:
    """The n-grams of one order that the model lists; logarithms are decadic, as in the file."""

    rows: Rows
    """(n-grams, order), numbers of words, in lexicographic order."""
    logprob: Floats
    backoff: Floats
    """Weight of the n-gram as a context; 0 for one that nothing follows."""


@dataclass(frozen=True)
class Estimate:
    """A model as it will be written."""

    words: list[str]
    orders: list[NGrams]
    discounts: list[tuple[float, float, float]]
    """Of each order: what is taken from n-grams seen once, twice, more often."""
    sentences: int
    tokens: int
    """Words of the text, ends of sentences not among them."""
    fallbacks: list[int]
    """The orders for which the text was too small to estimate discounts."""


def estimate(
    sentences: Iterable[Sequence[str]], order: int = 4, *, prune: Sequence[int] = (), min_count: int = 1
) -> Estimate:
    """Estimate a model of ``sentences``, each a sequence of words.

    ``prune``: by order from the first on, n-grams with this count or less are left out, the last number holding for
    all higher orders; 0 keeps all, and the first must be 0. Lower orders count what KN counts: different words
    before the n-gram. What longer n-grams need is kept, and the mass of what is left out goes to backing off.
    ``min_count``: rarer words are the unknown word. ``<s>`` and ``</s>`` in the text are left out; ``<unk>`` is the
    unknown word.

    Raises UsageError: no words, or numbers out of range.
    """
    if not 1 <= order <= 10:
        raise UsageError(f"--order is {order}: give 1 to 10")
    if min_count < 1:
        raise UsageError(f"--min-count is {min_count}: give 1 or more")
    limits = [*prune, *[prune[-1] if prune else 0] * order][:order]
    if limits[0] != 0 or any(a > b for a, b in pairwise(limits)):
        raise UsageError(
            f"--prune is {','.join(map(str, prune))}: begin with 0 and let the numbers not fall: 0,0,1 (rare words "
            "are left out by --min-count)"
        )
    words, table, count = _count(sentences, order)
    if not count:
        raise UsageError("the text has no words: give a text with a sentence a line")
    tokens = int(table.counts.sum()) - count
    if min_count > 1:
        words, table = _without_rare_words(words, table, min_count)
    tables, suffixes = _lower_orders(table)
    kept = _kept(tables, suffixes, limits)
    discounts, fallbacks = [], []
    for level, each in enumerate(tables, 1):
        values, enough = _discounts(each.counts)
        discounts.append(values)
        fallbacks += [] if enough else [level]
    orders = _probabilities(len(words), tables, suffixes, kept, discounts)
    return Estimate(words, orders, discounts, count, tokens, fallbacks)


def _count(sentences: Iterable[Sequence[str]], order: int) -> tuple[list[str], _Table, int]:
    """The words, how often each n-gram of the highest order was seen (those of padding included), and sentences."""
    numbers: defaultdict[str, int] = defaultdict(lambda: len(numbers))
    numbers.update({UNKNOWN: _UNKNOWN_ID, START: _START_ID, END: _END_ID})
    padding = array("i", [_START_ID] * max(1, order - 1))
    block = array("i")
    stack: list[_Table] = []
    count = 0
    for words in sentences:
        ids = [numbers[word] for word in words if word not in _MARKERS]
        if not ids:
            continue
        count += 1
        block.extend(padding)
        block.extend(ids)
        block.append(_END_ID)
        if len(block) >= _BLOCK:
            _push(stack, _count_block(block, order))
            block = array("i")
    if block:
        _push(stack, _count_block(block, order))
    while len(stack) > 1:
        stack.append(_merge(stack.pop(), stack.pop()))
    table = stack[0] if stack else _Table(np.zeros((0, order), np.int32), np.zeros(0, np.int64))
    return list(numbers), table, count


def _count_block(block: array[int], order: int) -> _Table:
    ids = np.frombuffer(block, dtype=np.int32)
    rows = np.lib.stride_tricks.sliding_window_view(ids, order)
    rows = rows[rows[:, -1] != _START_ID]
    return _summed(rows, np.ones(len(rows), np.int64))


def _push(stack: list[_Table], table: _Table) -> None:
    """Add a table; two of like size become one, so that each n-gram is merged only as often as the stack is high."""
    while stack and len(stack[-1].counts) <= 2 * len(table.counts):
        table = _merge(stack.pop(), table)
    stack.append(table)


def _merge(a: _Table, b: _Table) -> _Table:
    return _summed(np.concatenate([a.rows, b.rows]), np.concatenate([a.counts, b.counts]))


def _summed(rows: Rows, counts: Ints) -> _Table:
    """Sort n-grams and add up the counts of equal ones."""
    sorting = _sorting(rows)
    rows, counts = rows[sorting], counts[sorting]
    starts = _starts(rows)
    return _Table(rows[starts], np.add.reduceat(counts, starts) if len(counts) else counts)


def _sorting(rows: Rows) -> Ints:
    """The order that sorts rows lexicographically: two words make one key."""
    wide = rows.astype(np.int64)
    keys = [
        wide[:, column] << 32 | wide[:, column + 1] if column + 1 < rows.shape[1] else wide[:, column]
        for column in range(0, rows.shape[1], 2)
    ]
    return np.lexsort(keys[::-1]) if len(keys) > 1 else np.argsort(keys[0], kind="stable")


def _starts(rows: Rows) -> Ints:
    """Where in sorted rows another row begins."""
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return np.flatnonzero(new)


def _locate(table: Rows, rows: Rows) -> Ints:
    """Index in ``table`` (sorted, all different) of each of ``rows`` (sorted, all different), which are all in it."""
    both = np.concatenate([table, rows])
    sorting = _sorting(both)  # stable: of two equal rows the table's comes first
    from_rows = sorting >= len(table)
    return np.cumsum(~from_rows)[from_rows] - 1


def _without_rare_words(words: list[str], table: _Table, min_count: int) -> tuple[list[str], _Table]:
    """Let the unknown word stand for rare ones."""
    seen = np.bincount(table.rows[:, -1], weights=table.counts, minlength=len(words))
    stays = seen >= min_count
    stays[: _END_ID + 1] = True
    renumbered = np.where(stays, np.cumsum(stays) - 1, _UNKNOWN_ID).astype(np.int32)
    kept = [word for word, stay in zip(words, stays.tolist(), strict=True) if stay]
    return kept, _summed(renumbered[table.rows], table.counts)


def _lower_orders(table: _Table) -> tuple[list[_Table], list[Ints]]:
    """Tables of all orders with the counts that KN smooths, and for each n-gram the index of its last n - 1 words.

    The counts: how often at the highest order and behind ``<s>``, and otherwise how many different words were before.
    """
    tables, suffixes = [table], [np.zeros(0, np.int64)]
    for order in range(table.rows.shape[1] - 1, 0, -1):
        longer = tables[0]
        ends = longer.rows[:, 1:]
        sorting = _sorting(ends)
        starts = _starts(ends[sorting])
        rows = ends[sorting[starts]]
        sizes = np.diff(np.append(starts, len(ends)))
        counts = np.where(rows[:, 0] == _START_ID, np.add.reduceat(longer.counts[sorting], starts), sizes)
        suffix = np.empty(len(ends), np.int64)
        suffix[sorting] = np.repeat(np.arange(len(rows)), sizes)
        suffixes[0] = suffix
        tables.insert(0, _Table(rows, counts))
        suffixes.insert(0, np.zeros(len(rows), np.int64))
        assert rows.shape[1] == order
    # What begins with two <s> was only there so that shorter n-grams could be counted.
    for level in range(1, len(tables)):
        rows = tables[level].rows
        real = (rows[:, 0] != _START_ID) | (rows[:, 1] != _START_ID)
        renumbered = np.cumsum(real) - 1
        tables[level] = _Table(rows[real], tables[level].counts[real])
        suffixes[level] = suffixes[level][real]
        if level + 1 < len(tables):
            suffixes[level + 1] = renumbered[suffixes[level + 1]]  # of padding's own suffixes: dropped in their turn
    return tables, suffixes


def _kept(tables: list[_Table], suffixes: list[Ints], limits: Sequence[int]) -> list[NDArray[np.bool_]]:
    """Which n-grams the model lists: the frequent ones, and the contexts and suffixes of longer ones."""
    kept = [table.counts > limit for table, limit in zip(tables, limits, strict=True)]
    for level in range(len(tables) - 1, 1, -1):
        listed = kept[level]
        kept[level - 1][suffixes[level][listed]] = True
        contexts = tables[level].rows[listed, :-1]
        kept[level - 1][_locate(tables[level - 1].rows, contexts[_starts(contexts)])] = True
    return kept


def _discounts(counts: Ints) -> tuple[tuple[float, float, float], bool]:
    """D1, D2 and D3+ from how many n-grams were seen once, twice, three and four times; whether that was possible."""
    t1, t2, t3, t4 = (int((counts == times).sum()) for times in (1, 2, 3, 4))
    if 0 in (t1, t2, t3):
        return _FALLBACK, False
    y = t1 / (t1 + 2 * t2)
    values = (1 - 2 * y * t2 / t1, 2 - 3 * y * t3 / t2, 3 - 4 * y * t4 / t3)
    good = all(0 < value <= times for times, value in enumerate(values, 1))
    return (values, True) if good else (_FALLBACK, False)


def _probabilities(
    words: int,
    tables: list[_Table],
    suffixes: list[Ints],
    kept: list[NDArray[np.bool_]],
    discounts: list[tuple[float, float, float]],
) -> list[NGrams]:
    """p(w | h) = (c(h w) - D) / c(h) + γ(h) p(w | h'), from the shortest contexts to the longest.

    γ(h), the weight of backing off, is what was taken from listed n-grams and all that was not listed.
    """
    # Of single words: every word but <s> has its share of the uniform distribution, also what was never seen.
    taken = np.array([0.0, *discounts[0]])
    counts = np.zeros(words)
    counts[tables[0].rows[:, 0]] = tables[0].counts
    taken_each = taken[np.minimum(counts, 3).astype(np.int64)]
    probability = (counts - taken_each) / counts.sum() + taken_each.sum() / counts.sum() / (words - 1)
    probability[_START_ID] = 10**NEVER
    rows: Rows = np.arange(words, dtype=np.int32)[:, None]
    listed = np.ones(words, dtype=np.bool_)
    orders: list[NGrams] = []
    for level in range(1, len(tables)):
        longer = tables[level]
        contexts = longer.rows[:, :-1]
        starts = _starts(contexts)
        sizes = np.diff(np.append(starts, len(contexts)))
        total = np.add.reduceat(longer.counts, starts).astype(np.float64)
        taken_each = np.array([0.0, *discounts[level]])[np.minimum(longer.counts, 3)]
        spared = np.where(kept[level], longer.counts - taken_each, 0.0)
        gamma = np.add.reduceat(longer.counts - spared, starts) / total
        suffix = longer.rows[:, 1] if level == 1 else suffixes[level]
        following = spared / np.repeat(total, sizes) + np.repeat(gamma, sizes) * probability[suffix]
        backoff = np.zeros(len(rows))
        backoff[_locate(rows, contexts[starts])] = np.log10(gamma)
        orders.append(NGrams(rows[listed], np.log10(probability[listed]), backoff[listed]))
        rows, probability, listed = longer.rows, following, kept[level]
    orders.append(NGrams(rows[listed], np.log10(probability[listed]), np.zeros(int(listed.sum()))))
    return orders


def write_arpa(model: Estimate, path: Path | str) -> None:
    """Write the model, compressed where the name ends in ``.gz``. The file is whole or absent.

    Raises OutputError: it could not be written.
    """
    with whole_file(path) as file:
        if Path(path).suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
                _write(model, packed)
        else:
            _write(model, file)


def _write(model: Estimate, file: BinaryIO | gzip.GzipFile) -> None:
    header = "".join(f"ngram {order}={len(ngrams.rows)}\n" for order, ngrams in enumerate(model.orders, 1))
    file.write(f"\\data\\\n{header}".encode())
    for order, ngrams in enumerate(model.orders, 1):
        file.write(f"\n\\{order}-grams:\n".encode())
        for first in range(0, len(ngrams.rows), 65536):
            lines = _lines(model.words, ngrams, slice(first, first + 65536))
            file.write("".join(lines).encode("utf-8", "surrogateescape"))
    file.write(b"\n\\end\\\n")


def _lines(words: list[str], ngrams: NGrams, part: slice) -> Iterator[str]:
    columns = (ngrams.logprob[part].tolist(), ngrams.rows[part].tolist(), ngrams.backoff[part].tolist())
    for logprob, ids, backoff in zip(*columns, strict=True):
        text = " ".join([words[id] for id in ids])
        yield f"{logprob:.7g}\t{text}\t{backoff:.7g}\n" if backoff else f"{logprob:.7g}\t{text}\n"


def read_lines(paths: Iterable[Path | BinaryIO], advance: Callable[[float], None] = lambda size: None) -> Iterator[str]:
    """Lines of texts (files or open binary streams), one after the other; what gzip compressed is read as it is.

    Bytes that are no UTF-8 are kept, so that a damaged letter spoils one word. ``advance`` is told of every some
    bytes of a file that were read. Raises UsageError: unreadable.
    """
    for path in paths:
        if not isinstance(path, Path):
            yield from (line.decode("utf-8", "surrogateescape") for line in path)
            continue
        try:
            with path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                told = 0
                for number, line in enumerate(gzip.GzipFile(fileobj=file) if packed else file):
                    yield line.decode("utf-8", "surrogateescape")
                    if number % 4096 == 0:
                        place = file.tell()
                        advance(place - told)
                        told = place
                advance(file.tell() - told)
        except (OSError, EOFError) as error:
            raise UsageError(f"{path}: the text cannot be read ({error}); give a text file") from None
