"""Inside a transformer's MLP: bias, GELU, dropout, in one pass over memory; and their gradients in one more.

The backward pass reads what the product put out, before its bias; nothing else is kept. The sum over rows that the
gradient of the bias is comes from the same pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.dropout import Dropout, keep, keep_reference
from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of
from stapes.kernels.wave_convolution import gelu

if TYPE_CHECKING:
    import triton.language as tl

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def gelu_dropout(x: Tensor, bias: Tensor, dropout: Dropout | None) -> Tensor:
    """``dropout(gelu(x + bias))``. x: (rows, width); bias: (width,), float32 → (rows, width) in x's dtype."""
    return launch_or(
        "gelu_dropout",
        x.device,
        lambda: _launch_forward(x, bias, dropout),
        lambda: gelu_dropout_reference(x, bias, dropout),
    )


def gelu_dropout_reference(x: Tensor, bias: Tensor, dropout: Dropout | None) -> Tensor:
    """`gelu_dropout` in plain PyTorch."""
    y = F.gelu(x.float() + bias)
    return (y if dropout is None else y * keep_reference(dropout, *y.shape)).to(x.dtype)


def gelu_dropout_backward(x: Tensor, bias: Tensor, dropout: Dropout | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gelu_dropout`: of x (rows, width), of the bias (width,) float32. grad: (rows, width)."""
    return launch_or(
        "gelu_dropout_backward",
        x.device,
        lambda: _launch_backward(x, bias, dropout, grad),
        lambda: gelu_dropout_backward_reference(x, bias, dropout, grad),
    )


def gelu_dropout_backward_reference(
    x: Tensor, bias: Tensor, dropout: Dropout | None, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """`gelu_dropout_backward` in plain PyTorch, in float32."""
    of_gelu = grad.float()
    if dropout is not None:
        of_gelu = of_gelu * keep_reference(dropout, *grad.shape)
    of_x = torch.ops.aten.gelu_backward(of_gelu, x.float() + bias)
    return of_x.to(x.dtype), of_x.sum(0)


@kernel
def gelu_slope(x, EXACT: tl.constexpr):
    """The derivative of GELU, Φ(x) + x φ(x), with Φ as `gelu` has it."""
    if EXACT:
        normal = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        near = tl.minimum(tl.maximum(x, -4.0), 4.0)
        square = near * near
        y = 2.2588183e-08 * square - 1.5888258e-06
        y = y * square + 4.7763858e-05
        y = y * square - 8.1218718e-04
        y = y * square + 8.7636895e-03
        y = y * square - 6.4554409e-02
        y = y * square + 3.9787026e-01
        normal = 0.5 + near * y
    return normal + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))


@kernel
def _gelu_dropout(
    x_ptr, bias_ptr, seed_ptr, out_ptr, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = gelu(x + tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0)[None, :], EXACT)
    if DROP:
        y *= keep(seed_ptr, row, column, THRESHOLD, SCALE)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def _gelu_dropout_backward(
    x_ptr, bias_ptr, seed_ptr, grad_ptr, of_x_ptr, sums_ptr, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, DROP: tl.constexpr,
    EXACT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """``sums``: of the bias, (programs, width)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < WIDTH
    bias = tl.load(bias_ptr + column, mask=real, other=0.0)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.minimum(ROUNDS, tl.cdiv(rows - tl.program_id(0) * (ROUNDS * ROWS), ROWS))):
        row = (tl.program_id(0) * ROUNDS + number) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & real[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            grad *= keep(seed_ptr, row, column, THRESHOLD, SCALE)
        grad *= gelu_slope(x + bias[None, :], EXACT)
        tl.store(of_x_ptr + place, grad.to(of_x_ptr.dtype.element_ty), mask=inside)
        of_bias += grad
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * WIDTH + column, tl.sum(of_bias, 0), mask=real)


def _launch_forward(x: Tensor, bias: Tensor, dropout: Dropout | None) -> Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    tile, _, warps = _tile(target_of(x.device))
    _gelu_dropout[(-(-rows // tile), -(-width // _COLUMNS))](
        x,
        bias,
        x if dropout is None else dropout.seed,
        out,
        rows,
        WIDTH=width,
        COLUMNS=_COLUMNS,
        ROWS=tile,
        DROP=dropout is not None,
        EXACT=x.dtype == torch.float32,
        THRESHOLD=0 if dropout is None else dropout.threshold,
        SCALE=1.0 if dropout is None else dropout.scale,
        num_warps=warps,
    )
    return out


def _launch_backward(x: Tensor, bias: Tensor, dropout: Dropout | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    of_x = torch.empty_like(x)
    tile, rounds, warps = _tile(target_of(x.device))
    programs = -(-rows // (tile * rounds))
    sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _gelu_dropout_backward[(programs, -(-width // _COLUMNS))](
        x,
        bias,
        x if dropout is None else dropout.seed,
        grad,
        of_x,
        sums,
        rows,
        WIDTH=width,
        COLUMNS=_COLUMNS,
        ROWS=tile,
        ROUNDS=rounds,
        DROP=dropout is not None,
        EXACT=x.dtype == torch.float32,
        THRESHOLD=0 if dropout is None else dropout.threshold,
        SCALE=1.0 if dropout is None else dropout.scale,
        num_warps=warps,
    )
    return of_x, sums.sum(0)


_COLUMNS = 256
"""Of a program: half a kilobyte of each row."""


def _tile(target: Target | None) -> tuple[int, int, int]:
    """Rows of a program at a time, how many times backwards, and warps."""
    return (8, 16, 8) if target is not None and target.is_amd and target.wave_size == 32 else (8, 16, 4)


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: the MLP of wav2vec 2.0 large."""
    rows, rounds, warps = _tile(target)
    for name in _TRITON.values():
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        for label, dropped in (("", True), (", no dropout", False)):
            common = {"WIDTH": 4096, "COLUMNS": _COLUMNS, "ROWS": rows, "DROP": dropped, "EXACT": name == "fp32"}
            common |= {"THRESHOLD": round(0.1 * 2**32), "SCALE": 1 / 0.9}
            signature = {"x_ptr": f"*{name}", "bias_ptr": "*fp32", "seed_ptr": "*i64", "rows": "i32"}
            yield CompileCase(
                f"gelu_dropout{label}",
                name,
                _gelu_dropout,
                signature=signature | {"out_ptr": f"*{name}"},
                constants=common,
                warps=warps,
                skip=skip,
            )
            yield CompileCase(
                f"gelu_dropout_backward{label}",
                name,
                _gelu_dropout_backward,
                signature=signature | {"grad_ptr": f"*{name}", "of_x_ptr": f"*{name}", "sums_ptr": "*fp32"},
                constants=common | {"ROUNDS": rounds},
                warps=warps,
                skip=skip,
            )
