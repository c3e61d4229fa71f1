"""The two ends of a decoder's step: a token and its place become a state, and logits become the next token.

Whisper's token rules, the choice of the likeliest token, its log-probability and the end of a text are one pass over
each row of logits; in single operations they would take as long as a small model's whole step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stapes.kernels.jit import from_any_row, kernel, launch_or
from stapes.kernels.overlap import follow, overlap
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl


_BLOCK = 2048
"""Tokens of the vocabulary that one program ranks."""

_STATE = ("timestamps_ptr", "max_initial_ptr", "count_ptr", "last_ptr", "before_last_ptr", "last_timestamp_ptr")
"""What the rules remember; windows that enter slots begin at any row of it."""


@kernel
def _embed(
    token_ptr,
    position_ptr,
    embedding_ptr,
    place_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    token = tl.maximum(tl.load(token_ptr + row), 0)
    position = tl.load(position_ptr + row)
    x = tl.load(embedding_ptr + token * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(place_ptr + position * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + d, x, mask=inside)


def embed(tokens: Tensor, positions: Tensor, embedding: Tensor, places: Tensor) -> Tensor:
    """tokens, positions (rows,), int64 → the sum of both embeddings (rows, width), float32."""
    return launch_or(
        "embed",
        tokens.device,
        lambda: _launch_embed(tokens, positions, embedding, places),
        lambda: embed_reference(tokens, positions, embedding, places),
    )


def embed_reference(tokens: Tensor, positions: Tensor, embedding: Tensor, places: Tensor) -> Tensor:
    """`embed` in plain PyTorch."""
    return embedding[tokens.clamp_min(0)].float() + places[positions].float()


def _launch_embed(tokens: Tensor, positions: Tensor, embedding: Tensor, places: Tensor) -> Tensor:
    rows, width = len(tokens), places.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=tokens.device)
    _embed[(rows,)](
        tokens,
        positions,
        embedding,
        places,
        out,
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        num_warps=4,
        **overlap(tokens.device),
    )
    return out


@from_any_row(*_STATE, "forbidden_ptr")
def _rank_part(
    logits_ptr,
    forbidden_ptr,
    blank_ptr,
    timestamps_ptr,
    max_initial_ptr,
    count_ptr,
    last_ptr,
    before_last_ptr,
    last_timestamp_ptr,
    best_ptr,
    at_ptr,
    SIZE: tl.constexpr,
    END: tl.constexpr,
    NO_TIMESTAMPS: tl.constexpr,
    BEGIN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of one part of a row's vocabulary: the best text and the best time that the rules allow, and their masses."""
    follow(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    none = float("-inf")
    on = tl.load(timestamps_ptr + row) != 0
    first = tl.load(count_ptr + row) == 0
    last = tl.load(last_ptr + row)
    before = tl.load(before_last_ptr + row)
    max_initial = tl.load(max_initial_ptr + row)
    after_time = on & (last >= BEGIN)
    after_pair = after_time & ((before >= BEGIN) | (before < 0))
    after_one = after_time & (after_pair == 0)
    floor = tl.load(last_timestamp_ptr + row) + tl.where(after_one, 0, 1) - BEGIN
    too_late = first & on & (max_initial >= 0)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < SIZE
    x = tl.load(logits_ptr + row * SIZE + token, mask=inside, other=none)
    x += tl.load(forbidden_ptr + row * SIZE + token, mask=inside, other=0.0)
    x += tl.load(blank_ptr + token, mask=inside & first, other=0.0)
    index = token - BEGIN
    is_time = index >= 0
    no_time = on & ((index < floor) | after_pair | (too_late & (index > max_initial)))
    no_text = (on & (token == NO_TIMESTAMPS)) | (after_one & (token < END)) | (first & on)
    place = (row * PARTS + part) * 2
    fine = tl.where(is_time, no_time, no_text) == 0
    for kind in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        allowed = tl.where(fine & (is_time == (kind == 1)), x, none)
        best = tl.maximum(tl.max(allowed, 0), -1e30)
        tl.store(best_ptr + (place + kind) * 2, best)
        tl.store(best_ptr + (place + kind) * 2 + 1, tl.sum(tl.exp(allowed - best), 0))
        tl.store(at_ptr + place + kind, part * BLOCK + tl.argmax(allowed, 0))


@from_any_row(*_STATE, "ended_ptr", "live_ptr", "limit_ptr", "tokens_ptr", "logprobs_ptr")
def _write_likeliest(
    best_ptr,
    at_ptr,
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
    END: tl.constexpr,
    BEGIN: tl.constexpr,
    CONTEXT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the parts, choose, and note what was chosen."""
    follow(OVERLAP)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    place = (row * PARTS + part) * 2
    text = tl.load(best_ptr + place * 2, mask=inside, other=-1e30)
    time = tl.load(best_ptr + place * 2 + 2, mask=inside, other=-1e30)
    text_best, time_best = tl.max(text, 0), tl.max(time, 0)
    text_sum = tl.sum(tl.load(best_ptr + place * 2 + 1, mask=inside, other=0.0) * tl.exp(text - text_best), 0)
    time_sum = tl.sum(tl.load(best_ptr + place * 2 + 3, mask=inside, other=0.0) * tl.exp(time - time_best), 0)
    text_at = tl.load(at_ptr + (row * PARTS + tl.argmax(text, 0)) * 2)
    time_at = tl.load(at_ptr + (row * PARTS + tl.argmax(time, 0)) * 2 + 1)
    time_mass = time_best + tl.log(time_sum)
    text_mass = text_best + tl.log(text_sum)
    # When all timestamps together are likelier than any single text token, one of them it is.
    time_wins = (tl.load(timestamps_ptr + row) != 0) & (time_mass > text_best)
    is_time = time_wins | (time_best > text_best)
    token = tl.where(is_time, time_at, text_at)
    top = tl.maximum(time_mass, text_mass)
    mass = top + tl.log(tl.exp(time_mass - top) + tl.exp(text_mass - top))
    chosen = tl.where(is_time, time_best, text_best) - tl.where(time_wins, time_mass, mass)
    ended = tl.load(ended_ptr + row) != 0
    token = tl.where(ended, END, token).to(tl.int64)
    count = tl.load(count_ptr + row)
    written = row * CONTEXT + tl.minimum(count, CONTEXT - 1)
    tl.store(logprobs_ptr + written, chosen)
    tl.store(tokens_ptr + written, token)
    tl.store(before_last_ptr + row, tl.load(last_ptr + row))
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
    rows, size = logits.shape
    parts = -(-size // _BLOCK)
    best = torch.empty(rows * parts * 4, dtype=torch.float32, device=logits.device)
    at = torch.empty(rows * parts * 2, dtype=torch.int32, device=logits.device)
    end, no_timestamps, begin = ids
    _rank_part[(rows, parts)](
        logits,
        forbidden,
        blank,
        *state,
        best,
        at,
        SIZE=size,
        END=end,
        NO_TIMESTAMPS=no_timestamps,
        BEGIN=begin,
        PARTS=parts,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap(logits.device),
    )
    _write_likeliest[(rows,)](
        best,
        at,
        *state,
        ended,
        live,
        limits,
        tokens,
        logprobs,
        END=end,
        BEGIN=begin,
        CONTEXT=tokens.shape[1],
        PARTS=parts,
        BLOCK=max(2, 1 << (parts - 1).bit_length()),
        num_warps=1,
        **overlap(logits.device),
    )


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: Whisper large-v3."""
    overlaps = {"OVERLAP": target.name == "sm_90"}
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
                "out_ptr": "*fp32",
            },
            constants={"WIDTH": 1280, "BLOCK": 2048} | overlaps,
            skip="no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None,
        )
    integers = ("limit_ptr", "max_initial_ptr", "count_ptr", "last_ptr", "before_last_ptr", "last_timestamp_ptr")
    types = dict.fromkeys((*integers, "tokens_ptr"), "*i64") | {"timestamps_ptr": "*i1", "ended_ptr": "*i1"}
    types |= dict.fromkeys(("logits_ptr", "forbidden_ptr", "blank_ptr", "best_ptr", "logprobs_ptr"), "*fp32")
    types |= {"at_ptr": "*i32", "live_ptr": "*i32"}
    sizes = {"SIZE": 51866, "END": 50257, "NO_TIMESTAMPS": 50364, "BEGIN": 50365, "CONTEXT": 448, "PARTS": 26}
    for name, function, block, warps in (
        ("rank_part", _rank_part, _BLOCK, 4),
        ("write_likeliest", _write_likeliest, 32, 1),
    ):
        code = function.function.__code__
        arguments = code.co_varnames[: code.co_argcount]
        yield CompileCase(
            name,
            "fp32",
            function,
            signature={each: types[each] for each in arguments if each in types},
            constants={each: value for each, value in sizes.items() if each in arguments} | {"BLOCK": block} | overlaps,
            warps=warps,
        )
