"""openai/whisper's decoding, restated as simply as possible: one window, no cache, Python lists, float64.

Source: openai/whisper ``decoding.py``. The tests hold the slots of `stapes.inference.lanes` against this. Two things
are ours, not openai's: a beam that continues a forbidden token never counts as ended, and loops are stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from stapes.decoding.loops import repeats
from stapes.decoding.rules import Vocabulary
from stapes.decoding.sampling import counter_uniform, random_key
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.models.whisper import Whisper

FORBIDDEN = -math.inf


def forbid(
    logits: Tensor,
    written: Sequence[int],
    vocabulary: Vocabulary,
    *,
    timestamps: bool,
    max_initial: int,
    suppressed: Sequence[int],
    blank: Sequence[int],
) -> Tensor:
    """SuppressBlank, SuppressTokens and ApplyTimestampRules for one row (vocabulary,), on a copy."""
    logits = logits.clone()
    begin = vocabulary.timestamp_begin
    if not written:
        logits[list(blank)] = FORBIDDEN
    logits[list(suppressed)] = FORBIDDEN
    if not timestamps:
        return logits
    logits[vocabulary.no_timestamps] = FORBIDDEN
    last_was_timestamp = len(written) >= 1 and written[-1] >= begin
    penultimate_was_timestamp = len(written) < 2 or written[-2] >= begin
    if last_was_timestamp:
        if penultimate_was_timestamp:
            logits[begin:] = FORBIDDEN
        else:
            logits[: vocabulary.end] = FORBIDDEN
    stamps = [token for token in written if token >= begin]
    if stamps:
        last = stamps[-1] if last_was_timestamp and not penultimate_was_timestamp else stamps[-1] + 1
        logits[begin:last] = FORBIDDEN
    if not written:
        logits[:begin] = FORBIDDEN
        if max_initial >= 0:
            logits[begin + max_initial + 1 :] = FORBIDDEN
    logprobs = logits.double().log_softmax(dim=-1)  # in float32 the softmax itself rounds two that are near to a tie
    if logprobs[begin:].logsumexp(dim=-1) > logprobs[:begin].max():
        logits[:begin] = FORBIDDEN
    return logits


class ReferenceDecoder:
    """A Whisper's text decoder without batch and cache, from its weights."""

    def __init__(self, model: Whisper) -> None:
        self.weights = {name: value.detach().double().clone() for name, value in model.decoder.state_dict().items()}
        self.layers, self.heads = model.config.decoder_layers, model.config.decoder_heads
        self.context = model.config.text_context

    def logits(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        """Logits (tokens, vocabulary) after each token, given the encoder's states (1500, width)."""
        states = states.double()
        x = self.weights["embedding.weight"][list(tokens)] + self.weights["positions"][: len(tokens)]
        causal = torch.full((len(tokens), len(tokens)), FORBIDDEN, dtype=x.dtype).triu(1)
        for layer in range(self.layers):
            name = f"layers.{layer}"
            normed = self._norm(x, f"{name}.attention_norm")
            x = x + self._attend(normed, normed, f"{name}.attention", causal)
            x = x + self._attend(
                self._norm(x, f"{name}.cross_attention_norm"), states, f"{name}.cross_attention", torch.zeros(1)
            )
            inner = F.gelu(self._linear(self._norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up"))
            x = x + self._linear(inner, f"{name}.mlp.down")
        return self._norm(x, "norm") @ self.weights["embedding.weight"].T

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _attend(self, x: Tensor, other: Tensor, name: str, mask: Tensor) -> Tensor:
        query, key, value = (
            self._linear(source, f"{name}.{part}").unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for part, source in (("query", x), ("key", other), ("value", other))
        )
        weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask).softmax(dim=-1)
        return self._linear((weights @ value).transpose(0, 1).flatten(1), f"{name}.out")

    def decode(
        self, states: Tensor, request: DecodeRequest, vocabulary: Vocabulary, blank: Sequence[int]
    ) -> DecodeResult:
        """Write the text of one window."""
        at_start = self.logits(request.prompt, states)[request.sot_index]
        limit = self.context - len(request.prompt) - 1

        def logprobs(written: Sequence[int]) -> tuple[Tensor, Tensor]:
            logits = forbid(
                self.logits([*request.prompt, *written], states)[-1],
                written,
                vocabulary,
                timestamps=request.timestamps,
                max_initial=request.max_initial_timestamp,
                suppressed=request.suppressed,
                blank=blank,
            )
            return logits, logits.log_softmax(dim=-1)

        search = _beams if request.is_beam else _independent
        candidates = search(logprobs, request, vocabulary, limit)

        def rank(candidate: tuple[list[int], float, bool]) -> tuple[bool, float]:
            tokens, total, looped = candidate
            if request.length_penalty is None:
                return not looped, total / max(1, len(tokens))
            return not looped, total / ((5 + len(tokens)) / 6) ** request.length_penalty

        if request.temperature > 0 and request.best_of > 2 and request.length_penalty is None:
            # stapes' own rule: of three or more samples, the one that the others agree with most.
            sound = [candidate for candidate in candidates if not candidate[2]] or candidates
            texts = [[token for token in text if token < vocabulary.end] for text, _, _ in sound]
            apart = [sum(Levenshtein.distance(text, other) for other in texts) for text in texts]
            tokens, total, looped = min(zip(sound, apart, strict=True), key=lambda pair: (pair[1], -rank(pair[0])[1]))[
                0
            ]
        else:
            tokens, total, looped = max(candidates, key=rank)
        return DecodeResult(
            tokens=tokens,
            avg_logprob=total / (len(tokens) + 1),
            no_speech_prob=float(at_start.softmax(dim=-1)[vocabulary.no_speech]),
            temperature=request.temperature,
            looped=looped,
        )


def _independent(logprobs, request, vocabulary, limit):
    """Greedy decoding or sampling: GreedyDecoder."""
    out = []
    for candidate in range(request.candidates):
        written: list[int] = []
        total, looped = 0.0, False
        key = torch.tensor([random_key(*request.key, candidate)])
        while len(written) < limit:
            logits, scores = logprobs(written)
            if request.temperature == 0:
                token = int(scores.argmax())
            else:
                cumulated = (logits / request.temperature).softmax(dim=-1).cumsum(dim=-1).numpy()
                uniform = float(counter_uniform(key, torch.tensor([len(written)])))
                token = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
            total += float(scores[token])
            if token == vocabulary.end:
                break
            written.append(token)
            if request.stop_loops and len(written) % 8 == 0 and repeats(written):
                looped = True
                break
        out.append((written, total, looped))
    return sorted(out, key=lambda found: -found[1])


def _beams(logprobs, request, vocabulary, limit):
    """Beam search: BeamSearchDecoder, with its dictionaries of whole sequences."""
    width = request.beam_size
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)] * width
    finished: dict[tuple[int, ...], float] = {}
    most = max(1, round(width * request.patience))
    looped = False
    for _ in range(limit):
        scores: dict[tuple[int, ...], float] = {}
        for text, total in dict.fromkeys(beams):
            values, tokens = logprobs(text)[1].topk(width + 1)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                scores[(*text, token)] = total + value
        beams, ended = [], {}
        for text in sorted(scores, key=lambda text: -scores[text]):
            if text[-1] == vocabulary.end:
                if scores[text] > FORBIDDEN:
                    ended[text[:-1]] = scores[text]
            else:
                beams.append((text, scores[text]))
                if len(beams) == width:
                    break
        for text, total in ended.items():
            if len(finished) < most:
                finished[text] = total
        best = beams[0][0]
        looped = request.stop_loops and len(best) % 8 == 0 and repeats(best)
        if len(finished) >= most or looped:
            break
    out = [(list(text), total, False) for text, total in finished.items()]
    for text, total in beams:
        if len(out) < width:
            out.append((list(text), total, looped))
    return out
