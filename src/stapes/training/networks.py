"""The network of a run: built from nothing or on an encoder that is there, and written as a model in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.spectrogram_models import (
    KINDS,
    build,
    load_spectrogram_model,
    load_whisper_encoder,
    open_spectrogram_model,
    save_spectrogram_model,
)
from stapes.checkpoints.student import with_decoder_layers
from stapes.checkpoints.tokenizer import find_tokenizer
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, load_wav2vec2, open_wav2vec2, save_wav2vec2
from stapes.checkpoints.wav2vec2_pretraining import save_pretraining
from stapes.data.manifest import Manifest
from stapes.data.masking import SpecAugment, span_mask
from stapes.data.reading import read_promised
from stapes.errors import AudioError, ModelError, UsageError
from stapes.inference.spectrograms import log_mel_rows
from stapes.models.conformer import Conformer, ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig, WhisperEncoder
from stapes.models.hybrid import Hybrid, HybridConfig
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining
from stapes.models.whisper import Whisper
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.text.files import read_json
from stapes.training.adapters import build_adapter, save_language
from stapes.training.config import MaskOptions, ModelOptions, TrainConfig
from stapes.training.distill import DistilledCTCObjective, distilled_whisper, open_ctc_teacher
from stapes.training.objectives import Objective, SpectrogramObjective, Wav2Vec2Objective
from stapes.training.pretraining import ContrastiveObjective, build_pretraining
from stapes.training.whisper import WhisperObjective, build_whisper, save_whisper, whisper_layers
from stapes.training.whisper_labels import WhisperLabels

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_LEAST_DEVIATION = 0.02
"""Of a mel bin over the corpus, on Whisper's scale: what does not change is not made loud."""

_BLANK_BIAS = 3.0
"""The blank is e³ times as likely as any other token before anything is learnt."""


@dataclass(frozen=True)
class Source:
    """The model that training starts from, as it lies on this machine."""

    path: Path
    kind: str
    """``"wav2vec2"`` (HuBERT too), ``"whisper"``, or a ``model_type`` of ours."""
    parts: list[Path] | None = None


def find_source(init: str) -> Source:
    """Find ``model.init``: a path, or a name that is on this machine or can be fetched. Raises ModelError."""
    found = catalog.find(init)
    if found is None:
        if catalog.repository_of(init) is None:
            raise ModelError(f"model.init is {init!r}, and there is no such model or folder; {catalog.hint(init)}")
        found = catalog.Location(catalog.pull(init))
    settings = found.path / "config.json"
    kind = str(read_json(settings).get("model_type", "whisper")) if settings.exists() else "whisper"
    if kind in ("wav2vec2", "hubert"):
        return Source(found.path, "wav2vec2")
    return Source(found.path, kind if kind in KINDS else "whisper", found.parts)


def whisper_source(config: TrainConfig) -> tuple[Source, WhisperCheckpoint]:
    """The Whisper that is fine-tuned, or the student of distill.teacher. Raises UsageError where model.init is none."""
    init = config.model.init or config.distill.teacher
    source = None if init is None else find_source(init)
    if source is None or source.kind != "whisper":
        raise UsageError(f"model.init is {init!r}: `stapes train {config.recipe}` starts from a Whisper, such as base")
    checkpoint = open_checkpoint(source.path, init, source.parts)
    if config.distill.decoder_layers is not None:
        checkpoint = with_decoder_layers(checkpoint, config.distill.decoder_layers, config.distill.layers)
    return source, checkpoint


def open_labels(config: TrainConfig) -> WhisperLabels:
    """How Whisper's texts are written. Raises UsageError, ModelError."""
    _, checkpoint = whisper_source(config)
    file, tokenizer = find_tokenizer(checkpoint)
    reused = {**checkpoint.language_tokens, **config.model.language_tokens}
    return WhisperLabels(tokenizer, file, checkpoint.config.text_context, config.labels, reused)


