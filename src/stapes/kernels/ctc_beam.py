"""Prefix beam search over what a CTC model says, with its language models, as one kernel for all frames.

`stapes.decoding.ctc_beam` holds the algorithm in plain PyTorch, many operations a frame; this computes the same. A
program searches one recording. The beam lies in memory that only this program touches, so that a prefix can be read
from any other's place; a barrier parts what is written from what is read. Each frame has three parts: what prefixes
that stay are worth, the best of these and of all that are new (without sorting them: how much the last of the best is
worth is found by halving), and the new beam.

What else speaks for a text comes as tables: automata over tokens (expected words, language models of tokens), and a
back-off model of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from stapes.kernels.ctc_beam_tables import NUMBERS as TABLE_NUMBERS
from stapes.kernels.ctc_beam_tables import Table, TokenTable, WordTable, pack
from stapes.kernels.jit import kernel
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

MOST_TABLES = 2
_LARGEST = 4096
"""Prefixes × tokens that are compared at once, both rounded up to powers of two; half of it on CDNA, which has fewer
scalar registers."""


_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""`stapes.decoding.hashing.TOKEN_FACTOR`."""
_NEVER = -2139095041
"""What `_rank` makes of minus infinity."""


@kernel
def _add(a, b):
    """Logarithm of the sum of two probabilities, given as logarithms."""
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    return tl.where(high == float("-inf"), high, high + tl.log(1.0 + tl.exp(low - high)))


