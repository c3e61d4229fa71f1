"""Hugging Face transformers on the work of ``stapes bench mlperf``: the same windows, sizes and number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stapes.audio.features import SAMPLE_RATE, log_mel_spectrogram, pad_windows
from stapes.benchmarks.engine_loop import Written
from stapes.benchmarks.random_weights import text_only
from stapes.devices.backend import Device
from stapes.errors import ModelError, UsageError
from stapes.evaluation.peers import huggingface_folder
from stapes.models.whisper import WhisperConfig
from stapes.text.tokenizers import WhisperTokenizer


class TransformersPeer:
    """Whisper by transformers: its features on the device, sdpa attention, greedy, batches one after the other.

    Texts are put together by our tokenizer, which is faster than its own. model: a name or folder with weights; None
    makes random ones. Raises UsageError where transformers is missing, ModelError where it cannot load the model.
    """

    def __init__(
        self,
        model: str | None,
        config: WhisperConfig,
        tokenizer: WhisperTokenizer,
        device: Device,
        dtype: torch.dtype,
        *,
        language: str,
        model_dir: str | None = None,
    ) -> None:
        try:
            import transformers
        except ImportError as error:
            raise UsageError("transformers is not installed: pip install 'stapes[peers]'") from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.version: str = transformers.__version__
        self.device, self.dtype = device.torch, dtype
        self._tokenizer, self._mel_bins = tokenizer, config.mel_bins
        library: Any = transformers
        if model is None:
            self._network = _random(library, config, tokenizer, device.torch, dtype)
        else:
            folder = huggingface_folder(model, model_dir)
            try:
                self._network = library.WhisperForConditionalGeneration.from_pretrained(
                    str(folder or model), dtype=dtype, attn_implementation="sdpa"
                ).to(device.torch)
            except (OSError, ValueError, RuntimeError) as error:
                why = str(error).strip().split("\n")[0]
                raise ModelError(f"{model}: transformers cannot open the model ({why})") from error
        self._network.eval()
        self._arguments: dict[str, Any] = {"num_beams": 1, "do_sample": False}
        if tokenizer.is_multilingual:
            self._arguments |= {"language": language, "task": "transcribe"}
        extractor = library.WhisperFeatureExtractor(feature_size=config.mel_bins)
        self._features, self.features_by = self._choose_features(extractor)

    def _choose_features(self, extractor: Any) -> tuple[Callable[[Sequence[np.ndarray]], torch.Tensor], str]:
        """Its own features, computed on the device; ours where its version cannot."""

        def theirs(windows: Sequence[np.ndarray]) -> torch.Tensor:
            found = extractor(list(windows), sampling_rate=SAMPLE_RATE, return_tensors="pt", device=str(self.device))
            return found["input_features"]

        try:
            theirs([np.zeros(SAMPLE_RATE, dtype=np.float32)])
        except (TypeError, ValueError, RuntimeError):
            return lambda windows: log_mel_spectrogram(pad_windows(windows, self.device), self._mel_bins), "stapes"
        return theirs, "itself"

    def transcribe(self, windows: Sequence[np.ndarray], batch: int, tokens: int, *, exact: bool) -> list[Written]:
        """Windows → texts, ``batch`` at a time. exact: write just so many tokens in each window, else at most."""
        out: list[Written] = []
        for start in range(0, len(windows), batch):
            out += self._batch(windows[start : start + batch], tokens, exact)
        return out

    @torch.inference_mode()
    def _batch(self, windows: Sequence[np.ndarray], tokens: int, exact: bool) -> list[Written]:
        features = self._features(windows).to(self.device, self.dtype)
        least = {"min_new_tokens": tokens} if exact else {}
        rows = self._network.generate(features, max_new_tokens=tokens, **least, **self._arguments).tolist()
        end = self._tokenizer.eot
        out = []
        for row in rows:
            # The prompt is in front, or is not, by version; all of it is above the text's ids, as the end is.
            text = [token for token in row if token < end]
            out.append(Written(self._tokenizer.decode(text).strip(), len(text)))
        return out

    def best_batch(
        self,
        windows: Sequence[np.ndarray],
        sizes: Sequence[int],
        tokens: int,
        *,
        exact: bool,
        make_room: Callable[[], bool],
        log: Callable[[str], None],
    ) -> int:
        """The batch size that gives the most windows a second: each is tried on one batch, after a first one.

        Sizes beyond the number of windows are passed over. make_room: called when the memory does not suffice, says
        whether there is more now. Raises ModelError if no size fits.
        """
        rates: dict[int, float] = {}
        waiting = sorted({min(size, len(windows)) for size in sizes})
        while waiting:
            size = waiting[0]
            part = windows[:size]
            try:
                self.transcribe(part, size, tokens, exact=exact)
                start = time.perf_counter()
                self.transcribe(part, size, tokens, exact=exact)
            except torch.OutOfMemoryError:
                log(f"transformers, batch {size}: out of memory")
            else:
                rates[size] = size / (time.perf_counter() - start)
                log(f"transformers, batch {size}: {rates[size]:.2f} windows/s")
                waiting.pop(0)
                continue
            self.free()  # here, where the error and what it holds is gone
            if not make_room():
                break
        if not rates:
            raise ModelError("transformers: no batch size fits into the memory; give smaller ones: --peer-batches 1,4")
        return max(rates, key=lambda size: rates[size])

    def free(self) -> None:
        """Give back memory that is not in use."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _random(
    library: Any, config: WhisperConfig, tokenizer: WhisperTokenizer, device: torch.device, dtype: torch.dtype
) -> Any:
    """A network of the sizes of ``config``, with its own random weights, that may write text only."""
    sizes = library.WhisperConfig(
        d_model=config.width,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.encoder_heads,
        decoder_attention_heads=config.decoder_heads,
        encoder_ffn_dim=4 * config.width,
        decoder_ffn_dim=4 * config.width,
        num_mel_bins=config.mel_bins,
        vocab_size=config.vocab_size,
        max_source_positions=config.audio_context,
        max_target_positions=config.text_context,
        bos_token_id=tokenizer.eot,
        eos_token_id=tokenizer.eot,
        pad_token_id=tokenizer.eot,
        decoder_start_token_id=tokenizer.sot,
        begin_suppress_tokens=None,
    )
    with device:
        network = library.AutoModelForSpeechSeq2Seq.from_config(sizes, dtype=dtype, attn_implementation="sdpa")
    settings: dict[str, Any] = {
        "bos_token_id": tokenizer.eot,
        "eos_token_id": tokenizer.eot,
        "pad_token_id": tokenizer.eot,
        "decoder_start_token_id": tokenizer.sot,
        "no_timestamps_token_id": tokenizer.no_timestamps,
        "is_multilingual": tokenizer.is_multilingual,
        "suppress_tokens": list(text_only(tokenizer, config.vocab_size)),
        "max_length": config.text_context,
    }
    if tokenizer.is_multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": token for code, token in tokenizer.language_ids.items()}
        settings["task_to_id"] = {"transcribe": tokenizer.transcribe, "translate": tokenizer.translate}
    network.generation_config = library.GenerationConfig(**settings)
    return network.to(device)
