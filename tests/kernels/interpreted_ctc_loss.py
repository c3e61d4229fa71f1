"""Run in Triton's interpreter by test_interpreted.py: the CTC loss and its gradient are those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stapes.kernels import ctc_loss as module
from stapes.kernels.ctc_loss import ctc_loss, ctc_loss_reference
from stapes.models.ctc_loss import ctc_losses


def inputs(rows: int, frames: int, size: int, seed: int) -> Tensor:
    return torch.randn(rows, frames, size, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)


def integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("block", [512, 4])
def test_losses_and_gradients(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated tokens, one token, none, as many frames as needed, rows that are shorter; states in several blocks."""
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "_STATES", 16)
    logits = inputs(5, 19, 37, 1).requires_grad_()
    targets = integers([[3, 3, 5, 36, 5], [7, 0, 0, 0, 0], [0] * 5, [1, 1, 1, 1, 0], [2, 4, 6, 8, 9]])
    lengths, target_lengths = integers([19, 11, 4, 7, 5]), integers([5, 1, 0, 4, 5])
    blank = 20
    log_probs = logits.log_softmax(-1)
    found, gradient = ctc_loss(log_probs.detach(), lengths, targets, target_lengths, blank)
    wanted, reference = ctc_loss_reference(log_probs, lengths, targets, target_lengths, blank)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
    assert gradient is not None
    assert reference is not None
    of_logits, of_reference = (
        torch.autograd.grad(log_probs, logits, each, retain_graph=True)[0] for each in (gradient, reference)
    )
    torch.testing.assert_close(of_logits, of_reference, atol=2e-5, rtol=1e-4)
    alone, none = ctc_loss(log_probs.detach(), lengths, targets, target_lengths, blank, gradient=False)
    assert none is None
    assert torch.equal(alone, found)


def test_impossible_texts_are_infinite_and_a_row_without_frames_is_certain_of_nothing() -> None:
    log_probs = inputs(3, 6, 5, 2)
    found, _ = ctc_loss(
        log_probs, integers([3, 0, 0]), integers([[1, 1, 2], [1, 2, 3], [0, 0, 0]]), integers([3, 3, 0]), 0
    )
    assert found.tolist() == [float("inf"), float("inf"), 0.0]


def test_training_uses_it_and_leaves_impossible_recordings_without_a_gradient() -> None:
    logits = inputs(3, 9, 8, 3).requires_grad_()
    found = ctc_losses(logits.log_softmax(-1), [9, 2, 8], [[1, 2, 2], [3, 3], []], 0, impossible="report")
    weights = torch.tensor([1.0, 5.0, 2.0])
    (gradient,) = torch.autograd.grad((found.losses * weights).sum(), logits)
    assert [each.row for each in found.impossible] == [1]
    assert found.losses[1] == 0
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    again = logits.detach().requires_grad_()
    losses = torch.nn.functional.ctc_loss(
        again.log_softmax(-1).transpose(0, 1),
        torch.tensor([[1, 2, 2], [0, 0, 0], [0, 0, 0]]),
        torch.tensor([9, 2, 8]),
        torch.tensor([3, 0, 0]),
        reduction="none",
    )
    (wanted,) = torch.autograd.grad((losses * torch.tensor([1.0, 0.0, 2.0])).sum(), again)
    torch.testing.assert_close(gradient, wanted, atol=2e-5, rtol=1e-4)
