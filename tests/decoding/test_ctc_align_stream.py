"""However a recording comes, its alignment is that of the whole; what is held does not grow with its length."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from alignments import check_path, needed, random_log_probs
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.decoding import ctc_align_stream
from stapes.decoding.ctc_align import Alignment, align
from stapes.decoding.ctc_align_stream import StreamAligner
from stapes.decoding.spelling import WILDCARD
from stapes.errors import ModelError, UsageError


def streamed(log_probs: torch.Tensor, ids: list[int], piece: int, **sizes: int) -> Alignment:
    aligner = StreamAligner(ids, 0, log_probs.shape[1], **sizes)
    for part in log_probs.split(piece):
        aligner.feed(part)
    return aligner.finish()


def same(found: Alignment, wanted: Alignment) -> None:
    assert found.logprob == pytest.approx(wanted.logprob, rel=1e-5)
    assert [token[:3] for token in found.tokens] == [token[:3] for token in wanted.tokens]
    for token, other in zip(found.tokens, wanted.tokens, strict=True):
        assert token.probability == pytest.approx(other.probability, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 70), st.integers(0, 40))
def test_what_fits_is_the_likeliest_path(seed: int, frames: int, piece: int, size: int) -> None:
    draw = np.random.default_rng(seed)
    ids = draw.choice([WILDCARD, 1, 2, 3, 4], size=size).tolist()
    while needed(ids) > frames:
        ids.pop()
    log_probs = random_log_probs(seed, frames, 5)
    found = streamed(log_probs[0].float(), ids, piece)
    check_path(found, log_probs[0], ids, blank=0)
    (wanted,) = align(log_probs, [frames], [ids], blank=0)
    assert found.logprob == pytest.approx(wanted.logprob, rel=1e-5)


def speech(seed: int, tokens: int, pause: int = 0) -> tuple[torch.Tensor, list[int]]:
    """What a fair model says of random letters: a frame or two each among blanks, some misheard; (frames, labels)."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(1, 8, tokens).tolist()
    labels: list[int] = []
    for place, id in enumerate(ids):
        heard = int(draw.integers(1, 8)) if draw.random() < 0.1 else id
        labels += [0] * int(draw.integers(1, 6)) + [heard] * int(draw.integers(1, 3))
        if pause and place == tokens // 2:
            labels += [0] * pause
    logits = torch.from_numpy(draw.normal(scale=1.5, size=(len(labels), 8)))
    logits[torch.arange(len(labels)), torch.tensor(labels)] += 5.0
    return logits.log_softmax(-1).float(), ids


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("piece", [7, 100, 5000])
def test_a_narrow_band_that_moves_finds_the_path_of_the_whole(seed: int, piece: int) -> None:
    log_probs, ids = speech(seed, 400)
    (wanted,) = align(log_probs[None], [len(log_probs)], [ids], blank=0)
    same(streamed(log_probs, ids, piece, band=128, span=256), wanted)


def with_gaps() -> list[tuple[torch.Tensor, list[int]]]:
    """A passage that is not spoken, and one that is not written."""
    log_probs, ids = speech(5, 300)
    part, other_ids = speech(6, 12)
    return [
        (log_probs, [*ids[:150], *other_ids, *ids[150:]]),
        (torch.cat([log_probs[:600], part, log_probs[600:]]), ids),
    ]


def test_text_and_sound_may_part_within_the_band() -> None:
    for recording, text in with_gaps():
        (wanted,) = align(recording[None], [len(recording)], [text], blank=0)
        same(streamed(recording, text, 64, band=128, span=512), wanted)


def test_a_path_at_the_edge_of_the_band_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    search = ctc_align_stream._Search

    class Watched(search):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            widths.append(given[-1])

    monkeypatch.setattr(ctc_align_stream, "_Search", Watched)
    for recording, text in with_gaps():
        (wanted,) = align(recording[None], [len(recording)], [text], blank=0)
        widths.clear()
        same(streamed(recording, text, 64, band=40, span=512), wanted)
        assert set(widths) > {40}


def test_what_is_not_too_large_is_searched_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far text and sound part."""
    log_probs, ids = speech(5, 200)
    _, other_ids = speech(6, 80)
    text = [*ids[:100], *other_ids, *ids[100:]]
    (wanted,) = align(log_probs[None], [len(log_probs)], [text], blank=0)
    aligner = StreamAligner(text, 0, 8, frames=len(log_probs), band=40, span=100)
    for part in log_probs.split(50):
        aligner.feed(part)
    same(aligner.finish(), wanted)
    with pytest.raises(UsageError, match="its recording has 9"):
        StreamAligner(text, 0, 8, frames=9)


def test_a_pause_is_gone_through() -> None:
    log_probs, ids = speech(7, 200, pause=300)
    (wanted,) = align(log_probs[None], [len(log_probs)], [ids], blank=0)
    same(streamed(log_probs, ids, 50, band=128, span=256), wanted)


def test_what_is_held_does_not_grow_with_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    viterbi = ctc_align_stream.viterbi

    def watched(begin: torch.Tensor, emissions: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal most
        scores, choices = viterbi(begin, emissions, *rest)  # type: ignore[arg-type]
        most = max(most, emissions.nelement() + begin.nelement() + choices.nelement())
        return scores, choices

    monkeypatch.setattr(ctc_align_stream, "viterbi", watched)
    sizes = []
    for tokens in (400, 1600):
        most = 0
        log_probs, ids = speech(8, tokens)
        streamed(log_probs, ids, 100, band=64, span=256)
        sizes.append(most)
    assert sizes[1] <= 1.2 * sizes[0]


def test_what_does_not_fit_is_named() -> None:
    log_probs, ids = speech(9, 300)
    with pytest.raises(UsageError, match="needs 3 frames, its recording has 2: the text is not of this recording"):
        streamed(log_probs[:2], [1, 2, 3], 1)
    with pytest.raises(UsageError, match="the text is not of this recording"):
        streamed(log_probs, ids * 4, 100, band=64, span=128)
    with pytest.raises(UsageError, match="the token 8"):
        StreamAligner([8], 0, 8)
    log_probs[4] = math.nan
    with pytest.raises(ModelError, match="not a number"):
        streamed(log_probs, ids, 100)
    assert streamed(log_probs[:0], [], 1) == Alignment([], 0.0)
    assert streamed(log_probs[:3], [], 1).tokens == []
