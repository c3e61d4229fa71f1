"""The Viterbi recursion of CTC alignment: each state is reached from itself, from the one before, or past a blank.

A frame is some ten small operations in plain PyTorch, each of which a GPU needs longer to start than to do. The kernel
does all frames of a stretch: a program takes one recording, block by block of its states, and a barrier parts frames.
Scores lie in two copies that take turns, with two impossible states before the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stapes.kernels.jit import can_launch, kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024


def viterbi(
    begin: Tensor,
    emissions: Tensor,
    lengths: Sequence[int],
    labels: Tensor,
    skip: Tensor,
    stretch: range,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores of the states (batch, states) before some frames and after them.

    emissions: (batch, frames, labels); ``lengths`` frames of each row are real: rows that are shorter wait in their
    last state. labels: (batch, states) int64. skip: (batch, states), 0 where a state is reached past the one before,
    minus infinity elsewhere. With ``keep`` also by how many states each came forward in each frame of the stretch:
    (frames, batch, states), uint8.
    """
    if begin.dtype != torch.float32 or not can_launch(begin.device):
        return viterbi_reference(begin, emissions, lengths, labels, skip, stretch, keep)
    return launch_or(
        "ctc_viterbi",
        begin.device,
        lambda: launch_viterbi(begin, emissions, lengths, labels, skip, stretch, keep),
        lambda: viterbi_reference(begin, emissions, lengths, labels, skip, stretch, keep),
    )


