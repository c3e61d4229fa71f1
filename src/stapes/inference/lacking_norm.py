"""A layer norm behind products whose biases wait for it: what they lack is added as the norm reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from stapes.kernels.layer_norm import layer_norm


@dataclass(frozen=True)
class LackingNorm:
    """Gain, bias, and the sum of the biases that the residual stream lacks when it comes; float32, (width,) each."""

    gain: Tensor
    bias: Tensor
    lack: Tensor
    eps: float

    @classmethod
    def of(cls, norm: nn.LayerNorm, lack: Tensor) -> LackingNorm:
        """The same norm, of a stream that lacks ``lack``."""
        return cls(norm.weight.detach().float(), norm.bias.detach().float(), lack, norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.lack, self.gain, self.bias, self.eps)
