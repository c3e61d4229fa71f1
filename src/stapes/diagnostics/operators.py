"""What PyTorch's profiler recorded, summed up: operators, kernels, launches, floating-point operations.

The profiler keeps every event in memory, so a long run is recorded window by window, and each window is added here
and forgotten. Self times are found the way the profiler's own tables do it: by nesting on each thread.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

_MOST_SHAPES = 4000
"""Groups kept apart by shape; a decoder's shapes grow with every token."""

_RUNTIME = re.compile(r"^(?:cuda|cu|hip)[A-Z]")
_RUNTIME_ALLOCATOR = re.compile(r"^(?:cuda|cu|hip)(?:Malloc|Free|MemAlloc|MemFree|MemCreate|MemMap|MemUnmap|HostAlloc)")
_RUNTIME_LAUNCH = re.compile(r"^(?:cuda|cu|hip)\w*(?:LaunchKernel|GraphLaunch|LaunchCooperativeKernel)")
_ALLOCATING = frozenset({"aten::empty", "aten::empty_strided", "aten::resize_"})
_PRODUCTS = frozenset(
    {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_addmm_activation", "mkldnn::_linear_pointwise"}
)
_ATTENTION = re.compile(r"^aten::_scaled_dot_product_(?:flash|efficient|cudnn|fused)_attention")
_CONVOLUTION = re.compile(r"^aten::(?:mkldnn|cudnn|miopen)_convolution$|^aten::convolution_overrideable$")
_DTYPES = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "double": "fp64", "signed char": "int8"}


@dataclass(slots=True)
class Operator:
    """All calls of one operator (for products and convolutions: with one set of shapes). Times in seconds."""

    name: str
    shapes: str = ""
    dtype: str | None = None
    calls: int = 0
    self_seconds: float = 0.0
    """On the CPU, without the operators it called."""
    device_seconds: float = 0.0
    """Of the kernels it started itself."""
    flops: float = 0.0


@dataclass(slots=True)
class Kernel:
    """All runs of one kernel or copy on a GPU."""

    name: str
    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Window:
    """One stretch of recording. ``allocations``: tensors for which memory was asked, of whatever allocator."""

    start: float
    seconds: float
    events: int
    allocations: int


@dataclass(slots=True)
class Activity:
    """Everything recorded so far."""

    operators: dict[tuple[str, str], Operator] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    launches: int = 0
    runtime_allocator_calls: int = 0
    runtime_allocator_seconds: float = 0.0
    """In cudaMalloc, hipFree and their like, which stop the device."""
    device_busy_seconds: float = 0.0
    """Time in which at least one kernel or copy ran."""
    unowned_device_seconds: float = 0.0
    """Of kernels that no operator of the window started: replayed graphs."""

    @property
    def recorded_seconds(self) -> float:
        """Length of all windows."""
        return sum(window.seconds for window in self.windows)

    def add(self, events: Sequence[Any], start: float, seconds: float) -> None:
        """Add the events of a window, which are ``torch.profiler``'s own (``kineto_results.events()``)."""
        by_thread: dict[int, list[tuple[int, int, str, Any]]] = defaultdict(list)
        kernel_time: dict[int, float] = defaultdict(float)
        on_device, allocations = [], 0
        longest = 1e9 * (seconds + 1)
        for event in events:
            length = event.duration_ns()
            if not 0 <= length <= longest:
                continue  # still open when the window ended: its end is no time
            name, start_ns = event.name(), event.start_ns()
            if not _is_cpu(event):
                if getattr(event, "is_user_annotation", bool)():
                    continue
                on_device.append((start_ns, start_ns + length))
                kernel = self.kernels.setdefault(name, Kernel(name))
                kernel.calls += 1
                kernel.seconds += length / 1e9
                kernel_time[event.linked_correlation_id()] += length / 1e9
            elif "::" in name:
                if not event.is_async():
                    by_thread[event.start_thread_id()].append((start_ns, -length, name, event))
                    allocations += name in _ALLOCATING
            elif _RUNTIME.match(name):
                self.launches += bool(_RUNTIME_LAUNCH.match(name))
                if _RUNTIME_ALLOCATOR.match(name):
                    self.runtime_allocator_calls += 1
                    self.runtime_allocator_seconds += length / 1e9
        for thread in by_thread.values():
            for name, event, self_ns in _self_times(thread):
                device_seconds = kernel_time.pop(event.correlation_id(), 0.0) if kernel_time else 0.0
                self._count(name, event, self_ns / 1e9, device_seconds)
        self.unowned_device_seconds += sum(kernel_time.values())
        self.device_busy_seconds += _covered(on_device) / 1e9
        self.windows.append(Window(start, seconds, len(events), allocations))

    def _count(self, name: str, event: Any, self_seconds: float, device_seconds: float) -> None:
        flops = operator_flops(name, event) if _computes(name) else 0.0
        shapes = _shapes_text(event) if flops else ""
        if (name, shapes) not in self.operators and len(self.operators) >= _MOST_SHAPES:
            shapes = ""
        operator = self.operators.setdefault((name, shapes), Operator(name, shapes, _dtype(event) if flops else None))
        operator.calls += 1
        operator.self_seconds += self_seconds
        operator.device_seconds += device_seconds
        operator.flops += flops


