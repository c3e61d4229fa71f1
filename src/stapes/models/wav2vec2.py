"""wav2vec 2.0 (Baevski et al. 2020, https://arxiv.org/abs/2006.11477): the whole network, in plain PyTorch.

Seven convolutions turn 16 kHz audio into a feature vector every 20 ms, a transformer with convolutional positions
turns these into states, and a linear layer turns states into the logits that CTC reads. HuBERT, XLS-R and MMS are the
same network with other sizes and other weights.

Padding never changes a result. The convolutions of the feature extractor are not padded, so a real frame only depends
on real samples; what looks at all frames at once (the group norm of the base models, the positions, attention) counts
each row's real frames only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.models.waveform import Moments, is_real, window_moments, zero_padding

SAMPLE_RATE = 16_000

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Wav2Vec2Config:
    """Sizes of the network; the defaults are those of wav2vec 2.0 base and of HuBERT base.

    The fields from ``hidden_dropout`` on matter in training mode only.
    """

    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    vocab_size: int | None = None
    """Outputs of the CTC head; None: the model has none."""
    conv_channels: tuple[int, ...] = (512,) * 7
    conv_kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    conv_strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_bias: bool = False
    conv_norm: Literal["group", "layer"] = "group"
    """group: over all frames, after the first convolution only. layer: over channels, after each."""
    projection_norm: bool = True
    position_kernel: int = 128
    position_groups: int = 16
    pre_norm: bool = False
    """Where the layer norms stand: before attention and MLP, or after ("stable" and not, as Hugging Face calls it)."""
    norm_epsilon: float = 1e-5
    adapter_width: int | None = None
    """Of the small networks, one a layer, that MMS has for each language; None: there are none."""
    downsampling_layers: int = 0
    """Strided convolutions behind the encoder, which Hugging Face calls ``adapter``."""
    downsampling_kernel: int = 3
    downsampling_stride: int = 2
    downsampling_width: int | None = None
    """Channels of these; None: the width of the encoder."""
    hidden_dropout: float = 0.1
    activation_dropout: float = 0.1
    attention_dropout: float = 0.1
    projection_dropout: float = 0.0
    head_dropout: float = 0.1
    layer_drop: float = 0.1
    """Probability that a layer is left out for a whole batch (Fan et al. 2019, https://arxiv.org/abs/1909.11556)."""

    @property
    def state_width(self) -> int:
        """Width of what the head reads."""
        return (self.downsampling_width or self.width) if self.downsampling_layers else self.width

    @property
    def receptive_field(self) -> int:
        """Samples that one feature frame sees: 400 for the published models. Fewer give no frame."""
        field = 1
        for kernel, stride in reversed(list(zip(self.conv_kernels, self.conv_strides, strict=True))):
            field = (field - 1) * stride + kernel
        return field

    @property
    def hop(self) -> int:
        """Samples from the start of a feature frame to the start of the next: 320 for the published models."""
        return math.prod(self.conv_strides)

    def feature_count(self, samples: Count) -> Count:
        """Feature frames of ``samples`` samples, exactly; an int, or a tensor of ints for a tensor."""
        count = samples
        for kernel, stride in zip(self.conv_kernels, self.conv_strides, strict=True):
            count = (count - kernel) // stride + 1
        return count * (count > 0)

    def frame_count(self, samples: Count) -> Count:
        """Frames of logits of ``samples`` samples, exactly."""
        features = count = self.feature_count(samples)
        for _ in range(self.downsampling_layers):
            count = (count + 2 - self.downsampling_kernel) // self.downsampling_stride + 1
        return count * (features > 0)


BASE = Wav2Vec2Config()
LARGE = Wav2Vec2Config(
    width=1024, layers=24, heads=16, mlp_width=4096, conv_bias=True, conv_norm="layer", pre_norm=True
)
"""wav2vec 2.0 large (LV-60), HuBERT large and XLS-R 300M."""


class Statistics(NamedTuple):
    """Mean and variance over the frames of what the first convolution puts out, each (batch, channels)."""

    mean: Tensor
    variance: Tensor


class ConvLayer(nn.Module):
    """A convolution without padding, a layer norm over the channels where the model has one, GELU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride, bias=bias)
        self.norm = nn.LayerNorm(outputs) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, frames) → (batch, outputs, fewer frames)."""
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.gelu(x)


class GroupNormConvLayer(nn.Module):
    """The first layer of a group-norm model: convolution, each channel normalised over the frames, GELU.

    A convolution is linear: with the mean m and the covariance C of the windows of the waveform, the outputs of the
    kernel w have the mean w·m and the variance wᵀCw. So the statistics come from the waveform, without the outputs:
    over real windows only, in one pass over a recording of any length.
    """

    def __init__(self, outputs: int, kernel: int, stride: int, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, outputs, kernel, stride, bias=bias)
        self.norm = nn.GroupNorm(outputs, outputs)

    def moments(self, waveform: Tensor, lengths: Tensor | None = None) -> Moments:
        """What `statistics` needs to know of (batch, samples); those of the parts of a recording add up."""
        return window_moments(waveform, lengths, self.conv.kernel_size[0], self.conv.stride[0])

    def statistics(self, moments: Moments) -> Statistics:
        """Mean and variance of the outputs; float64, for the variance of a high-pass kernel is a small difference."""
        kernel = self.conv.weight[:, 0].double()
        mean = moments.mean @ kernel.T
        if self.conv.bias is not None:
            mean = mean + self.conv.bias.double()
        return Statistics(mean, ((kernel @ moments.covariance) * kernel).sum(-1).clamp(min=0))

    def forward(self, x: Tensor, statistics: Statistics) -> Tensor:
        """(batch, 1, samples) → (batch, outputs, frames)."""
        scale = self.norm.weight.double() * (statistics.variance.double() + self.norm.eps).rsqrt()
        shift = self.norm.bias.double() - statistics.mean.double() * scale
        return F.gelu(torch.addcmul(shift.to(x.dtype)[..., None], self.conv(x), scale.to(x.dtype)[..., None]))


class FeatureExtractor(nn.Module):
    """The convolutions: 400 samples in, a feature vector out, every 320 samples."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.receptive_field = config.receptive_field
        shapes = list(zip(config.conv_channels, config.conv_kernels, config.conv_strides, strict=True))
        norm = config.conv_norm == "layer"
        self.first = (
            ConvLayer(1, *shapes[0], config.conv_bias, norm)
            if norm
            else GroupNormConvLayer(*shapes[0], config.conv_bias)
        )
        self.layers = nn.ModuleList(
            ConvLayer(inputs, *shape, config.conv_bias, norm)
            for inputs, shape in zip(config.conv_channels, shapes[1:], strict=False)
        )

    def forward(self, waveform: Tensor, lengths: Tensor | None = None, statistics: Statistics | None = None) -> Tensor:
        """(batch, samples) → (batch, frames, channels); one frame at least, which is not real in too short audio.

        ``lengths`` (batch,) are real samples; None: all are. ``statistics`` are those of a whole recording of which
        the rows are windows; None: each row is a recording. Only group-norm models have a use for them.
        """
        waveform = zero_padding(waveform, lengths)
        x = F.pad(waveform, (0, max(0, self.receptive_field - waveform.shape[1])))[:, None]
        x = x.to(self.first.conv.weight.dtype)
        if isinstance(self.first, GroupNormConvLayer):
            statistics = statistics or self.first.statistics(self.first.moments(waveform, lengths))
            x = self.first(x, statistics)
        else:
            x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.transpose(1, 2)


class Projection(nn.Module):
    """Features to the width of the encoder."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        channels = config.conv_channels[-1]
        self.norm = nn.LayerNorm(channels, eps=config.norm_epsilon) if config.projection_norm else None
        self.linear = nn.Linear(channels, config.width)
        self.dropout = nn.Dropout(config.projection_dropout)

    def normalize(self, features: Tensor) -> Tensor:
        """What pre-training's quantiser reads too."""
        return self.norm(features) if self.norm is not None else features

    def project(self, normed: Tensor) -> Tensor:
        """Normalised features to the width of the encoder."""
        return self.dropout(self.linear(normed))

    def forward(self, features: Tensor) -> Tensor:
        return self.project(self.normalize(features))


class PositionalConvolution(nn.Module):
    """Where a frame stands, told by what is around it: a wide grouped convolution (its weight norm is folded)."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        kernel = config.position_kernel
        self.conv = nn.Conv1d(config.width, config.width, kernel, padding=kernel // 2, groups=config.position_groups)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, frames, width), zero where padded → the same shape."""
        positions = self.conv(x.transpose(1, 2))[..., : x.shape[1]]  # an even kernel gives one frame too many
        return F.gelu(positions).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        """(batch, frames, width) → (batch, heads, frames, head width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (batch, frames, width). mask: (batch, 1, 1, frames), true where a frame may be looked at."""
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        return self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Weigh the values, each (batch, heads, frames, head width): all of a layer that looks at other frames."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_width)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.down = nn.Linear(config.mlp_width, config.width)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation_dropout(F.gelu(self.up(x)))))


class LanguageAdapter(nn.Module):
    """What MMS (Pratap et al. 2023, https://arxiv.org/abs/2305.13516) learns per language and layer."""

    def __init__(self, width: int, adapter_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, adapter_width)
        self.up = nn.Linear(adapter_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.down(self.norm(x))))


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each with a layer norm before it or after it."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        width = config.width
        self.pre_norm = config.pre_norm
        self.attention_norm = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.attention = Attention(width, config.heads, config.attention_dropout)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.mlp_norm = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.mlp = MLP(config)
        self.adapter = LanguageAdapter(width, config.adapter_width) if config.adapter_width else None

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (batch, frames, width); mask as in `Attention`."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), mask))
            x = x + self.mlp(self.mlp_norm(x))
        else:
            x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
            x = self.mlp_norm(x + self.mlp(x))
        return x if self.adapter is None else x + self.adapter(x)


