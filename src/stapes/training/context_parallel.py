"""Context parallelism: each process has a part of every recording, from the waveform or the spectrogram on.

For recordings too long for one GPU. A part is cut so that the convolutions in front hear what they hear in the whole;
the encoder's states are put together again behind its last layer, where heads, decoder and losses are those of one
process. Attention is told the keys and values of all parts (Llama 3's way, https://arxiv.org/abs/2407.21783 §3.3.2),
which is exact with any padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.conformer import Conformer
from stapes.models.ctc_head import WhisperEncoder
from stapes.models.wav2vec2 import Encoder, FeatureExtractor, GroupNormConvLayer, Statistics, Wav2Vec2, Wav2Vec2Config
from stapes.models.waveform import Moments
from stapes.training.exchange import gather_positions
from stapes.training.span import Span, beside_of_part, convolutions, look_at, with_neighbours


def share_context(network: nn.Module, group: dist.ProcessGroup) -> None:
    """Have ``network`` compute its encoder in parts, one a process. What it puts out is whole, in all of them."""
    span = Span(group)
    encoder: Any = network.encoder
    if isinstance(network, Wav2Vec2):
        _cut_waveform(network.feature_extractor, network.config, span)
        with_neighbours(network.encoder.positions.conv, group)
        _cut_masks(network.encoder, span)
    elif isinstance(network.encoder, Conformer):
        _cut_spectrogram(network.encoder, span)
    else:
        _cut_whisper_spectrogram(encoder, span)
    layers: list[Any] = list(encoder.layers)
    for layer in layers:
        look_at(layer.attention, lambda x: gather_positions(x, 2, group)[:, :, : span.total])
        for conv in convolutions(layer):
            with_neighbours(conv, group)
    through, leave = encoder.through, encoder.leave

    def through_part(x: Tensor, *_: Any) -> Tensor:
        beside = encoder.beside(span.total, span.real, x.device)
        return through(x, *beside_of_part(encoder, span, beside, len(x), x.device, cut_places=True))

    def leave_whole(x: Tensor, *rest: Any) -> Any:
        return leave(gather_positions(x, 1, group)[:, : span.total], *rest)

    encoder.through, encoder.leave = through_part, leave_whole


def _cut_waveform(extractor: FeatureExtractor, config: Wav2Vec2Config, span: Span) -> None:
    """Have the convolutions see the samples of the part's frames, and the group norm those of all parts."""
    plain = extractor.forward

    def forward(waveform: Tensor, lengths: Tensor | None = None, statistics: Statistics | None = None) -> Tensor:
        span.begin(max(1, config.feature_count(waveform.shape[1])))  # too short audio has one frame
        first = extractor.first
        if statistics is None and isinstance(first, GroupNormConvLayer):
            statistics = first.statistics(_moments_of_all(first, waveform, lengths, config.hop, span))
        start, frames = _range(span)
        begin, end = start * config.hop, (start + frames - 1) * config.hop + config.receptive_field
        part = waveform[:, begin:end]
        features = plain(part, _within(lengths, begin, part.shape[1]), statistics)
        return _filled(features, 0, span)

    extractor.forward = forward


@torch.no_grad()
def _moments_of_all(
    layer: GroupNormConvLayer, waveform: Tensor, lengths: Tensor | None, hop: int, span: Span
) -> Moments:
    """Sums over the windows that begin in this part, added up over the parts."""
    kernel, stride = layer.conv.kernel_size[0], layer.conv.stride[0]
    begin, end = span.first * hop, (span.first + span.each) * hop + kernel - stride
    piece = waveform[:, begin : None if span.rank == span.parts - 1 else end]
    own = layer.moments(piece, _within(lengths, begin, piece.shape[1]))
    for each in (own.count, own.total, own.products):
        dist.all_reduce(each, group=span.group)
    return own


def _cut_masks(encoder: Encoder, span: Span) -> None:
    plain = encoder.enter

    def enter(x: Tensor, lengths: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        span.real = lengths
        return plain(x, span.counts(lengths, len(x), x.device), None if hidden is None else span.of(hidden))

    encoder.enter = enter


def _cut_spectrogram(encoder: Conformer, span: Span) -> None:
    """Have the strided convolutions see the part and one state before it: no other sample reaches them."""
    plain, hop = encoder.subsampling.forward, encoder.config.subsampling

    def forward(mel: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        span.begin(encoder.config.state_count(mel.shape[2]))
        start, states = _range(span)
        before = min(start, 1)
        begin = (start - before) * hop
        part = mel[:, :, begin : (start + states) * hop]
        x, _ = plain(part, _within(lengths, begin, part.shape[2]))
        span.real = None if lengths is None else encoder.config.state_count(lengths)
        return _filled(x, before, span), span.real

    encoder.subsampling.forward = forward


def _cut_whisper_spectrogram(encoder: WhisperEncoder, span: Span) -> None:
    """The same with Whisper's two convolutions, which see a state on either side."""
    plain = encoder.enter

    def enter(mel: Tensor, lengths: Tensor | None, first: int = 0) -> tuple[Tensor, Tensor | None]:
        span.begin(encoder.config.state_count(mel.shape[2]))
        start, states = _range(span)
        before = min(start, 1)
        begin = 2 * (start - before)
        part = mel[:, :, begin : 2 * (start + states + 1)]
        x, _ = plain(part, _within(lengths, begin, part.shape[2]), first + start - before)
        span.real = None if lengths is None else encoder.config.state_count(lengths)
        return _filled(x, before, span), span.real

    encoder.enter = enter


def _range(span: Span) -> tuple[int, int]:
    """(First, number) of the positions to compute: one at least, so that every weight has a gradient everywhere."""
    return (span.first, span.count) if span.count else (0, 1)


def _within(lengths: Tensor | None, begin: int, size: int) -> Tensor | None:
    return None if lengths is None else (lengths - begin).clamp(min=0, max=size)


def _filled(x: Tensor, before: int, span: Span) -> Tensor:
    """(batch, positions, width): the part's positions, then zeros."""
    return F.pad(x[:, before : before + span.count], (0, 0, 0, span.each - span.count))
