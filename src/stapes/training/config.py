"""Every setting of a training run, once: name, default, range and doc.

A recipe (`stapes.training.recipes`) is a function that returns a `TrainConfig`; a TOML file and ``--set`` change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from stapes.data.options import AugmentOptions
from stapes.errors import UsageError
from stapes.training.ranges import RANGES

ObjectiveKind = Literal["ctc", "attention", "hybrid", "whisper", "contrastive"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Strategy = Literal["auto", "single", "ddp", "fsdp", "deepspeed"]


@dataclass(kw_only=True, slots=True)
class DataOptions:
    """What is learnt from, and how it is batched."""

    train: list[str] = field(default_factory=list)
    """Manifests to train on, as `stapes prepare` writes them."""
    dev: list[str] = field(default_factory=list)
    """Manifests that choose the best checkpoint. None: there is no choice, the last one is the result."""
    vocabulary: str = "char"
    """char: the characters of the training text; bpe or unigram: parts of its words; words: each word, where there are
    few; teacher: that of distill.teacher; or a folder with a vocab.json."""
    vocabulary_size: int = 500
    """Tokens of a bpe or unigram vocabulary."""
    batch_seconds: float = 240.0
    """Audio in one batch of one process, padding included."""
    max_rows: int | None = None
    """Utterances in one batch of one process at most."""
    buckets: int = 12
    """How many different lengths batches have at most."""
    rehearsal: list[str] = field(default_factory=list)
    """whisper: manifests of what must not be forgotten; some of them are in each batch."""
    rehearsal_share: float = 0.25
    """Share of each batch's utterances that come from these."""
    workers: int = 2
    """Processes that read and augment audio, for each process that trains; 0: it does so itself."""


@dataclass(kw_only=True, slots=True)
class MaskOptions:
    """SpecAugment (Park et al. 2019): what is hidden of each log-mel spectrogram."""

    time_masks: int = 0
    """Stretches of time that are hidden; 0: none."""
    time_width: int = 100
    """The longest of these, in frames of 10 ms."""
    time_fraction: float = 0.5
    """What all of these cover at most of an utterance."""
    frequency_masks: int = 0
    """Bands of frequency that are hidden; 0: none."""
    frequency_width: int = 27
    """The widest of these, in mel bins."""


@dataclass(kw_only=True, slots=True)
class ModelOptions:
    """The network."""

    init: str | None = None
    """The model whose encoder training starts from: Whisper (a name, a folder, a .pt file), wav2vec 2.0, HuBERT, or
    one trained here. None: a network of the sizes below, from nothing: a Conformer, or a wav2vec 2.0 to pre-train."""
    mel_bins: int = 80
    """Bands of the log-mel spectrogram."""
    width: int = 256
    """Width of the encoder."""
    layers: int = 12
    """Layers of the encoder."""
    heads: int = 4
    """Attention heads of the encoder. Conformer, 0: convolutions alone, which cannot learn whole sentences by heart."""
    mlp_width: int = 1024
    """Inner width of its MLPs."""
    conv_kernel: int = 31
    """Frames that a layer's convolution sees; odd."""
    subsampling: Literal[2, 4, 8] = 4
    """Frames of 10 ms in one state."""
    subsampling_channels: int = 256
    """Channels of the convolutions in front."""
    normalize_recordings: bool = False
    """Conformer: give each mel bin mean 0 and deviation 1 over each recording, not over the corpus alone. Not for
    recordings of one word."""
    dropout: float = 0.1
    """Dropout of the encoder: of hidden states and attention."""
    activation_dropout: float | None = None
    """wav2vec 2.0: dropout inside its MLPs; by default as dropout."""
    head_dropout: float = 0.1
    """Dropout before the CTC head."""
    layer_drop: float = 0.1
    """wav2vec 2.0: probability that a layer is left out of a step."""
    decoder_layers: int = 6
    """Layers of the decoder, where the objective has one."""
    decoder_heads: int = 4
    """Attention heads of the decoder."""
    decoder_mlp_width: int = 1024
    """Inner width of its MLPs."""
    decoder_dropout: float = 0.1
    """Dropout of the decoder."""
    language: str | None = None
    """wav2vec 2.0 with an adapter: the code of the language that is learnt (swa), for which all else stays as it is."""
    adapter_width: int = 16
    """Width of its adapters, where the model has none of other languages yet."""
    adapter_start: str | None = None
    """The language whose adapters it starts from. None: from some that change nothing."""
    language_tokens: dict[str, str] = field(default_factory=dict)
    """whisper: languages that it has no token for, and the language whose token each takes over: {"hsb" = "cs"}."""

    @property
    def mlp_dropout(self) -> float:
        """Of wav2vec 2.0, with the default filled in."""
        return self.dropout if self.activation_dropout is None else self.activation_dropout


