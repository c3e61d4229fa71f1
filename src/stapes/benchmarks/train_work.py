"""What a training step costs at least: the floating-point operations of its products."""

from __future__ import annotations

from stapes.models.wav2vec2 import Wav2Vec2Config
from stapes.models.wav2vec2_pretraining import Wav2Vec2PretrainingConfig


def training_operations(
    config: Wav2Vec2Config, samples: int, *, frozen: bool, pretraining: Wav2Vec2PretrainingConfig | None = None
) -> float:
    """Of one recording of so many samples, forwards and backwards; a multiplication and its addition are two.

    Forwards a convolution costs 2 · frames · kernel · inputs · outputs, a layer 2 T (4 w² + 2 w m) + 4 T² w, where T
    are its frames, w its width and m that of its MLP. Backwards a product costs that again for its input and again for
    its weight: nothing for convolutions that are ``frozen``, and the first convolution's input needs none. What
    attention computes again backwards is not counted. Layers are left out by chance in their share of ``layer_drop``.
    Pre-training has the quantiser, two projections and the similarities of T² pairs of frames besides.
    """
    count, inputs, front, first = samples, 1, 0.0, 0.0
    for outputs, kernel, stride in zip(config.conv_channels, config.conv_kernels, config.conv_strides, strict=True):
        count = max(0, (count - kernel) // stride + 1)
        front += 2 * count * kernel * inputs * outputs
        first = first or front
        inputs = outputs
    width, mlp = config.width, config.mlp_width
    rest = 2.0 * count * inputs * width + 2 * count * width * width // config.position_groups * config.position_kernel
    layers = config.layers * (1 - config.layer_drop)
    rest += layers * (2 * count * (4 * width**2 + 2 * width * mlp) + 4 * count**2 * width)
    rest += 2 * count * width * (config.vocab_size or 0)
    if pretraining is not None:
        code, compared = pretraining.code_width, pretraining.projection_width
        rest += 2 * count * inputs * pretraining.code_groups * pretraining.codes
        rest += 2 * count * (width + code) * compared + 2 * count**2 * compared
    return 3 * rest + (front if frozen else 3 * front - first)
