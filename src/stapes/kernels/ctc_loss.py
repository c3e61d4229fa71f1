"""The CTC loss and its gradient on a GPU: both recursions at once, and sums over states in a fixed order.

Graves et al. 2006 (https://doi.org/10.1145/1143844.1143891). A recursion takes one frame after the other, whatever the
GPU could do beside: the one from the front and the one from the back run side by side, as two programs of one launch.
What the states of a token add up to is a product with a matrix of zeros and ones, so that, unlike with atomic
additions, a step comes out the same, bit for bit, whenever it is made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 512
"""States of a recursion that are computed together."""

_FRAMES, _STATES, _TOKENS = 16, 32, 32
"""Of a tile of the gradient."""


def ctc_loss(
    log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int, *, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Each row's negative log-likelihood (batch,), and the gradients of their sum, (batch, frames, vocabulary).

    log_probs: (batch, frames, vocabulary), float32, from log-softmax, for which alone the gradients are right. lengths,
    target_lengths: (batch,) int32, targets: (batch, tokens) int32 without blanks, all on log_probs' device. An
    impossible text has an infinite loss, and its gradients are not numbers.
    """
    return launch_or(
        "ctc_loss",
        log_probs.device,
        lambda: _launch(log_probs, lengths, targets, target_lengths, blank, gradient),
        lambda: ctc_loss_reference(log_probs, lengths, targets, target_lengths, blank, gradient=gradient),
    )


