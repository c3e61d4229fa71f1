"""Linear layers for the CPU, with weights laid out for oneDNN.

PyTorch's own linear layers call MKL, which takes its slow path on AMD processors and lays the weights out anew at
every call. oneDNN on weights packed once computes the same in fp32: twice as fast on the encoder's shapes and up to
four times on the decoder's, measured on an EPYC with AVX-512 (``python -m stapes.inference.packed``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.whisper import MLP, Whisper

# The vocabulary is packed in slices, so that its fp32 form is never held whole beside the packed one.
_VOCABULARY_SLICES = 8


def can_pack() -> bool:
    """Whether this PyTorch has the packed layers (they are not part of its public API)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_worth_packing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an engine on ``device`` in ``dtype`` should run on packed layers."""
    return device.type == "cpu" and dtype == torch.float32 and can_pack()


class PackedLinear(nn.Module):
    """A linear layer on packed fp32 weights, with an activation that is computed in place: "none" or "gelu"."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous())
        self.bias = bias
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.activation, [], "none")


class PackedMLP(nn.Module):
    """Whisper's MLP, the GELU computed inside the first product."""

    def __init__(self, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        up.activation = "gelu"
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class PackedVocabulary(nn.Module):
    """The output projection; the embedding itself may stay in half precision, where the file has it so."""

    def __init__(self, embedding: Tensor) -> None:
        super().__init__()
        self.slices = nn.ModuleList(PackedLinear(part, None) for part in embedding.chunk(_VOCABULARY_SLICES))

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat([part(states) for part in self.slices], dim=-1)


def pack_module(model: Whisper, path: str) -> None:
    """Pack the module at ``path``, if it is one that can be: ``load_whisper`` calls this as soon as it is read."""
    module, above = model.get_submodule(path), path.rpartition(".")[0]
    parent = model.get_submodule(above)
    if isinstance(module, nn.Linear):
        setattr(parent, path.rpartition(".")[2], PackedLinear(module.weight.detach(), module.bias))
        if isinstance(parent, MLP) and isinstance(parent.up, PackedLinear) and isinstance(parent.down, PackedLinear):
            owner, _, leaf = above.rpartition(".")
            setattr(model.get_submodule(owner), leaf, PackedMLP(parent.up, parent.down))
    elif module is model.decoder.embedding:
        model.decoder.projection = PackedVocabulary(model.decoder.embedding.weight.detach())


def pack(model: Whisper) -> Whisper:
    """Pack all that is not packed yet of a model on the CPU, one layer at a time. Returns the model."""
    for path in [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]:
        pack_module(model, path)
    if model.decoder.projection is None:
        pack_module(model, "decoder.embedding")
    return model


def main() -> None:
    """Print both layers' speed side by side on the shapes of Whisper base."""
    from torch.utils.benchmark import Timer

    for rows, inner, outer in ((1500, 512, 512), (1500, 512, 2048), (1500, 2048, 512), (8, 512, 2048), (8, 512, 51865)):
        x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer)
        packed = PackedLinear(weight, bias)
        variables = {"F": F, "x": x, "weight": weight, "bias": bias, "packed": packed}
        with torch.inference_mode():
            plain = Timer("F.linear(x, weight, bias)", globals=variables).blocked_autorange(min_run_time=0.5).median
            ours = Timer("packed(x)", globals=variables).blocked_autorange(min_run_time=0.5).median
        flop = 2e-9 * rows * inner * outer
        print(f"{rows:5} × {inner:4} × {outer:5}: torch {flop / plain:4.0f} GFLOP/s, packed {flop / ours:4.0f}")  # noqa: T201


if __name__ == "__main__":
    main()
