"""The optimiser: PyTorch's AdamW where nothing is special, and what is special does what it says."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from stapes.errors import UsageError
from stapes.training.config import OptimizerOptions
from stapes.training.optimizer import Optimizer, freeze, parameter_groups, schedule


class Net(nn.Module):
    """Two parts and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encoder(x)))


def options(**values: object) -> OptimizerOptions:
    return OptimizerOptions(**({"warmup_steps": 0, "clip_norm": 0.0} | values))  # pyright: ignore[reportArgumentType]


def loss_of(net: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return net(torch.randn(8, 6, generator=generator)).square().mean()


def run(net: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> list[tuple[float, bool]]:
    out = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, step))
        norm, bad = optimizer.step()
        out.append((float(norm), bool(bad)))
    return out


def test_without_extras_it_is_torchs_adamw_with_two_groups() -> None:
    ours, theirs = Net(), Net()
    run(ours, Optimizer(ours, options(peak_lr=0.01, hold_steps=1000), 1000), 5)
    decayed = [theirs.encoder.weight, theirs.head.weight]
    others = [theirs.encoder.bias, theirs.head.bias, *theirs.norm.parameters()]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-8)
    for step in range(5):
        adamw.zero_grad()
        loss_of(theirs, step).backward()
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_schedule_warms_up_holds_and_falls() -> None:
    settings = options(warmup_steps=10, hold_steps=20, final_lr=0.1)
    rates = [schedule(step, 100, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:30] == [1.0] * 21
    assert all(a >= b for a, b in pairwise(rates[29:]))
    assert rates[100] == pytest.approx(0.1)
    # A short run does not spend its life warming up.
    assert schedule(3, 9, options(warmup_steps=500)) == 1.0


def test_a_step_that_is_not_finite_changes_nothing_at_all() -> None:
    net = Net()
    optimizer = Optimizer(net, options(peak_lr=0.01), 100)
    run(net, optimizer, 2)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()["moments"]))
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, 2) * float("nan"))
    assert bool(optimizer.step()[1])
    after = (net.state_dict(), optimizer.state_dict()["moments"])
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert not run(net, optimizer, 1)[0][1]
    assert not torch.equal(net.head.weight, before[0]["head.weight"])


def test_long_gradients_are_shortened() -> None:
    ours, theirs = Net(), Net()
    run(ours, Optimizer(ours, options(peak_lr=0.01, clip_norm=1e-3), 100), 1)
    loss_of(theirs, 0).backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_parts_have_their_own_learning_rate_and_wait() -> None:
    net, before = Net(), Net()
    optimizer = Optimizer(net, options(peak_lr=0.01, freeze_steps={"encoder": 2}, lr_scales={"head": 0.0}), 100)
    run(net, optimizer, 2)
    assert torch.equal(net.encoder.weight, before.encoder.weight)
    assert torch.equal(net.head.weight, before.head.weight)
    assert not torch.equal(net.norm.weight, before.norm.weight)
    run(net, optimizer, 1)
    assert not torch.equal(net.encoder.weight, before.encoder.weight)


def test_frozen_parts_have_no_gradient_and_unknown_ones_are_told() -> None:
    net = Net()
    freeze(net, options(freeze=["encoder"]))
    names = [name for group in parameter_groups(net, options()) for name in group["names"]]
    assert sorted(names) == ["head.bias", "head.weight", "norm.bias", "norm.weight"]
    with pytest.raises(UsageError, match="it has encoder, head, norm"):
        freeze(net, options(lr_scales={"decoder": 0.1}))
    with pytest.raises(UsageError, match="leaves nothing to train"):
        freeze(net, options(freeze=["encoder", "head", "norm"]))


def test_the_moving_average_follows_and_stands_in() -> None:
    net = Net()
    optimizer = Optimizer(net, options(peak_lr=0.01, ema=0.5), 100)
    # The decay grows to its value: (1 + step) / (10 + step) at first.
    mean = net.head.weight.detach().clone()
    for step in range(3):
        run(net, optimizer, 1, step)
        mean = mean.lerp(net.head.weight.detach(), 1 - min(0.5, (1 + step) / (10 + step)))
    own = net.head.weight.detach().clone()
    with optimizer.averaged():
        torch.testing.assert_close(net.head.weight.detach(), mean)
    assert torch.equal(net.head.weight, own)


def test_fp16_scaling_halves_after_a_bad_step_and_changes_no_gradient() -> None:
    ours, theirs = Net(), Net()
    scaled = Optimizer(ours, options(peak_lr=0.01, ema=0.9), 100, loss_scaling=True)
    run(ours, scaled, 2)
    run(theirs, Optimizer(theirs, options(peak_lr=0.01), 100), 2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    scaled.zero_grad()
    scaled.backward(loss_of(ours, 5) * float("inf"))
    kept = ours.head.weight.detach().clone()
    assert bool(scaled.step()[1])
    assert scaled.scale == 32768.0
    assert torch.equal(ours.head.weight, kept)


def test_state_makes_the_same_steps_bit_for_bit() -> None:
    settings = options(peak_lr=0.01, ema=0.9, clip_norm=0.1)
    whole, first, second = Net(), Net(), Net()
    run(whole, Optimizer(whole, settings, 100), 6)
    before = Optimizer(first, settings, 100)
    run(first, before, 3)
    second.load_state_dict(first.state_dict())
    after = Optimizer(second, settings, 100)
    after.load_state_dict(before.state_dict())
    run(second, after, 3, 3)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = Net()
    freeze(other, options(freeze=["encoder"]))
    with pytest.raises(UsageError, match="freezes other parts"):
        Optimizer(other, settings, 100).load_state_dict(before.state_dict())
