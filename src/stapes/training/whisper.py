"""Whisper in training: the network, its loss, and how it writes down the dev utterances.

The encoder hears what it hears in recognition: 30 s, silence behind, all of its 1500 positions. So all batches have one
shape, but for the length of their texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stapes.audio.features import HOP, WINDOW_SAMPLES, log_mel_spectrogram
from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint
from stapes.checkpoints.load import load_whisper
from stapes.checkpoints.low_rank import base_to_say, save_adapter
from stapes.checkpoints.save import save_huggingface
from stapes.data.batching import IGNORED, Batch
from stapes.data.masking import SpecAugment
from stapes.data.text_rules import normalize_text
from stapes.errors import UsageError
from stapes.models.low_rank import add_low_rank
from stapes.models.whisper import DecoderLayer, EncoderLayer, Whisper
from stapes.training.config import LowRankOptions, TrainConfig
from stapes.training.language_scores import LanguageScores
from stapes.training.metrics import DevScores
from stapes.training.objectives import Evaluated, Losses, Objective, Prepared
from stapes.training.whisper_labels import WhisperLabels

_TARGETS = ("query", "key", "value", "out", "up", "down")

_LONGEST = 4
"""In evaluation a text ends at so many times the tokens of its batch's longest reference: it has become a loop."""

_AT_LEAST = 32
"""Tokens that evaluation lets a text have in any case."""


def build_whisper(checkpoint: WhisperCheckpoint, config: TrainConfig) -> Whisper:
    """The network on the CPU in float32, ready to train. Raises ModelError, UsageError."""
    network = load_whisper(checkpoint, torch.float32, torch.device("cpu"))
    network.float().train().requires_grad_()  # the embedding may have come in the file's own precision
    for layer in network.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        layer.dropout = config.model.dropout
    for layer in network.decoder.layers:
        assert isinstance(layer, DecoderLayer)
        layer.dropout = config.model.decoder_dropout
    if config.lora.rank:
        _adapt(network, config.lora)
    network.encoder.positions.requires_grad_(False)  # a fixed table, which transformers does not train either
    return network


def _adapt(network: Whisper, options: LowRankOptions) -> None:
    unknown = [name for name in options.targets if name not in _TARGETS]
    if unknown or not options.targets:
        raise UsageError(f"lora.targets names {', '.join(unknown) or 'nothing'}: say some of {', '.join(_TARGETS)}")
    for part in options.parts:
        if not any(f"{name}.".startswith(f"{part}.") for name, _ in network.named_modules()):
            raise UsageError(f"lora.parts names {part!r}, which the network has not: say encoder, decoder.layers.5 …")

    def is_target(path: str) -> bool:
        return path.rpartition(".")[2] in options.targets and any(path.startswith(f"{p}.") for p in options.parts)

    if not add_low_rank(network, is_target, options.rank, options.alpha, options.dropout):
        raise UsageError("lora.targets and lora.parts leave no matrix to adapt: name more")


