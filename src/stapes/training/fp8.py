"""Linear layers in fp8, for GPUs whose matrix units read it: through torchao, with a scale for each tensor.

Weights and states stay as they are; each product converts its two factors to e4m3 (gradients to e5m2), scaled by
their largest number at that moment (https://arxiv.org/abs/2209.05433). On gfx942 the format is e4m3fnuz, elsewhere
OCP's e4m3fn; torchao chooses by the architecture. Heads, positions and convolutions are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from stapes.devices.backend import Device, usable_dtypes
from stapes.errors import DeviceError, UsageError

_MULTIPLE = 16
"""What both widths of a matrix must be a multiple of: the kernels' rule."""


def check_fp8(device: Device) -> None:
    """Raises UsageError where the device does not compute in fp8, DeviceError where torchao is missing."""
    use, reason = usable_dtypes(device)["fp8"]
    if use != "native":
        raise UsageError(f"run.fp8: {reason}; leave it out, run.precision=bf16 is what is left")
    _torchao()


def _torchao() -> Any:
    try:
        import torchao.float8 as float8  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DeviceError(
            f"run.fp8 needs torchao, which cannot be imported ({error}): pip install 'stapes[fp8]', or leave it out"
        ) from error
    return float8


def use_fp8(layers: Sequence[nn.Module], *, emulate: bool = False) -> int:
    """Have the matrices of ``layers`` multiply in fp8, in place; parameters keep their names. Returns how many do.

    emulate: compute what a GPU with fp8 would, without one, slowly.
    """
    float8 = _torchao()
    # Gradients of weights multiply over rows and positions, which may be any number.
    settings = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    count = 0

    def chosen(module: nn.Module, _: str) -> bool:
        nonlocal count
        fits = isinstance(module, nn.Linear) and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)
        count += fits
        return fits

    for layer in layers:
        float8.convert_to_float8_training(layer, module_filter_fn=chosen, config=settings)
    return count
