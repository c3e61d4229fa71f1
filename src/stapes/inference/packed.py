"""Linear layers for the CPU, with weights laid out for oneDNN.

PyTorch's own linear layers call MKL, which takes its slow path on AMD processors and lays the weights out anew at
every call. oneDNN on weights packed once computes the same in fp32: twice as fast on the encoder's shapes and up to
four times on the decoder's, measured on an EPYC with AVX-512 (``python -m stapes.inference.packed``). On CPUs with bf16
units the same layers in bf16 are twice as fast again on the encoder's shapes, and read half as much on the decoder's.

In 8 bits there is the vocabulary, the one weight that is as large as all the decoder's others: it takes a step 1.2 ms
in place of 2.3. States are scaled row by row, so that a row never depends on its neighbours, and lie around 128:
oneDNN has fast products for unsigned bytes only (signed ones fall back to a loop that takes 3000 times as long).
Elsewhere 8 bits bring nothing over bf16: on 1500 rows, finding their scales and applying them takes what the faster
product saves, and on a few rows, what reading less saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.devices.backend import computes_in_bf16
from stapes.models.whisper import MLP, Whisper

_SLICE_ROWS = 6500
"""The vocabulary is packed in slices, so that what it is made of is never held whole beside what is packed."""

_linear = torch.ops.mkldnn._linear_pointwise.default


def can_pack() -> bool:
    """Whether this PyTorch has the packed layers (they are not part of its public API)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_worth_packing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an engine on ``device`` in ``dtype`` should run on packed layers."""
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and computes_in_bf16())
    return device.type == "cpu" and fast and can_pack()


class PackedLinear(nn.Module):
    """A linear layer on packed weights of fp32 or bf16, with an activation computed in place: "none" or "gelu"."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, activation: str = "none") -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous())
        self.bias = bias
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias, self.activation, [], "none")


class Int8Vocabulary(nn.Module):
    """The output projection in 8 bits: a scale for each token, and one for each row of states."""

    def __init__(self, embedding: Tensor) -> None:
        super().__init__()
        self.scale = torch.empty(len(embedding))
        whole = torch.empty(embedding.shape, dtype=torch.int8)
        for first in range(0, len(embedding), _SLICE_ROWS):
            rows = slice(first, first + _SLICE_ROWS)
            part = embedding[rows].float()
            self.scale[rows] = part.abs().amax(dim=1).clamp_min_(1e-12) / 127
            whole[rows] = (part / self.scale[rows, None]).round_().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole, None)
        self.zero = torch.zeros(len(whole), dtype=torch.int32)

    def forward(self, states: Tensor) -> Tensor:
        """(…, width) → (…, vocabulary), fp32."""
        rows = states.reshape(-1, states.shape[-1]).float()
        scale = rows.abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(1e-30)
        whole = (rows / scale).add_(128.5).to(torch.uint8)  # cut off after a half was added: rounded
        logits = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, 128, self.weight, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return logits.mul_(scale).view(*states.shape[:-1], -1)


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

    def __init__(self, embedding: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.slices = nn.ModuleList(PackedLinear(part, None, dtype) for part in embedding.split(_SLICE_ROWS))

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat([part(states) for part in self.slices], dim=-1)


def packer(dtype: torch.dtype, *, int8: bool = False) -> Callable[[Whisper, str], None]:
    """What `load_whisper` calls for each module it has read. int8: the vocabulary in 8 bits."""
    return partial(pack_module, dtype=dtype, int8=int8)


def pack_module(model: Whisper, path: str, dtype: torch.dtype = torch.float32, *, int8: bool = False) -> None:
    """Pack the module at ``path``, if it is one that can be: ``load_whisper`` calls this as soon as it is read."""
    module, above = model.get_submodule(path), path.rpartition(".")[0]
    parent = model.get_submodule(above)
    if isinstance(module, nn.Linear):
        setattr(parent, path.rpartition(".")[2], PackedLinear(module.weight.detach(), module.bias, dtype))
        if isinstance(parent, MLP) and isinstance(parent.up, PackedLinear) and isinstance(parent.down, PackedLinear):
            owner, _, leaf = above.rpartition(".")
            setattr(model.get_submodule(owner), leaf, PackedMLP(parent.up, parent.down))
    elif module is model.decoder.embedding:
        embedding = model.decoder.embedding.weight.detach()
        model.decoder.projection = Int8Vocabulary(embedding) if int8 else PackedVocabulary(embedding, dtype)


def pack(model: Whisper) -> Whisper:
    """Pack all that is not packed yet of a model on the CPU, one layer at a time. Returns the model."""
    dtype = model.decoder.positions.dtype
    for path in [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]:
        pack_module(model, path, dtype)
    if model.decoder.projection is None:
        pack_module(model, "decoder.embedding", dtype)
    return model


def main() -> None:
    """Print the layers' speed side by side on the shapes of Whisper base, on one core."""
    from torch.utils.benchmark import Timer

    for rows, inner, outer in ((1500, 512, 512), (1500, 512, 2048), (1500, 2048, 512), (8, 512, 2048), (8, 512, 51865)):
        x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer)
        layers = {"torch": (lambda x, w=weight, b=bias: F.linear(x, w, b), x)}
        layers["packed"] = PackedLinear(weight, bias, torch.float32), x
        if computes_in_bf16():
            layers["bf16"] = PackedLinear(weight, bias.bfloat16(), torch.bfloat16), x.bfloat16()
        layers["int8"] = Int8Vocabulary(weight), x
        flop = 2e-9 * rows * inner * outer
        with torch.inference_mode():
            speeds = {
                name: flop / Timer("layer(x)", globals={"layer": layer, "x": given}).blocked_autorange().median
                for name, (layer, given) in layers.items()
            }
        shown = ", ".join(f"{name} {speed:4.0f}" for name, speed in speeds.items())
        print(f"{rows:5} × {inner:4} × {outer:5}: {shown} GFLOP/s")  # noqa: T201


if __name__ == "__main__":
    main()