class WhisperObjective(Objective):
    """Cross entropy of all that follows <|startoftranscript|>, with the right text before it (Radford et al. 2022).

    Targets of a batch are the decoder's whole texts, see `whisper_labels`. ``mask`` is SpecAugment, in training only.
    """

    network: Whisper  # pyright: ignore[reportIncompatibleVariableOverride]
    tokenizer: WhisperLabels  # pyright: ignore[reportIncompatibleVariableOverride]
    never: Tensor

    def __init__(
        self,
        network: Whisper,
        labels: WhisperLabels,
        dtype: torch.dtype,
        *,
        label_smoothing: float = 0.0,
        mask: SpecAugment | None = None,
        suppressed: Sequence[int] = (),
    ) -> None:
        super().__init__(network, labels, dtype)  # pyright: ignore[reportArgumentType]
        self.label_smoothing, self.mask = label_smoothing, mask
        # What recognition never writes without times: markers, times, symbols that nobody says.
        tokenizer = labels.tokenizer
        never = torch.zeros(network.config.vocab_size, dtype=torch.bool)
        never[[id for id in suppressed if 0 <= id < len(never)]] = True
        never[[tokenizer.no_speech, tokenizer.sot, tokenizer.sot_prev, tokenizer.sot_lm]] = True
        never[[tokenizer.transcribe, tokenizer.translate, *tokenizer.language_ids.values()]] = True
        never[tokenizer.no_timestamps :] = True
        self.register_buffer("never", never, persistent=False)

    def units(self, batch: Batch) -> float:
        """Tokens that the loss is on."""
        starts = (batch.targets == self.tokenizer.tokenizer.sot).int().argmax(dim=1)
        return float(((batch.target_lengths - 1 - starts) * batch.weights).sum())

    def features(self, prepared: Prepared) -> Tensor:
        """Log-mel spectrograms (batch, bins, frames) of what the encoder hears, masked in training."""
        config = self.network.config
        samples = min(WINDOW_SAMPLES, 2 * config.audio_context * HOP)
        waveforms = prepared.batch.waveforms[:, :samples]
        waveforms = F.pad(waveforms, (0, samples - waveforms.shape[1]))
        with torch.autocast(waveforms.device.type, enabled=False):
            mel = log_mel_spectrogram(waveforms, config.mel_bins)
            if self.mask is not None and self.training:
                real = (prepared.batch.lengths.clamp(max=samples) + HOP - 1) // HOP
                mel = self.mask(mel.transpose(1, 2), real, prepared.batch.keys).transpose(1, 2)
        return mel

    def encode(self, prepared: Prepared) -> Tensor:
        """The encoder's states (batch, 1500, width). To be called within `autocast`, as `logits` is."""
        return self.network.encoder(self.features(prepared))

    def logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """What the decoder expects after each of ``tokens`` (batch, count): (batch, count, vocabulary)."""
        decoder = self.network.decoder
        return decoder.logits(decoder.teacher_forced(tokens, states))

    def texts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the decoder reads, and what it is to write after each: token ids (batch, count), both.

        Of the latter `IGNORED` is on no account, and ids from the vocabulary's size on are times left open.
        """
        labels = self.tokenizer
        whole = batch.targets[:, : self.network.config.text_context]  # what is beyond is padding
        tokens, targets = whole[:, :-1], whole[:, 1:]
        started = (tokens == labels.tokenizer.sot).cumsum(dim=1) > 0
        read = torch.where(tokens >= labels.size, tokens - labels.size, tokens).masked_fill(
            tokens == IGNORED, labels.tokenizer.eot
        )
        return read, targets.masked_fill(~started, IGNORED)

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token (batch, count), float32; 0 where there is none.

        A time left open costs what it costs to write any time at all.
        """
        labels, logits = self.tokenizer, logits.float()
        times = logits[..., labels.tokenizer.timestamp_begin :].logsumexp(-1) if labels.leaves_open else None
        is_open = targets >= labels.size
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            targets.masked_fill(is_open, IGNORED).flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            reduction="none",
        ).view_as(targets)
        return losses if times is None else torch.where(is_open, logits.logsumexp(-1) - times, losses)

    def forward(self, prepared: Prepared) -> Losses:
        return self._losses(prepared)[0]

    def _losses(self, prepared: Prepared) -> tuple[Losses, Tensor]:
        tokens, targets = self.texts(prepared.batch)
        with self.autocast(tokens.device):
            states = self.encode(prepared)
            logits = self.logits(states, tokens)
        rows = self.token_losses(logits, targets).sum(dim=1)
        return Losses((rows * prepared.batch.weights).sum(), rows.detach(), []), states

    def scores(self) -> LanguageScores:
        return LanguageScores(self.tokenizer.languages)

    def judge(self, scores: DevScores, batch: Batch, found: Evaluated) -> list[str]:
        assert isinstance(scores, LanguageScores)
        scores.add_loss(float(found.losses.total), self.units(batch))
        samples = []
        for row in batch.weights.nonzero()[:, 0].tolist():
            language = batch.languages[row]
            # Whisper writes everything: case, punctuation and symbols do not count.
            reference, hypothesis = (
                self.tokenizer.units(normalize_text(text, "basic", language), language)
                for text in (batch.texts[row], self.tokenizer.decode(found.tokens[row]))
            )
            scores.add(language, reference, hypothesis)
            samples.append(f"{batch.ids[row]}: {reference} → {hypothesis}")
        return samples

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Evaluated:
        losses, states = self._losses(prepared)
        tokenizer = self.tokenizer.tokenizer
        said = 3 if tokenizer.is_multilingual else 1  # start, language, task: as the label says
        starts = [row[row.index(tokenizer.sot) :][:said] if row else [tokenizer.sot] * said for row in prepared.targets]
        begin = torch.tensor([[*start, tokenizer.no_timestamps] for start in starts], device=states.device)
        limit = max(_AT_LEAST, _LONGEST * max(map(len, prepared.targets)))
        gathered = [module for module in self.modules() if isinstance(module, FSDPModule)]
        for module in gathered:  # writing goes round the layers' own forward, and not as often in each process
            module.unshard()
        try:
            with self.autocast(states.device):
                written = greedy(self.network, states, begin, tokenizer.eot, limit, self.never)
        finally:
            for module in gathered:
                module.reshard()
        return Evaluated(losses, written)