def ctc_loss_reference(
    log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int, *, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`ctc_loss` by PyTorch's own."""
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_(gradient)
        losses = F.ctc_loss(
            leaf.transpose(0, 1),
            targets.long(),
            lengths.long().cpu(),
            target_lengths.long().cpu(),
            blank=blank,
            reduction="none",
        )
        found = torch.autograd.grad(losses.sum(), leaf)[0] if gradient else None
    return losses.detach(), found


@kernel
def _label(targets_ptr, state, count, blank):
    """The token of each state: blanks, and between them the text."""
    token = tl.load(targets_ptr + state // 2, mask=(state >= 0) & (state < count) & (state % 2 == 1), other=0)
    return tl.where(state % 2 == 1, token, blank)


@kernel
def _ctc_sums(
    log_probs_ptr, lengths_ptr, targets_ptr, target_lengths_ptr, sums_ptr,
    rows, frames, tokens, size, states, blank, BLOCK: tl.constexpr,
):  # fmt: skip
    """One recursion of one row: log-sums of all paths to each state, its own frame included.

    From the back it is the same recursion over the reversed text and reversed frames, and lies in memory like that.
    """
    row, back = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    count = 2 * tl.load(target_lengths_ptr + row) + 1
    targets = targets_ptr + row.to(tl.int64) * tokens
    heard = log_probs_ptr + row.to(tl.int64) * frames * size
    sums = sums_ptr + (back * rows + row).to(tl.int64) * frames * states
    never = float("-inf")
    for step in tl.range(0, length, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        frame = tl.where(back == 1, length - 1 - step, step)
        before = sums + (step - 1) * states
        for start in tl.range(0, count, BLOCK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            state = start + tl.arange(0, BLOCK)
            inside = state < count
            place = tl.where(back == 1, count - 1 - state, state)
            neighbour = tl.where(back == 1, place + 2, place - 2)
            label = _label(targets, place, count, blank)
            emission = tl.load(heard + frame * size + label, mask=inside, other=never)
            skips = inside & (state % 2 == 1) & (state >= 2) & (label != _label(targets, neighbour, count, blank))
            earlier = step > 0
            now = tl.load(before + state, mask=inside & earlier, other=never)
            one = tl.load(before + state - 1, mask=inside & earlier & (state >= 1), other=never)
            two = tl.load(before + state - 2, mask=skips & earlier, other=never)
            begun = tl.where((step == 0) & (state < 2), 0.0, never)
            most = tl.maximum(tl.maximum(now, one), tl.maximum(two, begun))
            safe = tl.where(most == never, 0.0, most)
            total = tl.exp(now - safe) + tl.exp(one - safe) + tl.exp(two - safe) + tl.exp(begun - safe)
            tl.store(sums + step * states + state, safe + tl.log(total) + emission, mask=inside)
        tl.debug_barrier()


@kernel
def _ctc_gradient(
    log_probs_ptr, lengths_ptr, targets_ptr, target_lengths_ptr, sums_ptr, losses_ptr, out_ptr,
    rows, frames, tokens, size, states, blank,
    FRAMES: tl.constexpr, STATES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some frames of one row, some tokens."""
    row = tl.program_id(0)
    frame = tl.program_id(1) * FRAMES + tl.arange(0, FRAMES)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    length = tl.load(lengths_ptr + row)
    count = 2 * tl.load(target_lengths_ptr + row) + 1
    loss = tl.load(losses_ptr + row)
    targets = targets_ptr + row.to(tl.int64) * tokens
    heard = log_probs_ptr + (row.to(tl.int64) * frames + frame) * size
    forwards = sums_ptr + (row.to(tl.int64) * frames + frame) * states
    backwards = sums_ptr + ((rows + row).to(tl.int64) * frames + length - 1 - frame) * states
    real = frame < length
    share = tl.zeros((FRAMES, TOKENS), tl.float32)
    for start in tl.range(0, count, STATES, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        state = start + tl.arange(0, STATES)
        inside = real[:, None] & (state < count)[None, :]
        label = _label(targets, state, count, blank)
        path = tl.load(forwards[:, None] + state[None, :], mask=inside, other=0.0)
        path += tl.load(backwards[:, None] + (count - 1 - state)[None, :], mask=inside, other=0.0)
        path -= tl.load(heard[:, None] + label[None, :], mask=inside, other=0.0)
        # A frame whose token has no probability is in no path.
        probability = tl.where(inside & (path == path), tl.exp(path + loss), 0.0)
        own = (label[:, None] == token[None, :]).to(tl.float32)
        share += tl.dot(probability, own, input_precision="ieee")
    place = out_ptr + ((row.to(tl.int64) * frames + frame) * size)[:, None] + token[None, :]
    kept = (frame < frames)[:, None] & (token < size)[None, :]
    tl.store(place, tl.where(real[:, None], -share, 0.0), mask=kept)


def _launch(
    log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    rows, frames, size = log_probs.shape
    log_probs, targets = log_probs.contiguous(), targets.contiguous()
    tokens = targets.shape[1]
    states = 2 * tokens + 1
    sums = torch.empty(2, rows, frames, states, device=log_probs.device)
    sizes = (rows, frames, tokens, size, states, blank)
    _ctc_sums[(rows, 2 if gradient else 1)](
        log_probs, lengths, targets, target_lengths, sums, *sizes, BLOCK=_BLOCK, num_warps=8
    )
    each, end = torch.arange(rows, device=log_probs.device), 2 * target_lengths.long()
    last = sums[0, each, (lengths.long() - 1).clamp(min=0)]
    ends = torch.stack([end, (end - 1).clamp(min=0)], 1)
    said = last.gather(1, ends)
    said[:, 1] = said[:, 1].masked_fill(end == 0, float("-inf"))  # a text without tokens ends in its only state
    losses = -said.logsumexp(1)
    losses = torch.where(lengths > 0, losses, torch.where(end == 0, 0.0, float("inf")))
    if not gradient:
        return losses, None
    out = torch.empty_like(log_probs)
    _ctc_gradient[(rows, -(-frames // _FRAMES), -(-size // _TOKENS))](
        log_probs, lengths, targets, target_lengths, sums, losses, out, *sizes,
        FRAMES=_FRAMES, STATES=_STATES, TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip
    return losses, out


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """The same everywhere."""
    del target
    pointers = {"log_probs_ptr": "*fp32", "sums_ptr": "*fp32"}
    pointers |= dict.fromkeys(("lengths_ptr", "targets_ptr", "target_lengths_ptr"), "*i32")
    numbers = dict.fromkeys(("rows", "frames", "tokens", "size", "states", "blank"), "i32")
    yield CompileCase("ctc_loss", "fp32", _ctc_sums, pointers | numbers, {"BLOCK": _BLOCK}, warps=8)
    yield CompileCase(
        "ctc_loss gradient",
        "fp32",
        _ctc_gradient,
        pointers | {"losses_ptr": "*fp32", "out_ptr": "*fp32"} | numbers,
        {"FRAMES": _FRAMES, "STATES": _STATES, "TOKENS": _TOKENS},
    )
