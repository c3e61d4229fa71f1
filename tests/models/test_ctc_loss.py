"""The loss is that of transformers; what has none is named and never silently left out."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_wav2vec2 import speech_like, theirs
from stapes.errors import UsageError
from stapes.models.ctc_loss import Impossible, ctc_losses, frames_needed


def random_log_probs(seed: int, rows: int, frames: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(rows, frames, size, generator=generator, dtype=torch.float64)).log_softmax(-1)


def over_all_paths(log_probs: torch.Tensor, ids: list[int], blank: int) -> float:
    """Negative log-probability of the text over every path that says it."""
    total = 0.0
    for path in product(range(log_probs.shape[1]), repeat=len(log_probs)):
        text = [b for a, b in zip((blank, *path), path, strict=False) if a != b and b != blank]
        if text == ids:
            total += math.exp(sum(log_probs[frame, label].item() for frame, label in enumerate(path)))
    return -math.log(total) if total else math.inf


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 5), st.lists(st.sampled_from([0, 2]), max_size=4))
def test_equal_to_the_sum_over_all_paths_or_reported(seed: int, frames: int, ids: list[int]) -> None:
    log_probs = random_log_probs(seed, 1, 6, 3)
    expected = over_all_paths(log_probs[0, :frames], ids, 1)
    losses, impossible = ctc_losses(log_probs, [frames], [ids], 1, impossible="report")
    if expected == math.inf:
        assert impossible == [Impossible(0, len(ids), frames_needed(ids), frames)]
        assert losses.tolist() == [0.0]
    else:
        assert impossible == []
        assert losses.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("kind", ["base", "large"])
def test_equal_to_the_loss_of_transformers(kind: str) -> None:
    model = theirs(kind)
    waveform = torch.stack([speech_like(9_000), speech_like(9_000, 1)])
    texts = [[5, 6, 6, 7], [9]]
    labels = torch.tensor([texts[0], [9, -100, -100, -100]])
    wanted = model(waveform, labels=labels)
    blank = int(model.config.pad_token_id or 0)
    logits = wanted.logits.detach().requires_grad_()
    losses, impossible = ctc_losses(logits.log_softmax(-1), [logits.shape[1]] * 2, texts, blank)
    assert model.config.ctc_loss_reduction == "sum"
    assert not impossible
    assert losses.sum().item() == pytest.approx(wanted.loss.item(), abs=1e-4)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (their_gradient,) = torch.autograd.grad(wanted.loss, wanted.logits)
    assert (gradient - their_gradient).abs().max() < 1e-5


def test_the_impossible_add_nothing_and_leave_their_neighbours_alone() -> None:
    logits = random_log_probs(1, 3, 6, 4).requires_grad_()
    texts = [[1, 2, 2, 3], [1, 1, 1, 1], [3]]
    lengths = torch.tensor([6, 6, 2])
    losses, impossible = ctc_losses(logits.log_softmax(-1), lengths, texts, 0, impossible="report")
    assert impossible == [Impossible(1, 4, 7, 6)]
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[1].any()
    for row in (0, 2):
        alone, _ = ctc_losses(logits[row : row + 1].log_softmax(-1), lengths[row : row + 1], [texts[row]], 0)
        assert losses[row].item() == pytest.approx(alone.item())
        (its_own,) = torch.autograd.grad(alone.sum(), logits)
        assert torch.allclose(gradient[row], its_own[row])


def test_a_text_that_does_not_fit_is_an_error_that_names_its_recording() -> None:
    log_probs = random_log_probs(0, 2, 4, 3)
    with pytest.raises(UsageError, match=r"the text of b\.wav has 3 tokens and needs 5 frames, the recording has 4"):
        ctc_losses(log_probs, [4, 4], [[1], [2, 2, 2]], 0, names=["a.wav", "b.wav"])


def test_empty_texts_have_a_loss_and_a_gradient() -> None:
    logits = random_log_probs(2, 2, 5, 3).requires_grad_()
    log_probs = logits.log_softmax(-1)
    losses, impossible = ctc_losses(log_probs, [5, 3], [[], []], 0)
    assert not impossible
    assert losses.tolist() == pytest.approx([-log_probs[0, :, 0].sum().item(), -log_probs[1, :3, 0].sum().item()])
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient[0].any(dim=1).all()
    assert not gradient[1, 3:].any()


@pytest.mark.parametrize("frames", [0, 3])
def test_no_frames_say_nothing_for_certain(frames: int) -> None:
    losses, impossible = ctc_losses(random_log_probs(0, 2, frames, 3), [0, 0], [[], [1]], 0, impossible="report")
    assert losses.tolist() == [0.0, 0.0]
    assert impossible == [Impossible(1, 1, 1, 0)]


def test_what_is_infinite_for_another_reason_is_not_hidden() -> None:
    log_probs = random_log_probs(0, 2, 5, 3)
    log_probs[0, :, 2] = -math.inf
    losses, impossible = ctc_losses(log_probs, [5, 5], [[2], [2]], 0, impossible="report")
    assert not impossible
    assert losses[0] == math.inf
    assert losses[1].isfinite()


@pytest.mark.parametrize(
    ("lengths", "texts", "message"),
    [
        ([5, 9], [[1], [1]], "recording 1 has 9 frames where the batch has 5"),
        ([5, 5], [[1], [0]], "recording 1 holds the token 0"),
        ([5, 5], [[3], [1]], "recording 0 holds the token 3"),
        ([5, 5], [[1], [-100]], "recording 1 holds the token -100"),
        ([5], [[1], [1]], "2 recordings have 1 lengths and 2 texts"),
    ],
)
def test_wrong_arguments_are_named(lengths: list[int], texts: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ctc_losses(random_log_probs(0, 2, 5, 3), lengths, texts, 0)