@torch.no_grad()
def greedy(
    network: Whisper, states: Tensor, starts: Tensor, end: int, limit: int, never: Tensor | None = None
) -> list[list[int]]:
    """The likeliest next token, again and again, for each row; without its start and the end token.

    states: (batch, 1500, width). starts: (batch, count), what each text begins with. never: (vocabulary,), tokens that
    are not written. At most ``limit`` tokens.
    """
    batch, count = starts.shape
    decoder, config, device = network.decoder, network.config, states.device
    memory = decoder.memory(states)
    longest = min(config.text_context, count + limit)
    shape = (batch, config.decoder_heads, longest, config.width // config.decoder_heads)
    cache = [(memory[0].new_zeros(shape), memory[0].new_zeros(shape)) for _ in range(config.decoder_layers)]
    positions = torch.arange(longest, device=device)
    tokens, written, ended = starts, [], torch.zeros(batch, dtype=torch.bool, device=device)
    for first in range(longest - count):
        at = positions[:count] if not first else positions[count + first - 1 : count + first]
        mask = (positions[: int(count + first)][None] <= at[:, None])[None, None]
        out, _ = decoder(tokens, at.expand(batch, -1), cache, memory, mask)
        logits = decoder.logits(out[:, -1])
        if never is not None:
            logits = logits.masked_fill(never, -torch.inf)
        chosen = logits.argmax(dim=-1).masked_fill(ended, end)
        written.append(chosen)
        ended = ended | (chosen == end)
        tokens = chosen[:, None]
        if bool(ended.all()):
            break
    rows = torch.stack(written, dim=1).tolist() if written else [[] for _ in range(batch)]
    return [row[: row.index(end)] if end in row else row for row in rows]


def save_whisper(
    folder: Path,
    checkpoint: WhisperCheckpoint,
    weights: Mapping[str, Tensor],
    labels: WhisperLabels,
    config: TrainConfig,
) -> None:
    """Write what was trained: a model in Hugging Face's layout, or where it was adapted an adapter in peft's.

    checkpoint: what training began from. Raises OutputError.
    """
    settled = replace(checkpoint, tokenizer=labels.file, language_tokens=labels.reused)
    if config.lora.rank:
        base, lora = base_to_say(str(config.model.init)), config.lora
        save_adapter(folder, settled, weights, base=base, alpha=lora.alpha, dropout=lora.dropout)
        return
    order = sorted(weights, key=lambda name: name != EMBEDDING)
    save_huggingface(replace(settled, read=lambda: ((name, weights[name]) for name in order)), folder)


def whisper_layers(network: Whisper) -> list[nn.Module]:
    """The layers that are computed again, compiled and shared out one by one."""
    return [*network.encoder.layers, *network.decoder.layers]