@dataclass(kw_only=True, slots=True)
class LowRankOptions:
    """whisper: adapters beside the matrices instead of other matrices (LoRA, Hu et al. 2021)."""

    rank: int = 0
    """Width of an adapter; 0: none, the network itself is trained."""
    alpha: float = 64.0
    """What an adapter adds is multiplied with alpha / rank."""
    dropout: float = 0.05
    """Of what an adapter sees, in training."""
    targets: list[str] = field(default_factory=lambda: ["query", "value"])
    """Which matrices have one: query, key, value and out of each attention, up and down of each MLP."""
    parts: list[str] = field(default_factory=lambda: ["encoder", "decoder"])
    """Where: encoder, decoder, or some of their layers, such as decoder.layers.5."""


@dataclass(kw_only=True, slots=True)
class LabelOptions:
    """whisper: what is written for an utterance."""

    task: Literal["transcribe", "translate"] = "transcribe"
    """translate: the manifests' texts are English, whatever is spoken."""
    language: str | None = None
    """Of utterances whose manifest says none."""
    timestamps: float = 0.5
    """Share of utterances that are written with the times of their segments."""
    untimed: Literal["any", "plain"] = "any"
    """Where the manifest has no times. any: the same share is written between two times, and which ones these are is
    left to the model, so that it keeps its sense of time; plain: without times, always."""
    prompts: float = 0.1
    """Share of utterances that are told what was said before: the text before them in the manifest, of the same
    recording or speaker."""


@dataclass(kw_only=True, slots=True)
class ObjectiveOptions:
    """What is minimised."""

    kind: ObjectiveKind = "ctc"
    """ctc; attention: a decoder that writes token by token; hybrid: both at once; whisper: all of a Whisper;
    contrastive: pre-training from audio alone, see pretraining."""
    ctc_weight: float = 0.3
    """hybrid: share of CTC in the loss."""
    label_smoothing: float = 0.1
    """attention, hybrid: probability that the decoder's target gives to all other tokens together."""
    hide_time: float = 0.0
    """ctc with wav2vec 2.0, contrastive: share of frames that hidden spans would cover if none overlapped; 0: none."""
    hide_time_length: int = 10
    """Frames in a hidden span."""


