"""What joins the parts of a transformer's layer: bias, dropout, the residual sum, layer norm; forwards and backwards.

One pass over memory each way. The backward pass computes mean and deviation of a row again, and the mask of dropout
from its seed; what it keeps is the residual sum alone. The sums over rows that the gradients of biases and gains are
come from the same pass, as a partial sum of each program.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.kernels.dropout import Dropout, keep, keep_reference
from stapes.kernels.jit import kernel, launch_or
from stapes.kernels.targets import CompileCase, Target, target_of

if TYPE_CHECKING:
    import triton.language as tl

_TRITON = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Norm(NamedTuple):
    """A layer norm: gain and shift (width,), float32."""

    gain: Tensor
    shift: Tensor
    eps: float


class Update(NamedTuple):
    """What is added to the residual stream: ``dropout(value + bias)``. value (…, width), bias (width,) float32."""

    value: Tensor
    bias: Tensor
    dropout: Dropout | None


class Gradients(NamedTuple):
    """What `add_norm_backward` finds; None for what there is no use for."""

    x: Tensor
    update: Tensor | None
    bias: Tensor | None
    gain: Tensor | None
    shift: Tensor | None


def add_norm(x: Tensor, update: Update | None, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """The residual sum, and its layer norm where one is asked for, both (…, width) in x's dtype.

    x: (…, width), the residual stream; an update's value is as large. Without an update the sum is x itself.
    """
    return launch_or(
        "add_norm", x.device, lambda: _launch_forward(x, update, norm), lambda: add_norm_reference(x, update, norm)
    )


def add_norm_reference(x: Tensor, update: Update | None, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """`add_norm` in plain PyTorch."""
    total = x
    if update is not None:
        value = update.value.float() + update.bias
        if update.dropout is not None:
            value = value * _kept(update.dropout, value)
        total = (x.float() + value).to(x.dtype)
    if norm is None:
        return total, None
    return total, F.layer_norm(total.float(), norm.gain.shape, norm.gain, norm.shift, norm.eps).to(x.dtype)


def add_norm_backward(
    total: Tensor | None, of_total: Tensor | None, of_norm: Tensor | None, update: Update | None, norm: Norm | None
) -> Gradients:
    """Gradients of `add_norm`.

    total: the residual sum, for its norm. of_total, of_norm: gradients of the two results, (…, width), None for one
    that was not used. ``update.value`` is not looked at.
    """
    given = of_norm if of_norm is not None else of_total
    assert given is not None
    if norm is None and (update is None or update.dropout is None):  # a sum hands its gradient on as it is
        of_bias = None if update is None else given.flatten(0, -2).sum(0, dtype=torch.float32)
        return Gradients(given, None if update is None else given, of_bias, None, None)
    return launch_or(
        "add_norm_backward",
        given.device,
        lambda: _launch_backward(total, of_total, of_norm, update, norm),
        lambda: add_norm_backward_reference(total, of_total, of_norm, update, norm),
    )


def add_norm_backward_reference(
    total: Tensor | None, of_total: Tensor | None, of_norm: Tensor | None, update: Update | None, norm: Norm | None
) -> Gradients:
    """`add_norm_backward` in plain PyTorch, in float32."""
    given = of_norm if of_norm is not None else of_total
    assert given is not None
    grad = torch.zeros_like(given, dtype=torch.float32) if of_total is None else of_total.float()
    of_gain = of_shift = of_bias = of_update = None
    if norm is not None and of_norm is not None:
        assert total is not None
        variance, mean = torch.var_mean(total.float(), -1, correction=0, keepdim=True)
        scale = (variance + norm.eps).rsqrt()
        hat = (total.float() - mean) * scale
        of_hat = of_norm.float() * norm.gain
        grad = grad + scale * (of_hat - of_hat.mean(-1, keepdim=True) - hat * (of_hat * hat).mean(-1, keepdim=True))
        of_gain, of_shift = (of_norm.float() * hat).flatten(0, -2).sum(0), of_norm.float().flatten(0, -2).sum(0)
    if update is not None:
        kept = grad if update.dropout is None else grad * _kept(update.dropout, grad)
        of_bias, of_update = kept.flatten(0, -2).sum(0), kept.to(given.dtype)
    return Gradients(grad.to(given.dtype), of_update, of_bias, of_gain, of_shift)


def _kept(dropout: Dropout, like: Tensor) -> Tensor:
    return keep_reference(dropout, like.numel() // like.shape[-1], like.shape[-1]).view_as(like)


@kernel
def _add_norm(
    x_ptr, update_ptr, bias_ptr, gain_ptr, shift_ptr, seed_ptr, total_ptr, out_ptr, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = column < WIDTH
    inside = (row < rows)[:, None] & real[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        update = tl.load(update_ptr + place, mask=inside, other=0.0).to(tl.float32)
        update += tl.load(bias_ptr + column, mask=real, other=0.0)[None, :]
        if DROP:
            update *= keep(seed_ptr, row, column, THRESHOLD, SCALE)
        # What the norm sees is what the backward pass will see.
        rounded = (x + update).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, rounded, mask=inside)
        x = tl.where(inside, rounded.to(tl.float32), 0.0)
    if NORM:
        mean = tl.sum(x, 1) / WIDTH
        x = tl.where(real[None, :], x - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
        gain = tl.load(gain_ptr + column, mask=real, other=0.0)
        shift = tl.load(shift_ptr + column, mask=real, other=0.0)
        y = x * scale[:, None] * gain[None, :] + shift[None, :]
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def _add_norm_backward(
    total_ptr, of_total_ptr, of_norm_ptr, gain_ptr, seed_ptr, of_x_ptr, of_update_ptr, sums_ptr, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, GIVEN: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """``sums``: of bias, gain and shift, (programs, 3, width)."""
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    of_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    of_gain = tl.zeros((ROWS, BLOCK), tl.float32)
    of_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in range(tl.minimum(ROUNDS, tl.cdiv(rows - tl.program_id(0) * (ROUNDS * ROWS), ROWS))):
        row = (tl.program_id(0) * ROUNDS + number) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & real[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        grad = tl.zeros((ROWS, BLOCK), tl.float32)
        if GIVEN:
            grad = tl.load(of_total_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            x = tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
            of_norm = tl.load(of_norm_ptr + place, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(real[None, :], x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
            scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
            x = x * scale[:, None]
            of_gain += of_norm * x
            of_shift += of_norm
            of_hat = of_norm * tl.load(gain_ptr + column, mask=real, other=0.0)[None, :]
            mean, share = tl.sum(of_hat, 1) / WIDTH, tl.sum(of_hat * x, 1) / WIDTH
            grad += scale[:, None] * (of_hat - mean[:, None] - x * share[:, None])
            tl.store(of_x_ptr + place, grad.to(of_x_ptr.dtype.element_ty), mask=inside)
        if ADD:
            if DROP:
                grad *= keep(seed_ptr, row, column, THRESHOLD, SCALE)
                tl.store(of_update_ptr + place, grad.to(of_update_ptr.dtype.element_ty), mask=inside)
            of_bias += tl.where(inside, grad, 0.0)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * (3 * WIDTH) + column
    if ADD:
        tl.store(sums, tl.sum(of_bias, 0), mask=real)
    if NORM:
        tl.store(sums + WIDTH, tl.sum(of_gain, 0), mask=real)
        tl.store(sums + 2 * WIDTH, tl.sum(of_shift, 0), mask=real)


def _launch_forward(x: Tensor, update: Update | None, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    total = x if update is None else torch.empty_like(x)
    out = None if norm is None else torch.empty_like(x)
    dropout = None if update is None else update.dropout
    tile, warps = _tile(target_of(x.device))
    _add_norm[(-(-rows // tile),)](
        x,
        x if update is None else update.value,
        x if update is None else update.bias,
        x if norm is None else norm.gain,
        x if norm is None else norm.shift,
        x if dropout is None else dropout.seed,
        total,
        total if out is None else out,
        rows,
        0.0 if norm is None else norm.eps,
        WIDTH=width,
        BLOCK=_block(width),
        ROWS=tile,
        ADD=update is not None,
        NORM=norm is not None,
        DROP=dropout is not None,
        THRESHOLD=0 if dropout is None else dropout.threshold,
        SCALE=1.0 if dropout is None else dropout.scale,
        num_warps=warps,
    )
    return total, out


def _launch_backward(
    total: Tensor | None, of_total: Tensor | None, of_norm: Tensor | None, update: Update | None, norm: Norm | None
) -> Gradients:
    given = of_norm if of_norm is not None else of_total
    assert given is not None
    rows, width = given.numel() // given.shape[-1], given.shape[-1]
    has_norm = norm is not None and of_norm is not None
    dropout = None if update is None else update.dropout
    tile, rounds, warps = _backward_tile(target_of(given.device))
    programs = -(-rows // (tile * rounds))
    of_x = torch.empty_like(given) if has_norm else given
    of_update = of_x if dropout is None else torch.empty_like(given)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=given.device)
    _add_norm_backward[(programs,)](
        given if total is None else total,
        given if of_total is None else of_total,
        given if of_norm is None else of_norm,
        given if norm is None else norm.gain,
        given if dropout is None else dropout.seed,
        of_x,
        of_update,
        sums,
        rows,
        0.0 if norm is None else norm.eps,
        WIDTH=width,
        BLOCK=_block(width),
        ROWS=tile,
        ROUNDS=rounds,
        GIVEN=of_total is not None,
        NORM=has_norm,
        ADD=update is not None,
        DROP=dropout is not None,
        THRESHOLD=0 if dropout is None else dropout.threshold,
        SCALE=1.0 if dropout is None else dropout.scale,
        num_warps=warps,
    )
    of_bias = None if update is None else sums[:, 0].sum(0)
    of_gain, of_shift = sums[:, 1:].sum(0) if has_norm else (None, None)
    return Gradients(of_x, None if update is None else of_update, of_bias, of_gain, of_shift)


def _block(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _tile(target: Target | None) -> tuple[int, int]:
    """Rows of a program, and warps: as many lanes for a row on every GPU."""
    return 4, 8 if target is not None and target.is_amd and target.wave_size == 32 else 4


def _backward_tile(target: Target | None) -> tuple[int, int, int]:
    """Rows of a program at a time, how many times, and warps."""
    return (2, 12, 4) if target is None or not target.is_amd or target.wave_size == 64 else (2, 12, 8)


def compile_cases(target: Target) -> Iterable[CompileCase]:
    """For the gate: wav2vec 2.0 large, norms before and norms behind."""
    rows, warps = _tile(target)
    backward_rows, rounds, backward_warps = _backward_tile(target)
    size = {"WIDTH": 1024, "BLOCK": 1024}
    drop = {"THRESHOLD": round(0.1 * 2**32), "SCALE": 1 / 0.9}
    floats = dict.fromkeys(("bias_ptr", "gain_ptr", "shift_ptr"), "*fp32")
    for name in _TRITON.values():
        skip = "no bf16 arithmetic" if target.family == "rdna2" and name == "bf16" else None
        for label, add, norm, dropped in (
            ("norm", False, True, False),
            ("add", True, False, True),
            ("add and norm", True, True, True),
            ("add and norm, no dropout", True, True, False),
        ):
            pointers = dict.fromkeys(("x_ptr", "update_ptr", "total_ptr", "out_ptr"), f"*{name}")
            yield CompileCase(
                f"add_norm {label}",
                name,
                _add_norm,
                signature=pointers | floats | {"seed_ptr": "*i64", "rows": "i32", "eps": "fp32"},
                constants=size | drop | {"ROWS": rows, "ADD": add, "NORM": norm, "DROP": dropped},
                warps=warps,
                skip=skip,
            )
            for given in (True, False) if norm else (True,):
                pointers = dict.fromkeys(
                    ("total_ptr", "of_total_ptr", "of_norm_ptr", "of_x_ptr", "of_update_ptr"), f"*{name}"
                )
                yield CompileCase(
                    f"add_norm_backward {label}" + (", both used" if given and norm else ""),
                    name,
                    _add_norm_backward,
                    signature=pointers
                    | {"gain_ptr": "*fp32", "sums_ptr": "*fp32", "seed_ptr": "*i64", "rows": "i32", "eps": "fp32"},
                    constants=size
                    | drop
                    | {"ROWS": backward_rows, "ROUNDS": rounds, "GIVEN": given, "NORM": norm}
                    | {"ADD": add, "DROP": dropped},
                    warps=backward_warps,
                    skip=skip,
                )
