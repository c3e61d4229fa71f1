"""Whisper on weights of 8 or 4 bits: for GPUs of little memory, and to read fewer bytes for each token.

Linear layers and the token embedding, which is the output projection too, are quantised as they are read, so that
loading never holds more than the quantised model and one weight. Convolutions, norms, biases and positions stay.

Weights that a folder has in 8-bit floats are taken as they are where the encoder multiplies them; the decoder, which
reads its weights more than it multiplies, has the numbers that they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.devices.backend import Device, fp8_dtype, usable_dtypes
from stapes.errors import UsageError
from stapes.inference.gpu_attention import attend
from stapes.kernels import quantization
from stapes.kernels.fp8_weights import Fp8Weight, dequantize_fp8
from stapes.kernels.quantization import GROUPS, Quantized, quantize_int4, quantize_int8
from stapes.kernels.quantized_linear import quantized_linear
from stapes.models.whisper import MLP, EncoderLayer, Whisper
from stapes.options import Precision


class QuantizedLinear(nn.Module):
    """A linear layer on quantised weights (outputs, inputs)."""

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.values, self.scales = nn.Buffer(weight.values), nn.Buffer(weight.scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def quantized(self) -> Quantized:
        """The weights."""
        return Quantized(self.values, self.scales)

    def forward(
        self, x: Tensor, *, gelu: bool = False, residual: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """(…, inputs) → (…, outputs), with GELU, residual and dtype as `quantized_linear` has them."""
        return quantized_linear(x, self.quantized, self.bias, gelu=gelu, residual=residual, dtype=dtype)

    def extra_repr(self) -> str:
        weight = self.quantized
        return f"{weight.inputs}, {weight.outputs}, {weight.bits} bits"


class Fp8Linear(nn.Module):
    """A linear layer of the encoder on weights in 8-bit floats, until `gpu_encoder` takes them."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.values, self.scales = nn.Buffer(weight.values), nn.Buffer(weight.scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def rounded(self) -> Fp8Weight:
        """The weights."""
        return Fp8Weight(self.values, self.scales)

    @property
    def weight(self) -> Tensor:
        """The numbers that they stand for, (outputs, inputs), in the dtype of the bias, if there is one."""
        return dequantize_fp8(self.rounded, torch.float32 if self.bias is None else self.bias.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs), the plain way."""
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class QuantizedMLP(nn.Module):
    """Whisper's MLP, the GELU computed by the first product."""

    def __init__(self, up: QuantizedLinear, down: QuantizedLinear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """(…, width) → (…, width); the sum goes into ``residual`` if there is one."""
        return self.down(self.up(x, gelu=True), residual=residual)


class QuantizedEmbedding(nn.Module):
    """Rows of the output projection, whose memory it shares."""

    def __init__(self, projection: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.projection, self.dtype = projection, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (…) → (…, width)."""
        values, scales = self.projection.quantized
        rows = values[:, tokens] * scales[:, tokens].float()[..., None]  # (groups, …, inputs of a group)
        return rows.movedim(0, -2).flatten(-2).to(self.dtype)


def concat(layers: list[QuantizedLinear]) -> QuantizedLinear:
    """Layers of the same input as one, their outputs behind each other; no bias counts as zeros.

    Raises ValueError for layers of different bits, groups or inputs.
    """
    weights = [layer.quantized for layer in layers]
    if len({(weight.bits, weight.inputs, weight.group) for weight in weights}) > 1:
        raise ValueError("layers of different bits or inputs cannot be one")
    biases = [layer.bias for layer in layers]
    given = next((bias for bias in biases if bias is not None), None)
    bias = None
    if given is not None:
        bias = torch.cat(
            [given.new_zeros(weight.outputs) if b is None else b for b, weight in zip(biases, weights, strict=True)]
        )
    return QuantizedLinear(quantization.concat(weights), bias)


class NormedQuantized:
    """Layers of one input with the layer norm that stands before them, their outputs behind each other.

    Those of the same bits are one product: query, key and value as three, two or one.
    """

    def __init__(self, layers: Sequence[nn.Module], norm: nn.LayerNorm | None = None) -> None:
        self.norm = norm
        self.parts: list[QuantizedLinear] = []
        for layer in layers:
            assert isinstance(layer, QuantizedLinear)
            if self.parts and self.parts[-1].quantized.bits == layer.quantized.bits:
                self.parts[-1] = concat([self.parts[-1], layer])
            else:
                self.parts.append(layer)

    def __call__(
        self, x: Tensor, *, gelu: bool = False, residual: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """(rows, inputs) → (rows, outputs of all); a residual for a single product only."""
        if self.norm is not None:
            x = F.layer_norm(x, x.shape[-1:], self.norm.weight.to(x.dtype), self.norm.bias.to(x.dtype), self.norm.eps)
        if len(self.parts) == 1:
            return self.parts[0](x, gelu=gelu, residual=residual, dtype=dtype)
        assert residual is None
        return torch.cat([part(x, gelu=gelu, dtype=dtype) for part in self.parts], dim=-1)


class QuantizedEncoderLayer:
    """An encoder layer on quantised weights that adds to its residual stream in place."""

    def __init__(self, layer: EncoderLayer) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.qkv = NormedQuantized([attention.query, attention.key, attention.value], layer.attention_norm)
        self.out = NormedQuantized([attention.out])
        self.up, self.down = NormedQuantized([mlp.up], layer.mlp_norm), NormedQuantized([mlp.down])

    def __call__(self, x: Tensor, batch: int, heads: int) -> None:
        """x (batch × frames, width)."""
        self.out(attend(self.qkv(x), batch, heads), residual=x)
        self.down(self.up(x, gelu=True), residual=x)


def stored_precision(name: str, scheme: Precision | None, asked: Precision, device: Device) -> Precision:
    """The precision of a model that may have been quantised beforehand: its own on a GPU, fp32 on the CPU.

    8-bit floats run as they are on GPUs that multiply them, and as fp16 on others; any other floats hold them too.
    Raises UsageError where another was asked for.
    """
    if scheme is None:
        return asked
    on_cpu = device.backend == "cpu"
    if scheme == "fp8":
        if asked in ("fp32", "bf16", "fp16"):
            return asked
        if asked == "fp8":
            fp8_dtype(device)  # or it says why not
        own: Precision = "fp8" if usable_dtypes(device)["fp8"][0] == "native" else "fp16"
    else:
        own = scheme
    if asked not in ("auto", "fp32" if on_cpu else own):
        raise UsageError(f"--precision {asked}: the weights of {name} are in {scheme}; leave --precision out")
    return "fp32" if on_cpu else own


def quantizes(precision: Precision) -> bool:
    """Whether a precision is one of this file's."""
    return precision in ("int8", "int4")


def quantizer(
    precision: Precision, stored: Callable[[str], Quantized | Fp8Weight | None] | None = None
) -> Callable[[Whisper, str], None] | None:
    """What `load_whisper` calls for each module it has read, in a precision; None where weights stay as they are.

    stored: weights that were quantised beforehand (`WhisperCheckpoint.stored`).
    """
    if stored is not None and precision == "fp8":
        return partial(take_fp8, stored=stored)
    if stored is not None and quantizes(precision):
        return partial(take_stored, stored=stored)
    return partial(quantize_module, bits=8 if precision == "int8" else 4) if quantizes(precision) else None


_SENSITIVE = re.compile(r"\b(value|out|down)$|^decoder\..*\bup$")
_SMALL = 768
"""Widest model (Whisper small) of which the sensitive layers keep 8 bits: there they cost little memory."""


def bits_of(path: str, width: int, inputs: int, bits: int) -> int | None:
    """Bits of the layer at ``path`` in a model of a width that is to have ``bits``; None: it stays as it is.

    Measured on base: what goes straight into the residual stream suffers most, and queries and keys least. With values,
    outputs, MLPs and the embedding in 8 bits, but for the encoder's first MLP layers, the divergence from the fp32
    model falls to an eighth.
    """
    bits = 8 if width <= _SMALL and _SENSITIVE.search(path) else bits
    return None if inputs % GROUPS[bits] else bits


def quantize_module(model: Whisper, path: str, bits: int) -> None:
    """Quantise the module at ``path``, if it is one that can be: `load_whisper` calls this as soon as it is read."""
    module = model.get_submodule(path)
    wanted = None
    if isinstance(module, nn.Linear):
        wanted = bits_of(path, model.config.width, module.in_features, bits)
    elif module is model.decoder.embedding:
        wanted = bits_of(path, model.config.width, model.config.width, 8)
    if wanted is not None:
        assert isinstance(module, nn.Linear | nn.Embedding)
        weight = module.weight.detach()
        _place(model, path, quantize_int8(weight) if wanted == 8 else quantize_int4(weight))


def take_stored(model: Whisper, path: str, stored: Callable[[str], Quantized | Fp8Weight | None]) -> None:
    """Put the weight that was quantised beforehand into the module at ``path``, where there is one."""
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear | nn.Embedding) and isinstance(quantized := stored(path), Quantized):
        _place(model, path, Quantized(*(tensor.to(module.weight.device) for tensor in quantized)))


def take_fp8(model: Whisper, path: str, stored: Callable[[str], Quantized | Fp8Weight | None]) -> None:
    """The same with weights in 8-bit floats, of the encoder's layers."""
    module = model.get_submodule(path)
    if not isinstance(module, nn.Linear) or not path.startswith("encoder.layers."):
        return
    if isinstance(weight := stored(path), Fp8Weight):
        above, _, name = path.rpartition(".")
        there = Fp8Weight(*(tensor.to(module.weight.device) for tensor in weight))
        setattr(model.get_submodule(above), name, Fp8Linear(there, module.bias))


def _place(model: Whisper, path: str, quantized: Quantized) -> None:
    """Put a quantised weight in the place of the module at ``path``."""
    module, (above, _, name) = model.get_submodule(path), path.rpartition(".")
    decoder = model.decoder
    if module is decoder.embedding:
        decoder.projection = QuantizedLinear(quantized, None)
        decoder.embedding = QuantizedEmbedding(decoder.projection, torch.float32)  # type: ignore[assignment]
        return
    assert isinstance(module, nn.Linear)
    parent = model.get_submodule(above)
    setattr(parent, name, QuantizedLinear(quantized, module.bias))
    if not isinstance(parent, MLP):
        return
    up, down = parent.up, parent.down
    if isinstance(up, QuantizedLinear) and isinstance(down, QuantizedLinear):
        owner, _, leaf = above.rpartition(".")
        setattr(model.get_submodule(owner), leaf, QuantizedMLP(up, down))


def quantize(model: Whisper, precision: Precision) -> Whisper:
    """Quantise all of a model that is not quantised yet, one layer at a time. Returns the model."""
    adapt = quantizer(precision)
    if adapt is not None:
        for path in [path for path, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]:
            adapt(model, path)
    return model
