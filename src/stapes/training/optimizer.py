"""AdamW as speech models are trained with it: groups, schedule, clipping, loss scaling, moving average.

A step whose gradient is not finite changes nothing. All processes see the same gradient norm, for the gradients have
been summed over them before, so they all skip the same steps without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stapes.checkpoints.wav2vec2_names import is_language_alone
from stapes.errors import ModelError, UsageError
from stapes.models.low_rank import is_adapter_name
from stapes.training.config import OptimizerOptions
from stapes.training.layout import Layout, like, shards, whole

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
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed = is_decayed(name, parameter)
        scale = _longest(name, options.lr_scales, 1.0)
        waits = _longest(name, options.freeze_steps, 0)
        group = groups.setdefault(
            # Tensors of one mesh are changed together, not with those of another.
            (decayed, scale, waits, getattr(parameter, "device_mesh", None)),
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
    ``layout`` says where the weights lie, None: whole, in every process; ``synced``, whether the backward pass sums the
    gradients over data.
    """

    def __init__(
        self,
        network: nn.Module,
        options: OptimizerOptions,
        total_steps: int,
        *,
        loss_scaling: bool = False,
        on_swap: Callable[[], None] = lambda: None,
        layout: Layout | None = None,
        synced: bool = True,
    ) -> None:
        self.options, self.total_steps, self._on_swap = options, total_steps, on_swap
        self._network, self._layout, self._synced = network, layout, synced
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
        if self._layout is not None:
            self._layout.finish_gradients(self._named, synced=self._synced)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self.scale is not None:
            torch._foreach_mul_(shards(gradients), 1 / self.scale)  # pyright: ignore[reportPrivateImportUsage]
        if self._layout is None:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = self._layout.norm(gradients, self._parameters[0].device)
        bad = ~norm.isfinite()
        if self.options.clip_norm:
            torch._foreach_mul_(shards(gradients), (self.options.clip_norm / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateImportUsage]
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
            torch._foreach_lerp_(shards(self.average), shards(self._parameters), 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
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
        """The network's weights by name, whole, on the CPU, frozen ones too. All processes must call it.

        Of a network with low-rank adapters these alone, or those of a language: all else is as it was.
        """
        return self._joined({name: whole(parameter) for name, parameter in self._kept()})

    def _joined(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """What all stages of a pipeline have together."""
        return own if self._layout is None else self._layout.join(own, self._parameters[0].device)

    def _kept(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self._network.named_parameters())
        adapters = [(name, parameter) for name, parameter in named if is_adapter_name(name)]
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if trained and is_language_alone(name for name, _ in trained):
            return trained
        return adapters or named

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the network, and the moving average, other weights. ModelError where they are another network's."""
        for name, parameter in self._kept():
            tensor = weights.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                raise ModelError(f"the weights are of another network ({name} differs): use their own settings")
            shards([parameter])[0].copy_(shards([like(tensor, parameter)])[0])
        if self.average is not None:
            self.average = [parameter.detach().clone() for parameter in self._parameters]
        self._on_swap()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in the place of the weights, where there is one, until the block ends."""
        if self.average is None:
            yield
            return
        kept = [shard.clone() for shard in shards(self._parameters)]
        with torch.no_grad():
            torch._foreach_copy_(shards(self._parameters), shards(self.average))  # pyright: ignore[reportPrivateImportUsage]
        self._on_swap()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(shards(self._parameters), kept)  # pyright: ignore[reportPrivateImportUsage]
            self._on_swap()

    def state_dict(self) -> dict[str, Any]:
        """Everything, by the parameters' names, on the CPU. All processes must call it."""
        kept: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            kept[f"{name}/"] = torch.zeros(1)  # one that has not been changed yet has no moments
            kept |= {f"{name}/{key}": whole(value) for key, value in self.adamw.state[parameter].items()}
        moments: dict[str, dict[str, Tensor]] = {}
        for place, tensor in self._joined(kept).items():
            name, _, key = place.rpartition("/")
            moments.setdefault(name, {}).update({key: tensor} if key else {})
        state: dict[str, Any] = {
            "step": self.step_number,
            "moments": moments,
            "scale": self.scale,
            "good_steps": self._good_steps,
        }
        if self.average is not None:
            state["average"] = self._joined(dict(zip(self._named, map(whole, self.average), strict=True)))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on another number of processes perhaps. Raises UsageError for another network's state."""
        is_stage = self._layout is not None and self._layout.mesh.sizes.pp > 1
        missing, more = self._named.keys() - state["moments"].keys(), state["moments"].keys() - self._named.keys()
        if missing or (more and not is_stage):
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