@dataclass(kw_only=True, slots=True)
class PretrainingOptions:
    """wav2vec 2.0 learns from audio alone (objective.kind is contrastive; objective.hide_time are its masks)."""

    crop_seconds: float = 15.6
    """Utterances are cut, anywhere, to one of a few lengths (data.buckets at most); the longest of these."""
    least_seconds: float = 2.0
    """The shortest of these; what is shorter is padded to it."""
    conv_norm: Literal["group", "layer"] = "group"
    """A model from nothing. group: like base, which normalises what its first convolution says; layer: like the large
    models of LV-60k, which normalise after each convolution, and before attention and MLP."""
    code_groups: int = 2
    """Code books of the quantiser."""
    codes: int = 320
    """Entries of each."""
    code_width: int = 256
    """Width of the entries of all groups together."""
    projection_width: int = 256
    """Width in which codes and what the network says are compared."""
    negatives: int = 100
    """Other hidden frames of the recording that the right code is to be told from."""
    diversity_weight: float = 0.1
    """Weight of the penalty for using few codes."""
    feature_penalty: float = 10.0
    """Weight of the mean square of the convolutions' features."""
    feature_gradient: float = 0.1
    """What the gradient of the convolutions is multiplied with."""
    logit_temperature: float = 0.1
    """Cosine similarities are divided by it."""
    temperature: float = 2.0
    """Of the Gumbel softmax in the first step."""
    final_temperature: float = 0.5
    """It does not fall below that."""
    temperature_decay: float = 0.999995
    """It is multiplied with that in each step."""
    least_perplexity: float = 6.0
    """Codes whose perplexity, summed over the groups, is lower have collapsed: a model that uses a handful of codes
    learns nothing. It is at most code_groups × codes."""
    collapse_lines: int = 30
    """Lines of the log in a row with collapsed codes that end the run."""


@dataclass(kw_only=True, slots=True)
class DistillOptions:
    """A student that learns from a teacher what else could have been written (objective.kind is whisper or ctc)."""

    teacher: str | None = None
    """The model that teaches: a Whisper for one, a CTC or hybrid model for the other. None: there is no teacher."""
    decoder_layers: int | None = None
    """whisper: decoder layers of the student, which are the teacher's first, last and some between; its model.init is
    the teacher where none is named. None: all."""
    layers: list[int] = field(default_factory=list)
    """whisper: which of the teacher's decoder layers these are, counted from 0, as many as decoder_layers says. None
    named: the first, the last and some between."""
    label_weight: float = 0.8
    """Weight of the texts in the loss."""
    teacher_weight: float = 1.0
    """Weight of the divergence from the teacher: token by token, or frame by frame."""
    where: Literal["all", "rehearsal"] = "all"
    """whisper: where the divergence counts. rehearsal: in utterances of data.rehearsal alone, so that a model whose
    teacher is the one it starts from keeps what it could do (Li and Hoiem 2016), and learns the rest from its texts."""
    temperature: float = 2.0
    """Both distributions are softened by it: above 1 the unlikely counts more."""
    prefix_noise: float = 0.0
    """whisper: share of the text tokens that the decoder is shown which are others, of the same text or any. The
    teacher is shown the same: a student of few texts then has to listen, and cannot say them by heart."""


