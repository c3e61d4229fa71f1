"""Kernels that import Triton when they are first launched, and the reference where Triton cannot run.

A file of kernels reads like any Triton file, but importing it costs nothing and needs no Triton:

    if TYPE_CHECKING:
        import triton.language as tl

    @kernel
    def _double(x_ptr, n, BLOCK: tl.constexpr): ...

    def double(x: Tensor) -> Tensor:
        return launch_or("double", x.device, lambda: _launch_double(x), lambda: double_reference(x))
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)

Result = TypeVar("Result")

refusals: dict[tuple[str, str], str] = {}
"""Kernels that Triton would not compile or start here: (kernel, device) → what it said. ``doctor`` shows them."""


class Kernel:
    """A Triton function before Triton is imported. ``kernel[grid](…)`` launches it, as ``triton.jit``'s does."""

    def __init__(self, function: FunctionType, counts: Sequence[str] = (), rows: Sequence[str] = ()) -> None:
        self.function, self.counts, self.rows = function, counts, rows
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    @cached_property
    def jit(self) -> Any:
        """Triton's own function object. Raises ImportError without Triton."""
        import triton
        import triton.language

        scope = self.function.__globals__
        scope["triton"], scope["tl"] = triton, triton.language
        jit = triton.jit(do_not_specialize=list(self.counts), do_not_specialize_on_alignment=list(self.rows))(
            self.function
        )
        # Triton looks names up in the kernel's module, and calls only functions of its own kind: the kernels that this
        # one calls, in its file or imported into it, become Triton's there too.
        used = self.function.__code__.co_names
        for name in used:
            if isinstance(scope.get(name), Kernel) and scope[name] is not self:
                scope[name] = scope[name].jit
        return jit

    def __call__(self, *arguments: Any) -> Any:
        """Kernels call each other; Triton sees its own function there."""
        raise TypeError(f"{self.__name__} is a kernel: launch it with {self.__name__}[grid](…)")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.jit[grid]


def kernel(function: Any) -> Kernel:
    """``triton.jit``, put off until the kernel is used."""
    return Kernel(function)


def counting(*names: str) -> Callable[[Any], Kernel]:
    """`kernel`, compiled once for all values of these integers. Triton otherwise compiles anew where one is 1 or a
    multiple of 16, which is lost time where they count what happens to be at work."""
    return lambda function: Kernel(function, names)


def from_any_row(*names: str) -> Callable[[Any], Kernel]:
    """`kernel`, compiled once wherever these pointers begin. Triton otherwise compiles anew where one is no multiple of
    16 bytes, as that of a row in the middle of a state may be: 0.3 s while somebody waits."""
    return lambda function: Kernel(function, rows=names)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1).

    Its ``tl.dot`` multiplies the bit patterns of bf16 (seen in 3.7 and 3.9): kernels widen operands there.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def can_launch(device: torch.device) -> bool:
    """Whether kernels can be tried on tensors of this device."""
    return (device.type == "cuda" or is_interpreted()) and has_triton()


def launch_or(name: str, device: torch.device, launch: Callable[[], Result], reference: Callable[[], Result]) -> Result:
    """Run the kernel, or the reference where there is no Triton or it refused this kernel on this device before.

    A refusal (an architecture it does not know, resources, an error of its compiler) is logged once and kept in
    `refusals`. Running out of memory is no refusal: it is raised.
    """
    if not can_launch(device) or (name, str(device)) in refusals:
        return reference()
    try:
        return launch()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's errors have no common class
        if is_interpreted():  # a mistake in the kernel, which a fallback would hide
            raise
        result = reference()  # raises too where it is the input that cannot be computed
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        refusals[name, str(device)] = f"{type(error).__name__}: {reason}"
        log.warning("kernel %s does not run on %s (%s): PyTorch's own operations do it instead", name, device, reason)
        return result
