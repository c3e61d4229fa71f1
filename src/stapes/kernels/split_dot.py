"""Products of fp32 matrices on matrix cores that take halves of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stapes.kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def split_dot(a, b, accumulator, WAY: tl.constexpr, WIDEN: tl.constexpr):
    """``accumulator + a @ b`` for fp32 operands.

    WAY: ``fp32``, multiplied as they are; ``tf32x3``, NVIDIA's three products, about 2^-21; ``bf16x3``, three products
    of bf16 halves, 2^-16 relative. WIDEN: in the interpreter, whose product of bf16 is one of bit patterns.
    """
    if WAY == "bf16x3":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
        if WIDEN:
            a_high, b_high = a_high.to(tl.float32), b_high.to(tl.float32)
            a_low, b_low = a_low.to(tl.float32), b_low.to(tl.float32)
        accumulator = tl.dot(a_low, b_high, accumulator)
        accumulator = tl.dot(a_high, b_low, accumulator)
        accumulator = tl.dot(a_high, b_high, accumulator)
    elif WAY == "tf32x3":
        accumulator = tl.dot(a, b, accumulator, input_precision="tf32x3")
    else:
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
    return accumulator