@dataclass(kw_only=True, slots=True)
class OptimizerOptions:
    """AdamW and its learning rate."""

    peak_lr: float = 3e-4
    """The highest learning rate."""
    final_lr: float = 0.0
    """The learning rate of the last step, as a share of the highest."""
    warmup_steps: int = 500
    """Steps in which the learning rate grows from nothing, at most a third of all."""
    hold_steps: int = 0
    """Steps at the highest learning rate before it falls."""
    decay: Literal["cosine", "linear"] = "cosine"
    """How it falls."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    """Decay of AdamW's two running means."""
    epsilon: float = 1e-8
    """Keeps AdamW's division finite."""
    weight_decay: float = 0.01
    """Decay of weights; norms, biases, embeddings of positions are spared."""
    clip_norm: float = 1.0
    """Gradients longer than this are shortened to it; 0: never."""
    accumulate: int = 1
    """Batches whose gradients are added up for one step."""
    lr_scales: dict[str, float] = field(default_factory=dict)
    """Learning rate of parts of the network, as a share: {"encoder" = 0.1} for those whose names begin so."""
    freeze: list[str] = field(default_factory=list)
    """Parts that stay as they are: names of parameters that begin so, such as feature_extractor."""
    freeze_steps: dict[str, int] = field(default_factory=dict)
    """Parts that stay as they are for the first so many steps: {"encoder" = 1000}."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay (0.999) and evaluate that. None: no."""


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """How long, how precisely, how often."""

    device: str = "auto"
    """auto, cpu, cuda (AMD too)."""
    epochs: float | None = None
    """How often the corpus is gone through. Give this or steps."""
    steps: int | None = None
    """How many times the weights change."""
    max_minutes: float | None = None
    """End in order, with a result, after so many minutes."""
    precision: Precision = "auto"
    """What products are computed in; auto: bf16, where a GPU lacks it fp16 with loss scaling, fp32 on the CPU."""
    tf32: bool = True
    """Let NVIDIA's GPUs round what is left of fp32 products to TF32."""
    fp8: bool = False
    """Multiply the matrices of the encoder's layers in fp8, on GPUs that can; needs torchao."""
    checkpoint_layers: bool = False
    """Keep only each layer's input and compute the rest again backwards: less memory, a third more time."""
    compile: bool = False
    """Compile each layer for each of the few shapes (torch.compile): slow to start, then faster on GPUs."""
    fused: bool = True
    """wav2vec 2.0 on GPUs: compute by fused kernels, both ways, in place of PyTorch's own operations. Compiled layers
    stay as they are."""
    threads: int | None = None
    """CPU threads of PyTorch."""
    evaluate_every: int = 500
    """Steps between two evaluations on the dev manifests, each of which saves a checkpoint."""
    evaluate_limit: int | None = None
    """Only so many dev utterances."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    sample_texts: int = 4
    """Transcripts of dev utterances written to the log at each evaluation."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better one. None: never."""
    max_bad_steps: int = 20
    """Stop after so many steps in a row with a loss or gradient that is not finite."""
    tensorboard: bool = True
    """Write TensorBoard's files too, where it is installed."""


@dataclass(kw_only=True, slots=True)
class CheckpointOptions:
    """What is kept."""

    every: int | None = None
    """Steps between two checkpoints beside those of evaluations. None: none beside."""
    keep: int = 2
    """The latest checkpoints that are kept."""
    keep_best: int = 3
    """The checkpoints with the lowest dev word error rate that are kept."""
    average: int = 1
    """Average the weights of so many of the best checkpoints; taken as the result if better on dev. 1: no."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """What the result's weights are written in."""


