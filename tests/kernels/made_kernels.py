"""Kernels made to be good, to spill, to want more LDS than there is, and to pretend."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

from stapes.kernels.jit import kernel
from stapes.kernels.targets import CompileCase, Target

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _scaled(x, by):
    return x * by


@kernel
def _scale(x_ptr, out_ptr, count, BLOCK: tl.constexpr, BY: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, _scaled(x, BY), mask=at < count)


@kernel
def _product(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = row * SIZE + column
    out = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty))


SCALE = {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
PRODUCT = {"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp16"}

good = CompileCase("scale", "fp32", _scale, SCALE, {"BLOCK": 256, "BY": 2.0})
pretender = CompileCase("scale", "fp16", _scale, SCALE, {"BLOCK": 256, "BY": 3.0}, dot="fp16")
product = CompileCase("product", "fp16", _product, PRODUCT, {"SIZE": 32}, dot="fp16")
# Operands and result of 64 × 64 in one wave of 32 lanes: more than the 256 registers of each.
spilling = CompileCase("spilling", "fp16", _product, PRODUCT, {"SIZE": 64}, dot="fp16", warps=1)
spilling_on_nvidia = CompileCase("spilling", "fp16", _product, PRODUCT, {"SIZE": 128}, dot="fp16", warps=2)
# An fp16 operand of 256 × 256 is 128 KiB; CDNA 2 has 64 KiB of LDS.
greedy = CompileCase("greedy", "fp16", _product, PRODUCT, {"SIZE": 256}, dot="fp16", warps=16)
left_out = CompileCase("scale", "bf16", _scale, SCALE, {"BLOCK": 256, "BY": 4.0}, skip="no bf16 arithmetic")


def compile_cases(target: Target) -> list[CompileCase]:
    """As every file of kernels has it. In a process of the pool a crash may be asked for."""
    if os.environ.get("CRASH_FOR") == target.name and multiprocessing.parent_process() is not None:
        os._exit(139)
    names = os.environ.get("MADE_KERNELS", "good,product,left_out").split(",")
    return [globals()[name] for name in names]
