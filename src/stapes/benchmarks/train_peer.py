"""Hugging Face transformers on the work of ``stapes bench train``: the same weights, batches, masks and optimiser."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stapes.benchmarks.train_setup import OurStep, TrainSettings, new_network, noise_batches
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, save_wav2vec2
from stapes.checkpoints.wav2vec2_pretraining import save_pretraining
from stapes.data.batching import Batch
from stapes.errors import ModelError, UsageError
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.training.objectives import Objective, Wav2Vec2Objective, prepare
from stapes.training.optimizer import is_decayed
from stapes.training.pretraining import ContrastiveObjective


class TransformersStep:
    """Steps of wav2vec 2.0 by transformers, with sdpa attention, under bf16 autocast where that is asked for.

    Hidden frames and negatives are drawn on the device by our code, which is faster than its own on the host; AdamW is
    PyTorch's fused one, gradients are clipped together. Raises UsageError where transformers is missing.
    """

    def __init__(self, ours: OurStep, rows: int) -> None:
        try:
            import transformers
        except ImportError as error:
            raise UsageError("transformers is not installed: pip install 'stapes[peers]'") from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.version: str = transformers.__version__
        self.settings, self.device, self.dtype = ours.settings, ours.device, ours.dtype
        self._objective: Objective = ours.objective
        self.network = _load(transformers, self.settings).to(self.device).train()
        if self.settings.is_frozen:
            self.network.freeze_feature_encoder()
        options = self.settings.run_config.optimizer
        trained = [(name, weight) for name, weight in self.network.named_parameters() if weight.requires_grad]
        groups = [
            {
                "params": [weight for name, weight in trained if is_decayed(name, weight) == decayed],
                "weight_decay": options.weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        betas = (options.betas[0], options.betas[1])
        self._optimizer = torch.optim.AdamW(groups, lr=1e-6, betas=betas, eps=options.epsilon, fused=True)
        self._weights = [weight for _, weight in trained]
        self._clip_norm = options.clip_norm
        self.done = 0
        self.use_batches(rows)

    def use_batches(self, rows: int) -> None:
        """Have batches of so many recordings."""
        self.rows = rows
        self.batches = noise_batches(self.settings, rows, pin=self.device.type == "cuda")

    def step(self) -> Tensor:
        """Make a step. Returns its loss, on the device."""
        torch.manual_seed(self.done)
        self.network.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.batches[self.done % len(self.batches)])
        loss.backward()
        if self._clip_norm:
            torch.nn.utils.clip_grad_norm_(self._weights, self._clip_norm, foreach=True)
        self._optimizer.step()
        self.done += 1
        return loss.detach()

    @torch.no_grad()
    def first_loss(self) -> float:
        """As `OurStep.first_loss`."""
        self.network.eval()
        loss = float(self._loss(self.batches[0], contrastive_alone=True))
        self.network.train()
        return loss

    def _loss(self, batch: Batch, *, contrastive_alone: bool = False) -> Tensor:
        prepared = prepare(batch, self.device)
        waveform = prepared.batch.waveforms
        variance, mean = torch.var_mean(waveform, 1, correction=0, keepdim=True)
        waveform = (waveform - mean) * (variance + 1e-7).rsqrt()
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        if isinstance(self._objective, ContrastiveObjective):
            mask, negatives = self._objective.hide(prepared)
            rows, frames = mask.shape
            negatives = negatives + torch.arange(0, rows * frames, frames, device=self.device)[:, None, None]
            with autocast:
                out = self.network(waveform, mask_time_indices=mask, sampled_negative_indices=negatives)
            return (out.contrastive_loss if contrastive_alone else out.loss) / mask.sum()
        objective = self._objective
        assert isinstance(objective, Wav2Vec2Objective)
        assert objective.hide is not None
        config = objective.network.config
        frames = config.feature_count(waveform.shape[1])
        mask = objective.hide(config.feature_count(prepared.batch.lengths), frames, prepared.batch.keys)
        with autocast:
            hidden = self.network.wav2vec2(waveform, mask_time_indices=mask).last_hidden_state
            logits = self.network.lm_head(self.network.dropout(hidden))
        # As its Wav2Vec2ForCTC has it, which takes no masks.
        log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
        targets = prepared.batch.targets
        with torch.backends.cudnn.flags(enabled=False):
            return F.ctc_loss(
                log_probs,
                targets.flatten(),
                torch.full((len(targets),), frames),
                batch.target_lengths,
                blank=self.network.config.pad_token_id,
                reduction="sum",
            ) / float(batch.target_lengths.sum())


def _load(library: Any, settings: TrainSettings) -> Any:
    network = new_network(settings)
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "model"
        if isinstance(network, Wav2Vec2):
            config = network.config
            checkpoint = Wav2Vec2Checkpoint(
                name=settings.model,
                path=where,
                kind="wav2vec2",
                config=config,
                places=(),
                settings={"mask_time_prob": 0.05, "pad_token_id": 0},  # with none it would have no embedding for them
            )
            save_wav2vec2(checkpoint, where, network)
            opener = library.Wav2Vec2ForCTC
        else:
            save_pretraining(where, network.config, dict(network.named_parameters()))
            opener = library.Wav2Vec2ForPreTraining
        try:
            return opener.from_pretrained(str(where), dtype=torch.float32, attn_implementation="sdpa")
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).strip().split("\n")[0]
            raise ModelError(f"{settings.model}: transformers cannot open the model ({why})") from error
