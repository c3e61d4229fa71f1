"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054) in the place of DDP and the optimiser.

An extra: ``pip install 'stapes[deepspeed]'``. It is used with PyTorch's own AdamW, so that little is compiled when it
first runs, and its checkpoints are not used: weights and moments are gathered by name into the same file that any
other strategy writes and reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stapes.errors import DeviceError, ModelError, UsageError
from stapes.training.config import OptimizerOptions, ParallelOptions
from stapes.training.objectives import Objective
from stapes.training.optimizer import parameter_groups, schedule
from stapes.training.parallel import Processes

_MOMENTS = ("exp_avg", "exp_avg_sq")


def import_deepspeed(processes: Processes) -> Any:
    """The library. Raises DeviceError that says why it cannot be had."""
    if processes.device.backend == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except Exception as error:  # whatever its many parts raise when a compiler or a driver is missing
        raise DeviceError(
            f"parallel.strategy is deepspeed, which cannot be imported here ({error}): pip install "
            "'stapes[deepspeed]', or use fsdp, which needs nothing else"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


class DeepSpeedOptimizer:
    """`stapes.training.optimizer.Optimizer` for a network whose optimiser, gradients or weights DeepSpeed shares out.

    ``engine`` is what stands in for the objective.
    """

    def __init__(
        self,
        objective: Objective,
        network: nn.Module,
        options: OptimizerOptions,
        parallel: ParallelOptions,
        total_steps: int,
        processes: Processes,
    ) -> None:
        if options.ema is not None:
            raise UsageError("optimizer.ema does not go with deepspeed: set it to none, or use fsdp")
        deepspeed = import_deepspeed(processes)
        self._tensors = deepspeed.utils
        self._gathered = deepspeed.zero.GatheredParameters
        self.options, self.total_steps = options, total_steps
        self._objective, self._network, self._stage = objective, network, parallel.zero_stage
        self.step_number = 0
        groups = parameter_groups(network, options)
        self._names = [name for group in groups for name in group["names"]]
        self._shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        self._accumulate = options.accumulate
        adamw = torch.optim.AdamW(
            [{key: value for key, value in group.items() if key != "names"} for group in groups],
            lr=options.peak_lr,
            betas=(options.betas[0], options.betas[1]),
            eps=options.epsilon,
        )
        self.engine, _, _, _ = deepspeed.initialize(
            model=objective,
            optimizer=adamw,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": self._accumulate,
                "gradient_clipping": options.clip_norm,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {
                    "stage": parallel.zero_stage,
                    "offload_optimizer": {"device": "cpu" if parallel.offload else "none"},
                },
                "steps_per_print": 1 << 30,
            },
        )
        self._parameters = dict(network.named_parameters())
        self._start_moments()

    def _start_moments(self) -> None:
        """Zeros where AdamW would put them in its first step.

        DeepSpeed looks for them after the first group's first step, when the other groups have none, and never again.
        """
        zero = self.engine.optimizer
        for group in zero.optimizer.param_groups:
            for part in group["params"]:
                state = zero.optimizer.state[part]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for key in _MOMENTS:
                        state[key] = torch.zeros_like(part)
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.options.peak_lr * schedule(self.step_number, self.total_steps, self.options)

    def zero_grad(self) -> None:
        """Nothing to do: a step forgets its gradients."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> tuple[Tensor, Tensor]:
        """Change the weights. Returns the gradient's norm and whether the step was skipped."""
        rate = self.learning_rate
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 0.0 if self.step_number < group["waits"] else rate * group["scale"]
        skipped = self.engine.skipped_steps
        self.engine.step()
        self.step_number += 1
        norm = torch.as_tensor(float(self.engine.get_global_grad_norm() or 0.0))
        return norm, torch.as_tensor(self.engine.skipped_steps > skipped)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the objective evaluate: there is no moving average.

        Where weights are shared out (stage 3), every use of a layer gathers them, and in decoding processes do not take
        the same number of steps: then a plain copy stands in for the network.
        """
        if self._stage < 3:
            yield
            return
        with torch.device("meta"):
            copy: Any = type(self._network)(self._network.config)  # pyright: ignore[reportCallIssue, reportArgumentType]
        copy.load_state_dict(self.weights(), assign=True)
        self._objective.network = copy.to(self.engine.device)
        try:
            yield
        finally:
            self._objective.network = self._network  # pyright: ignore[reportAttributeAccessIssue]

    def weights(self) -> dict[str, Tensor]:
        """The network's weights by name, whole, on the CPU. All processes must call it."""
        out = {}
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                out[name] = self._tensors.safe_get_full_fp32_param(parameter).detach().cpu().clone()
            else:
                with self._gathered([parameter]):
                    out[name] = parameter.detach().cpu().clone()
            out[name] = out[name].view(self._shapes[name])
        return out

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the network other weights. Raises ModelError where they are those of another network."""
        for name, parameter in self._parameters.items():
            tensor = weights.get(name)
            if tensor is None or tuple(tensor.shape) != self._shapes[name]:
                raise ModelError(f"the weights are of another network ({name} differs): use their own settings")
            tensor = tensor.to(parameter.device)
            # What products read, and what the optimiser changes: two copies, or the same one.
            with self._gathered([parameter], modifier_rank=0):
                parameter.data.copy_(tensor)
            if parameter.requires_grad:
                self._tensors.safe_set_full_fp32_param(parameter, tensor)

    def state_dict(self) -> dict[str, Any]:
        """Everything, by the parameters' names, on the CPU. All processes must call it."""
        moments = {}
        for name in self._names:
            parameter = self._parameters[name]
            moments[name] = {"step": torch.tensor(float(self.step_number))}
            for key in _MOMENTS:
                full = self._tensors.safe_get_full_optimizer_state(parameter, key)
                moments[name][key] = full.detach().cpu().clone().view(self._shapes[name])
        return {"step": self.step_number, "moments": moments, "scale": None, "good_steps": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises UsageError for another network's state."""
        if set(state["moments"]) != set(self._names):
            raise UsageError("the checkpoint is of another network or freezes other parts: use its own settings")
        self.step_number = state["step"]
        for name in self._names:
            parameter = self._parameters[name]
            for key in _MOMENTS:
                moment = state["moments"][name][key].to(parameter.device)
                self._tensors.safe_set_full_optimizer_state(parameter, moment, key)
        for entry in self.engine.optimizer.optimizer.state.values():
            if "step" in entry:
                entry["step"].fill_(float(self.step_number))
