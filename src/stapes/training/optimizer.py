"""AdamW as speech models are trained with it: groups, schedule, clipping, loss scaling, moving average.

A step whose gradient is not finite changes nothing. All processes see the same gradient norm, for the gradients have
been summed over them before, so they all skip the same steps without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stapes.errors import ModelError, UsageError
from stapes.training.config import OptimizerOptions

_SCALE_GROWTH_STEPS = 2000


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, but not to norms, biases and embeddings of positions or masks."""
    return parameter.ndim > 1 and not name.endswith(("positions", "mask_embedding"))


def schedule(step: int, total: int, options: OptimizerOptions) -> float:
    """The share of the peak learning rate at a step counted from 0: warm-up, hold, down to the final share."""
    warmup = min(options.warmup_steps, total // 3)
    if step < warmup:
        return (step + 1) / warmup
    begin = min(total, warmup + options.hold_steps)
    if step < begin:
        return 1.0
    progress = min(1.0, (step - begin) / max(1, total - begin))
    left = 1 - progress if options.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return options.final_lr + (1 - options.final_lr) * left


def freeze(network: nn.Module, options: OptimizerOptions) -> None:
    """Take the gradient from the parts that are to stay as they are. Raises UsageError for a part there is not."""
    names = [name for name, _ in network.named_parameters()]
    for place, prefixes in (
        ("freeze", options.freeze),
        ("freeze_steps", options.freeze_steps),
        ("lr_scales", options.lr_scales),
    ):
        for prefix in prefixes:
            if not any(_begins(name, prefix) for name in names):
                parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
                raise UsageError(f"optimizer.{place} names {prefix!r}, which the network has not: it has {parts}")
    for name, parameter in network.named_parameters():
        if any(_begins(name, prefix) for prefix in options.freeze):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UsageError("optimizer.freeze leaves nothing to train: name fewer parts")


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix.rstrip('.')}.")


def _longest(name: str, table: Mapping[str, Any], default: Any) -> Any:
    """The entry of the longest prefix of ``name``."""
    found = [prefix for prefix in table if _begins(name, prefix)]
    return table[max(found, key=len)] if found else default


