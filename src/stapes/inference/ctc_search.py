"""Beam search over what a CTC model said to phrases: language models, expected words, several texts, their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stapes.decoding.ctc import CTCToken
from stapes.decoding.ctc_align import align
from stapes.decoding.ctc_beam import Fusion, Hypothesis, PrefixBeamSearch
from stapes.decoding.ctc_fusion import Hotwords, TokenNGram, WordNGram
from stapes.decoding.ngram import END, START, UNKNOWN, NGramModel
from stapes.decoding.spelling import token_names
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.transcript import Alternative

DEFAULT_BEAM = 32
"""Texts that are kept where a language model or expected words ask for a search and no beam size is said."""

_WIDE = 32
_TOKENS_PER_FRAME = (40, 24)
"""The likeliest tokens of a frame that beams up to this size look at, and wider ones: what the kernel takes."""
_ROWS = 32
"""Phrases that are searched together."""


@dataclass(frozen=True)
class Found:
    """The likeliest text of a phrase, its tokens numbered by the phrase's frames, and all that were asked for."""

    tokens: list[CTCToken]
    alternatives: list[Alternative]


def fusions(
    tokenizer: CTCTokenizer,
    device: torch.device,
    lm: NGramModel | None = None,
    lm_weight: float = 0.5,
    hotwords: Sequence[str] = (),
) -> list[Fusion]:
    """What speaks for a text besides the recording. Raises UsageError: it cannot serve this model."""
    out: list[Fusion] = []
    if lm is not None:
        known = set(lm.vocabulary) - {START, END, UNKNOWN}
        kind = TokenNGram if known <= set(token_names(tokenizer)) else WordNGram
        out.append(kind(lm, tokenizer, weight=lm_weight, device=device))
    if hotwords:
        out.append(Hotwords(hotwords, tokenizer, device=device))
    return out


class Search:
    """Finds the likeliest texts of phrases, many together. Holds no state: one object serves all recordings."""

    def __init__(self, tokenizer: CTCTokenizer, beam_size: int, n_best: int, fusions: Sequence[Fusion] = ()) -> None:
        self.tokenizer, self.n_best = tokenizer, n_best
        blank = tokenizer.blank_id
        silent = [id for id, piece in enumerate(tokenizer.pieces) if not piece and id != blank]
        tokens = _TOKENS_PER_FRAME[beam_size > _WIDE]
        self._beam = PrefixBeamSearch(blank, beam_size, tokens, fusions, banned=silent)

    def __call__(self, emissions: Sequence[Tensor]) -> list[Found]:
        """Log-probabilities (frames, vocabulary) of each phrase, of at least one frame → what it says."""
        found: list[Found] = [Found([], [])] * len(emissions)
        order = sorted(range(len(emissions)), key=lambda i: len(emissions[i]))
        for first in range(0, len(order), _ROWS):
            batch = order[first : first + _ROWS]
            for index, each in zip(batch, self._search([emissions[i] for i in batch]), strict=True):
                found[index] = each
        return found

    def _search(self, emissions: Sequence[Tensor]) -> list[Found]:
        # What the network can say beyond the vocabulary is nothing.
        log_probs = torch.nn.utils.rnn.pad_sequence(
            [each[:, : self.tokenizer.size] for each in emissions], batch_first=True
        )
        lengths = [len(each) for each in emissions]
        hypotheses = self._beam(log_probs, torch.tensor(lengths, device=log_probs.device), self.n_best)
        texts = [list(row[0].tokens) if row else [] for row in hypotheses]
        spoken = [i for i, text in enumerate(texts) if text]
        tokens: dict[int, list[CTCToken]] = {}
        if spoken:
            aligned = align(
                log_probs[torch.tensor(spoken, device=log_probs.device)],
                [lengths[i] for i in spoken],
                [texts[i] for i in spoken],
                self.tokenizer.blank_id,
            )
            tokens = {i: each.tokens for i, each in zip(spoken, aligned, strict=True)}
        return [Found(tokens.get(i, []), self._alternatives(row)) for i, row in enumerate(hypotheses)]

    def _alternatives(self, hypotheses: Sequence[Hypothesis]) -> list[Alternative]:
        if self.n_best < 2:
            return []
        return [
            Alternative(" ".join(self.tokenizer.decode(each.tokens).split()), each.score, each.acoustic)
            for each in hypotheses
        ]


@torch.inference_mode()
def search_together(searches: Sequence[Search], phrases: Sequence[Sequence[Tensor]]) -> list[list[Found]]:
    """What phrases (frames, vocabulary) of log-probabilities say, those of one search together."""
    out: list[list[Found]] = [[] for _ in phrases]
    for search in dict.fromkeys(searches):
        rows = [i for i, each in enumerate(searches) if each is search]
        found = iter(search([phrase for i in rows for phrase in phrases[i]]))
        for i in rows:
            out[i] = [next(found) for _ in phrases[i]]
    return out
