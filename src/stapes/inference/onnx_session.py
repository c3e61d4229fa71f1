"""One graph on one provider of ONNX Runtime, working on PyTorch's memory.

A provider that cannot start, or that leaves work to the CPU, is an error: ONNX Runtime by itself goes on with the CPU
and says so in its log alone.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.devices.backend import Device
from stapes.errors import DeviceError, ModelError, UsageError

_LOG = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
MIGRAPHX = "MIGraphXExecutionProvider"
CUDA = "CUDAExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"

_WANTED = {"cpu": (OPENVINO, CPU), "cuda": (CUDA,), "rocm": (MIGRAPHX,)}
"""What runs a kind of device, the better one first. That of OpenVINO comes only with a package of its own."""

_PACKAGES = {CPU: "onnxruntime", CUDA: "onnxruntime-gpu", MIGRAPHX: "onnxruntime-migraphx"}

_MOST_ON_CPU = 0.01
"""The share of a graph's operations that a GPU's provider may leave to the CPU: shapes, for the most part."""

_NUMPY = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}
_AMD = 0x1002


def runtime() -> Any:
    """The ``onnxruntime`` module. Raises ModelError where it is not installed or broken."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ModelError(
            f"ONNX models need ONNX Runtime, which cannot be imported ({error}): pip install 'stapes[onnx]', or for "
            "GPUs 'stapes[onnx-gpu]' (NVIDIA) or 'stapes[migraphx]' (AMD)"
        ) from error


def choose_provider(device: Device) -> str:
    """The provider for a device. Raises DeviceError where this build of ONNX Runtime has none."""
    offered = runtime().get_available_providers()
    found = next((provider for provider in _WANTED[device.backend] if provider in offered), None)
    if found is None:
        wanted = _WANTED[device.backend][0]
        raise DeviceError(
            f"--backend onnx: this ONNX Runtime has no {wanted} for {device.name} (it has {', '.join(offered)}): "
            f"pip install {_PACKAGES[wanted]} in its place, or use --device cpu"
        )
    return found


def cache_folder(provider: str) -> Path:
    """Where a provider keeps what it has compiled: below the user's cache, or ``$STAPES_CACHE_DIR``."""
    cache = os.environ.get("STAPES_CACHE_DIR")
    base = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stapes"
    return base / "onnx" / provider.removesuffix("ExecutionProvider").lower()


def provider_options(provider: str, device: Device) -> dict[str, str]:
    """Options of a provider. Raises nothing: what a version does not know, it refuses when the session is made."""
    index = str(device.torch.index or 0)
    if provider == MIGRAPHX:  # each shape is compiled, for minutes: keep what was
        folder = cache_folder(provider)
        folder.mkdir(parents=True, exist_ok=True)
        return {"device_id": index, "migraphx_model_cache_dir": str(folder)}
    if provider == CUDA:
        return {"device_id": index}
    if provider == OPENVINO:
        folder = cache_folder(provider)
        folder.mkdir(parents=True, exist_ok=True)
        return {"device_type": "CPU", "cache_dir": str(folder)}
    return {}