@kernel
def _rank(score):
    """Integers of the same order as the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel
def _low(packed):
    """The number that is packed below another."""
    return packed.to(tl.int32).to(tl.float32, bitcast=True)


@kernel
def _place(sorted_ptr, begin, end, steps, value):
    """Where a value is between two places of sorted numbers, or would be."""
    low, left = begin, end - begin
    for _ in tl.range(0, steps, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        half = left >> 1
        less = (left > 0) & (tl.load(sorted_ptr + (low + half), mask=left > 0, other=0) < value)
        low = tl.where(less, low + half + 1, low)
        left = tl.where(less, left - half - 1, half)
    return low


@kernel
def _score_word(context, word, wanted, keys_ptr, contexts_ptr, lm_ptr):
    """`NGramModel.score` where it is wanted: log-probabilities of words after contexts, and the contexts then."""
    steps, contexts, size = tl.load(lm_ptr + 7), tl.load(lm_ptr + 8), tl.load(lm_ptr + 9)
    entries_ptr = lm_ptr + tl.load(lm_ptr + 11)
    total = (context * 0).to(tl.float32)
    after = context * 0
    found = wanted == 0
    while tl.sum((found == 0).to(tl.int32)) > 0:  # every word follows the empty context
        here, end = tl.load(contexts_ptr + context), tl.load(contexts_ptr + context + 1) >> 32
        begin = here >> 32
        is_empty = context == 0  # there every word has its number's place
        place = _place(
            keys_ptr, tl.where(is_empty, word, begin), tl.where(is_empty, word, end), steps, context * size + word
        )
        end = tl.where(is_empty, word + 1, end)
        is_there = tl.load(keys_ptr + place, mask=place < end, other=-1) == context * size + word
        hit = (found == 0) & is_there
        missed = (found == 0) & (is_there == 0)
        entry = tl.load(entries_ptr + tl.where(hit, place + 1, context))
        total += tl.where(hit, _low(entry), tl.where(missed, _low(here), 0.0))
        after = tl.where(hit, tl.where(place + 1 < contexts, place + 1, entry >> 32), after)
        context = tl.where(missed, entry >> 32, context)
        found = found | hit
    return total, after


@kernel
def _ctc_beam(
    log_probs_ptr, candidates_ptr, lengths_ptr, floats_ptr, ints_ptr, history_ptr,
    table_a_ptr, table_b_ptr, lm_ptr, keys_ptr,
    frames, vocabulary,
    BEAM: tl.constexpr, COLUMNS: tl.constexpr, AUTOMATA: tl.constexpr, WORDS: tl.constexpr,
    FACTOR: tl.constexpr, NEVER: tl.constexpr, PART: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """One recording. A column of the candidates is a token; ``stay`` is the one that stands for staying as it is."""
    # Where things lie in the program's own memory: offsets in instructions, not addresses in registers.
    at_label: tl.constexpr = BEAM
    at_extra: tl.constexpr = 2 * BEAM
    at_gain: tl.constexpr = 3 * BEAM
    at_stay_blank: tl.constexpr = 4 * BEAM
    at_stay_label: tl.constexpr = 5 * BEAM
    at_stay_score: tl.constexpr = 6 * BEAM
    at_hash: tl.constexpr = BEAM
    at_parent: tl.constexpr = 2 * BEAM
    at_origin: tl.constexpr = 3 * BEAM
    at_node_a: tl.constexpr = 4 * BEAM
    at_node_b: tl.constexpr = 5 * BEAM
    at_context: tl.constexpr = 6 * BEAM
    at_word: tl.constexpr = 7 * BEAM
    at_letters: tl.constexpr = 8 * BEAM
    at_after: tl.constexpr = 9 * BEAM
    at_chosen: tl.constexpr = 10 * BEAM
    at_given: tl.constexpr = 11 * BEAM
    at_marks: tl.constexpr = 12 * BEAM

    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    floats, ints = floats_ptr + row * (7 * BEAM), ints_ptr + row * ((12 + vocabulary) * BEAM)
    log_probs = log_probs_ptr + row.to(tl.int64) * frames * vocabulary
    candidates = candidates_ptr + row.to(tl.int64) * frames * COLUMNS
    history = history_ptr + row.to(tl.int64) * frames * (2 * BEAM)
    for frame in tl.range(0, length, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        # What depends on a lane's number is computed in each frame: before the loop it would take too many registers.
        nothing, beam = tl.load(ints + at_given).to(tl.int32), tl.load(ints + (at_given + 1)).to(tl.int32)
        blank_id, stay = tl.load(ints + (at_given + 2)), tl.load(ints + (at_given + 3)).to(tl.int32)
        size = tl.load(ints + (at_given + 4)).to(tl.int32)
        j, column = tl.arange(0, BEAM) + nothing, tl.arange(0, COLUMNS) + nothing
        i = j[:, None]

        # Prefixes that stay: a blank, the last token once more, or a shorter prefix of the beam that grew into this.
        blank, label, last = tl.load(floats + j), tl.load(floats + (at_label + j)), tl.load(ints + j)
        parent = tl.load(ints + (at_parent + j))[None, :]
        place = j * 0 - 1
        for first in tl.range(0, BEAM, PART, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            some = first + nothing + tl.arange(0, PART)[:, None]
            is_live = tl.maximum(tl.load(floats + some), tl.load(floats + (at_label + some))) > float("-inf")
            is_parent = (tl.load(ints + (at_hash + some)) == parent) & is_live
            place = tl.maximum(place, tl.max(tl.where(is_parent, some, -1), axis=0))
        has_parent = (place >= 0) & (last >= 0)
        place = tl.where(has_parent, place, 0)
        again = tl.load(log_probs + frame * size + tl.maximum(last, 0), mask=last >= 0, other=float("-inf"))
        parent_blank = tl.load(floats + place)
        parent_both = _add(parent_blank, tl.load(floats + (at_label + place)))
        grows = tl.where(tl.load(ints + place) == last, parent_blank, parent_both)  # a blank parts two equal tokens
        grows = tl.where(has_parent, grows + again, float("-inf"))
        longer = label + again
        stays_blank = _add(blank, label) + tl.load(log_probs + frame * size + blank_id)
        stays_label = _add(longer, grows)
        begins = grows > tl.maximum(stays_blank, longer)
        tl.store(floats + (at_stay_blank + j), stays_blank)
        tl.store(floats + (at_stay_label + j), stays_label)
        tl.store(floats + (at_stay_score + j), _add(stays_blank, stays_label) + tl.load(floats + (at_extra + j)))
        tl.store(ints + (at_origin + j), tl.where(begins, place, -1).to(tl.int64))
        tl.store(ints + (at_chosen + j), (j * 0 - 1).to(tl.int64))
        tl.store(ints + (at_marks + place * size + last), (frame + 1 + j * 0).to(tl.int64), mask=has_parent)
        tl.debug_barrier()

        # Prefixes that are new: those which the beam holds already were counted above.
        candidate = tl.load(candidates + frame * COLUMNS + column)
        token, score = candidate >> 32, _low(candidate)[None, :]
        blank, label, last = tl.load(floats + i), tl.load(floats + (at_label + i)), tl.load(ints + i)
        score += tl.where(last == token[None, :], blank, _add(blank, label))
        is_held = tl.load(ints + (at_marks + i * size + token[None, :])) == frame + 1
        score = tl.where(is_held, float("-inf"), score) + tl.load(floats + (at_extra + i))
        if AUTOMATA > 0:
            score += _low(tl.load(table_a_ptr + tl.load(ints + (at_node_a + i)) * size + token[None, :]))
        if AUTOMATA > 1:
            score += _low(tl.load(table_b_ptr + tl.load(ints + (at_node_b + i)) * size + token[None, :]))
        if WORDS:
            ends = (tl.load(lm_ptr + (NUMBERS + 3 * token)) & 1)[None, :] != 0
            score += tl.where(ends, tl.load(floats + (at_gain + i)), 0.0)
        score = tl.where((column == stay)[None, :], tl.load(floats + (at_stay_score + i)), score)

        # The best: the score of the last of them is between the least of those that stay and the largest of all.
        rank = tl.reshape(_rank(score), (BEAM * COLUMNS,))
        low = tl.min(tl.where(j < beam, _rank(tl.load(floats + (at_stay_score + j))), 0x7FFFFFFF)).to(tl.int64)
        high = tl.max(rank).to(tl.int64) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            is_enough = tl.sum((rank >= middle).to(tl.int32)) >= beam
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        above = (rank > low).to(tl.int32)
        equal = ((rank == low) & (low > NEVER)).to(tl.int32)  # of these the first, so many as there is room for
        room = beam - tl.sum(above)
        before = tl.cumsum(above + (equal << 16), 0) - above - (equal << 16)
        equals = before >> 16
        goes_to = (before & 0xFFFF) + tl.minimum(equals, room)
        is_chosen = (above != 0) | ((equal != 0) & (equals < room))
        tl.store(ints + (at_chosen + goes_to), tl.arange(0, BEAM * COLUMNS).to(tl.int64), mask=is_chosen)
        tl.debug_barrier()

        index = tl.load(ints + (at_chosen + j))
        lives = index >= 0
        index = tl.maximum(index, 0).to(tl.int32)
        place, chosen = index // COLUMNS, index % COLUMNS
        grew = lives & (chosen != stay)
        blank, label, before = tl.load(floats + place), tl.load(floats + (at_label + place)), tl.load(ints + place)
        candidate = tl.load(candidates + frame * COLUMNS + chosen)
        token, heard = tl.where(grew, candidate >> 32, 0), _low(candidate)
        heard += tl.where(before == token, blank, _add(blank, label))
        label = tl.where(grew, heard, tl.load(floats + (at_stay_label + place)))
        blank = tl.where(grew, float("-inf"), tl.load(floats + (at_stay_blank + place)))
        extra = tl.load(floats + (at_extra + place))
        hash, parent = tl.load(ints + (at_hash + place)), tl.load(ints + (at_parent + place))
        parent = tl.where(grew, hash, parent)
        mixed = hash * FACTOR + token + 1
        hash = tl.where(grew, mixed ^ (mixed >> 32), hash)
        # What grew from a shorter prefix only now, because that is likelier than that it was there: its token begins.
        origin = tl.load(ints + (at_origin + place))
        began = (grew == 0) & (origin >= 0)
        at = history + frame * (2 * BEAM) + j
        tl.store(at, tl.where(began, origin, place.to(tl.int64)).to(tl.int32))
        tl.store(at + BEAM, tl.where(grew, token, tl.where(began, before, -1)).to(tl.int32))
        last = tl.where(lives, tl.where(grew, token, before), -1)
        if AUTOMATA > 0:
            node_a = tl.load(ints + (at_node_a + place))
            move = tl.load(table_a_ptr + node_a * size + token)
            extra += tl.where(grew, _low(move), 0.0)
            node_a = tl.where(grew, move >> 32, node_a)
        if AUTOMATA > 1:
            node_b = tl.load(ints + (at_node_b + place))
            move = tl.load(table_b_ptr + node_b * size + token)
            extra += tl.where(grew, _low(move), 0.0)
            node_b = tl.where(grew, move >> 32, node_b)
        if WORDS:
            gain, after = tl.load(floats + (at_gain + place)), tl.load(ints + (at_after + place))
            context, word = tl.load(ints + (at_context + place)), tl.load(ints + (at_word + place))
            letters = tl.load(ints + (at_letters + place)) != 0
            flags = tl.load(lm_ptr + (NUMBERS + 3 * token))
            ends = grew & ((flags & 1) != 0)
            extra += tl.where(ends, gain, 0.0)
            context = tl.where(ends, after, context)
            word = tl.where(ends, 0, word)
            part = tl.load(lm_ptr + (NUMBERS + 3 * token + 1))
            factor = tl.load(lm_ptr + (NUMBERS + 3 * token + 2))
            word = tl.where(grew, word * factor + part, word)
            letters = (letters & (ends == 0)) | (grew & ((flags & 2) != 0))
            words, unknown_id, unknown_score = tl.load(lm_ptr), tl.load(lm_ptr + 1), _low(tl.load(lm_ptr + 2))
            hashes_ptr = lm_ptr + (NUMBERS + 3 * size)
            contexts_ptr = hashes_ptr + 2 * words
            buckets_ptr = contexts_ptr + tl.load(lm_ptr + 8) + 1 + (word >> tl.load(lm_ptr + 6)) + tl.load(lm_ptr + 10)
            begin, end = tl.load(buckets_ptr), tl.load(buckets_ptr + 1)
            known_at = _place(hashes_ptr, begin, end, tl.load(lm_ptr + 5), word)
            known = tl.load(hashes_ptr + known_at, mask=known_at < end, other=0) == word
            known = known & (known_at < end)
            id = tl.where(known, tl.load(hashes_ptr + words + known_at, mask=known, other=0), unknown_id)
            is_new = grew & letters
            word_score, new_after = _score_word(context, id, is_new, keys_ptr, contexts_ptr, lm_ptr)
            word_score = tl.where(known, word_score, tl.where(unknown_score > 0.0, word_score, unknown_score))
            weight, bonus = _low(tl.load(lm_ptr + 3)), _low(tl.load(lm_ptr + 4))
            gain = tl.where(grew, tl.where(letters, word_score * weight + bonus, 0.0), gain)
            after = tl.where(grew, tl.where(letters, new_after, context), after)
        tl.debug_barrier()

        tl.store(floats + j, tl.where(lives, blank, float("-inf")))
        tl.store(floats + (at_label + j), tl.where(lives, label, float("-inf")))
        tl.store(floats + (at_extra + j), extra)
        tl.store(ints + j, last)
        tl.store(ints + (at_hash + j), hash)
        tl.store(ints + (at_parent + j), parent)
        if AUTOMATA > 0:
            tl.store(ints + (at_node_a + j), node_a)
        if AUTOMATA > 1:
            tl.store(ints + (at_node_b + j), node_b)
        if WORDS:
            tl.store(floats + (at_gain + j), gain)
            tl.store(ints + (at_context + j), context)
            tl.store(ints + (at_word + j), word)
            tl.store(ints + (at_letters + j), letters.to(tl.int64))
            tl.store(ints + (at_after + j), after)
        tl.debug_barrier()


def can_search(device: torch.device, beam: int, columns: int, tables: Sequence[Table]) -> bool:
    """Whether the kernel takes a beam of this size, so many columns of candidates and these tables.

    There is a column for each token, one of which may be the blank; it or another one is for staying.
    """
    size, words = _power(beam) * _power(columns), sum(isinstance(table, WordTable) for table in tables)
    return size <= _largest(target_of(device)) and len(tables) <= MOST_TABLES and words <= 1


def launch_beam(
    fields: Sequence[Tensor],
    states: Sequence[tuple[Tensor, ...]],
    tables: Sequence[Table],
    log_probs: Tensor,
    likeliest: Tensor,
    tokens: Tensor | None,
    lengths: Tensor,
    blank: int,
) -> tuple[list[Tensor], list[tuple[Tensor, ...]], Tensor]:
    """Hear some frames.

    Args:
        fields: blank, label, extra (float32), last, hash, parent (int64) as `stapes.decoding.ctc_beam.BeamState` has
            them, (batch, beam) each.
        states: for each table, what the prefixes remember of it.
        tables: what else speaks for a text: at most `MOST_TABLES`, at most one of them of words.
        log_probs: (batch, frames, vocabulary) float32.
        likeliest: (batch, frames, columns) float32: of the tokens that may prolong a text; minus infinity for others.
        tokens: (batch, frames, columns) int32: which those are. None: column and token are the same.
        lengths: real frames, (batch,).
        blank: id of the blank.

    Returns the fields and states after these frames, and for each frame the place that each prefix had before and the
    token it grew by or -1, (batch, frames, 2, beam or more) int32.
    """
    rows, beam = fields[0].shape
    _, frames, size = log_probs.shape
    columns = likeliest.shape[2]
    device = log_probs.device
    width = max(8, _power(beam))
    stay = blank if tokens is None else columns
    height = _power(max(columns, stay + 1))
    token = torch.arange(columns, device=device).expand_as(likeliest) if tokens is None else tokens
    never = pack(torch.zeros(1), torch.tensor([float("-inf")])).item()
    candidates = pad(pack(token, likeliest), (0, height - columns), value=never)
    automata = [(number, table) for number, table in enumerate(tables) if isinstance(table, TokenTable)]
    words = [(number, table) for number, table in enumerate(tables) if isinstance(table, WordTable)]

    floats = torch.zeros((rows, 7, width), dtype=torch.float32, device=device)
    ints = torch.zeros((rows, 12 + size, width), dtype=torch.int64, device=device)
    floats[:, :2] = float("-inf")
    ints[:, 0] = -1
    for place, given in enumerate((beam, blank, stay, size), 1):
        ints[:, 11, place] = given
    after_fields = [floats[:, n, :beam] for n in range(3)] + [ints[:, n, :beam] for n in range(3)]
    slots: list[tuple[Tensor, ...]] = [()] * len(tables)
    for place, (number, _) in enumerate(automata, 4):
        slots[number] = (ints[:, place, :beam],)
    for number, _ in words:
        context, word, letters, after = (ints[:, n, :beam] for n in range(6, 10))
        slots[number] = (context, word, letters, floats[:, 3, :beam], after)
    for slot, value in zip([*after_fields, *sum(slots, ())], [*fields, *sum(states, ())], strict=True):
        slot.copy_(value)

    history = torch.empty((rows, frames, 2, width), dtype=torch.int32, device=device)
    history[:, :, 0] = torch.arange(width, device=device)  # frames that are padding change nothing
    history[:, :, 1] = -1
    a, b = ([table.moves for _, table in automata] + [ints, ints])[:2]
    lm = words[0][1] if words else None
    _ctc_beam[(rows,)](
        log_probs.contiguous(), candidates, lengths.to(torch.int32), floats, ints, history, a, b,
        *([lm.lm, lm.keys] if lm else [ints, ints]),
        frames, size,
        **_constants(width, height, len(automata), lm is not None),
        num_warps=_warps(width * height, target_of(device)),
    )  # fmt: skip
    after_states = [
        tuple(slot.to(value.dtype) for slot, value in zip(slots[number], states[number], strict=True))
        for number in range(len(tables))
    ]
    return after_fields, after_states, history


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _largest(target: Target | None) -> int:
    return _LARGEST // 2 if target is None or target.family == "cdna" else _LARGEST


def _warps(size: int, target: Target | None) -> int:
    """What spills no registers."""
    many = size > _LARGEST // 2
    if target is not None and target.family == "cuda":
        return max(1, min(16 if many else 4, size // 256))
    if target is not None and target.family == "cdna":
        return max(1, min(8, size // 256))
    return max(1, min(16 if many else 8, size // 128))


def _constants(beam: int, columns: int, automata: int, words: bool) -> dict[str, Any]:
    return {
        "BEAM": beam,
        "COLUMNS": columns,
        "AUTOMATA": automata,
        "WORDS": words,
        "FACTOR": _FACTOR,
        "NEVER": _NEVER,
        "PART": min(beam, max(1, 1024 // beam)),
        "NUMBERS": TABLE_NUMBERS,
    }


_TYPES = {
    "*fp32": "log_probs_ptr floats_ptr",
    "*i32": "lengths_ptr history_ptr",
    "*i64": "candidates_ptr ints_ptr table_a_ptr table_b_ptr lm_ptr keys_ptr",
    "i32": "frames vocabulary",
}


def compile_cases(target: Target) -> list[CompileCase]:
    """A beam of 32 over letters, with each kind of tables, and larger ones."""
    searches = {
        "ctc_beam": _constants(32, 32, 0, False),
        "ctc_beam words": _constants(32, 32, 0, True),
        "ctc_beam words, automaton": _constants(32, 32, 1, True),
        "ctc_beam two automata": _constants(32, 32, 2, False),
    }
    for beam in (64, 128):
        if beam * 32 <= _largest(target):
            searches[f"ctc_beam {beam} words, automaton"] = _constants(beam, 32, 1, True)
    return [
        _case(name, constants, _warps(constants["BEAM"] * constants["COLUMNS"], target))
        for name, constants in searches.items()
    ]


def _case(name: str, constants: dict[str, Any], warps: int) -> CompileCase:
    code = _ctc_beam.function.__code__
    types = {each: kind for kind, names in _TYPES.items() for each in names.split()}
    arguments = [each for each in code.co_varnames[: code.co_argcount] if each not in constants]
    signature = {each: types[each] for each in arguments}
    return CompileCase(name, "fp32", _ctc_beam, signature, constants, warps=warps)
