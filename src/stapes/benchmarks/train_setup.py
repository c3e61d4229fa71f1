"""What `stapes bench train` is asked to do: the network, its objective and optimiser, and batches of noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import ascii_uppercase
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stapes.benchmarks.records import Weights
from stapes.data.batching import Batch
from stapes.data.masking import span_mask
from stapes.devices.backend import Device
from stapes.errors import UsageError
from stapes.models.wav2vec2 import BASE, LARGE, SAMPLE_RATE, Wav2Vec2, Wav2Vec2Config, initialize
from stapes.models.wav2vec2_fused import can_fuse, fuse
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining, Wav2Vec2PretrainingConfig, initialize_pretraining
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.config import RunOptions, TrainConfig
from stapes.training.networks import layers_of
from stapes.training.objectives import Objective, Wav2Vec2Objective, prepare
from stapes.training.optimizer import Optimizer, freeze
from stapes.training.parallel import Processes, divide
from stapes.training.pretraining import ContrastiveObjective
from stapes.training.recipes import recipe

PUBLISHED = {"wav2vec2-base": BASE, "wav2vec2-large": LARGE}
"""Sizes that can be trained."""

Task = Literal["ctc", "pretrain"]

_RECIPES = {
    ("ctc", "wav2vec2-base"): "wav2vec2",
    ("ctc", "wav2vec2-large"): "wav2vec2",
    ("pretrain", "wav2vec2-base"): "pretrain",
    ("pretrain", "wav2vec2-large"): "pretrain_large",
}
_LETTERS = ("<pad>", "<s>", "</s>", "<unk>", "|", *ascii_uppercase, "'")
_LETTERS_A_SECOND = 13.0
"""Of read speech."""

_BATCHES = 4
"""Different ones, which come in turn."""

_MANY_STEPS = 1_000_000
"""The schedule of the learning rate is at its beginning."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What to measure."""

    task: Task
    model: str
    device: str = "auto"
    precision: str = "auto"
    batch: int = 32
    seconds: float = 15.0
    freeze_front_end: bool = True
    """Only of CTC: nothing in pre-training is frozen."""
    fused: bool = True
    """Whether fused kernels compute our network, where they can."""
    compile: bool = False
    dropout: float | None = None
    layer_drop: float | None = None
    """Both as the recipe has them where None."""
    steps: int | None = None
    peer: str | None = None
    peer_batches: tuple[int, ...] = ()
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.peer not in (None, "transformers"):
            raise UsageError(f"--peer {self.peer}: only transformers can be measured beside this")
        if self.model not in PUBLISHED:
            raise UsageError(f"--random-weights is {self.model!r}: choose from {', '.join(PUBLISHED)}")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"--precision is {self.precision}: training is measured in fp32 or bf16")
        if not 0.1 <= self.seconds <= 60:
            raise UsageError(f"--seconds is {self.seconds:g}: give 0.1 to 60")
        for option, value, most in (
            ("--batch", self.batch, 4096),
            ("--steps", self.steps, 100_000),
            *(("--peer-batches", each, 4096) for each in self.peer_batches),
        ):
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{option} is {value}: give 1 to {most}")
        for option, share in (("--dropout", self.dropout), ("--layer-drop", self.layer_drop)):
            if share is not None and not 0 <= share < 1:
                raise UsageError(f"{option} is {share:g}: give 0 to 0.95")

    @property
    def is_frozen(self) -> bool:
        """Whether the convolutions stay as they are."""
        return self.freeze_front_end and self.task == "ctc"

    @property
    def run_config(self) -> TrainConfig:
        """The recipe of the task, with what is asked for here."""
        config = recipe(_RECIPES[self.task, self.model])
        if self.dropout is not None:
            config.model.dropout = config.model.head_dropout = config.model.activation_dropout = self.dropout
        if self.layer_drop is not None:
            config.model.layer_drop = self.layer_drop
        config.optimizer.freeze = ["feature_extractor"] if self.is_frozen else []
        config.optimizer.freeze_steps = {}
        return config

    @property
    def network_config(self) -> Wav2Vec2Config:
        """Sizes and dropouts, as the recipe has them."""
        is_ctc, options = self.task == "ctc", self.run_config.model
        rate = options.dropout
        return replace(
            PUBLISHED[self.model],
            vocab_size=len(_LETTERS) if is_ctc else None,
            hidden_dropout=rate,
            activation_dropout=options.mlp_dropout if is_ctc else 0.0,
            attention_dropout=rate,
            projection_dropout=0.0 if is_ctc else rate,
            head_dropout=options.head_dropout,
            layer_drop=options.layer_drop,
        )