def build_network(
    config: TrainConfig, tokenizer: CTCTokenizer | WhisperLabels | None, seed: int
) -> tuple[nn.Module, Source | None]:
    """The network on the CPU in float32, ready to train. Raises ModelError, UsageError."""
    options, objective = config.model, config.objective
    torch.manual_seed(seed)
    if objective.kind == "whisper":
        source, checkpoint = whisper_source(config)
        return build_whisper(checkpoint, config), source
    source = None if options.init is None else find_source(options.init)
    if objective.kind == "contrastive":
        if source is not None and source.kind != "wav2vec2":
            raise UsageError(
                f"model.init is {options.init!r}: wav2vec 2.0 is what can be pre-trained; name one, or none"
            )
        return build_pretraining(config, None if source is None else source.path), source
    assert isinstance(tokenizer, CTCTokenizer)
    if source is not None and source.kind == "wav2vec2":
        if objective.kind != "ctc":
            raise UsageError(f"objective.kind is {objective.kind}: wav2vec 2.0 and HuBERT are trained with ctc")
        if options.language is not None:
            return build_adapter(source.path, options, tokenizer), source
        network = _wav2vec2(source, options, tokenizer)
        # What takes part in no step must not be waited for by other processes.
        network.encoder.mask_embedding.requires_grad_(bool(objective.hide_time))
        return network, source
    if objective.hide_time:
        raise UsageError("objective.hide_time is for wav2vec 2.0 and HuBERT; use masks.time_masks here")
    encoder = _encoder(options, source)
    if objective.kind == "ctc":
        network = build(CTCConfig(encoder.config, tokenizer.size, options.head_dropout))
    else:
        if encoder.config.state_width % options.decoder_heads:
            raise UsageError(f"model.decoder_heads must divide {encoder.config.state_width}, the encoder's width")
        network = build(
            HybridConfig(
                encoder.config,
                tokenizer.size,
                decoder_layers=options.decoder_layers,
                decoder_heads=options.decoder_heads,
                decoder_mlp_width=options.decoder_mlp_width,
                decoder_dropout=options.decoder_dropout,
                has_ctc=objective.kind == "hybrid",
                head_dropout=options.head_dropout,
                search_ctc_weight=objective.ctc_weight,
            )
        )
    network.encoder = encoder
    if network.head is not None:
        _start_silent(network.head, tokenizer.blank_id)
    network.train().requires_grad_()
    if isinstance(encoder, Conformer):
        encoder.mel_mean.requires_grad_(False)
        encoder.mel_deviation.requires_grad_(False)
    return network, source


def _start_silent(head: nn.Linear, blank: int) -> None:
    """Have a new CTC head say almost nothing at first, whatever it hears.

    From logits at random it may learn to say the tokens where it hears silence, and a small corpus is not enough to
    unlearn that; from here it has to find out what they sound like.
    """
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[blank] = _BLANK_BIAS


def _encoder(options: ModelOptions, source: Source | None) -> Conformer | WhisperEncoder:
    if source is None:
        return Conformer(
            ConformerConfig(
                mel_bins=options.mel_bins,
                width=options.width,
                layers=options.layers,
                heads=options.heads,
                mlp_width=options.mlp_width,
                conv_kernel=options.conv_kernel,
                subsampling=options.subsampling,
                subsampling_channels=options.subsampling_channels,
                normalize_recordings=options.normalize_recordings,
                dropout=options.dropout,
            )
        )
    if source.kind in KINDS:
        checkpoint = open_spectrogram_model(source.path)
        inner = replace(checkpoint.config.encoder, dropout=options.dropout)
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, encoder=inner))
        return load_spectrogram_model(checkpoint, torch.float32, torch.device("cpu"), trainable=True).encoder
    return load_whisper_encoder(open_checkpoint(source.path, parts=source.parts), options.dropout)


def _wav2vec2(source: Source, options: ModelOptions, tokenizer: CTCTokenizer) -> Wav2Vec2:
    checkpoint = open_wav2vec2(source.path)
    inner = replace(
        checkpoint.config,
        hidden_dropout=options.dropout,
        activation_dropout=options.mlp_dropout,
        attention_dropout=options.dropout,
        head_dropout=options.head_dropout,
        layer_drop=options.layer_drop,
    )
    network = load_wav2vec2(replace(checkpoint, config=inner), torch.float32, torch.device("cpu"), trainable=True)
    if not bool(network.encoder.mask_embedding.any()):
        nn.init.uniform_(network.encoder.mask_embedding)
    head = nn.Linear(inner.state_width, tokenizer.size)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    network.set_head(head)
    return network