def viterbi_reference(
    begin: Tensor,
    emissions: Tensor,
    lengths: Sequence[int],
    labels: Tensor,
    skip: Tensor,
    stretch: range,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """`viterbi` in plain PyTorch."""
    rows, count = begin.shape
    shortest = min(lengths)
    ends = torch.tensor(lengths, device=begin.device)[:, None]
    padded = torch.full((rows, count + 2), float("-inf"), dtype=begin.dtype, device=begin.device)
    now, one_back, two_back = padded[:, 2:], padded[:, 1:-1], padded[:, :-2]
    now.copy_(begin)
    choices = torch.zeros((len(stretch) if keep else 0, rows, count), dtype=torch.uint8, device=begin.device)
    for number, frame in enumerate(stretch):
        skipped = two_back + skip
        moved = torch.maximum(now, one_back)
        if keep:
            choices[number] = (one_back > now).to(torch.uint8).masked_fill_(skipped > moved, 2)
        after = torch.maximum(moved, skipped) + emissions[:, frame].gather(1, labels)
        if frame >= shortest:
            over = ends <= frame
            after = torch.where(over, now, after)
            if keep:
                choices[number].masked_fill_(over, 0)
        now.copy_(after)
    return now.clone(), choices


def launch_viterbi(
    begin: Tensor,
    emissions: Tensor,
    lengths: Sequence[int],
    labels: Tensor,
    skip: Tensor,
    stretch: range,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """`viterbi` by the kernel."""
    rows, count = begin.shape
    scores = torch.full((2, rows, count + 2), float("-inf"), device=begin.device)
    scores[0, :, 2:] = begin
    choices = torch.zeros((len(stretch) if keep else 0, rows, count), dtype=torch.uint8, device=begin.device)
    steps = [max(0, min(length, stretch.stop) - stretch.start) for length in lengths]
    _ctc_viterbi[(rows,)](
        scores,
        emissions.contiguous(),
        labels.to(torch.int32).contiguous(),
        skip.contiguous(),
        torch.tensor(steps, dtype=torch.int32).to(begin.device, non_blocking=True),
        choices,
        rows,
        count,
        emissions.shape[1],
        emissions.shape[2],
        stretch.start,
        KEEP=keep,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    turn = torch.tensor([step % 2 for step in steps]).to(begin.device, non_blocking=True)
    return torch.where((turn == 0)[:, None], scores[0, :, 2:], scores[1, :, 2:]), choices


@kernel
def _ctc_viterbi(
    scores_ptr, emissions_ptr, labels_ptr, skip_ptr, steps_ptr, choices_ptr,
    rows, count, frames, size, first,
    KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All frames of one recording; scores before an even step are in the first copy."""
    row = tl.program_id(0)
    steps = tl.load(steps_ptr + row)
    scores = scores_ptr + row.to(tl.int64) * (count + 2)
    copy = rows * (count + 2)
    heard = emissions_ptr + (row.to(tl.int64) * frames + first) * size
    labels, skips = labels_ptr + row.to(tl.int64) * count, skip_ptr + row.to(tl.int64) * count
    for step in tl.range(0, steps, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        before, after = scores + step % 2 * copy, scores + (step + 1) % 2 * copy
        chosen = choices_ptr + (step * rows + row).to(tl.int64) * count
        for start in tl.range(0, count, BLOCK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            state = start + tl.arange(0, BLOCK)
            inside = state < count
            never = float("-inf")
            now = tl.load(before + state + 2, mask=inside, other=never)
            one_back = tl.load(before + state + 1, mask=inside, other=never)
            skipped = tl.load(before + state, mask=inside, other=never)
            skipped += tl.load(skips + state, mask=inside, other=never)
            label = tl.load(labels + state, mask=inside, other=0)
            emission = tl.load(heard + step * size + label, mask=inside, other=never)
            moved = tl.maximum(now, one_back)
            tl.store(after + state + 2, tl.maximum(moved, skipped) + emission, mask=inside)
            if KEEP:
                choice = tl.where(skipped > moved, 2, tl.where(one_back > now, 1, 0))
                tl.store(chosen + state, choice.to(tl.uint8), mask=inside)
        tl.debug_barrier()


def trace(choices: Tensor, places: Tensor, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Follow paths back through the decisions of `viterbi`.

    places: (batch, paths) int32, the states in the last frame. Returns the state in each frame, (batch, frames, paths)
    int32 (nothing without ``keep``), and the states before the first frame, (batch, paths).
    """
    return launch_or(
        "ctc_viterbi_trace",
        choices.device,
        lambda: launch_trace(choices, places, keep),
        lambda: trace_reference(choices, places, keep),
    )


def trace_reference(choices: Tensor, places: Tensor, keep: bool = True) -> tuple[Tensor, Tensor]:
    """`trace` on the host."""
    table, at = choices.cpu().numpy(), places.cpu().numpy().astype(np.int32)
    frames, rows, _ = table.shape
    path = np.empty((rows, frames if keep else 0, at.shape[1]), dtype=np.int32)
    row = np.arange(rows)[:, None]
    for frame in range(frames - 1, -1, -1):
        if keep:
            path[:, frame] = at
        at = at - table[frame, row, at]
    return torch.from_numpy(path).to(choices.device), torch.from_numpy(at).to(choices.device)


def launch_trace(choices: Tensor, places: Tensor, keep: bool = True) -> tuple[Tensor, Tensor]:
    """`trace` by the kernel."""
    frames, rows, states = choices.shape
    count = places.shape[1]
    at = places.to(torch.int32, copy=True).contiguous()
    path = torch.empty((rows, frames if keep else 0, count), dtype=torch.int32, device=choices.device)
    block = min(128, 1 << (count - 1).bit_length())
    grid = (rows, -(-count // block))
    _ctc_viterbi_trace[grid](choices, at, path, frames, rows, states, count, KEEP=keep, BLOCK=block, num_warps=1)
    return path, at


@kernel
def _ctc_viterbi_trace(
    choices_ptr, at_ptr, path_ptr, frames, rows, states, count, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Some paths of one recording."""
    row = tl.program_id(0)
    each = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = each < count
    place = tl.load(at_ptr + row * count + each, mask=inside, other=0)
    for step in tl.range(0, frames, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        frame = frames - 1 - step
        if KEEP:
            tl.store(path_ptr + (row * frames + frame).to(tl.int64) * count + each, place, mask=inside)
        choice = choices_ptr + (frame * rows + row).to(tl.int64) * states + place
        place -= tl.load(choice, mask=inside, other=0).to(tl.int32)
    tl.store(at_ptr + row * count + each, place, mask=inside)


def compile_cases(target: Target) -> list[CompileCase]:
    """With and without decisions; the way back of one path and of many."""
    del target  # the same everywhere
    pointers = dict.fromkeys(("scores_ptr", "emissions_ptr", "skip_ptr"), "*fp32")
    pointers |= {"labels_ptr": "*i32", "steps_ptr": "*i32", "choices_ptr": "*u8"}
    numbers = dict.fromkeys(("rows", "count", "frames", "size", "first"), "i32")
    cases = [
        CompileCase(name, "fp32", _ctc_viterbi, {**pointers, **numbers}, {"KEEP": keep, "BLOCK": _BLOCK}, warps=8)
        for name, keep in (("ctc_viterbi", False), ("ctc_viterbi choices", True))
    ]
    back = {"choices_ptr": "*u8", "at_ptr": "*i32", "path_ptr": "*i32"}
    back |= dict.fromkeys(("frames", "rows", "states", "count"), "i32")
    return cases + [
        CompileCase(name, "fp32", _ctc_viterbi_trace, back, {"KEEP": keep, "BLOCK": block}, warps=1)
        for name, keep, block in (("ctc_viterbi_trace", True, 1), ("ctc_viterbi_trace many", False, 128))
    ]
