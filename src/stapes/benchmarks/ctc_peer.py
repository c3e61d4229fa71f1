"""Hugging Face transformers on the work of ``stapes bench ctc``: the same weights, recordings and batches."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stapes.benchmarks.ctc_loop import Batch, Loop, greedy_texts
from stapes.benchmarks.ctc_setup import CtcSubject
from stapes.checkpoints.wav2vec2 import save_wav2vec2
from stapes.errors import ModelError, UsageError
from stapes.models.waveform import is_real


class TransformersLoop(Loop):
    """wav2vec 2.0 by transformers: sdpa attention, the likeliest labels found on the device.

    It is driven as ours is, waveforms are normalised on the device, and labels become text by our code, all faster
    than its own. Padded batches get an attention mask, and where the model was published to run without one (group
    norm), none. Raises UsageError where transformers is missing, ModelError where it cannot load the model.
    """

    def __init__(self, subject: CtcSubject) -> None:
        super().__init__(subject.tokenizer, subject.device)
        try:
            import transformers
        except ImportError as error:
            raise UsageError("transformers is not installed: pip install 'stapes[peers]'") from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.version: str = transformers.__version__
        self._normalize, self._masked = subject.checkpoint.normalize, subject.config.conv_norm == "layer"
        self.dtype = subject.dtype
        library: Any = transformers
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder) / "model"
            save_wav2vec2(subject.checkpoint, where, subject.network)
            try:
                self._network = library.AutoModelForCTC.from_pretrained(
                    str(where), dtype=subject.dtype, attn_implementation="sdpa"
                ).to(subject.device)
            except (OSError, ValueError, RuntimeError) as error:
                why = str(error).strip().split("\n")[0]
                raise ModelError(f"{subject.checkpoint.name}: transformers cannot open the model ({why})") from error
        self._network.eval()
        self._config = subject.config

    def enqueue(self, batch: Batch) -> tuple[Tensor, np.ndarray]:
        sizes = np.array([len(recording) for recording in batch])
        row = int(sizes.max())
        waveform = self.upload(batch, row).view(len(batch), row)
        lengths, mask = None, None
        if sizes.min() < row:
            lengths = torch.from_numpy(sizes).to(self.device, non_blocking=True)
            if self._masked:
                mask = is_real(lengths, row)
        if self._normalize:
            waveform = _normalized(waveform, lengths)
        logits = self._network(waveform.to(self.dtype), attention_mask=mask).logits
        return self.to_host(logits.argmax(-1).to(torch.int32)), sizes

    def finish(self, work: tuple[Tensor, np.ndarray]) -> list[str]:
        labels, sizes = work
        rows, frames = labels.shape
        counts = self._config.feature_count(torch.from_numpy(sizes)).numpy()
        return greedy_texts(labels.numpy().reshape(-1), np.arange(rows) * frames, counts, self.tokenizer)


def _normalized(waveform: Tensor, lengths: Tensor | None) -> Tensor:
    """As its feature extractor does on the host."""
    if lengths is None:
        variance, mean = torch.var_mean(waveform, 1, correction=0, keepdim=True)
        return (waveform - mean) * (variance + 1e-7).rsqrt()
    real, count = is_real(lengths, waveform.shape[1]), lengths[:, None]
    centred = (waveform - waveform.sum(1, keepdim=True) / count) * real
    return centred * (centred.square().sum(1, keepdim=True) / count + 1e-7).rsqrt()
