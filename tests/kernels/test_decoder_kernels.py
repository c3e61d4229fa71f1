"""The engine's kernels against their references: in the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.decoding.rules import RuleState, Vocabulary, apply_rules
from stapes.kernels import decode_attention, decoder_linear, write_token
from stapes.kernels.decode_attention import (
    cross_attention,
    cross_attention_reference,
    self_attention,
    self_attention_reference,
)
from stapes.kernels.decoder_linear import (
    Norm,
    Tile,
    add_norm,
    add_norm_reference,
    choose_tile,
    launch_tile,
    linear,
    linear_parts,
    linear_reference,
)
from stapes.kernels.fp8_rows import round_rows, round_rows_reference
from stapes.kernels.jit import has_triton, is_interpreted
from stapes.kernels.layer_norm import layer_norm, layer_norm_reference
from stapes.kernels.store_memory import store_memory, store_memory_reference
from stapes.kernels.targets import TARGETS
from stapes.kernels.write_token import embed, embed_reference, launch_likeliest

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
launches = pytest.mark.skipif(
    DEVICE.type == "cpu" and not is_interpreted(), reason="kernels need a GPU; the interpreter's turn is another test"
)
HEADS, HEAD, KEYS, CONTEXT = 2, 64, 150, 48


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def close(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), truth.float(), rtol=bound, atol=bound)


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
@pytest.mark.skipif(is_interpreted(), reason="this is the interpreter's turn")
def test_kernels_in_the_interpreter() -> None:
    here = Path(__file__)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "kernel and not interpreter",
            here,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=here.parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@launches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("quantized", [False, True])
def test_cross_attention_kernel(dtype: torch.dtype, splits: int, quantized: bool) -> None:
    projected = random(5, KEYS, 2 * HEADS * HEAD, seed=1, dtype=dtype)
    kind = torch.int8 if quantized else dtype
    keys, values = (torch.zeros(5, HEADS, KEYS, HEAD, dtype=kind, device=DEVICE) for _ in range(2))
    scales = (torch.zeros(5, HEADS, HEAD, device=DEVICE), torch.zeros(5, HEADS, HEAD, device=DEVICE))
    store_memory(projected, keys, values, scales if quantized else None, integers(3, 1, 4, 0, 2))
    # Windows of 2, 0 (ended), 1 and 19 queries; the last row belongs to none.
    first, count, rows = integers(0, 2, 3, 4), integers(2, 0, 1, 19), integers(4, 0, 2, 1)
    query = 3 * random(24, HEADS * HEAD, seed=2, dtype=dtype)
    live = torch.ones(24, dtype=torch.int32, device=DEVICE)
    live[2], live[23] = 0, 0
    found = cross_attention(query, keys, values, scales if quantized else None, first, count, rows, live, 19, splits)
    truth = cross_attention_reference(query, keys, values, scales if quantized else None, first, count, rows)
    asked = live.bool()
    # Of 8-bit keys the query is rounded too, to 15 bits.
    close(found[asked], truth[asked], torch.float16 if quantized and dtype == torch.float32 else dtype)
    assert truth[0].abs().max() > 0.1


@launches
@pytest.mark.parametrize("quantized", [False, True])
def test_store_memory_kernel(quantized: bool) -> None:
    projected = random(2, KEYS, 2 * HEADS * HEAD, seed=3)
    projected[0, :, 5] *= 100  # a channel that is louder than the others
    results = []
    for store in (store_memory, store_memory_reference):
        kind = torch.int8 if quantized else torch.float32
        keys, values = (torch.zeros(4, HEADS, KEYS, HEAD, dtype=kind, device=DEVICE) for _ in range(2))
        scales = (torch.zeros(4, HEADS, HEAD, device=DEVICE), torch.zeros(4, HEADS, HEAD, device=DEVICE))
        store(projected, keys, values, scales if quantized else None, integers(2, 0))
        results.append((keys, values, *scales))
    for found, truth in zip(*results, strict=True):
        # The last digit of a quotient may fall on either side of a half.
        torch.testing.assert_close(
            found.float(), truth.float(), rtol=1e-6, atol=1.0 if found.dtype == torch.int8 else 0
        )
        assert (found.float() != truth.float()).float().mean() < 1e-3
    keys, _, scale, _ = results[0]
    if quantized:
        whole = keys[2].float() * scale[2][:, None]
        truth = projected[0, :, : HEADS * HEAD].unflatten(-1, (HEADS, HEAD)).transpose(0, 1)
        assert ((whole - truth).abs() <= scale[2][:, None] * 0.5001).all()


@launches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_self_attention_kernel(dtype: torch.dtype) -> None:
    rows, cells = 4, 6
    chance = torch.Generator().manual_seed(4)
    source = torch.randint(0, cells, (rows, CONTEXT), generator=chance, dtype=torch.int32).to(DEVICE)
    positions = integers(0, 40, 7, 33, dtype=torch.int64)
    own, live = integers(5, 2, 0, 3), integers(1, 1, 0, 1)
    qkv = 2 * random(rows, 3 * HEADS * HEAD, seed=5, dtype=dtype)
    caches = [[random(cells, HEADS, CONTEXT, HEAD, seed=seed, dtype=dtype) for seed in (6, 7)] for _ in range(2)]
    found = self_attention(qkv, *caches[0], own, source, positions, live)
    truth = self_attention_reference(qkv, *caches[1], own, source, positions, live)
    close(found[live.bool()], truth[live.bool()], dtype)
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(caches[0][0][5, :, 0].flatten(), qkv[0, HEADS * HEAD : 2 * HEADS * HEAD])


@launches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 64), (5, 100, 192), (70, 48, 128), (3, 64, 2048)])
@pytest.mark.parametrize("way", ["plain", "gelu", "wide"])
def test_linear_kernel(dtype: torch.dtype, rows: int, outputs: int, inputs: int, way: str) -> None:
    x = random(rows, inputs, seed=10, dtype=dtype) + 0.5
    weight, bias = random(outputs, inputs, seed=11, dtype=dtype) / inputs**0.5, random(outputs, seed=12)
    wanted = torch.float32 if way == "wide" else None
    found = linear(x, weight, bias, gelu=way == "gelu", dtype=wanted)
    truth = linear_reference(x, weight, bias, gelu=way == "gelu", dtype=wanted)
    assert found.dtype == truth.dtype
    close(found, truth, dtype)


@launches
@pytest.mark.parametrize("inputs", [64, 2048])
def test_linear_kernel_in_parts(inputs: int) -> None:
    x, weight = random(20, inputs, seed=14), random(64, inputs, seed=15) / inputs**0.5
    close(linear_parts(x, weight).sum(dim=0), F.linear(x, weight), torch.float32)
    y = torch.zeros(4, 20, 64, device=DEVICE)
    tile = Tile(16, 16, 16, splits=4, stages=1)
    launch_tile(x, weight, None, False, y, tile)
    quarters = zip(x.chunk(4, dim=1), weight.chunk(4, dim=1), strict=True)
    close(y, torch.stack([F.linear(*quarter) for quarter in quarters]), torch.float32)
    # A row does not know of the others.
    others = random(20, inputs, seed=16)
    others[7] = x[7]
    again = torch.zeros(4, 20, 64, device=DEVICE)
    launch_tile(others, weight, None, False, again, tile)
    assert torch.equal(again[:, 7], y[:, 7])


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("width", [384, 512, 768, 1024, 1280])
def test_the_tiles_of_every_gpu_cut_the_inputs_evenly(name: str, width: int) -> None:
    for outputs, inputs, parts in (
        (width, width, True),
        (width, 4 * width, True),
        (width, width, False),
        (3 * width, width, False),
        (4 * width, width, False),
        (51_866, width, False),
    ):
        for rows in (1, 16, 20, 64, 200):
            for dtype in (torch.float16, torch.float32):
                tile = choose_tile(rows, outputs, inputs, dtype, TARGETS[name], parts)
                assert inputs % (tile.splits * tile.inputs) == 0
                assert parts or tile.splits == 1
                assert all(size >= 16 and size.bit_count() == 1 for size in (tile.rows, tile.outputs, tile.inputs))


@launches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [0, 1, 4])
def test_add_norm_kernel(dtype: torch.dtype, splits: int) -> None:
    streams = [random(9, 96, seed=17) for _ in range(2)]
    parts = random(splits, 9, 96, seed=18) if splits else None
    bias, norm = random(96, seed=19), Norm(1 + 0.3 * random(96, seed=8), random(96, seed=9))
    found = add_norm(streams[0], parts, bias, norm, dtype)
    truth = add_norm_reference(streams[1], parts, bias, norm, dtype)
    assert found.dtype == dtype
    close(found, truth, dtype)
    torch.testing.assert_close(*streams, rtol=1e-6, atol=1e-6)


@launches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layer_norm_kernel(dtype: torch.dtype) -> None:
    x = random(9, 96, seed=16, dtype=dtype)
    lack, gain, bias = (random(96, seed=seed) for seed in (17, 18, 19))
    close(layer_norm(x, lack, gain, bias), layer_norm_reference(x, lack, gain, bias), dtype)


@launches
@pytest.mark.parametrize("way", ["plain", "add norm", "norm", "gelu"])
def test_round_rows_kernel(way: str) -> None:
    streams = [3 * random(9, 96, seed=27, dtype=torch.float16) for _ in range(2)]
    delta = random(9, 96, seed=28, dtype=torch.float16) if "add" in way else None
    norm = (1 + 0.3 * random(96, seed=8), random(96, seed=9), 1e-5) if "norm" in way else None
    kind = torch.float8_e4m3fn
    found, scale = round_rows(streams[0], kind, delta=delta, norm=norm, gelu=way == "gelu")
    truth, scale_then = round_rows_reference(streams[1], kind, delta=delta, norm=norm, gelu=way == "gelu")
    torch.testing.assert_close(scale, scale_then, rtol=1e-5, atol=1e-9)
    # A number on the edge between two may fall on either side of it: an eighth apart, and seldom. Triton's interpreter
    # rounds some numbers to the next power of two.
    torch.testing.assert_close(found.float(), truth.float(), rtol=0.51 if is_interpreted() else 0.126, atol=0.002)
    assert (found.float() != truth.float()).float().mean() < 0.04
    assert torch.equal(*streams)


@launches
def test_embed_kernel() -> None:
    embedding, places = random(30, 80, seed=20, dtype=torch.float16), random(12, 80, seed=21, dtype=torch.float16)
    tokens, positions = integers(29, -1, 3, dtype=torch.int64), integers(0, 11, 5, dtype=torch.int64)
    found = embed(tokens, positions, embedding, places)
    assert torch.equal(found, embed_reference(tokens, positions, embedding, places))


@launches
def test_likeliest_kernel() -> None:
    """Against the rules in plain PyTorch, over random histories that reach every rule."""
    vocabulary = Vocabulary(end=200, no_speech=205, no_timestamps=206, timestamp_begin=207, size=260)
    rows, context = 400, 16
    chance = torch.Generator().manual_seed(22)

    def pick(*choices: int) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=chance)].to(DEVICE)

    state = RuleState(
        timestamps=pick(0, 1, 1).bool(),
        max_initial=pick(-1, 0, 5),
        count=pick(0, 0, 1, 5, 15, 16),
        last=pick(-1, 3, 207, 212, 230),
        before_last=pick(-1, 7, 207, 212),
        last_timestamp=pick(-1, 207, 212, 230),
    )
    logits = 4 * random(rows, vocabulary.size, seed=23)
    logits[:, 207:] += 3 * random(rows, 1, seed=24)  # times win here and there
    logits[:, 200] += 3 * random(rows, seed=25)
    forbidden = torch.where(random(rows, vocabulary.size, seed=26) > 1.5, float("-inf"), 0.0)
    forbidden[:, 5] = 0.0
    blank = torch.zeros(vocabulary.size, device=DEVICE)
    blank[[1, 200]] = float("-inf")
    ended, live = pick(0, 0, 0, 1).bool(), torch.ones(rows, dtype=torch.int32, device=DEVICE)
    limits = pick(1, 2, 16, 100)
    tokens = torch.zeros(rows, context, dtype=torch.int64, device=DEVICE)
    logprobs = torch.zeros(rows, context, device=DEVICE)

    ruled = apply_rules(logits.clone(), state, forbidden, blank, vocabulary)
    wanted = torch.where(ended, vocabulary.end, ruled.argmax(dim=-1))
    score = ruled.max(dim=-1).values - ruled.logsumexp(dim=-1)
    after = RuleState(*(field.clone() for field in state.fields()))
    after.append(wanted, vocabulary)

    was_ended = ended.clone()
    ids = (vocabulary.end, vocabulary.no_timestamps, vocabulary.timestamp_begin)
    at = state.count.clamp_max(context - 1)[:, None]
    launch_likeliest(logits, forbidden, blank, state.fields(), ended, live, limits, tokens, logprobs, ids)
    assert torch.equal(tokens.gather(1, at)[:, 0], wanted)
    # Some of these histories cannot happen, and leave no token.
    known = ruled.amax(dim=-1).isfinite()
    assert known.sum() > 300
    torch.testing.assert_close(logprobs.gather(1, at)[known, 0], score[known], rtol=1e-4, atol=1e-4)
    for found, truth in zip(state.fields(), after.fields(), strict=True):
        assert torch.equal(found, truth)
    assert torch.equal(ended, was_ended | (wanted == vocabulary.end))
    assert torch.equal(live.bool(), (wanted != vocabulary.end) & (state.count < limits))
    assert (wanted >= 207).sum() > 30
    assert (wanted < 200).sum() > 30


def test_kernels_compile_for_something_everywhere() -> None:
    for target in TARGETS.values():
        for module in (decode_attention, decoder_linear, write_token):
            assert any(case.skip is None for case in module.compile_cases(target))
