"""Run in Triton's interpreter by test_interpreted.py: a network whose parts are fused kernels equals the plain one."""

from __future__ import annotations

import pytest
import torch

from fused_networks import farthest, loss_and_gradients, pair, sound
from stapes.kernels.jit import refusals


@pytest.mark.parametrize("kind", ["base, two convolutions", "large, two convolutions"])
def test_loss_and_gradients_are_those_of_the_plain_network(kind: str) -> None:
    plain, fused = pair(kind)
    waveform, lengths = sound(2, 130), torch.tensor([130, 100])
    loss, gradients = loss_and_gradients(plain, waveform, lengths)
    found, of_fused = loss_and_gradients(fused, waveform, lengths)
    assert found == pytest.approx(loss, rel=1e-5, abs=1e-6)
    far = farthest(of_fused, gradients)
    assert max(far.values()) < 1e-4, {name: each for name, each in far.items() if each >= 1e-4}
    assert not refusals
