"""wav2vec 2.0 for training on a GPU: the plain network of `wav2vec2`, whose parts compute by fused kernels.

`fuse` changes how a network computes, from outside, and neither its parameters nor its results beyond rounding. Its
convolutions become products with windows of frames, for which neither cuDNN nor MIOpen has to find a kernel for every
length; bias, norm, GELU, dropout and residual sums take one pass over memory each way; no mask of dropout is kept.
A network that is frozen in part costs no gradients there, and one in evaluation mode none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stapes.kernels.dropout import draw
from stapes.kernels.jit import can_launch
from stapes.kernels.wave_convolution import Windows
from stapes.kernels.wave_moments import moments
from stapes.models.fused_functions import (
    PARTS,
    Activate,
    AddNorm,
    FirstWindows,
    GeluDropout,
    LongProduct,
    PositionProduct,
    Product,
    QueryKeyValue,
    position_blocks,
)
from stapes.models.wav2vec2 import (
    ConvLayer,
    Encoder,
    EncoderLayer,
    FeatureExtractor,
    GroupNormConvLayer,
    PositionalConvolution,
    Statistics,
)
from stapes.models.waveform import Moments, zero_padding


def can_fuse(device: torch.device) -> bool:
    """Whether the kernels can be tried on tensors of this device."""
    return can_launch(device)


def fuse(extractor: FeatureExtractor, encoder: Encoder, *, layers: bool = True) -> None:
    """Have a network's convolutions compute by fused kernels, and with ``layers`` its transformer too.

    For networks on a GPU whose parameters are whole tensors when a part is called: alone, in DDP and in FSDP2; not
    where one layer's weights are shared out (tensor parallelism) or where layers are compiled, which fuses as well.
    """
    extractor.forward = partial(fused_features, extractor)
    encoder.positions.forward = partial(fused_positions, encoder.positions)
    for layer in encoder.layers if layers else ():
        assert isinstance(layer, EncoderLayer)
        layer.forward = partial(fused_layer, layer)


def product_dtype(x: Tensor) -> torch.dtype:
    """What products are computed in: autocast's, else that of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def fused_features(
    extractor: FeatureExtractor, waveform: Tensor, lengths: Tensor | None = None, statistics: Statistics | None = None
) -> Tensor:
    """`FeatureExtractor.forward`; beyond a row's real frames the features mean nothing, and are finite."""
    convolutions = [extractor.first, *extractor.layers]
    dtype = product_dtype(waveform)
    with torch.autocast(waveform.device.type, enabled=False):
        shapes = [_shape(layer) for layer in convolutions]
        waveform = zero_padding(waveform, lengths).float()
        rows, samples = waveform.shape
        frames = max(samples, extractor.receptive_field)
        hop = 1
        for size, stride in shapes:
            frames, hop = (frames - size) // stride + 1, hop * stride
        span = -(-max(samples, extractor.receptive_field) // (hop * PARTS)) * PARTS
        first, (_, stride) = extractor.first, shapes[0]
        seen = [Windows(*shape) for shape in shapes[1:]]
        gain, shift, eps = _first_norm(first, waveform, lengths, statistics)
        x = FirstWindows.apply(
            waveform.flatten(),
            _slots(rows, samples, span, hop, lengths, waveform.device),
            rows,
            _conv(first).weight[:, 0].float().t().contiguous(),
            _bias(first),
            gain,
            shift,
            eps,
            stride,
            hop // stride,
            seen[0],
            dtype,
        )
        for layer, windows in zip(extractor.layers, [*seen[1:], Windows()], strict=True):
            assert isinstance(layer, ConvLayer)
            weight = layer.conv.weight.float().transpose(1, 2).flatten(1)  # the frames of a window side by side
            norm = layer.norm
            of_norm = (None, None, 0.0) if norm is None else (norm.weight.float(), norm.bias.float(), norm.eps)
            x = Activate.apply(LongProduct.apply(x, weight), _bias(layer), *of_norm, windows)
        return x.unflatten(0, (rows, span))[:, :frames]


def fused_positions(convolution: PositionalConvolution, x: Tensor) -> Tensor:
    """`PositionalConvolution.forward`: (batch, frames, width), zero where padded → the same shape."""
    dtype = product_dtype(x)
    conv = convolution.conv
    assert conv.bias is not None
    with torch.autocast(x.device.type, enabled=False):
        rows, frames, _ = x.shape
        blocks = position_blocks(rows, frames, None, x.device)
        product = PositionProduct.apply(x.to(dtype).contiguous(), conv.weight, blocks, conv.groups)
        return GeluDropout.apply(product.flatten(0, 1), conv.bias.float(), None).view_as(x)


def fused_layer(layer: EncoderLayer, x: Tensor, mask: Tensor | None) -> Tensor:
    """`EncoderLayer.forward`. The residual stream has the dtype of products."""
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        shape = x.shape
        x = x.to(dtype).flatten(0, 1)
        dropout = layer.dropout.p if layer.training else 0.0
        behind_mlp = layer.mlp.dropout.p if layer.training else 0.0
        attention, mlp = layer.attention, layer.mlp
        if layer.pre_norm:
            x, normed = _add_norm(x, None, None, layer.attention_norm, 0.0)
            value, _ = _attend(layer, normed.view(shape), mask)
            x, normed = _add_norm(x, value, attention.out, layer.mlp_norm, dropout)
            value, norm = _mlp(layer, normed)[0], None
        else:
            value, x = _attend(layer, x.view(shape), mask)
            _, x = _add_norm(x, value, attention.out, layer.attention_norm, dropout)
            value, x = _mlp(layer, x)
            norm = layer.mlp_norm
        # Of the shape that it is to have: FSDP2 wants no views as results.
        total, normed = _add_norm(x.view(shape), value.view(shape), mlp.down, norm, behind_mlp)
        x = total if norm is None else normed
    return x if layer.adapter is None else x + layer.adapter(x).to(x.dtype)


def _attend(layer: EncoderLayer, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(batch, frames, width) → (batch × frames, width), the bias still to be added; and x like that, to add it to."""
    attention = layer.attention
    parts = (attention.query, attention.key, attention.value)
    # Rounded one by one: each then has a gradient of its own to take over, where of one matrix it would copy its part.
    weight = torch.cat([part.weight.to(x.dtype) for part in parts])
    bias = torch.cat([part.bias.float() for part in parts])
    query, key, value, x = QueryKeyValue.apply(x, weight, bias, attention.heads)
    out = attention.attend(query, key, value, mask).transpose(1, 2).flatten(2).flatten(0, 1)
    return out @ attention.out.weight.to(x.dtype).t(), x.flatten(0, 1)


def _mlp(layer: EncoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, width) → the same, the bias still to be added; and x, to add it to."""
    up, down = layer.mlp.up, layer.mlp.down
    dropout = draw(layer.mlp.activation_dropout.p if layer.training else 0.0, x.device)
    inner, x = Product.apply(x, up.weight)
    return GeluDropout.apply(inner, up.bias.float(), dropout) @ down.weight.to(x.dtype).t(), x


def _add_norm(
    x: Tensor, value: Tensor | None, linear: nn.Linear | None, norm: nn.LayerNorm | None, probability: float
) -> tuple[Tensor, Tensor]:
    """``linear`` is what ``value`` came from, whose bias is still to be added."""
    bias = None if linear is None else linear.bias.float()
    gain, shift, eps = (None, None, 0.0) if norm is None else (norm.weight.float(), norm.bias.float(), norm.eps)
    return AddNorm.apply(x, value, bias, gain, shift, eps, draw(probability, x.device))


def _first_norm(
    first: nn.Module, waveform: Tensor, lengths: Tensor | None, statistics: Statistics | None
) -> tuple[Tensor, Tensor, float]:
    """Gain, shift and epsilon as `FirstWindows` wants them."""
    if isinstance(first, ConvLayer):
        norm = first.norm
        if norm is None:
            raise AssertionError("a model without a group norm has a layer norm behind every convolution")
        return norm.weight.float(), norm.bias.float(), norm.eps
    assert isinstance(first, GroupNormConvLayer)
    conv, norm = first.conv, first.norm
    if statistics is None:
        statistics = first.statistics(_moments(waveform, lengths, conv.kernel_size[0], conv.stride[0]))
    scale = norm.weight.double() * (statistics.variance.double() + norm.eps).rsqrt()
    shift = norm.bias.double() - statistics.mean.double() * scale
    return scale.float(), shift.float(), 0.0


def _moments(waveform: Tensor, lengths: Tensor | None, kernel: int, stride: int) -> Moments:
    """`GroupNormConvLayer.moments`."""
    rows, samples = waveform.shape
    begins = torch.arange(rows, device=waveform.device) * samples
    real = torch.full_like(begins, samples) if lengths is None else lengths
    recordings = torch.stack([begins, real]).int()
    sums = moments(waveform.flatten(), recordings, max(samples, kernel), kernel, stride)
    count = ((real - kernel).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    return Moments(count.double(), sums[:, -1], sums[:, :-1])


def _slots(rows: int, samples: int, span: int, hop: int, lengths: Tensor | None, device: torch.device) -> Tensor:
    """`first_convolution`'s table for rows of ``span`` slots each."""
    row, begun = torch.arange(rows, device=device)[:, None], torch.arange(span, device=device)[None] * hop
    real = torch.full_like(row, samples) if lengths is None else lengths[:, None]
    return torch.stack(torch.broadcast_tensors(row * samples + begun, real - begun, row)).flatten(1).int()


def _conv(layer: nn.Module) -> nn.Conv1d:
    assert isinstance(layer, ConvLayer | GroupNormConvLayer)
    return layer.conv


def _shape(layer: nn.Module) -> tuple[int, int]:
    conv = _conv(layer)
    return conv.kernel_size[0], conv.stride[0]


def _bias(layer: nn.Module) -> Tensor:
    conv = _conv(layer)
    return conv.weight.new_zeros(conv.out_channels, dtype=torch.float32) if conv.bias is None else conv.bias.float()


__all__: Sequence[str] = ("can_fuse", "fuse", "fused_features", "fused_layer", "fused_positions", "product_dtype")
