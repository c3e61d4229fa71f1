"""Linear layers on quantised weights: how far the formats err, and that kernels compute what they stand for.

Kernels run in Triton's interpreter, in another process, and on the GPU where there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stapes.kernels.jit import has_triton, is_interpreted
from stapes.kernels.quantization import GROUPS, Quantized, concat, dequantize, quantize_int4, quantize_int8, slices
from stapes.kernels.quantized_linear import compile_cases, quantized_linear, quantized_linear_reference, widen
from stapes.kernels.quantized_tiles import Shape, Tile, tile_for
from stapes.kernels.targets import TARGETS

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu")
FORMATS = ["int8 by 64", "int4 by 32", "int4 by 64"]
# Of what is measured: the last digit of each dtype.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
launches = pytest.mark.skipif(
    DEVICE.type == "cpu" and not is_interpreted(), reason="kernels need a GPU; the interpreter's turn is another test"
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def quantize(weight: Tensor, form: str) -> Quantized:
    maker = quantize_int8 if form.startswith("int8") else quantize_int4
    return maker(weight, int(form.rpartition(" ")[2]))


def relative_error(quantized: Quantized, weight: Tensor) -> float:
    return float((dequantize(quantized) - weight.float()).norm() / weight.float().norm())


@pytest.mark.parametrize(
    ("form", "most"), [("int8 by 64", 0.007), ("int8 by 32", 0.006), ("int4 by 32", 0.095), ("int4 by 64", 0.11)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_normal_weights_err_by_what_their_bits_allow(form: str, most: float, dtype: torch.dtype) -> None:
    weight = random(96, 256, dtype=dtype) * 0.05
    assert 0.3 * most < relative_error(quantize(weight, form), weight) < most


@pytest.mark.parametrize("form", FORMATS)
def test_quantising_leaves_the_weights_alone_and_takes_any_stride(form: str) -> None:
    weight = random(128, 70)
    kept = weight.clone()
    ours = quantize(weight.T, form)
    assert torch.equal(weight, kept)
    assert all(map(torch.equal, ours, quantize(weight.T.contiguous(), form)))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("weight", [0.0, 1e-9, 3e-7, 40_000.0, -40_000.0])
def test_rows_of_one_value_survive(form: str, weight: float) -> None:
    whole = random(3, 128)
    whole[1] = weight
    found = dequantize(quantize(whole, form))
    assert found.isfinite().all()
    # Where the smallest scale that fp16 has is too large, weights vanish.
    assert (found[1] - weight).abs().max() <= max(127 * 2**-24, 1e-3 * abs(weight))
    assert relative_error(quantize(whole[:1], form), whole[:1]) < 0.2


def test_a_group_is_not_disturbed_by_the_others() -> None:
    weight = random(8, 128)
    alone = dequantize(quantize_int4(weight[:, 32:64], 32))
    weight[:, :32] *= 1000
    assert torch.equal(dequantize(quantize_int4(weight, 32))[:, 32:64], alone)


def test_the_search_beats_the_scale_that_just_reaches_the_largest_weight() -> None:
    weight = random(64, 256)
    groups = weight.unflatten(1, (-1, 32))
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    plain = (groups / (largest / -8)).round().clamp(-8, 7) * (largest / -8)
    assert relative_error(quantize_int4(weight), weight) < 0.98 * float(
        (plain.flatten(1) - weight).norm() / weight.norm()
    )


@pytest.mark.parametrize("form", FORMATS)
def test_sizes_bytes_slices_and_concatenation(form: str) -> None:
    weight = random(50, 192)
    whole = quantize(weight, form)
    bits, group = int(form[3]), int(form[-2:])
    assert (whole.bits, whole.group, whole.outputs, whole.inputs) == (bits, group, 50, 192)
    assert whole.values.nbytes * 8 == 50 * 192 * whole.bits
    assert whole.scales.nbytes == 2 * 50 * 192 // group
    parts = [whole.of(chosen) for chosen in slices(50, 192, 20 * 192)]
    assert [part.outputs for part in parts] == [20, 20, 10]
    assert torch.equal(torch.cat([dequantize(part) for part in parts]), dequantize(whole))
    assert all(map(torch.equal, concat(parts), whole))


@pytest.mark.parametrize(("inputs", "group"), [(48, 32), (96, 64), (128, 128)])
def test_groups_must_fill_a_row(inputs: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"{inputs} inputs cannot be quantised in groups of {group}"):
        quantize_int4(random(4, inputs), group)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [(7,), (2, 3), ()], ids=str)
def test_widened_weights_give_the_reference(form: str, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    weight = quantize(random(40, 128) * 0.1, form)
    x, bias = random(*rows, 128, dtype=dtype), random(40, dtype=dtype)
    residual = random(*rows, 40, seed=1)
    other = residual.clone()
    found = quantized_linear(x, weight, bias, gelu=True, residual=residual, method="scratch")
    wanted = quantized_linear_reference(x, weight, bias, gelu=True, residual=other)
    assert (found.shape, found.dtype) == ((*rows, 40), dtype)
    assert (found.float() - wanted.float()).abs().max() < 8 * TOLERANCES[dtype]
    assert (residual - other).abs().max() < 8 * TOLERANCES[dtype]


def test_large_matrices_are_widened_in_slices() -> None:
    weight = quantize_int8(random(1500, 512))
    x = random(2, 512)
    assert torch.allclose(quantized_linear(x, weight), quantized_linear_reference(x, weight), rtol=1e-5, atol=1e-3)


@launches
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (1, 2), (18, 2)])
def test_kernels_give_the_reference(form: str, dtype: torch.dtype, rows: int, splits: int) -> None:
    weight = quantize(random(40, 192) * 0.05, form)
    x, bias = random(rows, 200, dtype=dtype)[:, :192], random(40)
    tile = Tile(1 if rows == 1 else 16, 32, 64, splits=splits)

    def close(found: Tensor, wanted: Tensor) -> bool:
        return bool((found.float() - wanted.float()).abs().max() < 4 * TOLERANCES[dtype] * wanted.float().abs().max())

    found = quantized_linear(x, weight, method="tile", tile=tile)
    assert found.dtype == dtype
    assert close(found, quantized_linear_reference(x, weight))
    for wide in (torch.float32, dtype):
        residual = random(rows, 40, seed=1, dtype=wide)
        other = residual.clone()
        found = quantized_linear(x, weight, bias, gelu=True, residual=residual, method="tile", tile=tile)
        wanted = quantized_linear_reference(x, weight, bias, gelu=True, residual=other)
        assert found.dtype == dtype
        assert close(found, wanted)
        assert close(residual, other)


@launches
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 4])
def test_chosen_tiles_give_the_reference(form: str, rows: int) -> None:
    weight = quantize(random(70, 192) * 0.05, form)
    x = random(rows, 192, dtype=torch.float16)
    wanted = quantized_linear_reference(x, weight)
    assert (quantized_linear(x, weight).float() - wanted.float()).abs().max() < 4e-3


@launches
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_knows_nothing_of_its_neighbours(form: str, splits: int) -> None:
    weight = quantize(random(48, 256) * 0.05, form)
    x = random(6, 256, dtype=torch.float16)
    tile = Tile(16, 16, 64, splits=splits)
    first = quantized_linear(x, weight, method="tile", tile=tile)
    assert torch.equal(first, quantized_linear(x, weight, method="tile", tile=tile))
    x[[0, 1, 3, 5]] = torch.tensor([float("nan"), float("inf"), 0.0, 60_000.0], dtype=x.dtype, device=DEVICE)[:, None]
    assert torch.equal(first[[2, 4]], quantized_linear(x, weight, method="tile", tile=tile)[[2, 4]])


@launches
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_widening_kernel_is_exact(form: str, dtype: torch.dtype) -> None:
    weight = quantize(random(75, 320), form)
    assert torch.equal(widen(weight, dtype), dequantize(weight, dtype))
    assert torch.equal(widen(weight.of(slice(10, 60)), dtype), dequantize(weight, dtype)[10:60])


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
@pytest.mark.skipif(is_interpreted(), reason="this is the interpreter")
def test_kernels_in_the_interpreter() -> None:
    here = [
        f"{__file__}::{name}" for name, value in globals().items() if launches.mark in getattr(value, "pytestmark", [])
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *here]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32), (4, 64)])
def test_a_tile_depends_on_the_rows_by_their_bucket_only(target, bits: int, group: int) -> None:
    for outputs, inputs in ((384, 384), (1280, 5120), (51_865, 1280)):
        shape = Shape(bits, group, outputs, inputs)
        for rows in ((1,), range(2, 17), range(17, 33), range(33, 65)):
            tiles = {tile_for(shape, "fp16", n, target, 40) for n in rows}
            (tile,) = {Tile(t.rows, t.outputs, t.inputs, t.warps, t.stages, t.splits) for t in tiles}
            assert (tile.rows == 1) == (rows == (1,))
            assert tile.inputs % group == 0
            assert tile.splits == 1 or -(-inputs // tile.inputs) >= 2 * tile.splits


def test_small_matrices_are_split_and_large_ones_are_not() -> None:
    target = TARGETS["sm_90"]
    assert tile_for(Shape(8, 64, 1280, 5120), "fp16", 16, target, 132).splits > 1
    assert tile_for(Shape(8, 64, 51_865, 1280), "fp16", 16, target, 132).splits == 1


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_compile_cases_hold_every_tile_that_is_launched(target) -> None:
    names = {(case.name, case.dtype) for case in compile_cases(target)}
    assert len(names) == len(compile_cases(target))
    for width in (384, 512, 768, 1024, 1280):
        for outputs, inputs in ((width, width), (3 * width, width), (4 * width, width), (width, 4 * width)):
            for rows in (1, 8, 24, 64, 200):
                for bits, group in GROUPS.items():
                    for cores in (20, 60, 132, 304):
                        tile = tile_for(Shape(bits, group, outputs, inputs), "fp16", rows, target, cores)
                        start = f"quantized_linear int{bits} {tile.rows}×{tile.outputs}×{tile.inputs}/"
                        # A kernel in four parts and one in eight differ by a number alone.
                        endings = ["1"] if tile.splits == 1 else ["2", "4", "8"]
                        assert any((start + ending, "fp16") in names for ending in endings), start