@cache
def _computes(name: str) -> bool:
    """Whether operations can be counted; looking at shapes is what takes time."""
    return name in _PRODUCTS or bool(_ATTENTION.match(name) or _CONVOLUTION.match(name))


def operator_flops(name: str, event: Any) -> float:
    """Floating-point operations of one call, of its shapes: two for each multiplication with addition; 0 if unknown.

    Only for operators that compute themselves, so that nothing is counted twice.
    """
    shapes = event.shapes()
    try:
        if name in ("aten::mm", "aten::bmm"):
            return _product(shapes[0], shapes[1])
        if name in ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation"):
            return _product(shapes[1], shapes[2])
        if name == "mkldnn::_linear_pointwise":
            # The form that adds has what it adds before the weight.
            weight = shapes[2] if len(shapes) > 2 and len(shapes[2]) == 2 else shapes[1]
            return 2.0 * math.prod(shapes[0]) * weight[0] if len(weight) == 2 else 0.0
        if _ATTENTION.match(name):
            query, key, value = shapes[:3]
            return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        if _CONVOLUTION.match(name):
            return _convolution(name, event, shapes[0], shapes[1])
    except (IndexError, TypeError, ValueError, AttributeError):
        pass  # another release's arguments: unknown
    return 0.0


def _product(left: Sequence[int], right: Sequence[int]) -> float:
    return 2.0 * math.prod(left) * right[-1]


def _convolution(name: str, event: Any, image: Sequence[int], weight: Sequence[int]) -> float:
    given = event.concrete_inputs()
    lists: list[Sequence[int]] = [value for value in given if isinstance(value, (list, tuple)) and value]
    by_vendor = name != "aten::convolution_overrideable"
    # The libraries' operators take padding, stride, dilation; the others stride first.
    padding, stride, dilation = lists[:3] if by_vendor else (lists[1], lists[0], lists[2])
    out = 1
    for place, (length, kernel) in enumerate(zip(image[2:], weight[2:], strict=True)):
        at = [each[place] if len(each) > 1 else each[0] for each in (padding, stride, dilation)]
        out *= (length + 2 * at[0] - at[2] * (kernel - 1) - 1) // at[1] + 1
    return 2.0 * image[0] * out * math.prod(weight)


def _self_times(events: list[tuple[int, int, str, Any]]) -> Iterable[tuple[str, Any, int]]:
    """(name, event, nanoseconds without what it called) for one thread's (start, −length, name, event)."""
    events.sort(key=itemgetter(0, 1))
    inner: list[int] = [0] * len(events)
    open_: list[tuple[int, int]] = []
    for place, (start, negative, _, _) in enumerate(events):
        length = -negative
        while open_ and open_[-1][1] <= start:
            open_.pop()
        if open_:
            inner[open_[-1][0]] += length
        open_.append((place, start + length))
    return ((name, event, max(0, -length - inner[place])) for place, (_, length, name, event) in enumerate(events))


def _covered(spans: list[tuple[int, int]]) -> int:
    """Nanoseconds that at least one span covers."""
    total, reach = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _is_cpu(event: Any) -> bool:
    return getattr(event.device_type(), "name", "CPU") == "CPU"


def _dtype(event: Any) -> str | None:
    return next((_DTYPES[each] for each in event.dtypes() if each in _DTYPES), None)


def _shapes_text(event: Any) -> str:
    return " ".join("×".join(map(str, shape)) for shape in event.shapes()[:4] if shape)
