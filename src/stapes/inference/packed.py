"""Linear layers for the CPU, with weights laid out once.

PyTorch's own linear layers call MKL, which takes its slow path on AMD processors and lays the weights out anew at
every call. oneDNN on weights packed once computes the same in fp32: twice as fast on the encoder's shapes and up to
four times on the decoder's, measured on an EPYC with AVX-512 (``python -m stapes.inference.packed``). On CPUs with bf16
units the same layers in bf16 are twice as fast again on the encoder's shapes, and read half as much on the decoder's.

With AVX2 and nothing wider FBGEMM is faster, on weights that it keeps in fp16 and widens as it multiplies: the sums are
fp32's, and weights that were published in fp16, as OpenAI's were, lose nothing. On an EPYC with AVX2 that takes half of
oneDNN's time on the decoder's shapes and six sevenths on the encoder's, and less than ONNX Runtime on both. Weights
that fp16 cannot hold stay with oneDNN.

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
_add_product = torch.ops.mkldnn._linear_pointwise.binary
_half_linear = torch.ops.quantized.linear_dynamic_fp16.default


def can_pack() -> bool:
    """Whether this PyTorch has the packed layers (they are not part of its public API)."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_worth_packing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an engine on ``device`` in ``dtype`` should run on packed layers."""
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and computes_in_bf16())
    return device.type == "cpu" and fast and can_pack()


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed; ``activation``, "none" or "gelu", comes behind it."""

    def __init__(self, bias: Tensor | None, activation: str = "none") -> None:
        super().__init__()
        self.bias = bias
        self.activation = activation

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` and what the layer makes of ``x``."""
        return self(x).add_(residual)


class OneDnnLinear(PackedLinear):
    """Weights of fp32 or bf16, as oneDNN likes them. Activation and sum are computed in place."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias, self.activation, [], "none")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return _add_product(x, residual, self.weight, self.bias, "add")


class HalfLinear(PackedLinear):
    """Weights kept in fp16, activations and sums of fp32, by FBGEMM."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def forward(self, x: Tensor) -> Tensor:
        y = _half_linear(x, self.weight)
        return F.gelu(y) if self.activation == "gelu" else y


def pack_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """The fastest layer that computes the same in ``dtype``, fp32 or bf16. weight: (outputs, inputs)."""
    if dtype == torch.float32 and is_faster_in_half() and _fits_half(weight):
        return HalfLinear(weight, bias)
    return OneDnnLinear(weight, bias, dtype)


def is_faster_in_half() -> bool:
    """Whether this CPU multiplies fastest in fp32 with weights that are kept in fp16, and this PyTorch can.

    Measured with AVX2. With AVX-512 oneDNN is what was measured.
    """
    # Other engines mean other things by these operators.
    return has_only_avx2() and torch.backends.quantized.engine in ("x86", "fbgemm")


def has_only_avx2() -> bool:
    """Whether this CPU, as PyTorch uses it, has AVX2 and nothing wider."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _fits_half(weight: Tensor) -> bool:
    """Whether nothing is lost in fp16."""
    return weight.dtype == torch.float16 or torch.equal(weight.half().to(weight.dtype), weight)


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
        self.slices = nn.ModuleList(pack_linear(part, None, dtype) for part in embedding.split(_SLICE_ROWS))

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
        setattr(parent, path.rpartition(".")[2], pack_linear(module.weight.detach(), module.bias, dtype))
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
        layers["packed"] = OneDnnLinear(weight, bias, torch.float32), x
        layers["in fp16"] = HalfLinear(weight.half(), bias), x
        if computes_in_bf16():
            layers["bf16"] = OneDnnLinear(weight, bias.bfloat16(), torch.bfloat16), x.bfloat16()
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