class Encoder(nn.Module):
    """Projection, positions, a stack of layers."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.config = config
        self.projection = Projection(config)
        self.mask_embedding = nn.Parameter(torch.zeros(config.width))
        """Stands in for frames that training hides."""
        self.positions = PositionalConvolution(config)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))

    def forward(self, features: Tensor, lengths: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """(batch, frames, channels) → (batch, frames, width); what is beyond ``lengths`` means nothing.

        ``lengths`` (batch,) are real frames; None: all are, which spares attention its mask. ``hidden``
        (batch, frames), bool, are the frames that training hides. In training mode layers are dropped by the CPU's
        generator of random numbers, so that processes with the same seed drop the same.
        """
        return self.transform(self.projection(features), lengths, hidden)

    def transform(self, x: Tensor, lengths: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """The same from projected features, (batch, frames, width)."""
        x = self.enter(x, lengths, hidden)
        return self.leave(self.through(x, *self.beside(x.shape[1], lengths, x.device)))

    def enter(self, x: Tensor, lengths: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """What the first layer reads of projected features, (batch, frames, width)."""
        if hidden is not None:
            x = torch.where(hidden[..., None], self.mask_embedding, x)
        x = zero_padding(x, lengths)
        x = x + self.positions(x)
        return self.dropout(x if self.config.pre_norm else self.norm(x))

    def beside(self, frames: int, lengths: Tensor | None, device: torch.device) -> tuple[Tensor | None]:
        """What each layer is given beside the states: the mask of `Attention`."""
        if lengths is None:
            return (None,)
        # A row without a real frame looks at its first one: attention to nothing is not a number in some kernels.
        return (is_real(lengths.clamp(min=1), frames)[:, None, None],)

    def through(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """All layers."""
        for layer in self.layers:
            if not (self.training and self.config.layer_drop and torch.rand(()) < self.config.layer_drop):
                x = layer(x, mask)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """What is behind the last layer."""
        return self.norm(x) if self.config.pre_norm else x


class Downsampling(nn.Module):
    """Strided gated convolutions behind the encoder."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.kernel, self.stride = config.downsampling_kernel, config.downsampling_stride
        width = config.state_width
        self.projection = self.norm = None
        if width != config.width:
            self.projection, self.norm = nn.Linear(config.width, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, self.kernel, self.stride, padding=1) for _ in range(config.downsampling_layers)
        )

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(batch, frames, width) → (batch, fewer frames, width). No layer is ever dropped: the frames must fit."""
        if self.projection is not None and self.norm is not None:
            x = self.norm(self.projection(x))
        for layer in self.layers:
            x = F.glu(layer(zero_padding(x, lengths).transpose(1, 2)), dim=1).transpose(1, 2)
            if lengths is not None:
                lengths = (lengths + 2 - self.kernel) // self.stride + 1
        return x


class Wav2Vec2(nn.Module):
    """The network."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.config = config
        self.feature_extractor = FeatureExtractor(config)
        self.encoder = Encoder(config)
        self.downsampling = Downsampling(config) if config.downsampling_layers else None
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.state_width, config.vocab_size) if config.vocab_size else None

    def set_head(self, head: nn.Linear) -> None:
        """Give the model another vocabulary, as for another language or for fine-tuning."""
        self.head = head
        self.config = replace(self.config, vocab_size=head.out_features)

    def states(
        self,
        waveform: Tensor,
        lengths: Tensor | None = None,
        statistics: Statistics | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States (batch, frames, state width) and how many of each row are real, (batch,) int64.

        waveform: (batch, samples), normalised where the checkpoint asks for it (`normalize_waveform`). ``lengths``
        (batch,) are real samples; None: all are. ``statistics``: see `FeatureExtractor`; ``hidden``: see `Encoder`.
        """
        features = self.feature_extractor(waveform, lengths, statistics)
        counts = None if lengths is None else self.config.feature_count(lengths)
        x = self.encoder(features, counts, hidden)
        if self.downsampling is not None:
            x = self.downsampling(x, counts)
        if lengths is None:
            lengths = torch.full((len(waveform),), waveform.shape[1], device=waveform.device)
        return x, self.config.frame_count(lengths)

    def forward(
        self,
        waveform: Tensor,
        lengths: Tensor | None = None,
        statistics: Statistics | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits (batch, frames, vocabulary) and real frames (batch,); arguments as in `states`."""
        assert self.head is not None, "this model has no CTC head: see set_head"
        states, counts = self.states(waveform, lengths, statistics, hidden)
        return self.head(self.head_dropout(states)), counts


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Draw the weights that training from nothing starts with, as fairseq and ``transformers`` do."""
    for module in model.modules():
        if isinstance(module, PositionalConvolution):
            conv = module.conv
            nn.init.normal_(conv.weight, std=2 / math.sqrt(conv.kernel_size[0] * conv.in_channels))
        elif isinstance(module, ConvLayer | GroupNormConvLayer):
            nn.init.kaiming_normal_(module.conv.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Encoder):
            nn.init.uniform_(module.mask_embedding)
        if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
            nn.init.zeros_(module.bias)
