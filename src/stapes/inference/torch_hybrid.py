"""Models with a decoder for the engine that runs CTC models: both heads decode jointly, and CTC says when.

Without a CTC head the decoder writes greedily.

The engine, its windows, words and times all come from paths: a label for each frame. So the tokens that the search
chose are laid over the frames, by CTC's own alignment or, without a CTC head, by where the decoder looked, and the
logits that are returned are those of the CTC head with that path as the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from stapes.checkpoints.spectrogram_models import SpectrogramCheckpoint
from stapes.decoding.ctc_align import align
from stapes.decoding.joint import joint_search
from stapes.errors import ModelError
from stapes.inference.gpu_attention import WITHOUT_PLANS
from stapes.inference.spectrogram_ctc import SpectrogramModel
from stapes.models.ctc_loss import frames_needed
from stapes.models.hybrid import Hybrid, state_mask

_ABOVE = 1e-3
"""Natural logarithm by which the path's label is above any other."""

_UNHEARD = -10.0
"""Log-probability of all other labels where there is no CTC head."""


class TorchHybrid(SpectrogramModel):
    """A `Hybrid` as `inference.ctc_model.CTCModel`. Raises ModelError for a vocabulary without start and end."""

    def __init__(self, checkpoint: SpectrogramCheckpoint, network: Hybrid) -> None:
        super().__init__(checkpoint, network)
        self.decoder, self.head = network.decoder, network.head
        vocabulary = checkpoint.tokenizer.vocabulary
        start, end = checkpoint.tokenizer.start, checkpoint.tokenizer.end
        if start is None or end is None or start not in vocabulary or end not in vocabulary:
            raise ModelError(f"{checkpoint.path} has no start and end token, which its decoder needs: copy it again")
        self.start, self.end = vocabulary[start], vocabulary[end]

    @sdpa_kernel(WITHOUT_PLANS)
    def __call__(
        self, waveform: Tensor, lengths: Tensor, measured: Sequence[Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (batch, frames, vocabulary) whose likeliest path says what both heads say, and real frames (batch,).

        waveform: (batch, samples), of which ``lengths`` (batch,), on the CPU, are real.
        """
        states, counts = self.encode(waveform, lengths)
        real = [self.frame_count(samples) for samples in lengths.tolist()]
        blank, network = self.tokenizer.blank_id, self.network
        assert isinstance(network, Hybrid)
        log_probs = None if self.head is None else network.ctc_logits(states).float().log_softmax(-1)
        if log_probs is None:
            texts = [
                [id for id in ids if id not in (blank, self.start)]
                for ids in network.greedy(states, counts, self.start, self.end)
            ]
        else:
            texts = joint_search(
                self.decoder,
                states,
                counts,
                self.start,
                self.end,
                log_probs=log_probs,
                blank=blank,
                ctc_weight=network.config.search_ctc_weight,
                beam=network.config.search_beam,
            )
        texts = [_fitting(ids, frames) for ids, frames in zip(texts, real, strict=True)]
        path = torch.full((len(states), states.shape[1]), blank, dtype=torch.int64)
        if log_probs is not None:
            for row, alignment in enumerate(align(log_probs, real, texts, blank)):
                for token in alignment.tokens:
                    path[row, token.start : token.end] = token.id
        else:
            for row, places in enumerate(self._looked_at(texts, states, counts, real)):
                path[row, places] = torch.tensor(texts[row], dtype=torch.int64)
            log_probs = torch.full((*path.shape, network.config.vocab_size), _UNHEARD, device=states.device)
        path = path.to(states.device)[..., None]
        own = log_probs.gather(2, path) if self.head is not None else torch.zeros_like(path, dtype=log_probs.dtype)
        return log_probs.minimum(own - _ABOVE).scatter(2, path, own), counts

    def _looked_at(
        self, texts: Sequence[Sequence[int]], states: Tensor, counts: Tensor, real: Sequence[int]
    ) -> list[list[int]]:
        """For each token the frame that the decoder looked at most when it wrote it; each after the one before."""
        longest = max(map(len, texts), default=0)
        tokens = torch.full((len(texts), longest + 1), self.end, device=states.device)
        tokens[:, 0] = self.start
        for row, ids in enumerate(texts):
            tokens[row, 1 : len(ids) + 1] = torch.tensor(ids, device=states.device)
        weights = self.decoder.frame_weights(tokens, states, state_mask(counts, states.shape[1]))
        peaks = weights.argmax(-1).tolist()
        return [_in_order(peaks[row][: len(ids)], ids, real[row]) for row, ids in enumerate(texts)]


def _fitting(ids: Sequence[int], frames: int) -> list[int]:
    """As many tokens as so many frames can say."""
    ids = list(ids[:frames])
    while frames_needed(ids) > frames:
        ids.pop()
    return ids


def _in_order(peaks: Sequence[int], ids: Sequence[int], frames: int) -> list[int]:
    """Frames as near to ``peaks`` as they can be, growing, with one between equal neighbours, below ``frames``."""
    steps = [0, *(1 + (a == b) for a, b in pairwise(ids))]
    latest, last = [0] * len(ids), frames - 1
    for number in range(len(ids) - 1, -1, -1):
        latest[number] = last
        last -= steps[number]
    places: list[int] = []
    for number, peak in enumerate(peaks):
        earliest = places[-1] + steps[number] if places else 0
        places.append(min(max(peak, earliest), latest[number]))
    return places