@dataclass(kw_only=True, slots=True)
class ParallelOptions:
    """Several processes, under torchrun."""

    strategy: Strategy = "auto"
    """auto: DDP where there are several processes, one GPU else; ddp: a whole copy each; fsdp: weights, gradients and
    optimiser shared out; deepspeed: ZeRO."""
    shards: int | None = None
    """fsdp: processes that share one copy; several copies then work like DDP. None: all share one."""
    tp: int = 1
    """Tensor parallelism: processes that each have a part of the attention heads and of the MLPs. Within a machine."""
    sp: bool = False
    """tp: share out norms, dropouts and convolutions as well, over time: less memory, the same communication."""
    cp: int = 1
    """Context parallelism: processes that each have a part of the time of every recording, for very long ones."""
    pp: int = 1
    """Pipeline parallelism: stages, each with some of the layers; ctc, attention, hybrid."""
    groups: int | None = None
    """pp: groups of utterances that a batch is cut into, at least as many as stages. None: twice as many."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: 1 shares out the optimiser, 2 gradients too, 3 weights too."""
    offload: bool = False
    """deepspeed: keep the optimiser in the host's memory."""
    timeout_seconds: float = 600.0
    """A process that is not heard of for so long is lost, and the job ends."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """A training run."""

    recipe: str = "ctc"
    """The recipe that these settings began as."""
    output: str = "runs/train"
    """The run's folder: checkpoints/, metrics.jsonl, and model/, the result."""
    seed: int = 0
    """Of everything random."""
    data: DataOptions = field(default_factory=DataOptions)
    labels: LabelOptions = field(default_factory=LabelOptions)
    lora: LowRankOptions = field(default_factory=LowRankOptions)
    distill: DistillOptions = field(default_factory=DistillOptions)
    augment: AugmentOptions = field(default_factory=lambda: AugmentOptions(speeds=(1.0,), gain_probability=0.0))
    masks: MaskOptions = field(default_factory=MaskOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    pretraining: PretrainingOptions = field(default_factory=PretrainingOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output)

    def check(self) -> None:
        """Refuse what makes no sense, before any work is done. Raises UsageError."""
        if not self.data.train:
            raise UsageError("data.train names no manifest: --set data.train=corpus/manifest.jsonl")
        if (self.run.steps is None) == (self.run.epochs is None):
            raise UsageError("give run.steps or run.epochs, one of the two: --set run.epochs=20")
        for place, name, low, high in RANGES:
            value = getattr(getattr(self, place), name)
            for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                if each is not None and not (math.isfinite(each) and low <= each <= high):
                    raise UsageError(f"{place}.{name} is {each}: it must be from {low:g} to {high:g}")
        if len(self.optimizer.betas) != 2:
            raise UsageError(f"optimizer.betas is {self.optimizer.betas}: give two numbers, such as [0.9, 0.98]")
        if self.model.width % max(1, self.model.heads) or not self.model.conv_kernel % 2:
            raise UsageError("model.width must be a multiple of model.heads, and model.conv_kernel odd")
        if self.objective.kind != "whisper" and (self.data.rehearsal or self.lora.rank or self.model.language_tokens):
            raise UsageError("data.rehearsal, lora.rank and model.language_tokens are for `stapes train whisper`")
        if self.objective.kind == "contrastive":
            self._check_pretraining()
        if self.distill.teacher is not None and self.objective.kind not in ("whisper", "ctc"):
            raise UsageError(f"distill.teacher cannot teach {self.objective.kind}: its student is a Whisper, or CTC")
        if self.distill.where == "rehearsal" and not (self.distill.teacher and self.data.rehearsal):
            raise UsageError("distill.where is rehearsal: name distill.teacher and data.rehearsal, or set it to all")
        if self.distill.decoder_layers is not None and self.objective.kind != "whisper":
            raise UsageError("distill.decoder_layers is for a Whisper: set objective.kind=whisper, or leave it out")
        if self.distill.layers and len(self.distill.layers) != self.distill.decoder_layers:
            raise UsageError(f"distill.layers names {len(self.distill.layers)}: set distill.decoder_layers to as many")
        if self.model.language is not None and (self.objective.kind != "ctc" or self.model.init is None):
            raise UsageError("model.language is for an adapter of a wav2vec 2.0 that model.init names, such as MMS")
        if self.checkpoint.average > 1 and not self.data.dev:
            raise UsageError("checkpoint.average compares on dev manifests: give data.dev, or average 1")

    def _check_pretraining(self) -> None:
        options = self.pretraining
        if not self.objective.hide_time:
            raise UsageError("objective.hide_time is 0: pre-training hides frames and guesses them, 0.65 is usual")
        if options.code_width % options.code_groups:
            raise UsageError("pretraining.code_width must be a multiple of pretraining.code_groups")
        if options.least_seconds > options.crop_seconds or options.crop_seconds > self.data.batch_seconds:
            raise UsageError("pretraining.least_seconds, crop_seconds and data.batch_seconds must not get smaller")
        if tuple(self.augment.speeds) != (1.0,):
            raise UsageError("augment.speeds would change the lengths of crops: leave them at 1.0 in pre-training")


def changes(before: TrainConfig, after: TrainConfig) -> list[str]:
    """The settings that differ, as ``section.name``: what a resumed run must not have been given anew."""
    out: list[str] = []

    def walk(a: Any, b: Any, prefix: str) -> None:
        for each in fields(a):
            x, y = getattr(a, each.name), getattr(b, each.name)
            if hasattr(x, "__dataclass_fields__"):
                walk(x, y, f"{prefix}{each.name}.")
            elif x != y:
                out.append(f"{prefix}{each.name}")

    walk(before, after, "")
    return out