def parameter_groups(network: nn.Module, options: OptimizerOptions) -> list[dict[str, Any]]:
    """Groups for `torch.optim.AdamW`: each with its decay, the share of the learning rate, the steps it waits."""
    groups: dict[tuple[bool, float, int], dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed = is_decayed(name, parameter)
        scale = _longest(name, options.lr_scales, 1.0)
        waits = _longest(name, options.freeze_steps, 0)
        group = groups.setdefault(
            (decayed, scale, waits),
            {
                "params": [],
                "names": [],
                "weight_decay": options.weight_decay if decayed else 0.0,
                "scale": scale,
                "waits": waits,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


class Optimizer:
    """Changes the weights of a network, step by step.

    ``loss_scaling`` is for fp16. ``on_swap`` is called when other weights have been put in the place of the network's.
    """

    def __init__(
        self,
        network: nn.Module,
        options: OptimizerOptions,
        total_steps: int,
        *,
        loss_scaling: bool = False,
        on_swap: Callable[[], None] = lambda: None,
    ) -> None:
        self.options, self.total_steps, self._on_swap = options, total_steps, on_swap
        self._network = network
        self.step_number = 0
        """Steps tried so far, skipped ones too."""
        self._groups = parameter_groups(network, options)
        self._named = {
            name: parameter
            for group in self._groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }
        self._parameters = list(self._named.values())
        self._sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        self.adamw = torch.optim.AdamW(
            [{key: value for key, value in group.items() if key != "names"} for group in self._groups],
            lr=options.peak_lr,
            betas=(options.betas[0], options.betas[1]),
            eps=options.epsilon,
            fused=True,
        )
        self.scale = 65536.0 if loss_scaling else None
        """What the loss is multiplied with, so that small gradients exist in fp16."""
        self._good_steps = 0
        self.average: list[Tensor] | None = None
        if options.ema is not None:
            self.average = [parameter.detach().clone() for parameter in self._parameters]

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.options.peak_lr * schedule(self.step_number, self.total_steps, self.options)

    def zero_grad(self) -> None:
        """Forget gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``."""
        (loss if self.scale is None else loss * self.scale).backward()

    @torch.no_grad()
    def step(self) -> tuple[Tensor, Tensor]:
        """Change the weights. Returns the gradient's norm and whether the step was skipped, scalars on the device."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self.scale is not None:
            torch._foreach_mul_(gradients, 1 / self.scale)  # pyright: ignore[reportPrivateImportUsage]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        bad = ~norm.isfinite()
        if self.options.clip_norm:
            torch._foreach_mul_(gradients, (self.options.clip_norm / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateImportUsage]
        self._set_rates()
        if self.scale is not None:
            self._adapt_scale(bool(bad))
        if self._sharded or self.scale is not None:
            if not bool(bad):
                self.adamw.step()
        else:  # the kernel itself skips: nothing waits for the device
            self.adamw.found_inf = bad.float()  # pyright: ignore[reportAttributeAccessIssue]
            self.adamw.step()
        if self.average is not None:
            assert self.options.ema is not None
            # While few steps have been made, the mean of these: the beginning is not worth remembering.
            decay = min(self.options.ema, (1 + self.step_number) / (10 + self.step_number))
            torch._foreach_lerp_(_shards(self.average), _shards(self._parameters), 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        self.step_number += 1
        return norm, bad

    def _set_rates(self) -> None:
        rate = self.learning_rate
        for group in self.adamw.param_groups:
            group["lr"] = 0.0 if self.step_number < group["waits"] else rate * group["scale"]

    def _adapt_scale(self, bad: bool) -> None:
        assert self.scale is not None
        if bad:
            self.scale, self._good_steps = max(1.0, self.scale / 2), 0
        else:
            self._good_steps += 1
            if self._good_steps == _SCALE_GROWTH_STEPS:
                self.scale, self._good_steps = min(2.0**24, self.scale * 2), 0

    def weights(self) -> dict[str, Tensor]:
        """The network's weights by name, whole, on the CPU, frozen ones too. All processes must call it."""
        return {name: whole(parameter) for name, parameter in self._network.named_parameters()}

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the network, and the moving average, other weights. ModelError where they are another network's."""
        for name, parameter in self._network.named_parameters():
            tensor = weights.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                raise ModelError(f"the weights are of another network ({name} differs): use their own settings")
            parameter.copy_(like(tensor, parameter))
        if self.average is not None:
            self.average = [parameter.detach().clone() for parameter in self._parameters]
        self._on_swap()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in the place of the weights, where there is one, until the block ends."""
        if self.average is None:
            yield
            return
        kept = [shard.clone() for shard in _shards(self._parameters)]
        with torch.no_grad():
            torch._foreach_copy_(_shards(self._parameters), _shards(self.average))  # pyright: ignore[reportPrivateImportUsage]
        self._on_swap()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(_shards(self._parameters), kept)  # pyright: ignore[reportPrivateImportUsage]
            self._on_swap()

    def state_dict(self) -> dict[str, Any]:
        """Everything, by the parameters' names, on the CPU. All processes must call it."""
        moments: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._named.items():
            moments[name] = {key: whole(value) for key, value in self.adamw.state[parameter].items()}
        state: dict[str, Any] = {
            "step": self.step_number,
            "moments": moments,
            "scale": self.scale,
            "good_steps": self._good_steps,
        }
        if self.average is not None:
            state["average"] = dict(zip(self._named, map(whole, self.average), strict=True))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on another number of processes perhaps. Raises UsageError for another network's state."""
        if set(state["moments"]) != set(self._named):
            raise UsageError("the checkpoint is of another network or freezes other parts: use its own settings")
        self.step_number = state["step"]
        if self.scale is not None and state["scale"] is not None:
            self.scale, self._good_steps = state["scale"], state["good_steps"]
        for name, parameter in self._named.items():
            self.adamw.state[parameter] = {
                key: value.clone() if value.ndim == 0 and parameter.ndim else like(value, parameter)
                for key, value in state["moments"][name].items()
            }
            if "step" in self.adamw.state[parameter]:
                step = self.adamw.state[parameter]["step"]
                self.adamw.state[parameter]["step"] = step.to(parameter.device)
        if self.average is not None and "average" in state:
            self.average = [like(state["average"][name], parameter) for name, parameter in self._named.items()]


def _shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this process holds of tensors that may be shared out; changing it changes them."""
    return [tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """A tensor, which may be shared out over processes, as a plain one on the CPU; all of them must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A plain tensor on the CPU placed and shared out as ``parameter`` is."""
    moved = tensor.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor):
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements)
    return moved
