"""The two ends of a decoder's step: a token and its place become a state, and logits become the next token.

Whisper's token rules, the choice of the likeliest token, its log-probability and the end of a text are one pass over
each row of logits; in single operations they would take as long as a small model's whole step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _embed(
    token_ptr, position_ptr, embedding_ptr, place_ptr, wide_ptr, narrow_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    token = tl.maximum(tl.load(token_ptr + row), 0)
    position = tl.load(position_ptr + row)
    x = tl.load(embedding_ptr + token * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(place_ptr + position * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(wide_ptr + row * WIDTH + d, x, mask=inside)
    tl.store(narrow_ptr + row * WIDTH + d, x.to(narrow_ptr.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, positions: Tensor, embedding: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """tokens, positions (rows,), int64 → the sum of both embeddings (rows, width), in float32 and in their dtype."""
    return launch_or(
        "embed",
        tokens.device,
        lambda: _launch_embed(tokens, positions, embedding, places),
        lambda: embed_reference(tokens, positions, embedding, places),
    )


def embed_reference(tokens: Tensor, positions: Tensor, embedding: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """`embed` in plain PyTorch."""
    wide = embedding[tokens.clamp_min(0)].float() + places[positions].float()
    return wide, wide.to(places.dtype)


def _launch_embed(tokens: Tensor, positions: Tensor, embedding: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = len(tokens), places.shape[1]
    wide = torch.empty(rows, width, dtype=torch.float32, device=tokens.device)
    narrow = torch.empty(rows, width, dtype=places.dtype, device=tokens.device)
    block = 1 << (width - 1).bit_length()
    _embed[(rows,)](tokens, positions, embedding, places, wide, narrow, WIDTH=width, BLOCK=block, num_warps=4)
    return wide, narrow


@kernel
def _likeliest(
    logits_ptr,
    forbidden_ptr,
    blank_ptr,
    timestamps_ptr,
    max_initial_ptr,
    count_ptr,
    last_ptr,
    before_last_ptr,
    last_timestamp_ptr,
    ended_ptr,
    live_ptr,
    limit_ptr,
    tokens_ptr,
    logprobs_ptr,
    SIZE: tl.constexpr,
    END: tl.constexpr,
    NO_TIMESTAMPS: tl.constexpr,
    BEGIN: tl.constexpr,
    CONTEXT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    forbidden_score = float("-inf")
    on = tl.load(timestamps_ptr + row) != 0
    count = tl.load(count_ptr + row)
    last = tl.load(last_ptr + row)
    before = tl.load(before_last_ptr + row)
    max_initial = tl.load(max_initial_ptr + row)
    first = count == 0
    after_time = on & (last >= BEGIN)
    after_pair = after_time & ((before >= BEGIN) | (before < 0))
    after_one = after_time & (after_pair == 0)
    floor = tl.load(last_timestamp_ptr + row) + tl.where(after_one, 0, 1) - BEGIN
    too_late = first & on & (max_initial >= 0)
    # Of text and of times each: the highest logit so far, where it is, and the sum of exponentials below it.
    text_best, time_best = -1e30, -1e30
    text_sum, time_sum = 0.0, 0.0
    text_at, time_at = 0, BEGIN
    for start in range(0, SIZE, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < SIZE
        x = tl.load(logits_ptr + row * SIZE + token, mask=inside, other=forbidden_score)
        x += tl.load(forbidden_ptr + row * SIZE + token, mask=inside, other=0.0)
        if first:
            x += tl.load(blank_ptr + token, mask=inside, other=0.0)
        index = token - BEGIN
        is_time = index >= 0
        no_time = on & ((index < floor) | after_pair | (too_late & (index > max_initial)))
        no_text = (on & (token == NO_TIMESTAMPS)) | (after_one & (token < END)) | (first & on)
        text = tl.where(is_time | no_text, forbidden_score, x)
        time = tl.where((is_time == 0) | no_time, forbidden_score, x)
        best, at = tl.max(text, 0), tl.argmax(text, 0)
        higher = tl.maximum(text_best, best)
        text_sum = text_sum * tl.exp(text_best - higher) + tl.sum(tl.exp(text - higher), 0)
        text_at = tl.where(best > text_best, start + at, text_at)
        text_best = higher
        best, at = tl.max(time, 0), tl.argmax(time, 0)
        higher = tl.maximum(time_best, best)
        time_sum = time_sum * tl.exp(time_best - higher) + tl.sum(tl.exp(time - higher), 0)
        time_at = tl.where(best > time_best, start + at, time_at)
        time_best = higher
    time_mass = time_best + tl.log(time_sum)
    text_mass = text_best + tl.log(text_sum)
    # When all timestamps together are likelier than any single text token, one of them it is.
    time_wins = on & (time_mass > text_best)
    is_time = time_wins | (time_best > text_best)
    token = tl.where(is_time, time_at, text_at)
    top = tl.maximum(time_mass, text_mass)
    mass = top + tl.log(tl.exp(time_mass - top) + tl.exp(text_mass - top))
    chosen = tl.where(is_time, time_best, text_best) - tl.where(time_wins, time_mass, mass)
    ended = tl.load(ended_ptr + row) != 0
    token = tl.where(ended, END, token).to(tl.int64)
    place = row * CONTEXT + tl.minimum(count, CONTEXT - 1)
    tl.store(logprobs_ptr + place, chosen)
    tl.store(tokens_ptr + place, token)
    tl.store(before_last_ptr + row, last)
    tl.store(last_ptr + row, token)
    tl.store(count_ptr + row, count + 1)
    if token >= BEGIN:
        tl.store(last_timestamp_ptr + row, token)
    if token == END:
        tl.store(ended_ptr + row, True)
    if (token == END) | (count + 1 >= tl.load(limit_ptr + row)):
        tl.store(live_ptr + row, 0)


def launch_likeliest(
    logits: Tensor,
    forbidden: Tensor,
    blank: Tensor,
    state: tuple[Tensor, ...],
    ended: Tensor,
    live: Tensor,
    limits: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    ids: tuple[int, int, int],
) -> None:
    """Write the likeliest token that the rules allow in each row; its reference is `decoding.rules`.

    logits, forbidden (rows, vocabulary), blank (vocabulary,), float32. state: what the rules remember, in the order of
    ``RuleState.fields``. ended, bool, live, int32 (rows,): set to True and 0 where the text ends, and live to 0
    where it reaches ``limits`` (rows,), int64, too. tokens (rows, context), int64, logprobs, float32: written at each
    row's count. ids: <|endoftext|>, <|notimestamps|>, the first timestamp. All are changed in place.
    """
    _likeliest[(len(logits),)](
        logits,
        forbidden,
        blank,
        *state,
        ended,
        live,
        limits,
        tokens,
        logprobs,
        SIZE=logits.shape[1],
        END=ids[0],
        NO_TIMESTAMPS=ids[1],
        BEGIN=ids[2],
        CONTEXT=tokens.shape[1],
        BLOCK=4096,
        num_warps=8,
    )


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: Whisper large-v3."""
    for name in ("fp16", "bf16"):
        yield CompileCase(
            "embed",
            name,
            _embed,
            signature={
                "token_ptr": "*i64",
                "position_ptr": "*i64",
                "embedding_ptr": f"*{name}",
                "place_ptr": f"*{name}",
                "wide_ptr": "*fp32",
                "narrow_ptr": f"*{name}",
            },
            constants={"WIDTH": 1280, "BLOCK": 2048},
            skip="no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None,
        )
    integers = (
        "limit_ptr",
        "max_initial_ptr",
        "count_ptr",
        "last_ptr",
        "before_last_ptr",
        "last_timestamp_ptr",
        "tokens_ptr",
    )
    yield CompileCase(
        "likeliest",
        "fp32",
        _likeliest,
        signature={
            "logits_ptr": "*fp32",
            "forbidden_ptr": "*fp32",
            "blank_ptr": "*fp32",
            "timestamps_ptr": "*i1",
            "ended_ptr": "*i1",
            "live_ptr": "*i32",
            "logprobs_ptr": "*fp32",
        }
        | dict.fromkeys(integers, "*i64"),
        constants={"SIZE": 51866, "END": 50257, "NO_TIMESTAMPS": 50364, "BEGIN": 50365, "CONTEXT": 448, "BLOCK": 4096},
        warps=8,
    )
