"""What speaks for a text besides the recording: language models of words or of tokens, and expected words.

Each class is a `stapes.decoding.ctc_beam.Fusion`. What it adds depends on the text alone, so beam search stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stapes.decoding.hashing import text_hash
from stapes.decoding.ngram import END, START, UNKNOWN, NGramModel
from stapes.decoding.spelling import Speller, token_names
from stapes.errors import UsageError
from stapes.kernels.ctc_beam_tables import TokenTable, WordTable, pack
from stapes.text.ctc_tokenizer import CTCTokenizer

FusionState = tuple[Tensor, ...]

_TABLE_SHARE = 8
"""A language model of tokens is tabulated where that takes at most this part of the GPU's free memory: an eighth."""


class TokenNGram:
    """A language model of tokens (`stapes lm build --units tokens`): weighs every token, and the end of the text."""

    def __init__(
        self,
        model: NGramModel,
        tokenizer: CTCTokenizer,
        *,
        weight: float = 0.5,
        token_bonus: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """``weight`` multiplies log-probabilities; ``token_bonus`` is added for each token, against deletions.

        Raises UsageError: the model knows none of the tokenizer's tokens, as one of words would.
        """
        self.model = model.to(device)
        self.weight = weight
        self.token_bonus = token_bonus
        ids = model.ids(token_names(tokenizer))
        if not any(id not in (model.unknown_id, *_markers(model)) for id in ids):
            raise UsageError("the language model knows none of the model's tokens: is it one of words?")
        self._ids = torch.tensor(ids, device=device)
        self._end = torch.tensor(model.vocabulary[END], device=device)

    def start(self, rows: int, device: torch.device) -> FusionState:
        return (torch.full((rows, 1), self.model.start, dtype=torch.int64, device=device),)

    def extend(self, state: FusionState, tokens: Tensor) -> Tensor:
        scores, _ = self.model.score(state[0][:, :, None], self._ids[tokens][:, None, :])
        return scores * self.weight + self.token_bonus

    def follow(self, state: FusionState, tokens: Tensor) -> FusionState:
        _, after = self.model.score(state[0], self._ids[tokens.clamp_min(0)])
        return (torch.where(tokens < 0, state[0], after),)

    def finish(self, state: FusionState) -> Tensor:
        scores, _ = self.model.score(state[0], self._end)
        return scores * self.weight

    def table(self) -> TokenTable | None:
        """All contexts and tokens, where these are not too many."""
        return self._table

    @cached_property
    def _table(self) -> TokenTable | None:
        contexts, size, device = len(self.model.backoff), len(self._ids), self._ids.device
        if device.type == "cuda" and 8 * contexts * size > torch.cuda.mem_get_info(device)[0] // _TABLE_SHARE:
            return None
        moves = torch.empty((contexts, size), dtype=torch.int64, device=device)
        step = max(1, (1 << 20) // size)
        for first in range(0, contexts, step):
            some = torch.arange(first, min(contexts, first + step), device=device)
            scores, after = self.model.score(some[:, None], self._ids)
            moves[first : first + step] = pack(after, scores * self.weight + self.token_bonus)
        return TokenTable(moves)


class WordNGram:
    """A language model of words: weighs a word once it is complete, at the mark after it or at the end.

    Words are told apart by hashes of their letters, however tokens cut them. Where the model's tokens are all of one
    case, the case of the language model's words does not matter.
    """

    def __init__(
        self,
        model: NGramModel,
        tokenizer: CTCTokenizer,
        *,
        weight: float = 0.5,
        word_bonus: float = 1.5,
        unknown_score: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """``weight`` multiplies log-probabilities, ``word_bonus`` is added for each word, against deletions.

        ``unknown_score``: log-probability of words that the language model does not know; None: as it says.
        Raises UsageError: the model does not mark words, or the language model knows none that it could write.
        """
        self.model = model.to(device)
        self.weight = weight
        self.word_bonus = word_bonus
        self.unknown_score = unknown_score
        pieces = _word_pieces(tokenizer)
        letters = "".join(text for _, text in pieces)
        fold = not (any(map(str.isupper, letters)) and any(map(str.islower, letters)))
        hashes = [text_hash(text.casefold() if fold else text) for _, text in pieces]
        self._part = torch.tensor([value for value, _ in hashes], device=device)
        self._factor = torch.tensor([factor for _, factor in hashes], device=device)
        self._has_letters = torch.tensor([bool(text) for _, text in pieces], device=device)
        self._ends_word = torch.tensor([begins for begins, _ in pieces], device=device)
        self._end = torch.tensor(model.vocabulary[END], device=device)
        words = _by_hash(model, set(letters.casefold() if fold else letters), fold)
        if not words:
            raise UsageError("the language model knows no word that the model could write: is it of its language?")
        values, ids = zip(*sorted(words.items()), strict=True)
        self._hashes = torch.tensor(values, device=device)
        self._ids = torch.tensor(ids, device=device)

    def start(self, rows: int, device: torch.device) -> FusionState:
        """Context, hash of the word so far, whether it has letters; what ending it would gain, and the context then."""
        context = torch.full((rows, 1), self.model.start, dtype=torch.int64, device=device)
        zero = torch.zeros_like(context)
        return context, zero, zero.bool(), torch.zeros((rows, 1), device=device), context

    def extend(self, state: FusionState, tokens: Tensor) -> Tensor:
        gain = state[3]
        return torch.where(self._ends_word[tokens][:, None, :], gain[:, :, None], 0.0)

    def follow(self, state: FusionState, tokens: Tensor) -> FusionState:
        context, word, has_letters, _, after = state
        stays = tokens < 0
        token = tokens.clamp_min(0)
        ends = self._ends_word[token] & ~stays
        context = torch.where(ends, after, context)
        word = torch.where(ends, 0, word)
        word = torch.where(stays, word, word * self._factor[token] + self._part[token])
        has_letters = (has_letters & ~ends) | (self._has_letters[token] & ~stays)

        place = torch.searchsorted(self._hashes, word).clamp_max(len(self._hashes) - 1)
        known = self._hashes[place] == word
        id = torch.where(known, self._ids[place], self.model.unknown_id)
        score, after = self.model.score(context, id)
        if self.unknown_score is not None:
            score = torch.where(known, score, self.unknown_score)
        gain = torch.where(has_letters, score * self.weight + self.word_bonus, 0.0)
        return context, word, has_letters, gain, torch.where(has_letters, after, context)

    def finish(self, state: FusionState) -> Tensor:
        _, _, _, gain, after = state
        score, _ = self.model.score(after, self._end)
        return gain + score * self.weight

    def table(self) -> WordTable:
        """The model as it is, and how tokens write words."""
        return self._table

    @cached_property
    def _table(self) -> WordTable:
        model = self.model
        flags = self._ends_word + 2 * self._has_letters
        return WordTable.of(
            torch.stack([flags, self._part, self._factor], dim=1),
            torch.stack([self._hashes, self._ids]),
            model.keys,
            model.logprob,
            model.backoff,
            model.suffix,
            size=len(model.vocabulary),
            unknown_id=model.unknown_id,
            unknown_score=self.unknown_score,
            weight=self.weight,
            bonus=self.word_bonus,
        )


class Hotwords:
    """Words and phrases to expect: each of their tokens gains something, which is taken back unless all follow.

    An Aho–Corasick automaton (1975, https://doi.org/10.1145/360825.360855) over tokens, in which every phrase begins
    and ends at a mark between words, so that a word inside another gains nothing. Of phrases that share their
    beginning or lie inside one another, the longest counts; phrases that only overlap both count. Tokens are those
    that the tokenizer spells the phrase with.
    """

    def __init__(
        self,
        phrases: Iterable[str] | Mapping[str, float],
        tokenizer: CTCTokenizer,
        *,
        weight: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """``phrases`` may give each its own weight: what each of its tokens gains, as a natural logarithm.

        Raises UsageError: a phrase that the model cannot write, or of nothing.
        """
        weights = dict(phrases) if isinstance(phrases, Mapping) else dict.fromkeys(phrases, weight)
        size = tokenizer.size
        marks = _marks(tokenizer)
        boundary = size if any(begins for begins, _ in marks) else None  # a symbol of its own
        speller = Speller(tokenizer)
        patterns: dict[tuple[int, ...], float] = {}
        for phrase, each in weights.items():
            text = speller.clean(phrase).strip()
            if not text or speller.cannot_say(phrase):
                raise UsageError(f"the model cannot write the hotword {phrase!r}: write it out, or leave it out")
            ids = _with_first_mark(text, tokenizer)
            symbols = [symbol for id in ids for symbol in _symbols(id, marks, boundary)]
            if boundary is not None:
                symbols = [*([] if symbols[0] == boundary else [boundary]), *symbols, boundary]
            patterns[tuple(symbols)] = each
        automaton = _automaton(patterns, boundary)
        steps = [_symbols(id, marks, boundary) for id in range(size)]
        nodes, gains = [], []
        for node in range(len(automaton.children)):
            moves = [automaton.walk(node, symbols) for symbols in steps]
            nodes.append([move for move, _ in moves])
            gains.append([gain for _, gain in moves])
        ends = [automaton.end(node, boundary) for node in range(len(nodes))]
        self._next = torch.tensor(nodes, device=device)
        self._gain = torch.tensor(gains, device=device)
        self._table = TokenTable(pack(self._next, self._gain))
        self._final = torch.tensor(ends, device=device)
        self._root = automaton.walk(0, [] if boundary is None else [boundary])[0]

    def start(self, rows: int, device: torch.device) -> FusionState:
        return (torch.full((rows, 1), self._root, dtype=torch.int64, device=device),)

    def extend(self, state: FusionState, tokens: Tensor) -> Tensor:
        return self._gain[state[0][:, :, None], tokens[:, None, :]]

    def follow(self, state: FusionState, tokens: Tensor) -> FusionState:
        return (torch.where(tokens < 0, state[0], self._next[state[0], tokens.clamp_min(0)]),)

    def finish(self, state: FusionState) -> Tensor:
        return self._final[state[0]]

    def table(self) -> TokenTable:
        """The automaton."""
        return self._table


@dataclass
class _Automaton:
    """Nodes are beginnings of phrases; 0 is the empty one."""

    children: list[dict[int, int]]
    fallback: list[int]
    """The longest beginning of a phrase that the node's symbols end with."""
    hope: list[float]
    """What the beginning has gained beyond the phrases inside it, as long as it may go on."""
    banked: list[float]
    """What arriving here gains for good, because a phrase is complete."""

    def step(self, node: int, symbol: int) -> int:
        while node and symbol not in self.children[node]:
            node = self.fallback[node]
        return self.children[node].get(symbol, 0)

    def walk(self, node: int, symbols: Sequence[int]) -> tuple[int, float]:
        """Where symbols lead, and what they gain."""
        gain = -self.hope[node]
        for symbol in symbols:
            node = self.step(node, symbol)
            gain += self.banked[node]
        return node, gain + self.hope[node]

    def end(self, node: int, boundary: int | None) -> float:
        """What a text gains by ending here: phrases that are complete stay, others are taken back."""
        banked = 0.0 if boundary is None else self.banked[self.step(node, boundary)]
        return banked - self.hope[node]


def _automaton(patterns: Mapping[tuple[int, ...], float], boundary: int | None) -> _Automaton:
    children: list[dict[int, int]] = [{}]
    promise, total, parent = [0.0], [0.0], [0]
    for symbols, weight in patterns.items():
        node, value = 0, 0.0
        for symbol in symbols:
            if symbol not in children[node]:
                children[node][symbol] = len(children)
                children.append({})
                promise.append(0.0)
                total.append(0.0)
                parent.append(node)
            node = children[node][symbol]
            value += weight if symbol != boundary else 0.0
            promise[node] = max(promise[node], value)
        total[node] = max(total[node], value)
    size = len(children)
    fallback, banked, own, inside = [0] * size, [0.0] * size, [0.0] * size, [0.0] * size
    built = _Automaton(children, fallback, [0.0] * size, banked)
    queue = deque(children[0].items())
    while queue:
        symbol, node = queue.popleft()
        above = parent[node]
        if above:
            fallback[node] = built.step(fallback[above], symbol)
        # A phrase gains its own worth less what phrases inside it have gained; of those that end here, the best.
        own[node] = max(0.0, total[node] - inside[above])
        banked[node] = max(own[node], banked[fallback[node]])
        inside[node] = inside[above] + banked[node]
        built.hope[node] = max(0.0, promise[node] - inside[node]) if children[node] else 0.0
        queue.extend(children[node].items())
    return built


def _markers(model: NGramModel) -> tuple[int, int]:
    return model.vocabulary[START], model.vocabulary[END]


def _marks(tokenizer: CTCTokenizer) -> list[tuple[bool, bool]]:
    """Of each token: whether it begins with the mark between words, and whether there is more to it."""
    space = tokenizer.delimiter_text or " "
    return [(piece.startswith(space), bool(piece.removeprefix(space))) for piece in tokenizer.pieces]


def _symbols(id: int, marks: Sequence[tuple[bool, bool]], boundary: int | None) -> list[int]:
    """A token as the automaton sees it: the mark between words is a symbol of its own, also where a token holds it."""
    begins, has_text = marks[id]
    symbols = [boundary] if begins and boundary is not None else []
    return symbols if begins and not has_text else [*symbols, id]


def _with_first_mark(text: str, tokenizer: CTCTokenizer) -> list[int]:
    """Ids of a phrase inside a text: the mark before it may be part of its first token."""
    delimiter = tokenizer.delimiter
    if delimiter and delimiter in tokenizer.vocabulary and not delimiter.isspace():
        return tokenizer.encode(delimiter + text)
    return tokenizer.encode(text)


def _word_pieces(tokenizer: CTCTokenizer) -> list[tuple[bool, str]]:
    """Of each token: whether the word before it ends, and the letters that it adds to the next."""
    space = tokenizer.delimiter_text or " "
    pieces = [(piece.startswith(space), piece.removeprefix(space)) for piece in tokenizer.pieces]
    if not any(begins for begins, _ in pieces):
        raise UsageError("the model writes no spaces, so that a language model of words cannot help: use one of tokens")
    if any(space in text for _, text in pieces):
        raise UsageError("tokens of the model hold a space after letters: use a language model of tokens")
    return pieces


def _by_hash(model: NGramModel, letters: set[str], fold: bool) -> dict[int, int]:
    """Words that can be written with these letters, by hash; of words that differ in case only, the likeliest."""
    words: dict[int, int] = {}
    logprob = model.logprob.tolist() if fold else []
    for word, id in model.vocabulary.items():
        text = word.casefold() if fold else word
        if word in (UNKNOWN, START, END) or not letters.issuperset(text):
            continue
        value, _ = text_hash(text)
        if value not in words or (fold and logprob[id] > logprob[words[value]]):
            words[value] = id
    return words
