"""n-gram language models: read from ARPA files, and asked about many hypotheses at once.

The n-grams lie in one array of int64 keys, sorted: the number of the context times the size of the vocabulary, plus
the last word. An n-gram's number is its place in that array plus one, and 0 is the empty context; since longer
n-grams come later and contexts before what continues them, reading order by order keeps the array sorted. What a
hypothesis remembers is one such number, its longest context that the model knows. Scoring is a binary search an
order, for all hypotheses together, on any device.

ARPA: Katz (1987) back-off as SRILM's ngram-format(5) and KenLM write it; logarithms are natural here.
"""

from __future__ import annotations

import gzip
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stapes.errors import ModelError

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
LN_10 = math.log(10.0)
NEVER = -99.0
"""ARPA's decadic logarithm of nothing: what SRILM and KenLM write for ``<s>``, which is never predicted."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class NGramModel:
    """A back-off model. Stateless: one object serves all threads. Logarithms are natural."""

    order: int
    vocabulary: Mapping[str, int]
    """Words by number: ``<unk>``, ``<s>`` and ``</s>`` among them."""
    knows_unknown: bool
    """The file says how likely an unknown word is; otherwise it is less likely than any other by a factor of 10."""
    keys: Tensor
    """(n-grams,) int64, sorted."""
    logprob: Tensor
    """(n-grams,) float32."""
    backoff: Tensor
    """(contexts,) float32, by number of context."""
    suffix: Tensor
    """(n-grams + 1,) int64: the longest shorter context that ends in the same words, by number of n-gram."""

    @property
    def unknown_id(self) -> int:
        """Number of the unknown word."""
        return self.vocabulary[UNKNOWN]

    @property
    def start(self) -> int:
        """The context at the beginning of a sentence."""
        return self.vocabulary[START] + 1 if self.order > 1 else 0

    def to(self, device: torch.device | str) -> NGramModel:
        """The same model there."""
        tensors = {name: getattr(self, name).to(device) for name in ("keys", "logprob", "backoff", "suffix")}
        return replace(self, **tensors)

    def ids(self, words: Sequence[str]) -> list[int]:
        """Numbers of words, the unknown word's for those that the model does not know."""
        unknown = self.unknown_id
        return [self.vocabulary.get(word, unknown) for word in words]

    def score(self, contexts: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of words after contexts, float32, and the contexts after those words, int64.

        ``contexts`` and ``words``: int64, shapes that broadcast against each other. Never looks at the device's
        values from the host.
        """
        contexts, words = torch.broadcast_tensors(contexts, words)
        size = len(self.vocabulary)
        found = torch.zeros_like(contexts, dtype=torch.bool)
        entry = torch.zeros_like(contexts)
        total = torch.zeros(contexts.shape, dtype=torch.float32, device=contexts.device)
        for _ in range(self.order):  # the longest context has order - 1 words, and every word follows the empty one
            keys = contexts * size + words
            place = torch.searchsorted(self.keys, keys).clamp_max(len(self.keys) - 1)
            hit = ~found & (self.keys[place] == keys)
            total += torch.where(found, 0.0, torch.where(hit, self.logprob[place], self.backoff[contexts]))
            entry = torch.where(hit, place, entry)
            found |= hit
            contexts = torch.where(found, contexts, self.suffix[contexts])
        number = entry + 1
        return total, torch.where(number < len(self.backoff), number, self.suffix[number])

    def score_sentences(self, sentences: Sequence[Sequence[str]], batch: int = 4096) -> Tensor:
        """Log-probability of each sentence, its end included: (sentences,) float64, on the CPU."""
        device = self.keys.device
        out = torch.zeros(len(sentences), dtype=torch.float64)
        for first in range(0, len(sentences), batch):
            rows = [[*self.ids(words), self.vocabulary[END]] for words in sentences[first : first + batch]]
            width = max(map(len, rows))
            padded = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
            contexts = torch.full((len(rows),), self.start, dtype=torch.int64, device=device)
            total = torch.zeros(len(rows), dtype=torch.float64, device=device)
            for words in padded.T:
                scores, contexts = self.score(contexts, words.clamp_min(0))
                total += torch.where(words < 0, 0.0, scores)
            out[first : first + len(rows)] = total.cpu()
        return out


@dataclass
class _Order:
    """The n-grams of one length as they were read: numbers of words, and decadic logarithms."""

    words: NDArray[np.int32]
    logprob: Floats
    backoff: Floats


def read_arpa(path: Path | str) -> NGramModel:
    """Read a model from an ARPA file, which gzip may have compressed. Any order.

    Taken as KenLM and SRILM write it: text before ``\\data\\``, missing back-off weights (1), ``-99`` and ``-inf``,
    ``<UNK>`` for ``<unk>``, no ``<unk>`` at all, and n-grams whose own context was pruned away.

    Raises ModelError: the file is missing, is no ARPA file (KenLM's binary form included), or is damaged.
    """
    path = Path(path)
    try:
        with closing(_open(path)) as file:
            words, orders = _parse(file, path)
    except (OSError, EOFError) as error:
        raise ModelError(f"{path}: the language model cannot be read ({error}); give an ARPA file") from None
    return _build(words, orders, path)


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as file:
        magic = file.read(16)
    if magic.startswith(b"mmap lm http"):
        raise ModelError(f"{path} is KenLM's binary form: give the ARPA file that it was made from")
    return gzip.GzipFile(path) if magic.startswith(b"\x1f\x8b") else path.open("rb")


def _parse(file: IO[bytes] | gzip.GzipFile, path: Path) -> tuple[dict[bytes, int], list[_Order]]:
    """Words by number, and the n-grams of each order."""
    lines = enumerate(file, 1)
    counts = _read_counts(lines, path)
    words: dict[bytes, int] = {}
    orders: list[_Order] = []
    for order, expected in enumerate(counts, 1):
        if _next_line(lines) != b"\\%d-grams:" % order:
            raise ModelError(f"{path} is damaged: its {order}-grams are missing; fetch or build it again")
        ids, logprob, backoff = array("i"), array("f"), array("f")
        for number, line in islice(lines, expected):
            fields = line.split()  # of bytes: at ASCII white space only, since words may hold other spaces
            if len(fields) not in (order + 1, order + 2):
                if not fields:
                    break
                raise ModelError(f"{path}, line {number}: this is no {order}-gram; fetch or build the file again")
            try:
                logprob.append(float(fields[0]))
                backoff.append(float(fields[order + 1]) if len(fields) > order + 1 else 0.0)
                if order == 1:
                    ids.append(words.setdefault(fields[1], len(words)))
                else:
                    ids.extend([words[word] for word in fields[1 : order + 1]])
            except ValueError:
                raise ModelError(f"{path}, line {number}: no number where one belongs; build the file again") from None
            except KeyError as error:
                word = error.args[0].decode("utf-8", "replace")
                raise ModelError(
                    f"{path}, line {number}: the word {word!r} is not among the 1-grams; build the file again"
                ) from None
        if len(logprob) != expected or (order == 1 and len(words) != expected):
            raise ModelError(
                f"{path} is damaged: {len(logprob)} different {order}-grams where it promises {expected}; "
                "fetch or build it again"
            )
        rows = np.frombuffer(ids, dtype=np.int32).reshape(-1, order) if ids else np.zeros((0, order), np.int32)
        orders.append(_Order(rows, np.array(logprob, np.float32), np.array(backoff, np.float32)))
        if np.isnan(orders[-1].logprob).any() or (orders[-1].logprob > 1e-4).any():
            raise ModelError(f"{path} is damaged: {order}-grams with a probability above 1; build it again")
    if _next_line(lines) != b"\\end\\":
        raise ModelError(f"{path} is cut off: it has no \\end\\; fetch or build it again")
    while len(orders) > 1 and not len(orders[-1].words):
        orders.pop()
    return words, orders


def _next_line(lines: Iterator[tuple[int, bytes]]) -> bytes:
    return next((line.strip() for _, line in lines if line.strip()), b"")


def _read_counts(lines: Iterator[tuple[int, bytes]], path: Path) -> list[int]:
    """How many n-grams of each order the header promises."""
    if not any(line.strip() == b"\\data\\" for _, line in lines):
        raise ModelError(f"{path} is no language model: it has no \\data\\; give an ARPA file")
    counts: list[int] = []
    for number, line in lines:
        if not line.strip():
            if counts:
                break
            continue
        name, _, count = line.strip().partition(b"=")
        if name.split() != [b"ngram", b"%d" % (len(counts) + 1)] or not count.strip().isdigit():
            raise ModelError(f"{path}, line {number}: no count of n-grams; fetch or build the file again")
        counts.append(int(count))
    if not counts or not counts[0]:
        raise ModelError(f"{path} is no language model: it has no words; give an ARPA file")
    return counts


def _build(words: dict[bytes, int], orders: list[_Order], path: Path) -> NGramModel:
    names = {word.decode("utf-8", "surrogateescape"): id for word, id in words.items()}
    for marker in (UNKNOWN, START, END):  # some programs write them in capitals
        if marker not in names and marker.upper() in names:
            names[marker] = names.pop(marker.upper())
    knows_unknown = UNKNOWN in names
    unigrams = orders[0]
    ordinary = unigrams.logprob[unigrams.logprob > NEVER + 1]
    for marker in (UNKNOWN, START, END):
        if marker not in names:
            lowest = float(ordinary.min(initial=0.0)) - 1.0 if marker == UNKNOWN else NEVER
            names[marker] = len(names)
            unigrams.words = np.append(unigrams.words, np.array([[names[marker]]], np.int32), axis=0)
            unigrams.logprob = np.append(unigrams.logprob, np.float32(lowest))
            unigrams.backoff = np.append(unigrams.backoff, np.float32(0.0))

    size = len(names)
    while (model := _index(orders, size, path)) is None:
        pass  # contexts that pruning took away were put back
    keys, logprob, backoff, suffix = model
    return NGramModel(
        order=len(orders),
        vocabulary=names,
        knows_unknown=knows_unknown,
        keys=torch.from_numpy(keys),
        logprob=torch.from_numpy(logprob * np.float32(LN_10)),
        backoff=torch.from_numpy(backoff * np.float32(LN_10)),
        suffix=torch.from_numpy(suffix),
    )


def _index(orders: list[_Order], size: int, path: Path) -> tuple[Ints, Floats, Floats, Ints] | None:
    """Keys, probabilities, back-off weights and suffixes of all n-grams.

    None where n-grams had contexts that are not listed themselves. These are added to ``orders``, with no probability
    of their own: once indexed they are worth what backing off gives, so that the model is the same.
    """
    unigrams = orders[0]
    sorting = np.argsort(unigrams.words[:, 0])
    keys = np.arange(size, dtype=np.int64)
    logprob = np.clip(unigrams.logprob[sorting], 2 * NEVER, 0.0)
    backoff = np.append(np.float32(0.0), np.clip(unigrams.backoff[sorting], 2 * NEVER, None))
    suffix = np.zeros(size + 1, dtype=np.int64)
    for shorter_level, level in pairwise(orders):
        contexts, known = _numbers(keys, level.words[:, :-1], size)
        if not known.all():
            rows = np.unique(level.words[~known, :-1], axis=0)
            shorter_level.words = np.concatenate([shorter_level.words, rows])
            shorter_level.logprob = np.append(shorter_level.logprob, np.full(len(rows), np.nan, np.float32))
            shorter_level.backoff = np.append(shorter_level.backoff, np.zeros(len(rows), np.float32))
            return None
        new_keys = contexts * size + level.words[:, -1]
        sorting = np.argsort(new_keys, kind="stable")
        new_keys, contexts = new_keys[sorting], contexts[sorting]
        if (new_keys[1:] == new_keys[:-1]).any():
            order = level.words.shape[1]
            raise ModelError(f"{path} is damaged: it has a {order}-gram twice; fetch or build it again")
        # The longest n-gram that ends these words, and what it gives the last of them if they were not listed.
        shorter = suffix[contexts]
        given = backoff[contexts].astype(np.float64)
        last = level.words[sorting, -1]
        place, found = _find(keys, shorter * size + last)
        while not found.all():
            given += np.where(found, 0.0, backoff[shorter])
            shorter = np.where(found, shorter, suffix[shorter])
            place, found = _find(keys, shorter * size + last)
        given += logprob[place]
        new_logprob = level.logprob[sorting]
        new_logprob = np.where(np.isnan(new_logprob), given, np.clip(new_logprob, 2 * NEVER, 0.0))
        keys = np.concatenate([keys, new_keys])
        logprob = np.concatenate([logprob, new_logprob.astype(np.float32)])
        if level is not orders[-1]:
            backoff = np.concatenate([backoff, np.clip(level.backoff[sorting], 2 * NEVER, None)])
        suffix = np.concatenate([suffix, place + 1])
    return keys, logprob, backoff[:1] if len(orders) == 1 else backoff, suffix


def _find(keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Where keys are, and whether they are there."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return place, keys[place] == wanted


def _numbers(keys: Ints, words: NDArray[np.int32], size: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Numbers of n-grams, and whether they are there."""
    number = np.zeros(len(words), dtype=np.int64)
    known = np.ones(len(words), dtype=np.bool_)
    for column in words.T:
        place, found = _find(keys, number * size + column)
        number = place + 1
        known &= found
    return number, known