class Session:
    """A graph, ready to run. Inputs and outputs are PyTorch's tensors, used where they lie."""

    def __init__(self, path: Path, device: Device, provider: str) -> None:
        """Raises DeviceError where the provider cannot run the graph, ModelError where the graph is damaged."""
        ort = runtime()
        self.path, self.provider, self.device = path, provider, device.torch
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        # Between calls PyTorch works with the same cores; threads that spin would be in its way.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        on_gpu = provider in (CUDA, MIGRAPHX)
        tells = hasattr(ort.InferenceSession, "get_provider_graph_assignment_info")
        if on_gpu and not tells:  # then nothing at all may be left to the CPU
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=[(provider, provider_options(provider, device))], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises classes of its own, RuntimeError and ValueError
            reason = _reason(error)
            if provider == CPU:
                raise ModelError(f"{path}: ONNX Runtime cannot load it ({reason}); export the model again") from error
            raise DeviceError(
                f"--backend onnx: {provider} cannot run {path.name} ({reason}): `stapes doctor` says what is missing; "
                "or use --device cpu"
            ) from error
        used = self._session.get_providers()
        if used[:1] != [provider]:
            raise DeviceError(
                f"--backend onnx: {provider} did not start and {path.name} would run on {', '.join(used)}: "
                "`stapes doctor` says what is missing; or use --device cpu"
            )
        self.left_on_cpu = self._left_on_cpu() if on_gpu and tells else {}
        self._device_type = {CUDA: "cuda", MIGRAPHX: "gpu"}.get(provider, "cpu")
        self._index = device.torch.index or 0
        self.listener: Callable[[Mapping[str, Tensor]], None] | None = None
        """Is shown the inputs of every call."""
        self.inputs = {each.name: tuple(each.shape) for each in self._session.get_inputs()}
        self.outputs = {each.name: tuple(each.shape) for each in self._session.get_outputs()}

    def _left_on_cpu(self) -> dict[str, int]:
        """Operations that run on the CPU although a GPU was asked for → how many. Raises DeviceError for too many."""
        placed: dict[str, Counter[str]] = {}
        for part in self._session.get_provider_graph_assignment_info():
            placed.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
        return judge_placement(self.path.name, self.provider, placed)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Compute all outputs. ``outputs`` are those that are written into tensors of the caller.

        Returns the others. All tensors are on the session's device. Raises DeviceError where the provider fails, and
        PyTorch's own error where memory is out.
        """
        if self.listener is not None:
            self.listener(inputs)
        outputs = outputs or {}
        binding = self._session.io_binding()
        others = [name for name in self.outputs if name not in outputs]
        kept = []  # until the call is over
        for name, tensor in inputs.items():
            tensor = tensor.contiguous()
            kept.append(tensor)
            self._bind(binding, "bind_input", name, tensor)
        for name, tensor in outputs.items():
            assert tensor.is_contiguous(), name
            self._bind(binding, "bind_output", name, tensor)
        for name in others:
            binding.bind_output(name, "cpu" if self._device_type == "cpu" else "cuda", self._index)
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()  # the provider works on a stream of its own
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            reason = _reason(error)
            if "alloc" in reason.lower() or "out of memory" in reason.lower():
                raise torch.OutOfMemoryError(reason) from error  # the scheduler tries again with fewer windows
            raise DeviceError(f"{self.provider} failed in {self.path.name} ({reason}): use --backend torch") from error
        found = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        return {name: torch.from_dlpack(found[name]) for name in others}

    def _bind(self, binding: Any, method: str, name: str, tensor: Tensor) -> None:
        dtype, shape, place = _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
        if self._device_type == "gpu":  # an AMD GPU is told by its vendor, which the public method does not take
            make = runtime().capi.onnxruntime_inference_collection.OrtDevice.make
            target = make("gpu", self._index, _AMD)._get_c_device()
            getattr(binding._iobinding, method)(name, target, dtype, shape, place)
        else:
            getattr(binding, method)(name, self._device_type, self._index, dtype, shape, place)


def _reason(error: Exception) -> str:
    """What ONNX Runtime says, on one line and without the places in its source."""
    text = " ".join(str(error).split())
    return text.rpartition("[ONNXRuntimeError] : ")[2][:300]


def judge_placement(graph: str, provider: str, placed: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The operations that were left to the CPU, of a graph whose operations are ``placed`` (provider → how many).

    Raises DeviceError where they are more than a hundredth, with their names.
    """
    left = dict(placed.get(CPU, {}))
    total = sum(sum(counts.values()) for counts in placed.values())
    if left:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(left.items(), key=lambda item: -item[1])[:8])
        if sum(left.values()) > _MOST_ON_CPU * total:
            raise DeviceError(
                f"--backend onnx: {provider} leaves {sum(left.values())} of {total} operations of {graph} to the CPU "
                f"({listed}): use --backend torch, or a newer ONNX Runtime"
            )
        _LOG.info("%s: %s leaves to the CPU: %s", graph, provider, listed)
    return left


def check_backend(backend: str, name: str, exported: bool) -> None:
    """Whether ``--backend`` can be followed for a model that is ``exported`` or not. Raises UsageError."""
    if backend == "onnx" and not exported:
        raise UsageError(
            f"--backend onnx: {name} is no exported model; `stapes export {name} --to onnx -o FOLDER` makes one"
        )
    if backend == "torch" and exported:
        raise UsageError(f"--backend torch: {name} is an exported model, which ONNX Runtime runs: leave --backend out")