def new_network(settings: TrainSettings) -> Wav2Vec2 | Wav2Vec2Pretraining:
    """The network with the weights that training from nothing starts with, on the CPU; always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if settings.task == "ctc":
            network = Wav2Vec2(settings.network_config)
            initialize(network)
            return network.train()
        options = settings.run_config.pretraining
        sizes = Wav2Vec2PretrainingConfig(
            settings.network_config,
            code_groups=options.code_groups,
            codes=options.codes,
            code_width=options.code_width,
            projection_width=options.projection_width,
            feature_dropout=settings.run_config.model.dropout,
            logit_temperature=options.logit_temperature,
        )
        pretraining = Wav2Vec2Pretraining(sizes)
        initialize_pretraining(pretraining)
        return pretraining.train()


def describe(settings: TrainSettings) -> Weights:
    """Whose weights are trained."""
    with torch.device("meta"):
        network = Wav2Vec2(settings.network_config)
    return Weights(
        name=settings.model, kind="random", parameters=sum(weight.numel() for weight in network.parameters())
    )


def noise_batches(settings: TrainSettings, rows: int, *, pin: bool) -> list[Batch]:
    """Batches of ``rows`` recordings of one length, on the host, with texts as long as speech has them.

    The recordings are the same, in the same order, however many a batch has.
    """
    samples, letters = round(settings.seconds * SAMPLE_RATE), max(1, round(settings.seconds * _LETTERS_A_SECOND))
    sound = np.random.default_rng(0).standard_normal(samples + 100_000, dtype=np.float32) * np.float32(0.05)
    batches = []
    for number in range(_BATCHES):
        keys = np.arange(number * rows, (number + 1) * rows)
        starts = keys * 7919 % 100_000
        targets = np.stack([np.random.default_rng(int(key)).integers(4, len(_LETTERS), letters) for key in keys])
        batch = Batch(
            waveforms=torch.from_numpy(np.stack([sound[start : start + samples] for start in starts])),
            lengths=torch.full((rows,), samples),
            targets=torch.from_numpy(targets),
            target_lengths=torch.full((rows,), letters),
            weights=torch.ones(rows),
            keys=torch.from_numpy(keys * 1_000_003 + 17),
            rehearsed=torch.zeros(rows, dtype=torch.bool),
            ids=tuple(map(str, keys)),
            texts=("",) * rows,
            speakers=(None,) * rows,
            languages=(None,) * rows,
            samples=samples,
            epoch=0,
            bucket=0,
            ends_step=True,
            ends_epoch=False,
            skipped=(),
            state={},
        )
        batches.append(batch.pin_memory() if pin else batch)
    return batches


@dataclass
class OurStep:
    """The objective and the optimiser that `stapes train` has, and one step of it after the other."""

    settings: TrainSettings
    objective: Objective
    optimizer: Optimizer
    batches: Sequence[Batch]
    device: torch.device
    dtype: torch.dtype
    done: int = field(default=0)

    @property
    def network(self) -> Wav2Vec2 | Wav2Vec2Pretraining:
        """What is trained."""
        network = self.objective.network
        assert isinstance(network, Wav2Vec2 | Wav2Vec2Pretraining)
        return network

    def step(self) -> Tensor:
        """Make a step as the trainer does. Returns its loss, on the device."""
        batch = self.batches[self.done % len(self.batches)]
        torch.manual_seed(self.done)
        self.objective.train().at_step(self.done)
        self.optimizer.zero_grad()
        scale = 1 / self.objective.units(batch)
        loss = self.objective(prepare(batch, self.device)).total * scale
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.done += 1
        return loss.detach()

    def first_loss(self) -> float:
        """Of the first batch with its masks, before anything is learnt, and nothing dropped.

        In pre-training the contrastive loss alone.
        """
        self.objective.train()
        self.network.eval()
        batch = self.batches[0]
        with torch.no_grad():
            losses = self.objective(prepare(batch, self.device))
        self.objective.train()
        if self.settings.task == "ctc":
            return float(losses.total) / self.objective.units(batch)
        hidden, contrastive = losses.figures[:2]
        return float(contrastive / hidden)


def open_step(settings: TrainSettings, where: Device) -> OurStep:
    """The network on the device, ready to be trained."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    is_half = settings.precision == "bf16" or (settings.precision == "auto" and where.backend != "cpu")
    dtype = torch.bfloat16 if is_half else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    config, network = settings.run_config, new_network(settings)
    freeze(network, config.optimizer)
    hiding = config.objective
    if isinstance(network, Wav2Vec2):
        tokenizer = CTCTokenizer({token: id for id, token in enumerate(_LETTERS)})
        hide = partial(span_mask, probability=hiding.hide_time, length=hiding.hide_time_length)
        objective: Objective = Wav2Vec2Objective(network, tokenizer, dtype, hide=hide)
    else:
        objective = ContrastiveObjective(network, dtype, config.pretraining, hiding)
    objective.to(where.torch)
    if settings.fused and can_fuse(where.torch):
        fuse(network.feature_extractor, network.encoder, layers=not settings.compile)
    divide(objective, layers_of(network), Processes(0, 1, where), RunOptions(compile=settings.compile))
    optimizer = Optimizer(network, config.optimizer, _MANY_STEPS)
    batches = noise_batches(settings, settings.batch, pin=where.backend != "cpu")
    return OurStep(settings, objective, optimizer, batches, where.torch, dtype)