@torch.no_grad()
def measure_corpus(network: nn.Module, manifest: Manifest, most: int = 300) -> None:
    """Tell a new Conformer the mean and the deviation of each mel bin over the corpus, from a few hundred utterances.

    Those that cannot be read are passed over: training will name them. Wav2vec 2.0, which hears waveforms, is told
    nothing.
    """
    if isinstance(network, Wav2Vec2Pretraining):
        return
    assert isinstance(network, CTC | Hybrid)
    assert isinstance(network.encoder, Conformer)
    encoder = network.encoder
    count = 0
    total = torch.zeros(2, encoder.config.mel_bins, dtype=torch.float64)
    for number in range(0, len(manifest), max(1, len(manifest) // most)):
        utterance = manifest[number]
        try:
            pcm = read_promised(utterance.audio, utterance.start, utterance.duration, utterance.channel)
        except AudioError:
            continue
        mel = log_mel_rows(torch.from_numpy(pcm)[None], None, encoder.config.mel_bins)[0][0].double()
        if bool(mel.isfinite().all()):
            total += torch.stack([mel.sum(1), mel.square().sum(1)])
            count += mel.shape[1]
    if count:
        mean = total[0] / count
        encoder.mel_mean.copy_(mean)
        encoder.mel_deviation.copy_((total[1] / count - mean.square()).clamp(min=0).sqrt().clamp(min=_LEAST_DEVIATION))


def build_objective(
    config: TrainConfig,
    network: nn.Module,
    source: Source | None,
    tokenizer: CTCTokenizer | WhisperLabels | None,
    dtype: torch.dtype,
) -> Objective:
    """What is minimised. dtype: of products."""
    options = config.objective
    if isinstance(network, Whisper):
        assert isinstance(tokenizer, WhisperLabels)
        checkpoint = whisper_source(config)[1]
        suppressed = checkpoint.suppress_tokens
        settings: dict[str, Any] = {
            "label_smoothing": options.label_smoothing,
            "mask": _spec_augment(config.masks),
            "suppressed": suppressed if suppressed is not None else tokenizer.tokenizer.non_speech_tokens(),
        }
        if config.distill.teacher is not None:
            taught = find_source(config.distill.teacher)
            return distilled_whisper(
                taught.path, taught.parts, checkpoint, config.distill, network, tokenizer, dtype, settings
            )
        return WhisperObjective(network, tokenizer, dtype, **settings)
    if isinstance(network, Wav2Vec2Pretraining):
        normalize = True if source is None else open_wav2vec2(source.path).normalize
        return ContrastiveObjective(network, dtype, config.pretraining, options, normalize=normalize)
    assert isinstance(tokenizer, CTCTokenizer)
    if isinstance(network, Wav2Vec2):
        assert source is not None
        hide = None
        if options.hide_time:
            hide = partial(span_mask, probability=options.hide_time, length=options.hide_time_length)
        normalize = open_wav2vec2(source.path).normalize
        return Wav2Vec2Objective(network, tokenizer, dtype, normalize=normalize, hide=hide)
    assert isinstance(network, CTC | Hybrid)
    if config.distill.teacher is not None:
        assert isinstance(network, CTC)
        taught = find_source(config.distill.teacher)
        teacher = open_ctc_teacher(taught.path, taught.kind, network, tokenizer)
        mask = _spec_augment(config.masks)
        return DistilledCTCObjective(network, tokenizer, dtype, teacher=teacher, options=config.distill, mask=mask)
    weight = {"ctc": 1.0, "attention": 0.0, "hybrid": options.ctc_weight}[options.kind]
    return SpectrogramObjective(
        network,
        tokenizer,
        dtype,
        ctc_weight=weight,
        label_smoothing=options.label_smoothing,
        mask=_spec_augment(config.masks),
    )


def _spec_augment(masks: MaskOptions) -> SpecAugment | None:
    if not masks.time_masks and not masks.frequency_masks:
        return None
    return SpecAugment(
        frequency_masks=masks.frequency_masks,
        frequency_width=masks.frequency_width,
        time_masks=masks.time_masks,
        time_width=masks.time_width,
        time_fraction=masks.time_fraction,
        value=None,  # the mean: silence is not 0 on Whisper's scale
    )


def layers_of(network: nn.Module) -> list[nn.Module]:
    """The layers of the encoder: what is computed again, compiled and shared out one by one."""
    if isinstance(network, Whisper):
        return whisper_layers(network)
    assert isinstance(network, CTC | Hybrid | Wav2Vec2 | Wav2Vec2Pretraining)
    return list(network.encoder.layers)


def head_shape(network: nn.Module) -> tuple[int, int] | None:
    """(Attention heads, width of each) of the encoder; None: it has no attention."""
    attention = getattr(layers_of(network)[0], "attention", None)
    return None if attention is None else (attention.heads, attention.query.weight.shape[-1] // attention.heads)


def save_model(
    folder: Path,
    network: nn.Module,
    source: Source | None,
    weights: Mapping[str, Tensor],
    tokenizer: CTCTokenizer | WhisperLabels | None,
    dtype: torch.dtype,
    config: TrainConfig,
) -> None:
    """Write ``weights`` as a model that ``stapes transcribe --model`` opens, and ``transformers`` where it can.

    ``network`` says which sizes; its own weights do not matter. Raises OutputError where the folder cannot be written.
    """
    converted = {name: tensor.to(dtype) for name, tensor in weights.items()}
    if isinstance(network, Whisper):
        assert isinstance(tokenizer, WhisperLabels)
        save_whisper(folder, whisper_source(config)[1], converted, tokenizer, config)
        return
    if isinstance(network, Wav2Vec2Pretraining):
        before = None if source is None else open_wav2vec2(source.path)
        save_pretraining(
            folder,
            network.config,
            converted,
            normalize=before is None or before.normalize,
            settings=None if before is None else before.settings,
        )
        return
    assert isinstance(tokenizer, CTCTokenizer)
    if isinstance(network, CTC | Hybrid):
        save_spectrogram_model(folder, network.config, converted, tokenizer, dtype)
        return
    assert isinstance(network, Wav2Vec2)
    assert source is not None
    if config.model.language is not None:
        save_language(folder, source.path, network, converted, tokenizer, config.model)
        return
    with torch.device("meta"):
        copy = Wav2Vec2(network.config)
    copy.load_state_dict(converted, assign=True)
    checkpoint: Wav2Vec2Checkpoint = open_wav2vec2(source.path)
    # Adapters and vocabularies of languages belonged to the model before.
    save_wav2vec2(replace(checkpoint, tokenizer=tokenizer, language=None, languages=()), folder, copy)
