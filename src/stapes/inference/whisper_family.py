"""Whisper as a `Family`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.errors import UsageError
from stapes.inference.feed import FeedMaker
from stapes.inference.longform import open_recording
from stapes.inference.recording import Model
from stapes.inference.speculative import SpeculativeWhisperEngine
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.whisper import Whisper, WhisperConfig
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import WhisperTokenizer

_CTC_ONLY = {
    "lm": "leave it out, or name a CTC model",
    "lm_weight": "leave it out, or name a CTC model",
    "n_best": "leave it out, or name a CTC model",
}


class WhisperFamily:
    """A Whisper and its engine."""

    replays = False

    def __init__(
        self, name: str, checkpoint: WhisperCheckpoint, tokenizer: WhisperTokenizer, engine: TorchWhisperEngine
    ) -> None:
        self.name, self.config = name, checkpoint.config
        self.tokenizer, self.engine = tokenizer, engine
        self._suppressed = checkpoint.suppress_tokens

    @property
    def parameters(self) -> int:
        return _count(self.config)

    def can_be_told(self, language: str) -> bool:
        if self.tokenizer.is_multilingual:
            try:
                self.tokenizer.language_id(language)
            except UsageError:
                return False
        return True

    def check(self, options: TranscribeOptions) -> TranscribeOptions:
        for option, remedy in _CTC_ONLY.items():
            if getattr(options, option) != getattr(TranscribeOptions(), option):
                raise UsageError(f"--{option.replace('_', '-')} does not work with Whisper ({self.name}): {remedy}")
        if isinstance(self.engine, SpeculativeWhisperEngine) and (options.beam_size > 1 or options.temperature > 0):
            asked = "--beam-size" if options.beam_size > 1 else "--temperature"
            raise UsageError(f"{asked} leaves --draft nothing to do, which drafts greedy texts: leave one of them out")
        language = options.language
        if language is not None:
            language = self.tokenizer.known_code(language)
            self.tokenizer.language_id(language)
        elif not self.tokenizer.is_multilingual:
            language = "en"
        if options.task == "translate":
            if not self.tokenizer.is_multilingual:
                raise UsageError(
                    f"{self.name} knows English only and cannot translate: use base, small, medium or large-v3"
                )
            if self.config.decoder_layers < self.config.encoder_layers:
                raise UsageError(f"{self.name} was not trained to translate: use base, small, medium or large-v3")
        self.suppressed(options)
        return replace(options, language=language)

    def feeds(self, options: TranscribeOptions) -> FeedMaker:
        model = Model(self.tokenizer, self.config.text_context, self.suppressed(options))
        return partial(open_recording, model, options)

    def suppressed(self, options: TranscribeOptions) -> tuple[int, ...]:
        """Tokens that are never written."""
        ids: set[int] = set()
        for token in options.suppressed_ids():
            if token == -1:
                ids.update(self._suppressed if self._suppressed is not None else self.tokenizer.non_speech_tokens())
            elif 0 <= token < self.config.vocab_size:
                ids.add(token)
            else:
                raise UsageError(
                    f"--suppress-tokens has {token}: this model's tokens go up to {self.config.vocab_size - 1}"
                )
        tokenizer = self.tokenizer
        # Never text, whatever the user asks: openai/whisper suppresses these too.
        ids |= {tokenizer.transcribe, tokenizer.translate, tokenizer.sot, tokenizer.sot_prev, tokenizer.sot_lm}
        ids.add(tokenizer.no_speech)
        return tuple(sorted(ids))


@cache  # whoever watches an engine at work asks again and again
def _count(config: WhisperConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Whisper(config).parameters())
