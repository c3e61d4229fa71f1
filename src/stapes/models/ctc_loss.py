"""The CTC loss of each recording of a batch, and which recordings have none.

Graves et al. 2006 (https://doi.org/10.1145/1143844.1143891), as PyTorch computes it, on GPUs by a kernel of ours. A
text that needs more frames than its recording has cannot be said by any path; its loss is infinite, its gradient is not
a number. PyTorch's ``zero_infinity`` silences these and whatever else is infinite. Here they are found beforehand, from
the lengths alone, and named; a loss that is infinite for another reason (probabilities of zero, say) stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stapes.errors import UsageError
from stapes.kernels.ctc_loss import ctc_loss
from stapes.kernels.jit import can_launch


class Impossible(NamedTuple):
    """A recording that is too short for its text."""

    row: int
    tokens: int
    needed: int
    """Frames that the text needs at least."""
    frames: int


class CTCLosses(NamedTuple):
    """What `ctc_losses` found."""

    losses: Tensor
    """(batch,) float32, or wider where the log-probabilities are: each recording's negative log-likelihood of its text.
    0 and without a gradient for impossible ones."""
    impossible: list[Impossible]


def frames_needed(ids: Sequence[int]) -> int:
    """Frames without which no path says these tokens: one for each, and a blank between equal neighbours."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))


def ctc_losses(
    log_probs: Tensor,
    lengths: Sequence[int] | Tensor,
    targets: Sequence[Sequence[int]],
    blank: int,
    *,
    names: Sequence[str] | None = None,
    impossible: Literal["raise", "report"] = "raise",
) -> CTCLosses:
    """The negative log-likelihood of each text.

    log_probs: (batch, frames, vocabulary), from `torch.log_softmax`: the gradient is right for that only. ``lengths``:
    real frames of each row, as numbers or a tensor on the host, so that nothing waits for the device. ``targets``:
    token ids without blanks; a text may be empty. ``names``: what errors call the recordings.

    Raises UsageError, naming the recording: it has fewer frames than its text needs (``impossible="report"`` returns
    these instead), a length is not one of this batch, or an id is not one that a text may hold.
    """
    rows, frames, vocabulary = log_probs.shape
    real = [int(length) for length in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if len(real) != rows or len(targets) != rows:
        raise UsageError(f"{rows} recordings have {len(real)} lengths and {len(targets)} texts: give one of each")
    too_short: list[Impossible] = []
    for row, (length, ids) in enumerate(zip(real, targets, strict=True)):
        name = f"recording {row}" if names is None else names[row]
        if not 0 <= length <= frames:
            raise UsageError(f"{name} has {length} frames where the batch has {frames}: count its frames again")
        wrong = next((id for id in ids if not 0 <= id < vocabulary or id == blank), None)
        if wrong is not None:
            raise UsageError(
                f"the text of {name} holds the token {wrong}: the model has tokens below {vocabulary}, {blank} is blank"
            )
        needed = frames_needed(ids)
        if needed > length:
            too_short.append(Impossible(row, len(ids), needed, length))
            if impossible == "raise":
                raise UsageError(
                    f"the text of {name} has {len(ids)} tokens and needs {needed} frames, the recording has {length}: "
                    "mend the text, or leave the recording out"
                )
    left_out = {each.row for each in too_short}
    kept: list[Sequence[int]] = [[] if row in left_out else ids for row, ids in enumerate(targets)]
    padded = torch.zeros((rows, max([1, *map(len, kept)])), dtype=torch.int64)
    for row, ids in enumerate(kept):
        padded[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    if rows == 0 or frames == 0:  # nothing is said with certainty
        return CTCLosses(log_probs.sum(dim=(1, 2)), too_short)
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    counts = torch.tensor([len(ids) for ids in kept])
    if log_probs.dtype == torch.float32 and can_launch(log_probs.device):
        numbers = (each.int().to(log_probs.device, non_blocking=True) for each in (torch.tensor(real), padded, counts))
        losses: Tensor = _Losses.apply(log_probs, *numbers, blank)
    else:
        losses = F.ctc_loss(
            log_probs.transpose(0, 1),
            padded.to(log_probs.device, non_blocking=True),
            torch.tensor(real),
            counts,
            blank=blank,
            reduction="none",
            zero_infinity=False,
        )
    if too_short:
        possible = torch.tensor([row not in left_out for row in range(rows)]).to(losses.device, non_blocking=True)
        losses = torch.where(possible, losses, 0.0)
    return CTCLosses(losses, too_short)


class _Losses(torch.autograd.Function):
    """`stapes.kernels.ctc_loss`, whose gradients come with the losses."""

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int
    ) -> Tensor:
        losses, gradient = ctc_loss(
            log_probs, lengths, targets, target_lengths, blank, gradient=ctx.needs_input_grad[0]
        )
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        # A row that counts for nothing may be one whose gradients are not numbers.
        counted = torch.where((grad == 0)[:, None, None], 0.0, gradient * grad[:, None, None])
        return counted, None, None, None, None
